"""Writing files in the background, so that training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from utils.errors import UserError
from utils.files import replacing


class Writer:
    """Writes one job after another. What fails is told once, and tried again with the next job of that kind.

    say: takes the warnings.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.pool = ThreadPoolExecutor(1)
        self.running: tuple[str, Future[None]] | None = None
        self.failed: dict[str, str] = {}  # kind of job to why it failed last

    def files(self, paths: Sequence[Path], content: memoryview | bytes) -> None:
        """The same content into several files, each whole or as before."""
        self.do(" and ".join(str(path) for path in paths), lambda: _write(paths, content))

    def do(self, what: str, job: Callable[[], None]) -> None:
        """Start a job when the one before is done: no more than one waits, for each holds all that it writes."""
        self.wait()
        self.running = what, self.pool.submit(job)

    def wait(self) -> None:
        """Until the last job is done; a warning where it failed."""
        if self.running is None:
            return
        (what, job), self.running = self.running, None
        try:
            job.result()
        except OSError as error:
            if what not in self.failed:
                self.say(f"warning: {what} cannot be written: {error.strerror}; training goes on")
            self.failed[what] = error.strerror or str(error)
        else:
            self.failed.pop(what, None)

    def finish(self, folder: Path) -> None:
        """All is written. Raises `UserError` for what is not."""
        self.wait()
        for what, why in self.failed.items():
            raise UserError(f"{what} could not be written: {why}; mend that, and go on with --resume {folder}")


def _write(paths: Sequence[Path], content: memoryview | bytes) -> None:
    for path in paths:
        with replacing(path) as file:
            file.write(content)
