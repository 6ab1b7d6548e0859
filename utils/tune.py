"""Search for hyperparameters by optuna, without an account: `python -m utils.tune --data my.yaml --trials 30`.

A trial is a run of train.py. sweep.yaml gives the search space and the flags of a trial; flags of the command line come
after them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from filelock import FileLock, Timeout

from utils.config.hyperparameters import DEFAULTS, OVERRIDE_PREFIX, find_hyperparameters
from utils.config.options import TrainOptions
from utils.config.parser import SUGGESTED_BY_HYP, given_flags
from utils.config.resumed import CURVE_FLAGS
from utils.config.values import is_number
from utils.distributed.failure import run_main
from utils.errors import UserError, plural
from utils.files import ROOT, find_file, read_yaml, replacing
from utils.python_api import INTERRUPTED, RESULT

BEST_HYP = "best.yaml"
TRIALS = "trials.log"  # optuna's journal
OWN_FLAGS = ("project", "name", "exist_ok", "resume")  # flags of train.py that the search sets for each trial
# Flags that change the meaning of the fitness, so a continued search must not change them.
JOB_FLAGS = (*CURVE_FLAGS, "data", "hyp", "epochs", "imgsz", "task_file", "layers")
HYP = OVERRIDE_PREFIX.removeprefix("--")  # prefix of a hyperparameter among the parameters
RANGES = ("uniform", "log_uniform_values", "int_uniform")  # W&B distributions that are supported


class Parameter(NamedTuple):
    """A dimension of the search space: one of `choices`, or a number from `low` to `high`."""

    name: str  # flag name without dashes
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False
    choices: tuple[Any, ...] = ()

    def draw(self, trial: Any) -> Any:
        """Return the value of this parameter in an optuna trial."""
        if self.choices:
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high))
        return trial.suggest_float(self.name, self.low, self.high, log=self.log)


class Space(NamedTuple):
    """The content of a sweep file: the parameters, and the flags of every trial."""

    parameters: list[Parameter]
    flags: list[str]


def read_space(file: Path) -> Space:
    """Read a W&B sweep file such as sweep.yaml. Raises `UserError` for anything that optuna does not support."""
    content = read_yaml(file)
    parameters = content.get("parameters")
    if not isinstance(parameters, dict) or not parameters:
        raise UserError(f"{file}: `parameters` must have a line for each value to search, as in sweep.yaml")
    command = [str(word) for word in content.get("command") or ["${program}", "${args}"]]
    if "${program}" not in command:
        raise UserError(f"{file}: `command` has no ${{program}}, which the flags of train.py must follow; add it")
    flags = command[command.index("${program}") + 1 :]
    space = [_parameter(f"{file}: {name}", str(name), value) for name, value in parameters.items()]
    return Space(space, [word for word in flags if not word.startswith("${args")])


def _parameter(place: str, name: str, content: object) -> Parameter:
    """Return a parameter of a sweep file.

    Args:
        place: the parameter's file and name, for errors
    """
    if not isinstance(content, dict):
        raise UserError(f"{place} must be like {{distribution: uniform, min: 0.0, max: 0.5}}, not {content!r}")
    values = content.get("values", [content["value"]] if "value" in content else None)
    if values is not None:
        if not isinstance(values, list) or not values:
            raise UserError(f"{place}: `values` must be a list, not {values!r}")
        return Parameter(name, choices=tuple(values))
    kind, low, high = content.get("distribution"), content.get("min"), content.get("max")
    if kind not in RANGES:
        raise UserError(f"{place}: distribution {kind!r} is not supported; use {', '.join(RANGES)}, or `values`")
    if not is_number(low) or not is_number(high) or low >= high or (kind == "log_uniform_values" and low <= 0):
        raise UserError(f"{place}: min {low!r} and max {high!r} are not a range of numbers for {kind}; correct them")
    return Parameter(name, low, high, log=kind == "log_uniform_values", whole=kind == "int_uniform")


def train_command(flags: Sequence[str], folder: Path, number: int, values: Mapping[str, Any]) -> list[str]:
    """Return the command of a trial; it resumes a trial that was interrupted.

    Args:
        flags: flags of train.py
        folder: folder of the search
        values: values of the parameters, by name
    """
    words = [sys.executable, str(ROOT / "train.py"), *flags, "--project", str(folder), "--name", f"trial{number}"]
    return [*words, "--resume", "auto", *(f"--{name}={value}" for name, value in values.items())]


def run_trial(flags: Sequence[str], folder: Path, number: int, values: Mapping[str, Any]) -> float | None:
    """Train with `values`; return the fitness, None if the run failed.

    Raises KeyboardInterrupt if the run was stopped, and `UserError` if train.py refuses its flags.
    """
    file = (folder / f"trial{number}.json").absolute()
    file.unlink(missing_ok=True)
    code = subprocess.run(
        train_command(flags, folder, number, values), env={**os.environ, RESULT: str(file)}
    ).returncode
    if code == INTERRUPTED or code < 0:
        raise KeyboardInterrupt
    if code == 2:
        raise UserError(f"train.py refuses the flags of trial {number}; see its message above")
    if code or not file.is_file():
        return None
    return float(json.loads(file.read_text())["fitness"])


def best_hyperparameters(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a hyperparameter file: a run's own file, with `values` over it.

    Args:
        settings: settings of the run
        values: values of the parameters, by name; a flag goes to `defaults` if it may be there
    """
    content = read_yaml(find_hyperparameters(settings["hyp"]))
    content |= {name.removeprefix(HYP): value for name, value in values.items() if name.startswith(HYP)}
    defaults = {name.replace("-", "_"): value for name, value in values.items() if not name.startswith(HYP)}
    defaults = {name: value for name, value in defaults.items() if name in SUGGESTED_BY_HYP}
    return {**content, DEFAULTS: {**content.get(DEFAULTS, {}), **defaults}} if defaults else content


