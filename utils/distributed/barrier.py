"""What the processes of a run do each in its own time: those that are done wait, and not in a collective."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import distributed

from utils.distributed.exit import names, tell, told
from utils.distributed.ranks import key, place, run_store
from utils.errors import UserError

BEAT = 1.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without any, after which those that wait give up
_numbers = itertools.count()


@contextmanager
def in_own_time() -> Iterator[None]:
    """Each process does what is in the `with`, however long it takes, and then waits until all have done it.

    A download may take hours on one machine only. There is no time limit, therefore; but a process that has ended
    without a word is found out, for those that are not there yet give signs of life at the run's store. One that fails
    says so as everywhere. Raises `UserError` with the names of those that are gone.
    """
    store, processes = run_store(), place().processes
    if store is None or processes == 1:
        yield
        return
    name, done = f"own_time/{next(_numbers)}", threading.Event()
    threading.Thread(target=_beat, args=(store, key(f"{name}/beats"), done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
    tell(name, "")
    store.add(key(f"{name}/count"), 1)
    _wait(store, name, processes)


def _beat(store: distributed.Store, beats: str, done: threading.Event) -> None:
    with suppress(RuntimeError):
        while not done.wait(BEAT):
            store.add(beats, 1)


def _wait(store: distributed.Store, name: str, processes: int) -> None:
    beats, since, pause = -1, time.monotonic(), 0.005
    while store.add(key(f"{name}/count"), 0) < processes:
        before, beats = beats, store.add(key(f"{name}/beats"), 0)  # of all together: those that are here do not beat
        if beats != before:
            since = time.monotonic()
        elif time.monotonic() - since > SILENCE:
            gone = sorted(set(range(processes)) - set(told(name)))
            raise UserError(
                f"{names(gone)} ended without a word, or cannot be reached: no sign of life for {SILENCE:g} s while "
                "the others waited for the start"
            )
        time.sleep(pause)
        pause = min(2 * pause, BEAT)
