"""DeepSpeed's ZeRO, if `accelerate launch` requests it: the engine's settings, partitioned parameters and states.

The package deepspeed is imported only if it is used; Accelerate then needs transformers too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import metadata
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import compare_versions
from torch import Tensor, nn

from utils.distributed.ranks import ranks
from utils.errors import UserError

FLOOR = "0.19.8"  # as in requirements-deepspeed.txt, which gives the reason


def is_requested() -> bool:
    """Return whether the launcher requests DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def prepare_environment(on_cpu: bool) -> None:
    """Prepare the environment for an Accelerator with DeepSpeed. Raises `UserError` for a version before `FLOOR`."""
    if compare_versions("deepspeed", "<", FLOOR):
        raise UserError(
            f"DeepSpeed {metadata.version('deepspeed')} is installed, but versions before {FLOOR} train or save wrong "
            f"weights without an error; pip install deepspeed=={FLOOR}"
        )
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    import deepspeed

    if on_cpu:  # else DeepSpeed compiles an all-reduce for inference, in one to two minutes
        deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    deepspeed.utils.logger.setLevel(logging.ERROR)


def configure(accelerator: Accelerator, batch_size: int, clip: float, precision: str) -> None:
    """Set the engine's batch size, batches per step, clipping, and autocast, which leaves parameters in fp32."""
    accelerator.state.deepspeed_plugin.deepspeed_config.update(
        {
            "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
            "train_micro_batch_size_per_gpu": batch_size // accelerator.num_processes,
            "gradient_clipping": clip,
            "zero_force_ds_cpu_optimizer": False,  # the same optimizer and steps with offload and without
            "torch_autocast": {"enabled": precision == "bf16", "dtype": "bfloat16"},
        }
    )


def optimizer_state(optimizer: Any, parameters: Sequence[nn.Parameter]) -> dict[int, dict[str, Any]]:
    """Return the unpartitioned state of each parameter, by its number in the groups. All must call this together."""
    if not is_requested():
        return optimizer.state_dict()["state"]
    from deepspeed.utils import safe_get_full_optimizer_state

    flat_states = optimizer.optimizer.optimizer.state  # state of torch's optimizer inside DeepSpeed's
    if not flat_states:
        return {}
    parts, common = _split(next(iter(flat_states.values())))
    _link(optimizer)
    return {
        number: {**{name: safe_get_full_optimizer_state(parameter, name).cpu() for name in parts}, **common}
        for number, parameter in enumerate(parameters)
        if parameter.requires_grad
    }


def load_optimizer_state(
    optimizer: Any, parameters: Sequence[nn.Parameter], saved: Mapping[int, Mapping[str, Any]]
) -> None:
    """Load the result of `optimizer_state`, saved with DDP or with any stage of ZeRO."""
    if not saved:
        return
    if not is_requested():
        state = {number: dict(values) for number, values in saved.items()}
        for number, values in saved.items():
            parameter = parameters[number]
            for name, value in values.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    tensor = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                    state[number][name] = tensor.copy_(value)  # in its memory layout: fused optimizers require it
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    parts, common = _split(next(iter(saved.values())))
    zero = optimizer.optimizer
    at_stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
    for flat in zero.fp32_partitioned_groups_flat if at_stage3 else zero.single_partition_of_fp32_groups:
        copies = {name: value.clone() if isinstance(value, Tensor) else value for name, value in common.items()}
        zero.optimizer.state[flat] = {**{name: torch.zeros_like(flat) for name in parts}, **copies}
    _link(optimizer)
    for number, parameter in enumerate(parameters):
        for name in parts if number in saved else ():
            value = saved[number][name].to(torch.float32)
            if hasattr(parameter, "ds_id"):
                # Parts have equal lengths, so the last part may extend beyond the end.
                length, rank = parameter.ds_tensor.numel(), ranks().rank  # type: ignore[attr-defined]
                filled = nn.functional.pad(value.flatten(), (0, length * ranks().world_size - value.numel()))
                safe_set_local_optimizer_state(parameter, filled[rank * length : (rank + 1) * length], name)
            else:
                safe_set_full_optimizer_state(parameter, value, name)


def _split(state: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the values per parameter element, and the other values, such as Adam's step."""
    parts = [name for name, value in state.items() if isinstance(value, Tensor) and value.dim()]
    return parts, {name: value for name, value in state.items() if name not in parts}


def _link(optimizer: Any) -> None:
    """Link each parameter to its part of the flat state: ZeRO-1 and 2 do so in the first step, not for all."""
    zero = optimizer.optimizer
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def gathered_parameters(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Gather those parameters that ZeRO-3 partitions over the processes. All processes must call this together."""
    if not (parts := [parameter for parameter in parameters if hasattr(parameter, "ds_id")]):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parts)
