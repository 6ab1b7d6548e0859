"""Read image files as pixels, and the sizes of images from their headers.

Called by data/cache.py, data/labels.py, data/media.py, the data sets and detect.py.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps
from PIL.ExifTags import Base
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from utils.errors import UserError

cv2.setNumThreads(0)  # loader processes are parallel already; their threads would compete for the cores
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # Pillow reads what it cannot, or raises

IMAGE_SUFFIXES = frozenset([".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"])
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
END_MARKERS = {"JPEG": JPEG_END, "PNG": b"IEND\xaeB`\x82"}  # the last bytes of a whole file


def read_image(path: Path) -> np.ndarray:
    """Return the pixels as displayed (EXIF orientation applied), uint8 (height, width, 3), BGR.

    Raises a `UserError` that names the file if it cannot be read.
    """
    try:
        data = path.read_bytes()
        if data.startswith(JPEG_START) and not data.endswith(JPEG_END):
            data += JPEG_END  # libjpeg prints a warning without it, each time
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
        return image if image is not None else _read_with_pillow(data)
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise UserError(f"{path} cannot be read as an image ({error}); fix or remove it") from None


def _read_with_pillow(data: bytes) -> np.ndarray:
    """Read formats that OpenCV does not know."""
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened)
        return np.ascontiguousarray(np.asarray(upright.convert("RGB"))[..., ::-1])


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height in pixels as displayed: EXIF orientations 5 to 8 swap them.

    Only headers and the end of a JPEG or PNG are read; other formats, and files with an unusual end, are decoded.
    Raises one of Pillow's many errors if the file is no image, or is not whole.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF blocks warn; the orientation is then absent
        with Image.open(path) as opened:
            width, height = opened.size
            whole = _has_end_marker(opened)
            orientation = _orientation(opened)
            if isinstance(opened, TiffImageFile):  # newer versions of Pillow swap the size of these already
                width, height = opened.tag_v2[IMAGEWIDTH], opened.tag_v2[IMAGELENGTH]
            if not whole and not (opened.format == "JPEG" and _lacks_only_end_marker(path)):
                opened.load()
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def _has_end_marker(opened: ImageFile) -> bool:
    """Return whether a file ends with the marker of its format; False for formats without one."""
    end = END_MARKERS.get(opened.format or "")
    if end is None:
        return False
    assert opened.fp  # open until the pixels are loaded
    opened.fp.seek(-len(end), os.SEEK_END)
    return opened.fp.read() == end


def _orientation(opened: ImageFile) -> int:
    try:
        if isinstance(opened, PngImageFile) and not _has_late_headers(opened):
            return Image.Image.getexif(opened).get(Base.Orientation, 1)
        return opened.getexif().get(Base.Orientation, 1)
    except Exception:  # a damaged block: the image is shown as it is
        return 1


def _has_late_headers(opened: PngImageFile) -> bool:
    """Return whether a PNG has chunks of another kind after its pixels: to read those, Pillow decodes the pixels."""
    assert opened.fp
    place, kind = opened.tile[0].offset - 8, b"IDAT"
    while kind == b"IDAT":
        opened.fp.seek(place)
        length, kind = opened.fp.read(4), opened.fp.read(4)
        place += 12 + int.from_bytes(length, "big")  # after 4 bytes of length, 4 of kind, and before 4 of checksum
    return kind != b"IEND"


def _lacks_only_end_marker(path: Path) -> bool:
    """Return whether this is a JPEG with all of its pixels that lacks only the end marker.

    Missing pixels are decoded from whatever bytes follow, so that two fillings give two images. A progressive JPEG may
    lack a whole pass, which cannot be detected: it does not count.
    """
    data, images = path.read_bytes(), []
    for filling in (b"\x12", b"\xed"):
        with Image.open(io.BytesIO(data + 64 * filling + JPEG_END)) as opened:
            if "progressive" in opened.info:
                return False
            images.append(np.asarray(opened))
    return np.array_equal(images[0], images[1])


def resize_long_side(image: np.ndarray, size: int, smooth: bool) -> np.ndarray:
    """Scale an image so that its longer side has `size` pixels. smooth: average areas if it shrinks."""
    height, width = image.shape[:2]
    ratio = size / max(height, width)
    if ratio == 1:
        return image
    interpolation = cv2.INTER_AREA if smooth and ratio < 1 else cv2.INTER_LINEAR
    shape = scaled_shape(width, height, size)
    return cv2.resize(image, shape, interpolation=interpolation)


def scaled_shape(width: int, height: int, size: int) -> tuple[int, int]:
    """Return width and height once the longer side is scaled to `size` pixels, rounded up."""
    longer = max(width, height)
    return -(-width * size // longer), -(-height * size // longer)
