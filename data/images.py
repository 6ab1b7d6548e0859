"""Read image files as pixels, and the sizes of images from their headers.

Called by data/cache.py, data/labels.py, data/media.py, the data sets and detect.py.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from utils.errors import UserError
from utils.files import read_regular

cv2.setNumThreads(0)  # loader processes are parallel already; their threads would compete for the cores
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # Pillow reads what OpenCV cannot, or raises

IMAGE_SUFFIXES = frozenset([".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"])
MAX_MISSING_SHARE = 0.01  # largest share of missing pixels of a truncated JPEG that is read
JPEG_START, JPEG_END, PNG_END = b"\xff\xd8", b"\xff\xd9", b"IEND\xaeB`\x82"
PFM_START = b"Pf", b"PF"  # grey, in colour; OpenCV would clip their floats
# Flags that decode a JPEG at 1/1, 1/2, 1/4, 1/8 of its size, from the low frequencies of each block only.
JPEG_FLAGS = {
    1: cv2.IMREAD_COLOR,
    2: cv2.IMREAD_REDUCED_COLOR_2,
    4: cv2.IMREAD_REDUCED_COLOR_4,
    8: cv2.IMREAD_REDUCED_COLOR_8,
}
LARGE_PIXELS = 2_000_000  # inclusive upper bound of a photo that `read_reduced` reads like any image


def read_image(path: Path, jpeg_divisor: int = 1) -> np.ndarray:
    """Return the pixels as displayed (EXIF orientation applied), uint8 (height, width, 3), BGR.

    16 bits, and floats in 0 to 1, are scaled to 8 bits. Raises a `UserError` that names the file if it cannot be read.

    Args:
        jpeg_divisor: 1, 2, 4 or 8, which divides both sides of a JPEG, rounded up
    """
    try:
        return _decode(read_regular(path), jpeg_divisor)
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise unreadable(path, error) from None


def _decode(data: bytes, jpeg_divisor: int = 1) -> np.ndarray:
    is_jpeg = data.startswith(JPEG_START)
    if is_jpeg and not data.endswith(JPEG_END):
        return _read_unended(data + JPEG_END, jpeg_divisor)
    flags = JPEG_FLAGS[jpeg_divisor if is_jpeg else 1]
    image = cv2.imdecode(np.frombuffer(data, np.uint8), flags) if data and not data.startswith(PFM_START) else None
    return image if image is not None else _read_with_pillow(data)


def read_whole_image(path: Path) -> np.ndarray:
    """Return the pixels as `read_image` does, but raise the `UserError` for a truncated file too, as data sets do.

    `read_image` returns the pixels that such a file has, with grey below them.
    """
    try:
        image_size(path)
    except Image.DecompressionBombError:
        pass  # OpenCV reads larger images than Pillow
    except Exception as error:
        raise unreadable(path, error) from None
    return read_image(path)


def unreadable(name: object, error: Exception) -> UserError:
    """Return the error for an image that OpenCV or Pillow cannot read."""
    reason = re.sub(r" ?<\S+ object at 0x\w+>", "", str(error))  # Pillow names the object that holds the bytes
    if isinstance(error, UnidentifiedImageError):
        reason = "its format is not known"
    elif isinstance(error, cv2.error):
        reason = "OpenCV cannot decode it"
    return UserError(f"{name} cannot be read as an image ({reason}); fix or remove it")


def _read_unended(data: bytes, divisor: int) -> np.ndarray:
    """Read a JPEG that did not end with an end marker. Missing pixels are grey.

    Pillow gives the same pixels as OpenCV, for which libjpeg would print a warning each time.

    Args:
        data: bytes of the file, with an end marker appended
        divisor: 1, 2, 4 or 8, which divides both sides of the image
    """
    with suppress(Exception), Image.open(io.BytesIO(data)) as opened:  # a damaged EXIF block, for one
        if opened.mode in ("RGB", "L"):
            opened.draft(None, (max(opened.width // divisor, 1), max(opened.height // divisor, 1)))
            return _upright_pixels(opened)
    image = cv2.imdecode(np.frombuffer(data, np.uint8), JPEG_FLAGS[divisor])
    return image if image is not None else _read_with_pillow(data)


def _read_with_pillow(data: bytes) -> np.ndarray:
    """Read formats that OpenCV does not know."""
    with Image.open(io.BytesIO(data)) as opened:
        return _upright_pixels(opened)


def _upright_pixels(opened: Image.Image) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(_with_8_bits(ImageOps.exif_transpose(opened)).convert("RGB"))[..., ::-1])


def _with_8_bits(image: Image.Image) -> Image.Image:
    """Scale 16 bits, and floats in 0 to 1, to 8 bits; raise ValueError for other floats and integers."""
    if not image.mode.startswith(("F", "I")):
        return image
    values = np.asarray(image)
    if image.mode == "F" and ((values >= 0) & (values <= 1)).all():  # NaN is not
        values = (values * 65535 + 0.5).astype(np.uint16)
    elif image.mode in ("F", "I"):
        raise ValueError("its pixels are neither integers of 8 or 16 bits nor floats from 0 to 1")
    return Image.fromarray((values >> 8).astype(np.uint8))


def read_reduced(path: Path, width: int, height: int, size: int) -> np.ndarray:
    """Return an image, uint8 (h, w, 3) BGR, with its longer side at `size` pixels, quickly if it is a large photo.

    A JPEG of more than 2 megapixels is decoded at the smallest scale of 1, 1/2, 1/4, 1/8 that is not below `size`.
    Large photos that are then still twice as large are shrunk by averaging areas. Smaller images are read and resized
    as usual. Raises `UserError` if the file cannot be read.

    Args:
        width: width of the file's image as displayed, pixels
        height: height of the file's image as displayed, pixels
        size: longer side of the returned image, pixels
    """
    if width * height <= LARGE_PIXELS:
        return resize_long_side(read_image(path), size, smooth=False)
    divisor = max(number for number in JPEG_FLAGS if number == 1 or number * size <= max(width, height))
    image = read_image(path, divisor)
    reduced = -(-height // divisor), -(-width // divisor)
    if image.shape[:2] not in (reduced, (height, width)):  # the file has changed since its size was read
        return resize_long_side(read_image(path), size, smooth=True)
    # Up to a factor of two, bilinear sampling reads every pixel, in a seventh of the time.
    return _resize(image, scaled_shape(width, height, size), smooth=max(image.shape) >= 2 * size)


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height in pixels as displayed. Raises as `examine_image` does."""
    return examine_image(path).size


