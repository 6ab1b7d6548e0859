"""The registry of tasks: one entry each, imported on first use.

A task outside of this repository is a Python file or package with its own `TASKS`, which `add_tasks` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from utils.errors import UserError
from utils.user_code import class_named, imported

if TYPE_CHECKING:
    from models.tasks.contract import Task


@dataclass(frozen=True)
class TaskEntry:
    """The modules and classes of a task, and how its models are recognised."""

    task: str  # module:class of the task, see contract.py
    data: str  # module:class of its data set, for the scripts (data/dataset.py)
    head: str  # module in the last row of its model YAMLs
    yolov5_class: str = ""  # class of the network that YOLOv5 pickles into its files

    def load(self) -> type[Task]:
        return class_named(self.task)


TASKS: dict[str, TaskEntry] = {
    "detect": TaskEntry(
        task="models.tasks.detect:DetectionTask",
        data="data.detection:DetectionData",
        head="Detect",
        yolov5_class="DetectionModel",
    ),
    "classify": TaskEntry(
        task="models.tasks.classify:ClassificationTask",
        data="data.classification:ClassificationData",
        head="Classify",
        yolov5_class="ClassificationModel",
    ),
    "segment": TaskEntry(
        task="models.tasks.segment:SegmentationTask",
        data="data.segmentation:SegmentationData",
        head="Segment",
        yolov5_class="SegmentationModel",
    ),
}

# The task of a model YAML with neither `task:` nor a known head; if the head is wrong, building the model reports it.
DEFAULT_TASK = "detect"


def head_name(yaml: Mapping[str, Any]) -> object:
    """Return the module of the last row of a model YAML's `head`; None if there is none."""
    rows = yaml.get("head")
    last = rows[-1] if isinstance(rows, list) and rows else None
    return last[2] if isinstance(last, list) and len(last) > 2 else None


def describe_model(yaml: Mapping[str, Any]) -> str:
    """Name the task and the head of a model YAML for messages: `detect with the head DetectDFL`."""
    head = head_name(yaml)
    return f"{task_name(yaml, 'the model')}{f' with the head {head}' if head else ''}"


def task_name(yaml: Mapping[str, Any], source: str) -> str:
    """Return the task of a model YAML: its `task:`, else by the head in the last row. Raises `UserError`."""
    head = head_name(yaml)
    head_task = next((name for name, entry in TASKS.items() if entry.head == head), DEFAULT_TASK)
    task = str(yaml.get("task") or head_task)
    if task not in TASKS:
        raise UserError(
            f"{source} is a model for the task '{task}'; give one for {' or '.join(TASKS)}, or name the Python file of "
            "that task with --task-file"
        )
    return task


def add_tasks(path: str, named_by_user: bool = True, named_by: str = "the run's settings.yaml") -> list[str]:
    """Run a user's Python file or package, register the tasks in its `TASKS`, a dict of `TaskEntry` by name, and return
    their names.

    An entry names classes in the module itself, as `f"{__name__}:MyTask"`, or in modules of its package. See `imported`
    for the other arguments. Raises `UserError` if the file does not load, or defines no task, an incomplete task, or
    one whose name is taken.
    """
    with imported(path, "--task-file", named_by_user, named_by) as module:
        entries = getattr(module, "TASKS", None)
        if not entries or not isinstance(entries, dict) or {*map(type, entries.values())} != {TaskEntry}:
            raise UserError(
                f'{path} defines no task; write `TASKS = {{"name": TaskEntry(...)}}`, with models.tasks.TaskEntry'
            )
        for name, entry in entries.items():
            if name in TASKS and TASKS[name] is not entry:
                raise UserError(f"{path} defines a task '{name}', but that name is taken; give it another name")
            for part in (entry.load(), class_named(entry.data)):
                if missing := ", ".join(sorted(part.__abstractmethods__)):
                    raise UserError(f"{path}: the class {part.__name__} of '{name}' lacks {missing}; define them")
    TASKS.update(entries)
    return list(entries)


def hyperparameters(task_file: str = "") -> list[str]:
    """Return the names of the hyperparameters of all tasks, and of the user's in `task_file` if it is not ''."""
    if task_file:
        add_tasks(task_file)
    return sorted({field.name for entry in TASKS.values() for field in fields(entry.load().recipe)})
