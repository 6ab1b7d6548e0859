"""A task of its own: keypoints by heat maps. `python train.py --task examples/keypoints ...` imports it."""

from models.tasks import TaskEntry

TASKS = {
    "keypoints": TaskEntry(task=f"{__name__}.task:HeatmapTask", data=f"{__name__}.data:HeatmapData", head="Heatmap")
}
