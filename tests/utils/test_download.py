"""Downloads: the file is complete, or the error says why not. Weights of the Hub, with a Hub on loopback."""

from __future__ import annotations

import hashlib
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, file_download

from tests.hub_server import READ_TOKEN, Hub, serve_hub
from tests.web import Answer, Server, failing, sending, serving
from utils import download as downloads
from utils.download import download, fetch_from_hub, is_address
from utils.errors import UserError

CONTENT = bytes(range(256)) * 20000  # 5 MB: more than is read at once


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty cache, without a token or a proxy, and short pauses between attempts."""
    monkeypatch.setattr(downloads, "RETRY_SECONDS", 0.01)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    return tmp_path


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
    for _ in range(2):  # an existing file is not downloaded again
        assert download(address, folder / "a.pth").read_bytes() == CONTENT
    assert files_in(folder) == [folder / "a.pth"]  # no lock, no part
    assert len(server.asked) == 1


def test_one_thread_downloads_and_the_others_wait(server: Server, folder: Path) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        time.sleep(0.3)
        sending(CONTENT)(handler)

    address = server.give("a.pth", slowly)
    with ThreadPoolExecutor(3) as threads:
        contents = list(threads.map(lambda _: download(address, folder / "a.pth").read_bytes(), range(3)))
    assert contents == [CONTENT] * 3
    assert server.asked == [("/a.pth", 0)]


def test_server_errors_and_broken_connections_are_tried_again(server: Server, folder: Path) -> None:
    cuts = [3_000_000, len(CONTENT)]
    broken = failing(503, 1, lambda handler: sending(CONTENT, cut=cuts.pop(0))(handler))
    assert download(server.give("a.bin", broken), folder / "a.bin").read_bytes() == CONTENT
    assert len(server.asked) == 3


def refused(address: str, path: Path, **known: Any) -> str:
    """Return the error of a download that fails, which names address and path and leaves no file."""
    with pytest.raises(UserError) as raised:
        download(address, path, **known)
    message = str(raised.value)
    assert message.startswith(f"{address} cannot be downloaded (")
    assert str(path) in message
    assert not path.is_file()
    assert [file for file in files_in(path.parent) if file.suffix != ".lock"] == []
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


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        (in_chunks, downloads.ATTEMPTS),
        (nonsense, downloads.ATTEMPTS),
        (sending(CONTENT[:999], 1000), downloads.ATTEMPTS),
        (failing(500, 99, nonsense), downloads.ATTEMPTS),
        (failing(404, 99, nonsense), 1),
    ],
)
def test_what_servers_do_wrong(answer: Answer, asked: int, server: Server, folder: Path) -> None:
    refused(server.give("a.pth", answer), folder / "a.pth")
    assert len(server.asked) == asked


@pytest.mark.parametrize("listens", [True, False])
def test_a_server_that_does_not_answer(listens: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SERVER_TIMEOUT_SECONDS", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        refused(f"http://127.0.0.1:{silent.getsockname()[1]}/a.pth", folder / "a.pth")


def test_a_disk_that_is_too_small(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=10**6)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: usage)
    refused(server.give("a.pth", sending(CONTENT)), folder / "a.pth")
    assert len(server.asked) == 1


@pytest.mark.parametrize("address", ["ftp://127.0.0.1/a", "/etc/passwd", "http://a b/c", "data:,x", "http://[x/a"])
def test_other_addresses_are_refused(address: str, folder: Path) -> None:
    refused(address, folder / "a.pth")


def test_a_login_in_an_address_is_refused_and_not_printed(folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        download("http://me:secret@127.0.0.1:9/a.pth", folder / "a.pth")
    assert "127.0.0.1:9/a.pth" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_is_address(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(CONTENT)
    assert download(f"file://{tmp_path}/a.bin", folder / "a.bin").read_bytes() == CONTENT
    assert all(map(is_address, ["http://a/b.zip", "https://a.b/c?d=e", "file:///a"]))
    assert not any(
        map(is_address, ["", "a.zip", "bash get.sh", "import os", "http://a\nimport os", None, 3, "ftp://a/b"])
    )


def test_wrong_content(server: Server, folder: Path) -> None:
    address = server.give("a.pth", sending(CONTENT))
    refused(address, folder / "a.pth", sha256="0123")
    refused(address, folder / "a.pth", usable=lambda path: path.stat().st_size == 0)
    digits = hashlib.sha256(CONTENT).hexdigest()
    assert download(address, folder / "a.pth", sha256=digits[:8]).read_bytes() == CONTENT


# The Hub


def use(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the address of the Hub, which huggingface_hub reads when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)  # of older versions


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub() as hub:
        use(hub.address, monkeypatch)
        yield hub


def test_weights_are_downloaded_once_and_again_if_they_change(
    hub: Hub, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["me/mine"] = {"best.pt": b"weights", "last.pt": b"others", "README.md": b""}
    hub.tags = ["pytorch", "license:agpl-3.0"]
    path = fetch_from_hub("me/mine")
    assert (path.name, path.read_bytes()) == ("best.pt", b"weights")
    assert path.is_relative_to(home / "hf" / "hub")
    assert fetch_from_hub("//me/mine/best.pt") == fetch_from_hub(f"me/mine@{hub.sha('me/mine')}") == path
    assert [line for line in hub.asked if line.startswith("GET /me/")] == ["GET /me/mine/resolve/main/best.pt"]
    assert "agpl-3.0" in capsys.readouterr().err
    hub.files["me/mine"] = {"best.pt": b"2"}
    assert fetch_from_hub("me/mine").read_bytes() == b"2"


@pytest.mark.parametrize(
    ("name", "files", "chosen"),
    [
        ("me/mine", ("a.pt", "README.md"), "a.pt"),
        ("me/mine", ("model.safetensors", "config.json"), "model.safetensors"),
        ("me/mine", ("best.pt", "best.safetensors"), "best.pt"),
        ("me/mine/deep/b.pt", ("a.pt", "deep/b.pt"), "deep/b.pt"),
    ],
)
def test_the_file_of_a_repository(name: str, files: tuple[str, ...], chosen: str, hub: Hub) -> None:
    hub.files["me/mine"] = {file: file.encode() for file in files}
    assert fetch_from_hub(name).read_bytes() == chosen.encode()


@pytest.mark.parametrize(
    ("name", "token"),
    [
        *((name, "") for name in ("mine", "", "me/", "me mine", "https://huggingface.co/me/mine")),
        *((name, "") for name in ("me/mine", "me/mine/c.pt", "me/mine@v2", "me/none", "me/secret")),
        *(("me/gated", READ_TOKEN), ("me/mine/a.pt", "hf_wrong")),
    ],
)
def test_refused_downloads(name: str, token: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, without the token."""
    hub.files = {repository: {"a.pt": b"x", "b.pt": b"x"} for repository in ("me/mine", "me/secret", "me/gated")}
    hub.private, hub.gated = {"me/secret"}, {"me/gated"}
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError) as caught:
        fetch_from_hub(name)
    assert str(caught.value).startswith(f"--weights hf:{name} ")
    assert "\n" not in str(caught.value)
    assert "hf_" not in str(caught.value)


def nobody_answers(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    use("http://127.0.0.1:9", monkeypatch)


def silent(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SERVER_TIMEOUT_SECONDS", 0.2)
    hub.silent = True


def broken(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.error = 503


@pytest.mark.parametrize("break_hub", [nobody_answers, silent, broken])
def test_cached_weights_are_used_if_the_hub_cannot_be_reached(
    break_hub: Callable[[Hub, pytest.MonkeyPatch], None], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["me/mine"] = {"best.pt": b"x", "last.pt": b"y"}
    path, commit = fetch_from_hub("me/mine"), hub.sha("me/mine")
    break_hub(hub, monkeypatch)
    assert fetch_from_hub("me/mine") == fetch_from_hub(f"me/mine@{commit}") == path
    with pytest.raises(UserError, match=r"^--weights hf:me/mine/last\.pt "):
        fetch_from_hub("me/mine/last.pt")
