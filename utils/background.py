"""Work beside the training, in a thread: it is never waited for, and where it fails that is one warning."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

import psutil

from utils.files import ROOT

Job = Callable[[], object]


class Background:
    """Does one job after another. what: names the work in a warning; say: takes the warning."""

    def __init__(self, what: str, say: Callable[[str], object]) -> None:
        self.what, self.say, self.failed = what, say, False
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def do(self, job: Job) -> None:
        """Have it done when those before are."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        self.jobs.put(job)

    def finish(self, patience: float) -> bool:
        """Wait until all is done, so many seconds at most; is it?"""
        if self.thread is None:
            return True
        self.jobs.put(None)
        self.thread.join(patience)
        done = not self.thread.is_alive()
        self.thread = None
        return done

    def _work(self) -> None:
        while job := self.jobs.get():
            try:
                job()
            except Exception as error:
                if not self.failed:
                    self.failed = True
                    reason = str(error).partition("\n")[0]
                    self.say(f"warning: {self.what} ({type(error).__name__}: {reason}); training goes on")


def own_python(module: str, function: str = "main") -> list[str]:
    """The start of a command line that calls a function of a module of ours, wherever it is called: `python -m` would
    look for the module in the user's folder first."""
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path[0] = {str(ROOT)!r}; from {module} import {function}; {function}()",
    ]


def kill_children(pid: int) -> None:
    """End all processes that a process has started, and those that they have."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
