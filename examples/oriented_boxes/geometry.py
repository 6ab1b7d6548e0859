"""Oriented boxes: their forms, their exact overlap, and the overlap of Gaussians that the loss is made of.

A box is (..., 5): x and y of its centre, width, height, and the angle in radians from the x axis to its width, towards
the y axis. Two symmetries make equal boxes of different numbers: the angle has the period pi, and a quarter of a turn
exchanges width and height. No function here compares angles, so that none has an edge at which they jump.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import cv2
import numpy as np
import torch
from torch import Tensor

EPSILON = 1e-7  # keeps divisors, and the argument of a root, above 0
CORNERS = ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5))  # in units of width and height, around the centre


def corners(boxes: Tensor) -> Tensor:
    """Return the corners of boxes (..., 5), in one turn: (..., 4, 2)."""
    local = boxes[..., None, 2:4] * boxes.new_tensor(CORNERS)
    return boxes[..., None, :2] + turned(local, boxes[..., None, 4])


def turned(points: Tensor, angle: Tensor) -> Tensor:
    """Turn points (..., 2) around the origin by angles (...,)."""
    (x, y), cos, sin = points.unbind(-1), angle.cos(), angle.sin()
    return torch.stack((x * cos - y * sin, x * sin + y * cos), -1)


def canonical(boxes: Tensor) -> Tensor:
    """Return the same boxes with the longer side as their width and an angle in [-pi/2, pi/2), (..., 5)."""
    x, y, width, height, angle = boxes.unbind(-1)
    angle = angle + (height > width) * (math.pi / 2)
    angle = torch.remainder(angle + math.pi / 2, math.pi) - math.pi / 2
    return torch.stack((x, y, torch.maximum(width, height), torch.minimum(width, height), angle), -1)


def smallest_boxes(outlines: Iterable[np.ndarray]) -> np.ndarray:
    """Return the boxes of least area around outlines, (p, 2) each: float32 (m, 5)."""
    rows = [
        (*centre, *size, math.radians(degrees))
        for centre, size, degrees in (cv2.minAreaRect(points.astype(np.float32)) for points in outlines)
    ]
    return np.array(rows, np.float32).reshape(-1, 5)


def rotated_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the exact intersection over union of paired boxes, (n, 5) each, on the CPU: float64 (n,).

    Pairs whose circumscribed circles are apart are left out of the computation.
    """
    a, b = a.double(), b.double()
    reach = (a[:, 2:4].norm(dim=1) + b[:, 2:4].norm(dim=1)) / 2
    (near,) = ((a[:, :2] - b[:, :2]).norm(dim=1) < reach).nonzero(as_tuple=True)
    shared = a.new_zeros(len(a)).index_copy_(0, near, intersection(a[near], b[near]))
    return shared / (a[:, 2:4].prod(1) + b[:, 2:4].prod(1) - shared).clamp(min=EPSILON)


def intersection(a: Tensor, b: Tensor) -> Tensor:
    """Return the areas that paired boxes (n, 5) share, (n,), without a shape that depends on values.

    In the coordinates of `b` the outline of `a` is moved, point by point, to the nearest point of `b`. What this
    outline goes around is what they share: no point of the inside of `b` is crossed on the way. It is a polygon, whose
    corners are those of `a` and the points at which an edge crosses one of the four lines along the sides of `b`.
    """
    half = b[:, None, 2:4] / 2
    start = turned(corners(a) - b[:, None, :2], -b[:, None, 4])
    edge = start.roll(-1, 1) - start
    lines = torch.cat((-half, half), 2) - start.repeat(1, 1, 2)
    # As shares of the edge: (n, 4, 4).
    crossing = (lines / edge.repeat(1, 1, 2)).nan_to_num(0).clamp(0, 1).sort(2).values
    share = torch.cat((torch.zeros_like(crossing[..., :1]), crossing), 2)[..., None]
    points = start[:, :, None] + share * edge[:, :, None]  # (n, 4 edges, 5, 2); the end of an edge is the next's start
    x, y = points.flatten(1, 2).clamp(-half, half).unbind(2)
    return (x * y.roll(-1, 1) - y * x.roll(-1, 1)).sum(1).abs() / 2


def spun(boxes: Tensor) -> Tensor:
    """Return boxes (..., 5) as the loss takes them, (..., 6): centre, size, and cos and sin of twice the angle.

    This form is continuous: it is the same for an angle and for the angle half a turn further.
    """
    double = 2 * boxes[..., 4:]
    return torch.cat((boxes[..., :4], double.cos(), double.sin()), -1)


def unspun(boxes: Tensor) -> Tensor:
    """Return boxes (..., 6) of `spun` with angles, (..., 5)."""
    return torch.cat((boxes[..., :4], torch.atan2(boxes[..., 5:], boxes[..., 4:5]) / 2), -1)


def prob_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the ProbIoU of paired boxes of `spun`, (n, 6) each: (n,), 1 if they are equal, towards 0 far away.

    1 minus the Hellinger distance of the Gaussians with the boxes' centres and variances (arXiv 2106.06072). Squares
    have the same variance in all directions, so that it says nothing about their angles: see `turn`.
    """
    xx, yy, xy = (one + other for one, other in zip(_variances(a), _variances(b), strict=True))
    determinant = (xx * yy - xy * xy).clamp(min=EPSILON)
    dx, dy = (a[:, :2] - b[:, :2]).unbind(1)
    distance = (yy * dx * dx + xx * dy * dy - 2 * xy * dx * dy) / determinant / 4
    areas = (a[:, 2:4].prod(1) * b[:, 2:4].prod(1)).clamp(min=EPSILON)  # 12 x the root of a variance's determinant
    shape = (determinant / (4 / 144 * areas)).log() / 2
    return 1 - (EPSILON - torch.expm1(-(distance + shape).clamp(min=0))).sqrt()


def _variances(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the variances along x and along y, and the covariance, of points spread evenly over boxes (n, 6)."""
    _, _, width, height, cos, sin = boxes.unbind(1)
    mean, difference = (width * width + height * height) / 24, (width * width - height * height) / 24
    return mean + difference * cos, mean - difference * cos, difference * sin


def turn(a: Tensor, b: Tensor) -> Tensor:
    """Return how far paired boxes of `spun` are turned, (n, 6) each: (n,), 0 if sides are parallel, 1 at 45 degrees."""
    return 1 - (a[:, 4:] * b[:, 4:]).sum(1) ** 2
