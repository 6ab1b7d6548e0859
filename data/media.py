"""The sources of detect.py, frame by frame: pictures, videos, cameras, streams and the screen. Called by detect.py."""

from __future__ import annotations

import glob
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlparse

import cv2
import numpy as np

from data.images import IMAGE_SUFFIXES, read_whole_image
from utils.errors import UserError
from utils.files import cache_folder

T = TypeVar("T")
VIDEO_SUFFIXES = frozenset(
    [".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv"]
)
STREAM_SCHEMES = ("rtsp", "rtmp", "rtp", "tcp", "udp")  # of live streams
WEB_SCHEMES = ("http", "https")
SCREEN_WORD = "screen"
STREAM_ATTEMPTS = 3  # to open a stream
RECONNECT_SECONDS = 1.0  # between two attempts
FRAME_TIMEOUT_SECONDS = 20.0  # for the next frame of a stream
DEFAULT_FPS = 30.0  # of a video or stream without a frame rate


class MediaItem(NamedTuple):
    """A picture, a video, or a live stream."""

    kind: str  # "picture", "video" or "live"
    name: str  # a file, an address, a camera's number, or the screen


class Frame(NamedTuple):
    """A picture, or a frame of a video or stream.

    image: uint8 (h, w, 3), BGR, as displayed. number: index among all frames of the video or stream. fps, frames: frame
    rate and number of frames of the video or stream; 0 if unknown, and for a picture.
    """

    item: MediaItem
    image: np.ndarray
    number: int = 0
    fps: float = 0.0
    frames: int = 0


def find_media(source: str) -> list[MediaItem]:
    """Return the items of a source, which may be a file, a folder, a glob, an address, a camera's number, a `.txt` list
    of any of these, a `.streams` list of streams, or `screen` (with a screen's number, or left, top, width and height).

    Raises `UserError` if the source does not exist or has no picture or video.
    """
    text = source.strip()
    if not text:
        raise UserError(
            "no source is given; name a file, a folder, a glob, an address or a camera's number by --source"
        )
    if text.isdigit() or text.split()[0] == SCREEN_WORD or urlparse(text).scheme in STREAM_SCHEMES:
        return [MediaItem("live", text)]
    if urlparse(text).scheme in WEB_SCHEMES:
        return [MediaItem(_kind(urlparse(text).path) or "live", text)]
    if text.endswith((".streams", ".txt")):
        return _read_list(Path(text), live=text.endswith(".streams"))
    if os.path.isdir(text):
        paths = [entry.path for entry in os.scandir(text) if entry.is_file()]
    elif os.path.exists(text):
        paths = [text]
    else:
        paths = glob.glob(text, recursive=True)
        if not paths:
            raise UserError(f"--source {text} does not exist; name a file, a folder, a glob, an address or a camera")
    items = [MediaItem(kind, path) for path in sorted(paths) if (kind := _kind(path))]
    if not items:
        below = f"; to include the folders below, write '{text}/**/*'" if os.path.isdir(text) else ""
        known = " ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))
        raise UserError(f"--source {text} has no picture or video, which end with {known}{below}")
    return items


def _kind(path: str) -> str:
    """Return "picture" or "video" by the suffix of a path, else ''."""
    suffix = os.path.splitext(path)[1].lower()
    if suffix in VIDEO_SUFFIXES:
        return "video"
    return "picture" if suffix in IMAGE_SUFFIXES else ""


def _read_list(file: Path, live: bool) -> list[MediaItem]:
    """Return the items on the lines of a text file, relative to the working folder or to the file's folder.

    A line without an item becomes a picture, so that reading it reports the problem.
    """
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--source {file} cannot be read as a list ({error}); write a path or an address per line"
        ) from None
    items: list[MediaItem] = []
    for line in filter(None, lines):
        beside = str(file.parent / line)
        try:
            if live:
                items.append(MediaItem("live", line))
            else:
                items += find_media(line if os.path.exists(line) or not os.path.exists(beside) else beside)
        except UserError:
            items.append(MediaItem("picture", line))
    if not items:
        raise UserError(f"--source {file} is an empty list; write a path or an address per line")
    return items


@dataclass
class Media:
    """An iterable over the frames of `items`, in order; live streams come last and take turns."""

    items: list[MediaItem]
    stride: int = 1  # of the frames of a video or stream
    problems: list[str] = field(default_factory=list)  # messages about items that could not be read so far

    def __iter__(self) -> Iterator[Frame]:
        for item in self.items:
            try:
                if item.kind == "picture":
                    yield Frame(item, read_whole_image(local_file(item)))
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
        if urlparse(item.name).scheme in WEB_SCHEMES:
            return 1
        video = cv2.VideoCapture(item.name)
        frames = max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        video.release()
        return -(-frames // self.stride)

    def _video(self, item: MediaItem) -> Iterator[Frame]:
        video = cv2.VideoCapture(str(local_file(item)))
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
    """Return the file of a picture or video, downloaded to the cache if it is an address. Raises `UserError`."""
    if urlparse(item.name).scheme not in WEB_SCHEMES:
        return Path(item.name)
    from utils.download import download  # rarely needed

    return download(item.name, cache_folder() / "media" / Path(urlparse(item.name).path).name)


def _rate(video: Any) -> float:
    fps = float(video.get(cv2.CAP_PROP_FPS))
    return fps if 0 < fps < 1000 else DEFAULT_FPS


class Stream:
    """A live stream. A thread reads it and holds only the newest frame, so a slow caller skips frames, without lag.

    A stream that ends is reopened a few times. problem: why it has ended for good; '' before.
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
                    if self.item.name.isdigit():  # a camera
                        break
        except UserError as error:
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
    video = cv2.VideoCapture(int(name) if name.isdigit() else name)
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
    """Yield pictures of a screen. text: `screen` and its options, see `find_media`. Raises `UserError`."""
    try:
        import mss
    except ImportError:
        raise UserError("--source screen needs the package mss: pip install mss") from None
    numbers = text.split()[1:]
    if not all(number.isdigit() for number in numbers) or len(numbers) not in (0, 1, 4, 5):
        raise UserError(f"--source '{text}': write screen, screen NUMBER, or screen [NUMBER] LEFT TOP WIDTH HEIGHT")
    values = list(map(int, numbers))
    try:
        with mss.mss() as grabber:
            monitor = dict(grabber.monitors[values.pop(0) if len(values) in (1, 5) else 0])
            if values:
                monitor |= dict(zip(("left", "top", "width", "height"), values, strict=True))
            while True:
                yield np.ascontiguousarray(np.asarray(grabber.grab(monitor))[..., :3]), DEFAULT_FPS
    except (mss.exception.ScreenShotError, IndexError) as error:
        raise UserError(f"--source '{text}': the screen cannot be read ({error})") from None


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
