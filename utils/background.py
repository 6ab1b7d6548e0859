"""Run work beside the training, in a thread or a process. Called by utils/plots and utils/tracking."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from types import FrameType
from typing import ClassVar

from utils.errors import first_line
from utils.files import ROOT

START_SECONDS, START_POLL_SECONDS = 5.0, 0.001  # time to start a process; interval of the checks whether it has started
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


def await_started_processes() -> None:
    """Wait until no other thread is inside `Popen`, which packages also call in the threads of trackers.

    `Popen` waits until a pipe is closed. A loader process forked in the meantime would inherit the pipe and keep it.
    """
    deadline = time.monotonic() + START_SECONDS
    is_starting = True
    while is_starting and time.monotonic() < deadline:
        time.sleep(START_POLL_SECONDS)  # other threads get the interpreter now, not before the fork
        is_starting = _is_starting_process()


def _is_starting_process() -> bool:
    """Return whether another thread is inside `Popen`."""
    code = subprocess.Popen._execute_child.__code__  # type: ignore[attr-defined]
    frames = sys._current_frames()
    del frames[threading.get_ident()]  # a frame that refers to itself would keep its callers' objects, such as a loader
    for frame in frames.values():
        call: FrameType | None = frame
        while call:
            if call.f_code is code:
                return True
            call = call.f_back
    return False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=await_started_processes)


def own_python(module: str, function: str = "main") -> list[str]:
    """Return a command line that calls a function of a module of this repository; arguments may follow.

    Unlike `python -m`, it does not search the current folder for the module.
    """
    code = f"import sys; sys.path[0] = {str(ROOT)!r}; from {module} import {function}; {function}()"
    return [sys.executable, "-c", code]
