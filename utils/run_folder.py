"""The run folder: settings.yaml, results.csv, weights/, checkpoint/ and other files. Made by utils/run.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import yaml
from torch import nn

from utils.checkpoint.background_writer import BackgroundWriter
from utils.checkpoint.state_files import StateFiles
from utils.checkpoint.weight_files import serialised, weights_content
from utils.distributed.ranks import Collectives
from utils.errors import without_secrets
from utils.files import PART_SUFFIX, lock_folder

APPENDED = ("results.csv", "weights/epoch*.pt", "events.out.tfevents*", ".tensorboard.json")  # a new run adds to these
P = ParamSpec("P")


def on_main(method: Callable[Concatenate[RunFolder, P], None]) -> Callable[Concatenate[RunFolder, P], None]:
    """Make a method do nothing on all processes but the main one."""

    @wraps(method)
    def call(self: RunFolder, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_main:
            method(self, *args, **kwargs)

    return call


class RunFolder:
    """The run folder. Every process makes the same calls; only the main one writes, and locks the folder until it ends.

    Args:
        warn: called with warnings about files
    """

    def __init__(self, path: Path, collectives: Collectives, is_main: bool, warn: Callable[[str], object]) -> None:
        self.path, self.collectives, self.is_main, self.warn = path, collectives, is_main, warn
        self._lock = lock_folder(path) if is_main else None
        self._states = StateFiles(path / "checkpoint")
        self._writer = BackgroundWriter(warn)
        self._lines: list[str] = []  # lines of results.csv

    @on_main
    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write settings.yaml: all settings, defaults included."""
        text = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True)
        self._write_now("settings.yaml", text.encode())

    @on_main
    def write_problems(self, problems: Sequence[str]) -> None:
        """Write problems.txt, which says what was left out of the data set; remove it if there are no problems."""
        if problems:
            self.write_documents({"problems.txt": "".join(f"{without_secrets(problem)}\n" for problem in problems)})
        else:
            (self.path / "problems.txt").unlink(missing_ok=True)

    @on_main
    def write_documents(self, documents: Mapping[str, str]) -> None:
        """Write text files by name."""
        for name, text in documents.items():
            self._write_now(name, text.encode(errors="surrogateescape"))  # file names may be any bytes

    @on_main
    def add_row(self, row: Mapping[str, float | int | None]) -> None:
        """Add a row to results.csv: 9 significant digits, empty for None. The first row's keys are the header.

        The whole file is written each time, so that it is never incomplete.
        """
        if not self._lines:
            self._lines.append(",".join(row))
        self._lines.append(",".join("" if value is None else f"{value:.9g}" for value in row.values()))
        self._write_rows()

    @on_main
    def save_weights(
        self, files: Sequence[str], model: nn.Module, then: Callable[[], object] = lambda: None, **content: Any
    ) -> None:
        """Write files with the same content into weights/ in the background, then call `then`.

        Args:
            content: keyword arguments of `weights_content`
        """
        if files:
            paths = [self.path / "weights" / name for name in files]
            self._writer.write(paths, serialised(weights_content(model, **content)), then)

    @on_main
    def save_state(self, state: Mapping[str, Any], final: bool = False) -> None:
        """Write a state for --resume into checkpoint/, with the rows of results.csv, in the background.

        Args:
            final: whether the state replaces all other states
        """
        content = serialised({**state, "rows": self._lines})
        self._writer.submit({self._states.folder: lambda: self._states.write(content, final)})

    def read_state(self) -> dict[str, Any] | None:
        """Return the newest complete state, the same on every process. All processes must call this together."""
        return self.collectives.broadcast(self._states.read(self.warn) if self.is_main else None)

    @on_main
    def restore_to_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the rows of results.csv in `state`, and remove partly written files.

        If `state` is None, for a new run, the states, results and events of an earlier run in the folder are removed.
        """
        for part in (*self.path.glob(f".*{PART_SUFFIX}"), *self.path.glob(f"*/.*{PART_SUFFIX}")):
            part.unlink(missing_ok=True)
        if state is None:
            appended = (file for pattern in APPENDED for file in self.path.glob(pattern))
            for earlier in (*self._states.files(), *appended):
                earlier.unlink(missing_ok=True)
        elif state["rows"]:
            self._lines = list(state["rows"])
            self._write_rows()

    @on_main
    def wait_for_writing(self) -> None:
        """Wait until everything is written; an error is a warning."""
        self._writer.wait()

    @on_main
    def finish_writing(self) -> None:
        """Wait until everything is written. Raises `UserError` if a file cannot be written."""
        self._writer.wait()
        self._writer.finish(f"continue with --resume {self.path}" if self._states.files() else "start the run again")

    def _write_rows(self) -> None:
        self._write_now("results.csv", "".join(f"{line}\n" for line in self._lines).encode())

    def _write_now(self, name: str, content: bytes) -> None:
        self._writer.write([self.path / name], content)
        self._writer.wait()