def write_best(folder: Path, number: int, fitness: float, values: Mapping[str, Any]) -> None:
    """Write the complete hyperparameter file of the best trial into the folder of the search."""
    settings = read_yaml(folder / f"trial{number}" / "settings.yaml")
    others = " ".join(f"--{name} {value}" for name, value in values.items() if not name.startswith(HYP))
    head = f"# The best of the trials: trial{number}, fitness {fitness:.5f}{', with ' if others else ''}{others}\n"
    text = head + yaml.safe_dump(best_hyperparameters(settings, values), sort_keys=False)
    with replacing(folder / BEST_HYP) as file:
        file.write(text.encode())


def search(space: Space, flags: Sequence[str], folder: Path, trials: int, seed: int) -> None:
    """Run trials until there are `trials` in the folder. Raises `UserError` if a trial fails before any succeeds."""
    optuna = import_optuna()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / TRIALS)))
    study = optuna.create_study(study_name="tune", storage=storage, direction="maximize", load_if_exists=True)
    check_job(study, given_flags(TrainOptions, flags), folder)
    states = optuna.trial.TrialState
    finished = len(study.get_trials(deepcopy=False, states=(states.COMPLETE, states.FAIL)))
    study.sampler = optuna.samplers.TPESampler(seed=seed + finished)  # a continued search draws other values
    interrupted = [trial.number for trial in study.get_trials(states=(states.RUNNING,))]
    names = {parameter.name for parameter in space.parameters}
    while finished < trials:
        if interrupted:
            number = interrupted.pop(0)
            values = study.get_trials(deepcopy=False)[number].params
            if set(values) != names:  # stopped before all values were drawn, or started with another search space
                study.tell(number, state=states.FAIL)
                continue
        else:
            trial = study.ask()
            number, values = trial.number, {each.name: each.draw(trial) for each in space.parameters}
        print(f"trial {number}: {', '.join(f'{name} {_short(value)}' for name, value in values.items())}", flush=True)
        fitness = run_trial(flags, folder, number, values)
        finished += 1
        if fitness is None:
            study.tell(number, state=states.FAIL)
            if not study.get_trials(deepcopy=False, states=(states.COMPLETE,)):
                raise UserError(f"trial {number} failed before any succeeded; see its message above")
            print(f"trial {number} failed; the search goes on", flush=True)
            continue
        study.tell(number, fitness)
        best = study.best_trial
        if best.number == number:
            write_best(folder, number, fitness, values)
        print(f"trial {number}: fitness {fitness:.5f}; best: {best.value:.5f} of trial {best.number}", flush=True)
    if not study.get_trials(deepcopy=False, states=(states.COMPLETE,)):
        raise UserError(f"no trial in {folder} has succeeded; name another --folder")
    best = study.best_trial
    print(f"{plural(finished, 'trial')}; best fitness {best.value:.5f} of trial {best.number}")
    print(f"train with --hyp {folder / BEST_HYP}")


