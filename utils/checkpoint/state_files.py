"""Weight files, for people, and the state of a run, for --resume: tensors and plain values, nothing that runs."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from utils.errors import UserError
from utils.files import replacing
from utils.memory_format import plain

FORMAT = "lockstep-1"
STATE_FORMAT = "lockstep-state-1"
DIGITS = 16  # of a state's checksum, in its name


def serialised(content: Any) -> memoryview:
    """The bytes of a file that `torch.load` reads."""
    buffer = io.BytesIO()
    torch.save(plain(content), buffer)
    return buffer.getbuffer()


def weights_content(
    model: nn.Module, yaml: Mapping[str, Any], names: Mapping[int, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """A weight file: a model (its EMA, fp32) with all that is needed to use it: YAML with the task, names, settings."""
    return {
        "format": FORMAT,
        "task": yaml["task"],
        "model": dict(yaml),
        "names": dict(names),
        "state": {key: value.detach().cpu() for key, value in model.state_dict().items()},
        "settings": dict(settings),
    }


class States:
    """The states of a run in its folder `checkpoint/`: number-checksum.pt, the newest and the one before.

    The checksum in the name says whether a file is whole, wherever it has been since.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: Path | None = None  # the one written or read last: it is known to be whole

    def files(self) -> list[Path]:
        """All that are there, the newest first."""
        return sorted(self.folder.glob("[0-9]*-*.pt"), reverse=True)

    def write(self, content: memoryview) -> None:
        """Write a state, whole or not at all, and then remove what is older than the last one."""
        number = max((int(file.stem.partition("-")[0]) for file in self.files()), default=0) + 1
        path = self.folder / f"{number:08d}-{_checksum(content)}.pt"
        with replacing(path) as file:
            file.write(content)
        for old in self.files():
            if old not in (path, self.last):
                old.unlink()
        self.last = path

    def read(self, say: Callable[[str], object]) -> dict[str, Any] | None:
        """The newest state that is whole; None where there is none at all. Raises `UserError` where all are damaged."""
        files = self.files()
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise UserError(f"{file} cannot be read: {error.strerror}") from None
            if file.stem.partition("-")[2] == _checksum(content):
                self.last = file
                return _load(file, io.BytesIO(content))
            say(f"warning: {file} is damaged (its checksum is another); taking the one before")
        if files:
            raise UserError(
                f"no state in {self.folder} is whole, so the run cannot go on; start a new one from its weights/last.pt"
            )
        return None

    def clear(self) -> None:
        """Remove all states: those of an earlier run in this folder."""
        for file in self.files():
            file.unlink()

    def peek(self) -> dict[str, Any] | None:
        """The newest state, its tensors left on the disk; None where there is none that can be read."""
        for file in self.files():
            try:
                return _load(file, file)
            except (UserError, OSError, RuntimeError, UnpicklingError, EOFError, zipfile.BadZipFile, ValueError):
                continue  # `read` will say what is wrong with it
        return None


def _load(file: Path, source: io.BytesIO | Path) -> dict[str, Any]:
    content = torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path))
    if content.get("format") != STATE_FORMAT:
        raise UserError(f"{file} was written by another version, as {content.get('format')}; take that version")
    return content


def _checksum(content: memoryview | bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
