"""The modules of exported segmenters, which return boxes and prototypes or, with suppression, detections and masks.

Made by `SegmentationTask.export_module`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.tasks.detection.export_module import DecodedDetector, SuppressedDetector
from models.tasks.segmentation.views import cut_by_boxes
from utils.batch import MASK_STRIDE


class DecodedSegmenter(DecodedDetector):
    """A segmenter with the decoding of its boxes, in fp32."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map images (b, 3, h, w), in 0 to 1, to boxes and prototypes.

        Boxes are (b, n, 5 + classes + masks): xywh in pixels, objectness, scores, mask coefficients; prototypes are
        (b, masks, h / 4, w / 4).
        """
        maps, prototypes = self.model(images)
        masks = prototypes.shape[1]
        return self.head.decode(maps, masks), prototypes.float()


class SuppressedSegmenter(SuppressedDetector):
    """A `DecodedSegmenter` with non-maximum suppression. No shape depends on the number of detections."""

    decoding: DecodedSegmenter

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Map images (b, 3, h, w), in 0 to 1, to detections (b, most, 6), their numbers (b,) and masks.

        Detections and numbers are as in `SuppressedDetector`. Masks are (b, most, h / 4, w / 4), 0 or 1, cropped to the
        boxes.
        """
        decoded, prototypes = self.decoding(images)
        masks = prototypes.shape[1]
        detections, counts, box = self.select(decoded[..., :-masks])
        coefficients = decoded[..., -masks:].gather(1, box[..., None].expand(-1, -1, masks))
        logits = (coefficients @ prototypes.flatten(2)).view(*box.shape, *prototypes.shape[2:])
        inside = cut_by_boxes((logits > 0).flatten(0, 1), detections[..., :4].flatten(0, 1) / MASK_STRIDE)
        return detections, counts, inside.view_as(logits).to(torch.float32)
