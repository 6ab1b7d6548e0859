"""The sources of detect.py and `Predictor` by frame: pictures, videos, cameras, streams, and images from Python."""

from __future__ import annotations

import glob
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlparse

import cv2
import numpy as np
from PIL import Image, ImageOps
from torch import Tensor

from data.images import IMAGE_SUFFIXES, NPY_SUFFIX, read_whole_image, to_format, unreadable_image
from utils.batch import PHOTOS, PixelFormat
from utils.console import log
from utils.errors import UserError
from utils.files import cache_folder, download, read_text

T = TypeVar("T")
VIDEO_SUFFIXES = frozenset(
    [".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv"]
)
LISTS = (".txt", ".streams")  # suffixes of lists of sources
WEB_SCHEMES = ("http", "https")
DEFAULT_FPS = 30.0  # frame rate of a video or stream that has none
COMPLETE = 0.9  # smallest share of the header's frames that a whole video has: .mkv counts on until the sound ends


class MediaItem(NamedTuple):
    """A picture, a video, or a live stream."""

    kind: str  # "picture", "video" or "live"
    name: str  # a file, an address or a camera's number


class Frame(NamedTuple):
    """A picture, or a frame of a video or stream."""

    item: MediaItem  # picture, video or stream that has the frame
    image: np.ndarray  # pixels as displayed, uint8 (h, w, 3) BGR, or as `read_pixels` returns them
    number: int = 0  # index among all frames of the video or stream
    fps: float = 0.0  # frame rate of the video or stream; 0 for a picture
    pixels: PixelFormat = PHOTOS

    @property
    def title(self) -> str:
        """The name of the file, address or camera; of a video or stream with the number of the frame, from 1."""
        return self.item.name if self.item.kind == "picture" else f"{self.item.name} ({self.number + 1})"

    def read(self) -> np.ndarray:
        """Return the pixels of a file's picture or frame again, skipping the frames before it. Raises `UserError`."""
        media = Media([self.item], max(self.number, 1), self.pixels)
        for frame in media:
            if frame.number == self.number:
                return frame.image
        raise UserError("; ".join(media.problems) or f"{self.item.name} has no frame {self.number + 1} any more")


def find_media(source: str) -> list[MediaItem]:
    """Return the items of a source. Raises `UserError` if it does not exist or has no picture or video.

    It is a file, a folder, a glob, an address, a camera's number, or a `.txt` list of files and addresses. A file that
    cannot be read is an item too, so that reading it reports the problem.
    """
    text = source.strip()
    if "://" in text or (text.isdecimal() and len(text) < 5):
        return [_item(text)]
    if text.endswith(LISTS):  # paths relative to the working folder or to the list's, and addresses
        lines = [line.strip() for line in read_text(text, "surrogateescape").split("\n") if line.strip()]
        if not lines:
            raise UserError(f"the source {text} is an empty list; write a path or an address per line")
        beside = Path(text).parent
        return [_item(line if os.path.exists(line) or "://" in line else str(beside / line)) for line in lines]
    pattern = os.path.join(glob.escape(text), "*") if os.path.isdir(text) else text
    paths = [text] if os.path.isfile(text) else glob.glob(pattern, recursive=True)
    items = [_item(path) for path in sorted(paths) if _kind(path) and not os.path.isdir(path)]
    items = items or [MediaItem("picture", path) for path in sorted(paths) if path.endswith(NPY_SUFFIX)]
    if not items:
        suffixes = " ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))
        raise UserError(
            f"the source '{text}' does not exist or has no picture or video; name a file, a folder, a glob such as "
            f"'folder/**/*', an address or a camera (suffixes: {suffixes})"
        )
    return items


def find_files(source: str) -> list[MediaItem]:
    """Return the items of a source as `find_media` does, but a file counts whatever its suffix. Refuses streams."""
    items = [_item(source)] if os.path.isfile(source) and not source.endswith(LISTS) else find_media(source)
    for item in items:
        if item.kind == "live":
            raise UserError(f"{item.name} is a camera or stream; run detect.py on it, or pass frames as arrays")
    return items


def _item(name: str) -> MediaItem:
    """Return the item with a name; a file with an unknown suffix counts as a picture, and reading it reports this."""
    scheme, is_address, _ = name.rpartition("://")
    if name.isdecimal() or (is_address and scheme not in WEB_SCHEMES):
        return MediaItem("live", name)
    if is_address:
        return MediaItem(_kind(name.partition("?")[0]) or "live", name)
    return MediaItem(_kind(name) or "picture", name)


def _kind(path: str) -> str:
    """Return "picture" or "video" by the suffix of a path, else ''."""
    suffix = os.path.splitext(path)[1].lower()
    return "picture" if suffix in IMAGE_SUFFIXES else "video" if suffix in VIDEO_SUFFIXES else ""


