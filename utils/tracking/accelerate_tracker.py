"""The trackers of Accelerate without a richer one of ours, such as MLflow: each in a process (accelerate_process.py).

Made by utils/tracking/requested.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from utils.distributed.ranks import without_launcher
from utils.tracking.process_tracker import ProcessTracker
from utils.tracking.tracker import FINISH_SECONDS, Print

TRACKIO_SERVERS = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")  # variables that name one


class AccelerateTracker(ProcessTracker):
    """A run in a tracker that Accelerate knows by `name`; it gets numbers and settings.

    run: `project`, `name` and `id` of the run.
    """

    module = "utils.tracking.accelerate_process"

    def __init__(
        self, name: str, folder: Path, run: Mapping[str, Any], print_line: Print, timeout: float = FINISH_SECONDS
    ) -> None:
        self.name = self.title = name
        super().__init__(folder, {"tracker": name, "run": run}, print_line, timeout)

    def environment(self) -> dict[str, str]:
        # Accelerate must not join the processes of the training, nor take memory of a GPU.
        variables = {**without_launcher(os.environ), "CUDA_VISIBLE_DEVICES": ""}
        if self.name == "trackio" and not any(map(os.environ.get, TRACKIO_SERVERS)):
            # It asks the Hub for the user's name, without a time limit, even if it stores the run on this machine.
            variables["HF_HUB_OFFLINE"] = "1"
        return variables
