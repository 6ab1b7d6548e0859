"""Convert views of a batch to detections, by thresholds and non-maximum suppression.

Called by `DetectionPostprocess`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from models.heads.boxes import xywh_to_xyxy
from models.heads.contract import BoxView, Candidates
from models.tasks.contract import Thresholds
from models.tasks.detection.views import SuppressedView

MAX_CANDIDATES = 30_000  # most confident candidates of an image that are compared
FIRST_CANDIDATES_PER_DETECTION = 3  # first round's candidates, per detection that an image may have
CANDIDATE_GROWTH = 3  # factor of the number of candidates in each further round
MAX_TOGETHER = 1024  # largest `max_det` for `batch_nms`, which holds the remaining boxes in registers
# Pixels that separate the boxes of two classes, so that these never overlap; more than any image's side.
CLASS_OFFSET_PIXELS = 7680


class Detected(NamedTuple):
    """The detections of an image, with the other outputs of their boxes."""

    boxes: Tensor  # (k, 6), see `detect`
    more: Tensor  # float32 (k, more): outputs after the class scores
    view: Tensor  # int64 (k,): number of the view that each detection comes from


@torch.no_grad()
def detect(views: Sequence[BoxView], thresholds: Thresholds) -> list[Tensor]:
    """Return the detections of each image as float32 (k, 6): xyxy in pixels of the batch, confidence, class.

    They are in falling confidence. A box counts for every class whose objectness x score exceeds `conf_thres`. Among
    boxes of the same class that overlap by more than `iou_thres`, in any views, the most confident one remains. There
    is no time limit. The detections of an image do not depend on the other images.
    """
    return [image.boxes for image in detect_with_more(views, thresholds)]


@torch.no_grad()
def detect_with_more(views: Sequence[BoxView], thresholds: Thresholds) -> list[Detected]:
    """Return the detections of each image, with the outputs after the class scores.

    If views have different numbers of such outputs, shorter rows are padded with zeros.
    """
    width = max(view.more for view in views)
    detected: list[Detected] = []
    for parts in zip(*(view.candidates(thresholds.conf_thres) for view in views), strict=True):
        scores, image = _joined([part.scores for part in parts]), _joined([part.image for part in parts])
        more = _joined([functional.pad(part.more, (0, width - part.more.shape[1])) for part in parts])
        view = _joined([part.image.new_full((len(part.image),), number) for number, part in enumerate(parts)])
        boxes, row, counts = _suppress_images(Candidates(parts[0].images, image, scores, more), thresholds)
        detected += map(Detected, *(torch.split(column, counts) for column in (boxes, more[row], view[row])))
    return detected


def filter_detections(view: SuppressedView, thresholds: Thresholds) -> list[Tensor]:
    """Return each image's detections (k, 6) in a suppressed view that the thresholds allow."""
    return [image[rows] for image, rows in zip(view.detections, allowed_rows(view, thresholds), strict=True)]


