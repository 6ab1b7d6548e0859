"""The run's store: everything that its processes exchange outside of collectives.

Every key is lockstep/<restart of the launcher>/<topic>/<name>[/<rank>], every value is JSON, counters are numbers.

Over `run_store`:
    names, failed, alarm, present    names of all processes, number of failed ones, survivors (failure)
    heartbeats                       state of each process if none makes progress (failure)
    stop                             step and reason of a stop (stop)
    barrier/<number>/...             processes that have arrived, and heartbeats of the others (barrier)
    memory/<host>/<number>           handles of shared memory (shared_memory)
Over a connection of the doctor's own, without a process group:
    doctor/...                       facts about each process (utils/doctor/doctor.py)

Only this module reads and writes torch's stores; rendezvous and spawn make those of a run. Called by
utils/distributed/ and utils/doctor/.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torch import distributed

from utils.distributed.ranks import ranks

T = TypeVar("T")
ANSWER_SECONDS = 3.0  # that `query_store` waits; the store's process may have ended, or the network may be down


class RunStore:
    """Values and counters of the processes of a run, in one of torch's stores.

    topic: prefix of all names. Reading and writing raise torch's `DistError` if the store does not answer, which takes
    many minutes if the network is down: see `query_store`.
    """

    def __init__(self, store: distributed.Store, topic: str = "") -> None:
        self._store, self._topic, self._ranks = store, topic, ranks()

    # A value of each rank

    def write(self, name: str, value: Any) -> None:
        """Write this process's value."""
        self._store.set(self._key(f"{name}/{self._ranks.rank}"), json.dumps(value))

    def values(self, name: str) -> dict[int, Any]:
        """Return the values written so far, by rank."""
        keys = {rank: self._key(f"{name}/{rank}") for rank in range(self._ranks.world_size)}
        return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}

    # One value for all

    def write_once(self, name: str, value: Any) -> None:
        """Write a value unless a process has already written one."""
        self._store.compare_set(self._key(name), "", json.dumps(value))

    def value(self, name: str) -> Any:
        """Return the value of `write_once`, None if there is none."""
        return json.loads(self._store.get(self._key(name))) if self.is_written(name) else None

    def is_written(self, name: str) -> bool:
        """Return whether `write_once` was called."""
        return self._store.check([self._key(name)])

    def wait_for_value(self, name: str) -> Any:
        """Wait for the value of `write_once`. Raises `DistError` after the store's time-out."""
        return json.loads(self._store.get(self._key(name)))

    # Counters

    def count(self, name: str, by: int = 1) -> int:
        """Add to a counter; return its new value."""
        return self._store.add(self._key(name), by)

    def _key(self, name: str) -> str:
        return store_key(f"{self._topic}/{name}" if self._topic else name)


def restart_count() -> int:
    """Return how many times the launcher has restarted the processes (`--max_restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def store_key(name: str) -> str:
    """Return the key of a name in a store that may be reused when the launcher restarts the processes."""
    return f"lockstep/{restart_count()}/{name}"


def run_store() -> RunStore | None:
    """Return the store of the process group, None without one.

    It is the innermost of torch's stores, in which all processes see the same keys.
    """
    if not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return RunStore(store)


_unanswered: list[RunStore] = []  # the run's store, after it has not answered in time


def query_store(question: Callable[[RunStore], T], otherwise: T) -> T:
    """Return the result of `question` for the run's store, or `otherwise` if there is none or it does not answer.

    After `ANSWER_SECONDS` without an answer it is never asked again.
    """
    store, answer = run_store(), [otherwise]
    if store is None or _unanswered:
        return otherwise

    def ask() -> None:
        with suppress(RuntimeError):
            answer.append(question(store))

    # In a thread: if the network is down, the call takes many minutes.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if thread.is_alive():
        _unanswered.append(store)
    return answer[-1]
