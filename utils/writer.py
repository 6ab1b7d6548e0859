"""Writing files in the background, so that training goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from utils.errors import UserError
from utils.files import replacing


class Writer:
    """Writes one job after another. What fails is told once, and tried again at the end.

    say: takes the warnings.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self.pool = ThreadPoolExecutor(1)
        self.running: tuple[Sequence[Path], Callable[[], None], Future[None]] | None = None
        self.failed: dict[Path, Callable[[], None]] = {}  # what is not written, and the job that does it
        self.told: set[Path] = set()

    def files(self, paths: Sequence[Path], content: memoryview | bytes) -> None:
        """The same content into several files, each whole or as before."""
        self.do(paths, lambda: _write(paths, content))

    def do(self, paths: Sequence[Path], job: Callable[[], None]) -> None:
        """Start a job that writes these when the one before is done: none waits, for each holds all that it writes."""
        self.wait()
        self.running = paths, job, self.pool.submit(job)

    def wait(self) -> None:
        """Until the last job is done; a warning where it failed."""
        if self.running is None:
            return
        (paths, job, future), self.running = self.running, None
        try:
            future.result()
        except OSError as error:
            self.failed.update(dict.fromkeys(paths, job))
            if not self.told.issuperset(paths):
                self.told.update(paths)
                names = " and ".join(map(str, paths))
                self.say(f"warning: {names} cannot be written now: {error.strerror}; training goes on")
        else:
            for path in paths:
                self.failed.pop(path, None)

    def finish(self, folder: Path) -> None:
        """All is written, what failed before too. Raises `UserError` for what is not."""
        self.wait()
        for path, job in list(self.failed.items()):
            try:
                job()
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written: {error.strerror}; mend that, and go on with --resume {folder}"
                ) from None
            self.failed.pop(path)


def _write(paths: Sequence[Path], content: memoryview | bytes) -> None:
    for path in paths:
        with replacing(path) as file:
            file.write(content)
