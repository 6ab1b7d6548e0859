"""Run work beside the training, in a thread or a process. Called by utils/plots and utils/tracking."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar

from utils.errors import first_line
from utils.files import ROOT

NICENESS = 10  # added to that of processes beside the training
Job = Callable[[], object]
_starting = threading.Lock()  # held by `start_process`, so that other threads do not fork meanwhile
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


class Background:
    """Runs jobs one after another in a thread. The first failure is a warning.

    failure: beginning of the warning. warn: called with the warning. abandoned: whether any thread has not ended in
    time; the process must then exit without waiting for it.
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
            except (Exception, SystemExit) as error:  # a package may try to exit
                if not self.failed:
                    self.failed = True
                    reason = f"{type(error).__name__}: {first_line(error, 1000)}"
                    self.warn(f"warning: {self.failure} ({reason}); training continues")


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
    """Start a process as `subprocess.Popen` does, while no other thread forks.

    `Popen` waits until a pipe is closed that a process forked meanwhile would inherit and never close.
    """
    with _starting:
        return subprocess.Popen(command, text=True, **options)


def own_python(module: str, function: str = "main") -> list[str]:
    """Return a command line that calls a function of a module of this repository; arguments may follow.

    Unlike `python -m`, it does not search the current folder for the module.
    """
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from {module} import {function}; {function}()"
    return [sys.executable, "-c", code]


def lower_priority() -> None:
    """Lower the priority of this process, and of those that it will start, among the processes of its session."""
    if hasattr(os, "nice"):
        os.nice(NICENESS)
