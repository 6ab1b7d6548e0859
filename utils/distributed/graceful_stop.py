"""Stopping early in good order: signals and the time limit, at an optimizer step that all processes agree on.

Called by utils/run.py.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from types import TracebackType

import psutil

from utils.distributed.exit import TIME_LIMIT, give_up
from utils.distributed.ranks import ranks, speaks_for_machine
from utils.distributed.store import run_store

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
SECOND_INTERRUPT_SECONDS = 0.5  # between two Ctrl-C that are two: one may arrive more than once


class GracefulStop:
    """Watches for signals, within a `with`, and the time limit. A first signal requests the stop at the end of a step;
    a second Ctrl-C ends the process at once.

    hours: the time limit, counted from the start of this process; 0 for none.
    """

    def __init__(self, hours: float = 0.0) -> None:
        self.deadline = psutil.Process().create_time() + hours * 3600 if hours else float("inf")
        self.signal, self.since = "", 0.0

    def __enter__(self) -> GracefulStop:
        # The number of a signal is written to a socket at once and read by a thread, whatever the main thread waits
        # for; Python's own handlers wait until it is back from there.
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return  # this process ends, and has to print why: the launcher's SIGTERM, for all that are left, can wait
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._sender.close()

    def _listen(self) -> None:
        while received := self._receiver.recv(1):
            number = received[0]
            if number not in STOP_SIGNALS:
                continue
            again = self.signal and time.monotonic() - self.since > SECOND_INTERRUPT_SECONDS
            if again and number == signal.SIGINT:
                give_up("interrupted" if speaks_for_machine() else "", 128 + number)
            self.signal, self.since = signal.Signals(number).name, time.monotonic()

    def after(self, step: int) -> str:
        """Return, at the end of an optimizer step, why all processes are to stop here: a signal's name, `TIME_LIMIT`,
        or '' to go on.

        The process that gets a signal writes down the next step: no process can have ended that one before, for its
        gradients are shared, and so all read it there.
        """
        reason = self.signal or (TIME_LIMIT if ranks().rank == 0 and time.time() > self.deadline else "")
        store = run_store()
        if store is None:
            return reason
        if reason:
            store.write_once("stop", [step + 1, reason])
        if (stop := store.value("stop")) is None:
            return ""
        last_step, reason = stop
        return reason if step >= last_step else ""

    def requested(self) -> str:
        """Return the signal, whichever process got it, that requests a stop before the next step; the time limit can
        wait for a step."""
        store = run_store()
        if not self.signal and store is not None and (stop := store.value("stop")):
            return "" if stop[1] == TIME_LIMIT else stop[1]
        return self.signal
