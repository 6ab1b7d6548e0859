"""A web server on this machine, for downloads: one that behaves, and ones that do not."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers each path as `answers` says, and notes what was asked: the path, and from which byte."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: dict[str, Answer] = {}
        self.asked: list[tuple[str, int]] = []

    def give(self, name: str, answer: Answer) -> str:
        """Have `name` answered so; its address."""
        self.answers[f"/{name}"] = answer
        return f"{self.address}/{name}"


def first_byte(handler: BaseHTTPRequestHandler) -> int:
    """From which byte on a request asks; 0 where it asks for all."""
    found = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
    return int(found[1]) if found else 0


def sending(
    content: bytes,
    length: int | None = None,
    *,
    tag: str = "",
    ranges: bool = True,
    cut: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """An answer of this content, that tells its length or another one; -1: that tells none.

    tag: its ETag; ranges: does it take Range, where If-Range is the tag or its Last-Modified? cut: bytes after which
    each connection ends.
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
    """An error so many times, and then another answer."""
    left = [code] * times

    def answer(handler: BaseHTTPRequestHandler) -> None:
        if left:
            handler.send_error(left.pop())
        else:
            then(handler)

    return answer


@contextmanager
def serving() -> Iterator[Server]:
    """A server while the `with` lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known.asked.append((self.path, first_byte(self)))
            with suppress(ConnectionError):  # who asks may have gone
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
        try:
            yield known
        finally:
            listening.shutdown()
            thread.join()
