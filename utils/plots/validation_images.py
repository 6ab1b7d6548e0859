"""Draw grids of validation images with their labels or predictions. Called by `run_pictures`.

Reads val_boxes.csv and, for segmentation, val_masks.csv. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import cv2
import numpy as np

from utils.errors import UserError
from utils.files import read_regular
from utils.plots.documents import Table, points
from utils.plots.drawing import MAX_GRID_IMAGES, captioned, draw_boxes, draw_outlines, grid, resize
from utils.summary import DRAWN_IMAGES

MIN_TILE_PIXELS, MAX_TILE_PIXELS = 320, 480  # limits of an image's longer side in its grid
UNREADABLE_GREY = 160


class BoxesToDraw(NamedTuple):
    """Boxes on an image in its grid, the outlines of their masks, and the outlines that are drawn instead of boxes."""

    boxes: np.ndarray  # (n, 4): xyxy in pixels of the resized image
    classes: list[int]
    texts: list[str]
    masks: list[np.ndarray]  # (p, 2), x and y, for each box; empty if there are no masks
    outlines: list[np.ndarray]  # like `masks`; empty if the boxes are upright


class ValidationImage(NamedTuple):
    """A validation image and its rows of val_boxes.csv."""

    path: str
    image: np.ndarray | None  # uint8 (h, w, 3) BGR, resized; None: unreadable
    boxes: Mapping[str, BoxesToDraw]  # by kind: label or prediction


def read_validation_images(
    table: Table,
    batch: int,
    classes: Sequence[str] = (),
    masks: Table | None = None,
    read: Callable[[str], bytes] = read_regular,
) -> list[ValidationImage]:
    """Return the images of a grid, resized for it.

    Args:
        table: val_boxes.csv, with a column `outline` if boxes are not upright
        batch: number of the grid, from 0
        classes: all class names in order, so that colours match the pictures of training batches; other names in the
            table come after them
        masks: val_masks.csv, with a row for each box
        read: returns the content of an image file by its path
    """
    masks_of = _read_masks(masks) if masks else {}
    outlines = table.texts("outline") if "outline" in table.columns else []
    rows_of: dict[str, list[int]] = {}
    for row, path in enumerate(table.texts("image")):
        rows_of.setdefault(path, []).append(row)
    kinds, names, confidence = table.texts("kind"), table.texts("class"), table.numbers("confidence")
    corners = table.numbers("x1", "y1", "x2", "y2")
    number = {name: k for k, name in enumerate(dict.fromkeys((*classes, *names)))}
    images = []
    for path in list(rows_of)[:DRAWN_IMAGES][batch * MAX_GRID_IMAGES : (batch + 1) * MAX_GRID_IMAGES]:
        image, scale = _read_resized(path, read)
        boxes_by_kind = {}
        for kind in ("label", "prediction"):
            rows = [row for row in rows_of[path] if kinds[row] == kind]
            texts = [names[row] for row in rows]
            boxes = corners[rows] * scale
            of_masks = [mask * scale for mask in masks_of.get((path, kind), [])]
            of_boxes = [points(outlines[row]) * scale for row in rows] if outlines else []
            if kind == "prediction":
                texts = [f"{names[row]} {confidence[row]:.2f}" for row in rows]
                order = np.argsort(confidence[rows], kind="stable")  # the most confident are drawn last, on top
                boxes, rows, texts = boxes[order], [rows[k] for k in order], [texts[k] for k in order]
                of_masks = [of_masks[k] for k in order] if masks else []
                of_boxes = [of_boxes[k] for k in order] if outlines else []
            classes_of_rows = [number[names[row]] for row in rows]
            boxes_by_kind[kind] = BoxesToDraw(boxes, classes_of_rows, texts, of_masks, of_boxes)
        images.append(ValidationImage(path, image, boxes_by_kind))
    return images


def _read_masks(masks: Table) -> dict[tuple[str, str], list[np.ndarray]]:
    """Return the outlines of each image and kind, (p, 2) in pixels of the file, in the order of val_masks.csv."""
    outlines: dict[tuple[str, str], list[np.ndarray]] = {}
    for path, kind, text in zip(*map(masks.texts, ("image", "kind", "outline")), strict=True):
        outlines.setdefault((path, kind), []).append(points(text))
    return outlines


def _read_resized(path: str, read: Callable[[str], bytes]) -> tuple[np.ndarray | None, float]:
    """Return an image file resized for its grid, or None if it is unreadable, and the scale of its sides."""
    try:
        image = cv2.imdecode(np.frombuffer(read(path), np.uint8), cv2.IMREAD_COLOR)
    except (UserError, OSError, ValueError, cv2.error):  # ValueError: the name is not possible for a file
        image = None
    if image is None:
        return None, 1.0
    longer_side = max(image.shape[:2])
    scale = min(MAX_TILE_PIXELS, max(longer_side, MIN_TILE_PIXELS)) / longer_side
    return (image if scale == 1 else resize(image, scale)), scale


def draw_validation_images(images: Sequence[ValidationImage], kind: str) -> np.ndarray:
    """Return a grid of images with their boxes of one `kind`, each above its name; an unreadable image is grey."""
    width = max([MIN_TILE_PIXELS, *(one.image.shape[1] for one in images if one.image is not None)])
    tiles = []
    for one in images:
        name = os.path.basename(one.path)
        if one.image is None:
            image = np.full((width // 2, width, 3), UNREADABLE_GREY, np.uint8)
            name += " (cannot be read)"
        else:
            image = one.image.copy()
            boxes, classes, texts, masks, outlines = one.boxes[kind]
            draw_outlines(image, masks, classes)
            draw_boxes(image, boxes, classes, texts, outlines=outlines)
        tiles.append(captioned(image, [name], width))
    return grid(tiles)
