"""The W&B sweep of sweep.yaml: its search space, and a trial as W&B's agent starts it."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import RunScript
from tests.curves import rows
from tests.machines import CONFIGS
from tests.making import options_of
from utils.config.hyperparameters import OVERRIDE_PREFIX, Hyperparameters, parse_overrides
from utils.config.options import TrainOptions
from utils.config.values import Range
from utils.files import ROOT, read_yaml

PREFIX = OVERRIDE_PREFIX.removeprefix("--")
RANGES: dict[str, Range] = {name: f.metadata["within"] for name, f in Hyperparameters.__dataclass_fields__.items()}
# Keys and parameter names by W&B's schema (config/schema.json of its package `sweeps` 0.3).
REQUIRED = {"program", "method", "metric", "parameters"}
OPTIONAL = {"project", "name", "run_cap", "early_terminate", "command"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class Trial(NamedTuple):
    """The process that an agent starts: words of a command, and the environment."""

    command: list[str]
    variables: dict[str, str]


def sweep() -> dict[str, Any]:
    return read_yaml(ROOT / "sweep.yaml")


def middle(parameter: Mapping[str, Any]) -> float:
    """Return a value of the search space that is not a default."""
    least, most = parameter["min"], parameter["max"]
    logarithmic = parameter["distribution"].startswith("log_")
    return math.exp(0.6 * math.log(least) + 0.4 * math.log(most)) if logarithmic else 0.6 * least + 0.4 * most


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """Return the trial that W&B's agent would start for the middle of every range."""
    wandb_agent = pytest.importorskip("wandb.wandb_agent")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # the agent sets these; monkeypatch restores them
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "wandb"))
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep1")
    started: list[Trial] = []

    class Started:
        def __init__(self, command: list[str], env: dict[str, str], **_: Any) -> None:
            started.append(Trial(command, env))

    monkeypatch.setattr(wandb_agent, "AgentProcess", Started)
    content = sweep()
    agent = wandb_agent.Agent(api=None, queue=None, sweep_id="sweep1")
    agent._sweep_command = content["command"]
    values = {name: {"value": middle(parameter)} for name, parameter in content["parameters"].items()}
    order = {"type": "run", "run_id": "trial1", "program": content["program"], "args": values}
    assert "exception" not in agent._process_command(order)
    return started[0]


# The search space


def test_the_keys_follow_the_schema_of_wandb() -> None:
    content = sweep()
    assert REQUIRED <= set(content) <= REQUIRED | OPTIONAL
    assert content["method"] == "bayes"
    assert content["metric"] == {"name": "best/fitness", "goal": "maximize"}
    assert (ROOT / content["program"]).is_file()
    stop = content["early_terminate"]
    assert set(stop) == {"type", "min_iter", "eta", "strict"}
    assert stop["type"] == "hyperband"


def test_the_search_space_is_in_the_ranges_of_the_hyperparameters() -> None:
    parameters = sweep()["parameters"]
    for name, parameter in parameters.items():
        assert NAME.fullmatch(name)
        assert name.startswith(PREFIX)
        assert set(parameter) == {"distribution", "min", "max"}
        assert parameter["distribution"] in ("uniform", "log_uniform_values"), name
        for bound in (parameter["min"], parameter["max"]):
            assert isinstance(bound, float), name  # 1e-3 would be text
            assert bound in RANGES[name.removeprefix(PREFIX)], name
        assert parameter["min"] <= getattr(Hyperparameters, name.removeprefix(PREFIX)) <= parameter["max"], name
        assert parameter["min"] < parameter["max"]
        assert parameter["min"] > 0 or parameter["distribution"] == "uniform"


def test_the_searched_hyperparameters() -> None:
    expected = "lr0 lrf momentum weight_decay warmup_epochs box cls obj "
    expected += "hsv_h hsv_s hsv_v degrees translate scale shear fliplr mosaic mixup"
    assert [name.removeprefix(PREFIX) for name in sweep()["parameters"]] == expected.split()


# A trial


def test_the_agent_starts_a_trial_under_accelerate(trial: Trial) -> None:
    at = trial.command.index("train.py")
    launcher, words = trial.command[:at], trial.command[at + 1 :]
    assert launcher[:4] == ["/usr/bin/env", "python", "-m", "accelerate.commands.launch"]
    assert (ROOT / launcher[launcher.index("--config_file") + 1]).is_file()
    options = options_of(TrainOptions, words)
    assert (ROOT / options.data).is_file()
    assert parse_overrides(Hyperparameters, options.overrides) == {
        name.removeprefix(PREFIX): middle(parameter) for name, parameter in sweep()["parameters"].items()
    }
    assert f"--hyp.lr0={options.overrides['lr0']}" in words
    assert not any("${" in word for word in trial.command)


def test_the_environment_of_a_trial(trial: Trial, tmp_path: Path) -> None:
    variables = trial.variables
    assert (variables["WANDB_SWEEP_ID"], variables["WANDB_RUN_ID"]) == ("sweep1", "trial1")
    parameters = read_yaml(Path(variables["WANDB_SWEEP_PARAM_PATH"]))
    assert {name: value["value"] for name, value in parameters.items() if name != "wandb_version"} == {
        name: middle(parameter) for name, parameter in sweep()["parameters"].items()
    }


@pytest.mark.long
def test_a_whole_trial(trial: Trial, small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """The command of the agent, with another job and launch file."""
    swap = {"accelerate_configs/multi_gpu.yaml": str(CONFIGS / "cpu.yaml")}
    command = [swap.get(word, word) for word in trial.command]
    command[command.index("--num_processes") + 1] = "2"
    at = command.index("train.py")
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--batch-size", "4")
    how = ("--epochs", "1", "--workers", "1", "--device", "cpu", "--noautoanchor", "--project", str(tmp_path / "runs"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of an activated environment
    wandb_variables = {name: value for name, value in trial.variables.items() if name.startswith("WANDB_")}
    variables = {**wandb_variables, "WANDB_MODE": "disabled", "PATH": path, "OMP_NUM_THREADS": "1"}
    run_script("train.py", *command[at + 1 :], *what, *how, launcher=command[:at], **variables)
    settings = read_yaml(tmp_path / "runs" / "exp" / "settings.yaml")
    for name, parameter in sweep()["parameters"].items():
        key = name.removeprefix(PREFIX)
        assert settings["hyperparameters"][key] == middle(parameter) != getattr(Hyperparameters, key)
        assert settings["overrides"][key] == str(middle(parameter))
    assert len(rows(tmp_path / "runs" / "exp")) == 1
