"""Compress gradients for slow networks: DDP's communication hooks by name. Called by prepare and accelerator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

HALF_PRECISION_HOOKS = {"fp16": fp16_compress_hook, "bf16": bf16_compress_hook}
HOOKS = (*HALF_PRECISION_HOOKS, "powersgd")
# PowerSGD sends two messages in turn. Over gloo those of two buckets may be mixed up, so there is one bucket.
BUCKET_MB = {"powersgd": 2**14}
DDP_BUCKET_MB = 25  # DDP's default
POWERSGD_RANK = 2  # of PowerSGD's approximation of each gradient matrix


class CompressionMemory:
    """What a communication hook remembers from step to step: nothing without a hook, and of fp16 and bf16."""

    def __bool__(self) -> bool:
        return False

    def restart(self) -> None:
        """Forget the steps so far."""

    def clear(self) -> None:
        """Forget residuals and factors. After gradients that were not finite no later step would be finite."""

    def state(self) -> dict[str, Any]:
        """Return the memory of this process as tensors and plain values under one key, {} if there is none."""
        return {}

    def load_state(self, own: Mapping[str, Any] | None, of_main: Mapping[str, Any]) -> list[str]:
        """Load what `state` returned; return warnings. own: this process's share of the saved state, None if another
        number of processes has saved it: then residuals and factors start empty. of_main: the main process's share.
        """
        return []


class PowerSGDMemory(CompressionMemory):
    """By bucket the residual of this process's gradients (flat, of all parameters) and the two low-rank factors, and
    for all processes alike the number of steps and the generator of new factors.
    """

    def __init__(self, state: PowerSGDState, device: torch.device) -> None:
        self._state, self._device = state, device
        self._tensors: dict[str, dict[int, torch.Tensor]] = {
            "residuals": state.error_dict,
            "left": state.p_memory_dict,
            "right": state.q_memory_dict,
        }

    def __bool__(self) -> bool:
        return True

    def restart(self) -> None:
        self._state.iter = 0
        self.clear()

    def clear(self) -> None:
        for tensors in self._tensors.values():
            tensors.clear()

    def state(self) -> dict[str, Any]:
        drawn = self._state.rng.get_state(legacy=False)["state"]
        tensors = {name: {index: x.cpu() for index, x in part.items()} for name, part in self._tensors.items()}
        generator = {"key": torch.from_numpy(drawn["key"].astype(np.int64)), "pos": drawn["pos"]}
        return {"powersgd": {"steps": self._state.iter, "generator": generator, **tensors}}

    def load_state(self, own: Mapping[str, Any] | None, of_main: Mapping[str, Any]) -> list[str]:
        self.clear()
        if saved := of_main.get("powersgd"):
            self._state.iter = saved["steps"]
            key, position = saved["generator"]["key"].numpy().astype(np.uint32), saved["generator"]["pos"]
            drawn = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
            self._state.rng.set_state({**drawn, "has_gauss": 0, "gauss": 0.0})
        if own is None or "powersgd" not in own:
            return [
                "warning: the error memory of --comm-hook powersgd starts empty, because the state was saved "
                + ("by a run without one" if not saved else "on another number of processes")
            ]
        for name, tensors in self._tensors.items():
            tensors.update({index: tensor.to(self._device) for index, tensor in own["powersgd"][name].items()})
        return []


def register_comm_hook(model: DistributedDataParallel, hook: str, warmup: int) -> CompressionMemory:
    """Register one of `HOOKS`, or none for '', for the gradients of `model`; return its memory.

    fp16 and bf16 halve their size. PowerSGD (Vogels et al. 2019) sends two low-rank factors of each weight's gradient
    and adds the residual to the next step's gradient; the first `warmup` optimizer steps are not compressed.
    """
    if hook in HALF_PRECISION_HOOKS:
        model.register_comm_hook(None, HALF_PRECISION_HOOKS[hook])
    if hook != "powersgd":
        return CompressionMemory()
    state = PowerSGDState(None, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=max(warmup, 2))
    model.register_comm_hook(state, powerSGD_hook)
    return PowerSGDMemory(state, next(model.parameters()).device)
