"""How far a run is logged, stored in its folder: what is trained again after a crash is not logged twice.

Used by the trackers of W&B and TensorBoard.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path


class LogPosition:
    """The last position on each axis that a tracker has logged, over all processes that trained one run.

    file: stores the positions. run: the run's id; positions of another run are ignored, as is a damaged file.
    log_file: a file beside it that grows with each position, if the tracker has one; its length is stored too.
    """

    def __init__(self, file: Path, run: str) -> None:
        self.file, self.run = file, run
        self.last: dict[str, float] = {}
        self.log_file: Path | None = None
        self._length_before: tuple[str, int] | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(file.read_text())
            if stored["name"] == run:
                self.last = dict(stored["last"])
                name, length = stored["length"]
                self._length_before = str(name), int(length)
        self._last_before = dict(self.last)  # what earlier processes logged

    def cut_log_file(self) -> None:
        """Remove what the earlier process wrote into its log file but did not store: it was killed in between."""
        if self._length_before:
            name, length = self._length_before
            log_file = self.file.with_name(name)
            if log_file.is_file() and log_file.stat().st_size > length:
                os.truncate(log_file, length)

    def logged_before(self, axis: str, position: float) -> bool:
        """Return whether an earlier process logged this position; positions of this one never count."""
        return position <= self._last_before.get(axis, float("-inf"))

    def advance(self, axis: str, position: float) -> None:
        """Store that `position` is logged."""
        self.last[axis] = position
        self.store()

    def store(self) -> None:
        """Store the positions and the log file's length by replacing the file: a kill may come at any moment."""
        stored: dict[str, object] = {"name": self.run, "last": self.last}
        if self.log_file:
            stored["length"] = self.log_file.name, self.log_file.stat().st_size
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(stored))
        part.replace(self.file)
