"""The run's store: everything that its processes exchange outside collectives.

Every key is lockstep/[<run>/]<restart of the launcher>/<topic>/<name>[/<rank>], every value is JSON, counters are
numbers. Torch's stores do not authenticate their clients. If the environment has a secret token, as `spawn` sets it,
<run> is derived from the token, values are signed with it, and values with another signature are ignored.

Over `run_store`:
    names, failed, alarm, present    names of all processes, number of failed ones, survivors (failure)
    heartbeats                       state of each process if none makes progress (failure)
    stop                             step and reason of a stop (stop)
    barrier/<number>                 processes that have arrived (failure)
    memory/<host>/<number>           handles of shared memory (shared_memory)
Over a connection of the doctor's own, if there is no process group:
    doctor/...                       facts about each process (utils/doctor/doctor.py)

Only this module reads and writes torch's stores; rendezvous and spawn make a run's store. Called by utils/distributed/
and utils/doctor/.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from torch import distributed

from utils.distributed.ranks import TOKEN, launch_number, ranks, store_is_hosted

T = TypeVar("T")
ANSWER_SECONDS = 3.0  # time that `query_store` waits; the store's process may have ended, or the network may be down


class RunStore:
    """Values and counters of the processes of a run, in one of torch's stores.

    Reading and writing raise torch's `DistError` if the store does not answer, which takes many minutes if the network
    is down; see `query_store`.

    Args:
        topic: prefix of all names
        token: the run's secret; by default the token in the environment
    """

    def __init__(self, store: distributed.Store, topic: str = "", token: str = "") -> None:
        self._store, self._topic, self._ranks = store, topic, ranks()
        self._token = token or os.environ.get(TOKEN, "")

    # A value of each rank

    def write(self, name: str, value: Any) -> None:
        """Write this process's value, which must not be None."""
        key = self._key(f"{name}/{self._ranks.rank}")
        self._store.set(key, self._signed(key, value))

    def values(self, name: str) -> dict[int, Any]:
        """Return the values written so far, by rank."""
        keys = {rank: self._key(f"{name}/{rank}") for rank in range(self._ranks.world_size)}
        written = {
            rank: self._verified(key, self._store.get(key)) for rank, key in keys.items() if self._store.check([key])
        }
        return {rank: value for rank, value in written.items() if value is not None}

    # One value for all

    def write_once(self, name: str, value: Any) -> None:
        """Write a value, which must not be None, unless a process has already written one."""
        self._store.compare_set(self._key(name), "", self._signed(self._key(name), value))

    def value(self, name: str) -> Any:
        """Return the value of `write_once`, None if there is none."""
        return self.wait_for_value(name) if self._store.check([self._key(name)]) else None

    def wait_for_value(self, name: str) -> Any:
        """Wait for the value of `write_once`, None if it is forged. Raises `DistError` after the store's time-out."""
        return self._verified(self._key(name), self._store.get(self._key(name)))

    # Counters

    def count(self, name: str, by: int = 1) -> int:
        """Add to a counter; return its new value."""
        return self._store.add(self._key(name), by)

    def _key(self, name: str) -> str:
        return store_key(f"{self._topic}/{name}" if self._topic else name, self._token)

    def _signed(self, key: str, value: Any) -> str:
        text = json.dumps(value)
        return f"{text}\n{self._signature(key, text)}" if self._token else text

    def _verified(self, key: str, data: bytes) -> Any:
        """Return a value from the store, None if the signature is not the run's."""
        text, _, signature = data.decode(errors="replace").partition("\n")
        if self._token and not hmac.compare_digest(signature.encode(), self._signature(key, text).encode()):
            return None
        return json.loads(text)

    def _signature(self, key: str, text: str) -> str:
        return hmac.new(self._token.encode(), f"{key}\n{text}".encode(), hashlib.sha256).hexdigest()


def restart_count() -> int:
    """Return how many times the launcher that hosts the store has restarted the processes (`--max_restarts`).

    0 if the main process hosts the store, which is then new after each restart; a machine that rejoins counts from 0
    itself.
    """
    return launch_number("TORCHELASTIC_RESTART_COUNT") if store_is_hosted() else 0


def store_key(name: str, token: str) -> str:
    """Return the key of a name in a store that may be reused when the launcher restarts the processes."""
    run = hashlib.sha256(token.encode()).hexdigest()[:16] if token else ""
    return "/".join(filter(None, ("lockstep", run, str(restart_count()), name)))


def run_store(topic: str = "") -> RunStore | None:
    """Return the store of the process group, None without one.

    This is the innermost of torch's stores, in which all processes see the same keys.
    """
    if not distributed.is_initialized():
        return None
    store = distributed.distributed_c10d._get_default_store()
    while isinstance(store, distributed.PrefixStore):
        store = store.underlying_store
    return RunStore(store, topic)


_unanswered: list[RunStore] = []  # the run's store, once it has failed to answer in time


def query_store(question: Callable[[RunStore], T], otherwise: T) -> T:
    """Return the result of `question` for the run's store, or `otherwise` if there is none or it does not answer.

    After `ANSWER_SECONDS` without an answer the store is never asked again.
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
