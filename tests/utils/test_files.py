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

# Writing


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_replacing_makes_the_folder_too(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.bin"
    with replacing(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert names(path.parent) == ["file.bin"]


def test_readers_see_the_old_file_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with path.open("rb") as reader:
        with replacing(path) as file:
            file.write(b"new and longer")
            assert path.read_bytes() == b"old"
        assert reader.read() == b"old"  # an open file does not change
    assert path.read_bytes() == b"new and longer"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_only(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")

    def write() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(error):
        write()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file.bin"]


def test_a_failure_to_rename_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    with pytest.raises(OSError), replacing(tmp_path / "taken") as file:  # noqa: PT011  # IsADirectoryError or another
        file.write(b"new")
    assert names(tmp_path) == ["taken"]


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        with replacing(tmp_path / "file.bin") as file:
            file.write(b"new")
        assert os.umask(mask) == mask  # unchanged
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.bin").stat().st_mode) == mode


# Folders


def test_numbered_folders(tmp_path: Path) -> None:
    project = tmp_path / "runs" / "train"
    assert [numbered_folder(project, "exp", False).name for _ in range(4)] == ["exp", "exp2", "exp3", "exp4"]
    assert names(project) == ["exp", "exp2", "exp3", "exp4"]
    (project / "exp2").rmdir()
    assert numbered_folder(project, "exp", False).name == "exp2"  # the first that is free
    assert numbered_folder(project, "other", False).name == "other"


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/b", "a/"])
def test_a_folder_without_a_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^--name '{name}' is not a valid run name; give one"):
        numbered_folder(tmp_path / "runs", name, True)
    assert names(tmp_path) == []


def test_exist_ok_uses_an_existing_folder(tmp_path: Path) -> None:
    first = numbered_folder(tmp_path, "exp", True)
    (first / "weights").mkdir()
    assert numbered_folder(tmp_path, "exp", True) == first == tmp_path / "exp"
    assert names(first) == ["weights"]


def test_a_file_of_the_same_name_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "exp").touch()
    assert numbered_folder(tmp_path, "exp", False).name == "exp2"


def test_a_project_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    with pytest.raises(UserError, match=r"runs cannot be made: .*; choose another --project"):
        numbered_folder(tmp_path / "runs", "exp", False)


@pytest.mark.parametrize("exist_ok", [False, True])
def test_a_project_that_is_a_broken_link_is_an_error(tmp_path: Path, exist_ok: bool) -> None:
    """Such as one to a disk that is not mounted: trying other numbers would never end."""
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match="cannot be made"):
        numbered_folder(tmp_path / "runs", "exp", exist_ok)


# Locks


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
        with monkeypatch.context() as patched:
            patched.setattr(files, "LOCK_TIMEOUT_SECONDS", 0.1)
            with pytest.raises(UserError) as caught:
                lock_folder(tmp_path)
        assert str(tmp_path) in str(caught.value)
        (tmp_path / "other").mkdir()
        assert lock_folder(tmp_path / "other").is_locked
    finally:
        other.kill()
        other.join(30)
    assert lock_folder(tmp_path).is_locked


def test_a_released_folder_can_be_locked(tmp_path: Path) -> None:
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
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(files, "ROOT", root)
    return root


@pytest.mark.parametrize("name", ["low", "low.yaml", "data/hyps/low.yaml", "data/hyps/low"])
def test_shipped_files_are_found(repository: Path, name: str) -> None:
    assert find_file(name, "recipe", ["data/hyps"]) == repository / "data" / "hyps" / "low.yaml"


def test_a_path_takes_precedence(repository: Path) -> None:
    Path("low.yaml").touch()
    assert find_file("low.yaml", "recipe", ["data/hyps"]).resolve() == Path("low.yaml").resolve()
    path = Path.cwd() / "mine.txt"
    path.touch()
    assert find_file(str(path), "recipe", ["data/hyps"]) == path


@pytest.mark.parametrize("name", ["low", "mine/low"])
def test_a_folder_is_not_replaced_by_a_shipped_file_of_its_name(repository: Path, name: str) -> None:
    Path(name).mkdir(parents=True)
    with pytest.raises(UserError, match=rf"recipe '{name}' is not a file"):
        find_file(name, "recipe", ["data/hyps"])


def test_a_pipe_is_not_waited_for(repository: Path) -> None:
    os.mkfifo("pipe.yaml")
    with pytest.raises(UserError, match=r"recipe 'pipe.yaml' is not a file"):
        find_file("pipe.yaml", "recipe", ["data/hyps"])


@pytest.mark.parametrize(
    "name",
    ["lo.yaml", "", "elsewhere/low.yaml", "README.yaml", "runs/mine.yaml", "/elsewhere/low.yaml"],
)
def test_a_missing_file_is_an_error(repository: Path, name: str) -> None:
    """Of the repository only shipped files are found; the error lists them and says where it looked."""
    for path in (repository / "README.yaml", repository / "runs" / "mine.yaml"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with pytest.raises(UserError, match=r"high\.yaml, low\.yaml") as caught:
        find_file(name, "recipe", ["data/hyps"])
    assert os.path.abspath(name) in str(caught.value)


def test_the_paths_of_files_are_relative_below_the_working_folder(repository: Path) -> None:
    here = Path.cwd()
    paths = [Path("a.pt"), here / "runs" / "b.pt", repository / "c.pt", Path("../d.pt")]
    assert located({"weights": paths, "data": [here / "x" / ".." / "e.yaml"]}) == (
        f"weights: a.pt, runs/b.pt, {repository}/c.pt, {here.parent}/d.pt; data: e.yaml"
    )
    assert located({"weights": [], "data": [here / "e.yaml"]}) == "data: e.yaml"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("hihg", ""), ("higgh.yaml", " (did you mean 'high'?)"), ("lowe", " (did you mean 'low'?)")],
)
def test_a_misspelt_file_is_suggested(repository: Path, name: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        find_file(name, "recipe", ["data/hyps"], kind="a file or a folder")
    assert str(caught.value).startswith(f"recipe '{name}' is not a file or a folder{hint}; ")


# YAML


def test_read_yaml(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufeffname: é\nlist: [1, 2]\n".encode())  # with a byte order mark
    assert read_yaml(path) == {"name": "é", "list": [1, 2]}
    path.write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: ['1_0', *a, 1.5e+3]\n")
    assert read_yaml(path) == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}, "e": ["1_0", {"b": 1, "c": 2}, 1500.0]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: [1, 2\nc: 3\n", "line 3"),
        (b"a: 1\n\tb: 2\n", "line 2"),
        (b"a: 1\nb: !!python/object:os.system {}\n", "line 2: could not determine a constructor"),
        (b"a: \x00\n", "fix the YAML"),
        (b"a: \xff\xfe\n", "utf-8"),
        (b"", "must be a YAML mapping"),
        (b"- 1\n- 2\n", "must be a YAML mapping"),
        (b"text\n", "must be a YAML mapping"),
        (b"a: 1\nb: {c: 1,\n  c: 2}\n", "line 3: duplicate key 'c'"),
        (b"0: a\n1: b\n0: c\n", "line 3: duplicate key '0'"),
        (b"a: 2026-99-99\n", "month must be in 1..12"),
        (b"a: !!int x\n", "fix the YAML"),
        (b"a: !!bool x\n", "fix the YAML"),
        (b"a: !!timestamp x\n", "fix the YAML"),
        (b"a: " + 2000 * b"[", "fix the YAML"),
    ],
)
def test_a_file_that_is_not_a_yaml_mapping_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.yaml.*{message}"):
        read_yaml(path)


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.yaml cannot be read: No such file or directory"):
        read_yaml(tmp_path / "a.yaml")


# Names


def test_stems_of_files_that_may_share_a_folder() -> None:
    names = ["a/x+1.jpg", "b/x+1.png", "http://host/y.jpg?size=2", "a/pi\udcff.jpg", "", "c/a:b.jpg", "x+1-2.jpg"]
    assert unique_stems(names) == ["x+1", "x+1-2", "y", "pi\udcff", "_", "a_b", "x+1-2-2"]


def test_rows_with_names_that_are_not_utf8(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.txt", ["0.5 \u00e4", "0.4 \udcff"])
    assert (tmp_path / "a.txt").read_bytes() == "0.5 \u00e4\n0.4 ".encode() + b"\xff\n"


# Caches


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "lockstep"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "lockstep"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to a device"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    """Others may have no end, or wait forever."""
    path = tmp_path / "file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        read_regular(path)
    with pytest.raises(UserError, match=r"cannot be read: (it is not a regular file|Is a directory)$"):
        read_yaml(path)
