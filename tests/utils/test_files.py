"""Atomic writes, numbered and locked folders, shipped files, and errors in YAML files."""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from utils import files
from utils.errors import UserError
from utils.files import (
    cache_folder,
    find_file,
    located,
    lock_folder,
    numbered_folder,
    read_regular,
    read_yaml,
    replacing,
    unique_stems,
    write_rows,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_readers_see_the_old_file_until_the_new_one_is_complete(tmp_path: Path, mask: int, mode: int) -> None:
    """The folder is made, and permissions follow the umask."""
    path, before = tmp_path / "a" / "file.bin", os.umask(mask)
    try:
        for content in (b"old", b"new and longer"):
            with replacing(path) as file:
                file.write(content)
                assert not path.exists() or path.read_bytes() == b"old"
            assert path.read_bytes() == content
    finally:
        assert os.umask(before) == mask
    assert names(path.parent) == ["file.bin"]
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_only(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert (path.read_bytes(), names(tmp_path)) == (b"old", ["file.bin"])
    with pytest.raises(OSError), replacing(tmp_path) as file:  # noqa: PT011  # IsADirectoryError or another
        file.write(b"new")
    assert names(tmp_path) == ["file.bin"]


# Folders


def test_numbered_folders(tmp_path: Path) -> None:
    project = tmp_path / "runs" / "train"
    assert [numbered_folder(project, "exp", False).name for _ in range(3)] == ["exp", "exp2", "exp3"]
    (project / "exp2").rmdir()
    assert numbered_folder(project, "exp", False).name == "exp2"  # the first that is free
    assert numbered_folder(project, "exp", True) == project / "exp"
    (project / "file").touch()
    assert numbered_folder(project, "file", False).name == "file2"


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/b", "a/"])
def test_a_folder_without_a_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--name"):
        numbered_folder(tmp_path / "runs", name, True)
    assert names(tmp_path) == []


@pytest.mark.parametrize("exist_ok", [False, True])
def test_a_project_that_cannot_be_made(tmp_path: Path, exist_ok: bool) -> None:
    """Such as a link to a disk that is not mounted: trying other numbers would never end."""
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    (tmp_path / "file").touch()
    for project in ("runs", "file"):
        with pytest.raises(UserError, match=project):
            numbered_folder(tmp_path / project, "exp", exist_ok)


def hold(folder: Path, sender: Connection) -> None:
    lock = lock_folder(folder)
    sender.send(lock.is_locked)
    time.sleep(60)


def test_a_folder_is_locked_until_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    other = fork.Process(target=hold, args=(tmp_path, sender))
    other.start()
    try:
        assert receiver.poll(30)
        assert receiver.recv()
        monkeypatch.setattr(files, "LOCK_TIMEOUT_SECONDS", 0.1)
        with pytest.raises(UserError, match=str(tmp_path)):
            lock_folder(tmp_path)
    finally:
        other.kill()
        other.join(30)
    lock_folder(tmp_path).release()
    assert lock_folder(tmp_path).is_locked


def test_a_disk_without_locks_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError("no locks here")

    monkeypatch.setattr(files.FileLock, "acquire", refuse)
    assert not lock_folder(tmp_path).is_locked


# Finding


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two shipped files; the current folder is another one."""
    root = tmp_path / "repository"
    (root / "data" / "hyps").mkdir(parents=True)
    for name in ("low", "high"):
        (root / "data" / "hyps" / f"{name}.yaml").touch()
    (root / "README.yaml").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(files, "ROOT", root)
    return root


def test_shipped_files_are_found(repository: Path) -> None:
    for name in ("low", "low.yaml", "data/hyps/low.yaml", "data/hyps/low"):
        assert find_file(name, "recipe", ["data/hyps"]) == repository / "data" / "hyps" / "low.yaml"
    for path in (Path("low.yaml"), Path.cwd() / "mine.txt"):  # a path takes precedence
        path.touch()
        assert find_file(str(path), "recipe", ["data/hyps"]) == path


@pytest.mark.parametrize("name", ["pipe.yaml", "lo.yaml", "", "elsewhere/low.yaml", "README.yaml", "higgh"])
def test_a_missing_file_is_an_error(repository: Path, name: str) -> None:
    """Of the repository only shipped files are found; the error lists them and says where it looked."""
    os.mkfifo("pipe.yaml")
    with pytest.raises(UserError, match=r"high\.yaml, low\.yaml") as caught:
        find_file(name, "recipe", ["data/hyps"])
    assert os.path.abspath(name) in str(caught.value)


def test_the_paths_of_files_are_relative_below_the_working_folder(repository: Path) -> None:
    here = Path.cwd()
    paths = [Path("a.pt"), here / "runs" / "b.pt", repository / "c.pt", Path("../d.pt")]
    assert located({"weights": paths, "data": [here / "x" / ".." / "e.yaml"], "none": []}) == (
        f"weights: a.pt, runs/b.pt, {repository}/c.pt, {here.parent}/d.pt; data: e.yaml"
    )


# YAML


def test_read_yaml(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufeffname: é\nlist: [1, 2]\n".encode())  # with a byte order mark
    assert read_yaml(path) == {"name": "é", "list": [1, 2]}
    path.write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: ['1_0', *a, 1.5e+3]\n")
    assert read_yaml(path) == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}, "e": ["1_0", {"b": 1, "c": 2}, 1500.0]}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"a: 1\nb: [1, 2\nc: 3\n", ", line 3"),
        (b"a: 1\nb: !!python/object:os.system {}\n", ", line 2"),
        (b"a: 1\nb: {c: 1,\n  c: 2}\n", ", line 3.*'c'"),
        *((text, "") for text in (b"a: \x00\n", b"a: \xff\xfe\n", b"", b"- 1\n", b"text\n", b"a: 2026-99-99\n")),
        *((text, "") for text in (b"a: !!int x\n", b"a: !!bool x\n", b"a: " + 2000 * b"[")),
    ],
)
def test_a_file_that_is_not_a_yaml_mapping_is_an_error(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.yaml{line}"):
        read_yaml(path)


@pytest.mark.parametrize("kind", ["absent", "pipe", "folder", "link to a device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """Others may have no end, or wait forever."""
    path = tmp_path / "file"
    makers = {"pipe": os.mkfifo, "folder": os.mkdir, "link to a device": lambda link: link.symlink_to("/dev/zero")}
    makers.get(kind, str)(path)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory|No such file"):
        read_regular(path)
    with pytest.raises(UserError, match="file"):
        read_yaml(path)


# Names


def test_stems_of_files_that_may_share_a_folder() -> None:
    names = ["a/x+1.jpg", "b/x+1.png", "http://host/y.jpg?size=2", "a/pi\udcff.jpg", "", "c/a:b.jpg", "x+1-2.jpg"]
    assert unique_stems(names) == ["x+1", "x+1-2", "y", "pi\udcff", "_", "a_b", "x+1-2-2"]


def test_rows_with_names_that_are_not_utf8(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.txt", ["0.5 \u00e4", "0.4 \udcff"])
    assert (tmp_path / "a.txt").read_bytes() == "0.5 \u00e4\n0.4 ".encode() + b"\xff\n"


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "lockstep"
