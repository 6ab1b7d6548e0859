"""Downloads: one per machine, resumed where the connection breaks, checked, and whole or absent under their name."""

from __future__ import annotations

import base64
import binascii
import glob
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from utils.errors import UserError
from utils.files import PART, one_at_a_time

SCHEMES = ("http", "https", "file")
PATIENCE = 20.0  # seconds that a server may be silent
TRIES = 6  # that may fail in a row
PAUSE = 1.0  # seconds before the second try; before each further one it is twice as long
WORTH = 2**20  # bytes that a try must bring, else it has failed
BLOCK = 2**20  # bytes that are read at once
BUSY = (408, 416, 425, 429)  # answers of a client's errors that may be others at the next try


class _Content(NamedTuple):
    """What a server says of a file: its length, what changes with it ('' where nothing is said), and its MD5."""

    length: int | None
    tag: str
    md5: bytes

    @staticmethod
    def of(headers: Mapping[str, str]) -> _Content:
        length, tag = headers.get("Content-Length") or "", headers.get("ETag") or ""
        if not tag or tag.startswith("W/"):  # a weak one says nothing of single bytes
            tag = headers.get("Last-Modified") or ""
        return _Content(int(length) if length.isdecimal() else None, tag, _md5(headers))


def download(
    address: str,
    path: Path,
    sha256: str = "",
    usable: Callable[[Path], bool] = os.path.isfile,
    advice: str = "",
) -> Path:
    """The file at `address`, kept at `path`; of the processes of a machine one fetches it, and the others wait.

    What came before a connection broke, or this process ended, is kept beside it and not fetched again. sha256: its
    first digits, where they are known; `usable`: looks at what came; `advice`: what to do where it cannot be had.

    Raises `UserError` with the address and the place where it belongs.
    """
    with one_at_a_time(path.with_name(f"{path.name}.lock")):
        if not path.is_file():
            try:
                _fetch(address, path, sha256, usable)
            except (OSError, ValueError, HTTPException) as error:  # URLError and all that sockets raise are OSErrors
                reason = str(getattr(error, "reason", error)) or type(error).__name__
                advice = advice or f"fetch it by other means and put it at {path}"
                raise UserError(f"{address} cannot be downloaded ({reason}); {advice}") from None
    return path


def is_address(text: Any) -> bool:
    """Can it be downloaded from?"""
    return isinstance(text, str) and re.fullmatch(rf"(?:{'|'.join(SCHEMES)})://\S+", text) is not None


def _fetch(address: str, path: Path, sha256: str, usable: Callable[[Path], bool]) -> None:
    """Raises OSError, HTTPException, or ValueError where another try is of no use."""
    if not is_address(address):
        raise ValueError(f"it must begin with {', '.join(f'{scheme}://' for scheme in SCHEMES)} and have no spaces")
    again = False
    while True:
        transfer = _Transfer(address, path)
        transfer.run()
        wrong = _wrong(transfer, sha256, usable)
        if not wrong:
            with _writing(path.parent):
                os.replace(transfer.part, path)
            return
        transfer.part.unlink()
        if again:
            raise ValueError(f"{wrong}, twice")
        again = True


def _wrong(transfer: _Transfer, sha256: str, usable: Callable[[Path], bool]) -> str:
    """What is wrong with what came; '' where nothing is known to be."""
    if sha256 and not _digest(transfer.part, "sha256").hex().startswith(sha256):
        return "its SHA-256 is not the one that is known of it"
    if transfer.content.md5 and _digest(transfer.part, "md5") != transfer.content.md5:
        return "its MD5 is not the one that the server says"
    return "" if usable(transfer.part) else "what came is not such a file, or is damaged"


