"""Convert a segmenter's outputs to predictions in pixels of the files.

Called by val.py and detect.py, as every task's `Postprocess`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from models.heads.contract import head_of
from models.tasks.contract import Model, Postprocess, Thresholds, View
from models.tasks.detection.postprocess import boxes_in_files
from models.tasks.detection.suppression import allowed_rows, detect_with_more
from models.tasks.detection.views import DecodedView, SuppressedView
from models.tasks.segmentation.masks import DetectedMasks
from models.tasks.segmentation.prediction import SegmentationPrediction
from models.tasks.segmentation.views import (
    GivenMaps,
    MaskMaps,
    PrototypeMaps,
    PrototypeView,
    SegmentationView,
    SuppressedMaskView,
)
from utils.batch import Batch, ImageInfo
from utils.errors import UserError


class SegmentationPostprocess(Postprocess):
    """Run one or several models and detect the instances in the images.

    Args:
        names: class names, by number
    """

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        """Raise `UserError` if `thresholds` name an unknown class."""
        thresholds.refuse_unknown_classes(names)
        self.names, self.thresholds = dict(names), thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[SegmentationView]:
        """Run `model` on `inputs`. Raises `UserError` if `augment`."""
        if augment:
            raise UserError("--augment is for detectors: masks of scaled and mirrored images are not joined")
        outputs = model(inputs)
        if isinstance(outputs[0], list):
            maps, prototypes = outputs
            return [PrototypeView(head_of(model).view(maps, more=prototypes.shape[1]), prototypes)]
        if len(outputs) == 2:  # an exported file's boxes
            boxes, prototypes = outputs
            return [PrototypeView(DecodedView(boxes, more=prototypes.shape[1]), prototypes)]
        detections, counts, masks = outputs
        return [SuppressedMaskView(SuppressedView(detections, counts), masks)]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[SegmentationPrediction]:
        """Return the instances in each image. The boxes of all models suppress each other; each keeps its own model's
        prototypes. A `SuppressedMaskView` is always the only view."""
        boxes, maps = self._detect(cast("Sequence[SegmentationView]", views))
        infos: Sequence[ImageInfo] = batch.infos
        predictions = []
        for info, network_boxes, file_boxes, of_image in zip(
            infos, boxes, boxes_in_files(boxes, infos), maps, strict=True
        ):
            corners = file_boxes[:, :4].numpy()
            retina = self.thresholds.retina_masks
            masks = DetectedMasks(of_image, network_boxes, corners, info.size, info.placement, retina)
            prediction = SegmentationPrediction(
                image=info.image,
                path=info.path,
                size=info.size,
                rows=file_boxes,
                labels=info.rows,
                names=self.names,
                iou_thres=self.thresholds.iou_thres,
                source=masks,
                label_outlines=info.outlines,
            )
            predictions.append(prediction)
        return predictions

    def _detect(self, views: Sequence[SegmentationView]) -> tuple[list[Tensor], list[MaskMaps]]:
        """Return the detections of each image, (k, 6) in pixels of the batch, and their masks."""
        if isinstance(first := views[0], SuppressedMaskView):
            rows = allowed_rows(first.boxes, self.thresholds)
            detections = [image[of_image] for image, of_image in zip(first.boxes.detections, rows, strict=True)]
            return detections, [GivenMaps(image[of_image]) for image, of_image in zip(first.masks, rows, strict=True)]
        prototype_views = [view for view in views if isinstance(view, PrototypeView)]
        detected = detect_with_more([view.boxes for view in prototype_views], self.thresholds)
        prototypes = zip(*(view.prototypes for view in prototype_views), strict=True)
        maps: list[MaskMaps] = [
            PrototypeMaps(one.more, one.view, of_image) for one, of_image in zip(detected, prototypes, strict=True)
        ]
        return [one.boxes for one in detected], maps
