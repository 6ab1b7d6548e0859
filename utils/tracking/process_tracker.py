"""The base class of trackers that live in a process of their own: training sends messages and never waits for it.

A message is a line of JSON: a method of the process's `Session` and its arguments. The other end is
utils/tracking/message_loop.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from utils.background import GROUP_NICENESS, kill_children, own_python, set_group_niceness
from utils.tracking.tracker import FINISH_SECONDS, Print, Tracker, axis_of

EXIT_SECONDS = 10.0  # additional time limit for the exit of the process; then it is killed
LAST_MESSAGE_SECONDS = 1.0  # to hand over the reason why a run ends


def as_text(value: Any) -> Any:
    """Return a value without the bytes of a file's name that are not UTF-8, which trackers refuse."""
    return value.encode(errors="surrogateescape").decode(errors="replace") if isinstance(value, str) else value


class ProcessTracker(Tracker):
    """A tracker in another process. module: has the `main` of that process. title: of the tracker, in warnings.

    folder: of the run. start: arguments of `Session.start`, besides folder, configuration and time limit. print_line:
    prints a line on the console. timeout: seconds to send the rest at the end of the run.
    """

    module, title = "", ""

    def __init__(
        self, folder: Path, start: Mapping[str, Any], print_line: Print, timeout: float = FINISH_SECONDS
    ) -> None:
        super().__init__()
        self.folder, self.arguments, self.print_line, self.timeout = folder, start, print_line, timeout
        self.process: subprocess.Popen[str] | None = None
        self.messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.closed = False  # once it is True, nobody reads messages
        self.finishing = False

    @property
    def tracker(self) -> ProcessTracker:
        """This tracker: the run is in the other process, and a call of it there cannot delay or fail the training.

        So `accelerator.get_tracker(name, unwrap=True)` returns this object, whose `log` takes numbers of your own.
        """
        return self

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Start the process, and the run in it with its settings."""
        try:
            self.process = subprocess.Popen(
                [*own_python(self.module), *(as_text(word).encode() for word in sys.argv)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                # Whatever the locale, files are named and written in UTF-8.
                env={**self.environment(), "PYTHONUTF8": "1"},
                start_new_session=True,  # without a terminal it asks no questions and gets no Ctrl-C
            )
        except OSError as error:
            self.closed = True
            self.print_line(f"warning: {self.title} cannot be started ({error.strerror}); training continues")
            return
        self._threads = [
            threading.Thread(target=work, args=(self.process,), daemon=True) for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()
        config = {key: as_text(value) for key, value in values.items()}
        self._send("start", folder=str(self.folder.absolute()), config=config, timeout=self.timeout, **self.arguments)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self._send("log", values=values, step=step, axis=axis_of(values))

    def finish(self, timeout: float = FINISH_SECONDS) -> None:
        """Close the run; data that is not sent in time stays on disk, if the tracker stores it there."""
        if self.process is None:
            return
        self._send("finish")
        self.messages.put(None)
        self.finishing = True
        set_group_niceness(self.process.pid, 0)  # the training no longer needs the cores
        timeout = min(timeout, self.timeout) + EXIT_SECONDS
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.print_line(f"warning: {self.title} has not ended after {timeout:.0f} s; {self.where_the_rest_is()}")
            kill_children(self.process.pid)
            self.process.kill()
        for thread in self._threads:
            thread.join(1)
        self.process = None

    def fail(self, reason: str) -> None:
        self._send("fail", reason=reason)
        end = time.monotonic() + LAST_MESSAGE_SECONDS
        while not (self.closed or self.messages.empty()) and time.monotonic() < end:
            time.sleep(0.01)

    def environment(self) -> dict[str, str]:
        """Return the environment of the process."""
        return dict(os.environ)

    def where_the_rest_is(self) -> str:
        """Return the end of the warning that the process was killed."""
        return "what it has not sent is lost"

    def _send(self, method: str, **arguments: Any) -> None:
        if not self.closed:
            self.messages.put({"method": method, **arguments})

    def _write(self, process: subprocess.Popen[str]) -> None:
        """Write messages to the process until it is closed or has ended; later messages are dropped."""
        assert process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended and printed the reason
            while message := self.messages.get():
                process.stdin.write(json.dumps(message, default=str) + "\n")
                process.stdin.flush()
            process.stdin.close()
        self.closed = True

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Print the replies of the process; stop the training if one requests that.

        The process starts beside the start of the training, and then gets the cores that the training leaves.
        """
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError, TypeError, KeyError):  # not a reply of `Session`
                reply = json.loads(line)
                if reply["print"]:
                    self.print_line(reply["print"])
                if reply.get("started") and not self.finishing:
                    set_group_niceness(process.pid, GROUP_NICENESS)
                if reply.get("stop"):
                    os.kill(os.getpid(), signal.SIGTERM)
