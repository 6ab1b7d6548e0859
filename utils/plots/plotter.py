"""The pictures of a run, drawn beside the training: photos in a thread, charts in a process of their own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from utils.background import Background, own_python
from utils.files import replacing

OFTEN = 60.0  # seconds at least between two drawings of results.png
CHARTS = 300.0  # seconds that the charts may take
PATIENCE = 300.0  # seconds that the end of a run waits for its pictures


class Painter:
    """Draws into `folder`. A picture that cannot be drawn is a warning, which `say` takes. drawn: is told the files."""

    def __init__(
        self, folder: Path, say: Callable[[str], object], drawn: Callable[[Mapping[str, Path]], object]
    ) -> None:
        self.folder, self.drawn = folder, drawn
        self.background = Background("a picture cannot be drawn", say)
        self.last = time.monotonic()
        # OpenCV sets its formats up under a lock when the first is used: not in the thread, for loader processes are
        # forked meanwhile, and would wait for that lock for ever.
        cv2.imencode(".jpg", np.zeros((1, 1, 3), np.uint8))

    def photos(self, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `draw` makes, by file name; uint8 (h, w, 3) BGR."""
        self.background.do(lambda: self._photos(draw))

    def _photos(self, draw: Callable[[], Mapping[str, np.ndarray]]) -> None:
        for name, picture in draw().items():
            path = self.folder / name
            with replacing(path) as file:
                file.write(cv2.imencode(path.suffix, picture)[1].tobytes())
            self.drawn({name: path})

    def charts(self, *names: str) -> None:
        """Draw these charts from the text files of the folder, all that can be drawn where none is named."""
        self.background.do(lambda: self._charts(names))

    def _charts(self, names: Sequence[str]) -> None:
        began = time.time()
        only = ["--only", *names] if names else []
        told = subprocess.run(
            [*own_python("utils.plots.run_pictures"), str(self.folder), "--background", *only],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=CHARTS,
            start_new_session=True,
        )
        pictures = (path for path in sorted(self.folder.iterdir()) if path.suffix in (".png", ".jpg"))
        self.drawn({path.name: path for path in pictures if path.stat().st_mtime >= began})
        if told.returncode:
            raise RuntimeError((told.stderr.strip() or f"exit code {told.returncode}").splitlines()[-1])

    def results(self) -> None:
        """results.csv has a new row: draw it, where that has not been done just now."""
        if time.monotonic() - self.last >= OFTEN:
            self.last = time.monotonic()
            self.charts("results.png")

    def finish(self, patience: float = PATIENCE) -> bool:
        """Wait until all is drawn; is it?"""
        return self.background.finish(patience)
