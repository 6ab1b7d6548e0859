"""Reading image files as pixels."""

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

cv2.setNumThreads(0)  # the loader's processes are the parallelism; threads of theirs would fight over the cores
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # what it cannot read Pillow reads, or names

IMAGE_SUFFIXES = frozenset([".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".pfm", ".png", ".tif", ".tiff", ".webp"])
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
HEAD = 4096  # bytes that are read at once: more than the header of most JPEG files
MOST_PIXELS = 2**26  # of an image that Pillow certainly opens; it has a limit of its own

# The chunks of a PNG that can neither stop Pillow nor turn the image where they have so many bytes.
PLAIN_CHUNKS = {
    b"PLTE": 0, b"tRNS": 6, b"gAMA": 4, b"cHRM": 32, b"sRGB": 1, b"pHYs": 9, b"bKGD": 0, b"sBIT": 0, b"tIME": 0,
    b"tEXt": 0,
}  # fmt: skip
LONGEST_CHUNK = 2**16  # bytes; whatever is in a longer one is left to Pillow

# The same for segments of a JPEG: what they must start with and how many bytes they must have.
PLAIN_SEGMENTS = {0xE0: (b"JFIF", 7), 0xE2: (b"ICC_PROFILE\0", 14), 0xEE: (b"Adobe", 7)}
OTHER_SEGMENTS = frozenset([0xC4, 0xDD, 0xFE, *range(0xE3, 0xED), 0xEF])  # tables, a comment, other programs' own


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


def plain_size(path: str) -> tuple[int, int] | None:
    """Width and height in pixels of a JPEG or PNG that is whole and of the ordinary form, without Pillow's help.

    None where only Pillow can tell: other kinds, what may be damaged, and whatever its header has that could turn it.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except (OSError, ValueError):
        return None
    try:
        head = os.pread(file, HEAD, 0)
        if head.startswith(JPEG_START):
            size = _jpeg_size(file, head)
        else:
            size = _png_size(file) if head.startswith(PNG_START) else None
    except (OSError, struct.error):
        return None
    finally:
        os.close(file)
    return size if size and 0 < size[0] * size[1] < MOST_PIXELS else None


def _jpeg_size(file: int, head: bytes) -> tuple[int, int] | None:
    """From the one frame header before the first scan. `head`: the first bytes of the file."""
    if os.pread(file, 2, os.lseek(file, 0, os.SEEK_END) - 2) != JPEG_END:
        return None
    place, size = 2, None  # of the next segment
    while True:
        if len(head) < place + 4:
            head += os.pread(file, HEAD, len(head))
        start, kind, length = struct.unpack_from(">BBH", head, place)
        end = place + 2 + length
        if len(head) < end:
            head += os.pread(file, end + HEAD - len(head), len(head))
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
    """Can this segment of a JPEG neither stop Pillow nor turn the image?"""
    if kind == 0xDB:
        return len(content) % 65 == 0 and max(content[::65], default=0) < 16  # whole tables of bytes
    if kind in PLAIN_SEGMENTS:
        start, least = PLAIN_SEGMENTS[kind]
        return content.startswith(start) and len(content) >= least
    if kind == 0xE1:
        return not content.startswith(b"Exif") and b"tiff:Orientation" not in content
    if kind == 0xED:
        return content[-6:-2] != b"8BIM"  # one that ends so is cut where Photoshop's names a resource: Pillow refuses
    return kind in OTHER_SEGMENTS


def _png_size(file: int) -> tuple[int, int] | None:
    """From the first chunk, where all others up to the last are plain."""
    head = os.pread(file, 25, 8)
    length, kind, width, height, bits, colour, *methods, check = struct.unpack(">I4s2I5BI", head)
    known = (length, kind, bits) == (13, b"IHDR", 8) and colour in (0, 2, 3, 4, 6) and methods in ([0, 0, 0], [0, 0, 1])
    if not known or check != zlib.crc32(head[4:21]):
        return None
    place, pixels = 33, False  # of the next chunk; have there been any?
    while True:
        length, kind = struct.unpack(">I4s", os.pread(file, 8, place))
        if kind == b"IDAT":
            pixels = True
        elif kind == b"IEND":
            whole = pixels and os.pread(file, 9, place + 4) == PNG_END  # and nothing follows
            return (width, height) if whole else None
        elif not PLAIN_CHUNKS.get(kind, LONGEST_CHUNK) <= length < LONGEST_CHUNK:
            return None
        else:
            chunk = os.pread(file, length + 8, place + 4)  # kind, content, check
            named = kind == b"tEXt" and any(name in chunk.lower() for name in (b"exif", b"xmp"))
            if named or chunk[-4:] != zlib.crc32(chunk[:-4]).to_bytes(4, "big"):
                return None
        place += 12 + length


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
