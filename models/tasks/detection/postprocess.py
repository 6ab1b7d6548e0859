"""Convert a detector's outputs to predictions in pixels of the files.

Called by val.py and detect.py, as every task's `Postprocess`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from models.heads.contract import DetectionHead, HeadView, head_of
from models.tasks.contract import Model, Postprocess, Thresholds, View
from models.tasks.detection.prediction import DetectionPrediction
from models.tasks.detection.suppression import detect, filter_detections
from models.tasks.detection.views import DecodedView, DetectionView, SuppressedView
from models.yolo import head_class
from utils.batch import Batch, ImageInfo

PADDING_GREY = 0.447  # value, in 0 to 1, around a scaled image: near the mean of ImageNet's channels


class Augmentation(NamedTuple):
    """A scaled and possibly mirrored copy of a batch of images, for --augment."""

    scale: float
    mirrored: bool

    def apply(self, images: Tensor, stride: int) -> tuple[Tensor, tuple[float, float]]:
        """Return the augmented images and the exact scale of width and height, after rounding to whole pixels.

        The images, (b, c, h, w) in 0 to 1, are padded on the right and below to whole strides.
        """
        if self.mirrored:
            images = images.flip(3)
        if self.scale == 1:
            return images, (1.0, 1.0)
        sides = images.shape[2:]
        height, width = (int(side * self.scale) for side in sides)
        below, right = (math.ceil(side / stride) * stride - side for side in (height, width))
        small = functional.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)
        padded = functional.pad(small, (0, right, 0, below), value=PADDING_GREY)
        return padded, (width / sides[1], height / sides[0])


AUGMENTATIONS = (Augmentation(1.0, False), Augmentation(0.83, True), Augmentation(0.67, False))  # as in YOLOv5


class DetectionPostprocess(Postprocess):
    """Run one or several models on views of images and detect the objects in them.

    Args:
        names: class names, by number
    """

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        """Raise `UserError` if `thresholds` name an unknown class."""
        thresholds.refuse_unknown_classes(names)
        self.names, self.thresholds = dict(names), thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[DetectionView]:
        """Run `model` on `inputs` or, if `augment`, on each of `AUGMENTATIONS`, the first of which is the identity.

        With `augment` the first view skips the coarsest level's boxes, and the last view the finest level's: the other
        views are better for objects of these sizes.
        """
        if not augment:
            return [_view(model, model(inputs))]
        views: list[HeadView] = []
        for augmentation in AUGMENTATIONS:
            images, scale = augmentation.apply(inputs, model.stride)
            mirrored_width = inputs.shape[3] if augmentation.mirrored else 0
            views.append(head_of(model).view(model(images)).augmented(scale, mirrored_width))
        strides = views[0].strides.tolist()
        if len(strides) > 1:
            coarsest, finest = (strides.index(choose(strides)) for choose in (max, min))
            views[0], views[-1] = views[0].without_level(coarsest), views[-1].without_level(finest)
        return [*views]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[DetectionPrediction]:
        """Return the detections of each image. The boxes of all views, of one or several models, suppress each other; a
        `SuppressedView` is always the only view."""
        detection_views = cast("Sequence[DetectionView]", views)
        infos: Sequence[ImageInfo] = batch.infos
        if isinstance(detection_views[0], SuppressedView):
            detections = filter_detections(detection_views[0], self.thresholds)
        else:
            detections = detect(
                [view for view in detection_views if not isinstance(view, SuppressedView)], self.thresholds
            )
        iou_thres = self.thresholds.iou_thres
        return [
            DetectionPrediction(info.image, info.path, self.names, info.size, boxes, info.rows, iou_thres)
            for boxes, info in zip(boxes_in_files(detections, infos), infos, strict=True)
        ]


def _view(model: Model, outputs: Any) -> DetectionView:
    """Return the view of a network's raw outputs, or of an exported file's boxes or detections."""
    if model.head is not None:
        return head_of(model).view(outputs)
    return DecodedView(_scored(model, outputs)) if isinstance(outputs, Tensor) else SuppressedView(*outputs)


def _scored(model: Model, decoded: Tensor) -> Tensor:
    """Return an exported file's boxes with objectness added if they lack it, (b, n, 5 + classes)."""
    head = head_class(model.yaml)
    return head.scored(decoded) if head and issubclass(head, DetectionHead) else decoded


def boxes_in_files(detections: Sequence[Tensor], infos: Sequence[ImageInfo]) -> list[Tensor]:
    """Convert each image's detections (k, 6) from pixels of the batch to the file's, clipped, in fp64 on the CPU."""
    if not detections:
        return []
    counts = [len(image) for image in detections]
    image = torch.repeat_interleave(torch.tensor(counts))
    offset, scale, size = (
        torch.tensor([pair * 2 for pair in pairs], dtype=torch.float64)[image]
        for pairs in zip(*((info.placement.offset, info.placement.scale, info.size) for info in infos), strict=True)
    )
    rows = torch.cat(list(detections)).cpu()
    corners = ((rows[:, :4] - offset.float()) / scale).clamp(min=torch.zeros(4), max=size)
    return list(torch.split(torch.cat((corners, rows[:, 4:]), 1), counts))
