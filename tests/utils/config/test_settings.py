"""All settings of a run: flags over the defaults of a task and a data set, and the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.making import write_yaml
from utils.config.hyperparameters import Hyperparameters, Recipe, Recipes, number, read_hyperparameters
from utils.config.options import TrainOptions
from utils.config.parser import given_flags, over_defaults
from utils.config.settings import Settings
from utils.config.values import Range
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
    return Settings(over_defaults(TrainOptions, given), given)


# With the defaults and hyperparameters of a task


def test_defaults_of_task_and_data_set(stripes: str) -> None:
    settings = settings_of("--data", "mine.yaml", "--imgsz", "96", "--hyp", stripes)
    complete = settings.resolve(
        StripesRecipe, {"imgsz": 224, "epochs": 50, "optimizer": "Adam"}, {"imgsz": 64, "epochs": 20}
    )
    options = complete.options
    assert options == replace(settings.options, imgsz=96, epochs=20, optimizer="Adam")
    assert complete.hyp == StripesRecipe(lr0=0.5, nbs=32, stripes=7.0)


def test_a_default_may_name_the_hyperparameters(stripes: str) -> None:
    assert settings_of("--data", "a").resolve(StripesRecipe, {"hyp": stripes}).hyp.lr0 == 0.5
    flags = ["--data", "a", "--hyp", stripes, "--hyp.stripes", "5", "--hyp.lr0=0.25"]
    assert settings_of(*flags).resolve(StripesRecipe, {"hyp": NONE}).hyp == StripesRecipe(lr0=0.25, nbs=32, stripes=5.0)


# --hyp auto


DETECTOR = Recipes(trained="finetune", few="scratch-small", many="low", yolov5="low")


@pytest.mark.parametrize(
    ("trained", "images", "name", "reason"),
    [
        (True, None, "finetune", "the run starts from trained weights"),
        (False, 1, "scratch-small", "the run starts from scratch on 1 image, fewer than 5000"),
        (False, 4999, "scratch-small", "the run starts from scratch on 4999 images, fewer than 5000"),
        (False, 5000, "low", "the run starts from scratch on 5000 images, at least 5000"),
    ],
)
def test_the_choice(trained: bool, images: int | None, name: str, reason: str) -> None:
    """Images are counted only if it matters."""
    assert DETECTOR.choose(trained, lambda: images or pytest.fail("counted")) == (name, reason, "low")


def test_a_task_with_fewer_files() -> None:
    def count() -> int:
        pytest.fail("counted")

    assert [Recipes("mine").choose(trained, count).name for trained in (True, False)] == ["mine", "mine"]
    assert Recipes("fine", "scratch").choose(False, count)[:2] == ("scratch", "the run starts from scratch")


def chosen(*flags: str, **defaults: str) -> Settings:
    """Return the settings of a detector that starts from trained weights."""
    choose = partial(DETECTOR.choose, True, lambda: 0)
    return settings_of("--data", "a", *flags).resolve(Hyperparameters, defaults, choose=choose)


@pytest.mark.parametrize("flags", [(), ("--hyp", "auto")])
def test_what_auto_chose_is_recorded_and_said(flags: tuple[str, ...]) -> None:
    settings = chosen(*flags)
    assert (settings.options.hyp, settings.options.optimizer, settings.options.cos_lr) == ("finetune", "AdamW", True)
    assert settings.hyp == read_hyperparameters("finetune", Hyperparameters)
    because = "hyperparameters: --hyp finetune, because the run starts from trained weights"
    assert settings.choice == f"{because}; --hyp low has YOLOv5's values"
    other = chosen(*flags, "--optimizer", "SGD", "--cos-lr")
    assert (other.options.optimizer, other.options.cos_lr) == ("SGD", True)
    assert other.choice == f"{because}; your --optimizer SGD replaces its AdamW; --hyp low has YOLOv5's values"


def test_a_named_file_wins_over_the_choice() -> None:
    """By a flag, or by the data YAML; --hyp auto wins over the latter."""
    for settings in (chosen("--hyp", "low"), chosen(hyp="low")):
        assert (settings.options.hyp, settings.choice) == ("low", "")
    assert chosen("--hyp", "auto", hyp="low").options.hyp == "finetune"


def test_the_value_of_a_flag_before_the_hyperparameters_are_known() -> None:
    settings = settings_of("--data", "a", "--imgsz", "96")
    layers = ({"weights": "", "imgsz": 224}, {"weights": "mine.pt", "imgsz": 64})
    assert [settings.value(flag, *layers) for flag in ("imgsz", "weights", "seed")] == [96, "mine.pt", 0]
    assert replace(settings, is_fixed=True).value("weights", *layers) == settings.options.weights


@dataclass(frozen=True)
class HalvingRecipe(Hyperparameters):
    """Hyperparameters from which a flag follows."""

    def flags(self, epochs: int) -> dict[str, Any]:
        return {"close_mosaic": epochs // 2}


def test_defaults_of_the_hyperparameter_file(tmp_path: Path) -> None:
    """A flag comes before them, and they come before those of the data set and the task."""
    defaults = {"optimizer": "AdamW", "epochs": 40, "imgsz": 320}
    hyp = str(write_yaml(tmp_path / "hyp.yaml", {"lr0": 0.5, "defaults": defaults}))
    settings = settings_of("--data", "a", "--imgsz", "96")
    complete = settings.resolve(Recipe, {"hyp": hyp, "epochs": 50, "batch_size": 8}, {"epochs": 20, "cos_lr": True})
    expected = {"hyp": hyp, "imgsz": 96, "optimizer": "AdamW", "epochs": 40, "batch_size": 8, "cos_lr": True}
    assert complete.options == replace(settings.options, **expected)
    assert complete.hyp == Recipe(lr0=0.5)


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"epoch": 3}, r"unknown key 'epoch' under `defaults` \(did you mean 'epochs'"),
        ({"hyp": "low"}, r"unknown key 'hyp' under `defaults`.*; known are epochs, "),
        ({"epochs": 0}, r"`epochs` under `defaults` is 0, which --epochs refuses"),
        ([1], r"`defaults` must be lines such as"),
    ],
)
def test_wrong_defaults_of_the_hyperparameter_file(tmp_path: Path, defaults: object, message: str) -> None:
    hyp = str(write_yaml(tmp_path / "hyp.yaml", {"defaults": defaults}))
    with pytest.raises(UserError, match=rf"hyp\.yaml: {message}"):
        settings_of("--hyp", hyp).resolve(Recipe)


def test_flags_that_follow_from_the_hyperparameters() -> None:
    assert settings_of("--hyp", NONE, "--epochs", "9").resolve(HalvingRecipe).options.close_mosaic == 4
    given = ["--hyp", NONE, "--epochs", "9", "--close-mosaic", "1"]
    assert settings_of(*given).resolve(HalvingRecipe).options.close_mosaic == 1
    fixed = Settings(TrainOptions(hyp=NONE, epochs=9), is_fixed=True)
    assert fixed.resolve(HalvingRecipe).options.close_mosaic == 0


def test_a_new_run_fits_its_hyperparameters_to_the_weights_and_a_resumed_one_has_them() -> None:
    hyp = Hyperparameters(known_lr=0.25)
    settings, messages = Settings(TrainOptions(), hyp=hyp).for_weights(1.0)
    assert settings.hyp == replace(hyp, lr_factor=0.25)
    assert len(messages) == 1
    resumed = Settings(TrainOptions(), {}, {"model": {}}, hyp=settings.hyp)
    assert resumed.for_weights(1.0) == (resumed, [])


def test_hyperparameters_of_another_task_are_refused(stripes: str) -> None:
    with pytest.raises(UserError, match=r"stripes\.yaml: unknown key 'stripes'"):
        settings_of("--hyp", stripes).resolve(Recipe)


def test_options_of_an_earlier_start_get_no_defaults(stripes: str) -> None:
    options = TrainOptions(hyp=stripes, epochs=30)
    settings = Settings(options, {"resume": "runs/train/exp"}, is_fixed=True)
    complete = settings.resolve(StripesRecipe, {"epochs": 50, "imgsz": 224})
    assert complete.options == options
    assert complete.hyp.lr0 == 0.5


@pytest.mark.parametrize(("key", "value"), [("lr0", "high"), ("lr0", -1), ("lr9", 1)])
def test_edited_hyperparameters_of_a_resumed_run_are_checked(key: str, value: object) -> None:
    saved = {"hyperparameters": {**vars(StripesRecipe()), key: value}, "model": {}}
    settings = Settings(TrainOptions(resume="runs/exp"), {"resume": "runs/exp"}, saved, is_fixed=True)
    with pytest.raises(UserError, match=rf"^settings\.yaml of runs/exp: .*{key}"):
        settings.resolve(StripesRecipe)


def test_a_resumed_run_has_its_saved_hyperparameters() -> None:
    saved = {**vars(TrainOptions()), "hyperparameters": vars(StripesRecipe(lr0=0.125)), "model": {}}
    settings = Settings(TrainOptions(hyp="gone.yaml"), {}, saved, is_fixed=True)
    complete = settings.resolve(StripesRecipe, {"epochs": 50})
    assert complete.hyp == StripesRecipe(lr0=0.125)
    assert complete.options == settings.options


@pytest.mark.parametrize(
    ("batch_size", "nbs", "batches"), [(16, 64, 4), (48, 64, 1), (8, 0, 1), (-1, 64, 64), (128, 64, 1)]
)
def test_accumulation(batch_size: int, nbs: int, batches: int) -> None:
    """A batch size of -1 has not been measured yet."""
    assert Settings(TrainOptions(batch_size=batch_size), hyp=Recipe(nbs=nbs)).accumulation == batches


def test_a_flag_whose_hyperparameter_nothing_reads_is_refused_for_a_new_run() -> None:
    settings, model = settings_of("--hyp.lr0", "1", "--hyp.obj", "1"), "detect with the head DetectDFL"
    settings.refuse_unread(("box",), model)
    replace(settings, saved={"obj": 1}).refuse_unread(("box", "obj"), model)
    with pytest.raises(UserError) as caught:
        settings.refuse_unread(("box", "obj"), model)
    assert str(caught.value) == f"--hyp.obj has no effect on {model}, which does not read it; leave it out"


# Views of the settings


def test_changes_since_the_run_was_started() -> None:
    options = TrainOptions(workers=2)
    assert Settings(options).changes == []
    saved = yaml.safe_load(yaml.safe_dump(vars(TrainOptions())))  # with lists instead of tuples
    assert Settings(options, {}, saved).changes == ["--workers is 2 and was 8"]


def test_settings_with_other_options() -> None:
    settings = Settings(TrainOptions(), {"seed": 1}, hyp=Recipe(nbs=8))
    changed = settings.with_options(batch_size=24)
    assert changed == replace(settings, options=TrainOptions(batch_size=24))
    assert settings.options == TrainOptions()


@dataclass(frozen=True)
class LoaderOptions:
    """The flags of a component."""

    workers: int
    cache: str
    images: int = 0


def test_a_component_gets_its_flags() -> None:
    settings = Settings(TrainOptions(workers=3, cache="ram"))
    assert settings.select(LoaderOptions) == LoaderOptions(3, "ram")
    assert settings.select(LoaderOptions, images=7, cache="") == LoaderOptions(3, "", 7)


def test_the_content_of_settings_yaml() -> None:
    settings = Settings(TrainOptions(imgsz=100, overrides={"lr0": "0.1"}), hyp=StripesRecipe(lr0=0.1))
    assert settings.flags() == vars(settings.options)
    content = settings.content({"nc": 3}, 128)
    assert list(content)[: len(settings.flags())] == list(settings.flags())
    assert content == {
        **settings.flags(),
        "imgsz": 128,
        "hyperparameters": vars(StripesRecipe(lr0=0.1)),
        "model": {"nc": 3},
    }
    assert settings.options.imgsz == 100
