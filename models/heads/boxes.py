"""Box formats and overlap. Called by the other modules of the detection task. Imports torch only.

Boxes are tensors (..., 4): xyxy are corners, xywh centre and size, in any one unit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPSILON = 1e-7  # keeps divisors above 0


def xywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Convert boxes from centre and size to corners, (..., 4) each."""
    centre, half = boxes[..., :2], boxes[..., 2:4] / 2
    return torch.cat((centre - half, centre + half), -1)


def xyxy_to_xywh(boxes: Tensor) -> Tensor:
    """Convert boxes from corners to centre and size, (..., 4) each."""
    low, high = boxes[..., :2], boxes[..., 2:4]
    return torch.cat(((low + high) / 2, high - low), -1)


def complete_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the CIoU (n,) of paired boxes, xywh, (n, 4) each; at most 1. No gradient passes through its weight alpha.

    Zheng et al., "Distance-IoU Loss" (AAAI 2020), equations 7 to 11.
    """
    (ax, ay, aw, ah), (bx, by, bw, bh) = a.unbind(-1), b.unbind(-1)
    hull_w, hull_h = _span(ax, aw, bx, bw), _span(ay, ah, by, bh)
    intersection = (aw + bw - hull_w).clamp(min=0) * (ah + bh - hull_h).clamp(min=0)
    iou = intersection / (aw * ah + bw * bh - intersection + EPSILON)
    distance = ((ax - bx) ** 2 + (ay - by) ** 2) / (hull_w**2 + hull_h**2 + EPSILON)
    shape = 4 / math.pi**2 * (torch.atan(bw / bh.clamp(min=EPSILON)) - torch.atan(aw / ah.clamp(min=EPSILON))) ** 2
    with torch.no_grad():
        alpha = shape / (shape - iou + 1 + EPSILON)
    return iou - distance - alpha * shape


def _span(a: Tensor, a_size: Tensor, b: Tensor, b_size: Tensor) -> Tensor:
    """Return the length of the smallest interval that contains two intervals.

    Args:
        a: centres of the first intervals
        a_size: lengths of the first intervals
        b: centres of the second intervals
        b_size: lengths of the second intervals
    """
    return torch.maximum(a + a_size / 2, b + b_size / 2) - torch.minimum(a - a_size / 2, b - b_size / 2)
