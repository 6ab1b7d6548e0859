"""What differs between tasks, by the name that a model YAML's `task:` gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.tasks.detection import DetectionTask
from utils.errors import UserError

TASKS = {"detect": DetectionTask}


def task_of(yaml: Mapping[str, Any]) -> str:
    """The task that a model's YAML names; YOLOv5's detectors name none. Raises `UserError` for an unknown one."""
    task = str(yaml.get("task", "detect"))
    if task not in TASKS:
        raise UserError(f"the model's task '{task}' is not one of {', '.join(TASKS)}; mend `task:` in its YAML")
    return task
