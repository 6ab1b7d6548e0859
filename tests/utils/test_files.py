"""Atomic writes, numbered and locked folders, shipped files, YAML, downloads, and weights of the Hub."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.web import Server, failing, plant_free_space, sending, without_end
from utils import files
from utils.errors import UserError
from utils.files import (
    ROOT,
    download,
    fetch_from_hub,
    find_file,
    is_address,
    lock_folder,
    numbered_folder,
    read_regular,
    read_text,
    read_yaml,
    replacing,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_readers_see_the_old_file_until_the_new_one_is_complete(tmp_path: Path, mask: int, mode: int) -> None:
    """The folder is made, and permissions follow the umask. A failure leaves the old file only."""
    path, before = tmp_path / "a" / "file.bin", os.umask(mask)

    def write(content: bytes, error: type[BaseException] | None = None) -> None:
        with replacing(path) as file:
            file.write(content)
            assert not path.exists() or path.read_bytes() == b"old"
            if error:
                raise error

    try:
        write(b"old")
        for error in (ValueError, KeyboardInterrupt):
            with pytest.raises(error):
                write(b"half", error)
            assert (path.read_bytes(), names(path.parent)) == (b"old", ["file.bin"])
        write(b"new and longer")
    finally:
        assert os.umask(before) == mask
    assert (path.read_bytes(), names(path.parent)) == (b"new and longer", ["file.bin"])
    assert stat.S_IMODE(path.stat().st_mode) == mode
    with pytest.raises(OSError), replacing(tmp_path) as file:  # noqa: PT011  # IsADirectoryError or another
        file.write(b"new")
    assert names(tmp_path) == ["a"]


# Folders


def test_numbered_folders(tmp_path: Path) -> None:
    project = tmp_path / "runs" / "train"
    assert [numbered_folder(project, "exp", False).name for _ in range(3)] == ["exp", "exp2", "exp3"]
    (project / "exp2").rmdir()
    assert numbered_folder(project, "exp", False).name == "exp2"  # the first that is free
    assert numbered_folder(project, "exp", True) == project / "exp"
    (project / "file").touch()
    assert numbered_folder(project, "file", False).name == "file2"


def test_an_existing_folder_is_used_again(tmp_path: Path) -> None:
    """If a run has written into it, or nobody, and without the files that this run reads."""
    marks = {"user": "a.txt", "other": "settings.yaml", "run": "settings.yaml", "photos": ".lock", "empty": None}
    for name, mark in marks.items():
        (tmp_path / name).mkdir()
        if mark:
            (tmp_path / name / mark).write_text("exist_ok: true\n" if name == "run" else "mine: 1\n")
    inside, outside = tmp_path / "photos/crops/a.jpg", tmp_path / "b.jpg"
    inside.parent.mkdir()
    inside.touch()
    outside.touch()
    (tmp_path / "inwards.jpg").symlink_to(inside)
    (tmp_path / "photos/outwards.jpg").symlink_to(outside)
    (tmp_path / "folder").symlink_to(tmp_path / "photos")
    for name in ("run", "photos", "empty", "folder"):
        assert numbered_folder(tmp_path, name, True, [outside, "0", "http://a/b.jpg"]) == tmp_path / name
    for name in ("user", "other"):
        with pytest.raises(UserError, match=f"{tmp_path / name} has files"):
            numbered_folder(tmp_path, name, True)
    for name in ("photos/crops/a.jpg", "inwards.jpg", "photos/outwards.jpg", "folder/outwards.jpg"):
        for folder in ("photos", "folder"):
            with pytest.raises(UserError, match=f"{tmp_path / folder} has an input of this run, {tmp_path / name};"):
                numbered_folder(tmp_path, folder, True, [outside, str(tmp_path / name)])
        assert numbered_folder(tmp_path, "photos", False, [tmp_path / name]).name.startswith("photos")


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    """Such as a link to a disk that is not mounted: trying other numbers would never end."""
    for name in ("", ".", "..", "/", "a/b", "a/"):
        with pytest.raises(UserError, match="--name"):
            numbered_folder(tmp_path / "runs", name, True)
    assert names(tmp_path) == []
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    (tmp_path / "file").touch()
    for project, exist_ok in (("runs", False), ("runs", True), ("file", False), ("file", True)):
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
    with pytest.raises(UserError, match="gone"):
        lock_folder(Path("/proc/gone"))


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
    for name in ("data/hyps/low", "data/hyps/high", "README"):
        (root / f"{name}.yaml").touch()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(files, "ROOT", root)
    return root


def test_shipped_files_are_found(repository: Path) -> None:
    for name in ("low", "low.yaml", "data/hyps/low.yaml", "data/hyps/low"):
        assert find_file(name, "recipe", ["data/hyps"]) == repository / "data" / "hyps" / "low.yaml"
    assert find_file("old/low.yml", "recipe", ["data/hyps", "old"]) == repository / "data" / "hyps" / "low.yaml"
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


# YAML and names


def test_read_yaml(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes("\ufeffname: é\nlist: [1, 2]\n".encode())  # with a byte order mark
    assert read_yaml(path) == {"name": "é", "list": [1, 2]}
    path.write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, c: 3}\ne: ['1_0', *a, 1.5e+3]\n")
    assert read_yaml(path) == {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}, "e": ["1_0", {"b": 1, "c": 2}, 1500.0]}
    path.write_text("010: 010\nno: [12:30, yes, 0x10, 1_0, 2024-01-01, -1, True, ~, .5, 0, 1.0]")
    plain = ["12:30", "yes", "0x10", "1_0", "2024-01-01", -1, True, None, 0.5, 0, 1.0]
    assert read_yaml(path) == {"010": "010", "no": plain}
    content = {"values": [*plain, "010", "1e3", "1.5", "no", "~", "", "<<", "=", 1e-5, float("inf"), "\ud800", "a\rb"]}
    path.write_text(yaml.safe_dump(content, allow_unicode=True))
    assert read_yaml(path) == content


def test_read_text(tmp_path: Path) -> None:
    """Byte order marks are followed, and any other text is an error that names the line."""
    path = tmp_path / "classes.txt"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        path.write_bytes("é\ra\x0c\u2028b\r\nc\n".encode(encoding))
        assert read_text(path) == "é\na\x0c\u2028b\nc\n"
    wrong = ["a\r\n\rcafé".encode("latin-1"), b"a\nb\n\x93c\x94", "a\n\n".encode("utf-16") + b"b", b"\n\na\0"]
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"classes\.txt, line 3 is not UTF-8 text; save the file as UTF-8"):
            read_text(path)
    path.write_bytes("a\n".encode("utf-16-le"))
    with pytest.raises(UserError, match="line 1"):
        read_text(path, "surrogateescape")
    path.write_bytes(b"\xe9\n")
    assert os.fsencode(read_text(path, "surrogateescape")) == b"\xe9\n"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"a: 1\nb: [1, 2\nc: 3\n", ", line 3"),
        (b"a: 1\nb: !!python/object:os.system {}\n", ", line 2"),
        (b"a: 1\nb: {c: 1,\n  c: 2}\n", ", line 3.*'c'"),
        *((text, "") for text in (b"a: \x00\n", b"a: \xff\xfe\n", b"", b"- 1\n", b"text\n", b"a: caf\xe9\n")),
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


# Downloads

CONTENT = bytes(range(256)) * 20000  # 5 MB: more than is read at once


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of downloads, which does not exist yet."""
    return tmp_path / "cache" / "checkpoints"


