"""The files in checkpoint/ of a run folder, which --resume reads: replaced as a whole, and verified by a checksum.

Called by run_folder.py and resume.py; training_state.py makes their content.
"""

from __future__ import annotations

import hashlib
import io
import re
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from utils.console import log
from utils.errors import UserError, first_line
from utils.files import read_regular, replacing

STATE_NAME = re.compile(r"\d{8,}-[0-9a-f]+\.pt")  # other files in the folder are the user's
STATE_FORMAT = "lockstep-state-2"
CHECKSUM_DIGITS = 16  # hexadecimal digits in the name of a file


class StateFiles:
    """The states in `checkpoint/` of a run: the two newest, or a finished run's only one, as NUMBER-CHECKSUM.pt.

    The checksum reveals any damage.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.last: Path | None = None  # the file that was written or read last, which is intact

    def files(self) -> list[Path]:
        """Return the files, newest first."""
        return sorted((file for file in self.folder.glob("*.pt") if STATE_NAME.fullmatch(file.name)), reverse=True)

    def write(self, content: memoryview, final: bool = False) -> None:
        """Write a state, whole or not at all; then remove all others except the last one known to be intact.

        Args:
            final: whether to remove the last intact state too
        """
        number = max((int(file.stem.partition("-")[0]) for file in self.files()), default=0) + 1
        path = self.folder / f"{number:08d}-{_checksum(content)}.pt"
        with replacing(path) as file:
            file.write(content)
        for old in self.files():
            if old != path and (final or old != self.last):
                old.unlink()
        self.last = path

    def read(self, warns: bool = True) -> dict[str, Any] | None:
        """Return the newest intact state, None if there are no files; log a warning about each damaged file if `warns`.

        Raises `UserError` if all files are damaged, or if one cannot be read.
        """
        files = self.files()
        for file in files:
            try:
                content = read_regular(file)
            except OSError as error:
                raise UserError(f"{file} cannot be read: {error.strerror}") from None
            if file.stem.partition("-")[2] == _checksum(content):
                self.last = file
                return _load(file, content)
            if warns:
                log(f"warning: {file} is damaged (its checksum does not match); trying the one before")
        if files:
            raise UserError(
                f"all states in {self.folder} are damaged ({', '.join(file.name for file in files)}), so the run "
                "cannot go on; start a new one from its weights/last.pt"
            )
        return None


def _load(file: Path, content: bytes) -> dict[str, Any]:
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, zipfile.BadZipFile, ValueError) as error:
        raise UserError(
            f"{file} was refused, and nothing in it was run: this program has not written it "
            f"({first_line(error)}); remove it"
        ) from None
    form = state.get("format") if isinstance(state, dict) else None
    if form != STATE_FORMAT:
        raise UserError(f"{file} has the format {form} of another version; resume with that version")
    return state


def _checksum(content: memoryview | bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:CHECKSUM_DIGITS]
