"""Augmentation for classifiers: torchvision's transforms, with every random choice from a generator that is passed.

Called by data/classification.py. torchvision is imported inside functions because it takes more than a second, which
the training of a detector saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from data.augment import torch_seeded_by

CENTRE_CROP_SHARE = 0.875  # share of the shorter side in a validation crop: 224 of 256 pixels
ERASED_RGB = (124, 116, 104)  # ImageNet's mean, 0 to 255: the colour of erased rectangles
MAX_RESIZED_ASPECT = 4  # longer over shorter side of the part that is resized for a centre crop
RANDOM_CROP_ASPECTS = (3 / 4, 4 / 3)  # smallest and largest ratio of the sides


@dataclass(frozen=True)
class TransformSettings:
    """Strengths and probabilities, named as in the hyperparameter file. By default, images are only cropped."""

    crop_scale: float = 1.0  # smallest share of the image's area in a random crop
    fliplr: float = 0.0  # probability, like the next one
    flipud: float = 0.0
    brightness: float = 0.0  # largest relative change, like the next two
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # largest share of the colour circle
    randaugment: int = 0  # number of operations
    randaugment_magnitude: int = 9  # 0 to 30
    erasing: float = 0.0  # probability, like the next two
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_alpha: float = 0.2  # both parameters of the beta distribution of the shares
    cutmix_alpha: float = 1.0


Change = Callable[[int, Tensor], Tensor]  # takes an image's index and its pixels


def unchanged(image: int, pixels: Tensor) -> Tensor:
    """Return the pixels unchanged, for runs without --augmentations."""
    return pixels


class Augmenter:
    """The whole augmentation of a training image.

    Args:
        load: returns an image, uint8 (3, h, w) RGB, and its class, by its index
        count: number of images to choose a partner from
    """

    def __init__(
        self, settings: TransformSettings, load: Callable[[int], tuple[Tensor, int]], count: int, classes: int
    ) -> None:
        self.settings, self.load, self.count, self.classes = settings, load, count, classes
        self.transforms: dict[int, torch.nn.Module] = {}  # by side

    def __call__(
        self,
        image: int,
        side: int,
        generator: np.random.Generator,
        partners: Sequence[int] = (),
        change: Change = unchanged,
    ) -> tuple[Tensor, Tensor]:
        """Return image `image`, uint8 (3, side, side), and the share of each class, float32 (classes,).

        Args:
            partners: index of the image to mix it with; if empty, one is drawn from all images
            change: changes each image before two are mixed
        """
        from torchvision.transforms import v2

        settings = self.settings
        chance, drawn = generator.random(), int(generator.integers(self.count))
        partner = partners[0] if partners else drawn
        if side not in self.transforms:
            self.transforms[side] = torch.nn.Sequential(*_steps(settings, side))
        transform = self.transforms[side]
        with torch_seeded_by(generator):
            pixels, label = self._transformed(image, transform, change)
            if chance < settings.mixup:
                mix = v2.MixUp(alpha=settings.mixup_alpha, num_classes=self.classes)
            elif chance < settings.mixup + settings.cutmix:
                mix = v2.CutMix(alpha=settings.cutmix_alpha, num_classes=self.classes)
            else:
                return pixels, one_hot(torch.tensor(label), self.classes).float()
            other, other_label = self._transformed(partner, transform, change)
            # A batch of two, whose first image is mixed with the second: partners from the training batch would depend
            # on the number of processes.
            mixed, shares = mix(torch.stack((pixels, other)).float(), torch.tensor([label, other_label]))
            return mixed[0].round().to(torch.uint8), shares[0]

    def _transformed(self, image: int, transform: torch.nn.Module, change: Change) -> tuple[Tensor, int]:
        pixels, label = self.load(image)
        return change(image, transform(pixels)), label


def _steps(settings: TransformSettings, side: int) -> list[torch.nn.Module]:
    from torchvision.transforms import v2

    steps: list[torch.nn.Module] = [
        v2.RandomResizedCrop(side, scale=(settings.crop_scale, 1.0), ratio=RANDOM_CROP_ASPECTS, antialias=True)
    ]
    steps += [v2.RandomHorizontalFlip(settings.fliplr)] * (settings.fliplr > 0)
    steps += [v2.RandomVerticalFlip(settings.flipud)] * (settings.flipud > 0)
    if settings.randaugment:
        steps.append(v2.RandAugment(settings.randaugment, settings.randaugment_magnitude))
    jitter = (settings.brightness, settings.contrast, settings.saturation, settings.hue)
    steps += [v2.ColorJitter(*jitter)] * any(jitter)
    steps += [v2.RandomErasing(settings.erasing, value=list(ERASED_RGB))] * (settings.erasing > 0)
    return steps


def centre_crop(image: Tensor, side: int) -> Tensor:
    """Return the centre of an image, uint8 (3, h, w), with 7/8 of its shorter side, as (3, side, side)."""
    from torchvision.transforms.v2 import functional

    longest = MAX_RESIZED_ASPECT * min(image.shape[-2:])  # cut the ends of a strip off before resizing
    image = functional.center_crop(image, [min(length, longest) for length in image.shape[-2:]])
    shrunk = functional.resize(image, [round(side / CENTRE_CROP_SHARE)], antialias=True)
    return functional.center_crop(shrunk, [side, side])
