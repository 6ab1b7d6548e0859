"""D-FINE and RT-DETRv2, transformer detectors, as a task: `python train.py --task examples/dfine ...` imports it."""

from models.tasks import TaskEntry

TASKS = {"dfine": TaskEntry(task=f"{__name__}.task:DFineTask", data=f"{__name__}.data:DFineData", head="DFine")}
