"""The options of a resumed run: its settings, the flags of this start, and the changes that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from utils.config.hyperparameters import Hyperparameters, Recipe, number, parse_overrides
from utils.config.options import TrainOptions
from utils.config.parser import given_flags
from utils.config.resumed import CURVE_FLAGS, changes, check_settings, from_plain, resumed_options
from utils.config.values import Range
from utils.errors import UserError
from utils.files import ROOT

LOW = str(ROOT / "data" / "hyps" / "low.yaml")
RUN = Path("runs") / "exp"
ADVICE = f"leave it out, or start a new run from {RUN / 'weights' / 'last.pt'}"
BEGUN = {"epochs": 10, "batch_size": 8, "imgsz": 96, "hyp": LOW, "freeze": (0, 2), "workers": 1, "device": "cpu"}


@dataclass(frozen=True)
class OtherRecipe(Recipe):
    """The hyperparameters of a task that is not detection."""

    stripes: float = number(3.0, Range(0))


def recipe_of(settings: Mapping[str, Any], given: Mapping[str, Any]) -> type[Recipe]:
    return {"detect": Hyperparameters, "other": OtherRecipe}[settings["model"]["task"]]


def saved(hyperparameters: Recipe | None = None, task: str = "detect", **options: Any) -> dict[str, Any]:
    """Return the settings of a run as read from its settings.yaml."""
    settings = {**vars(TrainOptions()), **BEGUN, **options}
    settings |= {"hyperparameters": vars(hyperparameters or Hyperparameters()), "model": {"task": task, "nc": 3}}
    read: dict[str, Any] = yaml.safe_load(yaml.safe_dump(settings))
    return read


def resumed(settings: Mapping[str, Any], *flags: str, launched: bool = False) -> TrainOptions:
    return resumed_options(TrainOptions, given_flags(TrainOptions, flags), RUN, settings, recipe_of, launched)


def refused(settings: Mapping[str, Any], *flags: str) -> str:
    """Return the message of the error."""
    with pytest.raises(UserError) as caught:
        resumed(settings, *flags)
    return str(caught.value)


# Merging


def test_a_run_continues_with_its_settings() -> None:
    expected = TrainOptions(**BEGUN, project="runs", name="exp", exist_ok=True, resume=str(RUN))  # type: ignore[arg-type]
    assert resumed(saved()) == resumed(saved(), "--resume", "runs/exp") == expected


def test_flags_take_precedence_over_the_settings() -> None:
    flags = ("--project", "elsewhere", "--name", "other", "--workers", "3", "--epochs", "20", "--data", "moved.yaml")
    options = resumed(saved(), *flags)
    assert (options.workers, options.epochs, options.data) == (3, 20, "moved.yaml")
    assert (options.project, options.name, options.exist_ok) == ("runs", "exp", True)  # its folder does not change


def test_a_launcher_decides_on_devices_and_processes() -> None:
    settings = saved(device="0,1", processes=2)
    options = resumed(settings)
    assert (options.device, options.processes) == ("0,1", 2)
    options = resumed(settings, launched=True)
    assert (options.device, options.processes) == ("", 0)


def test_a_time_limit_is_not_taken_from_the_settings() -> None:
    assert resumed(saved(time_limit=2.5)).time_limit == 0
    assert resumed(saved(time_limit=2.5), "--time-limit", "3").time_limit == 3


def test_settings_of_another_version() -> None:
    """Settings that are no longer flags are ignored, and new flags have their defaults."""
    settings = saved(gone=1)
    del settings["max_skips"], settings["seed"]
    options = resumed(settings, "--seed", "0")
    assert (options.max_skips, options.seed) == (TrainOptions.max_skips, 0)


def test_plain_values() -> None:
    options = TrainOptions(freeze=(1, 2), wandb_tags=("a",), overrides={"lr0": "1"})
    assert from_plain(TrainOptions, yaml.safe_load(yaml.safe_dump(vars(options)))) == options


# A settings.yaml that was edited

SOURCE = RUN / "settings.yaml"


def checked(changes: Mapping[str, Any], recorded: Mapping[str, Any] | None = None) -> None:
    check_settings(TrainOptions, {**saved(), **changes}, saved() if recorded is None else recorded, SOURCE)


def test_settings_as_they_were_written() -> None:
    """All defaults are valid values; flags that may change on resume may be edited."""
    checked({})
    checked({"epochs": 20, "workers": 4, "processes": 2, "wandb_tags": ["a"], "cache": "ram", "time_limit": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": "three"}, "`epochs` is 'three', which --epochs refuses; fix it"),
        ({"epochs": 0}, "`epochs` is 0, which --epochs refuses"),
        ({"epochs": 2.5}, "`epochs` is 2.5, which --epochs refuses"),
        ({"cos_lr": "yes"}, "`cos_lr` is 'yes', which --cos-lr refuses"),
        ({"data": None}, "`data` is None, which --data refuses"),
        ({"cache": "floppy"}, "`cache` is 'floppy', which --cache refuses"),
        ({"freeze": 3}, "`freeze` is 3, which --freeze refuses"),
        ({"freeze": [1.5]}, r"`freeze` is \[1.5\], which --freeze refuses"),
        ({"model": [1]}, r"`model` is \[1\]; it must be `key: value` lines"),
        ({"overrides": 3}, "`overrides` is 3; it must be `key: value` lines"),
    ],
)
@pytest.mark.parametrize("version", ["new", "old"])
def test_wrong_values(version: str, changes: dict[str, Any], message: str) -> None:
    """Also if the state is of a version that recorded no settings."""
    with pytest.raises(UserError, match=rf"^{SOURCE}: {message}"):
        checked(changes, None if version == "new" else {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 16}, "`batch_size` is 16, and the run was started with 8, which its curve depends on; restore"),
        (
            {"hyperparameters": {**vars(Hyperparameters()), "lr0": 1}},
            "`hyperparameters: lr0` is 1, and the",
        ),
        ({"hyperparameters": {}}, "`hyperparameters: anchor_recall` is None, and the run was started with 0.98"),
        ({"model": {"task": "detect", "nc": 4}}, "`model: nc` is 4, and the run was started with 3"),
        ({"epoch": 3}, r"unknown key 'epoch' \(did you mean 'epochs'\?\); correct or remove it"),
    ],
)
def test_changes_that_the_state_shows(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"^{SOURCE}: {message}"):
        checked(changes)
    checked(changes, {})  # a state of an older version


def test_keys_of_other_versions() -> None:
    """A flag that this version has lost, and a hyperparameter that it has added."""
    old = saved()
    old["hyperparameters"] = {"lr0": old["hyperparameters"]["lr0"]}
    checked({"gone": 1}, {**old, "gone": 1})


# Refused changes

FIXED = {
    "weights": ("other.pt", "yolov5s.pt"),
    "cfg": ("yolov5n.yaml", ""),
    "batch_size": (16, 8),
    "rect": (True, False),
    "noautoanchor": (True, False),
    "scale_lr": (True, False),
    "logical_processes": (4, 0),
    "image_padding": (True, False),
    "multi_scale": (True, False),
    "image_weights": (True, False),
    "repeat_factor": (0.001, 0.0),
    "close_mosaic": (10, 0),
    "partners": ("any", "window"),
    "mask_ratio": (2, 4),
    "no_overlap": (True, False),
    "single_cls": (True, False),
    "optimizer": ("AdamW", "SGD"),
    "cos_lr": (True, False),
    "label_smoothing": (0.1, 0.0),
    "class_weights": ("auto", "none"),
    "fitness": ("recall=1", ""),
    "lr_factor": ("head=2", ""),
    "freeze": ((3,), [0, 2]),
    "seed": (1, 0),
    "augmentations": ("mine.py", ""),
}


def flags(name: str, value: Any) -> tuple[str, ...]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return (flag,)
    return (flag, *map(str, value if isinstance(value, (tuple, list)) else (value,)))


def test_the_table_has_every_flag_that_the_curve_depends_on() -> None:
    assert {*CURVE_FLAGS} == {*FIXED}


@pytest.mark.parametrize("name", FIXED)
def test_a_flag_that_the_curve_depends_on(name: str) -> None:
    now, then = FIXED[name]
    assert refused(saved(), *flags(name, now)) == (
        f"{flags(name, now)[0]} is {now!r} now, and {RUN} was started with {then!r}, which its curve depends on; "
        f"{ADVICE}"
    )
    if then not in (False, True):
        assert resumed(saved(), *flags(name, then)) == resumed(saved())  # the same value is no change


def test_the_image_size_is_not_compared() -> None:
    """The settings have the rounded size, and the flag is not rounded yet."""
    assert resumed(saved(), "--imgsz", "90").imgsz == 90


def test_a_measured_batch_size_is_taken_from_the_settings() -> None:
    assert resumed(saved(), "--batch-size", "-1").batch_size == 8


def test_hyperparameters_that_have_changed(tmp_path: Path) -> None:
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("lr0: 0.01\nmosaic: 1\n")  # the same values, written differently
    assert resumed(saved(), "--hyp", str(hyp)).hyp == str(hyp)
    hyp.write_text("lr0: 0.02\nmosaic: 0.5\n")
    assert refused(saved(), "--hyp", str(hyp)) == (
        f"--hyp {hyp} has changed since {RUN} was started: lr0 is 0.02 and was 0.01, mosaic is 0.5 and was 1.0; "
        f"{ADVICE}"
    )


def test_a_run_keeps_the_hyperparameters_that_auto_chose() -> None:
    assert resumed(saved(), "--hyp", "auto").hyp == LOW


def test_hyperparameters_that_the_start_of_the_run_computed_may_differ(tmp_path: Path) -> None:
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("known_lr: 0.5\nkeep_norms: 1\ndefaults:\n  epochs: 3\n")
    started = Hyperparameters(known_lr=0.5, keep_norms=0, lr_factor=0.5)
    assert resumed(saved(started), "--hyp", str(hyp)).hyp == str(hyp)


def test_a_run_that_is_older_than_a_hyperparameter(tmp_path: Path) -> None:
    settings = saved()
    settings["hyperparameters"] = {"lr0": 0.02}
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("lr0: 0.02\n")
    assert resumed(settings, "--hyp", str(hyp)).hyp == str(hyp)


def test_hyperparameters_are_those_of_the_task_of_the_run(tmp_path: Path) -> None:
    settings = saved(OtherRecipe(), task="other")
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("stripes: 3\n")
    assert resumed(settings, "--hyp", str(hyp)).hyp == str(hyp)
    hyp.write_text("stripes: 4\n")
    assert "stripes is 4.0 and was 3.0" in refused(settings, "--hyp", str(hyp))
    hyp.write_text("mosaic: 1\n")
    assert "unknown key 'mosaic'" in refused(settings, "--hyp", str(hyp))


def test_hyperparameters_are_read_only_if_they_are_given() -> None:
    assert resumed(saved(hyp="gone.yaml")).hyp == "gone.yaml"


# Single hyperparameters


@pytest.fixture
def faster() -> dict[str, Any]:
    """The settings of a run that was started with flags for single hyperparameters."""
    overrides = {"lr0": "2e-2", "mosaic": "0.5"}
    return saved(Hyperparameters(**parse_overrides(Hyperparameters, overrides)), overrides=overrides)


def test_overrides_are_taken_from_the_settings(faster: dict[str, Any]) -> None:
    options = resumed(faster)
    assert options.overrides == {"lr0": "2e-2", "mosaic": "0.5"}
    assert changes(faster, options) == []


def test_equal_overrides_are_no_change(faster: dict[str, Any]) -> None:
    same = ("--hyp.lr0", "0.02", "--hyp.box=0.05")
    for flags in (same, (*same, "--hyp", LOW), ("--hyp", LOW)):
        overrides = resumed(faster, *flags).overrides
        assert parse_overrides(Hyperparameters, overrides).items() >= {"lr0": 0.02, "mosaic": 0.5}.items()


@pytest.mark.parametrize(("key", "now", "then"), [("lr0", 0.03, 0.02), ("box", 7.0, 0.05)])
def test_an_override_that_has_changed(faster: dict[str, Any], key: str, now: float, then: float) -> None:
    assert refused(faster, f"--hyp.{key}", str(now), "--hyp", LOW) == (
        f"--hyp.{key} is {now} now, and {RUN} was started with {then}, which its curve depends on; {ADVICE}"
    )


def test_a_hyperparameter_file_that_has_changed_beside_overrides(faster: dict[str, Any], tmp_path: Path) -> None:
    hyp = tmp_path / "mine.yaml"
    hyp.write_text("lr0: 0.5\nbox: 7\n")  # lr0 is overridden, as before
    message = refused(faster, "--hyp", str(hyp))
    assert message == f"--hyp {hyp} has changed since {RUN} was started: box is 7.0 and was 0.05; {ADVICE}"


def test_overrides_are_checked_for_the_task_of_the_run(faster: dict[str, Any]) -> None:
    assert refused(faster, "--hyp.stripes", "1") == "unknown flag --hyp.stripes"


def test_a_run_of_a_version_without_overrides() -> None:
    settings = saved()
    del settings["overrides"]
    assert resumed(settings).overrides == {}
    assert resumed(settings, "--hyp.lr0", "0.01", "--hyp", LOW).overrides == {"lr0": "0.01"}


# Messages about allowed changes


def test_changes() -> None:
    assert changes(saved(), resumed(saved())) == []
    longer = ("--epochs", "20", "--workers", "3", "--device", "0", "--project", "elsewhere", "--dist-timeout", "9")
    assert changes(saved(), resumed(saved(), *longer)) == [
        "--epochs is 20 and was 10",
        "--dist-timeout is 9.0 and was 1800.0",
        "--workers is 3 and was 1",
        "from here on the learning rate follows the schedule for 20 epochs",
    ]


def test_a_changed_list() -> None:
    """Settings have lists, and options have tuples."""
    settings = saved(wandb_tags=["a", "b"])
    assert resumed(settings).wandb_tags == ("a", "b")
    assert changes(settings, resumed(settings)) == []
    assert changes(settings, resumed(settings, "--wandb-tags", "c")) == [
        "--wandb-tags is ('c',) and was ['a', 'b']",
    ]
