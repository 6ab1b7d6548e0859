"""Find image files, read them as pixels, and read the sizes of images from their headers."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import cv2
import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.ExifTags import Base
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

from utils.batch import PHOTOS, PixelFormat
from utils.console import log
from utils.errors import UserError, plural
from utils.files import SETTINGS_FILE, read_regular, read_text

cv2.setNumThreads(0)  # loader processes are parallel already; their threads would compete for the cores
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)  # Pillow reads what OpenCV cannot, or raises

IMAGE_SUFFIXES = frozenset([".bmp", ".dng", ".jpeg", ".jpg", ".mpo", ".png", ".tif", ".tiff", ".webp"])
NPY_SUFFIX = ".npy"  # of arrays that are images if a data YAML has `channels` or `range`
JPEG_START, JPEG_END = b"\xff\xd8", b"\xff\xd9"
TIFF_STARTS = (b"II*\0", b"MM\0*")
MIN_RESTORED_VALUES = 3 * 16 * 32  # that are not the grey of missing ones: of a file without pixels a block has some
# Flags that decode a JPEG at 1/1, 1/2, 1/4, 1/8 of its size, from the low frequencies of each block only.
REDUCED = (cv2.IMREAD_REDUCED_COLOR_2, cv2.IMREAD_REDUCED_COLOR_4, cv2.IMREAD_REDUCED_COLOR_8)
JPEG_FLAGS = dict(zip((1, 2, 4, 8), (cv2.IMREAD_COLOR, *REDUCED), strict=True))
LARGE_PIXELS = 2_000_000  # inclusive upper bound of a photo that `read_reduced` reads like any image


def is_image(name: str) -> bool:
    """Return whether a file's suffix is one of an image, and it is not hidden, as macOS's `._a.jpg` beside `a.jpg`."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")


def images_below(folder: Path, problems: list[str] | None = None, suffixes: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield every image, or file of other `suffixes`, below a folder, except hidden ones and those in run folders.

    The latter are listed in `problems`.
    """
    visited = set()  # links are followed, but each folder is read once
    for path, folders, files in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(path)
        if real in visited or (path != os.fspath(folder) and is_run_folder(path, problems)):
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = (name for name in sorted(files) if is_image(name) or name.endswith(suffixes))
        yield from (os.path.join(path, name) for name in names)


def is_run_folder(folder: str | Path, problems: list[str] | None = None) -> bool:
    """Return whether a folder is a run folder; if so, count its images in `problems`."""
    is_ours = os.path.isfile(os.path.join(folder, SETTINGS_FILE))
    images = (name for _, _, names in os.walk(folder) for name in filter(is_image, names))
    if is_ours and problems is not None and (count := len(list(images))):
        problems.append(f"{folder} is a run folder, as its {SETTINGS_FILE} shows: {plural(count, 'image')}; left out")
    return is_ours


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"the folder {error.filename} cannot be read: {error.strerror}; fix its permissions") from None


def read_image_list(file: Path) -> tuple[list[str], str]:
    """Return the images that a text file lists, one a line, and a message: see `resolve_paths`. Raises `UserError`."""
    try:
        lines = read_text(file, "surrogateescape").split("\n")  # names may be any bytes
    except UserError:  # as for an image
        raise UserError(f"{file} is neither a folder nor a readable text list of images") from None
    return resolve_paths(file, list(filter(None, (line.strip(" \t\v\f") for line in lines))))


def resolve_paths(file: Path, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the paths that `file` names, relative to its folder or to the working folder, and a message or ''.

    If none exists, nor its folder, all may be of another machine: a prefix of all is replaced by the file's folder or
    by the one above, and the message says so. Any of the files may be absent.
    """
    beside, slashed, paths = os.path.abspath(file.parent), [name.replace("\\", "/") for name in names], []
    for forms in zip(names, slashed, strict=True):
        tried = (os.path.normpath(os.path.join(base, form)) for form in forms for base in (beside, os.getcwd()))
        paths.append(next(filter(os.path.exists, tried), os.path.abspath(forms[0])))
    folders = (os.path.join(beside, os.path.dirname(name)) for name in slashed)
    if any(map(os.path.exists, paths)) or any(map(os.path.isdir, folders)):
        return paths, ""
    for slash in re.finditer("^|/", "".join(slashed[:1])):  # the shortest prefix first
        prefix = slashed[0][: slash.end()]
        for base in (beside, os.path.dirname(beside)):
            moved = [os.path.normpath(f"{base}/{name.removeprefix(prefix)}") for name in slashed]
            if all(name.startswith(prefix) for name in slashed) and any(map(os.path.isfile, moved)):
                return moved, f"{file}: none of its paths exists here; `{prefix or './'}` is read as {base}{os.sep}"
    return paths, ""


def read_image(path: Path, jpeg_divisor: int = 1) -> np.ndarray:
    """Return the pixels as displayed (EXIF orientation applied), uint8 (height, width, 3), BGR.

    16 bits are scaled to 8; both sides of a JPEG are divided by 1, 2, 4 or 8. Raises a `UserError` that names the file.
    """
    try:
        data = read_regular(path)
        flags = JPEG_FLAGS[jpeg_divisor if data.startswith(JPEG_START) else 1]
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags) if data else None
        return image if image is not None else _read_with_pillow(data)
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise unreadable_image(path, error) from None


