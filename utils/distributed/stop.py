"""Stop on a signal or at the time limit, at the same optimizer step on all processes.

Called by utils/run.py; launch and utils/python_api.py use the signals.
"""

from __future__ import annotations

import signal
import socket
import threading
import time

import psutil

from utils.distributed.failure import hard_exit
from utils.distributed.ranks import ranks, run_store, world_size
from utils.errors import Stopped

TIME_LIMIT = "time"  # reason of a stop that no signal has requested
# Windows has only the first two signals.
STOP_SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"))
SECOND_INTERRUPT_SECONDS = 0.5  # least time between two Ctrl-C, because a single one may arrive more than once


class StopRequested(Stopped):
    """All processes stop early, at the same step, for a `reason`: the name of a signal, or `TIME_LIMIT`."""

    def __init__(self, reason: str) -> None:
        self.reason, self.by_time_limit = reason, reason == TIME_LIMIT
        super().__init__(0 if self.by_time_limit else 128 + signal.Signals[reason])


def stop_signals() -> list[signal.Signals]:
    """Return the signals that stop a run: `STOP_SIGNALS`, without SIGHUP if it is ignored, as under nohup."""
    return [n for n in STOP_SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]


class GracefulStop:
    """Receives signals in the `with`, and checks the time limit: `hours` from the start of this process, 0 for none.

    The first signal requests a stop at the end of a step; a second Ctrl-C, or any signal once the run is `finished`,
    ends the process at once.
    """

    def __init__(self, hours: float = 0.0) -> None:
        self.deadline = psutil.Process().create_time() + hours * 3600 if hours else float("inf")
        self.signal, self.since, self.finished = "", 0.0, False

    def __enter__(self) -> GracefulStop:
        # A thread reads the number of a signal from a socket. Python's own handlers would run in the main thread, which
        # may be waiting in C code for a long time.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in stop_signals()}
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None or (self.finished and world_size() > 1):
            return  # this process is about to print the error and exit: the launcher's SIGTERM must not end it before
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._sender.close()

    def _listen(self) -> None:
        while received := self._receiver.recv(1):
            number, before = received[0], self.signal
            if number not in self._handlers:
                continue
            name, again = signal.Signals(number).name, time.monotonic() - self.since > SECOND_INTERRUPT_SECONDS
            if self.finished or (before and again and number == signal.SIGINT):
                reason = f"stopped by {name}; the run itself is finished" if self.finished else "interrupted"
                hard_exit("" if ranks().local_rank else reason, 128 + number)
            self.signal, self.since = name, time.monotonic()

    def after(self, step: int, behind: int = 0) -> str:
        """Return the reason for all processes to stop at the end of this optimizer step, '' to continue.

        The process that receives a signal writes a later step to the store. No process can have ended that step before,
        because gradients are reduced over all processes, so all processes read it in time. This process has not waited
        for the end of the last `behind` steps.
        """
        reason = self.signal or (TIME_LIMIT if ranks().rank == 0 and time.time() > self.deadline else "")
        if (store := run_store()) is None:
            return reason
        if reason:
            store.write_once("stop", [step + 1 + behind, reason])
        last_step, reason = store.value("stop") or (step + 1, "")
        return reason if step >= last_step else ""

    def requested(self) -> str:
        """Return the signal that any process has received, '' if none. Only `after` checks the time limit."""
        if not self.signal and (store := run_store()) and (stop := store.value("stop")):
            return stop[1].removeprefix(TIME_LIMIT)
        return self.signal
