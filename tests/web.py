"""A web server on this machine for downloads, with answers that work or fail in several ways."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from utils import files

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A running server. answers: by path. asked: path of each request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: dict[str, Answer] = {}
        self.asked: list[str] = []

    def give(self, name: str, answer: Answer) -> str:
        """Set the answer for `name`, and return its address."""
        self.answers[f"/{name}"] = answer
        return f"{self.address}/{name}"


def sending(content: bytes, length: int | None = None, cut: int | None = None, **headers: str) -> Answer:
    """Return an answer with this content.

    length: Content-Length, by default the real one; -1 for none. cut: bytes after which the connection ends.
    headers: further ones, with _ for -.
    """

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        if length != -1:
            handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content[:cut])

    return answer


def without_end(handler: BaseHTTPRequestHandler) -> None:
    """Answer with a body that ends when the client closes the connection."""
    sending(b"", length=-1)(handler)
    while True:
        handler.wfile.write(bytes(2**16))


def failing(code: int) -> Answer:
    """Return an answer that is an error."""
    return lambda handler: handler.send_error(code)


@contextmanager
def running(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a quiet server on loopback within the `with` block, and yield its address."""
    getattr(handler, "func", handler).log_message = lambda *_: None  # of a partial, the class in it
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        listening.handle_error = lambda *_: None  # type: ignore[method-assign]  # the client closed the connection
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server for downloads within the `with` block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            server.answers.get(self.path, lambda handler: handler.send_error(404))(self)

        do_HEAD = do_GET

    with running(Handler) as address:
        server = Server(address)
        yield server


def plant_free_space(monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
    """Let the disk of `folder` seem to have `size` bytes more than must stay free, without the files in the folder."""
    monkeypatch.setattr(files, "SPARE_BYTES", 2**20)

    def usage(_: object) -> SimpleNamespace:
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        return SimpleNamespace(free=2**20 + size - written)

    monkeypatch.setattr(shutil, "disk_usage", usage)


@contextmanager
def serving_folder(folder: Path) -> Iterator[str]:
    """Serve a folder, whose lists have links that sort them, within the `with` block; yield the address."""

    class Handler(SimpleHTTPRequestHandler):
        def list_directory(self, path: object) -> io.BytesIO:
            entries = sorted(Path(str(path)).iterdir())
            links = [f'<a href="{quote(entry.name)}{"/" * entry.is_dir()}">x</a>' for entry in entries]
            content = "".join(['<a href="?C=N;O=D">Name</a><a href="../">up</a>', *links]).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            return io.BytesIO(content)

    with running(partial(Handler, directory=str(folder))) as address:
        yield address
