"""A web server on this machine for downloads, with answers that work or fail in several ways."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """A running server. answers: by path. asked: path and first byte of each request."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, int]] = []

    def give(self, name: str, answer: Answer) -> str:
        """Set the answer for `name`, and return its address."""
        self.answers[f"/{name}"] = answer
        return f"{self.address}/{name}"


def first_byte(handler: BaseHTTPRequestHandler) -> int:
    """Return the first byte of a request's range, 0 without one."""
    match = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
    return int(match[1]) if match else 0


def sending(
    content: bytes,
    length: int | None = None,
    *,
    tag: str = "",
    ranges: bool = True,
    cut: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Return an answer with this content.

    length: Content-Length, by default the real one; -1 for none. tag: ETag. ranges: whether to serve a Range whose
    If-Range is the tag or Last-Modified. cut: bytes after which each connection ends.
    """

    def answer(handler: BaseHTTPRequestHandler) -> None:
        start = first_byte(handler)
        if not ranges or handler.headers.get("If-Range") not in {tag, (headers or {}).get("Last-Modified")}:
            start = 0
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if length != -1:
            handler.send_header("Content-Length", str(len(content) - start if length is None else length))
        for name, value in {**({"ETag": tag} if tag else {}), **(headers or {})}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content[start : None if cut is None else start + cut])

    return answer


def failing(code: int, times: int, then: Answer) -> Answer:
    """Return an answer that is an error `times` times and `then` afterwards."""
    errors = [code] * times

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if errors:
            handler.send_error(errors.pop())
        else:
            then(handler)

    return answer


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
            server.asked.append((self.path, first_byte(self)))
            server.answers.get(self.path, lambda handler: handler.send_error(404))(self)

    with running(Handler) as address:
        server = Server(address)
        yield server


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
