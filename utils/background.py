"""Run work beside the training, in a thread or a process. Called by utils/plots and utils/tracking."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import ClassVar

from utils.errors import first_line
from utils.files import ROOT

Job = Callable[[], object]


class Background:
    """Runs jobs one after another in a thread. The first failure is a warning.

    Args:
        failure: beginning of the warning
        warn: called with the warning

    Attributes:
        abandoned: whether any thread has not ended in time; the process must then exit without waiting for it
    """

    abandoned: ClassVar[bool] = False

    def __init__(self, failure: str, warn: Callable[[str], object]) -> None:
        self.failure, self.warn, self.failed = failure, warn, False
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def do(self, job: Job) -> None:
        """Run `job` after the jobs before it."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        self.jobs.put(job)

    def finish(self, patience: float) -> bool:
        """Wait for all jobs, at most `patience` seconds; return whether all have ended."""
        if self.thread is None:
            return True
        self.jobs.put(None)
        self.thread.join(patience)
        done = not self.thread.is_alive()
        Background.abandoned |= not done
        self.thread = None
        return done

    def _work(self) -> None:
        while job := self.jobs.get():
            try:
                job()
            except BaseException as error:  # a package may try to exit
                if not self.failed:
                    self.failed = True
                    reason = f"{type(error).__name__}: {first_line(error, 1000)}"
                    self.warn(f"warning: {self.failure} ({reason}); training continues")


def own_python(module: str, function: str = "main") -> list[str]:
    """Return a command line that calls a function of a module of this repository; arguments may follow.

    Unlike `python -m`, it does not search the current folder for the module.
    """
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from {module} import {function}; {function}()"
    return [sys.executable, "-c", code]
