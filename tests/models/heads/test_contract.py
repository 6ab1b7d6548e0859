"""Box formats and overlap, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from models.heads.contract import complete_iou


def aspect_term(a: tuple[float, float], b: tuple[float, float], iou: float) -> float:
    """Return alpha v of the CIoU for two sizes (w, h)."""
    v = 4 / math.pi**2 * (math.atan(a[0] / a[1]) - math.atan(b[0] / b[1])) ** 2
    return v * v / (v - iou + 1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((3, 4, 2, 5), (3, 4, 2, 5), 1),  # identical
        ((0, 0, 2, 2), (4, 0, 2, 2), -16 / (36 + 4)),  # disjoint: 4 apart in a hull of 6 x 2
        ((0, 0, 4, 4), (0, 0, 2, 2), 1 / 4),  # contained, same centre and shape
        ((0, 0, 4, 4), (1, 1, 2, 2), 1 / 4 - 2 / 32),  # contained in a corner
        ((0, 0, 2, 2), (1, 0, 2, 2), 1 / 3 - 1 / (9 + 4)),
        ((0, 0, 4, 2), (0, 0, 2, 4), 1 / 3 - aspect_term((4, 2), (2, 4), 1 / 3)),
        ((0, 0, 2, 2), (5, 5, 4, 2), -50 / (64 + 49) - aspect_term((2, 2), (4, 2), 0)),
    ],
)
def test_complete_iou(a: tuple[float, ...], b: tuple[float, ...], expected: float) -> None:
    one, other = torch.tensor([a], dtype=torch.float), torch.tensor([b], dtype=torch.float)
    assert complete_iou(one, other).item() == pytest.approx(expected, abs=1e-6)
    assert complete_iou(other, one).item() == pytest.approx(expected, abs=1e-6)


def test_gradient_does_not_pass_through_the_weight_of_the_shape() -> None:
    """For boxes of one centre, w x 2 around 2 x 2 with w > 2: IoU 2 / w, and v = 4 / pi^2 (atan 1 - atan w / 2)^2."""
    width = 3.0
    a = torch.tensor([[0, 0, width, 2]], requires_grad=True)
    complete_iou(a, torch.tensor([[0.0, 0, 2, 2]])).backward()
    angle = math.atan(1) - math.atan(width / 2)
    v = 4 / math.pi**2 * angle**2
    alpha = v / (v - 2 / width + 1)
    dv = 4 / math.pi**2 * 2 * angle * -(1 / 2) / (1 + (width / 2) ** 2)
    assert a.grad is not None
    assert a.grad[0, 2].item() == pytest.approx(-2 / width**2 - alpha * dv, rel=1e-4)


@pytest.mark.parametrize(
    "a", [(1, 1, 0, 0), (1, 1, 0, 2), (1, 1, 2, 0), (1, 1, 2, 2), (1, 1, 1e-6, 1e-6), (1, 1, 1e4, 1)]
)
@pytest.mark.parametrize("b", [(1, 1, 0, 0), (1, 1, 0, 2), (1, 1, 2, 2), (9, 1, 0, 0)])
def test_degenerate_boxes_have_finite_gradients(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    one = torch.tensor([a], dtype=torch.float, requires_grad=True)
    value = complete_iou(one, torch.tensor([b], dtype=torch.float))
    value.sum().backward()
    assert value.isfinite().all()
    assert value.item() <= 1
    assert one.grad is not None
    assert one.grad.isfinite().all()
