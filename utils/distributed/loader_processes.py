"""The loader processes of this process, which end together with it. Called by data/batches.py and failure."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path

from filelock import FileLock, Timeout

from utils.birth import parent_number
from utils.distributed.allocator import keep_freed_memory

PR_SET_PDEATHSIG = 1  # option of Linux's prctl
KEPT_BYTES = 2**28  # free memory that a loader process keeps
MAX_SOCKET_FOLDER_BYTES = 107 - len("/listener-12345678")  # a socket's path has at most 107 bytes
IN_USE = "in-use"  # file in a folder of sockets that the folder's process keeps locked
PARENT_POLL_SECONDS = 1.0  # interval of the checks whether the training process has ended


def share_temporary_folder() -> None:
    """Make the folder of multiprocessing's sockets in this process, before it starts loader processes.

    The loader processes use the folder too. Folders of their own would stay on the disk, because they end without
    cleaning up. Without the folder they could send nothing, and the training process would wait forever. If the path is
    too long for a socket, a folder below /tmp takes its place. Folders of killed processes are removed.
    """
    os.makedirs(folder := get_temp_dir(), mode=0o700, exist_ok=True)
    if len(os.fsencode(folder)) > MAX_SOCKET_FOLDER_BYTES:
        short = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        multiprocessing.process.current_process()._config["tempdir"] = short  # type: ignore[attr-defined]
        Finalize(None, shutil.rmtree, args=(short, True), exitpriority=-100)
    with suppress(OSError, NotImplementedError):  # the disk has no locks
        _keep_locked(Path(get_temp_dir()))


_locks: list[FileLock] = []  # held until this process ends


def _keep_locked(folder: Path) -> None:
    """Lock this process's folder of sockets, and remove folders beside it whose process has ended."""
    if _locks:
        return
    _locks.append(FileLock(folder / f"{IN_USE}.new", timeout=0))
    _locks[0].acquire()
    (folder / f"{IN_USE}.new").rename(folder / IN_USE)  # nobody finds it before it is locked
    for mark in folder.parent.glob(f"pymp-*/{IN_USE}"):
        with suppress(OSError, Timeout), FileLock(mark, timeout=0):
            shutil.rmtree(mark.parent)


def remove_temporary_folders() -> None:
    """Remove multiprocessing's folder of sockets and all `TemporaryDirectory`s, before an exit that cleans nothing up.

    W&B makes a `TemporaryDirectory` for each table. A loader process removes nothing, and a process that
    multiprocessing has started keeps the folder of sockets, because they may belong to the parent.
    """
    if multiprocessing.parent_process() is None:
        shutil.rmtree(get_temp_dir(), ignore_errors=True)
    if not multiprocessing.current_process().daemon:
        for made in [each for each in gc.get_objects() if type(each) is tempfile.TemporaryDirectory]:
            with suppress(Exception):  # any package may have made it
                made.cleanup()


def init_worker(number: int) -> None:
    """Make a loader process ignore signals sent to the whole job, and end on its parent's SIGTERM or with its parent.

    A `worker_init_fn` of torch's DataLoader.
    """
    parent = parent_number()
    # W&B's import hooks call a thread that a forked process lacks; a user's function may import a package.
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("wandb.")]
    keep_freed_memory(KEPT_BYTES)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # on Linux it ends at once with its parent
    signal.set_wakeup_fd(-1)
    for name in ("SIGINT", "SIGUSR1", "SIGHUP"):
        if hasattr(signal, name):  # Windows has only the first signal
            signal.signal(getattr(signal, name), signal.SIG_IGN)
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
    """Terminate the loader processes of this process, which is about to end; killed ones would print errors.

    A loader process that has only just started is killed by the signal, which torch's SIGCHLD handler would report as
    an error.
    """
    handler = None
    with suppress(AttributeError, ValueError):  # Windows has no SIGCHLD, and only the main thread may set handlers
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    workers = multiprocessing.active_children()
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join(1)
    if handler is not None:
        signal.signal(signal.SIGCHLD, handler)
