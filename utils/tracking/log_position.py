"""How far a run is logged, kept beside it: what is trained again after a crash is not logged again."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


class Kept:
    """The place on each axis up to which a tracker has logged the run `name`. file: where that is kept."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name
        self.last: dict[str, float] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(file.read_text())
            if kept["name"] == name:
                self.last = dict(kept["last"])
        self.before = dict(self.last)  # by an earlier process

    def has(self, axis: str, place: float) -> bool:
        """Has an earlier process logged this place?"""
        return place <= self.before.get(axis, float("-inf"))

    def note(self, axis: str, place: float) -> None:
        """It is logged now. Written whole: the next process may come at any moment."""
        self.last[axis] = place
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps({"name": self.name, "last": self.last}))
        part.replace(self.file)
