"""The sources of detect.py, frame by frame: pictures, videos, cameras, streams, the screen, and images from Python.

Called by detect.py and predictor.py.
"""

from __future__ import annotations

import glob
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlparse

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from data.images import IMAGE_SUFFIXES, read_whole_image, unreadable
from utils.console import show
from utils.errors import UserError, shortened
from utils.files import cache_folder, read_regular

T = TypeVar("T")
VIDEO_SUFFIXES = frozenset(
    [".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv"]
)
STREAM_SCHEMES = ("rtsp", "rtmp", "rtp", "tcp", "udp")  # schemes of live streams
WEB_SCHEMES = ("http", "https")
SCREEN_WORD = "screen"
MAX_CAMERA = 9999
STREAM_ATTEMPTS = 3  # attempts to open a stream
RECONNECT_SECONDS = 1.0  # pause between two attempts
FRAME_TIMEOUT_SECONDS = 20.0  # timeout for the next frame of a stream
ADDRESS_DIGITS = 16  # hex digits of an address's hash, which tell files of one name apart in the cache
DEFAULT_FPS = 30.0  # frame rate of a video or stream that has none


class MediaItem(NamedTuple):
    """A picture, a video, or a live stream."""

    kind: str  # "picture", "video" or "live"
    name: str  # a file, an address, a camera's number, or the screen


class Frame(NamedTuple):
    """A picture, or a frame of a video or stream.

    Attributes:
        item: picture, video or stream that has the frame
        image: pixels as displayed, uint8 (h, w, 3) BGR
        number: index among all frames of the video or stream
        fps: frame rate of the video or stream; 0 if unknown, and for a picture
        frames: number of frames of the video; 0 if unknown, and for a picture
    """

    item: MediaItem
    image: np.ndarray
    number: int = 0
    fps: float = 0.0
    frames: int = 0


def find_media(source: str, lists: Sequence[Path] = ()) -> list[MediaItem]:
    """Return the items of a source. Raises `UserError` if it does not exist or has no picture or video.

    A file that cannot be read is an item too, so that reading it reports the problem.

    Args:
        source: a file, a folder, a glob, an address, a camera's number, a `.txt` list of any of these, a `.streams`
            list of streams, or `screen` (with a screen's number, or left, top, width and height)
        lists: list files that led to the source
    """
    text = source.strip()
    if not text:
        raise UserError("no source is given; name a file, a folder, a glob, an address or a camera's number")
    try:
        address = urlparse(text)
    except ValueError as error:
        raise UserError(f"the source {text} is not a valid address ({error}); correct it") from None
    if text.isdecimal() and (not text.isascii() or int(text) > MAX_CAMERA):
        raise UserError(f"the source {shortened(text)} is not a camera's number; give one from 0 to {MAX_CAMERA}")
    if text.isdecimal() or text.split()[0] == SCREEN_WORD or address.scheme in STREAM_SCHEMES:
        return [MediaItem("live", text)]
    if address.scheme in WEB_SCHEMES:
        return [MediaItem(_kind(address.path) or "live", text)]
    if text.endswith((".streams", ".txt")):
        return _read_list(Path(text), text.endswith(".streams"), lists)
    if os.path.isdir(text):
        paths = [entry.path for entry in os.scandir(text) if not os.path.isdir(entry.path)]
    elif os.path.exists(text):
        paths = [text]
    else:
        paths = glob.glob(text, recursive=True)
        if not paths:
            raise UserError(f"the source {text} does not exist; name a file, a folder, a glob, an address or a camera")
    items = [MediaItem(kind, path) for path in sorted(paths) if (kind := _kind(path))]
    if not items:
        below = f"; to include the folders below, write '{text}/**/*'" if os.path.isdir(text) else ""
        known = " ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))
        raise UserError(f"the source {text} has no picture or video, which end with {known}{below}")
    return items


