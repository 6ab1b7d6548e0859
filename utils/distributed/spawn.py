"""Starting a run's processes on this machine without a launcher, and waiting for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from torch import distributed

from utils.distributed.exit import run_main
from utils.distributed.graceful_stop import SIGNALS
from utils.distributed.ranks import SPREAD, key, place
from utils.errors import UserError

GRACE = 10.0  # seconds that the others have when one process has failed: to say why, to see it, to end


def fair_threads(processes: int) -> int:
    """Threads for each of so many processes of this machine: with more than cores they would slow each other down."""
    return max((os.cpu_count() or 1) // processes, 1)


def spread(main: Callable[[], object], processes: int) -> bool:
    """Start so many processes on this machine, each of which calls `main`, and wait for all of them.

    False, with nothing done, where this process is to do the work itself: it is to be the only one, or a launcher has
    started it. When one process fails the others are ended, and this one exits with its code. Signals are handed on.
    """
    if processes == 1 or place().processes > 1 or "LOCAL_RANK" in os.environ:
        return False
    # The store where they meet is held here: its port is taken from now on, and it outlives any of them.
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        SPREAD: "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: nobody needs to open the store
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    os.environ.setdefault("OMP_NUM_THREADS", str(fair_threads(processes)))  # torch reads it once, at its start
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else each tells with its stack that the others are gone
    workers = multiprocessing.get_start_method()
    started = [
        multiprocessing.get_context("spawn").Process(target=_enter, args=(rank, main, environment, workers))
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    _wait(started, store)
    return True


def _enter(rank: int, main: Callable[[], object], environment: dict[str, str], workers: str) -> None:
    # A spawned process would spawn its loader's processes too, each with a copy of all that they read.
    multiprocessing.set_start_method(workers, force=True)
    with suppress(OSError):
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the process that started this one, which hands it on
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    run_main(main)


def _wait(started: Sequence[SpawnProcess], store: distributed.Store) -> None:
    """Wait for all; where one fails, exit with its code or raise `UserError` with a sentence that names it."""
    asked: list[int] = []  # signals to end

    def hand_on(number: int, frame: FrameType | None) -> None:
        again = bool(asked) and number == signal.SIGINT
        asked.append(number)
        for process in started:
            if process.is_alive():
                process.kill() if again else os.kill(process.pid or 0, number)

    before = {number: signal.signal(number, hand_on) for number in SIGNALS}
    failed: list[int] = []  # ranks, in their order
    end, why = float("inf"), ""
    try:
        while alive := [process for process in started if process.is_alive()]:
            wait([process.sentinel for process in alive], timeout=1.0)
            failed += [r for r, process in enumerate(started) if process.exitcode and r not in failed]
            if failed and end == float("inf"):
                end = time.monotonic() + GRACE
                why = "" if asked else _why_killed(failed[0], started[failed[0]].exitcode or 0, store)
            if time.monotonic() > end:
                for process in alive:
                    process.kill()
    finally:
        for process in started:
            process.kill()
        for number, handler in before.items():
            signal.signal(number, handler)
    codes = [process.exitcode or 0 for process in started]
    if why:
        raise UserError(why)
    if asked and min(codes) < 0:
        raise KeyboardInterrupt
    if any(codes):
        sys.exit(max(*codes, 1))  # somebody has said why


def _why_killed(rank: int, code: int, store: distributed.Store) -> str:
    """A sentence for a process that a signal has ended; '' where it has said something, or another one for it."""
    if code > 0 or store.add(key("failed"), 1) > 1:
        return ""
    return (
        f"process {rank} on {socket.gethostname()} was ended by {signal.Signals(-code).name}; where nobody did that, "
        "it may have been the system, short of memory"
    )
