"""What differs between tasks, by the name that a model YAML's `task:` gives."""

from models.tasks.detection import DetectionTask

TASKS = {"detect": DetectionTask}
