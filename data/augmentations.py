"""The user's augmentations: the callables in the Python file of --augmentations, applied to finished training items.

A callable gets what its parameters name, of image, boxes and classes, and the generator of the item as `rng`; it
returns the same in this order. What it draws depends on (seed, epoch, position) alone. Called by the data sets.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from data.augment import MIN_AREA_SHARE, Sample, seed_torch
from utils.errors import UserError
from utils.user_code import as_user_error, imported


class UserAugmentations(NamedTuple):
    """A user's callables by name, in order; there are none without a file. The data set has `classes` classes."""

    file: str = ""
    classes: int = 0
    calls: tuple[tuple[str, Callable[..., Any]], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return read_augmentations, (self.file, self.classes)  # called by loader processes that do not fork

    def __call__(self, sample: Sample, rng: np.random.Generator, image: str) -> Sample:
        """Return the changed sample of the file `image`. Raises `UserError` with file and callable if one fails."""
        order = np.s_[..., ::-1] if sample.image.ndim == 3 else np.s_[...]
        parts = {"image": sample.image[order], "boxes": sample.boxes, "classes": sample.classes}
        parts = _checked(parts, sample, self.classes)
        with seed_torch(rng):
            random.seed(int(rng.integers(2**63)))
            np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002
            for title, call in self.calls:
                with as_user_error(self.file, f", in the augmentation '{title}' of {image}"):
                    parameters, arguments = inspect.signature(call).parameters, {**parts, "rng": rng}
                    returned = call(**{name: value for name, value in arguments.items() if name in parameters})
                    names = [name for name in parameters if name in parts]
                    changed = dict(zip(names, (returned,) if len(names) == 1 else returned, strict=True))
                    parts = _checked(parts | changed, sample, self.classes)
        pixels, classes = np.ascontiguousarray(parts["image"][order]), parts["classes"].astype(np.float32)
        return Sample(pixels, parts["boxes"], classes, sample.polygons)


def _checked(parts: dict[str, Any], before: Sample, classes: int) -> dict[str, Any]:
    """Return image, boxes and classes as arrays of their own. Raises ValueError if they are not a sample's."""
    image, boxes = np.array(parts["image"], order="C"), np.array(parts["boxes"], np.float32).reshape(-1, 4)
    numbers, (dtype, shape) = np.array(parts["classes"], np.int64).reshape(-1), (before.image.dtype, before.image.shape)
    is_image, are_boxes = (image.dtype, image.shape) == (dtype, shape), (boxes[:, 2:] >= boxes[:, :2]).all()
    if not (is_image and are_boxes and len(numbers) == len(boxes) and ((numbers >= 0) & (numbers < classes)).all()):
        needs = f"equal numbers of boxes x1 y1 x2 y2, none NaN, and classes below {classes}"
        raise ValueError(f"it must return an image {dtype} {shape} and, if objects change, {needs}")
    if before.polygons is not None and (boxes.shape != before.boxes.shape or (abs(boxes - before.boxes) > 1).any()):
        raise ValueError("objects with outlines must stay where they are: change the image alone")
    return {"image": image, "boxes": boxes, "classes": numbers}


def read_augmentations(file: str, classes: int, named_by_user: bool = True) -> UserAugmentations:
    """Run the Python file of --augmentations, '' for none. Raises `UserError`.

    A file that the user does not name now (`named_by_user`) is run only if this user has run the same before.
    """
    if not file:
        return UserAugmentations()
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # importing it must not ask a server for a newer version
    with imported(file, "--augmentations", named_by_user) as module:
        listed = getattr(module, "AUGMENTATIONS", ())
        listed = listed if isinstance(listed, (list, tuple)) else [listed]  # an albumentations Compose
        if not listed or not all(map(callable, listed)):
            raise UserError(f"{file} has no list AUGMENTATIONS = [my_function]")
        calls = ((str(getattr(call, "__name__", type(call).__name__)), _adapted(call)) for call in listed)
        return UserAugmentations(file, classes, tuple(calls))


def _adapted(call: Any) -> Any:
    """Return an albumentations transform as a callable like the others; return anything else unchanged."""
    if not hasattr(call, "set_random_state"):
        return call
    import albumentations

    options = albumentations.BboxParams("pascal_voc", ["classes"], min_visibility=MIN_AREA_SHARE, clip=True)
    compose = albumentations.Compose([call], bbox_params=options)

    def changed(image: Any, boxes: Any, classes: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        compose.set_random_state(rng, random.Random(int(rng.integers(2**63))))  # else by the loader process
        after = compose(image=image, bboxes=boxes, classes=classes)
        return after["image"], after["bboxes"], after["classes"]

    return changed
