"""The loader processes of this process, which end together with it. Called by data/batches.py and exit."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import re
import signal
import threading
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # of Linux's prctl
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT_BYTES, LARGEST_REUSED_BYTES = 2**28, 2**25  # of free memory in a loader process, and of a block in it
PARENT_POLL_SECONDS = 1.0  # between two checks whether the training process has ended


def shield_worker(number: int) -> None:
    """Make a loader process ignore signals sent to the whole job, and end on its parent's SIGTERM or with its parent.

    A `worker_init_fn` of torch's DataLoader.
    """
    parent = os.getppid()
    _keep_freed_memory()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # on Linux it ends at once with its parent
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_end, args=(parent,), daemon=True).start()


def _keep_freed_memory() -> None:
    """Let this process reuse the memory of images, of a megabyte each, instead of returning it to the system each time.

    The system fills the pages of new memory with zeros, which took as long as most of the augmentation.
    """
    with suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_REUSED_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def _await_end(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, PARENT_POLL_SECONDS)
        if received and received.si_pid == parent:
            break
    os._exit(0)


def end_workers() -> None:
    """Terminate the loader processes of this process; if they were killed torch would print errors."""
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(1)


def loader_died(error: Exception) -> str:
    """Describe the error of a loader process that was killed; return '' for any other error."""
    text = str(error)
    if not isinstance(error, RuntimeError) or "DataLoader worker" not in text:
        return ""
    if "unable to allocate shared memory(shm)" in text or "killed by signal: Bus error" in text:
        return "a loader process ran out of shared memory: make /dev/shm larger (docker --shm-size), or lower --workers"
    if re.search(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)", text):
        return "a loader process was killed, possibly by the system because memory ran out; if so, lower --workers"
    return ""
