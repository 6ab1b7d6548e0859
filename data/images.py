"""Reading image files as pixels."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps

from utils.errors import UserError

cv2.setNumThreads(0)  # the loader's processes are the parallelism; threads of theirs would fight over the cores


def read_image(path: Path) -> np.ndarray:
    """Pixels as displayed (EXIF orientation applied), uint8 (height, width, 3), BGR.

    Raises `UserError` that names the file where nothing can read it.
    """
    image = cv2.imread(str(path), cv2.IMREAD_COLOR)
    return image if image is not None else _read_with_pillow(path)


def _read_with_pillow(path: Path) -> np.ndarray:
    """For the formats that OpenCV does not know."""
    try:
        with Image.open(path) as opened:
            upright = ImageOps.exif_transpose(opened)
            return np.ascontiguousarray(np.asarray(upright.convert("RGB"))[..., ::-1])
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise UserError(f"{path} cannot be read as an image ({error}); mend or remove it") from None


def resize_long_side(image: np.ndarray, size: int, smooth: bool) -> np.ndarray:
    """The image scaled so that its longer side has `size` pixels; `smooth` averages areas when it shrinks."""
    height, width = image.shape[:2]
    ratio = size / max(height, width)
    if ratio == 1:
        return image
    how = cv2.INTER_AREA if smooth and ratio < 1 else cv2.INTER_LINEAR
    shape = scaled_shape(width, height, size)
    return cv2.resize(image, shape, interpolation=how)


def scaled_shape(width: int, height: int, size: int) -> tuple[int, int]:
    """Width and height after the longer side is brought to `size` pixels, rounded up."""
    longer = max(width, height)
    return -(-width * size // longer), -(-height * size // longer)
