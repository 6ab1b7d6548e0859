"""Read images of any number of channels, and of more than 8 bits, by the `PixelFormat` of a data set or a model."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np

from data.images import IMAGE_SUFFIXES, JPEG_START, read_image, unreadable_image
from utils.batch import PHOTOS, PixelFormat, channel_count, reverse_channels
from utils.errors import UserError
from utils.files import read_regular

NPY_SUFFIX = ".npy"
PIXEL_SUFFIXES = IMAGE_SUFFIXES | {NPY_SUFFIX}  # of files that are not all photos
TIFF_STARTS = (b"II*\0", b"MM\0*")


def read_pixels(path: Path, form: PixelFormat = PHOTOS) -> np.ndarray:
    """Return a photo as `read_image` does; in another format, uint16 (h, w, channels), or (h, w) for one channel.

    The ends of the range are 0 and 65535. The channels of the file, or of files that are stacked, are in reverse order,
    as in BGR. Raises a `UserError` that names the file.
    """
    if form == PHOTOS:
        return read_image(path)
    if not form.folders:
        return to_format(_read_file(path, form), form, path)
    files = stacked_files(path, form.folders)
    images = [read_pixels(file, PixelFormat(0, form.range)) for file in files]
    for file, image in zip(files, images, strict=True):
        if image.shape[:2] != images[0].shape[:2]:
            raise UserError(f"{file} and {path} are stacked and have different sizes; give both one size")
    return to_format(np.dstack(images[::-1]), replace(form, range=None), path)


def to_format(image: np.ndarray, form: PixelFormat, name: object = "the array") -> np.ndarray:
    """Return values (h, w, channels) or (h, w) of any type as `read_pixels` does. Raises a `UserError` with `name`."""
    if image.ndim not in (2, 3) or not image.size or image.dtype.kind not in "uif":
        raise UserError(f"{name} has {image.dtype} {image.shape}; an image has numbers (height, width, channels)")
    image = image[..., 0] if image.shape[2:] == (1,) else image
    image = np.dstack([image] * 3) if form.channels == 3 and image.ndim == 2 else image
    if form.channels not in (0, count := channel_count(image)):
        raise UserError(f"{name} has {PixelFormat(count)}, not {form.channels}; convert it, or correct `channels`")
    if image.dtype == np.uint8:
        image = np.multiply(image, 257, dtype=np.uint16)
    elif image.dtype != np.uint16 or form.range:
        limits = (0, 1) if image.dtype.kind == "f" else (np.iinfo(image.dtype).min, np.iinfo(image.dtype).max)
        low, high = form.range or limits
        scaled = (image.astype(np.float64) - low) * (65535 / (high - low))
        image = np.rint(np.nan_to_num(scaled).clip(0, 65535))
    return np.ascontiguousarray(image, np.uint16)


def stacked_files(path: Path, folders: Sequence[str]) -> list[Path]:
    """Return an image and those of its name in the other `folders`, if any. Raises `UserError`.

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
    """Return the values of a file, channels reversed; without an alpha channel if there are to be three channels."""
    try:
        data = read_regular(path)
        if path.suffix.lower() == NPY_SUFFIX:
            return reverse_channels(np.load(io.BytesIO(data), allow_pickle=False))
        if data.startswith(TIFF_STARTS):
            with suppress(ValueError):  # of a compression that only OpenCV knows
                return reverse_channels(_read_tiff(data))
        is_colour = form.channels == 3 or data.startswith(JPEG_START)
        flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH if is_colour else cv2.IMREAD_UNCHANGED
        image = np.asarray(cv2.imdecode(np.frombuffer(data, np.uint8), flags))
        return image[..., [3, 0, 1, 2]] if image.shape[2:] == (4,) else image  # from BGRA
    except Exception as error:  # each format has its own
        raise unreadable_image(path, error) from None


def _read_tiff(data: bytes) -> np.ndarray:
    """Return all planes and pages of a file, (h, w, channels)."""
    import tifffile  # only here, because most data sets have none

    with tifffile.TiffFile(io.BytesIO(data)) as file:
        series = file.series[0]
        image = np.moveaxis(series.asarray(), [series.axes.index(axis) for axis in "YX"], (0, 1))
        return image.reshape(*image.shape[:2], -1)
