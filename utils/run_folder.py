"""The folder of a run: settings.yaml, results.csv, weights/, checkpoint/ and other files. Made by utils/run.py.

The main process has a `MainRunFolder`; the others have a `RunFolder`, which writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from utils.checkpoint.background_writer import BackgroundWriter
from utils.checkpoint.state_files import StateFiles
from utils.checkpoint.weight_files import serialised, weights_content
from utils.distributed.collectives import Collectives
from utils.files import PART_SUFFIX, lock_folder


class RunFolder:
    """The run folder on a process that writes nothing, and what can be called on every process alike."""

    def __init__(self, path: Path, collectives: Collectives) -> None:
        self.path, self.collectives = path, collectives

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write settings.yaml: every resolved setting."""

    def write_problems(self, problems: Sequence[str]) -> None:
        """Write problems.txt, what was left out of the data set, if anything was."""

    def write_documents(self, documents: Mapping[str, str]) -> None:
        """Write text files by name."""

    def add_row(self, row: Mapping[str, float | int | None]) -> None:
        """Add a row to results.csv: 9 significant digits, empty for None. The first row's keys are the header.

        The file is written anew each time, so that it is always whole.
        """

    def save_weights(
        self,
        files: Sequence[str],
        model: nn.Module,
        then: Callable[[], object] = lambda: None,
        *,
        yaml: Mapping[str, Any],
        names: Mapping[int, str],
        settings: Mapping[str, Any],
    ) -> None:
        """Write files of these names in weights/, all alike, in the background; call `then` once they are written.

        yaml, names, settings: see `weights_content`.
        """

    def save_state(self, state: Mapping[str, Any]) -> None:
        """Write a state for --resume into checkpoint/, with the rows of results.csv, in the background."""

    def read_state(self) -> dict[str, Any] | None:
        """Return the last whole state of this folder, the same on every process. All must call this together."""
        return self.collectives.broadcast(self._newest_state())

    def rewind(self, state: Mapping[str, Any] | None) -> None:
        """Make the folder what it was when `state` was saved: its rows in results.csv, and no partly written files.

        None removes the states of an earlier run.
        """

    def wait_for_writing(self) -> None:
        """Wait until everything is written; what cannot be written is a warning."""

    def finish_writing(self) -> None:
        """Wait until everything is written. Raises `UserError` if a file cannot be."""

    def _newest_state(self) -> dict[str, Any] | None:
        return None


class MainRunFolder(RunFolder):
    """The run folder on the main process, which is the only one that writes; it locks the folder while it lives.

    warn: called with warnings about files. row_added: called when results.csv has a new row.
    """

    def __init__(
        self,
        path: Path,
        collectives: Collectives,
        warn: Callable[[str], object],
        row_added: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(path, collectives)
        self.warn, self.row_added = warn, row_added
        self._lock = lock_folder(path)
        self._states = StateFiles(path / "checkpoint")
        self._writer = BackgroundWriter(warn)
        self._lines: list[str] = []  # of results.csv

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        self._write_now("settings.yaml", text.encode())

    def write_problems(self, problems: Sequence[str]) -> None:
        if problems:
            self._write_now("problems.txt", "".join(f"{problem}\n" for problem in problems).encode())

    def write_documents(self, documents: Mapping[str, str]) -> None:
        for name, text in documents.items():
            self._write_now(name, text.encode(errors="surrogateescape"))  # names of files may be any bytes

    def add_row(self, row: Mapping[str, float | int | None]) -> None:
        if not self._lines:
            self._lines.append(",".join(row))
        self._lines.append(",".join("" if value is None else f"{value:.9g}" for value in row.values()))
        self._write_rows()
        self.row_added()

    def save_weights(
        self,
        files: Sequence[str],
        model: nn.Module,
        then: Callable[[], object] = lambda: None,
        *,
        yaml: Mapping[str, Any],
        names: Mapping[int, str],
        settings: Mapping[str, Any],
    ) -> None:
        if files:
            content = serialised(weights_content(model, yaml, names, settings))
            self._writer.write([self.path / "weights" / name for name in files], content, then)

    def save_state(self, state: Mapping[str, Any]) -> None:
        content = serialised({**state, "rows": self._lines})
        self._writer.submit({self._states.folder: lambda: self._states.write(content)})

    def rewind(self, state: Mapping[str, Any] | None) -> None:
        for part in (*self.path.glob(f".*{PART_SUFFIX}"), *self.path.glob(f"*/.*{PART_SUFFIX}")):
            part.unlink(missing_ok=True)
        if state is None:
            self._states.clear()
        elif state["rows"]:
            self._lines = list(state["rows"])
            self._write_rows()

    def wait_for_writing(self) -> None:
        self._writer.wait()

    def finish_writing(self) -> None:
        self._writer.finish(self.path)

    def _newest_state(self) -> dict[str, Any] | None:
        return self._states.read(self.warn)

    def _write_rows(self) -> None:
        self._write_now("results.csv", "".join(f"{line}\n" for line in self._lines).encode())

    def _write_now(self, name: str, content: bytes) -> None:
        self._writer.write([self.path / name], content)
        self._writer.wait()
