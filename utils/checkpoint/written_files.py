"""The files that a run has written into its folder: another run in the same folder (--exist-ok) removes them.

Called by utils/run_folder.py.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath

from utils.files import PART_SUFFIX

LIST_FILE = ".files.json"
# Their writers list nothing.
UNLISTED = (
    *("results.csv", "weights/epoch*.pt", "stacks/process*.txt", "profile/*", "model_card.md"),
    *("events.out.tfevents*", ".tensorboard.json"),
)


class WrittenFiles:
    """The names of documents and pictures in a run folder, stored in the folder. May be used by several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self._names: dict[str, None] = {}
        with suppress(OSError, ValueError, TypeError):
            self._names = dict.fromkeys(map(str, json.loads((folder / LIST_FILE).read_text())))

    def add(self, names: Iterable[str]) -> None:
        """Add names relative to the folder. A list that cannot be written is not stored."""
        with self._lock:
            new = [name for name in names if name not in self._names]
            if new:
                self._names.update(dict.fromkeys(new))
                part = self.folder / f".{LIST_FILE}{PART_SUFFIX}"
                with suppress(OSError):  # not flushed to the disk: a lost list leaves files, and nothing else
                    part.write_text(json.dumps([*self._names], indent=0))
                    os.replace(part, self.folder / LIST_FILE)

    def remove_all(self) -> None:
        """Remove all listed and known files, and folders that are empty then. Files of others stay."""
        inside = [name for name in self._names if not PurePath(name).is_absolute() and ".." not in PurePath(name).parts]
        unlisted = [file for pattern in UNLISTED for file in self.folder.glob(pattern)]
        with self._lock:
            for file in (*unlisted, *(self.folder / name for name in inside), self.folder / LIST_FILE):
                with suppress(OSError):  # it is gone, or a folder
                    file.unlink()
            self._names.clear()
            for folder in {file.parent for file in unlisted} - {self.folder}:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
