"""The files in checkpoint/ of a run folder, which --resume reads: replaced as a whole, and verified by a checksum.

Called by utils/run_folder.py and resume.py; training_state.py makes their content.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from utils.errors import UserError, first_line
from utils.files import open_regular, read_regular, replacing

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

    def read(self, warn: Callable[[str], object]) -> dict[str, Any] | None:
        """Return the newest intact state, None if there are no files; warn about each damaged file.

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
                return _load(file, io.BytesIO(content))
            warn(f"warning: {file} is damaged (its checksum does not match); trying the one before")
        if files:
            raise UserError(
                f"all states in {self.folder} are damaged ({', '.join(file.name for file in files)}), so the run "
                "cannot go on; start a new one from its weights/last.pt"
            )
        return None

    def clear(self) -> None:
        """Remove all states."""
        for file in self.files():
            file.unlink()

    def refuse_new_start(self, is_auto: bool, nosave: bool) -> None:
        """Raise `UserError` unless a run without a state may start anew: with --resume auto, if it has no results.

        Args:
            nosave: whether the run writes rows of results.csv before its first state
        """
        run = self.folder.parent
        results = [*([] if nosave else run.glob("results.csv")), *sorted(run.glob("weights/*.pt"))]
        if results:
            raise UserError(
                f"{run} has results ({', '.join(str(file.relative_to(run)) for file in results)}), but no state is in "
                f"{self.folder}, so it cannot be resumed; restore the states, or start a new run from its weights"
            )
        if not is_auto:
            raise UserError(
                f"{run} ended before it saved anything, so there is nothing to resume; start it again with --resume "
                "auto, or start a new run without --resume"
            )

    def peek(self) -> dict[str, Any] | None:
        """Return the newest state that can be loaded, None if there is none.

        Faster than `read`: it maps the tensors from the disk and computes no checksum.
        """
        for file in self.files():
            try:
                os.close(open_regular(file))  # refuses a pipe
                return _load(file, file)
            except (UserError, OSError):
                continue  # `read` reports it
        return None


def _load(file: Path, source: io.BytesIO | Path) -> dict[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a hostile file, which is refused below
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=isinstance(source, Path))
    except UnpicklingError:
        raise UserError(
            f"{file} was refused, and nothing in it was run: it holds more than tensors and plain values, so this "
            "program has not written it; remove it"
        ) from None
    except (RuntimeError, EOFError, zipfile.BadZipFile, ValueError) as error:
        raise UserError(f"{file} is not a complete state ({first_line(error)}); remove it") from None
    form = content.get("format") if isinstance(content, dict) else None
    if form != STATE_FORMAT:
        raise UserError(f"{file} has the format {form} of another version; resume with that version")
    return content


def _checksum(content: memoryview | bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:CHECKSUM_DIGITS]
