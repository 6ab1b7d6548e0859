"""The last logged position of a run, stored in its folder, so that a resumed run logs nothing twice.

Used by all trackers.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from utils.tracking.tracker import EPOCH, STEP


class LogPosition:
    """The last position on each axis that a tracker has logged, in this process or an earlier one.

    Args:
        file: file that stores the positions
        run: the run's id; positions of another run and a damaged file are ignored

    Attributes:
        log_file: file in the same folder to which the tracker appends, if any; its length is stored too
        remote_id: id that the tracker itself gave to the run, '' if none
        continues: whether an earlier process stored a position
    """

    def __init__(self, file: Path, run: str) -> None:
        self.file, self.run = file, run
        self.last: dict[str, float] = {}
        self.log_file: Path | None = None
        self.remote_id, self.continues = "", False
        self._length_before: tuple[str, int] | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(file.read_text())
            if stored["name"] == run:
                self.last, self.continues = dict(stored["last"]), True
                self.remote_id = str(stored.get("remote_id", ""))
                name, length = stored["length"]
                self._length_before = str(name), int(length)
        self._last_before = dict(self.last)  # positions of earlier processes

    def cut_log_file(self) -> None:
        """Remove the end of the earlier log file, written before the process was killed but not stored here."""
        if self._length_before:
            name, length = self._length_before
            log_file = self.file.with_name(name)
            if log_file.is_file() and log_file.stat().st_size > length:
                os.truncate(log_file, length)

    def logged_before(self, axis: str, position: float) -> bool:
        """Return whether an earlier process logged this position; positions of this process do not count."""
        return position <= self._last_before.get(axis, float("-inf"))

    def missed(self, epochs: Iterable[Mapping[str, float]]) -> Iterator[tuple[dict[str, float], int]]:
        """Yield the epochs that an earlier process trained but did not log, because it was killed, and their step.

        The step is the last one that was logged. Yields nothing for a tracker that has logged nothing before.
        """
        for values in epochs if self.continues else ():
            if not self.logged_before(EPOCH, values[EPOCH]):
                yield dict(values), int(self._last_before.get(STEP, 0))
                self._last_before[EPOCH] = values[EPOCH]

    def advance(self, axis: str, position: float) -> None:
        """Store `position` as logged."""
        self.last[axis] = position
        self.store()

    def store(self) -> None:
        """Store the positions and the length of the log file in a new file, so that a kill cannot damage it."""
        stored: dict[str, object] = {"name": self.run, "last": self.last}
        if self.remote_id:
            stored["remote_id"] = self.remote_id
        if self.log_file:
            stored["length"] = self.log_file.name, self.log_file.stat().st_size
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(stored))
        part.replace(self.file)


def earlier_epochs(folder: Path) -> list[dict[str, float]]:
    """Return the epochs in a resumed run's results.csv, as trackers log them; empty for a new run.

    Must be called before the run adds further epochs.
    """
    file = folder / "results.csv"
    if not file.is_file():
        return []
    with file.open(newline="") as opened:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(opened)]
    return [{**row, EPOCH: int(row[EPOCH]) + 1} for row in rows]