def _kind(path: str) -> str:
    """Return "picture" or "video" by the suffix of a path, else ''."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in VIDEO_SUFFIXES:
        return "video"
    return "picture" if suffix in IMAGE_SUFFIXES else ""


def _read_list(file: Path, live: bool, lists: Sequence[Path]) -> list[MediaItem]:
    """Return the items on the lines of a text file, relative to the working folder or to the file's folder.

    A line that names no item becomes a picture, so that reading it reports the problem.

    Args:
        live: whether the lines are streams
        lists: list files that led to this file
    """
    if file.resolve() in lists:
        raise UserError(f"the source {file} lists itself; remove that line")
    try:
        lines = [line.strip() for line in read_regular(file).decode("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the source {file} cannot be read as a list ({error}); write a path or an address per line"
        ) from None
    items: list[MediaItem] = []
    for line in filter(None, lines):
        beside = str(file.parent / line)
        try:
            if live:
                items.append(MediaItem("live", line))
            else:
                path = line if os.path.exists(line) or not os.path.exists(beside) else beside
                items += find_media(path, [*lists, file.resolve()])
        except UserError:
            items.append(MediaItem("picture", line))
    if not items:
        raise UserError(f"the source {file} is an empty list; write a path or an address per line")
    return items


@dataclass
class Media:
    """An iterable over the frames of `items`, in order; live streams come last and take turns."""

    items: list[MediaItem]
    stride: int = 1  # step between the frames of a video or stream
    problems: list[str] = field(default_factory=list)  # messages about items that could not be read so far

    def __iter__(self) -> Iterator[Frame]:
        for item in self.items:
            try:
                if item.kind == "picture":
                    yield Frame(item, read_picture(item))
                elif item.kind == "video":
                    yield from self._video(item)
            except UserError as error:
                self.problems.append(str(error))
        yield from self._streams([item for item in self.items if item.kind == "live"])

    def count(self) -> int:
        """Return the approximate number of frames, 0 if unknown."""
        if any(item.kind == "live" for item in self.items):
            return 0
        return sum(1 if item.kind == "picture" else self._length(item) for item in self.items)

    def _length(self, item: MediaItem) -> int:
        if not os.path.isfile(item.name):  # an address, or what `_video` reports
            return 1
        video = _open(item.name)
        frames = max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        video.release()
        return -(-frames // self.stride)

    def _video(self, item: MediaItem) -> Iterator[Frame]:
        video = _open(str(local_file(item)))
        fps, frames = _rate(video), max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        number = 0
        while video.grab():
            if number % self.stride == 0:
                fine, image = video.retrieve()
                if not fine:
                    break
                yield Frame(item, image, number, fps, frames)
            number += 1
        video.release()
        if number == 0:
            self.problems.append(f"{item.name} cannot be read as a video; fix or remove it")
        elif number < frames:
            self.problems.append(f"{item.name} ends after {number} of {frames} frames; it is truncated or damaged")

    def _streams(self, items: list[MediaItem]) -> Iterator[Frame]:
        streams = [Stream(item, self.stride) for item in items]
        try:
            while streams:
                for stream in list(streams):
                    frame = stream.next()
                    if frame is None:
                        self.problems.append(stream.problem)
                        streams.remove(stream)
                    else:
                        yield frame
        finally:
            for stream in streams:
                stream.close()


def local_file(item: MediaItem) -> Path:
    """Return the file of a picture or video, downloaded to the cache if it is an address.

    Raises `UserError` if this fails, or for a pipe or device, on which reading may wait forever.
    """
    if urlparse(item.name).scheme not in WEB_SCHEMES:
        if os.path.exists(item.name) and not os.path.isfile(item.name):
            raise UserError(f"{item.name} is not a regular file; give the name of a picture or video")
        return Path(item.name)
    from utils.download import download  # rarely needed

    address = hashlib.sha256(os.fsencode(item.name)).hexdigest()[:ADDRESS_DIGITS]
    return download(item.name, cache_folder() / "media" / address / Path(urlparse(item.name).path).name)


def _open(name: str | int) -> Any:
    """Open a video, stream or camera with OpenCV, without ffmpeg's own messages."""
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")  # AV_LOG_QUIET
    return cv2.VideoCapture(name)


