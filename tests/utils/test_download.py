"""Downloads from servers that fail in many ways: the file is complete, or the error says why not."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.web import Answer, Server, failing, sending, serving
from utils import download as downloads
from utils.download import download, is_address
from utils.errors import UserError
from utils.files import PART_SUFFIX, ROOT

CONTENT = bytes(range(256)) * 20000  # 5 MB: more than is read at once


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between attempts instead of sleeping. No proxy."""
    pauses: list[float] = []
    monkeypatch.setattr(downloads.time, "sleep", pauses.append)
    monkeypatch.setenv("no_proxy", "*")
    return pauses


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of downloads, which does not exist yet."""
    return tmp_path / "cache" / "checkpoints"


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


@pytest.mark.parametrize("length", [None, -1])
def test_a_download(server: Server, folder: Path, length: int | None) -> None:
    address = server.give("a.pth", sending(CONTENT, length))
    assert download(address, folder / "a.pth") == folder / "a.pth"
    assert (folder / "a.pth").read_bytes() == CONTENT
    assert files_in(folder) == [folder / "a.pth"]  # no lock, no part
    umask = os.umask(0)
    os.umask(umask)
    assert (folder / "a.pth").stat().st_mode & 0o777 == 0o666 & ~umask


def test_an_existing_file_is_not_downloaded(server: Server, folder: Path) -> None:
    address = server.give("a.pth", sending(CONTENT))
    folder.mkdir(parents=True)
    (folder / "a.pth").write_bytes(b"mine")
    download(address, folder / "a.pth")
    assert (folder / "a.pth").read_bytes() == b"mine"
    assert server.asked == []


def test_one_thread_downloads_and_the_others_wait(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the lock sleeps too
    monkeypatch.setenv("no_proxy", "*")

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        sending(CONTENT)(handler)

    address = server.give("a.pth", slowly)
    with ThreadPoolExecutor(3) as threads:
        contents = list(threads.map(lambda _: download(address, folder / "a.pth").read_bytes(), range(3)))
    assert contents == [CONTENT] * 3
    assert server.asked == [("/a.pth", 0)]


def test_processes_download_once_and_continue_a_killed_ones_file(server: Server, folder: Path) -> None:
    """The first process is killed halfway; of the next two one downloads the rest."""
    held = threading.Event()

    def halfway(handler: BaseHTTPRequestHandler) -> None:
        sending(CONTENT, len(CONTENT), tag='"1"', cut=3_000_000)(handler)
        handler.wfile.flush()
        held.wait(20)

    address = server.give("a.bin", halfway)
    script = "import sys, pathlib, utils.download as d; d.download(sys.argv[1], pathlib.Path(sys.argv[2]))"

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", script, address, str(folder / "a.bin")]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    first, end = start(), threading.Event()
    while not (parts := list(folder.glob(f".*{PART_SUFFIX}"))) or parts[0].stat().st_size < 2_000_000:
        assert first.poll() is None
        end.wait(0.02)
    first.kill()
    first.wait()
    received = parts[0].stat().st_size
    held.set()
    server.give("a.bin", sending(CONTENT, tag='"1"'))
    server.asked.clear()
    both = [start(), start()]
    assert [process.wait(30) for process in both] == [0, 0]
    assert (folder / "a.bin").read_bytes() == CONTENT
    assert server.asked == [("/a.bin", 0), ("/a.bin", received)]  # the headers, and the rest
    assert [path.name for path in files_in(folder) if path.suffix != ".lock"] == ["a.bin"]


# Lost connections


def test_a_lost_connection_is_resumed(server: Server, folder: Path, quick: list[float]) -> None:
    address = server.give("a.bin", sending(CONTENT, tag='"1"', cut=2_000_000))
    assert download(address, folder / "a.bin").read_bytes() == CONTENT
    assert server.asked == [("/a.bin", start) for start in (0, 2_000_000, 4_000_000)]
    assert quick == [1.0, 1.0]  # not doubled after progress


@pytest.mark.parametrize("answer", [{"ranges": False, "tag": '"1"'}, {"tag": ""}, {"tag": 'W/"1"'}])
def test_without_ranges_or_tags_a_download_starts_again(answer: dict, server: Server, folder: Path) -> None:
    cuts = [3_000_000, 2_000_000, len(CONTENT)]
    address = server.give("a.bin", lambda handler: sending(CONTENT, **answer, cut=cuts.pop(0))(handler))
    assert download(address, folder / "a.bin").read_bytes() == CONTENT
    assert files_in(folder) == [folder / "a.bin"]


def test_a_last_modified_serves_as_a_tag(server: Server, folder: Path) -> None:
    since = "Mon, 01 Jan 2024 00:00:00 GMT"
    conditions = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        conditions.append(handler.headers.get("If-Range"))
        sending(CONTENT, cut=3_000_000, headers={"Last-Modified": since})(handler)

    server.give("a.bin", answer)
    download(f"{server.address}/a.bin", folder / "a.bin")
    assert conditions == [None, since]
    assert (folder / "a.bin").read_bytes() == CONTENT


def test_a_file_that_changes_meanwhile_is_downloaded_anew(server: Server, folder: Path) -> None:
    """Even if the server ignores If-Range."""
    other = CONTENT[::-1]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if len(server.asked) == 1:
            return sending(CONTENT, tag='"1"', cut=3_000_000)(handler)
        if "If-Range" in handler.headers:
            handler.headers.replace_header("If-Range", '"2"')
        sending(other, tag='"2"')(handler)

    address = server.give("a.bin", answer)
    assert download(address, folder / "a.bin").read_bytes() == other
    assert files_in(folder) == [folder / "a.bin"]


def test_attempts_without_progress_end_and_their_part_is_resumed(
    server: Server, folder: Path, quick: list[float]
) -> None:
    address = server.give("a.bin", sending(CONTENT, tag='"1"', cut=1000))
    with pytest.raises(UserError, match=r"cannot be downloaded \(the connection ended after 6000 of 5120000 bytes\)"):
        download(address, folder / "a.bin")
    assert quick == [1.0, 2.0, 4.0, 8.0, 16.0]
    (part,) = files_in(folder)
    assert part.name.startswith(".a.bin-")
    assert part.read_bytes() == CONTENT[:6000]
    server.asked.clear()
    server.give("a.bin", sending(CONTENT, tag='"1"'))
    assert download(address, folder / "a.bin").read_bytes() == CONTENT
    assert server.asked == [("/a.bin", 0), ("/a.bin", 6000)]


def test_a_complete_part_is_renamed(server: Server, folder: Path) -> None:
    """If a process was killed between the last byte and the rename."""
    address = server.give("a.bin", sending(CONTENT, tag='"1"', cut=1000))
    with pytest.raises(UserError):
        download(address, folder / "a.bin")
    (part,) = files_in(folder)
    part.write_bytes(CONTENT)
    assert download(address, folder / "a.bin").read_bytes() == CONTENT


def test_parts_of_older_contents_are_removed(server: Server, folder: Path) -> None:
    for tag in ('"1"', '"2"'):
        address = server.give("a.bin", sending(CONTENT, tag=tag, cut=1000))
        with pytest.raises(UserError):
            download(address, folder / "a.bin")
        assert len(files_in(folder)) == 1


def test_server_errors_are_retried(server: Server, folder: Path) -> None:
    address = server.give("a.bin", failing(503, 3, sending(CONTENT)))
    assert download(address, folder / "a.bin").read_bytes() == CONTENT
    assert len(server.asked) == 4


def test_a_time_out_in_the_middle_is_resumed(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SERVER_TIMEOUT_SECONDS", 0.1)
    silent = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        sending(CONTENT, tag='"1"', cut=3_000_000)(handler)
        if len(server.asked) == 1:
            handler.wfile.flush()
            silent.wait(1.0)

    address = server.give("a.bin", answer)
    assert download(address, folder / "a.bin").read_bytes() == CONTENT
    assert len(server.asked) == 2
    silent.set()


# Errors


def refused(address: str, path: Path, **known: str) -> str:
    """Return the error of a download that fails, which names address and path."""
    with pytest.raises(UserError) as raised:
        download(address, path, **known)
    message = str(raised.value)
    assert message.startswith(f"{address} cannot be downloaded (")
    assert message.endswith(f"); download it in another way and save it as {path}")
    assert not path.exists()
    return message


def in_chunks(handler: BaseHTTPRequestHandler) -> None:
    """Answer in two chunks, the second incomplete."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"4\r\nabcd\r\n8\r\nab")
    handler.close_connection = True