def test_threads_download_a_file_once(server: Server, folder: Path) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        sending(CONTENT, length=-1)(handler)

    address = server.give("a.pth", slowly)
    with ThreadPoolExecutor(3) as threads:
        contents = list(threads.map(lambda _: download(address, folder / "a.pth").read_bytes(), range(3)))
    assert contents == [CONTENT] * 3
    assert (names(folder), server.asked) == (["a.pth"], ["/a.pth"])  # no lock, no part


def refused(address: str, path: Path, **known: Any) -> None:
    """Check the error of a download that fails: it names address and path, and no file is left."""
    with pytest.raises(UserError) as raised:
        download(address, path, **known)
    assert address in str(raised.value)
    assert str(path) in str(raised.value)
    assert [name for name in names(path.parent) if not name.endswith(".lock")] == []


def nonsense(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"who is there?\r\n\r\n")


def test_what_servers_do_wrong(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (nonsense, sending(CONTENT, cut=3_000_000), failing(500), failing(404)):
        refused(server.give("a.pth", answer), folder / "a.pth")
    monkeypatch.setattr(files, "SERVER_TIMEOUT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/a.pth"
        refused(address, folder / "a.pth")  # nobody listens
        silent.listen()
        refused(address, folder / "a.pth")  # nobody answers


def test_wrong_content_and_a_full_disk(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = server.give("a.pth", sending(CONTENT))
    refused(address, folder / "a.pth", sha256="0123")
    refused(address, folder / "a.pth", usable=lambda path: path.stat().st_size == 0)
    digits = hashlib.sha256(CONTENT).hexdigest()
    assert download(address, folder / "a.pth", sha256=digits[:8]).read_bytes() == CONTENT

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    refused(address, folder / "b" / "b.pth")
    assert len(server.asked) == 4


def test_a_disk_is_not_filled(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size that the header announces, and while it is written."""
    plant_free_space(monkeypatch, folder, 10**6)
    for answer in (sending(b"a", length=10**15), sending(b"a" * 10**6 + b"a"), without_end):
        refused(server.give("a.pth", answer), folder / "a.pth")
    assert download(server.give("b.pth", sending(bytes(10**6))), folder / "b.pth").stat().st_size == 10**6


def test_addresses(folder: Path, tmp_path: Path) -> None:
    """A login in an address is neither used nor printed."""
    (tmp_path / "a.bin").write_bytes(CONTENT)
    assert download(f"file://{tmp_path}/a.bin", folder / "a.bin").read_bytes() == CONTENT
    assert all(map(is_address, ["http://a/b.zip", "https://a.b/c?d=e", "file:///a"]))
    words = ["", "a.zip", "bash get.sh", "import os", "http://a\nimport os", None, 3, "ftp://a/b"]
    assert not any(map(is_address, words))
    for address in ("ftp://127.0.0.1/a", "/etc/passwd", "http://a b/c", "data:,x", "http://[x/a"):
        refused(address, folder / "b" / "a.pth")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9/a\.pth") as caught:
        download("http://me:secret@127.0.0.1:9/a.pth", folder / "a.pth")
    assert "secret" not in str(caught.value)


# The Hub


class Hub:
    """In place of huggingface_hub: repositories with their files, of which one is downloaded into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tags, self.error = folder, list[str](), ""
        self.repositories: dict[str, list[str]] = {}

    def model_info(self, repository: str, revision: str | None, timeout: float) -> SimpleNamespace:
        if self.error or repository not in self.repositories:
            raise OSError(self.error or "401: is it private?\nMore lines")
        siblings = [SimpleNamespace(rfilename=file) for file in self.repositories[repository]]
        return SimpleNamespace(siblings=siblings, tags=self.tags)

    def snapshot(self, repository: str, revision: str | None, **how: object) -> str:
        return str(self.folder / repository / (revision or "main"))

    def download(self, repository: str, file: str, revision: str | None, local_files_only: bool = False) -> str:
        path = self.folder / repository / (revision or "main") / file
        if not local_files_only and file in self.repositories[repository]:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        if not path.is_file():
            raise OSError("404: there is no such file")
        return str(path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: hub)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub.download)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    return hub


@pytest.mark.parametrize(
    ("name", "repository", "chosen"),
    [
        ("me/mine", ("a.pt", "README.md"), "main/a.pt"),
        ("me/mine", ("model.safetensors", "config.json"), "main/model.safetensors"),
        ("me/mine", ("best.pt", "best.safetensors", "last.pt"), "main/best.pt"),
        ("//me/mine/deep/b.pt", ("a.pt", "deep/b.pt"), "main/deep/b.pt"),
        ("me/mine@v2", ("a.pt",), "v2/a.pt"),
    ],
)
def test_weights_of_the_hub(
    name: str, repository: list[str], chosen: str, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    """The licence is printed; a cached file is used if the Hub does not answer."""
    hub.repositories, hub.tags = {"me/mine": repository}, ["pytorch", "license:agpl-3.0"]
    path = fetch_from_hub(name)
    assert path == hub.folder / "me" / "mine" / chosen
    assert path.with_name("config.json").is_file() == ("config.json" in repository)
    assert "agpl-3.0" in capsys.readouterr().err
    hub.error = "the server is down"
    assert fetch_from_hub(name) == path


def test_the_real_library(tmp_path: Path, server: Server) -> None:
    """In a new process, in which nothing has imported a part of huggingface_hub; then offline, from its cache."""
    siblings = [{"rfilename": name} for name in ("a.pt", "README.md")]
    server.give("api/models/me/mine", sending(json.dumps({"id": "me/mine", "siblings": siblings}).encode()))
    for entry in siblings:
        answer = sending(b"weights", ETag=f'"{entry["rfilename"]}"', X_Repo_Commit="0" * 40)
        server.give(f"me/mine/resolve/main/{entry['rfilename']}", answer)
    code = "from utils.files import fetch_from_hub; print(fetch_from_hub('me/mine').read_text())"
    hub = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": server.address, "HF_HUB_DISABLE_XET": "1"}
    for variables in (hub, {**hub, "HF_HUB_OFFLINE": "1"}):
        ended = subprocess.run([sys.executable, "-c", code], env=variables, cwd=ROOT, capture_output=True, text=True)
        assert ended.stdout == "weights\n", ended.stderr
        assert ended.stderr == "hf:me/mine/a.pt\n"


@pytest.mark.parametrize(
    "name",
    [
        *("mine", "", "me/", "me mine", "https://huggingface.co/me/mine"),  # no names
        *("me/mine", "me/mine/c.pt", "me/none"),  # two files, no such file, no such repository
    ],
)
def test_refused_weights_of_the_hub(name: str, hub: Hub) -> None:
    """One sentence, without the token."""
    hub.repositories = {"me/mine": ["a.pt", "b.pt"]}
    for hub.error in ("", "Bearer hf_abc is wrong: hf_abc"):
        with pytest.raises(UserError) as caught:
            fetch_from_hub(name)
        assert str(caught.value).startswith(f"--weights hf:{name} ")
        assert "\n" not in str(caught.value)
        assert "hf_" not in str(caught.value)
