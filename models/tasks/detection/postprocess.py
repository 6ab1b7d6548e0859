"""From raw maps to detections: thresholds, decoding and non-maximum suppression."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from utils.boxes import xywh_to_xyxy

MOST_CANDIDATES = 30_000  # per image, the most confident ones
FIRST_LOOK = 3  # times as many candidates as detections are looked at first
WIDER = 3  # times as many each time that these were too few
CLASS_OFFSET = (
    7680  # pixels between the classes' planes, so that boxes of two classes never overlap; over any image side
)
VECTORS = 64  # numbers: no fewer than any CPU takes at once
SPAN = 2**14  # numbers: whole times as many, and fewer than torch would deal out to threads


class Suppression(NamedTuple):
    """What becomes a detection: least confidence, overlap that suppresses, and how many per image at most."""

    conf_thres: float = 0.001
    iou_thres: float = 0.6
    max_det: int = 300
    classes: tuple[int, ...] = ()  # those alone; none: all
    agnostic: bool = False  # boxes of different classes suppress each other too
    one_class: bool = False  # of a box its likeliest class alone counts

    def narrowed(self, scores: Tensor) -> Tensor:
        """Scores (n, 5 + classes), with 0 for the classes of a box that do not count."""
        if not self.classes and not self.one_class:
            return scores
        counts = torch.ones_like(scores, dtype=torch.bool)
        if self.one_class:
            counts[:, 5:] = functional.one_hot(scores[:, 5:].argmax(1), scores.shape[1] - 5).bool()
        if self.classes:
            counts[:, 5:] &= self.wanted(torch.arange(scores.shape[1] - 5, device=scores.device))
        return scores.where(counts, 0)

    def wanted(self, labels: Tensor) -> Tensor:
        """Which classes count, bool of the same shape."""
        if not self.classes:
            return torch.ones_like(labels, dtype=torch.bool)
        return torch.isin(labels, torch.tensor(self.classes, device=labels.device))


class Look(NamedTuple):
    """What a model made of a batch's images, which it may have been shown in another size and mirrored."""

    outputs: list[Tensor]  # raw maps by level, (b, anchors, h, w, 5 + classes)
    anchors: Tensor  # (levels, anchors, 2) in cells
    strides: Tensor  # (levels,) pixels per cell
    scale: tuple[float, float] = (1.0, 1.0)  # width and height of what it was shown, as shares of the batch's
    mirrored: int = 0  # the width of the batch, pixels, where left and right were swapped
    left_out: int | None = None  # a level whose boxes are not taken

    def levels(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The raw map and the cells of each level whose boxes are taken."""
        for number, level in enumerate(zip(self.outputs, self.anchors, self.strides, strict=True)):
            if number != self.left_out:
                yield level[0], _cells(*level, self.scale, self.mirrored)


class Decoded(NamedTuple):
    """What an exported model says of a batch's images: boxes, not maps."""

    predictions: Tensor  # (b, n, 5 + classes): x, y, width, height in pixels of the batch, objectness, scores
    outputs: None = None  # of which losses could be computed


class Suppressed(NamedTuple):
    """What an exported model found in a batch's images, where it suppresses too."""

    detections: Tensor  # (b, m, 6): xyxy in pixels of the batch, confidence, class; rows of zeros behind
    counts: Tensor  # (b,) rows that are detections
    outputs: None = None


@torch.no_grad()
def detect(looks: Sequence[Look | Decoded], limits: Suppression) -> list[Tensor]:
    """What was seen in a batch, in one look or several, to detections, (k, 6) per image: xyxy in pixels of the batch,
    confidence, class, in falling confidence.

    A box counts for every class whose objectness x score exceeds `conf_thres`; of boxes of one class that overlap by
    more than `iou_thres` the most confident stays, whichever look it is of. There is no time limit: every image is
    finished. What is found in an image does not depend on the others.
    """
    raw = [look for look in looks if isinstance(look, Look)]
    if len(raw) == len(looks):
        return _detect_raw(raw, limits)
    parts = [(look.predictions if isinstance(look, Decoded) else decode(look)).float() for look in looks]
    images = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return [_suppress(image[image[:, 4] > limits.conf_thres], None, limits) for image in images]


def decode(look: Look) -> Tensor:
    """All boxes of a look, (b, n, 5 + classes), as in `Decoded`: level by level, then by anchor, row and column."""
    parts = []
    for raw, cells in look.levels():
        scores = raw.flatten(1, 3).float().sigmoid()
        parts.append(torch.cat((_placed(scores, cells), scores[..., 4:]), 2))
    return torch.cat(parts, 1)


def cut(look: Suppressed, limits: Suppression) -> list[Tensor]:
    """The detections of each image, (k, 6), that a model which suppresses has found, as far as the limits let them."""
    images = zip(look.detections, look.counts.tolist(), strict=True)
    found = (image[: int(count)] for image, count in images)
    kept = (image[(image[:, 4] > limits.conf_thres) & limits.wanted(image[:, 5])] for image in found)
    return [image[: limits.max_det] for image in kept]


def _detect_raw(looks: Sequence[Look], limits: Suppression) -> list[Tensor]:
    """`detect` of raw maps. Only what is likely is decoded."""
    outputs, places = zip(*(level for look in looks for level in look.levels()), strict=True)
    levels = [raw.flatten(1, 3) for raw in outputs]  # (b, n, 5 + classes)
    likely = [level[..., 4].float() > _least_logit(limits.conf_thres) for level in levels]
    counts = torch.stack([level.sum(1) for level in likely], 1)  # (b, levels)
    boxes = torch.cat(likely, 1).nonzero()[:, 1].split(counts.flatten().tolist())  # of an image level by level
    cells = torch.cat(places)
    starts = [0, *accumulate(level.shape[1] for level in levels[:-1])]
    found = []
    for image in range(len(levels[0])):
        own = boxes[image * len(levels) : (image + 1) * len(levels)]
        rows = [level[image][box - start] for level, box, start in zip(levels, own, starts, strict=True)]
        found.append(_suppress(_scores(rows), cells[torch.cat(own)], limits))
    return found


def _least_logit(probability: float) -> float:
    """A number that a logit exceeds wherever its sigmoid, in fp32, exceeds `probability`; hardly a smaller one.

    An objectness must do that, for no confidence exceeds it.
    """
    least = min(probability, 1.0) * (1 - 1e-5)
    return math.log(least / (1 - least)) if least > 0 else -math.inf


def _scores(parts: list[Tensor]) -> Tensor:
    """The sigmoid of parts (k, 5 + classes), one below the other, in fp32.

    A CPU has another, slightly different sigmoid for the last numbers of a thread's share, those that do not fill a
    vector. So that a number's does not depend on its place, it is done in spans, by one thread, with rows to spare.
    """
    size = parts[0].shape[1]
    spare = parts[0].new_zeros(math.ceil(VECTORS / size), size)
    rows = torch.cat((*parts, spare)).float()
    for span in rows.view(-1).split(SPAN if rows.device.type == "cpu" else rows.numel()):
        span.sigmoid_()
    return rows[: -len(spare)]


def _cells(
    raw: Tensor, anchors: Tensor, stride: Tensor, scale: tuple[float, float] = (1.0, 1.0), mirrored: int = 0
) -> Tensor:
    """What the boxes of a level are relative to, (anchors x h x w, 6): column, row, their strides, width and height of
    the anchor, in pixels of the batch.

    Of a look at mirrored images the columns count from the right, by a negative stride.
    """
    _, count, height, width, _ = raw.shape
    pixels = torch.stack([stride / share for share in scale]).float()
    columns = torch.arange(width, device=raw.device, dtype=torch.float32)
    rows = torch.arange(height, device=raw.device, dtype=torch.float32)
    sides = (anchors * pixels).float()[:, None, None]
    if mirrored:
        columns = columns - mirrored / pixels[0]
        pixels = pixels * torch.tensor([-1.0, 1.0], device=pixels.device)
    # Joined, not written in place: an exported model does the same, and other runtimes are slow at the latter.
    parts = (columns[:, None], rows[:, None, None], pixels, sides)
    return torch.cat([part.expand(count, height, width, part.shape[-1]) for part in parts], -1).view(-1, 6)


def _decode(scores: Tensor, cells: Tensor) -> Tensor:
    """Boxes (k, 4), xyxy in pixels: xy = (2 sigmoid - 0.5 + cell) stride; wh = (2 sigmoid)^2 anchor."""
    return xywh_to_xyxy(_placed(scores, cells))


def _placed(scores: Tensor, cells: Tensor) -> Tensor:
    """The same boxes as xywh, (..., 4)."""
    centre = (scores[..., :2] * 2 - 0.5 + cells[:, :2]) * cells[:, 2:4]
    return torch.cat((centre, (scores[..., 2:4] * 2) ** 2 * cells[:, 4:]), -1)


def _suppress(scores: Tensor, cells: Tensor | None, limits: Suppression) -> Tensor:
    """The detections (k, 6) of an image, from the scores (n, 5 + classes) of its likely boxes and their `cells`; None
    where the first four numbers are xywh already.

    A box is suppressed by stronger ones only, so the strongest few hundred mostly decide alone. Where too few of them
    survive, weaker ones are looked at beside the survivors: what was suppressed suppresses nothing.
    """
    from torchvision.ops import nms  # here, for it takes more than a second that a wrong flag need not wait for

    scores = limits.narrowed(scores)
    apart = 0 if limits.agnostic else CLASS_OFFSET
    best = scores[:, 5:].amax(1) * scores[:, 4]
    found, seen, look = scores.new_zeros(0, 6), 0, min(FIRST_LOOK * limits.max_det, MOST_CANDIDATES)
    while True:
        box, label, confidence = _strongest(scores, best, limits.conf_thres, look)
        fresh = box[seen:]
        near = scores[fresh, :4]
        boxes = xywh_to_xyxy(near) if cells is None else _decode(near, cells[fresh])
        found = torch.cat((found, torch.cat((boxes, confidence[seen:, None], label[seen:, None]), 1)))
        found = found[nms(found[:, :4] + found[:, 5:] * apart, found[:, 4], limits.iou_thres)]
        if len(found) >= limits.max_det or len(box) < look or look == MOST_CANDIDATES:
            return found[: limits.max_det]
        seen, look = look, min(look * WIDER, MOST_CANDIDATES)


def _strongest(scores: Tensor, best: Tensor, conf_thres: float, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The first `most` candidates in falling confidence: row of `scores` (n, 5 + classes), class and confidence.

    best: (n,) each row's largest confidence.
    """
    least = best.new_zeros(())
    if most < len(best):  # so many rows have a candidate of at least that confidence
        least = best.nan_to_num(0).topk(most, sorted=False).values.amin()
    (rows,) = (~((best <= conf_thres) | (best < least))).nonzero(as_tuple=True)  # with those where a class is NaN
    confidence = scores[rows, 5:] * scores[rows, 4:5]
    row, label = ((confidence > conf_thres) & (confidence >= least)).nonzero(as_tuple=True)
    confidence, order = confidence[row, label].sort(descending=True, stable=True)
    order = order[:most]
    return rows[row[order]], label[order].float(), confidence[:most]
