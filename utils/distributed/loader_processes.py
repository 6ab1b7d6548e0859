"""Loader processes of this process: they end with it, neither before nor after. Called by data/batches.py and exit."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # of Linux's prctl
PARENT_POLL_SECONDS = 1.0  # between two looks whether the training process is gone


def shield_worker(number: int) -> None:
    """Ignore signals to the whole job, which are for the training process; end on its signal, or if it is gone.

    Called in each loader process as it starts.
    """
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux: at once when the parent dies
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_end, args=(parent,), daemon=True).start()


def _await_end(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_POLL_SECONDS)
        if received and received.si_pid == parent:
            break
    os._exit(0)


def end_workers() -> None:
    """End the loader processes that this one has started; if they were killed torch would print errors."""
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(1)


def loader_died(error: Exception) -> str:
    """Return a sentence for a loader process that has ended by itself; '' for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in text:
        return ""
    if "unable to allocate shared memory(shm)" in text or "killed by signal: Bus error" in text:
        return "a loader process ran out of shared memory: make /dev/shm larger (docker --shm-size), or lower --workers"
    if re.search(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", text):
        return "a loader process was ended; if nobody did that, the system was short of memory: lower --workers"
    return ""