def _read_with_pillow(data: bytes) -> np.ndarray:
    """Read formats that OpenCV does not know, and truncated JPEGs: with an end, Pillow decodes what is there."""
    with Image.open(io.BytesIO(data + JPEG_END if data.startswith(JPEG_START) else data)) as opened:
        upright = ImageOps.exif_transpose(opened)
        if opened.mode.startswith("I;16"):
            upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
        return np.ascontiguousarray(np.asarray(upright.convert("RGB"))[..., ::-1])


def read_pixels(path: Path, form: PixelFormat = PHOTOS) -> np.ndarray:
    """Return a photo as `read_image` does; in another format, uint16 (h, w, channels), or (h, w) for one channel.

    The ends of the range are 0 and 65535. The channels of the file, or of files that are stacked, are in reverse order,
    as in BGR. Raises a `UserError` that names the file.
    """
    if form == PHOTOS:
        return read_image(path)
    files = stacked_files(path, form.folders)
    one = PixelFormat(0, form.range) if form.folders else form
    images = [to_format(_read_file(file, one), one, file) for file in files]
    if len({image.shape[:2] for image in images}) > 1:
        raise UserError(f"{path} and the images that are stacked with it have different sizes; give all one size")
    return to_format(np.dstack(images[::-1]), replace(form, range=None), path) if form.folders else images[0]


def to_format(image: np.ndarray, form: PixelFormat, name: object = "the array") -> np.ndarray:
    """Return values (h, w, channels) or (h, w) of any type as `read_pixels` does. Raises a `UserError` with `name`."""
    if image.ndim not in (2, 3) or not image.size or image.dtype.kind not in "uif":
        raise UserError(f"{name} has {image.dtype} {image.shape}; an image has numbers (height, width, channels)")
    image = image[..., 0] if image.shape[2:] == (1,) else image
    image = np.dstack([image] * 3) if form.channels == 3 and image.ndim == 2 else image
    if form.channels not in (0, count := np.atleast_3d(image).shape[2]):
        raise UserError(f"{name} has {PixelFormat(count)}, not {form.channels}; convert it, or correct `channels`")
    if image.dtype == np.uint8:
        image = np.multiply(image, 257, dtype=np.uint16)
    elif image.dtype != np.uint16 or form.range:
        limits = (0, 1) if image.dtype.kind == "f" else (np.iinfo(image.dtype).min, np.iinfo(image.dtype).max)
        low, high = form.range or limits
        if not np.isfinite(image).all() or (not form.range and not low <= image.min() <= image.max() <= high):
            raise UserError(f"{name} has values that are not finite, or not in 0 to 1 without a `range`; correct that")
        image = np.rint(((image.astype(np.float64) - low) * (65535 / (high - low))).clip(0, 65535))
    return np.ascontiguousarray(image, np.uint16)


