"""What the losses of several tasks share: constants on a device, class weights, and a detector's loss on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from models.tasks.contract import Criterion, Function, LossTerms
from utils.batch import Batch
from utils.errors import UserError, nearest

MIN_TARGETS = 16
OUTSIDE = (0.0, 0.0, -1.0, -1.0, 0.0, 0.0)  # image, class, xywh of a target that matches nothing


@cache
def device_constant(values: Any, device: torch.device) -> Tensor:
    """Return a float32 tensor of plain values, copied to the device only once, as every copy waits for the device."""
    with torch.inference_mode(False):  # a tensor that a validation makes must be usable in training too
        return torch.tensor(values, dtype=torch.float32, device=device)


def at_least_float32(values: Tensor) -> Tensor:
    """Return half-precision values as float32, other values unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def weights_by_class(names: Mapping[int, str], weights: Mapping[str, float]) -> tuple[float, ...]:
    """Return the weight of each class, by number; () if all are 1. Raises `UserError` for an unknown name.

    Args:
        names: class names, by number
        weights: weights by class name; other classes have weight 1
    """
    known = set(names.values())
    for name in weights:
        if name not in known:
            raise UserError(
                f"class_weights: the data set has no class '{name}'{nearest(name, known)}; correct the name"
            )
    by_number = tuple(float(weights.get(names[k], 1.0)) for k in sorted(names))
    return by_number if set(by_number) - {1.0} else ()


class BoxCriterion(Criterion):
    """The loss of a detector, with YOLOv5's objective. Targets outside of the images must not change it."""

    def for_gpu(self, recorded: Callable[[Function], Function]) -> Criterion:
        """Return the loss with padded targets; a subclass's subclass, which may read what is not recorded, as it is."""
        return PaddedCriterion(self, recorded) if BoxCriterion in type(self).__bases__ else self

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the sum of the terms, times the images of a step."""
        return means.sum() * images

    def weight(self, batch: Batch) -> float:
        """Return 1: YOLOv5 weights all batches of a validation equally."""
        return 1.0


def padded(targets: Tensor) -> Tensor:
    """Return targets (m, 6) and, after them, boxes of no size outside of image 0, so that there are a power of two.

    Or a power of two and half of it: 16, 24, 32, 48 ...; at least one is added.
    """
    power = 1 << max(len(targets).bit_length(), 4)
    length = power * 3 // 4 if len(targets) < power * 3 // 4 and power > MIN_TARGETS else power
    box = device_constant(OUTSIDE, targets.device)
    return torch.cat((targets, box.expand(length - len(targets), -1)))


class PaddedCriterion(BoxCriterion):
    """A detector's loss on a GPU: batches have one of a few numbers of targets, so that kernels can be recorded.

    They have so whether or not kernels are recorded, because a sum over more targets is rounded differently.

    Args:
        recorded: takes a function of tensors, and returns one that replays its kernels
    """

    def __init__(self, criterion: BoxCriterion, recorded: Callable[[Function], Function]) -> None:
        self.criterion, self.recorded = criterion, recorded
        self.objective, self.weight = criterion.objective, criterion.weight  # type: ignore[method-assign]
        self.functions: dict[torch.Size, tuple[Function, Function]] = {}  # hints and loss, by the shape of the images
        self.least = 1.0  # of the last loss

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the hints for the padded targets."""
        if type(self.criterion).hints is Criterion.hints:
            return ()
        return self._functions(batch)[0](padded(batch.targets))  # type: ignore[no-any-return]

    def __call__(self, outputs: Any, batch: Batch) -> LossTerms:
        """Return the loss terms for the padded targets."""
        sums, counts, weights = self._functions(batch)[1](outputs, padded(batch.targets))
        return LossTerms(sums, counts, weights, self.least)

    def _functions(self, batch: Batch) -> tuple[Function, Function]:
        shape = batch.images.shape
        if shape not in self.functions:
            like = Batch(torch.empty(shape, device="meta"), batch.targets, ())  # only the shape of its images is read

            def hints(targets: Tensor) -> tuple[Tensor, ...]:
                return self.criterion.hints(replace(like, targets=targets))

            def loss(outputs: Any, targets: Tensor) -> tuple[Tensor, ...]:
                terms = self.criterion(outputs, replace(like, targets=targets))
                self.least = terms.least
                return terms.sums, terms.counts, terms.weights

            self.functions[shape] = self.recorded(hints), self.recorded(loss)
        return self.functions[shape]


class UnavailableCriterion(BoxCriterion):
    """The loss of an exported file, which does not return raw outputs: every one of `count` terms is NaN."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __call__(self, outputs: None, batch: Batch) -> LossTerms:
        """Return terms of NaN."""
        ones = torch.ones(self.count, 1)
        return LossTerms(ones * torch.nan, ones, ones)