class Examined(NamedTuple):
    """The result of `examine_image`.

    Attributes:
        size: width and height, pixels as displayed
        missing: share of the image's pixels that are missing at its end
    """

    size: tuple[int, int]
    missing: float = 0.0


def examine_image(path: Path) -> Examined:
    """Return the size of an image, with width and height swapped for EXIF orientations 5 to 8.

    Only headers and the end of a JPEG or PNG are read; other formats, and files with an unusual end, are decoded.
    Raises one of Pillow's many errors if the file is not an image, or is truncated; a JPEG may lack 1 % of its pixels.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF blocks warn; the orientation is then absent
        with Image.open(path) as opened:
            width, height = opened.size
            assert opened.fp  # open until the pixels are loaded
            opened.fp.seek(-len(PNG_END), os.SEEK_END)
            is_complete = opened.format in ("JPEG", "PNG") and opened.fp.read().endswith((JPEG_END, PNG_END))
            orientation = _orientation(opened)
            if isinstance(opened, TiffImageFile):  # newer versions of Pillow swap the size of these already
                width, height = opened.tag_v2[IMAGEWIDTH], opened.tag_v2[IMAGELENGTH]
            missing = 0.0
            if not is_complete:
                missing = _missing_share(read_regular(path)) if opened.format == "JPEG" else 1.0
                if missing > MAX_MISSING_SHARE:
                    opened.load()
                    missing = 0.0
            if opened.mode in ("F", "I"):
                _decode(read_regular(path))  # raises an error for pixels whose range is not known
    return Examined((height, width) if orientation in (5, 6, 7, 8) else (width, height), missing)


def _orientation(opened: ImageFile) -> int:
    try:
        if isinstance(opened, PngImageFile):
            return Image.Image.getexif(opened).get(Base.Orientation, 1)  # its own method decodes all pixels first
        return opened.getexif().get(Base.Orientation, 1)
    except Exception:  # a damaged block: the image is shown as it is
        return 1


def _missing_share(data: bytes) -> float:
    """Return the share of its pixels that a JPEG without an end marker lacks.

    Missing pixels are decoded from whatever bytes follow, so that two fillings give two images. Returns 1 for a
    progressive JPEG, which may lack a whole pass undetected, and for an incomplete JPEG of more than three colours.
    """
    # A last FF would turn the next byte into a marker.
    fillings = [data.rstrip(b"\xff") + 64 * filling + JPEG_END for filling in (b"\x12", b"\xed")]
    with Image.open(io.BytesIO(data)) as opened:
        if "progressive" in opened.info:
            return 1.0
    (pixels, _), (other, _) = (_decoded(filled, None) for filled in fillings)
    if np.array_equal(pixels, other):
        return 0.0
    (luminance, layers), (other, _) = (_decoded(filled, "L") for filled in fillings)
    if luminance.ndim > 2:
        return 1.0
    # A JPEG is a series of blocks, row by row: all are missing from the first that differs.
    block_width, block_height = (8 * max(layer[k] if len(layers) > 1 else 1 for layer in layers) for k in (1, 2))
    height, width = luminance.shape
    columns = -(-width // block_width)
    y, x = np.nonzero(luminance != other)
    blocks = y // block_height * columns + x // block_width
    last = -(-height // block_height) * columns - 1
    row, column = divmod(int(blocks.min(initial=last)), columns)
    top, below = row * block_height, min((row + 1) * block_height, height)
    missing = (below - top) * (width - column * block_width) + (height - below) * width
    return missing / (height * width)


def _decoded(data: bytes, mode: str | None) -> tuple[np.ndarray, Any]:
    """Return the pixels of a JPEG and its layers, whose items 1 and 2 are horizontal and vertical sampling factors.

    Args:
        mode: "L" to decode the luminance alone, which does not mix neighbours, if there is one; None for all colours
    """
    with Image.open(io.BytesIO(data)) as opened:
        opened.draft(mode, opened.size)
        return np.asarray(opened), getattr(opened, "layer", ())


def resize_long_side(image: np.ndarray, size: int, smooth: bool) -> np.ndarray:
    """Scale an image so that its longer side has `size` pixels.

    Args:
        smooth: whether to average areas if the image shrinks
    """
    height, width = image.shape[:2]
    return _resize(image, scaled_shape(width, height, size), smooth)


def _resize(image: np.ndarray, shape: tuple[int, int], smooth: bool) -> np.ndarray:
    """Scale an image.

    Args:
        shape: width and height of the result, pixels
        smooth: whether to average areas if the image shrinks
    """
    height, width = image.shape[:2]
    if shape == (width, height):
        return image
    interpolation = cv2.INTER_AREA if smooth and max(shape) < max(height, width) else cv2.INTER_LINEAR
    return cv2.resize(image, shape, interpolation=interpolation)


def scaled_shape(width: int, height: int, size: int) -> tuple[int, int]:
    """Return width and height after scaling the longer side to `size` pixels, rounded up."""
    longer = max(width, height)
    return -(-width * size // longer), -(-height * size // longer)
