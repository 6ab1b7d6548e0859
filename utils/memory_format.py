"""How the values of maps and weights lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def layout(device: torch.device) -> torch.memory_format:
    """channels_last, in which convolutions are faster on CPU and CUDA; elsewhere torch's usual layout."""
    return torch.channels_last if device.type in ("cpu", "cuda") else torch.contiguous_format


def plain(content: Any) -> Any:
    """`content` with the tensors of its dicts and lists in torch's usual layout: it tells nothing of a device."""
    if isinstance(content, Tensor):
        return content.contiguous()
    if isinstance(content, dict):
        return {key: plain(value) for key, value in content.items()}
    return [plain(value) for value in content] if isinstance(content, list) else content
