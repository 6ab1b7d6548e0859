"""Writing files in the background, so that training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from utils.errors import UserError
from utils.files import replacing

Jobs = Mapping[Path, Callable[[], None]]  # what is written, and what writes it: that alone


class Writer:
    """Writes one job after another. What fails is told once, and tried again at the end.

    say: takes the warnings.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.pool = ThreadPoolExecutor(1)
        self.running: tuple[Jobs, Future[None]] | None = None
        self.failed: dict[Path, Callable[[], None]] = {}
        self.told: set[Path] = set()

    def files(
        self, paths: Sequence[Path], content: memoryview | bytes, then: Callable[[], object] = lambda: None
    ) -> None:
        """The same content into several files, each whole or as before. then: is called when they are written."""
        self.do({path: partial(_write, path, content) for path in paths}, then)

    def do(self, jobs: Jobs, then: Callable[[], object] = lambda: None) -> None:
        """Start some jobs when those before are done: none waits, for each holds all that it writes."""
        self.wait()
        self.running = jobs, self.pool.submit(_all, jobs, then)

    def wait(self) -> None:
        """Until the last jobs are done; a warning where they failed."""
        if self.running is None:
            return
        (jobs, future), self.running = self.running, None
        try:
            future.result()
        except OSError as error:
            self.failed.update(jobs)
            if not self.told.issuperset(jobs):
                self.told.update(jobs)
                names = " and ".join(map(str, jobs))
                self.say(f"warning: {names} cannot be written now: {error.strerror or error}; training goes on")
        else:
            for path in jobs:
                self.failed.pop(path, None)

    def finish(self, folder: Path) -> None:
        """All is written, what failed before too. Raises `UserError` for what is not."""
        self.wait()
        for path, job in list(self.failed.items()):
            try:
                job()
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written: {error.strerror or error}; mend that, and go on with --resume {folder}"
                ) from None
            self.failed.pop(path)


def _all(jobs: Jobs, then: Callable[[], object]) -> None:
    for job in jobs.values():
        job()
    then()


def _write(path: Path, content: memoryview | bytes) -> None:
    with replacing(path) as file:
        file.write(content)
