"""Run work in a thread that training never waits for; command lines of processes for such work, and their end.

Called by utils/plots, utils/tracking and models/weights/releases.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import psutil

from utils.errors import first_line
from utils.files import ROOT

Job = Callable[[], object]
_starting = threading.Lock()  # held while `start_process` starts one; other threads do not fork meanwhile
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


class Background:
    """Runs one job after another. A failure is a warning, the first one only.

    failure: what has happened then, in a few words. warn: called with the warning.
    """

    def __init__(self, failure: str, warn: Callable[[str], object]) -> None:
        self.failure, self.warn, self.failed = failure, warn, False
        self.jobs: SimpleQueue[Job | None] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def do(self, job: Job) -> None:
        """Run `job` after those before it."""
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, daemon=True)
            self.thread.start()
        self.jobs.put(job)

    def finish(self, patience: float) -> bool:
        """Wait for all jobs, at most `patience` seconds; return whether they have ended."""
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
                    reason = f"{type(error).__name__}: {first_line(error, 1000)}"
                    self.warn(f"warning: {self.failure} ({reason}); training goes on")


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process as `subprocess.Popen` does, from a thread beside which others fork, such as for loader processes.

    `Popen` waits for the end of a pipe that a process forked meanwhile would inherit, and hold as long as it lives.
    """
    with _starting:
        return subprocess.Popen(command, text=True, **options)


def own_python(module: str, function: str = "main") -> list[str]:
    """Return a command line that calls a function of a module of this repository from any current folder.

    Arguments may follow. `python -m` would search the current folder first.
    """
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path[0] = {str(ROOT)!r}; from {module} import {function}; {function}()",
    ]


def kill_children(pid: int) -> None:
    """Kill all processes that a process has started, and their children."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
