"""--resume: which run folder it means, with what options the run continues, and whether its data are the same.

train.py calls `settle` before anything else is read, and `check_same` once the data set is known.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import yaml

from utils.checkpoint.progress import Progress
from utils.checkpoint.state_files import States
from utils.config.options import AUTO, NEWEST
from utils.config.resumed import RecipeOf, from_plain, resumed_options
from utils.distributed.agreement import decide_on_main
from utils.distributed.exit import Stopped
from utils.distributed.ranks import launched
from utils.errors import UserError
from utils.files import read_yaml

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

SETTINGS, STATES = "settings.yaml", "checkpoint"  # in a run folder
YOLOV5_SETTINGS = "opt.yaml"  # in a run folder of YOLOv5


class Settled(NamedTuple, Generic[T]):
    """The options of a run, and what is known of the run that they continue.

    begun: the settings of the run, None if it starts from the beginning. fixed: whether the options are those of an
    earlier start, so that they already contain the defaults of the task and the data set.
    """

    options: T
    begun: dict[str, Any] | None = None
    fixed: bool = False


def settle(options: T, argv: Sequence[str], recipe_of: RecipeOf) -> Settled[T]:
    """Return the options that a run starts or continues with; the main process decides for all.

    recipe_of: the kind of hyperparameters of a model's YAML. Raises `Stopped` with exit code 0 if the run is finished,
    and `UserError` if there is nothing to resume or a flag in `argv` must not change.
    """
    given: Mapping[str, Any] = vars(options)
    if not given["resume"]:
        return Settled(options)

    def merge(run: Path, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return vars(resumed_options(type(options), argv, run, settings, recipe_of, launched()))

    decision = decide_on_main(partial(_decide, given, merge), "resume", given["dist_timeout"])
    begun = decision["begun"]
    return Settled(
        from_plain(type(options), decision["options"]),
        None if begun is None else yaml.safe_load(begun),
        decision["fixed"],
    )


def _decide(given: Mapping[str, Any], merge: Callable[[Path, Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of `Settled` as plain values, `begun` as YAML: JSON has no numbers as keys."""
    run = find_run(given["resume"], Path(given["project"]), given["name"], given["exist_ok"])
    if run is None:
        return {"options": given, "begun": None, "fixed": False}
    settings = read_yaml(run / SETTINGS)
    if "epochs" not in settings or "hyperparameters" not in settings:
        raise UserError(f"{run} is not the folder of a training run, so it cannot be resumed; name one that is")
    options = merge(run, settings)
    state = States(run / STATES).peek()
    if state is None:  # the run ended before it saved one, and starts again
        return {"options": options, "begun": None, "fixed": True}
    if reason := _nothing_to_do(run, Progress.of(state["progress"]), settings["epochs"], options["epochs"]):
        print(reason, flush=True)
        raise Stopped(0)
    return {"options": options, "begun": yaml.safe_dump(settings), "fixed": True}


def _nothing_to_do(run: Path, progress: Progress, epochs_before: int, epochs: int) -> str:
    if progress.finished and epochs <= epochs_before:
        return f"{run} is finished: nothing to resume; a larger number of --epochs continues it"
    if progress.epoch >= epochs:
        return f"{run} has trained {progress.epoch} epochs; --epochs {epochs} leaves nothing to do"
    return ""


def find_run(resume: str, project: Path, name: str, exist_ok: bool) -> Path | None:
    """Return the run folder that --resume means, None if `auto` finds none.

    Raises `UserError` if a path is not in a run folder, or the project has none.
    """
    if resume == NEWEST:
        run = newest(project, ".*")
        if run is None:
            raise UserError(f"there is no run to resume in {project}; name its folder, or start one without --resume")
        return run
    if resume == AUTO:
        return newest(project, re.escape(name) if exist_ok else rf"{re.escape(name)}\d*")
    path = Path(resume)
    if not os.path.exists(path):
        raise UserError(f"--resume {path}: there is no such file or folder; name a run folder, or a weight file in one")
    folders = (path, *path.absolute().parents[:2])  # the run folder, or checkpoint/ or weights/last.pt in it
    for folder in folders:
        if (folder / SETTINGS).is_file():
            return folder
    for folder in folders:
        if (folder / YOLOV5_SETTINGS).is_file():
            raise UserError(
                f"--resume {path}: {folder} is a run of YOLOv5, which only YOLOv5 can resume; start a new run with "
                f"--weights {folder / 'weights' / 'last.pt'} --hyp {folder / 'hyp.yaml'} and the remaining epochs"
            )
    raise UserError(f"--resume {path}: neither it nor its parent folders are a run folder of train.py (no {SETTINGS})")


def newest(project: Path, pattern: str) -> Path | None:
    """Return the run folder that was written to last, of those whose name matches `pattern`; None if there is none."""
    runs = [file.parent for file in project.glob(f"*/{SETTINGS}") if re.fullmatch(pattern, file.parent.name)]
    return max(runs, key=_last_written, default=None)


def _last_written(run: Path) -> float:
    files = [run / SETTINGS, run / "results.csv", *(run / STATES).glob("*.pt")]
    return max(file.stat().st_mtime for file in files if file.exists())


def check_same(state: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Raise `UserError` if classes, image size or images differ from those of the saved state; return warnings.

    identity: `names` of the classes, `imgsz`, and `images`: counts and hashes of the training images and labels.
    """
    saved, names = list(state["names"].values()), list(identity["names"].values())
    if saved != names:
        raise UserError(
            f"the classes have changed since the run began ({len(saved)} then, {len(names)} now: "
            f"{_first_difference(saved, names)}); correct `names:` in the data YAML, or start a new run from its "
            "weights/last.pt"
        )
    if state["imgsz"] != identity["imgsz"]:
        raise UserError(
            f"--imgsz is {identity['imgsz']} now, and the run was started with {state['imgsz']}; leave it out"
        )
    images, before = identity["images"], state["images"]
    changed = [name for name in images if images[name] != before.get(name)]
    if "files" in changed:
        raise UserError(
            f"the training images have changed since the run began ({before.get('count')} then, "
            f"{images.get('count')} now); restore them, or start a new run from its weights/last.pt"
        )
    return [f"warning: the {name} of the training images have changed since the run began" for name in changed]


def _first_difference(saved: Sequence[str], names: Sequence[str]) -> str:
    for number in range(max(len(saved), len(names))):
        old, new = (classes[number] if number < len(classes) else "none" for classes in (saved, names))
        if old != new:
            return f"class {number} was {old} and is {new}"
    return ""
