"""What the processes of a launch tell each other at the store where they meet, before a run or without one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from torch import distributed

from utils.distributed.ranks import key, place
from utils.errors import UserError

SLACK = 5.0  # seconds for what should take none
STEP = 0.05  # seconds between two looks at what others have written


class Board:
    """What processes write for each other at a store, by name and rank; `about` keeps its names from others."""

    def __init__(self, store: distributed.Store, about: str) -> None:
        self.store = distributed.PrefixStore(key(about), store)
        self.own = place()

    def put(self, name: str, value: Any) -> None:
        """Write this process's value, a JSON one, and count that it is written."""
        self.store.add(f"{name}/{self.own.rank}/times", 1)
        self.store.set(f"{name}/{self.own.rank}", json.dumps(value))  # last: who sees it may take the store away

    def times(self, name: str, rank: int) -> int:
        """How often a rank's value was written."""
        return self.store.add(f"{name}/{rank}/times", 0)

    def read(self, name: str, seconds: float) -> dict[int, Any]:
        """The values of those ranks that write one within so many seconds."""
        found: dict[int, Any] = {}
        for found in self._readings(name, range(self.own.processes), seconds):
            if len(found) == self.own.processes:
                break
        return found

    def of_main(self, name: str, seconds: float) -> Any:
        """The main process's value. Raises `UserError` where it does not come."""
        for found in self._readings(name, (0,), seconds):
            if found:
                return found[0]
        raise UserError(
            f"the main process has not answered for {seconds:g} s: see what it printed, and whether the network is cut"
        )

    def leave(self, name: str) -> None:
        """Wait, not for long, for those that have written a `name`: the main process may hold the store, and its end
        be theirs."""
        self.put("left", True)
        came = [rank for rank in range(self.own.processes) if self.times(name, rank)]
        if self.own.rank == 0:
            next((found for found in self._readings("left", came, SLACK) if len(found) == len(came)), None)

    def _readings(self, name: str, ranks: Sequence[int], seconds: float) -> Iterator[dict[int, Any]]:
        """What is there of these ranks, again and again for so many seconds. To wait at the store makes torch talk."""
        end = time.monotonic() + seconds
        while True:
            keys = {rank: f"{name}/{rank}" for rank in ranks}
            yield {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
            if time.monotonic() > end:
                return
            time.sleep(STEP)
