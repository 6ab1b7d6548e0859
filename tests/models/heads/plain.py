"""A second implementation of YOLOv9's assignment and loss: loops over images, targets and cells, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

TOP, BINS = 10, 16
Box = tuple[float, float, float, float]


class Cell(NamedTuple):
    x: float  # of the centre, pixels
    y: float
    stride: float


def cells_of(sizes: Sequence[tuple[int, int, float]]) -> list[Cell]:
    """Return the cells of levels (height, width, stride)."""
    return [
        Cell((column + 0.5) * stride, (row + 0.5) * stride, stride)
        for height, width, stride in sizes
        for row in range(height)
        for column in range(width)
    ]


def ciou(a: Box, b: Box) -> float:
    """Return the CIoU of two boxes, corners."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    aw, ah, bw, bh = a[2] - a[0], a[3] - a[1], b[2] - b[0], b[3] - b[1]
    iou = shared / (aw * ah + bw * bh - shared)
    hull = (max(a[2], b[2]) - min(a[0], b[0])) ** 2 + (max(a[3], b[3]) - min(a[1], b[1])) ** 2
    distance = ((a[0] + a[2] - b[0] - b[2]) ** 2 + (a[1] + a[3] - b[1] - b[3]) ** 2) / 4
    shape = 4 / math.pi**2 * (math.atan(aw / ah) - math.atan(bw / bh)) ** 2
    return iou - distance / hull - (shape**2 / (1 - iou + shape) if shape else 0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def probabilities(logits: Sequence[float]) -> list[float]:
    total = sum(math.exp(x) for x in logits)
    return [math.exp(x) / total for x in logits]


def predicted_box(sides: Sequence[float], cell: Cell) -> Box:
    """Return the corners that a cell's 4 x 16 logits mean."""
    reach = [
        cell.stride * sum(k * p for k, p in enumerate(probabilities(sides[side * BINS : side * BINS + BINS])))
        for side in range(4)
    ]
    return cell.x - reach[0], cell.y - reach[1], cell.x + reach[2], cell.y + reach[3]


def distances(cell: Cell, box: Box) -> list[float]:
    """Return the distances of a cell's centre to the sides of a box, in strides."""
    pixels = (cell.x - box[0], cell.y - box[1], box[2] - cell.x, box[3] - cell.y)
    return [distance / cell.stride for distance in pixels]


def assign_image(
    boxes: Sequence[Box], scores: Sequence[Sequence[float]], cells: Sequence[Cell], targets: Sequence[tuple[int, Box]]
) -> dict[int, tuple[int, float]]:
    """Return the target and the class target of each assigned cell. targets: class and corners of each."""
    overlap = [[max(ciou(box, target), 0) for box in boxes] for _, target in targets]
    aligned = [
        [one**6 * math.sqrt(sigmoid(scores[c][label])) for c, one in enumerate(overlap[t])]
        for t, (label, _) in enumerate(targets)
    ]
    chosen: dict[int, list[int]] = {}
    for t, (_, target) in enumerate(targets):
        reach = [distances(cell, target) for cell in cells]
        inside = [c for c in range(len(cells)) if min(reach[c]) >= 0 and max(reach[c]) <= BINS - 1.01]
        inside = [c for c in inside if aligned[t][c] > 0]
        if not inside:
            inside = [c for c in sorted(range(len(cells)), key=lambda c: -aligned[t][c])[:1] if aligned[t][c] > 0]
        for c in sorted(inside, key=lambda c: -aligned[t][c])[:TOP]:  # stable: of equal ones the first
            chosen.setdefault(c, []).append(t)
    owner = {c: max(several, key=lambda t: overlap[t][c]) for c, several in chosen.items()}  # of equal ones the first
    assigned = {}
    for c, t in owner.items():
        own = [other for other, of in owner.items() if of == t]
        most, best = max(aligned[t][other] for other in own), max(overlap[t][other] for other in own)
        assigned[c] = t, aligned[t][c] / (most + 1e-9) * best
    return assigned


def head_sums(
    sides: Tensor,
    scores: Tensor,
    cells: Sequence[Cell],
    targets: Sequence[Sequence[tuple[int, Box]]],
    repeats: Sequence[int] = (1, 1, 1),
) -> tuple[float, float, float, float]:
    """Return the sums of box, class and distribution terms of one head, and the sum of the class targets.

    sides: (b, n, 4 x 16), scores: (b, n, classes), logits. targets: of each image, class and corners in pixels.
    repeats: of each class; how often a cell that is assigned to such a target counts.
    """
    box = cls = dfl = count = 0.0
    for of_sides, of_scores, of_image in zip(sides.tolist(), scores.tolist(), targets, strict=True):
        boxes = [predicted_box(*pair) for pair in zip(of_sides, cells, strict=True)]
        assigned = assign_image(boxes, of_scores, cells, of_image)
        for c, logits in enumerate(of_scores):
            target, weight = assigned.get(c, (None, 0.0))
            label = None if target is None else of_image[target][0]
            for _ in range(1 if label is None else repeats[label]):
                for k, x in enumerate(logits):
                    t = weight if label == k else 0.0
                    cls += math.log1p(math.exp(-abs(x))) + max(x, 0) - x * t
        for c, (target, weight) in [pair for pair in assigned.items() for _ in range(repeats[of_image[pair[1][0]][0]])]:
            stride, corners = cells[c].stride, of_image[target][1]
            scaled = [tuple(side / stride for side in one) for one in (boxes[c], corners)]
            box += (1 - ciou(scaled[0], scaled[1])) * weight
            for side, distance in enumerate(distances(cells[c], corners)):
                p = probabilities(of_sides[c][side * BINS : side * BINS + BINS])
                clipped = min(max(distance, 0), BINS - 1.01)
                low = math.floor(clipped)
                cost = -math.log(p[low]) * (low + 1 - clipped) - math.log(p[low + 1]) * (clipped - low)
                dfl += cost / 4 * weight
            count += weight
    return box, cls, dfl, count
