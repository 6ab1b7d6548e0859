"""The search for hyperparameters: its space, the command of a trial, the file of the best one; and by optuna itself."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import not_here
from tests.making import options_of, write_yaml
from utils import tune
from utils.config.hyperparameters import Hyperparameters, parse_overrides, read_hyperparameters
from utils.config.options import TrainOptions
from utils.config.parser import defaults_of_hyp
from utils.errors import UserError
from utils.files import ROOT, read_yaml
from utils.python_api import RESULT
from utils.tune import Parameter, best_hyperparameters, read_space, run_trial, train_command

# The search space


class Highest:
    """An optuna trial that takes the highest value of every range, and the last choice."""

    def suggest_float(self, name: str, low: float, high: float, log: bool) -> float:
        assert low < high
        return high

    def suggest_int(self, name: str, low: int, high: int) -> int:
        assert type(low) is type(high) is int
        return high

    def suggest_categorical(self, name: str, choices: list[Any]) -> Any:
        return choices[-1]


def test_the_space_is_that_of_the_sweep() -> None:
    space, content = read_space(ROOT / "sweep.yaml"), read_yaml(ROOT / "sweep.yaml")
    assert [parameter.name for parameter in space.parameters] == list(content["parameters"])
    for parameter in space.parameters:
        expected = content["parameters"][parameter.name]
        assert (parameter.low, parameter.high) == (expected["min"], expected["max"])
        assert parameter.log == (expected["distribution"] == "log_uniform_values")
        assert parameter.draw(Highest()) == expected["max"]
    options = options_of(TrainOptions, space.flags)
    assert (options.hyp, options.epochs, options.sync_bn, options.noplots) == ("low", 30, True, True)


def test_choices_and_whole_numbers(tmp_path: Path) -> None:
    parameters = {
        "optimizer": {"values": ["SGD", "AdamW"]},
        "imgsz": {"value": 64},
        "hyp.nbs": {"distribution": "int_uniform", "min": 8, "max": 64},
    }
    space = read_space(write_yaml(tmp_path / "space.yaml", {"parameters": parameters}))
    assert space.flags == []
    assert space.parameters == [
        Parameter("optimizer", choices=("SGD", "AdamW")),
        Parameter("imgsz", choices=(64,)),
        Parameter("hyp.nbs", 8, 64, whole=True),
    ]
    assert [parameter.draw(Highest()) for parameter in space.parameters] == ["AdamW", 64, 64]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "`parameters` must have a line for each value to search"),
        ({"parameters": [1]}, "`parameters` must have a line for each value to search"),
        ({"parameters": {"hyp.lr0": 0.1}}, "space.yaml: hyp.lr0 must be like"),
        ({"parameters": {"hyp.lr0": {"values": []}}}, "hyp.lr0: `values` must be a list"),
        ({"parameters": {"hyp.lr0": {"min": 0, "max": 1}}}, "hyp.lr0: distribution None is not supported"),
        ({"parameters": {"hyp.lr0": {"distribution": "normal", "mu": 0}}}, "distribution 'normal' is not supported"),
        (
            {"parameters": {"a": {"distribution": "uniform", "min": 1, "max": 1}}},
            "are not a range of numbers for uniform",
        ),
        ({"parameters": {"a": {"distribution": "uniform", "min": "1e-3", "max": 1}}}, "are not a range of numbers"),
        ({"parameters": {"a": {"distribution": "log_uniform_values", "min": 0, "max": 1}}}, "not a range of numbers"),
        ({"parameters": {"a": {"value": 1}}, "command": ["${args}"]}, "`command` has no ${program}"),
    ],
)
def test_wrong_spaces(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_space(write_yaml(tmp_path / "space.yaml", content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# A trial


def test_the_command_of_a_trial(tmp_path: Path) -> None:
    values = {"hyp.lr0": 0.0123456789012345, "optimizer": "AdamW", "hyp.nbs": 16}
    command = train_command(["--data", "a.yaml", "--data", "my.yaml"], tmp_path, 7, values)
    assert command[:2] == [sys.executable, str(ROOT / "train.py")]
    options = options_of(TrainOptions, command[2:])
    assert (options.data, options.optimizer, options.resume) == ("my.yaml", "AdamW", "auto")
    assert (options.project, options.name) == (str(tmp_path), "trial7")
    parsed = parse_overrides(Hyperparameters, options.overrides)
    assert parsed == {"lr0": 0.0123456789012345, "nbs": 16}


def trained(code: int, fitness: float | None) -> Any:
    """Return a substitute of `subprocess.run`: a training that ends with `code`, with a result if it has a fitness."""

    def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        if fitness is not None:
            Path(env[RESULT]).write_text(json.dumps({"fitness": fitness}))
        return subprocess.CompletedProcess(command, code)

    return run


def test_the_result_of_a_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune.subprocess, "run", trained(0, 0.25))
    assert run_trial([], tmp_path, 0, {}) == 0.25
    monkeypatch.setattr(tune.subprocess, "run", trained(1, None))
    assert run_trial([], tmp_path, 0, {}) is None  # not the result of before
    monkeypatch.setattr(tune.subprocess, "run", trained(2, None))
    with pytest.raises(UserError, match="refuses the flags of trial 3"):
        run_trial([], tmp_path, 3, {})
    for code in (130, -9):
        monkeypatch.setattr(tune.subprocess, "run", trained(code, None))
        with pytest.raises(KeyboardInterrupt):
            run_trial([], tmp_path, 0, {})


def test_the_best_file_is_one_for_hyp(tmp_path: Path) -> None:
    """The file of the trials with the drawn values over it, not what a run derived from its weights."""
    values = {"hyp.lr0": 0.005, "optimizer": "AdamW", "imgsz": 64, "batch-size": 4, "weights": "x.pt"}
    write_yaml(tmp_path / "trial4" / "settings.yaml", {"hyp": "finetune", "hyperparameters": {"lr_factor": 0.1}})
    tune.write_best(tmp_path, 4, 0.5, values)
    file = tmp_path / "best.yaml"
    assert file.read_text().startswith(
        "# The best of the trials: trial4, fitness 0.50000, with --optimizer AdamW --imgsz"
    )
    recipe = read_hyperparameters(str(file), Hyperparameters)
    assert vars(recipe) == {**vars(read_hyperparameters("finetune", Hyperparameters)), "lr0": 0.005}
    expected = {**defaults_of_hyp("finetune"), "optimizer": "AdamW", "imgsz": 64, "batch_size": 4}
    assert defaults_of_hyp(str(file)) == expected
    assert best_hyperparameters({"hyp": "low"}, {"hyp.box": 0.1}) == {
        **read_yaml(ROOT / "data/hyps/low.yaml"),
        "box": 0.1,
    }


# The command


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trials 0", "--trials 0 is too small; give 1 or more"),
        ("--project x", "--project is set for each trial; --folder names the folder of the search"),
        ("--resume", "--resume is set for each trial"),
        ("--space nowhere.yaml", "search space 'nowhere.yaml' is not a file"),
        ("--data my.yaml", "optuna is not installed: pip install -r requirements-tune.txt"),
    ],
)
def test_one_sentence_for_what_cannot_be(
    flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    with pytest.raises(UserError) as caught:
        tune.main(["--folder", str(tmp_path / "tune"), *flags.split()])
    assert message in str(caught.value)
    assert not (tmp_path / "tune").exists()


def test_a_wrong_flag_of_training_is_refused_at_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tune.main(["--epohcs", "3"])
    assert caught.value.code == 2
    assert "unknown flag --epohcs (did you mean '--epochs'?)" in capsys.readouterr().err


# By optuna


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a search whose trainings have a fitness at once: 1 - lr0. It calls `before` with a trial's number."""
    if importlib.util.find_spec("optuna") is None:
        not_here("the package optuna (requirements-tune.txt)")
    calls: list[tuple[int, float]] = []

    def run(*flags: str, before: Any = lambda number: None) -> list[tuple[int, float]]:
        def one(flags: list[str], folder: Path, number: int, values: dict[str, Any]) -> float | None:
            calls.append((number, values["hyp.lr0"]))
            write_yaml(folder / f"trial{number}" / "settings.yaml", {"hyp": "low"})
            return None if before(number) == "fails" else 1 - values["hyp.lr0"]

        monkeypatch.setattr(tune, "run_trial", one)
        calls.clear()
        tune.main(["--folder", str(tmp_path / "tune"), *flags])
        return list(calls)

    return run


