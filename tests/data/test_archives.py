"""Tests of data sets from archives: values of `download:`, unpacking, refused archives, and downloads from a server."""

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

from data.archives import archive_sources, fetch_dataset, unpack
from data.data_yaml import read_spec
from tests.making import write_yaml
from tests.web import Server, sending, serving
from utils.errors import UserError

FILES = {"images/train/a.jpg": b"a", "images/train/b.jpg": b"bb", "labels/train/a.txt": b"0 .5 .5 1 1\n"}


def zipped(files: dict[str, bytes], top: str = "", **kinds: int) -> bytes:
    """Return a zip archive. kinds: Unix modes by file name."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(f"{top}{name}")
            info.external_attr = kinds.get(name, 0) << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return content.getvalue()


def tarred(files: dict[str, bytes], top: str = "", mode: str = "w", **kinds: bytes) -> bytes:
    """Return a tar archive. kinds: member types by file name; the content of a link is its target."""
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
    """The folder of the data set."""
    return tmp_path / "datasets" / "mine"


def write_spec(tmp_path: Path, **content: object) -> Path:
    defaults = {"path": "../datasets/mine", "train": "images/train", "val": "images/train", "names": ["thing"]}
    content = {key: value for key, value in {**defaults, **content}.items() if value is not None}
    return write_yaml(tmp_path / "configs" / "data.yaml", content)


# Values of `download:`


@pytest.mark.parametrize(
    ("value", "sources"),
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
def test_the_addresses_in_download(value: object, sources: dict) -> None:
    assert archive_sources(value) == sources


# Unpacking


@pytest.mark.parametrize("top", ["", "mine/", "./mine/", "./"])
@pytest.mark.parametrize("kind", ["zip", "w", "w:gz"])
def test_an_archive_with_or_without_the_folder_of_the_data_set(top: str, kind: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(zipped(FILES, top) if kind == "zip" else tarred(FILES, top, kind))
    unpack(archive, tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == FILES


def test_another_top_folder_stays_unless_the_entries_are_below_it(tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(zipped(FILES, "set-main/"))
    unpack(tmp_path / "archive", tmp_path / "whole", "mine", ["set-main/images/train"])
    assert files_below(tmp_path / "whole") == {f"set-main/{name}": data for name, data in FILES.items()}
    unpack(tmp_path / "archive", tmp_path / "out", "mine", ["./images/train", "/far/away"])
    assert files_below(tmp_path / "out") == FILES


def test_backslashes_and_the_folder_that_macos_adds(tmp_path: Path) -> None:
    files = {**{f"mine\\{name}": data for name, data in FILES.items()}, "__MACOSX/mine/._a": b"x"}
    (tmp_path / "archive").write_bytes(zipped(files))
    unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == FILES


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/evil", "..\\evil", "C:\\evil", "\\evil"])
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_an_archive_with_a_name_that_leads_out_is_refused(name: str, pack: object, tmp_path: Path) -> None:
    (tmp_path / "archive").write_bytes(pack({"good": b"x", name: b"x"}))  # type: ignore[operator]
    with pytest.raises(UserError, match="which leads out of the data set"):
        unpack(tmp_path / "archive", tmp_path / "in" / "out", "mine")
    assert files_below(tmp_path) == {"archive": (tmp_path / "archive").read_bytes()}
    assert not os.path.exists("/tmp/evil")


@pytest.mark.parametrize(
    ("pack", "kind"),
    [
        *((tarred, kind) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)),
        *((zipped, mode) for mode in (stat.S_IFLNK | 0o777, stat.S_IFIFO)),
    ],
)
def test_an_archive_with_a_link_or_device_is_refused(pack: object, kind: object, tmp_path: Path) -> None:
    files = {"good": b"x", "link": b"/etc/passwd", "link/x": b"x"}
    (tmp_path / "archive").write_bytes(pack(files, link=kind))  # type: ignore[operator]
    with pytest.raises(UserError, match="contains 'link', which is a link or a device"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == {}


def test_too_little_disk_space_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "archive").write_bytes(zipped({"a": bytes(10**7)}))
    assert (tmp_path / "archive").stat().st_size < 10**5
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"needs 10\.0 MB unpacked, and 1\.0 MB are free"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == {}


def test_a_tar_header_with_a_huge_size_is_an_error(tmp_path: Path) -> None:
    info = tarfile.TarInfo("a")
    info.size = 2**60
    (tmp_path / "archive").write_bytes(info.tobuf() + bytes(10240))
    with pytest.raises((UserError, OSError), match=r"cannot be unpacked|needs .* unpacked"):
        unpack(tmp_path / "archive", tmp_path / "out", "mine")
    assert files_below(tmp_path / "out") == {}


@pytest.mark.parametrize("kind", ["zip", "w:gz"])
def test_a_damaged_archive_is_an_error(kind: str, tmp_path: Path) -> None:
    noise = {"first": b"x", "images/a": os.urandom(50000), "b": b"x"}
    content = bytearray(zipped(noise) if kind == "zip" else tarred(noise, mode=kind))
    content[len(content) // 2] ^= 1
    (tmp_path / "archive").write_bytes(content)
    (tmp_path / "out/images").mkdir(parents=True)
    (tmp_path / "out/images/c").write_bytes(b"of another archive")
    with pytest.raises(UserError, match=r"^http://a/b cannot be unpacked \("):
        unpack(tmp_path / "archive", tmp_path / "out", "mine", name="http://a/b")
    assert files_below(tmp_path / "out") == {"images/c": b"of another archive"}


# Downloads


def test_a_data_set_is_downloaded_once_when_a_split_is_read(server: Server, tmp_path: Path, root: Path) -> None:
    address = server.give("mine.zip", sending(zipped(FILES, "mine/")))
    spec = read_spec(write_spec(tmp_path, download=address))
    assert server.asked == []
    assert spec.images("train") == [root / "images/train/a.jpg", root / "images/train/b.jpg"]
    assert files_below(root) == FILES
    assert list(root.parent.iterdir()) == [root]  # no archive, no lock
    assert read_spec(write_spec(tmp_path, download=address)).images("val")
    assert len(server.asked) == 1


def test_archives_for_several_folders(server: Server, tmp_path: Path, root: Path) -> None:
    """As of COCO: separate images, each archive with a top folder of another name."""
    labels = {"mine/labels/train/a.txt": b"0 .5 .5 1 1\n", "mine/train.txt": b"./images/train/a.jpg\n"}
    download = {
        ".": server.give("labels.zip", sending(zipped(labels))),
        "images": [server.give(f"{name}.tgz", sending(tarred({f"{name}/a.jpg": b"a"}, mode="w:gz"))) for name in "xy"],
    }
    read_spec(write_spec(tmp_path, download=download, train="images/x", val="images/y")).images("train")
    assert sorted(files_below(root)) == ["images/x/a.jpg", "images/y/a.jpg", "labels/train/a.txt", "train.txt"]


def test_a_data_set_without_entries_is_downloaded_into_an_empty_folder(
    server: Server, tmp_path: Path, root: Path
) -> None:
    root.mkdir(parents=True)
    address = server.give("mine.zip", sending(zipped({"cat/a.jpg": b"", "dog/b.jpg": b""})))
    file = write_spec(tmp_path, download=address, train=None, val=None, names=None, split=0.2)
    assert read_spec(file).root() == root
    assert sorted(files_below(root)) == ["cat/a.jpg", "dog/b.jpg"]


def test_several_readers_download_once(server: Server, tmp_path: Path, root: Path) -> None:
    file = write_spec(tmp_path, download=server.give("mine.zip", sending(zipped(FILES))))
    with ThreadPoolExecutor(3) as threads:
        counts = list(threads.map(lambda _: len(read_spec(file).images("train")), range(3)))
    assert counts == [2, 2, 2]
    assert len(server.asked) == 1


def test_a_failed_download_leaves_no_files(server: Server, tmp_path: Path, root: Path) -> None:
    spec = read_spec(write_spec(tmp_path, download=f"{server.address}/none.zip"))
    with pytest.raises(UserError, match="cannot be downloaded"):
        spec.images("train")
    assert not list(root.parent.iterdir())


def test_a_download_continues_after_the_archive_that_failed(server: Server, tmp_path: Path, root: Path) -> None:
    first = server.give("1.zip", sending(zipped({"images/train/a.jpg": b"a"})))
    second = f"{server.address}/2.zip"
    spec = read_spec(write_spec(tmp_path, download=[first, second]))
    with pytest.raises(
        UserError, match=rf"^{second} cannot be downloaded \(Not Found\); download .* unpack it to {root}$"
    ):
        spec.images("train")
    assert not root.exists()
    (root.parent / ".mine-of-another-address.download").mkdir()
    server.asked.clear()
    server.give("2.zip", sending(zipped({"images/train/b.jpg": b"b"})))
    assert len(spec.images("train")) == 2
    assert [name for name, _ in server.asked] == ["/2.zip"]
    assert list(root.parent.iterdir()) == [root]


def test_a_refused_archive_leaves_no_files(server: Server, tmp_path: Path, root: Path) -> None:
    spec = read_spec(write_spec(tmp_path, download=server.give("x", sending(zipped({"a": b"", "../evil": b""})))))
    with pytest.raises(UserError, match=r"^http.*/x contains '\.\./evil', which leads out of the data set"):
        spec.images("train")
    server.give("x", sending(b"<html>"))
    with pytest.raises(UserError, match=r"^the content of http.*/x is neither a zip nor a tar archive"):
        spec.images("train")
    assert list(root.parent.iterdir()) == []


def test_a_download_without_the_entries_of_the_yaml_is_an_error(server: Server, tmp_path: Path, root: Path) -> None:
    spec = read_spec(write_spec(tmp_path, download=server.give("x", sending(zipped({"pictures/a.jpg": b""})))))
    with pytest.raises(UserError, match=rf"`train: images/train` does not exist.*not in the download at {root}$"):
        spec.images("train")
    with pytest.raises(UserError, match=rf"`download:` is used only if {root} is missing or empty$"):
        spec.images("train")
    assert len(server.asked) == 1
    assert sorted(files_below(root)) == ["pictures/a.jpg"]


def test_without_a_path_nothing_is_downloaded(server: Server, tmp_path: Path) -> None:
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
def test_a_script_is_never_run(script: str, tmp_path: Path, root: Path) -> None:
    mark = tmp_path / "mark"
    file = write_spec(tmp_path, download=script.format(mark=mark))
    with pytest.raises(UserError, match=r"`train: images/train` does not exist.*is a script, not an address, and is"):
        read_spec(file).images("train")
    (root / "images/train").mkdir(parents=True)
    (root / "images/train/a.jpg").touch()
    assert len(read_spec(file).images("train")) == 1
    assert not mark.exists()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, root: Path, server: Server) -> None:
    root.parent.touch()
    with pytest.raises(UserError, match=rf"cannot be (written|downloaded).*{root.parent}"):
        fetch_dataset({".": (server.give("x", sending(zipped(FILES))),)}, root, [], lambda folder: None)
