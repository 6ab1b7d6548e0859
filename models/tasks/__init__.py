"""The registry of tasks: one entry each, imported on first use. Called by the scripts and models/; imports utils."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from utils.errors import UserError

if TYPE_CHECKING:
    from models.tasks.contract import Task


@dataclass(frozen=True)
class TaskEntry:
    """The modules and classes of a task, and how its models are recognised."""

    task: str  # module:class, see contract.py
    data: str  # module:class of its data set, for the scripts (data/dataset.py)
    head: str  # the module of the last row of its model YAMLs
    yolov5_class: str  # of the network that YOLOv5 pickles into its files

    def load(self) -> type[Task]:
        """Import the task's class."""
        module, _, name = self.task.partition(":")
        kind: type[Task] = getattr(importlib.import_module(module), name)
        return kind


TASKS: dict[str, TaskEntry] = {
    "detect": TaskEntry(
        task="models.tasks.detection.task:DetectionTask",
        data="data.detection:DetectionData",
        head="Detect",
        yolov5_class="DetectionModel",
    ),
    "classify": TaskEntry(
        task="models.tasks.classification.task:ClassificationTask",
        data="data.classification:ClassificationData",
        head="Classify",
        yolov5_class="ClassificationModel",
    ),
    "segment": TaskEntry(
        task="models.tasks.segmentation.task:SegmentationTask",
        data="data.segmentation:SegmentationData",
        head="Segment",
        yolov5_class="SegmentationModel",
    ),
}


# For a model YAML with neither `task:` nor a known head, as YOLOv5's detectors; building it reports what is wrong.
DEFAULT_TASK = "detect"


def head_name(yaml: Mapping[str, Any]) -> object:
    """Return the module of the last row of a model YAML's `head`; None if there is none."""
    rows = yaml.get("head")
    last = rows[-1] if isinstance(rows, list) and rows else None
    return last[2] if isinstance(last, list) and len(last) > 2 else None


def model_words(yaml: Mapping[str, Any]) -> str:
    """Name the task and the head of a model YAML for messages: `detect with the head DetectDFL`."""
    head = head_name(yaml)
    return f"{task_of(yaml, 'the model')}{f' with the head {head}' if head else ''}"


def task_of(yaml: Mapping[str, Any], source: str) -> str:
    """Return the name of a model YAML's task: its `task:`, else the task whose head is the last row.

    source: name of the YAML in errors. Raises `UserError` if there is no such task.
    """
    head = head_name(yaml)
    of_head = next((name for name, entry in TASKS.items() if entry.head == head), DEFAULT_TASK)
    task = str(yaml.get("task") or of_head)
    if task not in TASKS:
        raise UserError(f"{source} is a model for the task '{task}'; give one for {' or '.join(TASKS)}")
    return task
