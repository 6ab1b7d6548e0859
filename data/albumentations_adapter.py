"""albumentations' transforms as callables for data/own_augmentations.py; the package is imported only if needed."""

from __future__ import annotations

import inspect
import os
import random
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from data.augment import MIN_AREA_SHARE
from data.polygons import Polygons
from utils.errors import UserError, nearest

PIXEL_CENTRE = 0.5  # where albumentations' points begin: at the first pixel's centre; ours begin at its edge


def named_transform(name: str, where: str) -> Callable[..., Any]:
    """Return a function that makes an albumentations transform, by its name, such as MotionBlur. Raises `UserError`.

    Args:
        where: file and line that name the transform, for messages
    """
    for variable in ("NO_ALBUMENTATIONS_UPDATE", "ALBUMENTATIONS_NO_TELEMETRY"):
        os.environ.setdefault(variable, "1")  # importing it must not ask a server for a newer version
    try:
        import albumentations
    except ImportError:
        raise UserError(
            f"{where}: '{name}' is a transform of albumentations, which is not installed; run pip install "
            "albumentations, or name a function of your own as FILE.py:NAME"
        ) from None
    kinds = {word: kind for word, kind in vars(albumentations).items() if _is_transform_class(kind)}
    if name not in kinds:
        raise UserError(f"{where}: albumentations has no transform '{name}'{nearest(name, kinds)}; fix the name")
    return partial(_made, kinds[name])


def _made(kind: Callable[..., Any], **arguments: Any) -> Any:
    """Make a transform. Raises an error of one line for an argument that is unknown, missing or of the wrong type."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* are not valid for transform")  # of unknown ones there is only a warning
        try:
            return kind(**arguments)
        except ValueError as error:
            # pydantic writes each argument and each reason on a line of its own, and where to read more
            what = re.sub(r"\[type=.*|For further information .*", "", str(error))
            raise ValueError(" ".join(what.split())) from error


def _is_transform_class(kind: Any) -> bool:
    import albumentations

    return inspect.isclass(kind) and issubclass(kind, (albumentations.BasicTransform, albumentations.BaseCompose))


def adapted(call: Any, boxes: bool) -> Any:
    """Return an albumentations transform as a callable over the parts of a sample; return anything else unchanged.

    Args:
        boxes: whether samples have labels besides the image
    """
    if "albumentations" not in sys.modules or not _is_transform_class(type(call)):
        return call
    adapter = Adapter(call, boxes)
    return adapter.labelled if boxes else adapter.image_only


class Adapter:
    """An albumentations transform that draws its random numbers from the generator passed to each call."""

    def __init__(self, transform: Any, boxes: bool) -> None:
        import albumentations as package

        labels = {
            "bbox_params": package.BboxParams("pascal_voc", label_fields=["numbers"], min_visibility=MIN_AREA_SHARE),
            "keypoint_params": package.KeypointParams("xy", remove_invisible=False),
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got processor for")  # of a transform that moves nothing
            self.compose = package.Compose([transform], **(labels if boxes else {}))

    def image_only(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return the changed image."""
        self._seed(rng)
        changed: np.ndarray = self.compose(image=image)["image"]
        return changed

    def labelled(
        self,
        image: np.ndarray,
        boxes: np.ndarray,
        classes: np.ndarray,
        polygons: list[np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return the changed image, and the objects that are still sufficiently visible in it.

        The box of an outlined object is the extent of its outline in the image.
        """
        self._seed(rng)
        height, width = image.shape[:2]
        changed = self.compose(
            image=image,
            bboxes=boxes.clip(0, (width, height, width, height)),
            numbers=np.arange(len(boxes)),
            keypoints=np.concatenate([np.zeros((0, 2), np.float32), *polygons]) - PIXEL_CENTRE,
        )
        kept = np.asarray(changed["numbers"], np.int64).reshape(-1)
        boxes = np.asarray(changed["bboxes"], np.float32).reshape(-1, 4)
        counts = [len(outline) for outline in polygons]
        points = np.asarray(changed["keypoints"], np.float32).reshape(-1, 2) + PIXEL_CENTRE
        outlines = np.split(points, np.cumsum(counts)[:-1]) if counts else []
        is_outlined = np.array(counts, bool)[kept]
        cut, extents = Polygons.of([outlines[k] for k in kept]).cut(np.array((0, 0, width, height), np.float32))
        boxes = np.where(is_outlined[:, None], extents, boxes)
        visible = np.all(boxes[:, 2:] > boxes[:, :2], axis=1)
        return changed["image"], boxes[visible], classes[kept][visible], list(cut.subset(visible).outlines())

    def _seed(self, rng: np.random.Generator) -> None:
        """Make the transform draw from `rng`; seeded by itself, it would draw other numbers in each loader process.

        Versions without `set_random_state` draw from the global generators: see `own_augmentations.seeded`.
        """
        if hasattr(self.compose, "set_random_state"):
            self.compose.set_random_state(rng, random.Random(int(rng.integers(2**63))))
