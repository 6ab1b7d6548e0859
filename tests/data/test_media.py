"""Pictures, videos and streams: which are found, in what order, and what becomes of those that cannot be read."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import cv2
import numpy as np
import pytest

from data import media
from data.media import Frame, Media, MediaItem, find_media, prefetched
from utils.errors import UserError

SIDE = 64


def picture(path: Path, value: int = 128) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.full((48, SIDE, 3), value, np.uint8))
    return path


def video(path: Path, frames: int = 7) -> Path:
    """Frames that become brighter, by 30 each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (SIDE, 48))
    for number in range(frames):
        writer.write(np.full((48, SIDE, 3), 30 * number, np.uint8))
    writer.release()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """b.png, a.JPG, a video, a text and a picture in a folder below."""
    picture(tmp_path / "b.png")
    picture(tmp_path / "a.jpg").rename(tmp_path / "a.JPG")
    picture(tmp_path / "below" / "c.png")
    video(tmp_path / "v.avi")
    (tmp_path / "notes.md").touch()
    return tmp_path


def names(source: str) -> list[str]:
    return [Path(item.name).name for item in find_media(source)]


def brightness(frames: list[Frame]) -> list[int]:
    return [round(float(frame.image.mean()) / 30) for frame in frames]


# What a source names


def test_a_folder_a_file_and_a_glob(folder: Path) -> None:
    assert find_media(str(folder)) == [
        MediaItem("picture", str(folder / "a.JPG")),
        MediaItem("picture", str(folder / "b.png")),
        MediaItem("video", str(folder / "v.avi")),
    ]
    assert names(str(folder / "b.png")) == ["b.png"]
    assert names(str(folder / "*.png")) == ["b.png"]
    assert names(str(folder / "**" / "*.png")) == ["b.png", "c.png"]


def test_a_name_with_the_signs_of_a_glob(tmp_path: Path) -> None:
    assert names(str(picture(tmp_path / "a[1].png"))) == ["a[1].png"]


