"""Thresholds and non-maximum suppression: from views of a batch to detections.

Called by `DetectionPostprocess`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.tasks.contract import Thresholds
from models.tasks.detection.boxes import xywh_to_xyxy
from models.tasks.detection.views import DecodedView, RawView, SuppressedView, decode, decode_xywh

MAX_CANDIDATES = 30_000  # per image, the most confident
FIRST_CANDIDATES_PER_DETECTION = 3  # candidates in the first round, per detection that an image may have
CANDIDATE_GROWTH = 3  # factor of the candidates in each further round
# Pixels between the planes of two classes, so that their boxes never overlap; more than any image's side.
CLASS_OFFSET_PIXELS = 7680
VECTOR_NUMBERS = 64  # at least the width of any CPU's vectors
SPAN_NUMBERS = 2**14  # a multiple of it, below torch's threshold for several threads


class Detected(NamedTuple):
    """The detections of an image, with other outputs of their anchors."""

    boxes: Tensor  # (k, 6), see `detect`
    more: Tensor  # float32 (k, more): the outputs after the class scores
    view: Tensor  # int64 (k,): number of the view that each detection comes from


class Suppressed(NamedTuple):
    """The detections of an image and the boxes that they were selected from."""

    detections: Tensor  # (k, 6)
    row: Tensor  # int64 (k,): in the joined candidates
    candidates: list[tuple[int, Tensor]]  # the number of a view, and outputs of some of its boxes, (n, outputs)


@torch.no_grad()
def detect(views: Sequence[RawView | DecodedView], thresholds: Thresholds) -> list[Tensor]:
    """Return the detections of each image as float32 (k, 6): xyxy in pixels of the batch, confidence, class.

    They are in falling confidence. A box counts for every class whose objectness x score exceeds `conf_thres`. Of boxes
    of one class that overlap by more than `iou_thres`, in any views, the most confident remains. There is no time
    limit. The detections of an image do not depend on the other images.
    """
    return [image.detections for image in _suppressed(views, thresholds)]


@torch.no_grad()
def detect_with_more(views: Sequence[RawView | DecodedView], thresholds: Thresholds) -> list[Detected]:
    """Return the detections of each image, with the outputs after the class scores.

    If views have different numbers of them, the rows of the shorter ones end with zeros.
    """
    width = max(view.more for view in views)
    detected = []
    for boxes, row, candidates in _suppressed(views, thresholds):
        others = [outputs[:, outputs.shape[1] - views[number].more :].float() for number, outputs in candidates]
        more = torch.cat([functional.pad(part, (0, width - part.shape[1])) for part in others])
        view = torch.cat([row.new_full((len(outputs),), number) for number, outputs in candidates])
        detected.append(Detected(boxes, more[row], view[row]))
    return detected


def filter_detections(view: SuppressedView, thresholds: Thresholds) -> list[Tensor]:
    """Return a suppressing model's detections of each image, (k, 6), that the thresholds allow."""
    return [image[rows] for image, rows in zip(view.detections, allowed_rows(view, thresholds), strict=True)]


def allowed_rows(view: SuppressedView, thresholds: Thresholds) -> list[Tensor]:
    """Return the rows of each image's detections that the thresholds allow, int64 (k,)."""
    detections = [image[: int(count)] for image, count in zip(view.detections, view.counts.tolist(), strict=True)]
    allowed = [(image[:, 4] > thresholds.conf_thres) & _of_classes(image[:, 5], thresholds) for image in detections]
    return [mask.nonzero()[: thresholds.max_det, 0] for mask in allowed]


def suppress(scores: Tensor, cells: Tensor | None, thresholds: Thresholds) -> tuple[Tensor, Tensor]:
    """Return the detections (k, 6) of one image, and their rows of `scores`, int64 (k,).

    scores: (n, 5 + classes), sigmoids of boxes that may exceed the threshold. cells: (n, 6), see `cell_geometry`; None
    if the first four numbers of `scores` are xywh in pixels already.

    Only more confident boxes suppress a box, so a few hundred of the most confident usually suffice. If too few of them
    remain, less confident ones are compared with the remaining ones: a suppressed box suppresses nothing.
    """
    from torchvision.ops import nms  # takes over a second: errors in flags are reported first

    scores = _allowed_scores(scores, thresholds)
    offset = 0 if thresholds.agnostic_nms else CLASS_OFFSET_PIXELS
    best = scores[:, 5:].amax(1) * scores[:, 4]
    detections, rows, compared = scores.new_zeros(0, 6), torch.zeros(0, dtype=torch.long, device=scores.device), 0
    count = min(FIRST_CANDIDATES_PER_DETECTION * thresholds.max_det, MAX_CANDIDATES)
    while True:
        row, label, confidence = _most_confident(scores, best, thresholds.conf_thres, count)
        new_rows = row[compared:]
        near = scores[new_rows, :4]
        boxes = xywh_to_xyxy(near if cells is None else decode_xywh(near, cells[new_rows]))
        new = torch.cat((boxes, confidence[compared:, None], label[compared:, None]), 1)
        detections, rows = torch.cat((detections, new)), torch.cat((rows, new_rows))
        planes = detections[:, :4] + detections[:, 5:] * offset
        remaining = nms(planes, detections[:, 4], thresholds.iou_thres)
        detections, rows = detections[remaining], rows[remaining]
        if len(detections) >= thresholds.max_det or len(row) < count or count == MAX_CANDIDATES:
            return detections[: thresholds.max_det], rows[: thresholds.max_det]
        compared, count = count, min(count * CANDIDATE_GROWTH, MAX_CANDIDATES)


