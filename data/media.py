"""What there is to look at: pictures, videos, cameras, streams and the screen, frame by frame."""

from __future__ import annotations

import glob
import os
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlparse

import cv2
import numpy as np

from data.images import IMAGE_SUFFIXES, read_image
from utils.errors import UserError
from utils.files import cache_folder

T = TypeVar("T")
VIDEO_SUFFIXES = frozenset(
    [".asf", ".avi", ".gif", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv"]
)
LIVE = ("rtsp", "rtmp", "rtp", "tcp", "udp")  # schemes of streams that have no end
WEB = ("http", "https")
SCREEN = "screen"
TRIES = 3  # times that a stream is opened anew where it ends
PAUSE = 1.0  # seconds before that
PATIENCE = 20.0  # seconds to wait for a stream's next frame
FPS = 30.0  # of what does not say


class Item(NamedTuple):
    """A picture, a video, or a live stream, and where it is from: a file, an address, a camera's number, the screen."""

    kind: str  # "picture", "video" or "live"
    name: str


class Frame(NamedTuple):
    """A picture, or one of a video's or stream's.

    image: uint8 (h, w, 3), BGR, as displayed; number: in the video or stream, counted from 0 through all of its frames;
    fps, frames: of the video or stream, `frames` 0 where there is no telling. Of a picture they are 0 both.
    """

    item: Item
    image: np.ndarray
    number: int = 0
    fps: float = 0.0
    frames: int = 0


def find_media(source: str) -> list[Item]:
    """What a source names: a file, a folder, a glob, a `.txt` list of any of them, an address, a `.streams` list of
    streams, a camera's number, or `screen` (with a screen's number, or left, top, width and height).

    Raises `UserError` where there is nothing of that name, or nothing that could be looked at in it.
    """
    text = source.strip()
    if not text:
        raise UserError(
            "no source is given; name a file, a folder, a glob, an address or a camera's number by --source"
        )
    if text.isdigit() or text.split()[0] == SCREEN or urlparse(text).scheme in LIVE:
        return [Item("live", text)]
    if urlparse(text).scheme in WEB:
        return [_on_the_web(text)]
    if text.endswith((".streams", ".txt")):
        return _listed(Path(text), live=text.endswith(".streams"))
    if os.path.isdir(text):
        paths = [entry.path for entry in os.scandir(text) if entry.is_file()]
    elif os.path.exists(text):
        paths = [text]
    else:
        paths = glob.glob(text, recursive=True)
        if not paths:
            raise UserError(f"--source {text} does not exist; name a file, a folder, a glob, an address or a camera")
    items = [item for path in sorted(paths) if (item := _by_suffix(path))]
    if not items:
        below = f"; for folders below it write '{text}/**/*'" if os.path.isdir(text) else ""
        known = " ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))
        raise UserError(f"--source {text} has no picture or video, which end with {known}{below}")
    return items


def _by_suffix(path: str) -> Item | None:
    suffix = os.path.splitext(path)[1].lower()
    if suffix in VIDEO_SUFFIXES:
        return Item("video", path)
    return Item("picture", path) if suffix in IMAGE_SUFFIXES else None


def _on_the_web(address: str) -> Item:
    """A picture or video by its suffix; whatever else is there is taken for a stream."""
    file = _by_suffix(urlparse(address).path)
    return Item(file.kind if file else "live", address)


def _listed(file: Path, live: bool) -> list[Item]:
    """What the lines of a text file name, relative to the working folder or to its own. A line that names nothing is
    kept: it is said when its turn comes."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--source {file} cannot be read as a list ({error}); name what it lists, one a line") from None
    items: list[Item] = []
    for line in filter(None, lines):
        beside = str(file.parent / line)
        try:
            if live:
                items.append(Item("live", line))
            else:
                items += find_media(line if os.path.exists(line) or not os.path.exists(beside) else beside)
        except UserError:
            items.append(Item("picture", line))
    if not items:
        raise UserError(f"--source {file} lists nothing; give a path or an address a line")
    return items


@dataclass
class Media:
    """The frames of `items`, in their order; those of live streams in turn. Of a video every `stride`-th frame.

    `problems`: sentences about what could not be read, which grow while the frames are gone through.
    """

    items: list[Item]
    stride: int = 1
    problems: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Frame]:
        files = [item for item in self.items if item.kind != "live"]
        live = [item for item in self.items if item.kind == "live"]
        for item in files:
            yield from self._pictures(item) if item.kind == "picture" else self._video(item)
        if live:
            yield from self._streams(live)

    def count(self) -> int:
        """How many frames there will be, about; 0 where there is no telling."""
        if any(item.kind == "live" for item in self.items):
            return 0
        return sum(1 if item.kind == "picture" else self._length(item) for item in self.items)

    def _length(self, item: Item) -> int:
        if urlparse(item.name).scheme in WEB:
            return 1
        video = cv2.VideoCapture(item.name)
        frames = max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 0)
        video.release()
        return -(-frames // self.stride)

    def _pictures(self, item: Item) -> Iterator[Frame]:
        try:
            yield Frame(item, read_image(local(item)))
        except UserError as error:
            self.problems.append(str(error))

    def _video(self, item: Item) -> Iterator[Frame]:
        try:
            path = local(item)
        except UserError as error:
            self.problems.append(str(error))
            return
        video = cv2.VideoCapture(str(path))
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
            self.problems.append(f"{item.name} cannot be read as a video; mend or remove it")
        elif number < frames:
            self.problems.append(f"{item.name} ends after {number} of {frames} frames; it is cut or damaged there")

    def _streams(self, items: list[Item]) -> Iterator[Frame]:
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


def local(item: Item) -> Path:
    """The file of a picture or video; what an address names is downloaded into the cache. Raises `UserError`."""
    if urlparse(item.name).scheme not in WEB:
        return Path(item.name)
    from utils.download import download  # here: few need it

    return download(item.name, cache_folder() / "media" / Path(urlparse(item.name).path).name)


def _rate(video: Any) -> float:
    fps = float(video.get(cv2.CAP_PROP_FPS))
    return fps if 0 < fps < 1000 else FPS


class Stream:
    """A live stream, read by a thread that keeps the newest frame alone: who is slow misses frames, and is never late.

    What ends is opened anew a few times. `problem`: why it has ended.
    """

    def __init__(self, item: Item, stride: int) -> None:
        self.item, self.stride, self.problem = item, stride, ""
        self._newest: Frame | None = None
        self._changed, self._closed = threading.Condition(), False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def next(self) -> Frame | None:
        """A frame that was not given yet, as soon as there is one; None where there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self.problem, PATIENCE)
            frame, self._newest = self._newest, None
            if frame is None and not self.problem:
                self.problem, self._closed = f"{self.item.name} has sent no frame for {PATIENCE:g} s", True
            return frame

    def close(self) -> None:
        """End the reading."""
        self._closed = True
        self._thread.join(PATIENCE)

    def _read(self) -> None:
        problem = ""
        try:
            number = 0
            for attempt in range(TRIES):
                if self._closed:
                    break
                if attempt:
                    time.sleep(PAUSE)
                before = number
                number = self._follow(number)
                problem = f"the stream {self.item.name} has ended after {number} frames"
                if number == 0:
                    problem = f"{self.item.name} cannot be opened as a stream or camera; check its address or number"
                    if before == 0 and self.item.name.isdigit():
                        break
        except UserError as error:
            problem = str(error)
        with self._changed:
            self.problem = problem or "closed"
            self._changed.notify_all()

    def _follow(self, number: int) -> int:
        """Read it to its end; the number of the next frame."""
        name = self.item.name
        for image, fps in _screen(name) if name.split()[0] == SCREEN else _captured(name, self.stride):
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
    """Pictures of a screen: its number, or left, top, width and height, may follow the word. Raises `UserError`."""
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
                yield np.ascontiguousarray(np.asarray(grabber.grab(monitor))[..., :3]), FPS
    except (mss.exception.ScreenShotError, IndexError) as error:
        raise UserError(f"--source '{text}': the screen cannot be read ({error})") from None


def ahead(frames: Iterable[T], count: int = 4) -> Iterator[T]:
    """The same frames, read by a thread that is up to `count` of them ahead: decoding and looking go side by side."""
    room: queue.Queue[Any] = queue.Queue(count)
    ended, stopped = object(), threading.Event()

    def put(value: Any) -> None:
        while not stopped.is_set():
            try:
                return room.put(value, timeout=0.1)
            except queue.Full:
                continue

    def fill() -> None:
        try:
            for frame in frames:
                put(frame)
                if stopped.is_set():
                    return
            put(ended)
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    try:
        while (value := room.get()) is not ended:
            if isinstance(value, BaseException):
                raise value
            yield value
    finally:
        stopped.set()
        thread.join()
