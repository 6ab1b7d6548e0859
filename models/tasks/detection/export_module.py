"""What an exported detector computes: the decoded boxes, or with suppression in the graph the detections."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.tasks.detection.postprocess import CLASS_OFFSET, Look, decode
from models.yolo import YoloModel
from utils.boxes import xywh_to_xyxy

CANDIDATES = 10  # times as many boxes and classes of an image as it may have detections take part in the suppression


class InGraph(NamedTuple):
    """The suppression inside an exported file."""

    conf_thres: float = 0.25
    iou_thres: float = 0.45
    most: int = 100  # detections of an image
    most_per_class: int = 100
    agnostic: bool = False  # boxes of different classes suppress each other too


class Decoding(nn.Module):
    """A detector with its decoding, in fp32: images (b, 3, h, w) in 0 to 1 to (b, n, 5 + classes), as in `Decoded`."""

    def __init__(self, model: YoloModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) to (b, n, 5 + classes): x, y, width, height in pixels, objectness, scores."""
        head = self.model.detect
        return decode(Look(self.model(images), head.anchors.float(), head.stride.float()))


class Suppressing(nn.Module):
    """`Decoding` with non-maximum suppression, in shapes that do not depend on what is found."""

    def __init__(self, decoding: Decoding, limits: InGraph) -> None:
        super().__init__()
        self.decoding, self.limits = decoding, limits

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """(b, 3, h, w) to detections (b, most, 6), xyxy in pixels, confidence, class, in falling confidence, rows of
        zeros behind; and their numbers (b,), int32."""
        boxes, label, confidence = self._candidates(self.decoding(images))
        confidence = confidence * self._kept(boxes, label, confidence)
        if self.limits.most_per_class < self.limits.most:
            confidence = confidence * self._within_class(label, confidence)
        best, order = confidence.topk(self.limits.most)
        rows = torch.cat((boxes, label[..., None]), 2)
        rows = rows.gather(1, order[..., None].expand(-1, -1, 5))
        found = (best > 0).float()[..., None]
        detections = torch.cat((rows[..., :4], best[..., None], rows[..., 4:]), 2) * found
        return detections, found.sum((1, 2)).int()

    def _candidates(self, decoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The strongest k boxes with a class: xyxy (b, k, 4), class and confidence (b, k), in falling confidence; the
        confidence is 0 where it is no more than the threshold."""
        count, classes = CANDIDATES * self.limits.most, decoded.shape[2] - 5
        # A small image has fewer boxes.
        decoded = torch.cat((decoded, decoded.new_zeros(1, 1, 1).expand(decoded.shape[0], count, classes + 5)), 1)
        # k boxes are enough: each of the strongest k pairs belongs to a box whose best is as strong.
        _, box = (decoded[..., 5:].amax(2) * decoded[..., 4]).topk(count)
        rows = decoded.gather(1, box[..., None].expand(-1, -1, classes + 5))
        confidence, pair = (rows[..., 5:] * rows[..., 4:5]).flatten(1).topk(count)
        row = torch.div(pair, classes, rounding_mode="floor")
        boxes = xywh_to_xyxy(rows[..., :4]).gather(1, row[..., None].expand(-1, -1, 4))
        return boxes, (pair - row * classes).float(), confidence * (confidence > self.limits.conf_thres)

    def _kept(self, boxes: Tensor, label: Tensor, confidence: Tensor) -> Tensor:
        """Which candidates no stronger one suppresses, (b, k), 0 or 1. Images lie apart from each other downwards and
        classes sidewards, so that one suppression does for all."""
        from torchvision.ops import nms

        count, k = label.shape
        image = torch.arange(count, device=label.device, dtype=boxes.dtype)[:, None].expand(-1, k)
        plane = torch.zeros_like(label) if self.limits.agnostic else label
        apart = torch.stack((plane, image), 2) * CLASS_OFFSET
        kept = nms((boxes + apart.repeat(1, 1, 2)).flatten(0, 1), confidence.flatten(), self.limits.iou_thres)
        return torch.zeros_like(confidence).flatten().index_fill(0, kept, 1.0).view_as(confidence)

    def _within_class(self, label: Tensor, confidence: Tensor) -> Tensor:
        """Which candidates are among the strongest `most_per_class` of their class, (b, k), 0 or 1."""
        classes = torch.arange(self.decoding.model.detect.nc, device=label.device)
        of_class = (label[..., None] == classes).float() * (confidence > 0)[..., None]
        rank = of_class.cumsum(1)
        return (of_class * (rank <= self.limits.most_per_class)).amax(2)
