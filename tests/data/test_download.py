"""Data sets from archives and from stores: what is unpacked and copied, what is refused, and nothing left behind."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from data.data_yaml import read_spec
from data.dataset import DataOptions, data_source
from data.download import copied, unpack
from tests.making import contents, write_image, write_yaml
from tests.web import Server, plant_free_space, sending, serving_folder, without_end
from utils.errors import UserError

FILES = {"images/train/a.jpg": b"a", "images/train/b.jpg": b"bb", "labels/train/a.txt": b"0 .5 .5 1 1\n"}


def zipped(files: dict[str, bytes], top: str = "") -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(f"{top}{name}"), data, zipfile.ZIP_DEFLATED)
    return content.getvalue()


def tarred(files: dict[str, bytes], top: str = "", mode: str = "w", **kinds: bytes) -> bytes:
    """Return a tar archive. kinds: member types by file name; the content of a link is its target."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}{name}")
            info.type = kinds.get(name, tarfile.REGTYPE)
            if info.type == tarfile.REGTYPE:
                info.size = len(data)
            else:
                info.linkname = data.decode()
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of the data set."""
    return tmp_path / "datasets" / "mine"


def write_spec(tmp_path: Path, **content: object) -> Path:
    defaults = {"path": "../datasets/mine", "train": "images/train", "val": "images/train", "names": ["thing"]}
    content = {key: value for key, value in {**defaults, **content}.items() if value is not None}
    return write_yaml(tmp_path / "configs" / "data.yaml", content)


# Unpacking


@pytest.mark.parametrize("top", ["", "mine/", "./mine/", "./"])
@pytest.mark.parametrize("kind", ["zip", "w", "w:gz"])
def test_an_archive_with_or_without_the_folder_of_the_data_set(top: str, kind: str, tmp_path: Path) -> None:
    """macOS adds a folder of its own."""
    files = {**{f"{top}{name}": data for name, data in FILES.items()}, "__MACOSX/mine/._a": b"x"}
    archive = tmp_path / "archive"
    archive.write_bytes(zipped(files) if kind == "zip" else tarred(files, mode=kind))
    unpack(archive, tmp_path / "out", "mine")
    assert contents(tmp_path / "out") == FILES


def test_another_top_folder_stays_unless_the_entries_are_below_it(tmp_path: Path) -> None:
    archive, moved = tmp_path / "archive", {f"set-main/{name}": data for name, data in FILES.items()}
    for entries, files in ((["set-main/images/train"], moved), (["./images/train", "/far/away"], FILES)):
        archive.write_bytes(zipped(moved))
        unpack(archive, tmp_path / str(len(entries)), "mine", entries)
        assert contents(tmp_path / str(len(entries))) == files


def damaged(content: bytes, start: int) -> bytes:
    return content[:start] + bytes(byte ^ 255 for byte in content[start : start + 20]) + content[start + 20 :]


def huge() -> bytes:
    """Return a tar archive whose header announces 2**40 bytes."""
    info, content = tarfile.TarInfo("a"), io.BytesIO()
    info.size = 2**40
    content.write(info.tobuf())
    return content.getvalue()


BAD_NAMES = ("../evil", "a/../../evil", "/evil", "..\\evil", "C:\\evil")
WITH_LINK = {"good": b"x", "link": b"/etc/passwd", "link/x": b"x"}
KINDS = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
BAD_ARCHIVES: list[Any] = [
    ("tar ../evil", tarred({"good": b"x", "../evil": b"x"})),
    *((f"type {kind!r}", tarred(WITH_LINK, link=kind)) for kind in KINDS),
    ("huge", huge()),
    ("text", b"<html>not here</html>"),
    ("empty", b""),
    ("truncated zip", zipped(FILES)[:-30]),
    ("truncated tar", tarred(FILES)[:1600]),
    ("truncated tar.gz", tarred({"a": os.urandom(9999)}, mode="w:gz")[:-2000]),
    ("damaged zip", damaged(zipped({"a": os.urandom(9999)}), 5000)),
]


@pytest.mark.parametrize("content", [pytest.param(content, id=name) for name, content in BAD_ARCHIVES])
def test_a_bad_archive_ends_in_one_sentence_and_leaves_no_files(
    content: bytes, server: Server, tmp_path: Path, root: Path
) -> None:
    address = server.give("mine.zip", sending(content))
    with pytest.raises(UserError, match=address):
        read_spec(write_spec(tmp_path, download=address)).images("train")
    assert not root.exists()
    assert set(contents(tmp_path)) == {"configs/data.yaml"}


@pytest.mark.parametrize("pack", [zipped, tarred])
@pytest.mark.parametrize("name", BAD_NAMES)
def test_nothing_is_written_outside_of_the_folder(name: str, pack: Any, tmp_path: Path) -> None:
    """Names that lead out of it are refused, or shortened."""
    (tmp_path / "archive").write_bytes(pack({"good": b"x", name: b"x"}))
    with suppress(tarfile.FilterError):
        unpack(tmp_path / "archive", tmp_path / "in/out", "mine")
    below = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert all(path == "archive" or path.startswith("in/out/") for path in below)
    assert not Path("/evil").exists()


def test_a_bomb_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "archive").write_bytes(zipped({"a": bytes(10**7)}))
    plant_free_space(monkeypatch, tmp_path, 10**6)
    with pytest.raises(OSError, match="it needs"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert set(contents(tmp_path)) == {"archive"}


# Downloads


def test_a_data_set_is_downloaded_once_when_a_split_is_read(server: Server, tmp_path: Path, root: Path) -> None:
    """`path:` may be a link, to a folder on another disk."""
    address = server.give("mine.zip", sending(zipped(FILES, "mine/")))
    root.parent.mkdir()
    root.symlink_to(tmp_path / "disk/content")
    files = [write_spec(tmp_path, download=address) for _ in range(2)]
    assert server.asked == []
    with ThreadPoolExecutor(2) as threads:
        images = list(threads.map(lambda file: read_spec(file).images("train"), files))
    assert images == [[root / "images/train/a.jpg", root / "images/train/b.jpg"]] * 2
    assert server.asked == ["/mine.zip"]
    assert [path.name for path in root.parent.iterdir()] == ["mine"]


def test_archives_for_several_folders_continue_after_the_one_that_failed(
    server: Server, tmp_path: Path, root: Path
) -> None:
    labels = server.give("labels.zip", sending(zipped({"labels/train/a.txt": b""}, "mine/")))
    sources = {".": labels, "images": [f"{server.address}/train.tar"]}
    with pytest.raises(UserError, match=r"train\.tar"):
        read_spec(write_spec(tmp_path, download=sources)).images("train")
    assert not root.exists()
    server.give("train.tar", sending(tarred({"train/a.jpg": b"a"})))
    assert read_spec(write_spec(tmp_path, download=sources)).images("train") == [root / "images/train/a.jpg"]
    assert server.asked == ["/labels.zip", "/train.tar", "/train.tar"]
    assert set(contents(root)) == {"labels/train/a.txt", "images/train/a.jpg"}
    assert [path.name for path in root.parent.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "content",
    [
        {"download": "bash data/get_mine.sh"},
        {"download": "import os\nos.system('touch evil')"},
        {"download": "http://127.0.0.1:9/a.zip", "path": None},
        {"download": "http://127.0.0.1:9/a.zip", "path": "../full"},
    ],
)
def test_what_is_not_downloaded(content: dict, tmp_path: Path, root: Path) -> None:
    (tmp_path / "full/other").mkdir(parents=True)
    with pytest.raises(UserError, match=r"`train: images/train` does not exist; .* `download:` is used only"):
        read_spec(write_spec(tmp_path, **content)).images("train")
    assert not root.exists()


# Stores


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in a folder to be served, one of whose names has letters that an address encodes."""
    monkeypatch.setenv("no_proxy", "*")
    for name in ("a b.png", "ü.png", "c.png"):
        write_image(tmp_path / "served/images/train" / name, None, "0 .5 .5 .5 .5")
    return tmp_path / "served"