def test_a_search_keeps_the_best(search: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = search("--trials", "5")
    assert [number for number, _ in calls] == [0, 1, 2, 3, 4]
    least = min(value for _, value in calls)
    assert read_hyperparameters(str(tmp_path / "tune" / "best.yaml"), Hyperparameters).lr0 == least
    assert f"train with --hyp {tmp_path / 'tune' / 'best.yaml'}" in capsys.readouterr().out
    assert search("--trials", "5") == []  # they are done
    more = search("--trials", "7")
    assert [number for number, _ in more] == [5, 6]
    assert not {value for _, value in more} & {value for _, value in calls}


def test_an_interrupted_trial_is_resumed_with_its_values(search: Any) -> None:
    values: list[float] = []

    def stop(number: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search("--trials", "4", before=stop)
    calls = search("--trials", "4", before=lambda number: values.append(number))
    assert [number for number, _ in calls] == [2, 3]


def test_a_failed_trial_counts_but_not_the_first(search: Any) -> None:
    calls = search("--trials", "3", before=lambda number: "fails" if number == 1 else "")
    assert [number for number, _ in calls] == [0, 1, 2]
    with pytest.raises(UserError, match=r"^--data is my\.yaml and was data/coco128\.yaml when "):
        search("--trials", "4", "--data", "my.yaml")


def test_a_search_ends_if_no_trial_succeeds(search: Any) -> None:
    with pytest.raises(UserError, match="trial 0 failed before any succeeded"):
        search("--trials", "3", before=lambda number: "fails")
    with pytest.raises(UserError, match=r"^no trial in .* has succeeded; name another --folder$"):
        search("--trials", "1")
