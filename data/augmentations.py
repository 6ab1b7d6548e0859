"""The user's augmentations: the callables in the Python file of --augmentations, applied to finished training items.

A callable gets the parts that its parameters name (`PARTS`), and the generator of the item as `rng`; it returns these
parts in the same order. Everything that it draws depends on (seed, epoch, position) alone. Called by the data sets.
"""

from __future__ import annotations

import inspect
import os
import random
import sys
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
LIST = "AUGMENTATIONS"  # name in the file of a list of callables, or of an albumentations transform
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
        boxes, outlined = sample.boxes.astype(np.float32), sample.polygons is not None
        outlines = sample.polygons.outlines() if sample.polygons else np.zeros((len(boxes), 0, 2))
        polygons = [outline.astype(np.float32) for outline in outlines]
        values = (cv2.cvtColor(sample.image, cv2.COLOR_BGR2RGB), boxes, sample.classes.astype(np.int64), polygons)
        state = random.getstate(), np.random.get_state()  # noqa: NPY002
        with torch_seeded_by(rng):
            random.seed(int(rng.integers(2**63)))
            np.random.seed(int(rng.integers(2**32)))  # noqa: NPY002
            for call in self.calls:
                with explained(self.file, f", in the augmentation '{_name(call)}' of {image}"):
                    values = self._changed(call, dict(zip(PARTS, values, strict=True)), rng, outlined)
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        pixels, boxes, classes, polygons = values
        shapes = Polygons.of(polygons) if outlined else None
        return Sample(cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR), boxes, classes.astype(np.float32), shapes)

    def _changed(
        self, call: Callable[..., Any], given: dict[str, Any], rng: np.random.Generator, outlined: bool
    ) -> Any:
        """Return the parts after a call. Raises ValueError if they are not a sample of this data set."""
        given, shape = {**given, "rng": rng}, given["image"].shape
        words = [word for word in inspect.signature(call).parameters if word in given]
        returned, parts = call(**{word: given[word] for word in words}), [word for word in words if word != "rng"]
        given |= zip(parts, (returned,) if len(parts) == 1 else returned, strict=True)
        image, classes = given["image"], np.array(given["classes"], np.int64).reshape(-1)
        boxes, polygons = np.array(given["boxes"], np.float32).reshape(-1, 4), given["polygons"]
        if not (
            isinstance(image, np.ndarray)
            and (image.dtype, image.shape) == (np.uint8, shape)
            and len(boxes) == len(classes) == len(polygons)
            and (boxes[:, 2:] >= boxes[:, :2]).all()
            and np.isfinite(boxes).all()
            and ((classes >= 0) & (classes < self.classes)).all()
            and not (outlined and ("boxes" in parts) != ("polygons" in parts))
        ):
            raise ValueError(
                f"it must return an image uint8 {shape}, and equal numbers of boxes x1 y1 x2 y2, of classes below "
                f"{self.classes}, and of polygons (take all of them if it adds, moves or drops objects)"
            )
        return (
            np.ascontiguousarray(image),
            boxes,
            classes,
            [np.array(outline, np.float32).reshape(-1, 2) for outline in polygons],
        )


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
    package = sys.modules.get("albumentations")
    if not package or not isinstance(call, (package.BasicTransform, package.BaseCompose)):
        return call
    compose = package.Compose(
        [call],
        bbox_params=package.BboxParams("pascal_voc", label_fields=["numbers"], min_visibility=MIN_AREA_SHARE),
        keypoint_params=package.KeypointParams("xy", remove_invisible=False),
    )

    def changed(image: Any, boxes: Any, classes: Any, polygons: Any, rng: np.random.Generator) -> tuple[Any, ...]:
        """Drop objects of which too little is left; the box of an outlined one is the extent of its outline."""
        compose.set_random_state(rng, random.Random(int(rng.integers(2**63))))  # else by the loader process
        height, width = image.shape[:2]
        points = np.concatenate([np.zeros((0, 2), np.float32), *polygons]) - PIXEL_CENTRE
        inside = boxes.clip(0, (width, height, width, height))
        after = compose(image=image, bboxes=inside, numbers=np.arange(len(boxes)), keypoints=points)
        left = np.asarray(after["numbers"], np.int64).reshape(-1)
        moved = np.asarray(after["keypoints"], np.float32).reshape(-1, 2) + PIXEL_CENTRE
        outlines = np.split(moved, np.cumsum([len(outline) for outline in polygons])[:-1]) if polygons else []
        cut, extents = Polygons.of([outlines[k] for k in left]).cut(np.array((0, 0, width, height), np.float32))
        is_outlined = np.array([len(polygons[k]) > 0 for k in left], bool)[:, None]
        boxes = np.where(is_outlined, extents, np.asarray(after["bboxes"], np.float32).reshape(-1, 4))
        visible = (boxes[:, 2:] > boxes[:, :2]).all(1)
        return after["image"], boxes[visible], classes[left][visible], list(cut.subset(visible).outlines())

    changed.__name__ = type(call).__name__
    return changed
