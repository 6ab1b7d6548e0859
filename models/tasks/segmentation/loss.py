"""The segmentation loss: the detector's terms and a mask term.

Made by `SegmentationTask.criterion`; called by the training loop and the evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from models.heads.anchors.head import Segment
from models.heads.anchors.loss import DetectionCriterion, LossSettings
from models.heads.anchors.target_assignment import Level, MapSizes, map_sizes, match, near_cells
from models.heads.boxes import EPSILON
from models.tasks.contract import LossTerms
from models.tasks.segmentation.mask_loss import MaskMatches, mask_sums, plan_masks
from models.tasks.shared.losses import at_least_float32, device_constant
from utils.batch import Batch, SegmentationBatch, box_windows

LOSS_NAMES = ("box_loss", "seg_loss", "obj_loss", "cls_loss")  # names of the terms, in the order of `LossTerms`


class SegmentationCriterion(DetectionCriterion):
    """The detector's terms, and the cross-entropy of the masks of all outputs that are matched to targets.

    Formulas and gains are YOLOv5's. The host repeats the matching so that it need not wait for the device; for this the
    criterion copies the anchors to the host when it is made.
    """

    def __init__(self, settings: LossSettings, head: Segment, class_weights: Sequence[float] = ()) -> None:
        super().__init__(settings, head, class_weights)
        self.masks = head.no - 5 - head.nc
        self._host_anchors = head.anchors.detach().cpu().clone()

    def __call__(  # type: ignore[override]
        self, outputs: tuple[Sequence[Tensor | Level], Tensor], batch: Batch
    ) -> LossTerms:
        """Return the loss terms, whose parts are the levels.

        The mask term is the sum over the images of the mean over an image's matches on a level; its count is the number
        of images. A match's value is the sum of the cross-entropies in its box, divided by the number of the map's
        pixels and by the box's normalised area.

        Args:
            outputs: maps as for `DetectionCriterion`, with 5 + classes + masks outputs, and prototypes (b, masks, h, w)
        """
        given = cast("SegmentationBatch", batch)
        maps, prototypes = outputs
        matched = self.match_outputs(maps, given.targets)
        terms = self.terms(matched, given.targets)
        size = (prototypes.shape[2], prototypes.shape[3])
        plan = plan_masks(
            self._mask_matches(map_sizes(maps), given.host_targets, size),
            given.host_targets[:, 0].astype(np.int64),
            box_windows(given.host_targets[:, 2:], *size).astype(np.int64),
            given.windows,
            size,
            len(maps),
            self.masks,
            prototypes.device,
        )
        coefficients = matched.rows.flatten(0, 2)[:, 5 + self.classes :]
        sums = mask_sums(coefficients, at_least_float32(prototypes), given.mask_pixels, plan)
        counts = device_constant((float(len(prototypes)),) * len(maps), prototypes.device)
        weights = device_constant((self.settings.box,) * len(maps), prototypes.device)
        sums, counts, weights = (
            torch.cat((of_boxes[:1], of_masks[None].to(of_boxes), of_boxes[1:]))
            for of_boxes, of_masks in zip(
                (terms.sums, terms.counts, terms.weights), (sums, counts, weights), strict=True
            )
        )
        return LossTerms(sums, counts, weights, terms.least)

    def _mask_matches(self, sizes: MapSizes, targets: np.ndarray, size: tuple[int, int]) -> MaskMatches:
        """Match targets on the host, as the detector does on the device.

        Args:
            sizes: height and width of each level's map
            targets: image, class and normalised xywh of the targets, (m, 6)
            size: height and width of the mask maps
        """
        cells = near_cells(sizes, torch.from_numpy(targets))
        matched = match(cells, self._host_anchors, self.settings.anchor_t).numpy()
        level, cell, anchor = np.nonzero(matched)
        _, near, anchors = matched.shape
        target = cell % max(len(targets), 1)
        image = targets[target, 0].astype(np.int64) * len(sizes) + level
        area = targets[target, 4] * targets[target, 5] * np.float32(size[0] * size[1])
        if self.class_weights:  # the mean over an image's matches is weighted
            share = np.array(self.class_weights)[targets[target, 1].astype(np.int64)]
            weight = share / (area.clip(min=EPSILON) * np.bincount(image, share)[image]) if len(target) else area
        else:
            weight = 1 / (area.clip(min=EPSILON) * np.bincount(image)[image]) if len(target) else area
        return MaskMatches(target, (level * near + cell) * anchors + anchor, level, weight.astype(np.float32))
