"""The detector's data: images stretched to squares, and a number for the noise of each target's denoising queries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from data.dataset import Item
from data.detection import DetectionData, TrainingItems
from data.sampler import SampleIndex

NOISE_STREAM = 101  # first part of the seed, apart from those of data/sampler.py
KEY_BITS = 24  # of a target's number: float32 holds such whole numbers exactly
OFF_AT_THE_END = ("hsv_h", "hsv_s", "hsv_v", "degrees", "translate", "scale", "shear", "perspective")


@dataclass(eq=False)
class DFineTrainingItems(TrainingItems):
    """Augmented items, in the final epochs only mirrored; the noise has a number in a seventh column of the targets."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plain: dict[str, Any] = dict.fromkeys((*OFF_AT_THE_END, "mosaic", "mixup", "copy_paste"), 0.0)
        self.unmixed = replace(self.augmenter, settings=replace(self.augment, **plain))

    def item(self, sample: SampleIndex, pixels: Tensor) -> Item:
        pixels, targets, info = super().item(sample, pixels)
        rng = np.random.default_rng((NOISE_STREAM, self.seed, sample.epoch, sample.position))
        keys = rng.integers(1 << KEY_BITS, size=(len(targets), 1))
        return pixels, torch.cat((targets, torch.from_numpy(keys).float()), 1), info


@dataclass
class DFineData(DetectionData):
    """A detection data set of stretched images."""

    training_items: ClassVar[type[TrainingItems]] = DFineTrainingItems
    fit: ClassVar[Literal["letterbox", "stretch"]] = "stretch"
