"""How far a run is logged, stored in its folder: what is trained again after a crash is not logged twice.

Used by the trackers of W&B and TensorBoard.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


class LogPosition:
    """The last position on each axis that a tracker has logged, over all processes that trained one run.

    file: stores the positions. run: the run's id; positions of another run are ignored, as is a damaged file.
    """

    def __init__(self, file: Path, run: str) -> None:
        self.file, self.run = file, run
        self.last: dict[str, float] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            stored = json.loads(file.read_text())
            if stored["name"] == run:
                self.last = dict(stored["last"])
        self._last_before = dict(self.last)  # what earlier processes logged

    def logged_before(self, axis: str, position: float) -> bool:
        """Return whether an earlier process logged this position; positions of this one never count."""
        return position <= self._last_before.get(axis, float("-inf"))

    def advance(self, axis: str, position: float) -> None:
        """Store that `position` is logged. The file is replaced, since the process may be killed at any moment."""
        self.last[axis] = position
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps({"name": self.run, "last": self.last}))
        part.replace(self.file)