class _Transfer:
    """A file on its way into `part`, beside `path`. The part's name tells of what content it is."""

    def __init__(self, address: str, path: Path) -> None:
        self.address, self.path = address, path
        self.answered = False
        self.content = _Content(None, "", b"")
        self.part = self._part()

    def run(self) -> None:
        """Receive all of it. Raises as `_fetch` does."""
        failures = 0
        while True:
            before = self.held()
            try:
                self._receive()
                return
            except (OSError, HTTPException) as error:
                # Who never answers will not: a machine without a network is to say so soon.
                if isinstance(error, HTTPError):
                    hopeless = error.code < 500 and error.code not in BUSY
                else:
                    reset = isinstance(getattr(error, "reason", error), ConnectionResetError)
                    hopeless = not self.answered and not reset
                failures = 0 if self.held() - before >= WORTH else failures + 1
                if hopeless or failures == TRIES:
                    raise
                if isinstance(error, HTTPError) and error.code == 416:
                    self.part.unlink(missing_ok=True)
            time.sleep(PAUSE * 2.0 ** max(failures - 1, 0))

    def held(self) -> int:
        """Bytes that are here and can be gone on from."""
        if not (self.content.tag and self.content.length):
            return 0
        return self.part.stat().st_size if self.part.is_file() else 0

    def _receive(self) -> None:
        """Ask once for what is missing. Raises OSError, also where less came than was told."""
        held = self.held()
        if held and held == self.content.length:
            return
        request = Request(self.address, headers={"User-Agent": "lockstep"})
        if held:
            request.add_header("Range", f"bytes={held}-")
            request.add_header("If-Range", self.content.tag)
        with urlopen(request, timeout=PATIENCE) as answer:
            if not self.answered:
                print(f"downloading {self.address}", file=sys.stderr, flush=True)
            self.answered = True
            if answer.status == 206:
                start = held
                if not _goes_on(answer.headers, held, self.content):
                    self.part.unlink(missing_ok=True)
                    raise OSError("the server's file has changed meanwhile")
            else:
                start, self.content = 0, _Content.of(answer.headers)
                self.part = self._part()
                if not held and self.held():  # an earlier process has left it
                    answer.close()
                    return self._receive()
            self._take(answer, start)

    def _part(self) -> Path:
        mark = hashlib.sha256(f"{self.address}\0{self.content}".encode()).hexdigest()[:12]
        return self.path.with_name(f".{self.path.name}-{mark}{PART}")

    def _take(self, answer: Any, start: int) -> None:
        """Write what an answer brings, which begins at byte `start`."""
        folder, length = self.part.parent, self.content.length
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for other in folder.glob(f".{glob.escape(self.path.name)}-*{PART}"):
                if other != self.part:
                    other.unlink()
            if length and length - start > (free := shutil.disk_usage(folder).free):
                raise OSError(None, f"it takes {gigabytes(length - start)}, and {gigabytes(free)} are free")
            file = self.part.open("r+b" if start else "wb")
        done = start
        bar = tqdm(
            total=length,
            initial=start,
            desc=self.path.name,
            unit="B",
            unit_scale=True,
            disable=None,  # tqdm asks whether it writes to a terminal
            leave=False,
        )
        with file, bar:
            file.seek(start)
            # read1 gives what is there: of a line that falls silent nothing is lost.
            while block := answer.read1(BLOCK if length is None else min(BLOCK, length - done)):
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


def _goes_on(headers: Mapping[str, str], held: int, content: _Content) -> bool:
    """Does a partial answer go on where we are, with the same content?"""
    place = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range") or "")
    if not place or int(place[1]) != held or place[3] not in ("*", str(content.length)):
        return False
    tag = headers.get("ETag") or headers.get("Last-Modified")
    return tag in (None, content.tag) or headers.get("Last-Modified") == content.tag


def _md5(headers: Mapping[str, str]) -> bytes:
    """The MD5 that Azure's, Google's and other servers give of a whole file, base64; b'' where there is none."""
    told = headers.get("x-ms-blob-content-md5") or headers.get("Content-MD5") or ""
    if found := re.search(r"\bmd5=([\w+/]+=*)", headers.get("x-goog-hash") or ""):
        told = found[1]
    with suppress(binascii.Error, ValueError):
        digest = base64.b64decode(told, validate=True)
        return digest if len(digest) == 16 else b""
    return b""


def _digest(path: Path, kind: str) -> bytes:
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.digest()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Trouble with our own disk becomes a ValueError: another try would not help."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to: {error.strerror}") from None


def gigabytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
