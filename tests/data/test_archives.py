"""Data sets from archives: what `download:` may say, what is unpacked where, and what is refused."""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from data import archives
from data.archives import archive_sources, fetch_dataset, unpack
from data.sources import read_spec
from tests.web import Server, sending, serving
from utils.errors import UserError

FILES = {"images/train/a.jpg": b"a", "images/train/b.jpg": b"bb", "labels/train/a.txt": b"0 .5 .5 1 1\n"}


def zipped(files: dict[str, bytes], top: str = "", **kinds: int) -> bytes:
    """kinds: the Unix mode of a file, by its name."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(f"{top}{name}")
            info.external_attr = kinds.get(name, 0) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return content.getvalue()


def tarred(files: dict[str, bytes], top: str = "", mode: str = "w", **kinds: bytes) -> bytes:
    """kinds: what a member is, by its name; a link leads to its data."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{top}{name}")
            info.type = kinds.get(name, tarfile.REGTYPE)
            if info.type == tarfile.REGTYPE:
                info.size = len(data)
            else:
                info.linkname = data.decode()
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def files_below(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with serving() as server:
        yield server


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where the data set is to be."""
    return tmp_path / "datasets" / "mine"


def write_spec(tmp_path: Path, **content: object) -> Path:
    file = tmp_path / "configs" / "data.yaml"
    file.parent.mkdir(exist_ok=True)
    standing = {"path": "../datasets/mine", "train": "images/train", "val": "images/train", "names": ["thing"]}
    content = {key: value for key, value in {**standing, **content}.items() if value is not None}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


# What `download:` says


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("http://a/b.zip", {".": ("http://a/b.zip",)}),
        (["http://a/b.zip", "https://c/d.tar"], {".": ("http://a/b.zip", "https://c/d.tar")}),
        ({"images": ["http://a/b"], ".": "http://c/d"}, {"images": ("http://a/b",), ".": ("http://c/d",)}),
        ("bash data/get.sh", {}),
        ("import os\nos.system('x')", {}),
        ("https://a/b.zip\nimport os", {}),
        ("ftp://a/b.zip", {}),
        ({"../x": "http://a/b"}, {}),
        ({"/x": "http://a/b"}, {}),
        (["http://a/b", 3], {}),
        (3, {}),
    ],
)
def test_what_a_download_says(value: object, found: dict) -> None:
    assert archive_sources(value) == found


# Unpacking


@pytest.mark.parametrize("top", ["", "mine/", "./mine/", "./"])
@pytest.mark.parametrize("kind", ["zip", "w", "w:gz"])
def test_an_archive_with_or_without_the_folder_of_the_set(top: str, kind: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(zipped(FILES, top) if kind == "zip" else tarred(FILES, top, kind))
    unpack(archive, tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == FILES


def test_another_top_folder_stays_unless_the_entries_are_below_it(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(zipped(FILES, "set-main/"))
    unpack(tmp_path / "archive", tmp_path / "kept", "mine", ["set-main/images/train"])
    assert files_below(tmp_path / "kept") == {f"set-main/{name}": data for name, data in FILES.items()}
    unpack(tmp_path / "archive", tmp_path / "out", "mine", ["./images/train", "/far/away"])
    assert files_below(tmp_path / "out") == FILES


def test_what_a_mac_or_windows_adds(tmp_path: Path) -> None:
    files = {**{f"mine\\{name}": data for name, data in FILES.items()}, "__MACOSX/mine/._a": b"x"}
    (tmp_path / "archive").write_bytes(zipped(files))
    unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == FILES


EVIL = ["../evil", "a/../../evil", "/tmp/evil", "..\\evil", "C:\\evil", "\\evil"]


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_names_that_lead_out(name: str, pack: object, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(pack({"good": b"x", name: b"x"}))  # type: ignore[operator]
    with pytest.raises(UserError, match="which leads out of the data set"):
        unpack(tmp_path / "archive", tmp_path / "in" / "out", "mine")
    assert files_below(tmp_path) == {"archive": (tmp_path / "archive").read_bytes()}
    assert not os.path.exists("/tmp/evil")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE])
def test_links_and_devices_in_a_tar(kind: bytes, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(tarred({"good": b"x", "link": b"/etc/passwd", "link/x": b"x"}, link=kind))
    with pytest.raises(UserError, match="holds 'link', which is a link or a device"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == {}


@pytest.mark.parametrize("mode", [stat.S_IFLNK | 0o777, stat.S_IFIFO])
def test_links_in_a_zip(mode: int, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(zipped({"good": b"x", "link": b"/etc/passwd"}, link=mode))
    with pytest.raises(UserError, match="holds 'link', which is a link or a device"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == {}


def test_more_than_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the archive, before anything is written: zeros are small when they are packed."""
    (tmp_path / "archive").write_bytes(zipped({"a": bytes(10**7)}))
    assert (tmp_path / "archive").stat().st_size < 10**5
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr(archives.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"unpacks to 10\.0 MB, and 1\.0 MB are free"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == {}


def test_a_huge_size_that_is_told(tmp_path: Path) -> None:
    """A tar header may tell any size."""
    info = tarfile.TarInfo("a")
    info.size = 2**60
    (tmp_path / "archive").write_bytes(info.tobuf() + bytes(10240))
    with pytest.raises((UserError, OSError), match=r"cannot be unpacked|unpacks to"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == {}


@pytest.mark.parametrize("kind", ["zip", "w:gz"])
def test_a_damaged_archive(kind: str, tmp_path: Path) -> None:
    noise = {"a": os.urandom(50000), "b": b"x"}
    content = bytearray(zipped(noise) if kind == "zip" else tarred(noise, mode=kind))
    content[len(content) // 2] ^= 1
    (tmp_path / "archive").write_bytes(content)
    with pytest.raises(UserError, match=r"^http://a/b cannot be unpacked \("):
        unpack(tmp_path / "archive", tmp_path / "out", "mine", name="http://a/b")


# From the YAML


def test_a_data_set_is_fetched_when_it_is_asked_for(server: Server, tmp_path: Path, root: Path) -> None:
    address = server.give("mine.zip", sending(zipped(FILES, "mine/")))
    spec = read_spec(write_spec(tmp_path, download=address))
    assert server.asked == []
    assert spec.images("train") == [root / "images/train/a.jpg", root / "images/train/b.jpg"]
    assert files_below(root.parent) == {f"mine/{name}": data for name, data in FILES.items()}  # no archive, no lock
    assert [path.name for path in root.parent.iterdir()] == ["mine"]
    assert read_spec(write_spec(tmp_path, download=address)).images("val")
    assert len(server.asked) == 1


def test_archives_for_several_folders(server: Server, tmp_path: Path, root: Path) -> None:
    """As those of COCO: images apart, each with a folder that is not the set's name."""
    labels = {"mine/labels/train/a.txt": b"0 .5 .5 1 1\n", "mine/train.txt": b"./images/train/a.jpg\n"}
    download = {
        ".": server.give("labels.zip", sending(zipped(labels))),
        "images": [server.give(f"{name}.tgz", sending(tarred({f"{name}/a.jpg": b"a"}, mode="w:gz"))) for name in "xy"],
    }
    read_spec(write_spec(tmp_path, download=download, train="images/x", val="images/y")).images("train")
    assert sorted(files_below(root)) == ["images/x/a.jpg", "images/y/a.jpg", "labels/train/a.txt", "train.txt"]


def test_a_root_by_itself_is_fetched_too(server: Server, tmp_path: Path, root: Path) -> None:
    """That of a classifier's data set, which has no entries."""
    root.mkdir(parents=True)  # empty: as good as none
    address = server.give("mine.zip", sending(zipped({"cat/a.jpg": b"", "dog/b.jpg": b""})))
    file = write_spec(tmp_path, download=address, train=None, val=None, names=None, split=0.2)
    assert read_spec(file).root() == root
    assert sorted(files_below(root)) == ["cat/a.jpg", "dog/b.jpg"]


def test_many_at_once_fetch_once(server: Server, tmp_path: Path, root: Path) -> None:
    file = write_spec(tmp_path, download=server.give("mine.zip", sending(zipped(FILES))))
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: len(read_spec(file).images("train")), range(3)))
    assert found == [2, 2, 2]
    assert len(server.asked) == 1


def test_nothing_is_left_where_nothing_came(server: Server, tmp_path: Path, root: Path) -> None:
    spec = read_spec(write_spec(tmp_path, download=f"{server.address}/none.zip"))
    with pytest.raises(UserError, match="cannot be downloaded"):
        spec.images("train")
    assert not list(root.parent.iterdir())


def test_what_was_done_before_a_failure_is_not_done_again(server: Server, tmp_path: Path, root: Path) -> None:
    """Nothing half is seen."""
    first = server.give("1.zip", sending(zipped({"images/train/a.jpg": b"a"})))
    second = f"{server.address}/2.zip"
    spec = read_spec(write_spec(tmp_path, download=[first, second]))
    with pytest.raises(
        UserError, match=rf"^{second} cannot be downloaded \(Not Found\); fetch .* unpack it to {root}$"
    ):
        spec.images("train")
    assert not root.exists()
    server.asked.clear()
    server.give("2.zip", sending(zipped({"images/train/b.jpg": b"b"})))
    assert len(spec.images("train")) == 2
    assert [name for name, _ in server.asked] == ["/2.zip"]


def test_an_archive_that_is_refused_leaves_nothing(server: Server, tmp_path: Path, root: Path) -> None:
    spec = read_spec(write_spec(tmp_path, download=server.give("x", sending(zipped({"a": b"", "../evil": b""})))))
    with pytest.raises(UserError, match=r"^http.*/x holds '\.\./evil'"):
        spec.images("train")
    server.give("x", sending(b"<html>"))
    with pytest.raises(UserError, match=r"^what came from http.*/x is neither a zip nor a tar archive"):
        spec.images("train")
    assert not root.exists()
    assert files_below(root.parent) == {}


def test_a_data_set_that_is_not_what_the_yaml_says(server: Server, tmp_path: Path, root: Path) -> None:
    spec = read_spec(write_spec(tmp_path, download=server.give("x", sending(zipped({"pictures/a.jpg": b""})))))
    with pytest.raises(UserError, match=rf"`train: images/train` does not exist.*not in the download at {root}$"):
        spec.images("train")
    with pytest.raises(UserError, match=rf"`download:` is used only if {root} is missing or empty$"):
        spec.images("train")
    assert len(server.asked) == 1


def test_what_is_there_is_left_alone(server: Server, tmp_path: Path, root: Path) -> None:
    (root / "images").mkdir(parents=True)
    (root / "images" / "mine.txt").touch()
    spec = read_spec(write_spec(tmp_path, download=server.give("x", sending(zipped(FILES)))))
    with pytest.raises(UserError, match="does not exist"):
        spec.images("train")
    assert server.asked == []
    assert sorted(files_below(root)) == ["images/mine.txt"]


def test_without_a_path_nothing_is_fetched(server: Server, tmp_path: Path) -> None:
    spec = read_spec(write_spec(tmp_path, path=None, download=server.give("x", sending(zipped(FILES)))))
    with pytest.raises(UserError, match=r"does not exist.*; add `path:` to .*data\.yaml"):
        spec.images("train")
    assert server.asked == []


@pytest.mark.parametrize(
    "script",
    [
        "from pathlib import Path\nPath('{mark}').touch()\n",
        "import os; os.system('touch {mark}')",
        "bash -c 'touch {mark}'",
        "!!python/object/apply:os.system ['touch {mark}']",
    ],
)
def test_a_script_is_told_and_never_run(script: str, tmp_path: Path, root: Path) -> None:
    mark = tmp_path / "mark"
    file = write_spec(tmp_path, download=script.format(mark=mark))
    with pytest.raises(
        UserError, match=r"`train: images/train` does not exist.*is a script, not an address, and is never run"
    ):
        read_spec(file).images("train")
    assert not mark.exists()
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    assert len(read_spec(file).images("train")) == 2  # what is there needs none
    assert not mark.exists()


def test_a_disk_that_cannot_be_written(tmp_path: Path, root: Path, server: Server) -> None:
    root.parent.touch()
    with pytest.raises(UserError, match=rf"cannot be (made|downloaded).*{root.parent}"):
        fetch_dataset({".": (server.give("x", sending(zipped(FILES))),)}, root, [])
