"""Constants on a device, without a copy for each batch. Called by the heads' losses."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def device_constant(values: Any, device: torch.device) -> Tensor:
    """Return a float32 tensor of plain values, copied to a device once: every copy waits for the device."""
    with torch.inference_mode(False):  # a tensor made during a validation must serve in training too
        return torch.tensor(values, dtype=torch.float32, device=device)