def stacked_files(path: Path, folders: Sequence[str]) -> list[Path]:
    """Return the path of an image, and of the images with its name in the other `folders`. Raises `UserError`.

    In its path, what distinguishes the first folder from the others is replaced, as `images` of images/train.
    """
    parts = [Path(folder).parts for folder in folders]
    while parts and min(map(len, parts)) > 1 and len({names[-1] for names in parts}) == 1:
        parts = [names[:-1] for names in parts]
    first, *others = [os.path.join(os.sep, *names, "") for names in parts] or [""]
    before, found, after = os.path.abspath(path).rpartition(first or os.sep)
    if not found:
        raise UserError(f"{path} is not in a folder {first}, with which `channels` stacks {others[0]}; move it there")
    return [path, *(Path(f"{before}{other}{after}") for other in others)]


def _read_file(path: Path, form: PixelFormat) -> np.ndarray:
    """Return a file's values with the channels reversed, and without alpha if `form` has three channels."""
    try:
        data = read_regular(path)
        if path.suffix.lower() == NPY_SUFFIX:
            return np.atleast_3d(np.load(io.BytesIO(data), allow_pickle=False))[..., ::-1]
        if data.startswith(TIFF_STARTS):
            from tifffile import TiffFile  # only here, because most data sets have none

            with suppress(ValueError), TiffFile(io.BytesIO(data)) as file:  # ValueError: compressed as OpenCV may know
                series = file.series[0]
                image = np.moveaxis(series.asarray(), [series.axes.index(axis) for axis in "YX"], (0, 1))
                return image.reshape(*image.shape[:2], -1)[..., ::-1]  # all planes and pages
            return np.dstack(cv2.imdecodemulti(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)[1][::-1])
        is_colour = form.channels == 3 or data.startswith(JPEG_START)
        flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH if is_colour else cv2.IMREAD_UNCHANGED
        image = np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), flags))
        return image[..., [3, 0, 1, 2]] if image.shape[2:] == (4,) else image  # from BGRA
    except Exception as error:  # each format has its own
        raise unreadable_image(path, error) from None


def read_whole_image(path: Path, form: PixelFormat = PHOTOS) -> np.ndarray:
    """Return the pixels as `read_pixels` does, but raise the `UserError` for any file that data sets leave out."""
    if form != PHOTOS:
        return read_pixels(path, form)
    try:
        image_size(path, lambda problem: log(f"warning: {problem}"))
    except Image.DecompressionBombError:
        pass  # OpenCV reads larger images than Pillow
    except Exception as error:
        raise unreadable_image(path, error) from None
    return read_image(path)


def unreadable_image(name: object, error: Exception) -> UserError:
    """Return the error for an image that OpenCV or Pillow cannot read."""
    reason = re.sub(r" ?<\S+ object at 0x\w+>", "", str(error))  # Pillow names the object that holds the bytes
    if isinstance(error, UnidentifiedImageError):
        reason = "its format is not known"
    elif isinstance(error, cv2.error):
        reason = "OpenCV cannot decode it"
    return UserError(f"{name} cannot be read as an image ({reason}); fix or remove it")


