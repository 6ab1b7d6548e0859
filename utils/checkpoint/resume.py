"""Which run --resume means, and with what settings it goes on: the main process decides, and all do the same."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from utils.checkpoint.progress import Progress
from utils.checkpoint.state_files import States
from utils.config.hyperparameters import OVERRIDE, Recipe, overriding, read_hyperparameters
from utils.config.options import AUTO, NEWEST, TrainOptions, flags_of
from utils.config.parser import given_flags
from utils.distributed.accelerator import meet
from utils.distributed.exit import Stopped
from utils.distributed.ranks import launched, place
from utils.distributed.store import Board
from utils.errors import UserError
from utils.files import read_yaml

SETTINGS, STATES = "settings.yaml", "checkpoint"  # in a run folder
THEIRS = "opt.yaml"  # in one of YOLOv5
OF_THE_LAUNCH = ("device", "processes")  # what a launcher decides where there is one
OF_ONE_START = ("time_limit",)  # not taken over: a run that hit its limit is to go on


class Settled(NamedTuple):
    """The options of a run; the settings that it was begun with, None for one to begin; and whether the options are
    those of a run that was begun, so that nothing may take the place of a default."""

    options: TrainOptions
    begun: dict[str, Any] | None = None
    fixed: bool = False


def settle(
    options: TrainOptions, argv: Sequence[str], recipe_of: Callable[[Mapping[str, Any]], type[Recipe]]
) -> Settled:
    """The options that a run goes on with. `recipe_of`: what kind of hyperparameters a model's YAML goes with.

    A run that is finished ends here, with 0. Raises `UserError` where there is nothing to resume, or where a flag in
    `argv` is another one than the run was begun with and its curve depends on it.
    """
    if not options.resume:
        return Settled(options)
    answer = _agreed(lambda: _decide(options, argv, recipe_of), options.dist_timeout)
    if "error" in answer:
        raise UserError(answer["error"])
    if "finished" in answer:
        if place().rank == 0:
            print(answer["finished"], flush=True)
        raise Stopped(0)
    saved = answer["saved"]
    return Settled(_options(answer["options"]), None if saved is None else yaml.safe_load(saved), answer["fixed"])


def _agreed(decide: Callable[[], dict[str, Any]], timeout: float) -> dict[str, Any]:
    """The main process's answer on all of them: folders that others see later, or not at all, must not matter."""
    if place().processes == 1:
        return decide()
    board = Board(meet(timeout), "resume")
    if place().rank == 0:
        try:
            answer = decide()
        except UserError as error:
            answer = {"error": str(error)}
        board.put("answer", answer)
        if "options" not in answer:  # it ends here, and the store may be its own
            board.put("heard", True)
            board.read("heard", timeout)
        return answer
    answer = board.of_main("answer", timeout)
    board.put("heard", True)
    return answer


def _decide(
    options: TrainOptions, argv: Sequence[str], recipe_of: Callable[[Mapping[str, Any]], type[Recipe]]
) -> dict[str, Any]:
    run = find_run(options)
    if run is None:
        return {"options": vars(options), "saved": None, "fixed": False}
    settings = read_yaml(run / SETTINGS)
    known = {field.name for field in dataclasses.fields(TrainOptions)}
    saved = {name: value for name, value in settings.items() if name in known}
    if "epochs" not in saved or "hyperparameters" not in settings:
        raise UserError(f"{run} is not the folder of a training run, so it cannot be resumed; name one that is")
    given = {name: value for name, value in given_flags(TrainOptions, argv).items() if name != "resume"}
    _refuse_changes(run, settings, given, recipe_of)
    if "overrides" in given:
        given["overrides"] = {**saved.get("overrides", {}), **given["overrides"]}
    dropped = (*OF_ONE_START, *(OF_THE_LAUNCH if launched() else ()))
    saved = {name: value for name, value in saved.items() if name not in dropped}
    where = {"project": str(run.parent), "name": run.name, "exist_ok": True, "resume": str(run)}
    batch_size = {"batch_size": settings["batch_size"]}  # where it was found by -1, it stays
    merged = _options({**saved, **given, **batch_size, **where})
    state = States(run / STATES).peek()
    if state is None:  # it ended before there was one, and begins again
        return {"options": vars(merged), "saved": None, "fixed": True}
    progress = Progress.of(state["progress"])
    if progress.finished and merged.epochs <= settings["epochs"]:
        return {"finished": f"{run} is finished: nothing to resume; --epochs with a larger number makes it longer"}
    if progress.epoch >= merged.epochs:
        return {"finished": f"{run} has trained {progress.epoch} epochs; --epochs {merged.epochs} leaves nothing to do"}
    return {"options": vars(merged), "saved": yaml.safe_dump(settings), "fixed": True}


def _options(values: Mapping[str, Any]) -> TrainOptions:
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return TrainOptions(**plain)


