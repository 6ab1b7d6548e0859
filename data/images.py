"""Read image files as pixels, and the sizes of images from their headers.

Called by data/cache.py, data/labels.py, data/media.py, the data sets and detect.py.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps

from utils.errors import UserError

cv2.setNumThreads(0)  # loader processes are parallel already; their threads would compete for the cores
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # Pillow reads what it cannot, or raises

IMAGE_SUFFIXES = frozenset([".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"])
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
HEADER_BYTES = 4096  # that are read at once: more than the header of most JPEG files
MAX_PLAIN_PIXELS = 2**26  # of an image that Pillow certainly opens; it has a limit of its own

# The chunks of a PNG that can neither stop Pillow nor turn the image if they have at least so many bytes.
PLAIN_CHUNKS_MIN_BYTES = {
    b"PLTE": 0, b"tRNS": 6, b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"bKGD": 0, b"sBIT": 0, b"tIME": 0,
    b"tEXt": 0,
}  # fmt: skip
MAX_CHUNK_BYTES = 2**16  # Pillow reads files with longer ones

# The same for segments of a JPEG: what they must start with and how many bytes they must have.
PLAIN_SEGMENTS = {0xE0: (b"JFIF", 7), 0xE2: (b"ICC_PROFILE\0", 14), 0xEE: (b"Adobe", 7)}
OTHER_SEGMENTS = frozenset([0xC4, 0xDD, 0xFE, *range(0xE3, 0xED), 0xEF])  # tables, a comment, data of other programs


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


def lacks_only_end_marker(path: Path) -> bool:
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


def plain_size(path: str) -> tuple[int, int] | None:
    """Return width and height in pixels of a JPEG or PNG that is whole and has only plain headers; fast.

    None for everything that Pillow must read: other formats, files that may be damaged, headers that may turn it.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except (OSError, ValueError):
        return None
    try:
        head = os.pread(file, HEADER_BYTES, 0)
        if head.startswith(JPEG_START):
            size = _jpeg_size(file, head)
        else:
            size = _png_size(file) if head.startswith(PNG_START) else None
    except (OSError, struct.error):
        return None
    finally:
        os.close(file)
    return size if size and 0 < size[0] * size[1] < MAX_PLAIN_PIXELS else None


def _jpeg_size(file: int, head: bytes) -> tuple[int, int] | None:
    """Return the size from the one frame header before the first scan. head: the first bytes of the file."""
    if os.pread(file, 2, os.lseek(file, 0, os.SEEK_END) - 2) != JPEG_END:
        return None
    place, size = 2, None  # of the next segment
    while True:
        if len(head) < place + 4:
            head += os.pread(file, HEADER_BYTES, len(head))
        start, kind, length = struct.unpack_from(">BBH", head, place)
        end = place + 2 + length
        if len(head) < end:
            head += os.pread(file, end + HEADER_BYTES - len(head), len(head))
        content = head[place + 4 : end]
        if start != 0xFF or len(content) != length - 2:
            return None
        if kind in (0xC0, 0xC1, 0xC2) and size is None:  # a frame of 8 bits, of 1, 3 or 4 layers
            bits, height, width, layers = struct.unpack_from(">BHHB", content)
            if bits != 8 or layers not in (1, 3, 4) or len(content) != 6 + 3 * layers:
                return None
            size = width, height
        elif kind == 0xDA:
            return size
        elif not _is_plain(kind, content):
            return None
        place = end


def _is_plain(kind: int, content: bytes) -> bool:
    """Return whether a segment of a JPEG can neither stop Pillow nor turn the image."""
    if kind == 0xDB:
        return len(content) % 65 == 0 and max(content[::65], default=0) < 16  # whole tables of bytes
    if kind in PLAIN_SEGMENTS:
        start, least = PLAIN_SEGMENTS[kind]
        return content.startswith(start) and len(content) >= least
    if kind == 0xE1:
        return not content.startswith(b"Exif") and b"tiff:Orientation" not in content
    if kind == 0xED:
        return content[-6:-2] != b"8BIM"  # ends where Photoshop names a resource: cut, and Pillow refuses it
    return kind in OTHER_SEGMENTS


def _png_size(file: int) -> tuple[int, int] | None:
    """Return the size from the first chunk, if all others up to the last are plain."""
    head = os.pread(file, 25, 8)
    length, kind, width, height, bits, colour, *methods, check = struct.unpack(">I4s2I5BI", head)
    known = (length, kind, bits) == (13, b"IHDR", 8) and colour in (0, 2, 3, 4, 6) and methods in ([0, 0, 0], [0, 0, 1])
    if not known or check != zlib.crc32(head[4:21]):
        return None
    place, pixels = 33, False  # of the next chunk; whether any were read
    while True:
        length, kind = struct.unpack(">I4s", os.pread(file, 8, place))
        if kind == b"IDAT":
            pixels = True
        elif kind == b"IEND":
            whole = pixels and os.pread(file, 9, place + 4) == PNG_END  # and nothing follows
            return (width, height) if whole else None
        elif not PLAIN_CHUNKS_MIN_BYTES.get(kind, MAX_CHUNK_BYTES) <= length < MAX_CHUNK_BYTES:
            return None
        else:
            chunk = os.pread(file, length + 8, place + 4)  # kind, content, check
            named = kind == b"tEXt" and any(name in chunk.lower() for name in (b"exif", b"xmp"))
            if named or chunk[-4:] != zlib.crc32(chunk[:-4]).to_bytes(4, "big"):
                return None
        place += 12 + length


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
