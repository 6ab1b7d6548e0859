"""The user's augmentations: the callables in the Python file of --augmentations, applied to finished training items.

A callable gets the parts that its parameters name (`PARTS`), and the generator of the item as `rng`; it returns these
parts in the same order. Everything that it draws depends on (seed, epoch, position) alone. Called by the data sets.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np

from data.augment import MIN_AREA_SHARE, Sample, torch_seeded_by
from data.polygons import Polygons
from utils.errors import UserError
from utils.user_code import explained, imported, trust

FLAG = "--augmentations"
LIST = "AUGMENTATIONS"  # name in the file of a list of callables, or of an albumentations Compose
PARTS = ("image", "boxes", "classes", "polygons")
PIXEL_CENTRE = 0.5  # where albumentations' points begin: at the first pixel's centre; ours begin at its edge


class UserAugmentations(NamedTuple):
    """A user's callables, in order; there are none without a file.

    Attributes:
        classes: number of classes of the data set
    """

    file: str = ""
    classes: int = 0
    calls: tuple[Callable[..., Any], ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return read_augmentations, (self.file, self.classes)  # called by loader processes that do not fork

    @property
    def messages(self) -> list[str]:
        """A line for the console with the callables in order, if there are any."""
        return [f"augmentations of {self.file}: {', '.join(map(_name, self.calls))}"] if self.calls else []

    def __call__(self, sample: Sample, rng: np.random.Generator, image: str) -> Sample:
        """Return the changed sample. Raises `UserError` with the file, the callable and the image if one fails.

        Args:
            image: the image's name, for messages
        """
        if not self.calls:
            return sample
        outlines = sample.polygons.outlines() if sample.polygons else np.zeros((len(sample.boxes), 0, 2))
        given = _parts(cv2.cvtColor(sample.image, cv2.COLOR_BGR2RGB), sample.boxes, sample.classes, outlines)
        state = random.getstate(), np.random.get_state()  # noqa: NPY002
        with torch_seeded_by(rng):
            random.seed(int(rng.integers(2**63)))
            np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002
            for call in self.calls:
                with explained(self.file, f", in the augmentation '{_name(call)}' of {image}"):
                    given = self._changed(call, given, rng, sample.polygons is not None)
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        pixels, boxes, classes, polygons = given.values()
        shapes = Polygons.of(polygons) if sample.polygons else None
        return Sample(cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), boxes, classes.astype(np.float32), shapes)

    def _changed(self, call: Any, given: dict[str, Any], rng: Any, outlined: bool) -> dict[str, Any]:
        """Return the parts after a call. Raises ValueError if they are not a sample of this data set."""
        words, shape = inspect.signature(call).parameters, given["image"].shape
        named = [part for part in words if part in PARTS]
        returned = call(**{word: value for word, value in {**given, "rng": rng}.items() if word in words})
        parts = _parts(**given | dict(zip(named, (returned,) if len(named) == 1 else returned, strict=True)))
        image, boxes, classes, polygons = parts.values()
        if not (
            (image.dtype, image.shape) == (np.uint8, shape)
            and len(boxes) == len(classes) == len(polygons)
            and (boxes[:, 2:] >= boxes[:, :2]).all()
            and np.isfinite(boxes).all()
            and ((classes >= 0) & (classes < self.classes)).all()
            and not (outlined and ("boxes" in named) != ("polygons" in named))
        ):
            raise ValueError(
                f"it must return an image uint8 {shape}, and equal numbers of boxes x1 y1 x2 y2, of classes below "
                f"{self.classes}, and of polygons (take all of them if it adds, moves or drops objects)"
            )
        return parts


def _parts(image: Any, boxes: Any, classes: Any, polygons: Any) -> dict[str, Any]:
    """Return what a callable gets, as arrays of its own, or a list of these for the polygons."""
    outlines = [np.array(outline, np.float32).reshape(-1, 2) for outline in polygons]
    flat = np.array(boxes, np.float32).reshape(-1, 4), np.array(classes, np.int64).reshape(-1)
    return dict(zip(PARTS, (np.ascontiguousarray(image), *flat, outlines), strict=True))


def _name(call: Any) -> str:
    return str(getattr(call, "__name__", type(call).__name__))


def read_augmentations(file: str, classes: int, is_named: bool = True) -> UserAugmentations:
    """Run the Python file of --augmentations, '' for none. Raises `UserError`.

    Args:
        classes: number of classes of the data set
        is_named: whether the user names the file now; otherwise it is run only if this user has run the same before
    """
    if not file:
        return UserAugmentations()
    path = Path(file).resolve()
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"{FLAG} {file} is not a Python file; give the path of a .py file with a list {LIST}")
    trust(path, f"{FLAG} {file}", is_named, "the run's settings.yaml")
    os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # importing it must not ask a server for a newer version
    with imported(path, FLAG) as module:
        listed = getattr(module, LIST, ())
        calls = tuple(map(_adapted, listed if isinstance(listed, (list, tuple)) else [listed]))
        if not calls or not all(map(callable, calls)):
            raise UserError(f"{path} has no list {LIST} of functions; write {LIST} = [my_function]")
        return UserAugmentations(file, classes, calls)


def _adapted(call: Any) -> Any:
    """Return an albumentations transform as a callable like the others; return anything else unchanged."""
    if not hasattr(call, "set_random_state"):
        return call
    import albumentations

    compose = albumentations.Compose(
        [call],
        bbox_params=albumentations.BboxParams("pascal_voc", ["numbers"], min_visibility=MIN_AREA_SHARE, clip=True),
        keypoint_params=albumentations.KeypointParams("xy", remove_invisible=False),
    )

    def changed(image: Any, boxes: Any, classes: Any, polygons: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        """Drop objects of which too little is left; the box of an outlined one is the extent of its outline."""
        compose.set_random_state(rng, random.Random(int(rng.integers(2**63))))  # else by the loader process
        whole, (height, width) = Polygons.of(polygons), image.shape[:2]
        points, numbers = whole.points - PIXEL_CENTRE, np.arange(len(boxes))
        after = compose(image=image, bboxes=boxes, numbers=numbers, keypoints=points)
        left = np.isin(numbers, after["numbers"])
        moved = whole.at(np.array(after["keypoints"], np.float32).reshape(-1, 2) + PIXEL_CENTRE).subset(left)
        cut, extents = moved.cut(np.array((0, 0, width, height), np.float32))
        boxes = np.where(moved.counts[:, None] > 0, extents, np.reshape(after["bboxes"], (-1, 4)))
        visible = (boxes[:, 2:] > boxes[:, :2]).all(1)
        return after["image"], boxes[visible], classes[left][visible], cut.subset(visible).outlines()

    changed.__name__ = type(call).__name__
    return changed
