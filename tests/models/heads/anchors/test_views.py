"""Decoding of raw maps, by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from models.heads.anchors import RawView, decode
from models.heads.contract import xywh_to_xyxy

THREE = math.log(3)  # the logit of 3/4; of 1/4 with a minus


def corners(decoded: Tensor) -> Tensor:
    """Convert decoded boxes (b, n, 5 + classes) from xywh to xyxy."""
    return torch.cat((xywh_to_xyxy(decoded[..., :4]), decoded[..., 4:]), 2)


def test_decode_one_cell() -> None:
    raw = torch.zeros(2, 2, 3, 4, 7)  # 3 rows, 4 columns
    raw[1, 1, 2, 3] = torch.tensor([THREE, -THREE, THREE, -THREE, -THREE, THREE, 0])
    boxes = corners(decode(RawView([raw], torch.tensor([[[1.0, 1], [2, 5]]]), torch.tensor([8.0]))))
    assert boxes.shape == (2, 2 * 3 * 4, 7)
    # x (1.5 - 0.5 + 3) 8, y (0.5 - 0.5 + 2) 8, w 1.5^2 2 x 8, h 0.5^2 5 x 8: around 32, 16 by 36, 10
    expected = torch.tensor([14, 11, 50, 21, 0.25, 0.75, 0.5])
    torch.testing.assert_close(boxes[1, 1 * 12 + 2 * 4 + 3], expected)
    torch.testing.assert_close(boxes[0, 12 + 11], torch.tensor([20, 0, 36, 40, 0.5, 0.5, 0.5]))
    torch.testing.assert_close(boxes[0, 0], torch.tensor([0, 0, 8, 8, 0.5, 0.5, 0.5]))


def test_decode_levels_follow_each_other() -> None:
    outputs = [torch.zeros(1, 1, 2, 2, 6), torch.zeros(1, 1, 1, 1, 6)]
    view = RawView(outputs, torch.tensor([[[1.0, 2]], [[3, 1]]]), torch.tensor([8.0, 16]))
    boxes = [[0, -4, 8, 12], [8, -4, 16, 12], [0, 4, 8, 20], [8, 4, 16, 20], [-16, 0, 32, 16]]
    torch.testing.assert_close(corners(decode(view))[0, :, :4], torch.tensor(boxes, dtype=torch.float))
    torch.testing.assert_close(
        corners(decode(view._replace(skipped_level=0)))[0, :, :4], torch.tensor(boxes[4:], dtype=torch.float)
    )