def find_run(options: TrainOptions) -> Path | None:
    """The run folder that --resume means. None where `auto` finds none.

    Raises `UserError` where a path is no run's, or the project has none.
    """
    project = Path(options.project)
    if options.resume == NEWEST:
        found = newest(project, ".*")
        if found is None:
            raise UserError(f"there is no run to resume in {project}; name its folder, or start one without --resume")
        return found
    if options.resume == AUTO:
        name = re.escape(options.name)
        return newest(project, name if options.exist_ok else rf"{name}\d*")
    path = Path(options.resume)
    if not os.path.exists(path):
        raise UserError(f"--resume {path}: there is no such file or folder; name a run folder, or a weight file in one")
    folders = (path, *path.absolute().parents[:2])  # itself, or checkpoint/, or weights/last.pt in it
    for folder in folders:
        if (folder / SETTINGS).is_file():
            return folder
    for folder in folders:
        if (folder / THEIRS).is_file():
            raise UserError(
                f"--resume {path}: {folder} is a run of YOLOv5, whose optimizer and order are not ours to go on with; "
                f"start from it with --weights {folder / 'weights' / 'last.pt'} --hyp {folder / 'hyp.yaml'} and the "
                "epochs that are left"
            )
    raise UserError(f"--resume {path}: neither this nor what it lies in is a run folder of train.py (no {SETTINGS})")


def newest(project: Path, pattern: str) -> Path | None:
    """The run folder of that name that was written to last."""
    runs = [file.parent for file in project.glob(f"*/{SETTINGS}") if re.fullmatch(pattern, file.parent.name)]
    return max(runs, key=_written, default=None)


def _written(run: Path) -> float:
    files = [run / SETTINGS, run / "results.csv", *(run / STATES).glob("*.pt")]
    return max(file.stat().st_mtime for file in files if file.exists())


def _refuse_changes(
    run: Path,
    settings: Mapping[str, Any],
    given: Mapping[str, Any],
    recipe_of: Callable[[Mapping[str, Any]], type[Recipe]],
) -> None:
    """Raises `UserError` that names a flag which the run's curve depends on, where it has changed."""
    for field in flags_of(TrainOptions):
        name = field.name
        if not field.metadata["fixed"] or name not in given or name not in settings or name == "imgsz":
            continue  # the image size in the settings is rounded: the script compares it
        if _plain(given[name]) != settings[name] and not (name == "batch_size" and given[name] == -1):
            raise _other(run, f"--{name.replace('_', '-')}", given[name], settings[name])
    if "hyp" in given or "overrides" in given:
        _refuse_hyperparameters(run, settings, given, recipe_of(settings["model"]))


def _refuse_hyperparameters(
    run: Path, settings: Mapping[str, Any], given: Mapping[str, Any], kind: type[Recipe]
) -> None:
    then, overrides = settings["hyperparameters"], given.get("overrides", {})
    for name, value in overriding(kind, overrides).items():
        if value != then.get(name):
            raise _other(run, OVERRIDE + name, value, then.get(name))
    if "hyp" in given:
        now = vars(read_hyperparameters(given["hyp"], kind, {**settings.get("overrides", {}), **overrides}))
        changed = [f"{name} is {now[name]} and was {then.get(name)}" for name in now if now[name] != then.get(name)]
        if changed:
            said = f"--hyp {given['hyp']} has changed since {run} was begun: {', '.join(changed)}"
            raise UserError(f"{said}; {_instead(run)}")


def _other(run: Path, flag: str, now: Any, then: Any) -> UserError:
    return UserError(
        f"{flag} is {now!r} now, and {run} was begun with {then!r}: it cannot go on like that; {_instead(run)}"
    )


def _instead(run: Path) -> str:
    return f"leave it out, or start a new run from {run / 'weights' / 'last.pt'}"


def _plain(value: Any) -> Any:
    """What a YAML makes of the value of a flag."""
    return list(value) if isinstance(value, tuple) else value


def changes(settings: Mapping[str, Any], options: TrainOptions) -> list[str]:
    """Sentences for the flags that are other ones than the run was begun with."""
    free = [field.name for field in flags_of(TrainOptions) if not field.metadata["fixed"]]
    own = ("resume", "project", "name", "exist_ok", *OF_THE_LAUNCH, *OF_ONE_START)
    now = {name: getattr(options, name) for name in free if name in settings and name not in own}
    other = {name: value for name, value in now.items() if _plain(value) != settings[name]}
    said = [f"--{name.replace('_', '-')} is {value!r} and was {settings[name]!r}" for name, value in other.items()]
    if now.get("epochs") != settings["epochs"]:
        said.append(f"the learning rate from here on is that of a run of {options.epochs} epochs")
    return said


def check_same(state: Mapping[str, Any], identity: Mapping[str, Any]) -> list[str]:
    """Raises `UserError` where classes, images or their size are others than when the state was saved.

    identity: `names` of the classes, `imgsz`, and `images`: what tells the training images apart. Returns warnings.
    """
    was, now = state["names"], identity["names"]
    if list(was.values()) != list(now.values()):
        raise UserError(
            f"the classes have changed since the run began ({len(was)} then, {len(now)} now: "
            f"{_first_difference(list(was.values()), list(now.values()))}); mend names: in the data YAML, or start a "
            "new run from its weights/last.pt"
        )
    if state["imgsz"] != identity["imgsz"]:
        raise UserError(
            f"--imgsz is {identity['imgsz']} now, and the run was begun with {state['imgsz']}; leave it out"
        )
    images, before = identity["images"], state["images"]
    changed = [what for what in images if images[what] != before.get(what)]
    if "files" in changed:
        raise UserError(
            f"the training images have changed since the run began ({before.get('count')} then, "
            f"{images.get('count')} now); bring back the same, or start a new run from its weights/last.pt"
        )
    return [f"warning: the {what} of the training images have changed since the run began" for what in changed]


def _first_difference(was: list[str], now: list[str]) -> str:
    for number in range(max(len(was), len(now))):
        old, new = (names[number] if number < len(names) else "none" for names in (was, now))
        if old != new:
            return f"class {number} was {old} and is {new}"
    return ""
