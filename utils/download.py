"""Download files: once per machine, resumable, checked, and never partly written.

Called by data/archives.py, data/media.py and models/weights/releases.py.
"""

from __future__ import annotations

import base64
import glob
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote
from urllib.request import Request, urlopen

from tqdm import tqdm

from utils.errors import UserError, without_secrets
from utils.files import PART_SUFFIX, one_at_a_time

SCHEMES = ("http", "https", "file")
SERVER_TIMEOUT_SECONDS = 20.0  # longest wait for data from the server
MAX_FAILURES = 6  # failed attempts in a row
RETRY_SECONDS = 1.0  # wait before the second attempt; doubled before each further one
MIN_PROGRESS_BYTES = 2**20  # an attempt that receives less has failed
BLOCK_BYTES = 2**20  # bytes read at once
RETRIED_STATUS_CODES = (408, 416, 425, 429)  # client errors; server errors are retried too


class _Content(NamedTuple):
    """A file according to a server's headers: its length, and a tag that changes with the content, '' if unknown."""

    length: int | None
    tag: str

    @staticmethod
    def of(headers: Mapping[str, str]) -> _Content:
        length, tag = headers.get("Content-Length") or "", headers.get("ETag") or ""
        if not tag or tag.startswith("W/"):  # a weak tag may not change with the bytes
            tag = headers.get("Last-Modified") or ""
        return _Content(int(length) if length.isdecimal() else None, tag)


def download(
    address: str,
    path: Path,
    sha256: str = "",
    usable: Callable[[Path], bool] = os.path.isfile,
    advice: str = "",
    licence: str = "",
) -> Path:
    """Download the file at `address` to `path` unless `path` exists, and return `path`.

    One process of a machine downloads, the others wait. A partial file stays beside `path`; later calls continue it.
    Raises `UserError` with the address and the reason.

    Args:
        sha256: first hex digits of the file's SHA-256, if known
        usable: checks the downloaded file
        advice: end of the error message
        licence: the file's licence, printed when it is downloaded
    """
    with one_at_a_time(path.with_name(f"{path.name}.lock")):
        if not path.is_file():
            try:
                _fetch(address, path, sha256, usable, licence)
            except (OSError, ValueError, HTTPException) as error:  # URLError and socket errors are OSErrors
                reason = str(getattr(error, "reason", error)) or type(error).__name__
                advice = advice or f"download it in another way and save it as {path}"
                raise UserError(f"{address} cannot be downloaded ({reason}); {advice}") from None
    return path


def is_address(text: Any) -> bool:
    """Return whether `text` is an address for `download`."""
    return isinstance(text, str) and re.fullmatch(rf"(?:{'|'.join(SCHEMES)})://\S+", text) is not None


def _fetch(address: str, path: Path, sha256: str, usable: Callable[[Path], bool], licence: str) -> None:
    """Download a file; retry once if the content is wrong. Raises OSError, HTTPException or ValueError."""
    if not is_address(address):
        raise ValueError(f"it must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)} and have no spaces")
    problem = ""
    for _ in range(2):
        transfer = _Transfer(address, path, licence)
        transfer.run()
        if sha256 and not _sha256(transfer.part).startswith(sha256):
            problem = "its SHA-256 is not the expected one"
        elif not usable(transfer.part):
            problem = "the content is of another kind, or damaged"
        else:
            with _writing(path.parent):
                os.replace(transfer.part, path)
            return
        transfer.part.unlink()
    raise ValueError(f"{problem}, twice")


