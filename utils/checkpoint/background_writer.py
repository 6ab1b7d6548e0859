"""Write files in a background thread while training continues. Called by utils/run_folder.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from utils.errors import UserError
from utils.files import replacing

Jobs = Mapping[Path, Callable[[], None]]  # path -> the function that writes it


class BackgroundWriter:
    """Runs one set of jobs after another. `finish` repeats the jobs that failed.

    Args:
        warn: called with a warning if jobs fail, but not again for the same files
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self.warn = warn
        self.pool = ThreadPoolExecutor(1)
        self.running: tuple[Jobs, Future[None]] | None = None
        self.failed: dict[Path, Callable[[], None]] = {}
        self.warned: set[Path] = set()

    def write(
        self, paths: Sequence[Path], content: memoryview | bytes, then: Callable[[], object] = lambda: None
    ) -> None:
        """Write `content` into each file, whole or not at all, and call `then` once all are written."""

        def write_file(path: Path) -> None:
            with replacing(path) as file:
                file.write(content)

        self.submit({path: partial(write_file, path) for path in paths}, then)

    def submit(self, jobs: Jobs, then: Callable[[], object] = lambda: None) -> None:
        """Start `jobs` once the previous ones have ended. Jobs write copies, because training changes the tensors."""
        self.wait()

        def run() -> None:
            for job in jobs.values():
                job()
            then()

        self.running = jobs, self.pool.submit(run)

    def wait(self) -> None:
        """Wait until the last jobs have ended, and warn if they failed."""
        if self.running is None:
            return
        (jobs, future), self.running = self.running, None
        try:
            future.result()
        except OSError as error:
            self.failed.update(jobs)
            if not self.warned.issuperset(jobs):
                self.warned.update(jobs)
                names = " and ".join(map(str, jobs))
                self.warn(f"warning: {names} cannot be written now: {error.strerror or error}; training continues")
        else:
            for path in jobs:
                self.failed.pop(path, None)

    def finish(self, advice: str) -> None:
        """Wait for all jobs and repeat those that failed. Raises `UserError` with `advice` if one fails again."""
        self.wait()
        for path, job in list(self.failed.items()):
            try:
                job()
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written: {error.strerror or error}; fix that, and {advice}"
                ) from None
            self.failed.pop(path)