def test_a_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the working folder, or to its own; globs and folders too; what is not there is kept to be named."""
    listing = folder / "lists" / "some.txt"
    listing.parent.mkdir()
    picture(folder / "lists" / "d.png")
    listing.write_text(f"b.png\n\n{folder}/*.JPG\nd.png\nmissing.png\nbelow\n")
    monkeypatch.chdir(folder)
    assert names(str(listing)) == ["b.png", "a.JPG", "d.png", "missing.png", "c.png"]


@pytest.mark.parametrize("source", ["0", "rtsp://camera/1", "rtmp://x/y", "screen", "screen 1", "https://host/live"])
def test_what_has_no_end(source: str) -> None:
    assert find_media(source) == [MediaItem("live", source)]


def test_addresses_are_known_by_their_suffix() -> None:
    assert find_media("https://host/a/b.jpg?size=3") == [MediaItem("picture", "https://host/a/b.jpg?size=3")]
    assert find_media("http://host/b.mp4") == [MediaItem("video", "http://host/b.mp4")]


def test_a_list_of_streams(tmp_path: Path) -> None:
    (tmp_path / "all.streams").write_text("rtsp://a\n0\n")
    assert find_media(str(tmp_path / "all.streams")) == [MediaItem("live", "rtsp://a"), MediaItem("live", "0")]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "no source is given"),
        ("nowhere.jpg", "--source nowhere.jpg does not exist"),
        ("nowhere/*.jpg", "does not exist"),
        ("{folder}/notes.md", "has no picture or video"),
        ("{folder}/empty.txt", "lists nothing"),
        ("{folder}/nowhere.txt", "cannot be read as a list"),
    ],
)
def test_nothing_to_look_at(folder: Path, source: str, says: str) -> None:
    (folder / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match=says):
        find_media(source.format(folder=folder))


# Frames


def test_frames_of_a_folder(folder: Path) -> None:
    media = Media(find_media(str(folder)))
    frames = list(media)
    assert [Path(frame.item.name).name for frame in frames] == ["a.JPG", "b.png"] + ["v.avi"] * 7
    assert media.count() == 9
    assert not media.problems
    moving = frames[2:]
    assert [frame.number for frame in moving] == [0, 1, 2, 3, 4, 5, 6]
    assert brightness(moving) == [0, 1, 2, 3, 4, 5, 6]
    assert {(frame.fps, frame.frames) for frame in moving} == {(10.0, 7)}
    assert {(frame.fps, frame.frames) for frame in frames[:2]} == {(0.0, 0)}


def test_every_third_frame(folder: Path) -> None:
    media = Media([MediaItem("video", str(folder / "v.avi"))], stride=3)
    frames = list(media)
    assert [frame.number for frame in frames] == brightness(frames) == [0, 3, 6]
    assert media.count() == 3


def test_what_cannot_be_read_is_named_and_the_rest_goes_on(folder: Path) -> None:
    (folder / "a.JPG").write_bytes(b"no picture")
    (folder / "c.mp4").write_bytes(b"no video")
    content = (folder / "v.avi").read_bytes()
    (folder / "w.avi").write_bytes(content[: len(content) // 2])
    media = Media([*find_media(str(folder)), MediaItem("picture", "missing.png")])
    found = [Path(frame.item.name).name for frame in media]
    assert {"b.png", "v.avi"} <= set(found)
    assert found.count("w.avi") < 7
    assert [problem.split(" cannot")[0].split(" ends")[0] for problem in media.problems] == [
        str(folder / "a.JPG"),
        str(folder / "c.mp4"),
        str(folder / "w.avi"),
        "missing.png",
    ]


# Streams


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_addresses_are_downloaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the cache: the second time nobody is asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with served(folder) as address:
        items = [
            *find_media(f"{address}/b.png?size=2"),
            *find_media(f"{address}/v.avi"),
            *find_media(f"{address}/no.png"),
        ]
        media = Media(items)
        assert len(list(media)) == 1 + 7
        assert [problem.split(" cannot be downloaded")[0] for problem in media.problems] == [f"{address}/no.png"]
    assert len(list(Media(items[:2]))) == 1 + 7


def test_streams_in_turn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gives its newest frame; one that ends is opened anew, then named; one that cannot be opened is named."""
    monkeypatch.setattr(media, "STREAM_ATTEMPTS", 2)
    monkeypatch.setattr(media, "RECONNECT_SECONDS", 0.01)
    for name in ("one", "two"):
        (folder / name).write_bytes((folder / "v.avi").read_bytes())  # without the suffix of a file
    with served(folder) as address:
        streams = Media([MediaItem("live", f"{address}/{name}") for name in ("one", "two", "none")])
        frames = list(streams)
    assert {frame.item.name for frame in frames} == {f"{address}/one", f"{address}/two"}
    assert streams.count() == 0
    for name in ("one", "two"):
        own = [frame.number for frame in frames if frame.item.name.endswith(name)]
        assert own == sorted(set(own))
        assert own[-1] == 13
    assert sorted(problem.rsplit("/", 1)[1].split()[0] for problem in streams.problems) == ["none", "one", "two"]
    assert sum("has ended after 14 frames" in problem for problem in streams.problems) == 2


def test_a_slow_reader_gets_the_newest(folder: Path) -> None:
    stream = media.Stream(MediaItem("live", str(folder / "v.avi")), 1)
    deadline = time.monotonic() + 20
    while (stream._newest is None or stream._newest.number < 6) and time.monotonic() < deadline:
        time.sleep(0.01)
    frame = stream.next()
    stream.close()
    assert frame is not None
    assert frame.number >= 6


def test_a_silent_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "FRAME_TIMEOUT_SECONDS", 0.05)
    monkeypatch.setattr(media.Stream, "_read", lambda self: None)
    stream = media.Stream(MediaItem("live", "rtsp://nobody"), 1)
    assert stream.next() is None
    assert stream.problem == "rtsp://nobody has sent no frame for 0.05 s"


def test_the_screen_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mss", None)
    screen = Media(find_media("screen"))
    assert not list(screen)
    assert screen.problems == ["--source screen needs the package mss: pip install mss"]


# Ahead


def test_ahead_gives_the_same() -> None:
    frames = [Frame(MediaItem("picture", str(k)), np.zeros((1, 1, 3), np.uint8)) for k in range(20)]
    assert [frame.item.name for frame in prefetched(frames, 3)] == [str(k) for k in range(20)]


def test_ahead_hands_errors_on_and_can_be_left() -> None:
    def broken() -> Iterator[Frame]:
        yield Frame(MediaItem("picture", "a"), np.zeros((1, 1, 3), np.uint8))
        raise UserError("no more")

    with pytest.raises(UserError, match="no more"):
        list(prefetched(broken()))
    before = threading.active_count()
    many = prefetched((Frame(MediaItem("picture", "a"), np.zeros((1, 1, 3), np.uint8)) for _ in range(1000)), 2)
    next(many)
    many.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