class _Transfer:
    """A download into the file `part` beside `path`; its name depends on address and content."""

    def __init__(self, address: str, path: Path, licence: str) -> None:
        self.address, self.path, self.licence = address, path, licence
        self.answered = False  # whether the server has answered a request
        self.content = _Content(None, "")
        self.part = self._part()

    def run(self) -> None:
        """Receive the whole file. Raises as `_fetch` does."""
        failures = 0
        while True:
            before = self.received()
            try:
                self._receive()
                return
            except (OSError, HTTPException) as error:
                hopeless = not self.answered  # fail at once on a machine without a network
                if isinstance(error, HTTPError):
                    hopeless = error.code < 500 and error.code not in RETRIED_STATUS_CODES
                failures = 0 if self.received() - before >= MIN_PROGRESS_BYTES else failures + 1
                if hopeless or failures == MAX_FAILURES:
                    raise
                if isinstance(error, HTTPError) and error.code == 416:
                    self.part.unlink(missing_ok=True)
            time.sleep(RETRY_SECONDS * 2.0 ** max(failures - 1, 0))

    def received(self) -> int:
        """Return the number of bytes in `part` that the next attempt can continue from."""
        if not (self.content.tag and self.content.length):
            return 0
        return self.part.stat().st_size if self.part.is_file() else 0

    def _receive(self) -> None:
        """Request the missing bytes once. Raises OSError, also if the server sends too few."""
        received = self.received()
        if received and received == self.content.length:
            return
        request = _request(self.address)
        if received:
            request.add_header("Range", f"bytes={received}-")
            request.add_header("If-Range", self.content.tag)
        with urlopen(request, timeout=SERVER_TIMEOUT_SECONDS) as answer:
            if not self.answered:
                licence = f" (licence: {self.licence})" if self.licence else ""
                print(f"downloading {without_secrets(self.address)}{licence}", file=sys.stderr, flush=True)
            self.answered = True
            if answer.status == 206:
                start = received
                sent, tag = answer.headers.get("Content-Range") or "", _Content.of(answer.headers).tag
                if not sent.startswith(f"bytes {start}-") or tag not in ("", self.content.tag):
                    self.part.unlink(missing_ok=True)
                    raise OSError("the file on the server has changed in the meantime")
            else:
                start, self.content = 0, _Content.of(answer.headers)
                self.part = self._part()
                if not received and self.received():  # an earlier process received them
                    answer.close()
                    return self._receive()
            self._save(answer, start)

    def _part(self) -> Path:
        digest = hashlib.sha256(f"{self.address}\0{self.content}".encode()).hexdigest()[:12]
        return self.path.with_name(f".{self.path.name}-{digest}{PART_SUFFIX}")

    def _save(self, answer: Any, start: int) -> None:
        """Write the body of a response into `part`, from byte `start` on."""
        folder, length = self.part.parent, self.content.length
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for other in folder.glob(f".{glob.escape(self.path.name)}-*{PART_SUFFIX}"):
                if other != self.part:
                    other.unlink()
            if length and length - start > (free := shutil.disk_usage(folder).free):
                raise OSError(None, f"it needs {gigabytes(length - start)}, and {gigabytes(free)} are free")
            file = self.part.open("r+b" if start else "wb")
        done = start
        bar = tqdm(
            total=length,
            initial=start,
            desc=self.path.name,
            unit="B",
            unit_scale=True,
            disable=None,  # on terminals only
            leave=False,
        )
        with file, bar:
            file.seek(start)
            # read1 returns without waiting for a full block: nothing received is lost at a time-out.
            while block := answer.read1(BLOCK_BYTES if length is None else min(BLOCK_BYTES, length - done)):
                with _writing(folder):
                    file.write(block)
                done += len(block)
                bar.update(len(block))
                if done == length:
                    break
            with _writing(folder):
                file.flush()
                os.fsync(file.fileno())
        if length is not None and done != length:
            raise OSError(f"the connection ended after {done} of {length} bytes")


def _request(address: str) -> Request:
    """Return the request for an address; a user name and password in it are sent to that server only."""
    login = re.fullmatch(r"(?i)(https?://)([^/?#]*)@(.*)", address)
    request = Request(login[1] + login[3] if login else address, headers={"User-Agent": "lockstep"})
    if login:
        token = base64.b64encode(unquote(login[2]).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn an OSError of the local disk into a ValueError, which is not retried."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to: {error.strerror}") from None


def gigabytes(size: float) -> str:
    """Format a number of bytes in MB or GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
