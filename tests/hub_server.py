"""A Hugging Face Hub on loopback with the parts that downloads need."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from tests.web import running

READ_TOKEN = "hf_" + "r" * 34


class Hub:
    """The content of the Hub and what it was asked for.

    files: by repository and path. private, gated: repositories that need a token, or that no token may read. tags: of
    all models. asked: method and path of each request. error: a status code that answers every request. silent: no
    request is answered.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.tags: list[str] = []
        self.asked: list[str] = []
        self.error = 0
        self.silent = False
        self.gone = threading.Event()
        self.address = ""

    def sha(self, repository: str) -> str:
        """Return the hash of the newest commit: of the content, as there is no history."""
        return hashlib.sha1(repr(sorted(self.files[repository].items())).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of huggingface_hub."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def give(self, code: int, content: Any = b"", **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refused(self, repository: str) -> bool:
        """Answer a request that this token, or none, must not make; return whether that was done."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in ("", READ_TOKEN):
            self.give(401, {"error": "Invalid username or password."})
        elif repository not in self.known(token):
            self.give(404 if token else 401, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        else:
            return False
        return True

    def known(self, token: str) -> set[str]:
        return {*self.hub.files} - (set() if token else self.hub.private)

    def answer(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = unquote(self.path.partition("?")[0])
        if self.hub.silent:
            self.hub.gone.wait()
        elif self.hub.error:
            self.give(self.hub.error, {"error": "planted"})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            if not self.refused(match[1]):
                self.describe(match[1], match[2] or "main")
        elif (match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)) and not self.refused(match[1]):
            self.send_file(match[1], match[3])

    def describe(self, repository: str, revision: str) -> None:
        if revision not in ("main", self.hub.sha(repository)):
            return self.give(404, X_Error_Code="RevisionNotFound", X_Error_Message="Invalid rev id")
        siblings = [{"rfilename": name} for name in self.hub.files[repository]]
        self.give(200, {"id": repository, "sha": self.hub.sha(repository), "siblings": siblings, "tags": self.hub.tags})

    def send_file(self, repository: str, name: str) -> None:
        commit = {"X_Repo_Commit": self.hub.sha(repository)}
        if repository in self.hub.gated:
            return self.give(403, X_Error_Code="GatedRepo", X_Error_Message="Access to this model is restricted")
        if name not in self.hub.files[repository]:
            return self.give(404, X_Error_Code="EntryNotFound", X_Error_Message="Entry not found", **commit)
        data = self.hub.files[repository][name]
        tag, status = f'"{hashlib.sha1(data).hexdigest()}"', 200
        if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            data, status = data[int(span[1]) : int(span[2]) + 1], 206
        self.give(status, data, ETag=tag, **commit)

    do_GET = do_HEAD = answer


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Run a Hub at its `address` within the `with` block."""
    hub = Hub()
    with running(type("HubHandler", (Handler,), {"hub": hub})) as hub.address:
        try:
            yield hub
        finally:
            hub.gone.set()