def allowed_rows(view: SuppressedView, thresholds: Thresholds) -> list[Tensor]:
    """Return the rows of each image's detections that the thresholds allow, int64 (k,)."""
    detections = [image[: int(count)] for image, count in zip(view.detections, view.counts.tolist(), strict=True)]
    allowed = [(image[:, 4] > thresholds.conf_thres) & _of_classes(image[:, 5], thresholds) for image in detections]
    return [mask.nonzero()[: thresholds.max_det, 0] for mask in allowed]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; a single one is not copied."""
    return torch.cat([*parts]) if len(parts) > 1 else parts[0]


def _suppress_images(given: Candidates, thresholds: Thresholds) -> tuple[Tensor, Tensor, list[int]]:
    """Return the detections (k, 6) of images, their rows in `given`, int64 (k,), and the number in each image."""
    if given.scores.is_cuda and thresholds.max_det <= MAX_TOGETHER and (nms := _batch_nms(thresholds.max_det)):
        return suppress_together(given, thresholds, nms)
    if given.images == 1:
        boxes, row = suppress(given.scores, thresholds)
        return boxes, row, [len(row)]
    rows = [(given.image == number).nonzero()[:, 0] for number in range(given.images)]
    images = [suppress(given.scores[of_image], thresholds) for of_image in rows]
    row = torch.cat([of_image[row] for of_image, (_, row) in zip(rows, images, strict=True)])
    return torch.cat([boxes for boxes, _ in images]), row, [len(boxes) for boxes, _ in images]


@cache
def _batch_nms(max_det: int) -> Callable[..., Tensor] | None:
    """Return `batch_nms` if Triton can compile it here, which also takes a C compiler."""
    with contextlib.suppress(Exception):
        from models.tasks.detection.batch_nms import batch_nms

        boxes, starts = torch.zeros(1, 4, device="cuda"), torch.tensor((0, 1), device="cuda")
        batch_nms(boxes, starts, 0.5, MAX_CANDIDATES, max_det)
        return batch_nms
    return None


def suppress_together(
    given: Candidates, thresholds: Thresholds, nms: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, list[int]]:
    """Return what `suppress` returns for each image, one after the other, and the number in each; nms: `batch_nms`."""
    scores, image = _allowed_scores(given.scores, thresholds), given.image
    offset = 0 if thresholds.agnostic_nms else CLASS_OFFSET_PIXELS
    confidence = scores[:, 5:] * scores[:, 4:5]
    row, label = (confidence > thresholds.conf_thres).nonzero(as_tuple=True)
    confidence, order = confidence[row, label].sort(descending=True, stable=True)
    image, by_image = image[row[order]].sort(stable=True)
    order = order[by_image]  # by image, then in falling confidence
    row = row[order]
    boxes = torch.cat((xywh_to_xyxy(scores[row, :4]), confidence[by_image, None], label[order, None].float()), 1)
    starts = torch.searchsorted(image, torch.arange(given.images + 1, device=image.device))
    planes = boxes[:, :4] + boxes[:, 5:] * offset
    remaining = nms(planes, starts, thresholds.iou_thres, MAX_CANDIDATES, thresholds.max_det)
    is_box = remaining >= 0
    remaining = remaining[is_box]
    return boxes[remaining], row[remaining], is_box.sum(1).tolist()


def suppress(scores: Tensor, thresholds: Thresholds) -> tuple[Tensor, Tensor]:
    """Return the detections (k, 6) of one image, and their rows in `scores`, int64 (k,).

    Only more confident boxes suppress a box, so a few hundred of the most confident usually suffice. If too few of them
    remain, less confident boxes are compared with the remaining ones: a suppressed box suppresses nothing.

    Args:
        scores: boxes (n, 5 + classes) that may exceed the threshold, see `Candidates`
        thresholds: limits on the detections
    """
    from torchvision.ops import nms  # imported here because it takes over a second: errors in flags are reported before

    scores = _allowed_scores(scores, thresholds)
    offset = 0 if thresholds.agnostic_nms else CLASS_OFFSET_PIXELS
    best = scores[:, 5:].amax(1) * scores[:, 4]
    detections, rows, compared = scores.new_zeros(0, 6), torch.zeros(0, dtype=torch.long, device=scores.device), 0
    count = min(FIRST_CANDIDATES_PER_DETECTION * thresholds.max_det, MAX_CANDIDATES)
    while True:
        row, label, confidence = _most_confident(scores, best, thresholds.conf_thres, count)
        new_rows = row[compared:]
        boxes = xywh_to_xyxy(scores[new_rows, :4])
        new = torch.cat((boxes, confidence[compared:, None], label[compared:, None]), 1)
        detections, rows = torch.cat((detections, new)), torch.cat((rows, new_rows))
        planes = detections[:, :4] + detections[:, 5:] * offset
        remaining = nms(planes, detections[:, 4], thresholds.iou_thres)
        detections, rows = detections[remaining], rows[remaining]
        if len(detections) >= thresholds.max_det or len(row) < count or count == MAX_CANDIDATES:
            return detections[: thresholds.max_det], rows[: thresholds.max_det]
        compared, count = count, min(count * CANDIDATE_GROWTH, MAX_CANDIDATES)


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
    """Return the first `count` candidates in falling confidence: row of `scores`, class, confidence, (count,) each.

    Args:
        scores: boxes (n, 5 + classes)
        best: highest confidence (n,) of each box
    """
    least = best.new_zeros(())
    if count < len(best):  # `count` rows have a candidate that reaches `least`
        least = best.nan_to_num(0).topk(count, sorted=False).values.amin()
    (rows,) = (~((best <= conf_thres) | (best < least))).nonzero(as_tuple=True)  # true for rows with a NaN too
    confidence = scores[rows, 5:] * scores[rows, 4:5]
    row, label = ((confidence > conf_thres) & (confidence >= least)).nonzero(as_tuple=True)
    confidence, order = confidence[row, label].sort(descending=True, stable=True)
    order = order[:count]
    return rows[row[order]], label[order].float(), confidence[:count]
