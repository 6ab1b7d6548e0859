"""Watching over a run of many processes: when none moves any more, who holds them up?"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType

from utils.distributed.exit import PATIENCE, alarm, give_up, is_first, names, tell, told
from utils.distributed.ranks import place

GRACE = 3.0  # seconds in which the others say where they stand
# Where a process waits for others: in a collective, or in backward, which ends in one.
WAITING = ("torch/distributed/", "torch/autograd/", "deepspeed/comm/")


class Watch:
    """Within a `with`, ends a process that has not moved for `timeout` seconds, and says whom it waited for.

    Each process writes its Python stacks into `folder`. With one process there is nobody who waits.
    """

    def __init__(self, timeout: float, folder: Path) -> None:
        self.timeout, self.file = timeout, folder / "stacks" / f"process{place().rank}.txt"
        self.beats, self.last, self.on = 0, time.monotonic(), False

    def beat(self) -> None:
        """This process has come to its next batch."""
        self.beats += 1
        self.last = time.monotonic()

    def __enter__(self) -> Watch:
        self.beat()
        self.on = place().processes > 1
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
        own = {"beats": self.beats, "waits": waits}
        tell("stands", json.dumps(own))
        with suppress(OSError):  # a full disk must not keep it from ending
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        alarm()
        time.sleep(GRACE)
        if not is_first("failed"):
            time.sleep(PATIENCE)
            give_up("", 1)
        stand = {rank: json.loads(word) for rank, word in told("stands").items()}
        stand[place().rank] = own  # the store may be beyond reach
        late = blamed(place().processes, stand)
        what = "did not move" if late <= set(stand) else "did not move, or could not be reached,"
        who = f"{names(sorted(late))} {what}" if late else "no process moved"
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


def blamed(processes: int, there: dict[int, dict]) -> set[int]:
    """The ranks that hold the others up: those that do not answer, or do not wait, or are a batch behind."""
    absent = set(range(processes)) - set(there)
    if absent:
        return absent
    busy = {rank for rank, word in there.items() if not word["waits"]}
    if busy and len(busy) < processes:
        return busy
    behind = min(word["beats"] for word in there.values())
    late = {rank for rank, word in there.items() if word["beats"] == behind}
    return late if len(late) < processes else set()