@pytest.mark.parametrize("kind", ["http", "file"])
def test_a_folder_is_copied_once(kind: str, served: Path, tmp_path: Path) -> None:
    if kind == "http":
        pytest.importorskip("aiohttp")
    with serving_folder(served) as address:
        address = f"file://{served}" if kind == "file" else address
        file = write_yaml(tmp_path / "my.yaml", {"path": address, "train": "images/train", "val": "v", "names": ["a"]})
        for _ in range(2):
            data = data_source(str(file), "data.detection:DetectionData").open(32, 32, DataOptions())
            split = data.split("train")
            assert split.instances().classes.tolist() == [0, 0, 0]
            if (served / "images").exists():
                shutil.rmtree(served / "images")  # it is not asked for again
    assert str(data.spec.roots[0]) in data.spec.warnings[0]
    assert not str(data.spec.roots[0]).startswith(str(served))


def test_a_broken_copy_continues(served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a file is not taken for a whole one."""
    from fsspec.implementations.local import LocalFileSystem

    whole, fails, asked = LocalFileSystem.get_file, [True], []

    def broken(self: Any, name: str, path: str, **options: Any) -> None:
        if fails and name.endswith("c.png"):
            Path(path).write_bytes(b"half")
            raise ConnectionError("planted")
        asked.append(name)
        whole(self, name, path, **options)

    monkeypatch.setattr(LocalFileSystem, "get_file", broken)
    with pytest.raises(UserError, match=r"file://.*/served .*planted"):
        copied(f"file://{served}")
    fails.clear()
    assert contents(copied(f"file://{served}")) == contents(served)
    assert len(asked) == len(set(asked)) == 6


@pytest.mark.parametrize("answer", [sending(b"a", length=10**15), without_end])
def test_a_store_does_not_fill_the_disk(
    answer: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plant_free_space(monkeypatch, tmp_path, 10**6)
    links = '<a href="{0}/a.jpg">a</a><a href="{0}/b.jpg">b</a>'.format(server.give("set", sending(b"")))
    for name in ("set", "set/"):
        server.give(name, sending(links.encode()))
    server.give("set/a.jpg", sending(b"a"))
    server.give("set/b.jpg", answer)
    with pytest.raises(UserError, match="must stay free"):
        copied(f"{server.address}/set")
    assert not contents(tmp_path)


@pytest.mark.parametrize(
    "address",
    ["ftp://host/a", "memory://a", "reference:///a", "file://a::b", "http://127.0.0.1:9/a", "file:///nowhere/at/all"],
)
def test_what_cannot_be_copied(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_spec(write_yaml(tmp_path / "my.yaml", {"path": address, "train": "a", "names": ["a"]}))
    assert str(caught.value).startswith(address)


def test_names_that_lead_out_of_a_store_are_refused(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    evil = {f"{served}/../evil": {"size": 1, "type": "file"}}
    monkeypatch.setattr(LocalFileSystem, "find", lambda self, top, **options: evil)
    with pytest.raises(UserError, match="evil"):
        copied(f"file://{served}")
