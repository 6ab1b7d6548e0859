"""A W&B sweep: what sweep.yaml searches, and a trial of it, started as W&B's agent starts one."""

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
from utils.config.hyperparameters import OVERRIDE_PREFIX, Hyperparameters, parse_overrides
from utils.config.options import TrainOptions
from utils.config.parser import parse_options
from utils.config.ranges import Range
from utils.files import ROOT, read_yaml

PREFIX = OVERRIDE_PREFIX.removeprefix("--")
RANGES: dict[str, Range] = {name: f.metadata["within"] for name, f in Hyperparameters.__dataclass_fields__.items()}
# W&B's own (config/schema.json of its package `sweeps` 0.3): what must be there, what may be, and names of parameters
MUST, MAY = {"program", "method", "metric", "parameters"}, {"project", "name", "run_cap", "early_terminate", "command"}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


class Trial(NamedTuple):
    """What an agent starts: words of a command, and the environment."""

    command: list[str]
    variables: dict[str, str]


def sweep() -> dict[str, Any]:
    return read_yaml(ROOT / "sweep.yaml")


def middle(parameter: Mapping[str, Any]) -> float:
    """A value that the search may choose, and no default has."""
    least, most = parameter["min"], parameter["max"]
    logarithmic = parameter["distribution"].startswith("log_")
    return math.exp(0.6 * math.log(least) + 0.4 * math.log(most)) if logarithmic else 0.6 * least + 0.4 * most


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """The middle of every range, handed to W&B's agent as its server does; the agent starts nothing."""
    wandb_agent = pytest.importorskip("wandb.wandb_agent")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # the agent sets these; afterwards they are as before
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


# What is searched


def test_the_sweep_has_what_wandb_knows() -> None:
    content = sweep()
    assert set(content) >= MUST
    assert set(content) <= MUST | MAY
    assert content["method"] == "bayes"
    assert content["metric"] == {"name": "best/fitness", "goal": "maximize"}
    assert (ROOT / content["program"]).is_file()
    stop = content["early_terminate"]
    assert set(stop) == {"type", "min_iter", "eta", "strict"}
    assert stop["type"] == "hyperband"


def test_all_that_is_searched_is_in_range() -> None:
    parameters = sweep()["parameters"]
    for name, parameter in parameters.items():
        assert NAME.fullmatch(name)
        assert name.startswith(PREFIX)
        assert set(parameter) == {"distribution", "min", "max"}
        assert parameter["distribution"] in ("uniform", "log_uniform_values"), name
        for end in (parameter["min"], parameter["max"]):
            assert isinstance(end, float), name  # 1e-3 would be text
            assert end in RANGES[name.removeprefix(PREFIX)], name
        assert parameter["min"] < parameter["max"]
        assert parameter["min"] > 0 or parameter["distribution"] == "uniform"


def test_the_usual_ones_are_searched() -> None:
    searched = {name.removeprefix(PREFIX) for name in sweep()["parameters"]}
    assert searched >= {"lr0", "lrf", "momentum", "weight_decay", "warmup_epochs", "box", "cls", "obj"}
    assert searched >= {
        "hsv_h",
        "hsv_s",
        "hsv_v",
        "degrees",
        "translate",
        "scale",
        "shear",
        "fliplr",
        "mosaic",
        "mixup",
    }
    assert not searched & {"iou_t", "copy_paste"}  # no effect


def test_recipes_lie_within_what_is_searched() -> None:
    """So that a sweep can find what is known to be good."""
    recipe = vars(Hyperparameters())
    for name, parameter in sweep()["parameters"].items():
        value = recipe[name.removeprefix(PREFIX)]
        assert parameter["min"] <= value <= parameter["max"], name


# A trial


def test_the_agent_starts_a_trial_under_accelerate(trial: Trial) -> None:
    at = trial.command.index("train.py")
    launcher, words = trial.command[:at], trial.command[at + 1 :]
    assert launcher[:4] == ["/usr/bin/env", "python", "-m", "accelerate.commands.launch"]
    assert (ROOT / launcher[launcher.index("--config_file") + 1]).is_file()
    options = parse_options(TrainOptions, words)
    assert (ROOT / options.data).is_file()
    assert parse_overrides(Hyperparameters, options.overrides) == {
        name.removeprefix(PREFIX): middle(parameter) for name, parameter in sweep()["parameters"].items()
    }
    assert f"--hyp.lr0={options.overrides['lr0']}" in words
    assert not any("${" in word for word in trial.command)


def test_the_agent_tells_a_trial_which_it_is(trial: Trial, tmp_path: Path) -> None:
    variables = trial.variables
    assert (variables["WANDB_SWEEP_ID"], variables["WANDB_RUN_ID"]) == ("sweep1", "trial1")
    parameters = read_yaml(Path(variables["WANDB_SWEEP_PARAM_PATH"]))
    assert {name: value["value"] for name, value in parameters.items() if name != "wandb_version"} == {
        name: middle(parameter) for name, parameter in sweep()["parameters"].items()
    }


def test_a_whole_trial(trial: Trial, small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """Another job and launch file; all else is the agent's."""
    swap = {"accelerate_configs/multi_gpu.yaml": str(CONFIGS / "cpu.yaml")}
    command = [swap.get(word, word) for word in trial.command]
    command[command.index("--num_processes") + 1] = "2"
    at = command.index("train.py")
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--batch-size", "4")
    how = ("--epochs", "1", "--workers", "1", "--device", "cpu", "--noautoanchor", "--project", str(tmp_path / "runs"))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of an activated environment
    wandb_variables = {name: value for name, value in trial.variables.items() if name.startswith("WANDB_")}
    own = {**wandb_variables, "WANDB_MODE": "disabled", "PATH": path, "OMP_NUM_THREADS": "1"}
    run_script("train.py", *command[at + 1 :], *what, *how, launcher=command[:at], **own)
    settings = read_yaml(tmp_path / "runs" / "exp" / "settings.yaml")
    for name, parameter in sweep()["parameters"].items():
        key = name.removeprefix(PREFIX)
        assert settings["hyperparameters"][key] == middle(parameter) != getattr(Hyperparameters, key)
        assert settings["overrides"][key] == str(middle(parameter))
    assert len(rows(tmp_path / "runs" / "exp")) == 1
