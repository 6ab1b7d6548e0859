"""What differs between tasks, by the name that a model YAML's `task:` gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from models.tasks.classification.task import ClassificationTask
from models.tasks.detection.task import DetectionTask
from utils.errors import UserError

TASKS: dict[str, Any] = {"detect": DetectionTask, "classify": ClassificationTask}


def task_of(yaml: Mapping[str, Any], source: str) -> str:
    """The task that a model's YAML names, which is of `source`; YOLOv5's detectors name none.

    Raises `UserError` for an unknown one.
    """
    task = str(yaml.get("task", "detect"))
    if task not in TASKS:
        raise UserError(f"{source} is a model for the task '{task}'; give one for {' or '.join(TASKS)}")
    return task
