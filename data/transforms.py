"""What a classifier's images go through: torchvision's transforms, every random choice from a generator of ours.

torchvision is imported where it is used: it takes more than a second, which a detector need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

SHOWN_SHARE = 0.875  # of the shorter side that a validation crop shows: 224 of 256 pixels
MEAN = (124, 116, 104)  # ImageNet's, RGB: what an erased rectangle is filled with
LONGEST = 4  # times its shorter side: more of an image has no part in its middle
ASPECT = (3 / 4, 4 / 3)  # of a random crop


@dataclass(frozen=True)
class TransformSettings:
    """Strengths and probabilities, named as in the hyperparameter file. These change nothing but the crop."""

    crop_scale: float = 1.0  # least share of the image's area that a random crop takes
    fliplr: float = 0.0  # probabilities
    flipud: float = 0.0
    brightness: float = 0.0  # largest relative changes
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0  # largest share of the colour circle
    randaugment: int = 0  # operations
    randaugment_magnitude: int = 9  # 0 to 30
    erasing: float = 0.0  # probabilities
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_alpha: float = 0.2  # both parameters of the beta distribution that shares are drawn from
    cutmix_alpha: float = 1.0


@contextmanager
def drawing_from(generator: np.random.Generator) -> Iterator[None]:
    """Within, torch's random numbers on the CPU follow from `generator`; afterwards they go on as before."""
    own = torch.default_generator
    before = own.get_state()
    own.manual_seed(int(generator.integers(2**63)))
    try:
        yield
    finally:
        own.set_state(before)


class Augmenter:
    """Random crop, flips, colours, and what else the settings ask for, for images uint8 (3, h, w) RGB.

    load: reads an image by its number, and its class; `count` images of so many `classes` there are to mix with.
    """

    def __init__(
        self,
        settings: TransformSettings,
        load: Callable[[int], tuple[Tensor, int]],
        count: int,
        classes: int,
    ) -> None:
        self.settings, self.load, self.count, self.classes = settings, load, count, classes
        self.transforms: dict[int, torch.nn.Module] = {}  # by side

    def __call__(
        self, image: int, side: int, generator: np.random.Generator, partners: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """The image, uint8 (3, side, side), and the share of each class, float32 (classes,).

        `partners`: the image that it is mixed with, where it is; none: one is drawn from all.
        """
        from torchvision.transforms import v2

        settings = self.settings
        chance, partner = generator.random(), int(generator.integers(self.count))
        partner = partners[0] if partners else partner
        if side not in self.transforms:
            self.transforms[side] = torch.nn.Sequential(*_steps(settings, side))
        transform = self.transforms[side]
        with drawing_from(generator):
            pixels, label = self._one(image, transform)
            if chance < settings.mixup:
                mix = v2.MixUp(alpha=settings.mixup_alpha, num_classes=self.classes)
            elif chance < settings.mixup + settings.cutmix:
                mix = v2.CutMix(alpha=settings.cutmix_alpha, num_classes=self.classes)
            else:
                return pixels, one_hot(torch.tensor(label), self.classes).float()
            other, other_label = self._one(partner, transform)
            # A batch of two, of which the first is mixed with the second: partners in the batch that is trained on
            # would depend on the number of processes.
            mixed, shares = mix(torch.stack((pixels, other)).float(), torch.tensor([label, other_label]))
            return mixed[0].round().to(torch.uint8), shares[0]

    def _one(self, image: int, transform: torch.nn.Module) -> tuple[Tensor, int]:
        pixels, label = self.load(image)
        return transform(pixels), label


def _steps(settings: TransformSettings, side: int) -> list[torch.nn.Module]:
    from torchvision.transforms import v2

    steps: list[torch.nn.Module] = [
        v2.RandomResizedCrop(side, scale=(settings.crop_scale, 1.0), ratio=ASPECT, antialias=True)
    ]
    steps += [v2.RandomHorizontalFlip(settings.fliplr)] * (settings.fliplr > 0)
    steps += [v2.RandomVerticalFlip(settings.flipud)] * (settings.flipud > 0)
    if settings.randaugment:
        steps.append(v2.RandAugment(settings.randaugment, settings.randaugment_magnitude))
    jitter = (settings.brightness, settings.contrast, settings.saturation, settings.hue)
    steps += [v2.ColorJitter(*jitter)] * any(jitter)
    steps += [v2.RandomErasing(settings.erasing, value=list(MEAN))] * (settings.erasing > 0)
    return steps


def centre_crop(image: Tensor, side: int) -> Tensor:
    """The middle of an image, uint8 (3, h, w), with most of its shorter side shown, as (3, side, side)."""
    from torchvision.transforms.v2 import functional

    most = LONGEST * min(image.shape[-2:])  # of a strip, what will not be shown is cut away before it is enlarged
    image = functional.center_crop(image, [min(length, most) for length in image.shape[-2:]])
    shrunk = functional.resize(image, [round(side / SHOWN_SHARE)], antialias=True)
    return functional.center_crop(shrunk, [side, side])
