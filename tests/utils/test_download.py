"""Downloads from servers that cut, lie, ignore, refuse or fall silent: whole and right, or absent and explained."""

from __future__ import annotations

import base64
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
    """No pauses; how long they would have been. No proxy."""
    pauses: list[float] = []
    monkeypatch.setattr(downloads.time, "sleep", pauses.append)
    monkeypatch.setenv("no_proxy", "*")
    return pauses


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of downloads, not made yet."""
    return tmp_path / "kept" / "checkpoints"


def left(kept: Path) -> list[Path]:
    return sorted(kept.iterdir()) if kept.is_dir() else []


@pytest.mark.parametrize("length", [None, -1])
def test_a_download(server: Server, kept: Path, length: int | None) -> None:
    address = server.give("a.pth", sending(CONTENT, length))
    assert download(address, kept / "a.pth") == kept / "a.pth"
    assert (kept / "a.pth").read_bytes() == CONTENT
    assert left(kept) == [kept / "a.pth"]  # no lock, no part
    umask = os.umask(0)
    os.umask(umask)
    assert (kept / "a.pth").stat().st_mode & 0o777 == 0o666 & ~umask


def test_what_is_there_is_not_fetched_again(server: Server, kept: Path) -> None:
    address = server.give("a.pth", sending(CONTENT))
    kept.mkdir(parents=True)
    (kept / "a.pth").write_bytes(b"mine")
    download(address, kept / "a.pth")
    assert (kept / "a.pth").read_bytes() == b"mine"
    assert server.asked == []


def test_one_fetches_and_the_others_wait(server: Server, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the lock sleeps too
    monkeypatch.setenv("no_proxy", "*")

    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        sending(CONTENT)(handler)

    address = server.give("a.pth", slowly)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: download(address, kept / "a.pth").read_bytes(), range(3)))
    assert found == [CONTENT] * 3
    assert server.asked == [("/a.pth", 0)]


def test_two_processes_fetch_once_and_go_on_where_a_killed_one_was(server: Server, kept: Path) -> None:
    """The first is killed halfway; of the next two one fetches the rest."""
    held = threading.Event()

    def halfway(handler: BaseHTTPRequestHandler) -> None:
        sending(CONTENT, len(CONTENT), tag='"1"', cut=3_000_000)(handler)
        handler.wfile.flush()
        held.wait(20)

    address = server.give("a.bin", halfway)
    script = "import sys, pathlib, utils.download as d; d.download(sys.argv[1], pathlib.Path(sys.argv[2]))"

    def start() -> subprocess.Popen:
        command = [sys.executable, "-c", script, address, str(kept / "a.bin")]
        return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    first, end = start(), threading.Event()
    while not (parts := list(kept.glob(f".*{PART_SUFFIX}"))) or parts[0].stat().st_size < 2_000_000:
        assert first.poll() is None
        end.wait(0.02)
    first.kill()
    first.wait()
    here = parts[0].stat().st_size
    held.set()
    server.give("a.bin", sending(CONTENT, tag='"1"'))
    server.asked.clear()
    both = [start(), start()]
    assert [process.wait(30) for process in both] == [0, 0]
    assert (kept / "a.bin").read_bytes() == CONTENT
    assert server.asked == [("/a.bin", 0), ("/a.bin", here)]  # what it is like, and then the rest
    assert [path.name for path in left(kept) if path.suffix != ".lock"] == ["a.bin"]


# Connections that break


def test_a_cut_connection_is_gone_on_from(server: Server, kept: Path, quick: list[float]) -> None:
    address = server.give("a.bin", sending(CONTENT, tag='"1"', cut=2_000_000))
    assert download(address, kept / "a.bin").read_bytes() == CONTENT
    assert server.asked == [("/a.bin", start) for start in (0, 2_000_000, 4_000_000)]
    assert quick == [1.0, 1.0]  # both brought something


@pytest.mark.parametrize("answer", [{"ranges": False, "tag": '"1"'}, {"tag": ""}, {"tag": 'W/"1"'}])
def test_a_server_that_knows_no_ranges_or_tags(answer: dict, server: Server, kept: Path) -> None:
    """It starts again, and the parts are not joined."""
    cuts = [3_000_000, 2_000_000, len(CONTENT)]
    address = server.give("a.bin", lambda handler: sending(CONTENT, **answer, cut=cuts.pop(0))(handler))
    assert download(address, kept / "a.bin").read_bytes() == CONTENT
    assert left(kept) == [kept / "a.bin"]


def test_a_last_modified_serves_as_a_tag(server: Server, kept: Path) -> None:
    since = "Mon, 01 Jan 2024 00:00:00 GMT"
    taken = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        taken.append(handler.headers.get("If-Range"))
        sending(CONTENT, cut=3_000_000, headers={"Last-Modified": since})(handler)

    server.give("a.bin", answer)
    download(f"{server.address}/a.bin", kept / "a.bin")
    assert taken == [None, since]
    assert (kept / "a.bin").read_bytes() == CONTENT


def test_a_file_that_changes_meanwhile(server: Server, kept: Path) -> None:
    """The rest of another content is not put behind the start of this one, even where the server knows no If-Range."""
    other = CONTENT[::-1]

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if len(server.asked) == 1:
            return sending(CONTENT, tag='"1"', cut=3_000_000)(handler)
        if "If-Range" in handler.headers:
            handler.headers.replace_header("If-Range", '"2"')
        sending(other, tag='"2"')(handler)

    address = server.give("a.bin", answer)
    assert download(address, kept / "a.bin").read_bytes() == other
    assert left(kept) == [kept / "a.bin"]


def test_patience_ends(server: Server, kept: Path, quick: list[float]) -> None:
    """Tries that bring next to nothing are counted, and what came stays for the next run."""
    address = server.give("a.bin", sending(CONTENT, tag='"1"', cut=1000))
    with pytest.raises(UserError, match=r"cannot be downloaded \(the connection ended after 6000 of 5120000 bytes\)"):
        download(address, kept / "a.bin")
    assert quick == [1.0, 2.0, 4.0, 8.0, 16.0]
    (part,) = left(kept)
    assert part.name.startswith(".a.bin-")
    assert part.read_bytes() == CONTENT[:6000]
    server.asked.clear()
    server.give("a.bin", sending(CONTENT, tag='"1"'))
    assert download(address, kept / "a.bin").read_bytes() == CONTENT
    assert server.asked == [("/a.bin", 0), ("/a.bin", 6000)]


def test_what_is_whole_needs_a_name_only(server: Server, kept: Path) -> None:
    """A process was killed between the last byte and the rename."""
    address = server.give("a.bin", sending(CONTENT, tag='"1"', cut=1000))
    with pytest.raises(UserError):
        download(address, kept / "a.bin")
    (part,) = left(kept)
    part.write_bytes(CONTENT)
    assert download(address, kept / "a.bin").read_bytes() == CONTENT


def test_parts_of_older_contents_go(server: Server, kept: Path) -> None:
    for tag in ('"1"', '"2"'):
        address = server.give("a.bin", sending(CONTENT, tag=tag, cut=1000))
        with pytest.raises(UserError):
            download(address, kept / "a.bin")
        assert len(left(kept)) == 1


def test_a_server_that_fails_for_a_while(server: Server, kept: Path) -> None:
    address = server.give("a.bin", failing(503, 3, sending(CONTENT)))
    assert download(address, kept / "a.bin").read_bytes() == CONTENT
    assert len(server.asked) == 4


def test_a_silence_in_the_middle(server: Server, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SERVER_TIMEOUT_SECONDS", 0.1)
    silent = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        sending(CONTENT, tag='"1"', cut=3_000_000)(handler)
        if len(server.asked) == 1:
            handler.wfile.flush()
            silent.wait(1.0)

    address = server.give("a.bin", answer)
    assert download(address, kept / "a.bin").read_bytes() == CONTENT
    assert len(server.asked) == 2
    silent.set()


# What cannot be had


def refused(address: str, path: Path, **known: str) -> str:
    """What is said of a download that fails: where from and where to. Nothing may be left."""
    with pytest.raises(UserError) as caught:
        download(address, path, **known)
    said = str(caught.value)
    assert said.startswith(f"{address} cannot be downloaded (")
    assert said.endswith(f"); fetch it by other means and put it at {path}")
    assert not path.exists()
    return said


def in_chunks(handler: BaseHTTPRequestHandler) -> None:
    """An answer of two chunks, of which the second is not whole."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"4\r\nabcd\r\n8\r\nab")
    handler.close_connection = True


