"""End a run that makes no progress, and name the process that the others wait for. Called by utils/run.py."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from utils.distributed.exit import give_up_after_first, process_names, raise_alarm, tell_of_failure
from utils.distributed.ranks import ranks, world_size
from utils.distributed.store import ask_run_store

POSITIONS_SECONDS = 3.0  # in which the other processes write their positions
# Code that waits for other processes: a collective, or backward, which ends in one.
WAITING = ("torch/distributed/", "torch/autograd/", "deepspeed/comm/")


class Position(NamedTuple):
    """The state of a process without progress: its batches so far, and whether it waits for other processes."""

    batches: int
    waits: bool


class Watchdog:
    """Ends a process if `beat` was not called for `timeout` seconds within the `with`; names the process at fault.

    Each process writes its Python stacks into `folder`/stacks. A single process is not watched.
    """

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.file = timeout, folder / "stacks" / f"process{ranks().rank}.txt"
        self.batches, self.last, self.on = 0, time.monotonic(), False

    def beat(self) -> None:
        """Reset the timer: this process starts its next batch."""
        self.batches += 1
        self.last = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.beat()
        self.on = world_size() > 1
        if self.on:
            threading.Thread(target=self.watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.on = False

    def watch(self) -> None:
        """Call `end` if there is no beat for `timeout` seconds; return at the end of the `with`."""
        while self.on:
            time.sleep(min(self.timeout / 10, 1.0))
            if self.on and time.monotonic() - self.last > self.timeout:
                self.end()

    def end(self) -> None:
        """Write the stacks and the position of this process, and exit with all processes."""
        waits = is_waiting(sys._current_frames()[threading.main_thread().ident or 0])
        position = Position(self.batches, waits)
        ask_run_store(lambda store: store.write("positions", position), None)
        with suppress(OSError):  # on a full disk the process must end too
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        tell_of_failure(f"no progress for {self.timeout:g} s (--dist-timeout); the stacks are in {self.file.parent}")
        raise_alarm()
        time.sleep(POSITIONS_SECONDS)
        give_up_after_first(lambda: self._explain(position))

    def _explain(self, position: Position) -> str:
        written: dict[int, list] = ask_run_store(lambda store: store.values("positions"), {})
        positions = {rank: Position(*values) for rank, values in written.items()}
        positions[ranks().rank] = position  # in case the store cannot be reached
        late = late_ranks(world_size(), positions)
        what = "made no progress" if late <= set(positions) else "made no progress, or could not be reached,"
        who = f"{process_names(sorted(late))} {what}" if late else "no process made progress"
        return (
            f"error: {who} for {self.timeout:g} s (--dist-timeout) while the others waited; the stack of each process "
            f"is in {self.file.parent}"
        )


def is_waiting(frame: FrameType | None) -> bool:
    """Return whether a stack ends in a wait for other processes. frame: the innermost one."""
    while frame is not None:
        name = frame.f_code.co_filename.replace("\\", "/")
        if any(part in name for part in WAITING):
            return True
        frame = frame.f_back
    return False


def late_ranks(processes: int, positions: dict[int, Position]) -> set[int]:
    """Return the ranks that the others wait for: those without a position, those not waiting, or those behind."""
    absent = set(range(processes)) - set(positions)
    if absent:
        return absent
    busy = {rank for rank, position in positions.items() if not position.waits}
    if busy and len(busy) < processes:
        return busy
    behind = min(position.batches for position in positions.values())
    late = {rank for rank, position in positions.items() if position.batches == behind}
    return late if len(late) < processes else set()
