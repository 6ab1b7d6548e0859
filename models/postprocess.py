"""From raw maps to detections: decoding and non-maximum suppression."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from utils.boxes import xywh_to_xyxy

MOST_CANDIDATES = 30_000  # per image, the most confident ones
FIRST_LOOK = 4  # times as many candidates as detections are looked at first
CLASS_OFFSET = (
    7680  # pixels between the classes' planes, so that boxes of two classes never overlap; over any image side
)


class Suppression(NamedTuple):
    """What becomes a detection: least confidence, overlap that suppresses, and how many per image at most."""

    conf_thres: float = 0.001
    iou_thres: float = 0.6
    max_det: int = 300


def decode(outputs: list[Tensor], anchors: Tensor, strides: Tensor) -> Tensor:
    """Raw maps (b, anchors, h, w, 5 + classes) by level to predictions (b, n, 5 + classes): xywh in pixels, objectness,
    class scores. anchors: (levels, anchors, 2) in cells.

    xy = (2 sigmoid - 0.5 + cell) stride; wh = (2 sigmoid)^2 anchor.
    """
    decoded = []
    for raw, level_anchors, stride in zip(outputs, anchors, strides, strict=True):
        batch, _, height, width, size = raw.shape
        rows, columns = torch.meshgrid(
            torch.arange(height, device=raw.device), torch.arange(width, device=raw.device), indexing="ij"
        )
        scores = raw.float().sigmoid()
        centre = (scores[..., :2] * 2 - 0.5 + torch.stack((columns, rows), -1)) * stride
        sides = (scores[..., 2:4] * 2) ** 2 * (level_anchors * stride)[:, None, None]
        decoded.append(torch.cat((centre, sides, scores[..., 4:]), -1).view(batch, -1, size))
    return torch.cat(decoded, 1)


def suppress(predictions: Tensor, conf_thres: float, iou_thres: float, max_det: int) -> list[Tensor]:
    """Predictions (b, n, 5 + classes) to detections, (k, 6) per image: xyxy, confidence, class, in falling confidence.

    A box counts for every class whose objectness x score exceeds `conf_thres`; of boxes of one class that overlap by
    more than `iou_thres` the most confident stays. There is no time limit: every image is finished.
    """
    return [_suppress_image(image, conf_thres, iou_thres, max_det) for image in predictions]


def _suppress_image(image: Tensor, conf_thres: float, iou_thres: float, max_det: int) -> Tensor:
    image = image[image[:, 4] > conf_thres]
    confidence = image[:, 5:] * image[:, 4:5]
    box, label = (confidence > conf_thres).nonzero(as_tuple=True)
    confidence = confidence[box, label]
    confidence, order = confidence.sort(descending=True, stable=True)
    confidence, order = confidence[:MOST_CANDIDATES], order[:MOST_CANDIDATES]
    boxes, label = xywh_to_xyxy(image[:, :4])[box[order]], label[order].float()
    kept = _strongest(boxes + label[:, None] * CLASS_OFFSET, confidence, iou_thres, max_det)
    return torch.cat((boxes[kept], confidence[kept, None], label[kept, None]), 1)


def _strongest(boxes: Tensor, confidence: Tensor, iou_thres: float, most: int) -> Tensor:
    """The first `most` boxes that survive suppression, of boxes in falling confidence.

    A box is suppressed by stronger ones only, so the strongest few hundred mostly decide alone: the survivors among the
    first k are the first survivors of all. k grows until there are enough of them.
    """
    from torchvision.ops import nms  # here, for it takes more than a second that a wrong flag need not wait for

    k = FIRST_LOOK * most
    while True:
        kept = nms(boxes[:k], confidence[:k], iou_thres)
        if len(kept) >= most or k >= len(boxes):
            return kept[:most]
        k *= FIRST_LOOK