@dataclass
class Media:
    """An iterable over the frames of `items`, in order. Raises `UserError` for two live streams: neither would end."""

    items: list[MediaItem]
    stride: int = 1  # step between the frames of a video or stream
    pixels: PixelFormat = PHOTOS
    problems: list[str] = field(default_factory=list)  # messages about items that could not be read so far

    def __post_init__(self) -> None:
        films = [item.name for item in self.items if item.kind != "picture"]
        if films and self.pixels != PHOTOS:
            raise UserError(f"{films[0]} has 3 channels of 8 bits, and the model takes images of {self.pixels}")
        if len(self.items) > 1 and any(item.kind == "live" for item in self.items):
            raise UserError("a camera or stream must be the only source; start detect.py once for each")

    def __iter__(self) -> Iterator[Frame]:
        for item in self.items:
            try:
                if item.kind == "picture":
                    yield Frame(item, read_whole_image(local_file(item), self.pixels), pixels=self.pixels)
                else:
                    yield from self._video(item)
            except UserError as error:
                self.problems.append(str(error))

    def _video(self, item: MediaItem) -> Iterator[Frame]:
        os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # AV_LOG_QUIET
        name = item.name if item.kind == "live" else str(local_file(item))
        video, number = cv2.VideoCapture(int(name) if name.isdecimal() else name), 0
        fps, expected = float(video.get(cv2.CAP_PROP_FPS)), int(video.get(cv2.CAP_PROP_FRAME_COUNT))
        while video.grab():
            if number % self.stride == 0:
                is_read, image = video.retrieve()
                if not is_read:
                    break
                yield Frame(item, image, number, fps if 0 < fps < 1000 else DEFAULT_FPS)
            number += 1
        video.release()
        if item.kind == "live" and not number:
            self.problems.append(f"{item.name} cannot be opened; check the camera or address, and who else uses it")
        elif number == 0 or number < COMPLETE * expected or (item.kind == "live" and expected <= 0):
            self.problems.append(f"{item.name} cannot be read after {number} frames; it is damaged, cut or a web page")


def local_file(item: MediaItem) -> Path:
    """Return the file of a picture or video, downloaded to the cache. Raises `UserError`, also for a pipe or device."""
    address = urlparse(item.name)
    if address.scheme not in WEB_SCHEMES:
        if os.path.exists(item.name) and not os.path.isfile(item.name):
            raise UserError(f"{item.name} is not a regular file; give the name of a picture or video")
        return Path(item.name)
    folder = hashlib.sha256(os.fsencode(item.name)).hexdigest()[:16]  # files of one name are kept apart
    return download(item.name, cache_folder() / "media" / folder / Path(address.path).name)


def read_files(items: Iterable[MediaItem], pixels: PixelFormat = PHOTOS) -> Iterator[Frame]:
    """Read pictures, and every frame of videos, with a warning for one that ends early. Raises `UserError`."""
    for item in items:
        media, frame = Media([item], pixels=pixels), None
        for frame in media:
            yield frame
        if media.problems and not frame:
            raise UserError(media.problems[0])
        log(*(f"warning: {problem}" for problem in media.problems))


def as_pixels(image: Any, bgr: bool = False, pixels: PixelFormat = PHOTOS) -> np.ndarray:
    """Convert an image in memory to uint8 (h, w, 3) BGR, a copy. Raises `UserError`.

    It is a PIL image; an array, uint8 (h, w, 3), or grey (h, w); or a tensor (3, h, w), uint8 or floats in 0 to 1, in
    RGB order, or BGR if `bgr`. For other `pixels` it is an array, as of a file, which becomes as `read_pixels` does.
    """
    if pixels != PHOTOS:
        order: dict[int, Any] = {3: [0, 1, 2], 4: [3, 0, 1, 2]} if bgr else {}  # from BGR and BGRA
        image = np.atleast_3d(np.moveaxis(image.detach().cpu().numpy(), 0, -1) if isinstance(image, Tensor) else image)
        return to_format(image[..., order.get(image.shape[-1], np.s_[::-1])], pixels)
    if isinstance(image, Image.Image):
        bgr = False
        try:
            image = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception as error:  # Pillow reads the file only now, and raises many kinds if it is damaged
            raise unreadable_image(getattr(image, "filename", "") or "the PIL image", error) from None
    elif isinstance(image, Tensor):
        array = (image.float() if image.is_floating_point() else image).detach().cpu().numpy()
        if image.is_floating_point() and ((array >= 0) & (array <= 1)).all():
            array = (array * 255).round().astype(np.uint8)
        image = array.transpose(1, 2, 0) if image.ndim == 3 else array
    if isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.size:
        if image.ndim == 2:
            image = np.repeat(image[..., None], 3, 2)
        if image.ndim == 3 and image.shape[2] == 3:
            return np.array(image if bgr else image[..., ::-1], order="C")
    what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
    raise UserError(
        "an image must be a path, a PIL image, a uint8 array (h, w, 3) or a tensor (3, h, w), uint8 or floats from "
        f"0 to 1, not {what}"
    )


def prefetch(frames: Iterable[T], count: int = 4) -> Iterator[T]:
    """Yield the frames, read by a thread up to `count` frames ahead: decoding overlaps with inference."""
    iterator, end = iter(frames), object()
    reader = ThreadPoolExecutor(1)
    try:
        pending = deque(reader.submit(next, iterator, end) for _ in range(count))
        while (frame := pending.popleft().result()) is not end:
            pending.append(reader.submit(next, iterator, end))
            yield cast(T, frame)
    finally:
        reader.shutdown(cancel_futures=True)
