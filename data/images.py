"""Reading image files as pixels."""

from __future__ import annotations

import io
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps

from utils.errors import UserError

cv2.setNumThreads(0)  # the loader's processes are the parallelism; threads of theirs would fight over the cores
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what it cannot read Pillow reads, or names

JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"


def read_image(path: Path) -> np.ndarray:
    """Pixels as displayed (EXIF orientation applied), uint8 (height, width, 3), BGR.

    Raises `UserError` that names the file where nothing can read it.
    """
    try:
        data = path.read_bytes()
        if data.startswith(JPEG_START) and not data.endswith(JPEG_END):
            data += JPEG_END  # without it libjpeg prints a line, each time
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
        return image if image is not None else _read_with_pillow(data)
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise UserError(f"{path} cannot be read as an image ({error}); mend or remove it") from None


def _read_with_pillow(data: bytes) -> np.ndarray:
    """For the formats that OpenCV does not know."""
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened)
        return np.ascontiguousarray(np.asarray(upright.convert("RGB"))[..., ::-1])


def lacks_its_end_alone(path: Path) -> bool:
    """Is this a JPEG with all of its pixels, of which the mark of its end is missing?

    Where pixels are missing they are made from what follows, so two ways to go on give two images. Of a progressive
    one a whole pass may be missing, which nothing tells.
    """
    data, images = path.read_bytes(), []
    for filling in (b"\x12", b"\xed"):
        with Image.open(io.BytesIO(data + 64 * filling + JPEG_END)) as opened:
            if "progressive" in opened.info:
                return False
            images.append(np.asarray(opened))
    return np.array_equal(images[0], images[1])


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
