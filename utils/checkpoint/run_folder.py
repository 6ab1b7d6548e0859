"""The run folder: settings.yaml, results.csv, weights/, checkpoint/ and other files. Made by utils/run.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import yaml
from torch import nn

from utils.checkpoint.state_files import StateFiles
from utils.checkpoint.weight_files import serialised, weights_content
from utils.console import log
from utils.errors import UserError, without_secrets
from utils.files import PART_SUFFIX, lock_folder, replacing

APPENDED = ("results.csv", "weights/epoch*.pt", "tensorboard/events*", ".wandb.json")  # a new run adds to these
P = ParamSpec("P")
Jobs = Mapping[Path, Callable[[], None]]  # path -> the function that writes it
Errors = Mapping[Path, OSError]


def on_main(method: Callable[Concatenate[RunFolder, P], None]) -> Callable[Concatenate[RunFolder, P], None]:
    """Make a method do nothing on all processes but the main one."""

    @wraps(method)
    def call(self: RunFolder, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_main:
            method(self, *args, **kwargs)

    return call


class RunFolder:
    """The run folder. Every process makes the same calls; only the main one writes; it locks the folder."""

    def __init__(self, path: Path, is_main: bool) -> None:
        self.path, self.is_main = path, is_main
        self._lock = lock_folder(path) if is_main else None
        self._states = StateFiles(path / "checkpoint")
        self._writer = BackgroundWriter()
        self._lines: list[str] = []  # lines of results.csv

    @on_main
    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Write settings.yaml: all settings, defaults included."""
        self._write_now("settings.yaml", yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))

    @on_main
    def write_problems(self, problems: Sequence[str]) -> None:
        """Write problems.txt, which says what was left out of the data set; remove it if there are no problems."""
        if problems:
            self._write_now("problems.txt", "".join(f"{without_secrets(problem)}\n" for problem in problems))
        else:
            (self.path / "problems.txt").unlink(missing_ok=True)

    @on_main
    def write_documents(self, documents: Mapping[str, str]) -> None:
        """Write text files by name."""
        for name, text in documents.items():
            self._write_now(name, text)

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
        """Return the newest complete state on the main process, None if there is none and on the others."""
        return self._states.read() if self.is_main else None

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
        self._write_now("results.csv", "".join(f"{line}\n" for line in self._lines))

    def _write_now(self, name: str, text: str) -> None:
        self._writer.write([self.path / name], text.encode(errors="surrogateescape"))  # file names may be any bytes
        self._writer.wait()


class BackgroundWriter:
    """Writes files in a background thread while training continues, one set of jobs after another.

    The first failure of a file is a warning; `finish` repeats failed jobs.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)
        self.running: Future[Errors] | None = None
        self.failed: dict[Path, Callable[[], None]] = {}
        self.warned: set[Path] = set()

    def write(
        self, paths: Sequence[Path], content: memoryview | bytes, then: Callable[[], object] = lambda: None
    ) -> None:
        """Write `content` into each file, whole or not at all, and call `then` once all are written."""
        self.submit({path: partial(_write, path, content) for path in paths}, then)

    def submit(self, jobs: Jobs, then: Callable[[], object] = lambda: None) -> None:
        """Start `jobs` once the previous ones have ended. Jobs write copies, because training changes the tensors."""
        self.wait()
        self.running = self.pool.submit(self._run, jobs, then)

    def wait(self) -> None:
        """Wait until the last jobs have ended, and warn if they failed."""
        running, self.running = self.running, None
        for path, error in running.result().items() if running else ():
            if path not in self.warned:
                self.warned.add(path)
                log(f"warning: {path} cannot be written now: {error.strerror or error}; training continues")

    def finish(self, advice: str) -> None:
        """Repeat the jobs that failed, after `wait`. Raises `UserError` with `advice` if one fails again."""
        for path, error in self._run(dict(self.failed)).items():
            raise UserError(f"{path} cannot be written: {error.strerror or error}; fix that, and {advice}")

    def _run(self, jobs: Jobs, then: Callable[[], object] = lambda: None) -> Errors:
        errors = {}
        for path, job in jobs.items():
            try:
                job()
                self.failed.pop(path, None)
            except OSError as error:
                errors[path], self.failed[path] = error, job
        if not errors:
            then()
        return errors


def _write(path: Path, content: memoryview | bytes) -> None:
    with replacing(path) as file:
        file.write(content)
