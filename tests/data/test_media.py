"""Tests of the sources of detect.py: which items a source has, and their frames in order."""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest

from data.media import Frame, Media, MediaItem, find_media, prefetch
from tests.making import plain, write_image
from tests.web import sending, serving
from utils.errors import UserError

FRAMES = 7


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two pictures, a video whose frames become brighter by 30 each, a text, and a picture below it."""
    for name in ("a.JPG", "b.png", "below/c.png"):
        write_image(tmp_path / name)
    writer = cv2.VideoWriter(str(tmp_path / "v.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 48))
    for number in range(FRAMES):
        writer.write(plain(64, 48, 30 * number))
    writer.release()
    (tmp_path / "notes.md").touch()
    return tmp_path


def names(source: str) -> list[str]:
    return [Path(item.name).name for item in find_media(source)]


def brightness(frames: list[Frame]) -> list[int]:
    return [round(float(frame.image.mean()) / 30) for frame in frames]


# The items of a source


def test_a_folder_a_file_and_a_glob(folder: Path) -> None:
    assert find_media(str(folder)) == [
        MediaItem("picture", str(folder / "a.JPG")),
        MediaItem("picture", str(folder / "b.png")),
        MediaItem("video", str(folder / "v.avi")),
    ]
    assert names(str(folder / "b.png")) == ["b.png"]
    assert names(str(folder / "*.png")) == ["b.png"]
    assert names(str(folder / "**" / "*.png")) == ["b.png", "c.png"]


def test_a_list_names_items_relative_to_the_working_folder_or_to_itself(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing file stays in the list, so that reading it reports the problem."""
    listing = folder / "lists" / "some.txt"
    write_image(folder / "lists" / "d.png")
    listing.write_text(f"b.png\n\n{folder}/a.JPG\nd.png\nmissing.png\n")
    monkeypatch.chdir(folder)
    assert names(str(listing)) == ["b.png", "a.JPG", "d.png", "missing.png"]


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        *((source, "live") for source in ("0", "rtsp://camera/1", "rtmp://x/y", "https://host/live", "http://[::1")),
        ("https://host/a/b.jpg?size=3", "picture"),
        ("http://host/b.mp4", "video"),
    ],
)
def test_the_kind_of_a_camera_or_address(source: str, kind: str) -> None:
    assert find_media(source) == [MediaItem(kind, source)]


@pytest.mark.parametrize(
    "source",
    [
        *("nowhere", "nowhere.jpg", "nowhere/*.jpg", "{folder}/notes.md", "{folder}/empty.txt", "{folder}/nowhere.txt"),
        *("{folder}/pipe.txt", "9" * 20, "\u00b2"),
    ],
)
def test_a_source_without_items_is_an_error(folder: Path, source: str) -> None:
    (folder / "empty.txt").write_text("\n")
    os.mkfifo(folder / "pipe.txt")
    with pytest.raises(UserError, match=re.escape(source.format(folder=folder))):
        find_media(source.format(folder=folder))


def test_frames_of_a_folder(folder: Path) -> None:
    media = Media(find_media(str(folder)))
    frames = list(media)
    assert [Path(frame.item.name).name for frame in frames] == ["a.JPG", "b.png"] + ["v.avi"] * FRAMES
    assert not media.problems
    assert [frame.number for frame in frames[2:]] == brightness(frames[2:]) == list(range(FRAMES))
    assert [frame.fps for frame in frames] == [0.0] * 2 + [10.0] * FRAMES


def test_a_video_whose_sound_is_longer_is_whole(tmp_path: Path) -> None:
    """Matroska announces the frames of the longest track's length."""
    file, written = tmp_path / "v.mkv", 50
    writer = cv2.VideoWriter(str(file), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 48))
    for _ in range(written):
        writer.write(plain(64, 48, 90))
    writer.release()
    content = bytearray(file.read_bytes())
    place = content.index(b"\x44\x89\x88") + 3  # milliseconds
    (length,) = struct.unpack_from(">d", content, place)
    struct.pack_into(">d", content, place, length + 120)
    file.write_bytes(content)
    assert int(cv2.VideoCapture(str(file)).get(cv2.CAP_PROP_FRAME_COUNT)) > written
    media = Media([MediaItem("video", str(file))])
    assert (len(list(media)), media.problems) == (written, [])


def test_addresses_are_downloaded_once(folder: Path) -> None:
    with serving() as server:
        addresses = [server.give(name, sending((folder / name).read_bytes())) for name in ("b.png", "v.avi")]
        items = [item for address in (f"{addresses[0]}?size=2", addresses[1]) for item in find_media(address)]
        server.answers["/b.png?size=2"] = server.answers["/b.png"]
        missing = f"{server.address}/no.png"
        media = Media([*items, *find_media(missing)])
        assert len(list(media)) == 1 + FRAMES
        assert [problem.split(" cannot be downloaded")[0] for problem in media.problems] == [missing]
    assert len(list(Media(items))) == 1 + FRAMES  # from the cache: the server is gone


def test_a_stream_has_frames_until_it_ends(folder: Path) -> None:
    with serving() as server:
        stream = Media([MediaItem("live", server.give("one", sending((folder / "v.avi").read_bytes())))], stride=2)
        assert [frame.number for frame in stream] == [0, 2, 4, 6]
        assert stream.problems == []
        missing = Media([MediaItem("live", f"{server.address}/none")])
        assert not list(missing)
        assert "/none cannot be opened" in missing.problems[0]


def pictures(count: int) -> Iterator[Frame]:
    return (Frame(MediaItem("picture", str(k)), plain(1, 1)) for k in range(count))


def test_prefetching_raises_errors_and_can_be_stopped() -> None:
    def broken() -> Iterator[Frame]:
        yield from pictures(1)
        raise UserError("no more")

    with pytest.raises(UserError, match="no more"):
        list(prefetch(broken()))
    before = threading.active_count()
    frames = prefetch(pictures(1000), 2)
    next(frames)
    frames.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