def check_job(study: Any, given: Mapping[str, Any], folder: Path) -> None:
    """Record the flags that all trials of a study share. Raises `UserError` if the study was started with others."""
    job = {name: str(given[name]) for name in JOB_FLAGS if name in given}
    before = study.user_attrs.get("job", job)
    for name in sorted({*job, *before}):
        if job.get(name) != before.get(name):
            raise UserError(
                f"--{name.replace('_', '-')} is {job.get(name)} and was {before.get(name)} when {folder} was started: "
                "their fitness cannot be compared; name another --folder"
            )
    study.set_user_attr("job", job)


def import_optuna() -> Any:
    """Return the package optuna. Raises `UserError` if it is not installed."""
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise UserError("optuna is not installed: pip install -r requirements-tune.txt") from None


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main(argv: Sequence[str] | None = None) -> None:
    """Search from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.tune",
        usage="%(prog)s [--trials N] [--folder FOLDER] [--space FILE] [--seed N] [flags of train.py]",
        description="Search for hyperparameters by optuna; each trial is a run of train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--trials", type=int, default=30, help="trials in all, earlier ones included; default: 30")
    parser.add_argument("--folder", type=Path, default=Path("runs/tune"), help="search folder; reuse it to continue")
    parser.add_argument("--space", default="sweep.yaml", help="search space, a W&B sweep file; default: sweep.yaml")
    parser.add_argument("--seed", type=int, default=0, help="seed of the values and of each trial; default: 0")
    own, more = parser.parse_known_args(argv)
    if own.trials < 1:
        raise UserError(f"--trials {own.trials} is too small; give 1 or more")
    given = given_flags(TrainOptions, more)  # refuses invalid flags
    for name in OWN_FLAGS:
        if name in given:
            raise UserError(
                f"--{name.replace('_', '-')} is set for each trial; --folder names the folder of the search"
            )
    space = read_space(find_file(own.space, "search space", ["."]))
    flags = [*_without_own(space.flags), "--log-with", "none", *more, "--seed", str(own.seed)]
    import_optuna()
    own.folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(own.folder / "tune.lock", timeout=0):
            search(space, flags, own.folder, own.trials, own.seed)
    except Timeout:
        raise UserError(f"another search is running in {own.folder}; name another --folder, or wait for it") from None
    except KeyboardInterrupt:
        print(f"stopped; the same command continues the search in {own.folder}")
        raise


def _without_own(flags: Sequence[str]) -> list[str]:
    """Return flags of train.py without `OWN_FLAGS`."""
    words: list[str] = []
    dropped = False
    for word in flags:
        if word.startswith("--"):
            dropped = word.removeprefix("--").split("=")[0].replace("-", "_") in OWN_FLAGS
        if not dropped:
            words.append(word)
    return words


if __name__ == "__main__":
    run_main(main)
