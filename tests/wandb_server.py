"""A W&B server on loopback with the parts that wandb needs to start or continue a run and to send its files."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.web import running


class Server:
    """The received content of one project."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []  # of the history
        self.files: dict[str, bytes] = {}
        self.runs: set[str] = set()
        self.artifacts: list[dict[str, Any]] = []  # as they were created
        self.inputs: list[str] = []  # ids of the artifacts that runs use: `a1` is the first of `artifacts`
        self.code: int | None = None
        self.address = ""

    def graphql(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to the query or mutation `name`."""
        given = given.get("input", given)
        if name == "Viewer":
            return {"viewer": {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name == "RunResumeStatus":
            known = given["name"] in self.runs
            bucket = self._bucket(given) if known else None
            return {"model": {"id": "p", "name": "p", "entity": OWNER, "bucket": bucket}}
        if name == "UpsertBucket":
            new = bool(given.get("name")) and given["name"] not in self.runs
            self.runs |= {given["name"]} if new else set()
            self.config |= json.loads(given.get("config") or "{}")
            return {"upsertBucket": {"bucket": self._bucket(given), "inserted": new}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.address}/upload/{file}"} for file in given["files"]]
            return {"createRunFiles": {"runID": "UnVuOjE=", "uploadHeaders": [], "files": files}}
        if name in ("ArtifactType", "ArtifactMembershipByName"):
            return {"project": None}
        if name == "CreateArtifact":
            self.artifacts.append(given)
            number = len(self.artifacts)
            return {
                "createArtifact": {"artifact": {"id": f"a{number}", "state": "PENDING", "artifactSequence": SEQUENCE}}
            }
        if name == "CreateArtifactManifest":
            file = {"id": "m", "name": given["name"], "displayName": given["name"], **self._upload(given["name"])}
            return {"createArtifactManifest": {"artifactManifest": {"id": "m", "file": file}}}
        if name == "CreateArtifactFiles":
            nodes = [self._artifact_file(file) for file in given["artifactFiles"]]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if name == "CommitArtifact":
            return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}}
        if name == "ArtifactByID":
            return {"artifact": self._artifact(int(given["id"].removeprefix("a")))}
        if name == "UseArtifact":
            self.inputs.append(given["artifactID"])
            return {
                "useArtifact": {"artifact": {"id": given["artifactID"], "digest": "", "description": "", "state": ""}}
            }
        if name == "ServerFeaturesQuery":
            return {"serverInfo": {"features": []}}
        return {"entity": {"organization": None}}

    def _artifact(self, number: int) -> dict[str, Any]:
        """Return an artifact in the form of wandb's fragment."""
        given, entity = self.artifacts[number - 1], {"name": OWNER["name"]}
        project = {"id": "p", "internalId": "p", "name": "p", "entity": entity}
        name = given["artifactCollectionName"]
        counts = {"versionIndex": 0, "historyStep": None, "size": 1, "fileCount": 1, "ttlDurationSeconds": -2}
        texts = {"description": None, "metadata": given.get("metadata"), "digest": given["digest"], "commitHash": "c"}
        times = {"createdAt": "2026-01-01T00:00:00", "updatedAt": None, "ttlIsInherited": True}
        kind = {"artifactType": {"name": given["artifactTypeName"]}, "state": "COMMITTED", "tags": [], "aliases": []}
        sequence = {"__typename": "ArtifactSequence", "name": name, "project": project}
        return {"id": f"a{number}", "artifactSequence": sequence, **counts, **texts, **times, **kind}

    def _upload(self, file: str) -> dict[str, Any]:
        return {"uploadUrl": f"{self.address}/upload/artifacts/{file}", "uploadHeaders": []}

    def _artifact_file(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["name"]
        upload = {"storagePath": None, "uploadMultipartUrls": None, **self._upload(name)}
        return {"id": name, "name": name, "displayName": name, "artifact": {"id": given["artifactID"]}, **upload}

    def _bucket(self, given: dict[str, Any]) -> dict[str, Any]:
        tail = json.dumps([json.dumps(row) for row in self.rows[-1:]])
        counts = {"historyLineCount": len(self.rows), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": tail, "eventsTail": "[]", "summaryMetrics": "{}", "wandbConfig": '{"t": 1}'}
        project = {"id": "p", "name": "p", "entity": OWNER}
        named = {"id": "UnVuOjE=", "name": given.get("name") or next(iter(self.runs)), "displayName": "x"}
        return {**named, **counts, **tails, "config": "{}", "tags": [], "project": project, "sweepName": None}

    def stream(self, content: dict[str, Any]) -> None:
        """Store lines of files at their offsets."""
        if history := content.get("files", {}).get("wandb-history.jsonl"):
            self.rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        self.code = content.get("exitcode", self.code)


OWNER = {"id": "e", "name": "me"}
SEQUENCE = {"id": "s", "latestArtifact": None}


@contextmanager
def serve() -> Iterator[Server]:
    """Run a server at its `address` within the `with` block."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def content(self) -> bytes:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(content) if self.headers.get("Content-Encoding") == "gzip" else content

        def give(self, answer: dict[str, Any]) -> None:
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self) -> None:
            server.files[self.path.removeprefix("/upload/")] = self.content()
            self.give({})

        def do_POST(self) -> None:
            content = self.content()
            if self.path == "/graphql":
                request = json.loads(content)
                name = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
                assert name
                return self.give({"data": server.graphql(name[1], request.get("variables", {}))})
            if self.path.endswith("/file_stream"):
                server.stream(json.loads(content))
            self.give({"limits": {}})

    with running(Handler) as server.address:
        yield server
