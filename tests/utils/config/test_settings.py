"""All settings of a run: flags over the defaults of a task and a data set, and the hyperparameters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.making import write_yaml
from utils.config.flags import Range, TrainOptions
from utils.config.hyperparameters import Hyperparameters, Recipe, Recipes, number, read_hyperparameters
from utils.config.parser import given_flags
from utils.config.settings import Settings, refuse_flags
from utils.errors import UserError
from utils.files import ROOT

NONE = str(ROOT / "data" / "hyps" / "none.yaml")


@dataclass(frozen=True)
class StripesRecipe(Recipe):
    """The hyperparameters of a task."""

    stripes: float = number(3.0, Range(0))


@pytest.fixture
def stripes(tmp_path: Path) -> str:
    """Return the path of a hyperparameter file of the task."""
    return str(write_yaml(tmp_path / "stripes.yaml", {"lr0": 0.5, "nbs": 32, "stripes": 7}))


def settings_of(*flags: str) -> Settings:
    """Return the settings of a command line, without the defaults of task and files."""
    given = given_flags(TrainOptions, flags)
    return Settings(TrainOptions(**given), given)


# With the defaults and hyperparameters of a task


def test_defaults_of_task_and_data_set(stripes: str) -> None:
    settings = settings_of("--data", "mine.yaml", "--imgsz", "96", "--hyp.stripes", "5", "--hyp.lr0=0.25")
    defaults = (
        {"imgsz": 224, "epochs": 50, "optimizer": "Adam", "hyp": NONE},
        {"imgsz": 64, "epochs": 20, "hyp": stripes},
    )
    complete = settings.with_defaults(*defaults).resolve(StripesRecipe, pytest.fail)
    assert complete.options == replace(settings.options, imgsz=96, epochs=20, optimizer="Adam", hyp=stripes)
    assert complete.hyp == StripesRecipe(lr0=0.25, nbs=32, stripes=5.0)


# --hyp auto


DETECTOR = Recipes(trained="finetune", few="scratch-small", many="low", yolov5="low")


@pytest.mark.parametrize(
    ("trained", "images", "name"),
    [(True, None, "finetune"), (False, 1, "scratch-small"), (False, 4999, "scratch-small"), (False, 5000, "low")],
)
def test_the_choice(trained: bool, images: int | None, name: str) -> None:
    """Images are counted only if it matters."""
    assert DETECTOR.choose(trained, lambda: images or pytest.fail("counted")) == name
    assert Recipes("mine").choose(trained, lambda: pytest.fail("counted")) == "mine"


def chosen(*flags: str, **defaults: str) -> Settings:
    """Return the settings of a detector that starts from trained weights."""
    choose = partial(DETECTOR.choose, True, lambda: 0)
    return settings_of("--data", "a", *flags).with_defaults(defaults).resolve(Hyperparameters, choose)


@pytest.mark.parametrize("flags", [(), ("--hyp", "auto")])
def test_what_auto_chose_is_recorded_and_said(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A named file wins, by a flag or by the data YAML; --hyp auto wins over the latter."""
    settings = chosen(*flags)
    assert (settings.options.hyp, settings.options.optimizer, settings.options.cos_lr) == ("finetune", "AdamW", True)
    assert settings.hyp == read_hyperparameters("finetune", Hyperparameters)
    assert "--hyp finetune" in capsys.readouterr().out
    other = chosen(*flags, "--optimizer", "SGD").options
    assert (other.hyp, other.optimizer, other.cos_lr) == ("finetune", "SGD", True)
    assert chosen("--hyp", "auto", hyp="low").options.hyp == "finetune"
    capsys.readouterr()
    assert chosen("--hyp", "low").options.hyp == chosen(hyp="low").options.hyp == "low"
    assert capsys.readouterr().out == ""


def test_defaults_of_the_hyperparameter_file(tmp_path: Path) -> None:
    """A flag comes before them, and they come before those of the data set and the task."""
    defaults = {"optimizer": "AdamW", "epochs": 40, "imgsz": 320}
    hyp = str(write_yaml(tmp_path / "hyp.yaml", {"lr0": 0.5, "defaults": defaults}))
    settings = settings_of("--data", "a", "--imgsz", "96")
    layers = {"hyp": hyp, "epochs": 50, "batch_size": 8}, {"epochs": 20, "cos_lr": True}
    complete = settings.with_defaults(*layers).resolve(Recipe, pytest.fail)
    expected = {"hyp": hyp, "imgsz": 96, "optimizer": "AdamW", "epochs": 40, "batch_size": 8, "cos_lr": True}
    assert complete.options == replace(settings.options, **expected)
    assert complete.hyp == Recipe(lr0=0.5)


@pytest.mark.parametrize(("defaults", "named"), [({"epoch": 3}, "epoch"), ({"epochs": 0}, "epochs"), ([1], "defaults")])
def test_wrong_defaults_of_the_hyperparameter_file(tmp_path: Path, defaults: object, named: str) -> None:
    hyp = str(write_yaml(tmp_path / "hyp.yaml", {"defaults": defaults}))
    with pytest.raises(UserError, match=rf"hyp\.yaml: .*{named}"):
        settings_of("--hyp", hyp).resolve(Recipe, pytest.fail)


@pytest.mark.parametrize(
    ("flags", "is_fixed", "final"), [((), False, 4), (("--close-mosaic", "1"), False, 1), ((), True, 0)]
)
def test_flags_that_follow_from_the_hyperparameters(flags: tuple[str, ...], is_fixed: bool, final: int) -> None:
    @dataclass(frozen=True)
    class HalvingRecipe(Hyperparameters):
        def flags(self, epochs: int) -> dict[str, Any]:
            return {"close_mosaic": epochs // 2}

    settings = replace(settings_of("--hyp", NONE, "--epochs", "9", *flags), is_fixed=is_fixed)
    assert settings.resolve(HalvingRecipe, pytest.fail).options.close_mosaic == final


@pytest.mark.parametrize(("key", "value"), [("lr0", "high"), ("lr0", -1), ("lr9", 1)])
def test_edited_hyperparameters_of_a_resumed_run_are_checked(key: str, value: object) -> None:
    saved = {"hyperparameters": {**vars(StripesRecipe()), key: value}, "model": {}}
    settings = Settings(TrainOptions(resume="runs/exp"), {"resume": "runs/exp"}, saved, is_fixed=True)
    with pytest.raises(UserError, match=rf"^settings\.yaml of runs/exp: .*{key}"):
        settings.resolve(StripesRecipe, pytest.fail)


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("--hyp.lr0 1 --hyp.box 1 --rect --hashes", ""),
        ("--hyp.obj 1", "--hyp.obj has no effect on detect"),
        ("--noautoanchor", "--noautoanchor needs anchors, which detect does not have"),
        ("--batch-size 3 --logical-processes 2", "--batch-size 3 .* 2, the number of logical processes"),
        ("--profile 3:2", "--profile 3:2: give"),
        ("--no-deterministic --logical-processes 2", "--no-deterministic"),
        ("--rect --image-weights", "--rect and --image-weights"),
        ("zero --hashes", "--hashes cannot see DeepSpeed's gradients"),
    ],
)
def test_refused_flags(flags: str, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model, the launch, and one by another."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", str("zero" in flags).lower())
    settings = settings_of(*flags.removeprefix("zero ").split())
    with pytest.raises(UserError, match=f"^{refused}") if refused else nullcontext():
        refuse_flags(settings.options, settings.flags, {"padding"}, "detect", ("obj",))
