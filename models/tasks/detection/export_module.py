"""The modules of exported detectors, which return decoded boxes or, with suppression in the graph, detections.

Made by `DetectionTask.export_module`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.heads.boxes import xywh_to_xyxy
from models.heads.contract import head_of
from models.tasks.contract import ExportSettings, Model
from models.tasks.detection.suppression import CLASS_OFFSET_PIXELS

CANDIDATES_PER_DETECTION = 10  # pairs of box and class that enter suppression, per detection of an image


class GraphSuppression(NamedTuple):
    """The settings of the suppression inside an exported file, named as in its metadata."""

    conf_thres: float = 0.25
    iou_thres: float = 0.45
    most: int = 100  # detections per image
    most_per_class: int = 100
    agnostic: bool = False  # whether boxes of different classes suppress each other


def graph_suppression(settings: ExportSettings) -> GraphSuppression:
    """Return the suppression settings that export.py's flags ask for."""
    return GraphSuppression(
        settings.conf_thres,
        settings.iou_thres,
        settings.topk_all,
        min(settings.topk_per_class, settings.topk_all),
        settings.agnostic_nms,
    )


class DecodedDetector(nn.Module):
    """A detector with its decoding, in fp32."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.head = head_of(model)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, 3, h, w), in 0 to 1, to boxes (b, n, outputs), see `DetectionHead.decode`."""
        return self.head.decode(self.model(images))


class SuppressedDetector(nn.Module):
    """A `DecodedDetector` with non-maximum suppression. No shape depends on the number of detections."""

    def __init__(self, decoding: DecodedDetector, settings: GraphSuppression) -> None:
        import torchvision.ops  # noqa: F401  # imported here because torch.jit.trace fails if it traces the first import

        super().__init__()
        self.decoding, self.settings = decoding, settings

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images (b, 3, h, w), in 0 to 1, to detections (b, most, 6) and the number of each image's, int32 (b,).

        Detections are xyxy in pixels, confidence and class, in falling confidence, padded with rows of zeros.
        """
        return self.select(self.decoding.head.scored(self.decoding(images)))[:2]

    def select(self, decoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return detections and their numbers like `forward`, and the index of each detection's box, int64 (b, most).

        The index of a padding row is any number below n.

        Args:
            decoded: boxes (b, n, 5 + classes) with objectness and class scores
        """
        boxes, label, confidence, box = self._candidates(decoded)
        confidence = confidence * self._not_suppressed(boxes, label, confidence)
        if self.settings.most_per_class < self.settings.most:
            confidence = confidence * self._within_class(label, confidence)
        best, order = confidence.topk(self.settings.most)
        rows = torch.cat((boxes, label[..., None]), 2)
        rows = rows.gather(1, order[..., None].expand(-1, -1, 5))
        valid = (best > 0).float()[..., None]
        detections = torch.cat((rows[..., :4], best[..., None], rows[..., 4:]), 2) * valid
        return detections, valid.sum((1, 2)).int(), box.gather(1, order).clamp(max=decoded.shape[1] - 1)

    def _candidates(self, decoded: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the k most confident pairs of box and class: xyxy (b, k, 4); class, confidence and box index (b, k).

        The pairs are in falling confidence; a confidence that does not exceed the threshold is set to 0.
        """
        count, classes = CANDIDATES_PER_DETECTION * self.settings.most, decoded.shape[2] - 5
        # A small image has fewer boxes, hence the padding.
        decoded = torch.cat((decoded, decoded.new_zeros(1, 1, 1).expand(decoded.shape[0], count, classes + 5)), 1)
        # k boxes are enough: each of the k most confident pairs belongs to a box whose best pair is as confident.
        _, box = (decoded[..., 5:].amax(2) * decoded[..., 4]).topk(count)
        rows = decoded.gather(1, box[..., None].expand(-1, -1, classes + 5))
        confidence, pair = (rows[..., 5:] * rows[..., 4:5]).flatten(1).topk(count)
        row = torch.div(pair, classes, rounding_mode="floor")
        boxes = xywh_to_xyxy(rows[..., :4]).gather(1, row[..., None].expand(-1, -1, 4))
        confidence = confidence * (confidence > self.settings.conf_thres)
        return boxes, (pair - row * classes).float(), confidence, box.gather(1, row)

    def _not_suppressed(self, boxes: Tensor, label: Tensor, confidence: Tensor) -> Tensor:
        """Return which candidates are not suppressed by a more confident one, (b, k), 0 or 1.

        Offsets separate images vertically and classes horizontally, so that one call of `nms` serves all.
        """
        from torchvision.ops import nms

        count, k = label.shape
        image = torch.arange(count, device=label.device, dtype=boxes.dtype)[:, None].expand(-1, k)
        plane = torch.zeros_like(label) if self.settings.agnostic else label
        offset = torch.stack((plane, image), 2) * CLASS_OFFSET_PIXELS
        remaining = nms((boxes + offset.repeat(1, 1, 2)).flatten(0, 1), confidence.flatten(), self.settings.iou_thres)
        return torch.zeros_like(confidence).flatten().index_fill(0, remaining, 1.0).view_as(confidence)

    def _within_class(self, label: Tensor, confidence: Tensor) -> Tensor:
        """Return which candidates are among the `most_per_class` most confident of their class, (b, k), 0 or 1."""
        classes = torch.arange(self.decoding.head.nc, device=label.device)
        of_class = (label[..., None] == classes).float() * (confidence > 0)[..., None]
        rank = of_class.cumsum(1)
        return (of_class * (rank <= self.settings.most_per_class)).amax(2)
