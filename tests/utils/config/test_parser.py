"""The command line: values, help, messages for wrong flags, and the precedence of defaults."""

from __future__ import annotations

import dataclasses
import re
import shlex
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.making import options_of
from utils.config.options import (
    BUILT_IN_JOB,
    OPTIONS_OF_SCRIPT,
    DetectOptions,
    ExportOptions,
    TrainOptions,
    ValOptions,
    flags_of,
)
from utils.config.parser import SUGGESTED, check_suggested_defaults, given_flags, with_defaults
from utils.config.values import accepts
from utils.errors import UserError
from utils.files import ROOT

KINDS = (TrainOptions, ValOptions)
SCRIPTS = (*KINDS, DetectOptions, ExportOptions)
EVERY_FIELD = [
    pytest.param(kind, field, id=f"{kind.__name__}.{field.name}") for kind in KINDS for field in flags_of(kind)
]


def train(*argv: str) -> TrainOptions:
    return options_of(TrainOptions, argv)


# Flags


@pytest.mark.parametrize(("kind", "field"), EVERY_FIELD)
def test_every_field_is_a_flag(kind: type, field: dataclasses.Field[Any]) -> None:
    hint = typing.get_type_hints(kind)[field.name]
    words: list[str]
    value: Any
    if hint is bool:
        words, value = [], True
    elif hint is str:
        form = re.sub("[A-Z]+", "7", field.metadata["form"])
        value = (field.metadata["choices"] or (form or "some/text",))[-1]
        words = [value]
    elif hint in (int, float):
        value = 7 if 7 in field.metadata["within"] else 0.5
        words = [str(value)]
    else:
        words = ["7", "8"]
        value = tuple(map(str if typing.get_args(hint)[0] is str else int, words))
    for name in {field.name, field.name.replace("_", "-"), *field.metadata["aliases"]}:
        options = options_of(kind, [f"--{name}", *words])
        assert getattr(options, field.name) == value
        assert type(getattr(options, field.name)) is (typing.get_origin(hint) or hint)
        assert dataclasses.replace(options, **{field.name: field.default}) == kind()  # and nothing else changed


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_help_has_every_flag_and_default(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options_of(kind, ["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in flags_of(kind):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"] in text
    assert {TrainOptions: "(default 640)", ValOptions: "or 640 (default 0)"}.get(kind, "or 640 (default none)") in text
    assert text.count("(default ") == len(flags_of(kind))
    assert ("--hyp.lr0 0.005" in text) == (kind is TrainOptions)
    switches = [field.name for field in flags_of(kind) if field.default is False]
    assert "--device DEVICE " in text
    assert not [name for name in switches if re.search(rf"--{name.replace('_', '-')} {name.upper()}\b", text)]


@pytest.mark.parametrize(
    ("kind", "groups"),
    [
        (TrainOptions, ["options", "model", "data", "training", "processes", "saving", "console", "logging"]),
        (ValOptions, ["options", "model", "data", "predictions", "processes", "saving", "console", "logging"]),
        (DetectOptions, ["options", "model", "images", "predictions", "drawing", "saving", "console"]),
        (ExportOptions, ["options", "model", "format", "NMS", "console"]),
    ],
)
def test_the_help_is_grouped(kind: type, groups: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(kind, ["--help"])
    text = capsys.readouterr().out
    assert re.findall(r"(?m)^(\w+):$", text) == ["examples", *groups]
    for field in flags_of(kind):
        section = text.partition(f"\n{field.metadata['group']}:\n")[2].partition("\n\n")[0]
        assert f"--{field.name.replace('_', '-')}" in section


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_help_opens_with_three_examples(
    kind: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are right, and the whole help fits 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        options_of(kind, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    usage, _, head, *examples = lines[:6]
    assert usage.endswith(" [flags]")
    assert head == "examples:"
    for example in examples:
        program, script, *words = shlex.split(example, comments=True)
        assert (program, OPTIONS_OF_SCRIPT.get(script.removesuffix(".py"), kind)) == ("python", kind)
        assert (ROOT / script).is_file()
        assert isinstance(options_of(kind, words), kind)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("kind", SCRIPTS)
def test_the_version_is_that_of_the_project(kind: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        options_of(kind, ["--version"])
    assert caught.value.code == 0
    name, number = capsys.readouterr().out.split()
    assert f'name = "{name}"\nversion = "{number}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["--epohcs", "3"], ["--evolve"], ["--epochs", "0"]])
def test_a_silent_process_prints_nothing(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("utils.config.parser.is_silent", lambda: True)
    with pytest.raises(SystemExit) as caught:
        options_of(TrainOptions, argv)
    assert caught.value.code == (0 if argv in (["--help"], ["--version"]) else 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch", "4", "--img", "320"],
        ["--batch-size", "4", "--img-size", "320"],
        ["--batch_size", "4", "--imgsz", "320"],
        ["--batch=4", "--img=320"],
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_aliases_of_yolov5(kind: type, argv: list[str]) -> None:
    options = options_of(kind, argv)
    assert (options.batch_size, options.imgsz) == (4, 320)


@pytest.mark.parametrize("kind", [ValOptions, DetectOptions])
def test_short_names_of_thresholds(kind: type) -> None:
    assert options_of(kind, ["--conf", "0.5", "--iou=0.3"]) == kind(conf_thres=0.5, iou_thres=0.3)


def test_the_hint_for_an_abbreviation_is_the_flag_that_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(ExportOptions, ["--conf", "0.5"])
    assert "unknown flag --conf (did you mean '--conf-thres'?)" in capsys.readouterr().err


def test_cache_without_a_value_is_ram() -> None:
    assert train("--cache").cache == "ram"
    assert train("--cache", "--rect").cache == "ram"
    assert [train("--cache", where).cache for where in ("disk", "val")] == ["disk", "val"]


def test_freeze_takes_several_numbers() -> None:
    assert train("--freeze", "10").freeze == (10,)
    assert train("--freeze", "-1").freeze == train("--freeze=-1").freeze == (-1,)
    assert train("--freeze", "backbone", "3", "*.bn").freeze == ("backbone", 3, "*.bn")
    assert train("--freeze", "1", "2", "3", "--epochs", "5") == TrainOptions(freeze=(1, 2, 3), epochs=5)


def test_tags_are_separated_by_spaces_or_commas() -> None:
    for words in (["a", "b", "c"], ["a,b,c"], ["a,b", "c"], ["a, b", ",c,"]):
        assert train("--wandb-tags", *words) == TrainOptions(wandb_tags=("a", "b", "c"))
    assert train("--wandb-tags=a,7").wandb_tags == ("a", "7")
    assert train("--wandb-tags", "").wandb_tags == ()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epoch", "3"], "unknown flag --epoch (did you mean '--epochs'?)"),
        (["--epohcs=3"], "unknown flag --epohcs=3 (did you mean '--epochs'?)"),
        (["--batchsize", "3", "--rect"], "unknown flag --batchsize (did you mean '--batch"),
        (["--zzzzzzz"], "unknown flag --zzzzzzz"),
        # no abbreviations: they change their meaning with a new flag
        (["--optim", "SGD"], "unknown flag --optim (did you mean '--optimizer'?)"),
        (["--label_s=0.1"], "unknown flag --label_s=0.1 (did you mean '--label-smoothing'?)"),
        (["--optimizer", "sgd"], "argument --optimizer: invalid choice: 'sgd'"),
        (["--cache", "all"], "argument --cache: invalid choice: 'all'"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--epochs"], "argument --epochs: expected one argument"),
        (["--patience", "-1"], "argument --patience: -1 is out of range; give 0 or more"),
        (["--push-to-hub", "me"], "argument --push-to-hub/--push_to_hub: 'me' is not of the form owner/name"),
        (["--epochs", "0"], "argument --epochs: 0 is out of range; give 1 or more"),
        (["--seed", "-1"], "argument --seed: -1 is out of range; give 0 to 4294967295"),
        (["--dist-timeout", "inf"], "argument --dist-timeout/--dist_timeout: inf is out of range; give 1 to 1000000"),
        (["--time-limit", "nan"], "argument --time-limit/--time_limit: nan is out of range; give 0 or more"),
        (["--label-smoothing", "1"], "argument --label-smoothing/--label_smoothing: 1 is out of range; give 0 or more"),
        (["--wandb-tags"], "argument --wandb-tags/--wandb_tags: expected at least one argument"),
        (["--hyp.lr0"], "argument --hyp.lr0: expected one argument"),
        (["--hyp.lr0", "--epochs", "3"], "argument --hyp.lr0: expected one argument"),
        (["--hyp.lr0", "0.1", "0.2"], "unknown flag 0.2"),
        ([""], "unknown flag ''"),
        (["--rect", " "], "unknown flag ''"),
        (["--name", "--hyp.lr0", "0.1"], "argument --name: expected one argument"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        options_of(TrainOptions, argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.endswith(" --help\n")
    assert err.count("\n") == 1


# The built-in job


def test_the_built_in_job_applies_if_no_file_is_named() -> None:
    assert options_of(TrainOptions, [], BUILT_IN_JOB) == TrainOptions(**BUILT_IN_JOB)
    options = options_of(TrainOptions, ["--epochs", "3", "--hyp.lr0", "0.01"], BUILT_IN_JOB)
    assert options == TrainOptions(**{**BUILT_IN_JOB, "epochs": 3, "overrides": {"lr0": "0.01"}})


@pytest.mark.parametrize("flag", ["data", "cfg", "weights", "hyp"])
def test_the_defaults_of_yolov5_apply_if_a_file_is_named(flag: str) -> None:
    assert options_of(TrainOptions, [f"--{flag}", "x"], BUILT_IN_JOB) == TrainOptions(**{flag: "x"})
    default = getattr(TrainOptions(), flag)
    assert options_of(TrainOptions, [f"--{flag}", default], BUILT_IN_JOB) == TrainOptions()  # even if it is the default
    assert options_of(TrainOptions, [f"--{flag}="], BUILT_IN_JOB) == TrainOptions(**{flag: ""})


# Single hyperparameters


@pytest.mark.parametrize(
    ("argv", "overrides"),
    [
        ([], {}),
        (["--hyp.lr0", "0.005"], {"lr0": "0.005"}),
        (["--hyp.lr0=0.005"], {"lr0": "0.005"}),
        (["--hyp.weight-decay", "0", "--epochs", "3"], {"weight_decay": "0"}),
        (["--hyp.weight_decay=1e-4", "--hyp.box", "7"], {"weight_decay": "1e-4", "box": "7"}),
        (["--hyp.lr0", "1", "--hyp.box=2", "--hyp.lr0=3"], {"lr0": "3", "box": "2"}),
        (["--hyp.weight-decay=1", "--hyp.weight_decay=2"], {"weight_decay": "2"}),
        (["--hyp.degrees", "-3", "--hyp.box", "-1e-3"], {"degrees": "-3", "box": "-1e-3"}),
        (
            ["--hyp.degrees", "-.5", "--hyp.box=-1e-3", "--hyp.cls", "-inf"],
            {"degrees": "-.5", "box": "-1e-3", "cls": "-inf"},
        ),
        (["--hyp", "low", "--hyp.nonsense", "x=y"], {"nonsense": "x=y"}),  # the task checks the name
        (["--hyp.lr0="], {"lr0": ""}),
        (["--hyp.KEY", "1"], {"KEY": "1"}),
    ],
)
def test_overrides_are_text(argv: list[str], overrides: dict[str, str]) -> None:
    options = train(*argv)
    assert options == TrainOptions(hyp=options.hyp, epochs=options.epochs, overrides=overrides)
    assert given_flags(TrainOptions, argv).get("overrides", {}) == overrides
    assert with_defaults(options, given_flags(TrainOptions, argv), {"imgsz": 64}).overrides == overrides
    assert TrainOptions(**yaml.safe_load(yaml.safe_dump(vars(options)))).overrides == overrides


def test_overrides_are_flags_of_training_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(ValOptions, ["--hyp.lr0", "0.1"])
    assert capsys.readouterr().err.startswith("error: unknown flag --hyp.lr0")


# Defaults of a task and a data set


def test_suggested_defaults() -> None:
    values = {
        "weights": "",
        "hyp": "data/hyps/none.yaml",
        "epochs": 12,
        "batch_size": 32,
        "imgsz": 64,
        "optimizer": "AdamW",
        "cos_lr": True,
        "label_smoothing": 0.1,
    }
    assert set(values) == set(SUGGESTED)
    defaults = check_suggested_defaults(values, Path("a.yaml"))
    assert defaults == values
    assert defaults is not values
    assert check_suggested_defaults({}, Path("a.yaml")) == {}


def test_suggested_defaults_have_the_types_of_their_flags() -> None:
    defaults = check_suggested_defaults({"imgsz": 64.0, "label_smoothing": 0}, Path("a.yaml"))
    assert defaults == {"imgsz": 64, "label_smoothing": 0}
    assert (type(defaults["imgsz"]), type(defaults["label_smoothing"])) == (int, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2], r"`defaults` must be lines such as `imgsz: 64`, not \[1, 2\]$"),
        ("imgsz", "`defaults` must be lines such as `imgsz: 64`, not 'imgsz'$"),
        (
            {"imgzs": 64},
            r"unknown key 'imgzs' under `defaults` \(did you mean 'imgsz'\?\); known are weights, hyp, epochs, ",
        ),
        ({"device": "cpu"}, "unknown key 'device' under `defaults`; known are"),  # a flag, but not one of `SUGGESTED`
        ({5: 1}, "unknown key '5' under `defaults`"),
        ({"epochs": 3, "imgsz": "64"}, "`imgsz` under `defaults` is '64', which --imgsz refuses$"),
        ({"imgsz": 64.5}, "`imgsz` under `defaults` is 64.5, which"),
        ({"imgsz": True}, "`imgsz` under `defaults` is True, which"),
        ({"imgsz": None}, "`imgsz` under `defaults` is None, which"),
        ({"imgsz": [64]}, r"`imgsz` under `defaults` is \[64\], which"),
        ({"imgsz": float("inf")}, "`imgsz` under `defaults` is inf, which"),
        ({"imgsz": 0}, "`imgsz` under `defaults` is 0, which"),
        ({"epochs": -3}, "`epochs` under `defaults` is -3, which"),
        ({"batch_size": -2}, "`batch_size` under `defaults` is -2, which --batch-size refuses$"),
        ({"label_smoothing": 1.0}, "`label_smoothing` under `defaults` is 1.0, which --label-smoothing refuses$"),
        ({"label_smoothing": False}, "`label_smoothing` under `defaults` is False, which"),
        ({"label_smoothing": float("nan")}, "`label_smoothing` under `defaults` is nan, which"),
        ({"cos_lr": 1}, "`cos_lr` under `defaults` is 1, which"),
        ({"cos_lr": "yes"}, "`cos_lr` under `defaults` is 'yes', which"),
        ({"optimizer": "sgd"}, "`optimizer` under `defaults` is 'sgd', which --optimizer refuses$"),
        ({"optimizer": ["SGD"]}, r"`optimizer` under `defaults` is \['SGD'\], which"),
        ({"hyp": 3}, "`hyp` under `defaults` is 3, which"),
    ],
)
def test_an_error_names_the_suggested_default(values: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^mine\.yaml: {message}"):
        check_suggested_defaults(values, Path("mine.yaml"))


def test_flags_take_precedence_over_other_defaults() -> None:
    argv = ["--epochs", "5", "--imgsz=640", "--name", "x"]  # 640 is the default, but given
    task, data = {"epochs": 30, "imgsz": 224, "weights": "", "batch_size": 32}, {"batch_size": 8, "cos_lr": True}
    options = with_defaults(train(*argv), given_flags(TrainOptions, argv), task, data)
    assert options == TrainOptions(epochs=5, name="x", weights="", batch_size=8, cos_lr=True)
    assert (
        with_defaults(train(*argv), given_flags(TrainOptions, argv), data, task).batch_size == 32
    )  # later mappings take precedence
    assert with_defaults(train(*argv), given_flags(TrainOptions, argv)) == train(*argv)
    assert with_defaults(ValOptions(), {"batch_size": 4}, {"imgsz": 224, "batch_size": 1}).batch_size == 32


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("wandb", "wandb"),
        ("wandb,mlflow", "wandb,mlflow"),
        (" wandb , aim,", "wandb,aim"),
        ("aim,a/b.py", "aim,a/b.py"),
    ],
)
def test_lists_of_trackers(value: str, expected: str) -> None:
    for kind in (TrainOptions, ValOptions):
        assert options_of(kind, ["--log-with", value]).log_with == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("wandb,mlfow", "'mlfow' is not one of none, all, wandb"),
        (".py", "'.py' is not one of"),
        ("none,wandb", "'none' must stand alone in none,wandb"),
    ],
)
def test_wrong_lists_of_trackers(value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(TrainOptions, ["--log-with", value])
    assert message in capsys.readouterr().err


def test_a_list_in_settings() -> None:
    field = TrainOptions.__dataclass_fields__["log_with"]
    wrong = {"": False, "wandb,x": False, 3: False}
    for value, right in {"tensorboard": True, "wandb,mlflow": True, "x.py": True, **wrong}.items():
        assert accepts(str, field.metadata, value) == right