def read_reduced(path: Path, width: int, height: int, size: int) -> np.ndarray:
    """Return an image, uint8 (h, w, 3) BGR, with its longer side at `size` pixels, quickly if it is a large photo.

    A JPEG of more than 2 megapixels is decoded at the smallest scale of 1, 1/2, 1/4, 1/8 that is not below `size`.
    Large photos that are then still twice as large are shrunk by averaging areas. Smaller images are read and resized
    as usual. `width` and `height` are those of the file's image as displayed. Raises `UserError`.
    """
    if width * height <= LARGE_PIXELS:
        return resize_long_side(read_image(path), size, smooth=False)
    divisor = max(divisor for divisor in JPEG_FLAGS if divisor == 1 or divisor * size <= max(width, height))
    image = read_image(path, divisor)
    reduced = -(-height // divisor), -(-width // divisor)
    if image.shape[:2] not in (reduced, (height, width)):  # the file has changed since its size was read
        return resize_long_side(read_image(path), size, smooth=True)
    # Up to a factor of two, bilinear sampling reads every pixel, in a seventh of the time.
    return resize(image, scaled_shape(width, height, size), smooth=max(image.shape) >= 2 * size)


def image_size(path: Path, report: Callable[[str], object] = len) -> tuple[int, int]:
    """Return width and height in pixels as displayed: swapped for EXIF orientations 5 to 8.

    Of a JPEG only headers and the end are read, of a PNG the checksums; others, and one without an end, are decoded.
    `report` is called with a message for a truncated JPEG that has pixels. Raises OSError for a pipe or device, and one
    of Pillow's many errors if the file is not an image, is otherwise truncated, or has neither 8 nor 16 bits.
    """
    if path.exists() and not path.is_file():  # to read it may wait forever
        raise OSError("it is not a regular file")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # damaged EXIF blocks warn; the orientation is then absent
        with Image.open(path) as opened:
            width, height = opened.size
            assert opened.fp  # open until the pixels are loaded
            opened.fp.seek(-len(JPEG_END), os.SEEK_END)
            is_complete = opened.format == "JPEG" and opened.fp.read() == JPEG_END
            orientation = 1
            with suppress(Exception):  # a damaged block; a PNG's own method decodes all pixels first
                orientation = Image.Image.getexif(opened).get(Base.Orientation, 1)
            if isinstance(opened, TiffImageFile):  # newer versions of Pillow swap the size of these already
                width, height = opened.tag_v2[IMAGEWIDTH], opened.tag_v2[IMAGELENGTH]
            if opened.format == "PNG":
                opened.verify()
            elif not is_complete:
                try:
                    opened.load()
                except OSError:
                    if opened.format not in ("JPEG", "MPO") or (read_image(path) != 128).sum() < MIN_RESTORED_VALUES:
                        raise
                    report(f"{path}: truncated, restored")
            if opened.mode == "F" or (opened.mode == "I" and opened.format != "PNG"):
                raise ValueError("its pixels have neither 8 nor 16 bits")
    return (height, width) if orientation in (5, 6, 7, 8) else (width, height)


def resize_long_side(image: np.ndarray, size: int, smooth: bool) -> np.ndarray:
    """Scale an image so that its longer side has `size` pixels; `smooth` averages areas if it shrinks."""
    height, width = image.shape[:2]
    return resize(image, scaled_shape(width, height, size), smooth)


def resize(image: np.ndarray, shape: tuple[int, int], smooth: bool) -> np.ndarray:
    """Scale an image to a width and height in pixels; `smooth` averages areas if it shrinks."""
    height, width = image.shape[:2]
    if shape == (width, height):
        return image
    interpolation = cv2.INTER_AREA if smooth and max(shape) < max(height, width) else cv2.INTER_LINEAR
    if image.shape[2:] > (4,):  # OpenCV averages the areas of 4 channels at most
        return np.dstack([cv2.resize(plane, shape, interpolation=interpolation) for plane in cv2.split(image)])
    return cv2.resize(image, shape, interpolation=interpolation)


def scaled_shape(width: int, height: int, size: int) -> tuple[int, int]:
    """Return width and height after scaling the longer side to `size` pixels, rounded up."""
    longer = max(width, height)
    return -(-width * size // longer), -(-height * size // longer)
