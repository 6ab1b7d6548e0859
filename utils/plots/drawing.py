"""Draw boxes, captions and grids on pictures, uint8 (h, w, 3) BGR, with OpenCV; write picture files. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from utils.errors import UserError, first_line
from utils.files import write_bytes

MAX_GRID_IMAGES = 16
MAX_GRID_PIXELS = 1920  # longest side of a grid of training images
SMALL_IMAGE_PIXELS = 160  # images with a shorter side below this have thinner lines
LINE_PIXELS = 3  # default thickness of lines
CAPTION_LINE_PIXELS, CAPTION_LINES, MIN_CAPTION_PIXELS = 16, 2, 150  # height and number of lines, least width
CAPTION_FONT_SCALE, CAPTION_WIDTH_PIXELS = 0.4, 480  # captions wider than this grow with their width
GAP_PIXELS = 4  # gap between captioned images
FONT, MIN_FONT_SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.3  # letters of 22 pixels at a scale of 1
SCALE_PIXELS = 1000  # mean side of images whose text has a scale of 1
MASK_OPACITY = 0.4
DARK_TEXT_LUMA = 140  # text on a brighter background is black, else white
COLOUR_BYTES = bytes.fromhex(
    "3643f4 f39621 50af4c 0098ff b0279c d4bc00 631ee9 485579 3bebff b5513f "
    "889600 39dccd c8aaff 000096 8b7d60 ffdc8c 00643c b4dcfa 6e143c c8c8c8"
)
COLOURS = np.frombuffer(COLOUR_BYTES, np.uint8).reshape(-1, 3).tolist()  # BGR


class Style(NamedTuple):
    """The style in which predictions are drawn."""

    thickness: int = LINE_PIXELS  # line width in pixels; the size of the text depends on it and on the image
    names: bool = True
    confidences: bool = True

    def text(self, name: str, confidence: float) -> str:
        """Return the text for a box or for the class of an image."""
        return f"{name} {confidence:.2f}" if self.names and self.confidences else name * self.names


def font_scale(image: np.ndarray, thickness: int = LINE_PIXELS) -> float:
    """Return OpenCV's font scale for text on `image`, proportional to its mean side and to the root of `thickness`.

    The square root keeps the text of thick lines from covering the objects.
    """
    return max(MIN_FONT_SCALE, sum(image.shape[:2]) / 2 / SCALE_PIXELS * math.sqrt(thickness / LINE_PIXELS))


def draw_text_lines(image: np.ndarray, lines: Sequence[str], thickness: int = LINE_PIXELS) -> np.ndarray:
    """Return a copy of `image` with lines of text in its top left corner."""
    image, scale = image.copy(), font_scale(image, thickness)
    for number, line in enumerate(lines, 1):
        _draw_label(image, round(10 * scale), round(50 * scale) * number + 4, line, (255, 255, 255), scale)
    return image


def display_pixels(image: np.ndarray) -> np.ndarray:
    """Return pixels, as `read_pixels` does, for display, uint8 (h, w, 3) BGR: the first three channels, or one."""
    image = image if image.dtype == np.uint8 else (image >> 8).astype(np.uint8)
    image = image if image.shape[2:] >= (3,) else np.dstack([np.atleast_3d(image)[..., -1]] * 3)
    return np.ascontiguousarray(image[..., -3:])


def draw_targets(images: np.ndarray, targets: np.ndarray, names: Mapping[int, str]) -> np.ndarray:
    """Return a grid of up to 16 images, (b, channels, h, w), with their boxes; both are as in `Batch`."""
    images = images[:MAX_GRID_IMAGES]
    columns = math.ceil(math.sqrt(len(images)))
    scale = min(1.0, MAX_GRID_PIXELS / (columns * max(images.shape[2:])))
    tiles = []
    for number, image in enumerate(images):
        tile = display_pixels(image[::-1].transpose(1, 2, 0))
        tile = resize(tile, scale) if scale < 1 else tile
        image_targets = targets[targets[:, 0] == number]
        centres, sides = image_targets[:, 2:4], image_targets[:, 4:6]
        boxes = np.concatenate((centres - sides / 2, centres + sides / 2), 1) * np.tile(tile.shape[1::-1], 2)
        classes = image_targets[:, 1].astype(int).tolist()
        draw_boxes(tile, boxes, classes, [names[class_id] for class_id in classes])
        tiles.append(tile)
    return grid(tiles)


def draw_captioned(images: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
    """Return a grid of up to 16 images of one shape, each above its caption of up to two lines."""
    width = max(images[0].shape[1], MIN_CAPTION_PIXELS)
    lines = [[*caption.split("\n"), ""][:CAPTION_LINES] for caption in captions]
    return grid([captioned(image, text, width) for image, text in zip(images[:MAX_GRID_IMAGES], lines, strict=False)])


def captioned(image: np.ndarray, lines: Sequence[str], width: int) -> np.ndarray:
    """Return a white tile, `width` pixels and a gap wide, with `image` in the middle and lines of text below it."""
    height, image_width = image.shape[:2]
    growth = max(1.0, width / CAPTION_WIDTH_PIXELS)
    scale, line_height = CAPTION_FONT_SCALE * growth, round(CAPTION_LINE_PIXELS * growth)
    tile = np.full((height + line_height * len(lines) + GAP_PIXELS, width + GAP_PIXELS, 3), 255, np.uint8)
    left = (width - image_width) // 2
    tile[:height, left : left + image_width] = image
    for number, line in enumerate(lines, 1):
        position = (3, height + line_height * number - line_height // 4)
        text = fit_text(line, width - 3, scale)
        cv2.putText(tile, text, position, FONT, scale, (0, 0, 0), _stroke(scale), cv2.LINE_AA)
    return tile


def grid(tiles: Sequence[np.ndarray]) -> np.ndarray:
    """Return tiles of one width arranged in about as many rows as columns. A row is as high as its highest tile."""
    columns, width = math.ceil(math.sqrt(len(tiles))), tiles[0].shape[1]
    rows = []
    for start in range(0, len(tiles), columns):
        row_tiles = tiles[start : start + columns]
        row = np.full((max(map(len, row_tiles)), columns * width, 3), 255, np.uint8)
        for number, tile in enumerate(row_tiles):
            row[: len(tile), number * width : (number + 1) * width] = tile
        rows.append(row)
    return np.concatenate(rows)


def resize(image: np.ndarray, scale: float) -> np.ndarray:
    """Return `image` with its sides multiplied by `scale`."""
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    return cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if scale < 1 else cv2.INTER_CUBIC)


def draw_boxes(
    image: np.ndarray,
    boxes: np.ndarray,
    classes: Sequence[int],
    texts: Sequence[str],
    thickness: int = 0,
    outlines: Sequence[np.ndarray] = (),
) -> None:
    """Draw boxes (n, 4), xyxy in pixels, in the colours of `classes`, then their texts, if any, over all lines.

    Args:
        thickness: thickness of lines in pixels, see `font_scale`; 0 chooses it by the size of the image
        outlines: outline of each box, (p, 2), x and y in pixels, drawn instead of the box if it has points
    """
    limit = 2 * max(image.shape[:2])
    corners = np.clip(boxes, -limit, limit).astype(int).tolist()
    default_thickness = 1 if min(image.shape[:2]) < SMALL_IMAGE_PIXELS else 2
    scale = font_scale(image, thickness or LINE_PIXELS)
    for number, ((left, top, right, bottom), class_id) in enumerate(zip(corners, classes, strict=True)):
        colour, width = COLOURS[class_id % len(COLOURS)], thickness or default_thickness
        if outlines and len(outlines[number]):
            points = np.round(np.clip(outlines[number], -limit, limit)).astype(np.int32)
            cv2.polylines(image, [points], True, colour, width, cv2.LINE_AA)
        else:
            cv2.rectangle(image, (left, top), (right, bottom), colour, width, cv2.LINE_AA)
    for (left, top, *_), class_id, text in zip(corners, classes, texts, strict=True):
        if text:
            _draw_label(image, left, top, text, COLOURS[class_id % len(COLOURS)], scale)


def tint(image: np.ndarray, mask: np.ndarray, label: int) -> None:
    """Mix the colour of a class into the pixels of `mask`, bool (h, w), in place."""
    image[mask] = image[mask] * (1 - MASK_OPACITY) + np.array(COLOURS[label % len(COLOURS)]) * MASK_OPACITY


def _draw_label(image: np.ndarray, left: int, top: int, text: str, colour: Sequence[int], scale: float) -> None:
    """Draw `text` on a background of `colour` above the point, or below it at the top edge, within the image."""
    margin = max(2, round(5 * scale))
    text = fit_text(text, image.shape[1] - 2 * margin, scale)
    (width, height), baseline = cv2.getTextSize(text, FONT, scale, _stroke(scale))
    label_height = height + baseline + margin
    left = max(0, min(left, image.shape[1] - width - 2 * margin))
    top = top - label_height if top >= label_height else max(top, 0)
    image[top : top + label_height, left : left + width + 2 * margin] = colour
    blue, green, red = colour
    luma = 0.114 * blue + 0.587 * green + 0.299 * red
    text_colour = (0, 0, 0) if luma > DARK_TEXT_LUMA else (255, 255, 255)
    position = (left + margin, top + height + margin // 2)
    cv2.putText(image, text, position, FONT, scale, text_colour, _stroke(scale), cv2.LINE_AA)


def _stroke(scale: float) -> int:
    """Return the thickness of letters in pixels."""
    return max(1, int(2 * scale))


def printable(text: str) -> str:
    """Replace unprintable characters by ?: a lone surrogate makes OpenCV abort."""
    return "".join(character if character.isprintable() else "?" for character in text)


def fit_text(text: str, width: int, scale: float) -> str:
    """Return `text`, without its middle if it is wider than `width` pixels."""
    text = shortened = printable(text)
    length = len(text)
    while length > 4 and cv2.getTextSize(shortened, FONT, scale, _stroke(scale))[0][0] > width:
        length -= 1
        shortened = f"{text[: length // 2 - 1]}..{text[length // 2 - length + 1 :]}"
    return shortened


def write_picture(path: Path, picture: np.ndarray, encoding: Sequence[int] = ()) -> None:
    """Write a picture in the format of the path's suffix, replacing the file atomically. Raises `UserError`."""
    try:
        encoded, content = cv2.imencode(path.suffix, picture, encoding)
        if not encoded:
            raise ValueError(f"OpenCV cannot make a picture of the shape {picture.shape}")
        write_bytes(path, content.tobytes())
    except (OSError, ValueError, cv2.error) as error:
        raise UserError(f"{path} cannot be written: {getattr(error, 'strerror', None) or first_line(error)}") from None
