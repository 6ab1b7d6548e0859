"""Count the floating-point operations of a model. Called by models/starting_point.py."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from models.layers import skip_norms


def gflops(model: nn.Module, imgsz: int) -> float:
    """Return 10^9 floating-point operations for one image (3, imgsz, imgsz), a multiply-add counted as two.

    The model is traced on the "meta" device: nothing is computed. Returns 0 if a layer cannot be traced.
    """
    try:
        replaced = {id(tensor): tensor.to("meta") for tensor in (*model.parameters(), *model.buffers())}
        traced = copy.deepcopy(model, replaced).eval()  # no weight is copied
        skip_norms(traced)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            traced(torch.empty(1, 3, imgsz, imgsz, device="meta"))
    except Exception:  # a user's layer can fail anywhere
        return 0.0
    return counter.get_total_flops() / 1e9
