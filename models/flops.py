"""How much work a model is."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def gflops(model: nn.Module, imgsz: int) -> float:
    """10^9 floating-point operations of one image (3, imgsz, imgsz), a multiply-add being two; 0 where a layer does not
    let itself be traced. Nothing is computed: it is traced on the "meta" device."""
    try:
        traced = copy.deepcopy(model).to("meta").eval()
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            traced(torch.empty(1, 3, imgsz, imgsz, device="meta"))
    except Exception:  # whatever a user's own layer does there
        return 0.0
    return counter.get_total_flops() / 1e9