def nonsense(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"who is there?\r\n\r\n")


@pytest.mark.parametrize("answer", [in_chunks, nonsense])
def test_an_answer_that_is_none(answer: Answer, server: Server, kept: Path) -> None:
    refused(server.give("a.pth", answer), kept / "a.pth")


@pytest.mark.parametrize(
    ("code", "asked"), [(404, 1), (403, 1), (500, downloads.MAX_FAILURES), (429, downloads.MAX_FAILURES)]
)
def test_an_error_of_the_server(code: int, asked: int, server: Server, kept: Path) -> None:
    """One that will not change is told at once."""
    address = server.give("b.pth", failing(code, 99, sending(b"")))
    refused(address, kept / "b.pth")
    assert len(server.asked) == asked


def test_a_length_that_is_too_long(server: Server, kept: Path) -> None:
    address = server.give("a.pth", sending(CONTENT[:999], 1000))
    assert "(the connection ended after 999 of 1000 bytes)" in refused(address, kept / "a.pth")


def test_nobody_there(kept: Path, quick: list[float]) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        said = refused(f"http://127.0.0.1:{taken.getsockname()[1]}/a.pth", kept / "a.pth")
    assert "Connection refused" in said
    assert quick == []  # a machine without a network is told so at once


def test_a_server_that_says_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch, quick: list[float]) -> None:
    monkeypatch.setattr(downloads, "SERVER_TIMEOUT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said = refused(f"http://127.0.0.1:{silent.getsockname()[1]}/a.pth", kept / "a.pth")
    assert "timed out" in said
    assert quick == []


def test_a_place_that_cannot_be_written(server: Server, kept: Path) -> None:
    kept.parent.mkdir()
    kept.write_text("not a folder")
    address = server.give("a.pth", sending(b"x"))
    assert f"({kept} cannot be written to:" in refused(address, kept / "a.pth")
    assert len(server.asked) == 1


def test_a_disk_that_is_too_small(server: Server, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda folder: usage)
    said = refused(server.give("a.pth", sending(CONTENT)), kept / "a.pth")
    assert "it takes 5.1 MB, and 1.0 MB are free" in said


@pytest.mark.parametrize("address", ["ftp://127.0.0.1/a", "/etc/passwd", "http://a b/c", "data:,x", "http://[x/a"])
def test_other_addresses(address: str, kept: Path) -> None:
    refused(address, kept / "a.pth")


def test_a_file_of_this_machine(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    assert download(f"file://{tmp_path}/a.bin", kept / "a.bin").read_bytes() == CONTENT


def test_addresses() -> None:
    assert all(map(is_address, ["http://a/b.zip", "https://a.b/c?d=e", "file:///a"]))
    assert not any(
        map(is_address, ["", "a.zip", "bash get.sh", "import os", "http://a\nimport os", None, 3, "ftp://a/b"])
    )


# Content that is not what it should be


def test_a_checksum_that_is_known(server: Server, kept: Path) -> None:
    digits = hashlib.sha256(CONTENT).hexdigest()
    address = server.give("a.pth", sending(CONTENT, tag='"1"'))
    assert "(its SHA-256 is not the expected one, twice)" in refused(address, kept / "a.pth", sha256="0123")
    assert left(kept) == []
    assert [start for _, start in server.asked] == [0, 0]
    assert download(address, kept / "a.pth", sha256=digits[:8]).read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["x-ms-blob-content-md5", "Content-MD5", "x-goog-hash"])
def test_a_checksum_that_the_server_tells(name: str, server: Server, kept: Path) -> None:
    """What came wrong once is fetched once more, from its start."""
    told = base64.b64encode(hashlib.md5(CONTENT).digest()).decode()
    headers = {name: f"crc32c=AAAAAA==, md5={told}" if name == "x-goog-hash" else told}
    contents = [CONTENT[::-1], CONTENT]
    address = server.give("a.bin", lambda handler: sending(contents.pop(0), tag='"1"', headers=headers)(handler))
    assert download(address, kept / "a.bin").read_bytes() == CONTENT
    server.give("b.bin", sending(CONTENT[::-1], headers=headers))
    assert "its MD5 is not the one that the server gives" in refused(f"{server.address}/b.bin", kept / "b.bin")
    assert left(kept) == [kept / "a.bin"]


def test_what_is_looked_at_and_found_wanting(server: Server, kept: Path) -> None:
    address = server.give("a.bin", sending(b"<html>log in</html>"))
    with pytest.raises(UserError, match=r"\(the content is not such a file, or is damaged, twice\); ask somebody"):
        download(address, kept / "a.bin", usable=lambda path: b"html" not in path.read_bytes(), advice="ask somebody")
    assert left(kept) == []
