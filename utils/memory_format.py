"""The memory format of activations and weights.

Called by the tasks, models/ensemble.py, utils/checkpoint, utils/distributed/prepare.py and utils/training/memory.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def layout(device: torch.device) -> torch.memory_format:
    """Return channels_last, in which convolutions are faster, for CPU and CUDA, else torch's default."""
    return torch.channels_last if device.type in ("cpu", "cuda") else torch.contiguous_format


def contiguous(content: Any) -> Any:
    """Make the tensors in nested dicts and lists contiguous, so that a file does not depend on the device."""
    if isinstance(content, Tensor):
        return content.contiguous()
    if isinstance(content, dict):
        return {key: contiguous(value) for key, value in content.items()}
    return [contiguous(value) for value in content] if isinstance(content, list) else content