def nonsense(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"who is there?\r\n\r\n")


@pytest.mark.parametrize("answer", [in_chunks, nonsense])
def test_invalid_answers_are_errors(answer: Answer, server: Server, folder: Path) -> None:
    refused(server.give("a.pth", answer), folder / "a.pth")


@pytest.mark.parametrize(
    ("code", "asked"), [(404, 1), (403, 1), (500, downloads.MAX_FAILURES), (429, downloads.MAX_FAILURES)]
)
def test_permanent_errors_are_not_retried(code: int, asked: int, server: Server, folder: Path) -> None:
    address = server.give("b.pth", failing(code, 99, sending(b"")))
    refused(address, folder / "b.pth")
    assert len(server.asked) == asked


def test_a_short_file_is_an_error(server: Server, folder: Path) -> None:
    address = server.give("a.pth", sending(CONTENT[:999], 1000))
    assert "(the connection ended after 999 of 1000 bytes)" in refused(address, folder / "a.pth")


def test_a_refused_connection_is_not_retried(folder: Path, quick: list[float]) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        message = refused(f"http://127.0.0.1:{taken.getsockname()[1]}/a.pth", folder / "a.pth")
    assert "Connection refused" in message
    assert quick == []  # a machine without a network fails at once


def test_a_silent_server_is_not_retried(folder: Path, monkeypatch: pytest.MonkeyPatch, quick: list[float]) -> None:
    monkeypatch.setattr(downloads, "SERVER_TIMEOUT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        message = refused(f"http://127.0.0.1:{silent.getsockname()[1]}/a.pth", folder / "a.pth")
    assert "timed out" in message
    assert quick == []


def test_a_folder_that_is_not_writable_is_an_error(server: Server, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("not a folder")
    address = server.give("a.pth", sending(b"x"))
    assert f"({folder} cannot be written to:" in refused(address, folder / "a.pth")
    assert len(server.asked) == 1


def test_a_small_disk_is_an_error(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: usage)
    message = refused(server.give("a.pth", sending(CONTENT)), folder / "a.pth")
    assert "it needs 5.1 MB, and 1.0 MB are free" in message


@pytest.mark.parametrize("address", ["ftp://127.0.0.1/a", "/etc/passwd", "http://a b/c", "data:,x", "http://[x/a"])
def test_other_addresses_are_refused(address: str, folder: Path) -> None:
    refused(address, folder / "a.pth")


def test_file_addresses(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    assert download(f"file://{tmp_path}/a.bin", folder / "a.bin").read_bytes() == CONTENT


def test_is_address() -> None:
    assert all(map(is_address, ["http://a/b.zip", "https://a.b/c?d=e", "file:///a"]))
    assert not any(
        map(is_address, ["", "a.zip", "bash get.sh", "import os", "http://a\nimport os", None, 3, "ftp://a/b"])
    )


# Wrong content


def test_a_known_checksum(server: Server, folder: Path) -> None:
    digits = hashlib.sha256(CONTENT).hexdigest()
    address = server.give("a.pth", sending(CONTENT, tag='"1"'))
    assert "(its SHA-256 is not the expected one, twice)" in refused(address, folder / "a.pth", sha256="0123")
    assert files_in(folder) == []
    assert [start for _, start in server.asked] == [0, 0]
    assert download(address, folder / "a.pth", sha256=digits[:8]).read_bytes() == CONTENT


def test_an_unusable_file_is_an_error(server: Server, folder: Path) -> None:
    address = server.give("a.bin", sending(b"<html>log in</html>"))
    with pytest.raises(UserError, match=r"\(the content is of another kind, or damaged, twice\); ask somebody"):
        download(address, folder / "a.bin", usable=lambda path: b"html" not in path.read_bytes(), advice="ask somebody")
    assert files_in(folder) == []
