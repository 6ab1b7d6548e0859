"""A barrier without a time limit, for downloads that may take hours on one machine. Called by utils/run.py."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from utils.distributed.failure import process_names
from utils.distributed.ranks import world_size
from utils.distributed.store import RunStore, query_store, run_store
from utils.errors import UserError

HEARTBEAT_SECONDS = 1.0  # interval of a working process's heartbeats
SILENCE_LIMIT_SECONDS = 60.0  # time without any heartbeat after which the waiting processes give up
barrier_numbers = itertools.count()  # the same on all processes


@contextmanager
def untimed_barrier() -> Iterator[None]:
    """Let each process run the `with` block, however long it takes, then wait until all have finished it.

    Unlike a collective, the barrier has no time-out: processes that are still working send heartbeats through the run's
    store. Raises a `UserError` that names the processes that have ended without an error message.
    """
    store = run_store()
    if store is None or world_size() == 1:
        yield
        return
    name, done = f"barrier/{next(barrier_numbers)}", threading.Event()
    threading.Thread(target=_send_heartbeats, args=(store, f"{name}/heartbeats", done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
    query_store(lambda store: store.write(name, True), None)
    store.count(f"{name}/done")
    _wait(store, name, world_size())


def _send_heartbeats(store: RunStore, counter: str, done: threading.Event) -> None:
    with suppress(RuntimeError):
        while not done.wait(HEARTBEAT_SECONDS):
            store.count(counter)


def _wait(store: RunStore, name: str, processes: int) -> None:
    heartbeats, since, pause = -1, time.monotonic(), 0.005
    while store.count(f"{name}/done", 0) < processes:
        # All working processes share the counter; waiting ones send no heartbeats.
        before, heartbeats = heartbeats, store.count(f"{name}/heartbeats", 0)
        if heartbeats != before:
            since = time.monotonic()
        elif time.monotonic() - since > SILENCE_LIMIT_SECONDS:
            done: dict[int, bool] = query_store(lambda store: store.values(name), {})
            missing = sorted(set(range(processes)) - set(done))
            raise UserError(
                f"{process_names(missing)} ended without an error message, or cannot be reached: no heartbeat for "
                f"{SILENCE_LIMIT_SECONDS:g} s while the other processes waited"
            )
        time.sleep(pause)
        pause = min(2 * pause, HEARTBEAT_SECONDS)