def _rate(video: Any) -> float:
    fps = float(video.get(cv2.CAP_PROP_FPS))
    return fps if 0 < fps < 1000 else DEFAULT_FPS


def read_picture(item: MediaItem) -> np.ndarray:
    """Return the pixels of a picture, uint8 (h, w, 3) BGR. Raises `UserError`."""
    return read_whole_image(local_file(item))


class Picture(NamedTuple):
    """An image from Python.

    Attributes:
        name: name of the image in results and messages
        pixels: uint8 (h, w, 3) BGR
        read: returns the pixels again
    """

    name: str
    pixels: np.ndarray
    read: Callable[[], np.ndarray]


def find_files(source: str) -> list[MediaItem]:
    """Return the pictures and videos of a path, folder, glob, address, or `.txt` list.

    A file that is not a video counts as a picture, whatever its suffix. Raises `UserError`, also for streams.
    """
    is_picture = os.path.isfile(source) and _kind(source) != "video" and not source.endswith((".streams", ".txt"))
    items = [MediaItem("picture", source)] if is_picture else find_media(source)
    for item in items:
        if item.kind == "live":
            raise UserError(f"{item.name} is a camera, screen or stream; run detect.py on it, or pass frames as arrays")
    return items


def read_pictures(items: Iterable[MediaItem]) -> Iterator[Picture]:
    """Read pictures, and every frame of videos, named after the video and the number of the frame.

    Raises `UserError` for an item that cannot be read; prints a warning for a video that ends early.
    """
    for item in items:
        if item.kind == "picture":
            yield Picture(item.name, read_picture(item), partial(read_picture, item))
            continue
        media, count = Media([item]), 0
        for frame in media:
            name = f"{item.name} ({frame.number + 1})"
            yield Picture(name, frame.image, partial(_read_frame, item, frame.number))
            count += 1
        if media.problems and not count:
            raise UserError(media.problems[0])
        show(*(f"warning: {problem}" for problem in media.problems))


def _read_frame(item: MediaItem, number: int) -> np.ndarray:
    """Return the pixels of a video's frame, uint8 (h, w, 3) BGR, skipping the frames before it. Raises `UserError`."""
    for frame in Media([item], max(number, 1)):
        if frame.number == number:
            return frame.image
    raise UserError(f"{item.name} has no frame {number + 1} any more; pass the frame as an array")


def as_pixels(image: Any, bgr: bool = False) -> np.ndarray:
    """Convert an image in memory to uint8 (h, w, 3) BGR, a copy. Raises `UserError`.

    Args:
        image: a PIL image; an array, uint8 (h, w, 3), or grey (h, w); or a tensor (3, h, w), uint8 or floats in 0 to 1
        bgr: whether the channels of arrays and tensors are in BGR instead of RGB order
    """
    if isinstance(image, Image.Image):
        bgr = False
        try:
            image = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception as error:  # Pillow reads the file only now, and raises many kinds if it is damaged
            raise unreadable(getattr(image, "filename", "") or "the PIL image", error) from None
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        if image.is_floating_point():
            if not ((image >= 0) & (image <= 1)).all():
                raise UserError(
                    f"a tensor of floats must have values in 0 to 1, not {image.min():g} to {image.max():g}; divide it "
                    "by 255, or convert it to uint8"
                )
            image = (image * 255).round().to(torch.uint8)
        image = image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    if not isinstance(image, np.ndarray) or image.ndim not in (2, 3) or image.dtype != np.uint8 or not image.size:
        what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise UserError(
            "an image must be a path, a PIL image, a uint8 array (h, w, 3) or a tensor (3, h, w), uint8 or 0 to 1, not "
            f"{what}"
        )
    if image.ndim == 2:
        return np.repeat(image[..., None], 3, 2)
    if image.shape[2] != 3:
        raise UserError(f"an image must have 3 channels, {'BGR' if bgr else 'RGB'}, not {image.shape[2]}")
    return np.array(image if bgr else image[..., ::-1], order="C")


