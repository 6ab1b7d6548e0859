"""Draw the pictures of a run during training: images in a thread, charts in a process. Called by utils/run.py."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from utils.background import Background, own_python
from utils.plots.drawing import write_picture

CHARTS_TIMEOUT_SECONDS = 300.0  # time limit of the process that draws charts
FINISH_TIMEOUT_SECONDS = 300.0  # time limit of the pictures at the end of a run


class Plotter:
    """Draws pictures into `folder`. A failure is a warning and never stops the run.

    Args:
        print_line: called with the warning
        on_drawn: called with the paths of new pictures, by file name
    """

    def __init__(
        self, folder: Path, print_line: Callable[[str], object], on_drawn: Callable[[Mapping[str, Path]], object]
    ) -> None:
        self.folder, self.on_drawn = folder, on_drawn
        self._background = Background("a picture cannot be drawn", print_line)
        # OpenCV sets up its image formats under a lock on first use. That must not happen in the thread: loader
        # processes forked in the meantime would inherit the locked lock.
        cv2.imencode(".jpg", np.zeros((1, 1, 3), np.uint8))

    def draw(self, pictures: Callable[[], Mapping[str, np.ndarray]]) -> None:
        """Write the pictures that `pictures` returns by file name, uint8 (h, w, 3) BGR."""
        self._background.do(lambda: self._draw(pictures))

    def _draw(self, pictures: Callable[[], Mapping[str, np.ndarray]]) -> None:
        for name, picture in pictures().items():
            path = self.folder / name
            write_picture(path, picture)
            self.on_drawn({name: path})

    def draw_charts(self, *names: str) -> None:
        """Draw these charts from the text files of the folder, by default all possible ones."""
        self._background.do(lambda: self._draw_charts(names))

    def _draw_charts(self, names: Sequence[str]) -> None:
        started = time.time()
        only = ["--only", *names] if names else []
        process = subprocess.Popen(
            [*own_python("utils.plots.__main__"), str(self.folder), "--background", *only],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",
            start_new_session=True,
        )
        try:
            errors = process.communicate(timeout=CHARTS_TIMEOUT_SECONDS)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        pictures = (path for path in sorted(self.folder.iterdir()) if path.suffix in (".png", ".jpg"))
        self.on_drawn({path.name: path for path in pictures if path.stat().st_mtime >= started})
        if process.returncode:
            raise RuntimeError((errors.strip() or f"exit code {process.returncode}").splitlines()[-1])

    def finish(self, timeout: float = FINISH_TIMEOUT_SECONDS) -> bool:
        """Wait at most `timeout` seconds for all drawings; return whether they are done."""
        return self._background.finish(timeout)
