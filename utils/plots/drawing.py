"""Draw boxes, captions and grids of images with OpenCV.

Called by the tasks, detect.py and `run_pictures`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import cv2
import numpy as np

from utils.plots.charts import printable

MOST_IMAGES = 16
MOST_PIXELS = 1920  # side of a grid of training images
NARROW = 160  # pixels: an image below has thinner lines and smaller letters
GAP = 4  # pixels between photos
LINE, LINES, CAPTION_WIDTH = 16, 2, 150  # of captions: height and number of lines, least width, in pixels
FONT, LETTERS, SMALL_LETTERS = cv2.FONT_HERSHEY_SIMPLEX, 0.4, 0.3  # of about 10 pixels and 8
COLOURS = (
    (54, 67, 244),
    (243, 150, 33),
    (80, 175, 76),
    (0, 152, 255),
    (176, 39, 156),
    (212, 188, 0),
    (99, 30, 233),
    (72, 85, 121),
    (59, 235, 255),
    (181, 81, 63),
    (136, 150, 0),
    (57, 220, 205),
    (200, 170, 255),
    (0, 0, 150),
    (139, 125, 96),
    (255, 220, 140),
    (0, 100, 60),
    (180, 220, 250),
    (110, 20, 60),
    (200, 200, 200),
)  # BGR


class Style(NamedTuple):
    """How what was found is drawn."""

    thickness: int = 3  # of lines, pixels
    names: bool = True
    confidences: bool = True

    def text(self, name: str, confidence: float) -> str:
        """What is written beside a box, or for a class."""
        return f"{name} {confidence:.2f}" if self.names and self.confidences else name * self.names


def draw_found(
    image: np.ndarray, boxes: np.ndarray, classes: Sequence[int], texts: Sequence[str], style: Style
) -> np.ndarray:
    """The image, uint8 (h, w, 3) BGR, with boxes (n, 4), xyxy in pixels, drawn on."""
    image = image.copy()
    draw_boxes(image, boxes, classes, texts, style.thickness)
    return image


def draw_lines(image: np.ndarray, lines: Sequence[str]) -> np.ndarray:
    """The image, uint8 (h, w, 3) BGR, with lines of text in its top left corner."""
    image = image.copy()
    for number, line in enumerate(lines):
        _tag(image, 4, (LINE + 4) * (number + 1) + 4, line, (255, 255, 255))
    return image


def draw_targets(images: np.ndarray, targets: np.ndarray, names: Mapping[int, str]) -> np.ndarray:
    """A grid of up to 16 `images`, uint8 (b, 3, h, w) RGB, with `targets` (m, 6): image, class, normalised xywh.

    No side of it is longer than 1920 pixels.
    """
    images = images[:MOST_IMAGES]
    across = math.ceil(math.sqrt(len(images)))
    share = min(1.0, MOST_PIXELS / (across * max(images.shape[2:])))
    tiles = []
    for number, image in enumerate(images):
        tile = cv2.merge(list(image[::-1]))
        if share < 1:
            tile = resize(tile, share)
        own = targets[targets[:, 0] == number]
        centres, sides = own[:, 2:4], own[:, 4:6]
        boxes = np.concatenate((centres - sides / 2, centres + sides / 2), 1) * np.tile(tile.shape[1::-1], 2)
        classes = own[:, 1].astype(int).tolist()
        draw_boxes(tile, boxes, classes, [names[k] for k in classes])
        tiles.append(tile)
    return grid(tiles)


def draw_captioned(images: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
    """A grid of up to 16 `images` of one shape, uint8 (h, w, 3) BGR, each above its caption of a few lines."""
    tiles = []
    for image, caption in zip(images[:MOST_IMAGES], captions, strict=False):
        width = max(image.shape[1], CAPTION_WIDTH)
        lines = caption.split("\n")
        tile = np.full((image.shape[0] + LINE * LINES, width, 3), 255, np.uint8)
        left = (width - image.shape[1]) // 2
        tile[: image.shape[0], left : left + image.shape[1]] = image
        for number, line in enumerate(lines[:LINES], 1):
            write_text(tile, line, (3, image.shape[0] + LINE * number - 5), (0, 0, 0))
        tiles.append(tile)
    return grid(tiles)


def grid(tiles: list[np.ndarray]) -> np.ndarray:
    """Tiles of one width, in rows of about as many as there are rows. A row is as high as its highest tile."""
    columns, width = math.ceil(math.sqrt(len(tiles))), tiles[0].shape[1]
    rows = []
    for start in range(0, len(tiles), columns):
        row = tiles[start : start + columns]
        shown = np.full((max(map(len, row)), columns * width, 3), 255, np.uint8)
        for number, tile in enumerate(row):
            shown[: len(tile), number * width : (number + 1) * width] = tile
        rows.append(shown)
    return np.concatenate(rows)


def resize(image: np.ndarray, share: float) -> np.ndarray:
    """An image with its sides times `share`."""
    height, width = (max(1, round(side * share)) for side in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if share < 1 else cv2.INTER_CUBIC)


def draw_boxes(
    image: np.ndarray, boxes: np.ndarray, classes: Sequence[int], texts: Sequence[str], thickness: int = 0
) -> None:
    """Draw boxes (n, 4), xyxy in pixels, in the colours of `classes`; then their texts, so that no line crosses one.

    thickness: of lines, pixels; 0 chooses by the size of the image. An empty text is left out.
    """
    far = 2 * max(image.shape[:2])
    corners = np.clip(boxes, -far, far).astype(int).tolist()
    small = min(image.shape[:2]) < NARROW
    thick, letters = (1, SMALL_LETTERS) if small else (2, LETTERS)
    for (left, top, right, bottom), k in zip(corners, classes, strict=True):
        cv2.rectangle(image, (left, top), (right, bottom), COLOURS[k % len(COLOURS)], thickness or thick, cv2.LINE_AA)
    for (left, top, *_), k, text in filter(itemgetter(2), zip(corners, classes, texts, strict=True)):
        _tag(image, left, top, text, COLOURS[k % len(COLOURS)], letters)


def _tag(
    image: np.ndarray, left: int, top: int, text: str, colour: tuple[int, int, int], letters: float = LETTERS
) -> None:
    """Write `text` on a ground of `colour` above the point, or below it where there is no room, within the image."""
    text = fit_text(text, image.shape[1] - 4, letters)
    (width, height), below = cv2.getTextSize(text, FONT, letters, 1)
    high = height + below + 2
    left = max(0, min(left, image.shape[1] - width - 4))
    top = top - high if top >= high else max(top, 0)
    image[top : top + high, left : left + width + 4] = colour
    blue, green, red = colour
    ink = (0, 0, 0) if 0.114 * blue + 0.587 * green + 0.299 * red > 140 else (255, 255, 255)
    write_text(image, text, (left + 2, top + height + 1), ink, letters)


def fit_text(text: str, width: int, letters: float = LETTERS) -> str:
    """`text`, or as much of it, less some of its middle, as is `width` pixels wide."""
    text = cut = printable(text)
    most = len(text)
    while most > 4 and cv2.getTextSize(cut, FONT, letters, 1)[0][0] > width:
        most -= 1
        cut = f"{text[: most // 2 - 1]}..{text[most // 2 - most + 1 :]}"
    return cut


def write_text(
    image: np.ndarray, text: str, place: tuple[int, int], colour: tuple[int, int, int], letters: float = LETTERS
) -> None:
    cv2.putText(image, printable(text), place, FONT, letters, colour, 1, cv2.LINE_AA)
