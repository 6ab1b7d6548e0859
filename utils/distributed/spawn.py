"""Start the processes of a run on this machine without a launcher, and wait for them. Called by the scripts."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from types import FrameType

from utils.distributed.devices import processes_to_start
from utils.distributed.failure import run_main
from utils.distributed.ranks import SPAWNED, TOKEN, threads_per_process, world_size
from utils.distributed.rendezvous import LOOPBACK, loopback_store
from utils.distributed.stop import stop_signals
from utils.distributed.store import RunStore
from utils.errors import UserError

STORE_TIMEOUT = timedelta(minutes=5)  # torch's default
SHUTDOWN_SECONDS = 10.0  # time between the failure of a process and the killing of the others


def spawn(main: Callable[[], object], processes: int) -> bool:
    """Start processes on this machine, each of which calls `main`, and wait for all of them.

    Returns False without starting any if `processes` is 1 or if a launcher has started this process. If a process
    fails, the others are ended, and this one exits with the failed process's exit code. Signals are passed on.
    """
    if processes == 1 or world_size() > 1 or "LOCAL_RANK" in os.environ:
        return False
    # The parent hosts the store: its port is taken from now on, and it outlives the processes.
    store = loopback_store(0, STORE_TIMEOUT)
    environment = {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(store.port),
        SPAWNED: "1",
        TOKEN: secrets.token_hex(16),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # tells torch that the store is already hosted
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    at_import = {  # variables that are read when torch is imported, before `_enter`
        "OMP_NUM_THREADS": str(threads_per_process(processes)),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # else each process prints a stack if another one ends
    }
    added = {name: value for name, value in at_import.items() if name not in os.environ}
    loader_start_method = multiprocessing.get_start_method()
    started = [
        multiprocessing.get_context("spawn").Process(target=_enter, args=(rank, main, environment, loader_start_method))
        for rank in range(processes)
    ]
    os.environ.update(added)
    try:
        for process in started:
            process.start()
    finally:
        for name in added:
            del os.environ[name]
    _wait(started, RunStore(store, token=environment[TOKEN]))
    return True


def spawn_for_devices(main: Callable[[], object], device: str, processes: int) -> bool:
    """Spawn a process for each device of --device, or as many as --processes, by `spawn`."""
    return spawn(main, processes_to_start(device, processes))


def _enter(rank: int, main: Callable[[], object], environment: dict[str, str], loader_start_method: str) -> None:
    # A spawned process would spawn its loader processes too, each with a copy of the data set.
    multiprocessing.set_start_method(loader_start_method, force=True)
    with suppress(OSError, AttributeError):  # Windows has no process groups
        os.setpgid(0, 0)  # a terminal's Ctrl-C reaches the parent only, which passes it on
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until GracefulStop handles it
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    run_main(main)


def _wait(started: Sequence[SpawnProcess], store: RunStore) -> None:
    """Wait for all processes; if one fails, exit with its code, or raise a `UserError` that names it."""
    received: list[int] = []  # numbers of the received signals

    def pass_on(number: int, frame: FrameType | None) -> None:
        again = bool(received) and number == signal.SIGINT
        received.append(number)
        for process in started:
            if process.is_alive():
                process.kill() if again else os.kill(process.pid or 0, number)

    before = {number: signal.signal(number, pass_on) for number in stop_signals()}
    failed: list[int] = []  # ranks in the order of their failure
    end, why = float("inf"), ""
    try:
        while alive := [process for process in started if process.is_alive()]:
            wait([process.sentinel for process in alive], timeout=1.0)
            failed += [r for r, process in enumerate(started) if process.exitcode and r not in failed]
            if failed and end == float("inf"):
                end = time.monotonic() + SHUTDOWN_SECONDS
                why = "" if received else _why_killed(failed[0], started[failed[0]].exitcode or 0, store)
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
    if received and min(codes) < 0:
        raise KeyboardInterrupt
    if any(codes):
        sys.exit(max(*codes, 1))  # a process has printed the reason


def _why_killed(rank: int, code: int, store: RunStore) -> str:
    """Describe the death of a process by a signal; return '' if it or another process has printed the reason."""
    if code > 0 or store.count("failed") > 1:
        return ""
    return (
        f"process {rank} on {socket.gethostname()} was killed by {signal.Signals(-code).name}, possibly by the system "
        "because memory ran out"
    )
