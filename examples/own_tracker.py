"""A tracker of your own: `python train.py --data my.yaml --log-with wandb,examples/own_tracker.py`.

It is a tracker of Accelerate (https://huggingface.co/docs/accelerate/usage_guides/tracking). Lockstep calls it on the
main process, in a thread: training neither waits for it nor fails by it. A resumed run may repeat steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from accelerate.tracking import GeneralTracker


class JsonLines(GeneralTracker):
    """Writes a line of JSON for each logged point, with the time: `log.jsonl` in the run folder.

    run_name: the project. logging_dir: the run folder; only trackers that require a folder get one.
    """

    name = "json lines"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.run_name, self.path = run_name, Path(logging_dir) / "log.jsonl"

    def start(self) -> None:
        """Open the file, after the lines of an earlier process of a resumed run."""
        self.file: IO[str] = self.path.open("a")

    @property
    def tracker(self) -> IO[str]:
        """What `accelerator.get_tracker("own_tracker", unwrap=True)` returns."""
        return self.file

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the settings: flags by name, nested ones as `hyperparameters.lr0`. Also at the start of a resumed run."""
        self._write({"project": self.run_name, "settings": values})

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Log numbers by key at an optimizer step: `step/...` of a batch, `train/...` and `metrics/...` of an epoch."""
        self._write({"step": step, **values})

    def finish(self) -> None:
        """Send what is left; called at the end of the run, also of one that fails."""
        self.file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        self.file.write(json.dumps({"time": time.time(), **values}) + "\n")
        self.file.flush()
