"""Non-maximum suppression of several images in one call, on a GPU. Imported by detect.py if Triton works.

torchvision's `nms` takes one image, and calls for each cost the host more time than a small network's inference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _unsuppressed(boxes, starts, found, iou_thres, most, max_det, SLOTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the numbers of one image's boxes that remain: those that overlap no earlier remaining box too much."""
    image = tl.program_id(0)
    box = tl.load(starts + image)
    end = tl.minimum(tl.load(starts + image + 1), box + most)
    slot = tl.arange(0, SLOTS)  # each has a remaining box, or the empty box
    left = tl.zeros([SLOTS], tl.float32)
    top, right, bottom = left, left, left
    count = 0
    while (box < end) & (count < max_det):
        x1, y1 = tl.load(boxes + box * 4), tl.load(boxes + box * 4 + 1)
        x2, y2 = tl.load(boxes + box * 4 + 2), tl.load(boxes + box * 4 + 3)
        width = tl.maximum(tl.minimum(right, x2) - tl.maximum(left, x1), 0.0)
        height = tl.maximum(tl.minimum(bottom, y2) - tl.maximum(top, y1), 0.0)
        shared = width * height
        areas = (right - left) * (bottom - top) + (x2 - x1) * (y2 - y1)
        meets = shared > 0  # few do, and an exact division of 0 is slow
        overlaps = (tl.div_rn(tl.where(meets, shared, 1.0), areas - shared) > iou_thres) & meets
        remains = tl.sum(overlaps.to(tl.int32)) == 0
        tl.store(found + image * max_det + count, box, mask=remains)
        taken = (slot == count) & remains
        left, top = tl.where(taken, x1, left), tl.where(taken, y1, top)
        right, bottom = tl.where(taken, x2, right), tl.where(taken, y2, bottom)
        count += remains.to(tl.int32)
        box += 1


def batch_nms(boxes: Tensor, starts: Tensor, iou_thres: float, most: int, max_det: int) -> Tensor:
    """Return the numbers of each image's first `max_det` boxes that remain, int64 (images, max_det), filled up with -1.

    The arithmetic is that of `torchvision.ops.nms` on the CPU: products and sums are not fused.

    Args:
        boxes: float32 (n, 4), xyxy, image by image, each image's in falling confidence
        starts: int64 (images + 1,): number of each image's first box; the last is n
        most: number of boxes of an image that are compared
    """
    found = torch.full((len(starts) - 1, max_det), -1, device=boxes.device)
    slots = triton.next_power_of_2(max_det)
    with torch.cuda.device_of(boxes):  # type: ignore[no-untyped-call]
        _unsuppressed[(len(found),)](boxes, starts, found, iou_thres, most, max_det, slots, enable_fp_fusion=False)
    return found
