"""A watchdog over the processes of a run: if none moves any more, which one holds the others up?

Called by utils/run.py.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

from utils.distributed.exit import EXPLAIN_SECONDS, give_up, is_first_to_fail, process_names, raise_alarm
from utils.distributed.ranks import ranks, world_size
from utils.distributed.store import ask_run_store

POSITIONS_SECONDS = 3.0  # in which the other processes write where they are
# Where a process waits for others: in a collective, or in backward, which ends in one.
WAITING = ("torch/distributed/", "torch/autograd/", "deepspeed/comm/")


class Position(NamedTuple):
    """Where a process is that does not move: its batches so far, and whether it waits for other processes."""

    batches: int
    waits: bool


class Watchdog:
    """Within a `with`, ends a process that has not moved for `timeout` seconds, and prints which it waited for.

    Each process writes its Python stacks into `folder`/stacks. A process that runs alone is not watched.
    """

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.file = timeout, folder / "stacks" / f"process{ranks().rank}.txt"
        self.batches, self.last, self.on = 0, time.monotonic(), False

    def beat(self) -> None:
        """Note that this process has come to its next batch."""
        self.batches += 1
        self.last = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        self.on = world_size() > 1
        if self.on:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on = False

    def _watch(self) -> None:
        while self.on:
            time.sleep(min(self.timeout / 10, 1.0))
            if self.on and time.monotonic() - self.last > self.timeout:
                self._end()

    def _end(self) -> None:
        waits = is_waiting(sys._current_frames()[threading.main_thread().ident or 0])
        position = Position(self.batches, waits)
        ask_run_store(lambda store: store.write("positions", position), None)
        with suppress(OSError):  # a full disk must not keep it from ending
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        raise_alarm()
        time.sleep(POSITIONS_SECONDS)
        if not is_first_to_fail():
            time.sleep(EXPLAIN_SECONDS)
            give_up("", 1)
        written: dict[int, list] = ask_run_store(lambda store: store.values("positions"), {})
        positions = {rank: Position(*values) for rank, values in written.items()}
        positions[ranks().rank] = position  # the store may be beyond reach
        late = blamed(world_size(), positions)
        what = "did not move" if late <= set(positions) else "did not move, or could not be reached,"
        who = f"{process_names(sorted(late))} {what}" if late else "no process moved"
        give_up(
            f"error: {who} for {self.timeout:g} s (--dist-timeout) while the others waited; what each was doing stands "
            f"in {self.file.parent}",
            1,
        )


def is_waiting(frame: FrameType | None) -> bool:
    """Does this stack end in a wait for other processes?"""
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if any(part in name for part in WAITING):
            return True
        frame = frame.f_back
    return False


def blamed(processes: int, positions: dict[int, Position]) -> set[int]:
    """Return the ranks that hold the others up: those without a position, that do not wait, or that are behind."""
    absent = set(range(processes)) - set(positions)
    if absent:
        return absent
    busy = {rank for rank, position in positions.items() if not position.waits}
    if busy and len(busy) < processes:
        return busy
    behind = min(position.batches for position in positions.values())
    late = {rank for rank, position in positions.items() if position.batches == behind}
    return late if len(late) < processes else set()