def _suppressed(views: Sequence[RawView | DecodedView], thresholds: Thresholds) -> Iterator[Suppressed]:
    """Iterate over the detections of each image, as `detect`."""
    raw = [view for view in views if isinstance(view, RawView)]
    if len(raw) == len(views):
        yield from _suppressed_raw(raw, thresholds)
        return
    parts = [(view.boxes if isinstance(view, DecodedView) else decode(view)).float() for view in views]
    for image in zip(*parts, strict=True):
        # Filtered before they are joined: all boxes of a batch are hundreds of megabytes.
        candidates = [(number, boxes[boxes[:, 4] > thresholds.conf_thres]) for number, boxes in enumerate(image)]
        scores = torch.cat([boxes[:, : boxes.shape[1] - views[number].more] for number, boxes in candidates])
        yield Suppressed(*suppress(scores, None, thresholds), candidates)


def _suppressed_raw(views: Sequence[RawView], thresholds: Thresholds) -> Iterator[Suppressed]:
    """Iterate over the detections of raw maps. Only boxes whose objectness exceeds the threshold are decoded."""
    parts = [(number, *level) for number, view in enumerate(views) for level in view.levels()]
    numbers, outputs, geometries = zip(*parts, strict=True)
    levels = [raw.flatten(1, 3) for raw in outputs]  # (b, n, 5 + classes + more)
    candidates = [level[..., 4].float() > least_logit(thresholds.conf_thres) for level in levels]
    counts = torch.stack([level.sum(1) for level in candidates], 1)  # (b, levels)
    boxes = torch.split(torch.cat(candidates, 1).nonzero()[:, 1], counts.flatten().tolist())  # by image, then level
    cells = torch.cat(geometries)
    starts = [0, *accumulate(level.shape[1] for level in levels[:-1])]
    for image in range(len(levels[0])):
        by_level = boxes[image * len(levels) : (image + 1) * len(levels)]
        rows = [level[image][box - start] for level, box, start in zip(levels, by_level, starts, strict=True)]
        logits = [row[:, : row.shape[1] - views[number].more] for number, row in zip(numbers, rows, strict=True)]
        selected = suppress(row_sigmoids(logits), cells[torch.cat(by_level)], thresholds)
        yield Suppressed(*selected, list(zip(numbers, rows, strict=True)))


def least_logit(probability: float) -> float:
    """Return a lower bound, nearly exact, of the logits whose sigmoid in fp32 exceeds `probability`.

    It applies to objectness, which no confidence exceeds.
    """
    least = min(probability, 1.0) * (1 - 1e-5)
    return math.log(least / (1 - least)) if least > 0 else -math.inf


def row_sigmoids(parts: Sequence[Tensor]) -> Tensor:
    """Return the sigmoids of parts (k, 5 + classes), concatenated, in fp32.

    A CPU computes slightly different sigmoids for the last numbers of a thread's share, which do not fill a vector. To
    make a sigmoid independent of its position, spans are computed by one thread, with spare rows.
    """
    size = parts[0].shape[1]
    spare = parts[0].new_zeros(math.ceil(VECTOR_NUMBERS / size), size)
    rows = torch.cat((*parts, spare)).float()
    for span in torch.split(rows.view(-1), SPAN_NUMBERS if rows.device.type == "cpu" else rows.numel()):
        span.sigmoid_()
    return rows[: -len(spare)]


def _allowed_scores(scores: Tensor, thresholds: Thresholds) -> Tensor:
    """Return scores (n, 5 + classes) with 0 for classes that `classes` or `one_class` exclude."""
    if not thresholds.classes and not thresholds.one_class:
        return scores
    counts = torch.ones_like(scores, dtype=torch.bool)
    if thresholds.one_class:
        counts[:, 5:] = functional.one_hot(scores[:, 5:].argmax(1), scores.shape[1] - 5).bool()
    if thresholds.classes:
        counts[:, 5:] &= _of_classes(torch.arange(scores.shape[1] - 5, device=scores.device), thresholds)
    return scores.where(counts, 0)


def _of_classes(labels: Tensor, thresholds: Thresholds) -> Tensor:
    """Return which labels are among `classes`, bool of the same shape."""
    if not thresholds.classes:
        return torch.ones_like(labels, dtype=torch.bool)
    return torch.isin(labels, torch.tensor(thresholds.classes, device=labels.device))


def _most_confident(scores: Tensor, best: Tensor, conf_thres: float, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first `count` candidates in falling confidence: row of `scores` (n, 5 + classes), class, confidence.

    best: (n,) each row's largest confidence.
    """
    least = best.new_zeros(())
    if count < len(best):  # `count` rows have a candidate that reaches it
        least = best.nan_to_num(0).topk(count, sorted=False).values.amin()
    (rows,) = (~((best <= conf_thres) | (best < least))).nonzero(as_tuple=True)  # rows with a NaN included
    confidence = scores[rows, 5:] * scores[rows, 4:5]
    row, label = ((confidence > conf_thres) & (confidence >= least)).nonzero(as_tuple=True)
    confidence, order = confidence[row, label].sort(descending=True, stable=True)
    order = order[:count]
    return rows[row[order]], label[order].float(), confidence[:count]
