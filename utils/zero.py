"""DeepSpeed's ZeRO, where `accelerate launch` asks for it: what its engine must be told, and parameters held in parts.

deepspeed is imported only where it is used; Accelerate needs transformers beside it, at every stage.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from utils.errors import UserError

PACKAGES = ("deepspeed", "transformers")


def wanted() -> bool:
    """Does the launcher ask for DeepSpeed?"""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def refuse_comm_hook(comm_hook: str) -> None:
    """Raises `UserError` where DDP's compression is asked for under DeepSpeed."""
    if comm_hook and wanted():
        raise UserError(
            f"--comm-hook {comm_hook} goes with DDP, and DeepSpeed sends gradients in its own way; "
            "leave it out, or take a launch file without DeepSpeed"
        )


def prepare_environment(on_cpu: bool, precision: str | None, accumulation: int) -> str:
    """Before the Accelerator is made. Returns the precision of the engine's autocast: no or bf16.

    Raises `UserError` for absent packages, and for fp16: the engine's autocast has no loss scaling.
    """
    absent = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if absent:
        raise UserError(
            f"the launch file asks for DeepSpeed, and {' and '.join(absent)} cannot be imported; "
            "pip install -r requirements-deepspeed.txt, or take another file of accelerate_configs"
        )
    precision = precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16"):
        raise UserError(f"mixed precision {precision} does not go with DeepSpeed here; take bf16 or no")
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # Accelerate would make bf16 of the parameters, BatchNorm's included; the engine's autocast leaves them in fp32.
    os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(accumulation)  # stronger than what the code says
    from deepspeed.utils import logger

    for talkative in (logger, logging.getLogger("torch.utils.cpp_extension")):
        talkative.setLevel(logging.ERROR)
    return precision


def autocast(plugin: Any, precision: str) -> None:
    """Let the engine run the model in bf16 where `precision` says so; parameters, buffers and norms stay in fp32."""
    if precision == "bf16":
        plugin.deepspeed_config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}


def summary(plugin: Any) -> tuple[int, str]:
    """The engine's stage and the precision of its autocast."""
    precision = "bf16" if plugin.deepspeed_config.get("torch_autocast") else "no"
    return plugin.deepspeed_config["zero_optimization"]["stage"], precision


def configure(plugin: Any, batch_size: int, clip: float) -> None:
    """Tell the engine what it does not take from the loop: a process's share of the batch, and the clipping."""
    plugin.deepspeed_config.update(
        {
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_clipping": clip,
            "zero_force_ds_cpu_optimizer": False,  # offloaded or not, the same optimizer takes the same steps
        }
    )


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Within, the parameters are there in full, although ZeRO-3 leaves a part of each on every process.

    All processes must come here together.
    """
    parts = [parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")]
    if not parts:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parts):
        yield
