"""Where weights are looked for, what is said where they are not, and how they are downloaded."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from models import hub
from models.classifiers import architectures, default_weights
from models.hub import CHECKSUM, download, find_weights
from utils.errors import UserError

CONTENT = bytes(range(256)) * 5000  # more than is read at once
# Bugs that were found by these tests.


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, another folder as the repository, and one where torch keeps what it downloads."""
    (tmp_path / "work").mkdir()
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(hub, "ROOT", tmp_path / "repository")
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    return tmp_path


def test_as_given_first_then_in_the_repository(elsewhere: Path) -> None:
    (elsewhere / "repository" / "a.pt").touch()
    assert find_weights("a.pt") == elsewhere / "repository" / "a.pt"
    (elsewhere / "work" / "a.pt").touch()
    assert find_weights("a.pt").absolute() == elsewhere / "work" / "a.pt"
    assert find_weights(str(elsewhere / "work" / "a.pt")) == elsewhere / "work" / "a.pt"


@pytest.mark.parametrize("name", ["yolov5n.pt", "yolov5x6.pt", "weights/yolov5s.pt"])
def test_official_weights_have_an_address(name: str, elsewhere: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_weights(name)
    file = name.rpartition("/")[2]
    assert f"https://github.com/ultralytics/yolov5/releases/download/v7.0/{file} " in str(caught.value)
    assert f"put it at {elsewhere / 'work' / name}" in str(caught.value)
    assert "--weights ''" in str(caught.value)


@pytest.mark.parametrize("name", ["mine.pt", "yolov5q.pt", "yolov5n.pt.old", "xyolov5n.pt"])
def test_other_weights_have_none(name: str) -> None:
    with pytest.raises(UserError, match=f"^weights {name} are not a file; check the path") as caught:
        find_weights(name)
    assert "https" not in str(caught.value)


def test_a_folder_is_no_weight_file(elsewhere: Path) -> None:
    (elsewhere / "work" / "runs").mkdir()
    with pytest.raises(UserError, match="not a file"):
        find_weights("runs")


# Downloads: a server on this machine


class Server:
    """Answers each path as `answers` says, and counts."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.asked: list[str] = []

    def give(self, name: str, answer: Callable[[BaseHTTPRequestHandler], None]) -> str:
        """Have `name` answered so; its address."""
        self.answers[f"/{name}"] = answer
        return f"{self.address}/{name}"


def sending(content: bytes, length: int | None = None) -> Callable[[BaseHTTPRequestHandler], None]:
    """An answer of this content, that tells its length or another one; -1: that tells none."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        if length != -1:
            handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


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


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.asked.append(self.path)
            if self.path in known.answers:
                known.answers[self.path](self)
            else:
                self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        known = Server(f"http://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield known
        listening.shutdown()
        thread.join()


@pytest.fixture
def kept(elsewhere: Path) -> Path:
    """The folder of downloads, not made yet."""
    return elsewhere / "kept" / "checkpoints"


@pytest.mark.parametrize("length", [None, -1])
def test_a_download(server: Server, kept: Path, length: int | None) -> None:
    address = server.give("a.pth", sending(CONTENT, length))
    assert download(address, kept / "a.pth") == kept / "a.pth"
    assert (kept / "a.pth").read_bytes() == CONTENT
    assert list(kept.iterdir()) == [kept / "a.pth"]  # no lock, no part


def test_what_is_there_is_not_fetched_again(server: Server, kept: Path) -> None:
    address = server.give("a.pth", sending(CONTENT))
    kept.mkdir(parents=True)
    (kept / "a.pth").write_bytes(b"mine")
    download(address, kept / "a.pth")
    assert (kept / "a.pth").read_bytes() == b"mine"
    assert server.asked == []


def test_one_fetches_and_the_others_wait(server: Server, kept: Path) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        sending(CONTENT)(handler)

    address = server.give("a.pth", slowly)
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: download(address, kept / "a.pth").read_bytes(), range(3)))
    assert found == [CONTENT] * 3
    assert server.asked == ["/a.pth"]


def refused(address: str, path: Path) -> str:
    """What is said of a download that fails: where from and where to. Nothing may be left."""
    with pytest.raises(UserError) as caught:
        download(address, path)
    said = str(caught.value)
    assert said.startswith(f"{address} cannot be downloaded (")
    assert said.endswith(f"); fetch it by other means and put it at {path}")
    assert list(path.parent.iterdir()) == []
    return said


def test_a_connection_that_is_cut(server: Server, kept: Path) -> None:
    address = server.give("a.pth", sending(CONTENT[:999], length=1000))
    assert "(the connection ended after 999 of 1000 bytes)" in refused(address, kept / "a.pth")
    server.give("a.pth", sending(CONTENT))
    assert download(address, kept / "a.pth").read_bytes() == CONTENT  # the next attempt begins anew


@pytest.mark.parametrize("answer", [in_chunks, nonsense])
def test_an_answer_that_is_none(answer: Callable[[BaseHTTPRequestHandler], None], server: Server, kept: Path) -> None:
    refused(server.give("a.pth", answer), kept / "a.pth")


