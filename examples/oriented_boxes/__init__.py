"""A task of its own: detection of oriented boxes. `python train.py --task examples/oriented_boxes ...` imports it."""

from models.tasks import TaskEntry

TASKS = {
    "oriented": TaskEntry(
        task="oriented_boxes.task:OrientedTask", data="oriented_boxes.data:OrientedData", head="OrientedDetect"
    )
}
