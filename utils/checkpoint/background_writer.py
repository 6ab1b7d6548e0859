"""Write files in a background thread while training continues. Called by utils/run_folder.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from utils.errors import UserError
from utils.files import replacing

Jobs = Mapping[Path, Callable[[], None]]  # path -> the function that writes it
Errors = Mapping[Path, OSError]


class BackgroundWriter:
    """Runs one set of jobs after another. The first failure of a file is a warning; `finish` repeats failed jobs."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        self.warn, self.pool = warn, ThreadPoolExecutor(1)
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
                self.warn(f"warning: {path} cannot be written now: {error.strerror or error}; training continues")

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