class Stream:
    """A live stream. A thread reads it and holds only the newest frame, so a slow caller skips frames, without lag.

    A stream that ends is reopened a few times.

    Attributes:
        problem: reason why the stream has ended for good; '' before
    """

    def __init__(self, item: MediaItem, stride: int) -> None:
        self.item, self.stride, self.problem = item, stride, ""
        self._newest: Frame | None = None
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self) -> Frame | None:
        """Wait for a new frame and return it, or None if the stream has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self.problem, FRAME_TIMEOUT_SECONDS)
            frame, self._newest = self._newest, None
            if frame is None and not self.problem:
                self.problem, self._closed = f"{self.item.name} has sent no frame for {FRAME_TIMEOUT_SECONDS:g} s", True
            return frame

    def close(self) -> None:
        """Stop reading."""
        self._closed = True
        self._thread.join(FRAME_TIMEOUT_SECONDS)

    def _read(self) -> None:
        problem = ""
        try:
            number = 0
            for attempt in range(STREAM_ATTEMPTS):
                if self._closed:
                    break
                if attempt:
                    time.sleep(RECONNECT_SECONDS)
                number = self._follow(number)
                problem = f"the stream {self.item.name} ended after {number} frames"
                if number == 0:
                    problem = f"{self.item.name} cannot be opened as a stream or camera; check its address or number"
                    if self.item.name.isdecimal():  # a camera
                        break
        except (UserError, cv2.error) as error:
            problem = str(error)
        with self._changed:
            self.problem = problem or "closed"
            self._changed.notify_all()

    def _follow(self, number: int) -> int:
        """Read the stream to its end, and return the number of the next frame."""
        name = self.item.name
        for image, fps in _screen(name) if name.split()[0] == SCREEN_WORD else _captured(name, self.stride):
            with self._changed:
                self._newest = Frame(self.item, image, number, fps)
                self._changed.notify_all()
            number += self.stride
            if self._closed:
                break
        return number


def _captured(name: str, stride: int) -> Iterator[tuple[np.ndarray, float]]:
    video = _open(int(name) if name.isdecimal() else name)
    try:
        fps, number = _rate(video), 0
        while video.grab():
            if number % stride == 0:
                fine, image = video.retrieve()
                if not fine:
                    return
                yield image, fps
            number += 1
    finally:
        video.release()


def _screen(text: str) -> Iterator[tuple[np.ndarray, float]]:
    """Yield pictures of a screen. Raises `UserError`.

    Args:
        text: `screen` and its options; see `find_media`
    """
    try:
        import mss
    except ImportError:
        raise UserError("the source screen needs the package mss: pip install mss") from None
    numbers = text.split()[1:]
    if not all(number.isdecimal() for number in numbers) or len(numbers) not in (0, 1, 4, 5):
        raise UserError(f"the source '{text}': write screen, screen NUMBER, or screen [NUMBER] LEFT TOP WIDTH HEIGHT")
    values = list(map(int, numbers))
    try:
        with mss.mss() as grabber:
            monitor = dict(grabber.monitors[values.pop(0) if len(values) in (1, 5) else 0])
            if values:
                monitor |= dict(zip(("left", "top", "width", "height"), values, strict=True))
            while True:
                yield np.ascontiguousarray(np.asarray(grabber.grab(monitor))[..., :3]), DEFAULT_FPS
    except (mss.exception.ScreenShotError, IndexError) as error:
        raise UserError(f"the source '{text}': the screen cannot be read ({error})") from None


def prefetched(frames: Iterable[T], count: int = 4) -> Iterator[T]:
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
