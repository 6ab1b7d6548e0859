"""A web server on loopback for the files of a folder, with parts of files, listings, versions, and faults."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.web import running


class ObjectServer:
    """What a server does, and what it was asked for.

    asked: method, path and Range of each request. errors: status codes of the next answers to GET, and
    to HEAD if `errors_to_head`. cuts: the number
    of the next answers to GET that end after half of the content. ranges: whether parts of files are served.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, ""
        self.asked: list[tuple[str, str, str]] = []
        self.errors: list[int] = []
        self.errors_to_head = False
        self.cuts = 0
        self.ranges = True
        self.lock = threading.Lock()

    def gets(self) -> list[tuple[str, str]]:
        """Return path and Range of each request for content."""
        return [(path, span) for method, path, span in self.asked if method == "GET" and not path.endswith("/")]


@contextmanager
def serving_objects(folder: Path) -> Iterator[ObjectServer]:
    """Run a server for the files of a folder within the `with` block."""
    server = ObjectServer(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(with_content=False)

        def do_GET(self) -> None:
            self.answer(with_content=True)

        def answer(self, with_content: bool) -> None:
            path, span = unquote(urlsplit(self.path).path), self.headers.get("Range") or ""
            with server.lock:
                server.asked.append((self.command, path, span))
                error = server.errors.pop(0) if server.errors and (with_content or server.errors_to_head) else 0
                cut = with_content and not error and server.cuts > 0 and (folder / path[1:]).is_file()
                server.cuts -= cut
            file = folder / path[1:]
            if error or not file.exists():
                self.send_error(error or 404)
                return
            if file.is_dir():
                content = "".join(
                    f'<a href="{each.name}{"/" * each.is_dir()}">x</a>' for each in sorted(file.iterdir())
                )
                self.send(200, content.encode(), "text/html", with_content)
                return
            content, status = file.read_bytes(), 200
            if server.ranges and (match := re.fullmatch(r"bytes=(\d+)-(\d+)", span)):
                content, status = content[int(match[1]) : int(match[2]) + 1], 206
            self.send(status, content, "application/octet-stream", with_content, cut, file)

        def send(
            self,
            status: int,
            content: bytes,
            kind: str,
            with_content: bool,
            cut: bool = False,
            file: Path | None = None,
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            if file:
                self.send_header("ETag", f'"{hashlib.md5(file.read_bytes()).hexdigest()}"')
            self.end_headers()
            if with_content:
                self.wfile.write(content[: len(content) // 2] if cut else content)
            if cut:
                self.close_connection = True

    with running(Handler) as address:
        server.address = address
        yield server
