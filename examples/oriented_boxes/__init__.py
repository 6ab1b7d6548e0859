"""A task of its own: detection of oriented boxes. `python train.py --task examples/oriented_boxes ...` imports it."""

from models.tasks import TaskEntry

TASKS = {
    "oriented": TaskEntry(
        task=f"{__name__}.task:OrientedTask", data=f"{__name__}.data:OrientedData", head="OrientedDetect"
    )
}
