"""All settings of a run: flags over the defaults of a task and a data set, and the hyperparameters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from utils.config.hyperparameters import Recipe, number
from utils.config.options import BUILT_IN_JOB, TrainOptions
from utils.config.ranges import Range
from utils.config.settings import Settings, parse_settings
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
    file = tmp_path / "stripes.yaml"
    file.write_text("lr0: 0.5\nnbs: 32\nstripes: 7\n")
    return str(file)


# The command line


def test_without_files_it_is_the_built_in_job() -> None:
    flags = ("--epochs", "2", "--device", "cpu")
    settings = parse_settings(flags)
    assert settings == Settings(TrainOptions(**{**BUILT_IN_JOB, "epochs": 2, "device": "cpu"}), flags)  # type: ignore[arg-type]
    assert (settings.saved, settings.is_fixed, settings.hyp) == (None, False, Recipe())


@pytest.mark.parametrize("flag", ["data", "cfg", "weights", "hyp"])
def test_a_file_replaces_the_whole_built_in_job(flag: str) -> None:
    options = parse_settings([f"--{flag}", "mine"]).options
    assert options == replace(TrainOptions(), **{flag: "mine"})


def test_a_wrong_flag_ends_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_settings(["--epoch", "3"])
    assert ended.value.code == 2
    assert "--epochs" in capsys.readouterr().err


# With the defaults and hyperparameters of a task


def test_defaults_of_task_and_data_set(stripes: str) -> None:
    settings = parse_settings(["--data", "mine.yaml", "--imgsz", "96", "--hyp", stripes])
    complete = settings.for_task(
        StripesRecipe, {"imgsz": 224, "epochs": 50, "optimizer": "Adam"}, {"imgsz": 64, "epochs": 20}
    )
    options = complete.options
    assert options.imgsz == 96  # given
    assert options.epochs == 20  # the data set's before the task's
    assert options.optimizer == "Adam"
    assert options.data == "mine.yaml"
    assert settings.options.epochs == 100
    assert complete.hyp == StripesRecipe(lr0=0.5, nbs=32, stripes=7.0)


def test_a_default_may_name_the_hyperparameters(stripes: str) -> None:
    assert parse_settings(["--data", "a"]).for_task(StripesRecipe, {"hyp": stripes}).hyp.lr0 == 0.5
    flags = ["--data", "a", "--hyp", stripes, "--hyp.stripes", "5", "--hyp.lr0=0.25"]
    assert parse_settings(flags).for_task(StripesRecipe, {"hyp": NONE}).hyp == StripesRecipe(
        lr0=0.25, nbs=32, stripes=5.0
    )


def test_wrong_hyperparameters(stripes: str) -> None:
    with pytest.raises(UserError, match=r"stripes\.yaml: unknown key 'stripes'"):
        parse_settings(["--hyp", stripes]).for_task(Recipe)
    with pytest.raises(UserError, match=r"unknown flag --hyp\.stripe "):
        parse_settings(["--hyp", stripes, "--hyp.stripe", "1"]).for_task(StripesRecipe)
    with pytest.raises(UserError, match=r"hyperparameter file 'nowhere\.yaml' is not a file"):
        parse_settings(["--hyp", "nowhere.yaml"]).for_task(StripesRecipe)


def test_options_of_an_earlier_start_have_their_defaults_already(stripes: str) -> None:
    options = TrainOptions(hyp=stripes, epochs=30)
    settings = Settings(options, ("--resume", "runs/train/exp"), is_fixed=True)
    complete = settings.for_task(StripesRecipe, {"epochs": 50, "imgsz": 224})
    assert complete.options == options
    assert complete.hyp.lr0 == 0.5


def test_a_resumed_run_has_its_saved_hyperparameters() -> None:
    saved = {**vars(TrainOptions()), "hyperparameters": vars(StripesRecipe(lr0=0.125)), "model": {}}
    settings = Settings(TrainOptions(hyp="gone.yaml"), (), saved, is_fixed=True)
    complete = settings.for_task(StripesRecipe, {"epochs": 50})
    assert complete.hyp == StripesRecipe(lr0=0.125)
    assert complete.options == settings.options


@pytest.mark.parametrize(
    ("batch_size", "nbs", "batches"), [(16, 64, 4), (48, 64, 1), (8, 0, 1), (-1, 64, 64), (128, 64, 1)]
)
def test_batches_of_an_optimizer_step(batch_size: int, nbs: int, batches: int) -> None:
    """A batch size of -1 is not measured yet."""
    assert Settings(TrainOptions(batch_size=batch_size), hyp=Recipe(nbs=nbs)).accumulation == batches


# What others read


def test_changes_since_the_run_was_started() -> None:
    options = TrainOptions(epochs=12, workers=2)
    assert Settings(options).changes == []
    saved = yaml.safe_load(yaml.safe_dump(vars(TrainOptions(epochs=10))))  # with lists instead of tuples
    assert Settings(options, (), saved).changes == [
        "--epochs is 12 and was 10",
        "--workers is 2 and was 8",
        "the learning rate from here on is that of a run of 12 epochs",
    ]


def test_other_values_are_other_settings() -> None:
    settings = Settings(TrainOptions(), ("--seed", "1"), hyp=Recipe(nbs=8))
    other = settings.with_options(batch_size=24, wandb_id="abc")
    assert (other.options.batch_size, other.options.wandb_id) == (24, "abc")
    assert (other.argv, other.hyp) == (settings.argv, settings.hyp)
    assert settings.options == TrainOptions()


@dataclass(frozen=True)
class LoaderOptions:
    """The flags of a part."""

    workers: int
    cache: str
    images: int = 0


def test_a_part_gets_its_flags() -> None:
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