def test_checksums(server: Server, kept: Path) -> None:
    """The first digits of SHA-256 stand at the end of torchvision's names."""
    digits = hashlib.sha256(CONTENT).hexdigest()[:8]
    right, wrong = f"resnet0-{digits}.pth", "x-0123abcd.pth"
    assert not digits.startswith("0123abcd")
    assert download(server.give(right, sending(CONTENT)), kept / right).read_bytes() == CONTENT
    (kept / right).unlink()
    for length in (None, -1):
        assert "(its checksum is another than its name says)" in refused(
            server.give(wrong, sending(CONTENT, length)), kept / wrong
        )


def test_torchvisions_files_have_checksums() -> None:
    for name in architectures():
        address = default_weights(name)
        assert address.startswith("https://download.pytorch.org/models/")
        assert CHECKSUM.search(address), address


def test_what_the_server_does_not_have(server: Server, kept: Path) -> None:
    assert "(Not Found)" in refused(f"{server.address}/b.pth", kept / "b.pth")


def test_nobody_there(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        said = refused(f"http://127.0.0.1:{taken.getsockname()[1]}/a.pth", kept / "a.pth")
    assert "Connection refused" in said


def test_a_server_that_says_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(hub, "PATIENCE", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        said = refused(f"http://127.0.0.1:{silent.getsockname()[1]}/a.pth", kept / "a.pth")
    assert "timed out" in said


def test_a_place_that_cannot_be_written(server: Server, kept: Path) -> None:
    kept.parent.mkdir()
    kept.write_text("not a folder")
    address = server.give("a.pth", sending(b"x"))
    with pytest.raises(UserError, match=rf"^{address} cannot be downloaded .*put it at {kept}/a\.pth$"):
        download(address, kept / "a.pth")


# --weights DEFAULT


def test_torchvisions_default_weights(server: Server, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def address(name: str) -> str:
        asked.append(name)
        return server.give("small.pth", sending(CONTENT))

    monkeypatch.setattr(hub, "default_weights", address)
    (elsewhere / "work" / "DEFAULT").touch()  # a file of that name is not meant
    found = find_weights("DEFAULT", {"task": "classify", "architecture": "resnet34"}, "mine.yaml")
    assert found == elsewhere / "hub" / "checkpoints" / "small.pth"  # where torch itself looks for it
    assert found.read_bytes() == CONTENT
    assert asked == ["resnet34"]


@pytest.mark.parametrize("yaml", [None, {}, {"nc": 3, "backbone": [], "head": []}])
def test_default_weights_of_no_architecture(yaml: dict | None) -> None:
    with pytest.raises(UserError, match=r"^--weights DEFAULT goes with a --cfg that names an `architecture`"):
        find_weights("DEFAULT", yaml, "mine.yaml")


def test_default_weights_of_an_unknown_architecture() -> None:
    with pytest.raises(UserError, match=r"^mine\.yaml: `architecture` is 'resnet33'"):
        find_weights("DEFAULT", {"architecture": "resnet33"}, "mine.yaml")


# W&B artifacts: another program plays the one that asks W&B


def play(monkeypatch: pytest.MonkeyPatch, answer: str, *files: str) -> None:
    """It writes these files into the folder that it is given, and says that, or `answer`."""
    script = f"""
import json, pathlib, sys
folder = pathlib.Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
[(folder / name).write_text(sys.argv[1]) for name in {list(files)!r}]
print({answer!r} or json.dumps({{"files": [str(folder / name) for name in {list(files)!r}]}}))
"""
    monkeypatch.setattr(hub, "own_python", lambda *names: [sys.executable, "-c", script])


@pytest.mark.parametrize("files", [("epoch3.pt",), ("last.pt", "best.pt"), ("best.pt", "notes.txt")])
def test_an_artifact(files: tuple[str, ...], elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    play(monkeypatch, "", *files)
    path = find_weights("wandb:me/mine/run_1_model:best")
    assert path.name == ("best.pt" if "best.pt" in files else "epoch3.pt")
    assert path.read_text() == "me/mine/run_1_model:best"
    assert path.is_relative_to(elsewhere / "cache")


@pytest.mark.parametrize(
    ("answer", "files", "said"),
    [
        ('{"error": "no such artifact"}', (), r"cannot be had \(no such artifact\); check the key and the name"),
        ("", ("a.pt", "b.pt"), "holds 2 .pt files"),
        ("", ("a.txt",), "holds 0 .pt files"),
    ],
)
def test_no_artifact(
    answer: str, files: tuple[str, ...], said: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    play(monkeypatch, answer, *files)
    with pytest.raises(UserError, match=f"^--weights wandb:me/mine/model:best .*{said}"):
        find_weights("wandb:me/mine/model:best")


def test_the_real_program_ends_with_a_sentence(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key, and with one where nobody answers. A child of it is asked, which alone imports wandb."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere / "cache"))
    monkeypatch.setenv("HOME", str(elsewhere))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    with pytest.raises(UserError, match="there is no key for W&B: wandb login"):
        find_weights("wandb:me/mine/model:best")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(UserError, match="cannot be had"):
        find_weights("wandb:me/mine/model:best")
