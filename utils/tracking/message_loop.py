"""The process of a tracker: it reads messages of a `ProcessTracker`, calls the methods of a `Session`, and replies.

A message is a JSON object per line of standard input, a reply one of standard output. If the input ends without
`finish`, the training process has died, and the run is closed. Used by wandb_process.py and accelerate_process.py.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from utils.background import kill_children, lower_priority
from utils.errors import first_line

ORPHAN_SECONDS = 60.0  # to send the rest if the training process has died
PARENT_SECONDS = 1.0  # between two checks whether it has
CLEANUP_SECONDS = 5.0  # for the tracker to clean up on exit

_temporary: list[tempfile.TemporaryDirectory[str]] = []  # at most one: of the tracker's temporary files


class Session(ABC):
    """A run of a tracker; its methods are the messages that a `ProcessTracker` sends.

    replies: where replies are written. title: of the tracker, in warnings. start_seconds: time limit of `start`.
    """

    title = ""
    start_seconds = math.inf

    def __init__(self, replies: TextIO) -> None:
        self.replies = replies
        self.warned = self.started = False
        self.reason = ""  # why the run ends by an error

    def reply(self, text: str, **more: Any) -> None:
        """Make the training process print `text`, if any. more: `stop=True` ends the training."""
        with suppress(OSError, ValueError):
            print(json.dumps({"print": text, **more}), file=self.replies, flush=True)

    def warn(self, error: BaseException) -> None:
        """Report the first failure; later ones are silent."""
        if not self.warned:
            self.warned = True
            text = first_line(error, 1000)
            self.reply(f"warning: {self.title}: {text}; training continues, results.csv has its numbers")

    def fail(self, reason: str) -> None:
        """Note why the run ends by an error; the end of the input follows."""
        self.reason = reason

    @abstractmethod
    def finish(self, code: int = 0) -> None:
        """Send the rest and close the run. code: exit code of the run."""


def serve(make: Callable[[TextIO], Session]) -> None:
    """Serve a run: call the methods that the lines of standard input name. The first must be `start`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the training process, which sends `finish` before it ends
    lower_priority()
    threading.Thread(target=_follow_training, args=(os.getppid(),), daemon=True).start()
    _temporary.append(tempfile.TemporaryDirectory(prefix="lockstep-"))
    tempfile.tempdir = os.environ["TMPDIR"] = _temporary[0].name
    session, method = make(open_replies()), ""
    for line in sys.stdin:
        if not line.endswith("\n"):  # the training process died while it wrote
            break
        message = json.loads(line)
        method = message.pop("method")
        if method == "start":
            _start(session, message)
            continue
        try:
            getattr(session, method)(**message)
        except Exception as error:
            session.warn(error)
        if method == "finish":
            break
    if method != "finish" and session.started:
        _exit_after(ORPHAN_SECONDS)
        with suppress(Exception):
            session.finish(code=1)
    _exit_after(CLEANUP_SECONDS)


def _start(session: Session, message: dict[str, Any]) -> None:
    """Call `Session.start`; exit if it fails or takes too long."""

    def hard_exit(error: Exception) -> None:
        session.warn(error)
        exit_now(1)

    late = TimeoutError(f"it has not started within {session.start_seconds:.0f} s")
    timer = threading.Timer(min(session.start_seconds, threading.TIMEOUT_MAX), hard_exit, (late,))
    timer.daemon = True
    timer.start()
    try:
        session.start(**message)  # type: ignore[attr-defined]
    except Exception as error:
        hard_exit(error)
    except SystemExit as ended:  # of the package
        if ended.code:
            hard_exit(RuntimeError(f"it has ended with exit code {ended.code}"))
        raise
    timer.cancel()
    session.reply("", started=True)


def open_replies() -> TextIO:
    """Return standard output for replies, and send what the tracker prints to the null device."""
    replies = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    return replies


def exit_now(code: int) -> None:
    """Exit at once; kill the processes that the tracker has started, and remove its temporary files."""
    kill_children(os.getpid())
    for folder in _temporary:
        shutil.rmtree(folder.name, ignore_errors=True)
    os._exit(code)


def _follow_training(parent: int) -> None:
    """End this process some time after its parent, even if a call of the tracker never returns."""
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    _exit_after(ORPHAN_SECONDS)


def _exit_after(seconds: float) -> None:
    timer = threading.Timer(seconds, exit_now, (1,))
    timer.daemon = True
    timer.start()
