"""Ending early in good order: signals and the time limit, at an optimizer step that all processes agree on."""

from __future__ import annotations

import signal
import socket
import threading
import time
from types import TracebackType

import psutil

from utils.distributed.exit import give_up
from utils.distributed.ranks import key, place, run_store, speaks

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TIME = "time"
TWICE = 0.5  # seconds between two Ctrl-C that are two: one may arrive more than once


class Asked(Exception):
    """The run is asked to end early, at a point where all processes are: `word` is a signal's name or `TIME`."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


class Stop:
    """Watches for signals, within a `with`, and the time. A first signal asks for the end; a second Ctrl-C is the end.

    hours: of the time limit, counted from the start of this process; 0 for none.
    """

    def __init__(self, hours: float = 0.0) -> None:
        self.deadline = psutil.Process().create_time() + hours * 3600 if hours else float("inf")
        self.signal, self.since = "", 0.0

    def __enter__(self) -> Stop:
        # The number of a signal is written to a socket at once and read by a thread, whatever the main thread waits
        # for; Python's own handlers wait until it is back from there.
        self._ear, mouth = socket.socketpair()
        mouth.setblocking(False)
        self._mouth = mouth
        self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._woken = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return  # this process ends, and has to say why: the launcher's SIGTERM, for all that are left, can wait
        signal.set_wakeup_fd(self._woken)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._mouth.close()

    def _listen(self) -> None:
        while heard := self._ear.recv(1):
            number = heard[0]
            if number not in SIGNALS:
                continue
            if self.signal and number == signal.SIGINT and time.monotonic() - self.since > TWICE:
                give_up("interrupted" if speaks() else "", 128 + number)
            self.signal, self.since = signal.Signals(number).name, time.monotonic()

    def after(self, step: int) -> str:
        """At the end of an optimizer step: '', or the signal's name or `TIME` where all processes are to stop here.

        Who hears a signal writes down the next step: nobody can have ended that one before, for its gradients are
        shared, and so all read it there.
        """
        word = self.signal or (TIME if place().rank == 0 and time.time() > self.deadline else "")
        store = run_store()
        if store is None:
            return word
        if word:
            store.compare_set(key("stop"), "", f"{step + 1} {word}")
        if not store.check([key("stop")]):
            return ""
        at, word = store.get(key("stop")).decode().split()
        return word if step >= int(at) else ""

    def asked(self) -> str:
        """The signal that asks for the end, whichever process has heard it; the time limit can wait for a step."""
        store = run_store()
        if not self.signal and store is not None and store.check([key("stop")]):
            word = store.get(key("stop")).decode().split()[1]
            return "" if word == TIME else word
        return self.signal


def exit_code(word: str) -> int:
    """128 + the signal's number, as shells have it; 0 for the time limit."""
    return 0 if word == TIME else 128 + signal.Signals[word]
