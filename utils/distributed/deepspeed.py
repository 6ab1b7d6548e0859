"""DeepSpeed's ZeRO, where `accelerate launch` asks for it: what its engine must be told, and parameters held in parts.

deepspeed is imported only where it is used; Accelerate needs transformers beside it, at every stage.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from utils.distributed.ranks import place
from utils.errors import UserError
from utils.training.optimizer import parameter_groups

PACKAGES = ("deepspeed", "transformers")


def wanted() -> bool:
    """Does the launcher ask for DeepSpeed?"""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def absent_packages() -> list[str]:
    """What of `PACKAGES` is not installed."""
    return [package for package in PACKAGES if importlib.util.find_spec(package) is None]


def refuse_comm_hook(comm_hook: str) -> None:
    """Raises `UserError` where DDP's compression is asked for under DeepSpeed."""
    if comm_hook and wanted():
        raise UserError(
            f"--comm-hook {comm_hook} goes with DDP, and DeepSpeed sends gradients in its own way; "
            "leave it out, or take a launch file without DeepSpeed"
        )


def prepare_environment(on_cpu: bool, precision: str | None) -> str:
    """Before the Accelerator is made. Returns the precision of the engine's autocast: no or bf16.

    Raises `UserError` for absent packages, and for fp16: the engine's autocast has no loss scaling.
    """
    if absent := absent_packages():
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


def configure(plugin: Any, batch_size: int, accumulation: int, clip: float) -> None:
    """Tell the engine what it does not take from the loop: a process's share of the batch, batches per optimizer step,
    and the clipping."""
    plugin.deepspeed_config.update(
        {
            "gradient_accumulation_steps": accumulation,
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_clipping": clip,
            "zero_force_ds_cpu_optimizer": False,  # offloaded or not, the same optimizer takes the same steps
        }
    )


def optimizer_state(optimizer: Any, model: nn.Module) -> dict[int, dict[str, Any]]:
    """What the optimizer keeps of each parameter, whole, numbered as torch's `Optimizer.state_dict` does.

    `optimizer` as Accelerate has prepared it, for the three groups of `model`. All processes must come together.
    """
    if not wanted():
        return optimizer.state_dict()["state"]
    from deepspeed.utils import safe_get_full_optimizer_state

    flat_states = _flat_states(optimizer)
    if not flat_states:
        return {}
    parts, common = _split(next(iter(flat_states.values())))
    _link(optimizer)
    found: dict[int, dict[str, Any]] = {}
    for number, parameter in enumerate(_numbered(model)):
        if parameter.requires_grad:
            whole_parts = {name: safe_get_full_optimizer_state(parameter, name).cpu() for name in parts}
            found[number] = {**whole_parts, **common}
    return found


def load_optimizer_state(optimizer: Any, model: nn.Module, saved: Mapping[int, Mapping[str, Any]]) -> None:
    """Give the optimizer what `optimizer_state` found, whoever saved it: another stage, or DDP."""
    if not saved:
        return
    if not wanted():
        groups = optimizer.state_dict()["param_groups"]
        parameters = dict(enumerate(_numbered(model)))
        state = {number: _laid_out(kept, parameters[number]) for number, kept in saved.items()}
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        return
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    parts, common = _split(next(iter(saved.values())))
    zero = optimizer.optimizer
    for flat in _flat_parameters(zero):
        own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in common.items()}
        zero.optimizer.state[flat] = {**{name: torch.zeros_like(flat) for name in parts}, **own}
    _link(optimizer)
    for number, parameter in enumerate(_numbered(model)):
        for name in parts if number in saved else ():
            value = saved[number][name].to(torch.float32)
            if hasattr(parameter, "ds_id"):
                # A part is as long on every process, so the last one may be longer than what is left.
                length, rank = parameter.ds_tensor.numel(), place().rank  # type: ignore[attr-defined]
                filled = nn.functional.pad(value.flatten(), (0, length * place().processes - value.numel()))
                safe_set_local_optimizer_state(parameter, filled[rank * length : (rank + 1) * length], name)
            else:
                safe_set_full_optimizer_state(parameter, value, name)


def _laid_out(kept: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """What is as large as the parameter in its memory layout: the fused optimizers go through both as they lie there,
    without a look."""
    return {
        name: torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for name, value in kept.items()
    }


def _numbered(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for group in parameter_groups(model, 0.0) for parameter in group["params"]]


def _flat_parameters(zero: Any) -> list[Tensor]:
    """What the engine's inner optimizer steps: the flat parts of this process."""
    return (
        zero.fp32_partitioned_groups_flat
        if hasattr(zero, "fp32_partitioned_groups_flat")
        else (zero.single_partition_of_fp32_groups)
    )


def _flat_states(optimizer: Any) -> dict[Tensor, dict[str, Any]]:
    return optimizer.optimizer.optimizer.state


def _split(state: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Names of what is as long as the parameters, and what is one value for all, such as Adam's step."""
    parts = [name for name, value in state.items() if isinstance(value, Tensor) and value.dim()]
    return parts, {name: value for name, value in state.items() if name not in parts}


def _link(optimizer: Any) -> None:
    """Stages 1 and 2 tell a parameter only in the first step which part of the flat state is its own, and not each."""
    zero = optimizer.optimizer
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return
    for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        for parameter in parameters:
            if parameter._hp_mapping is not None and flat in zero.optimizer.state:
                parameter._hp_mapping.set_optim_state_fragment(flat, zero.optimizer.state[flat])


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
