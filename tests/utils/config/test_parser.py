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
from utils.config.flags import BUILT_IN_JOB, DetectOptions, ExportOptions, TrainOptions, ValOptions, flags_of
from utils.config.hyperparameters import suggested_defaults
from utils.config.parser import given_flags
from utils.config.settings import read_settings
from utils.errors import UserError

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
        value = (field.metadata["choices"] or ("some/text",))[-1]
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
def test_the_help(kind: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens with three examples, which are right, has every flag with its default, and fits 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        options_of(kind, ["--help"])
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    lines, text = printed.splitlines(), " ".join(printed.split())
    assert max(map(len, lines)) <= 80
    for example in lines[3:6]:
        program, script, *words = shlex.split(example, comments=True)
        assert (program, f"{script.removesuffix('.py').title()}Options") == ("python", kind.__name__)
        assert isinstance(options_of(kind, words), kind)
    for field in flags_of(kind):
        name = field.name.replace("_", "-")
        assert f"--{name}" in text
        assert field.metadata["help"] in text
        assert field.default is not False or not re.search(rf"--{name} {field.name.upper()}\b", text)
    assert text.count("(default ") == len(flags_of(kind))
    assert ("--hyp.lr0 0.005" in text) == (kind is TrainOptions)
    assert "--device DEVICE " in text


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        ("--cache", "cache", "ram"),
        ("--cache val", "cache", "val"),
        ("--project=a=True", "project", "a=True"),
        ("--cache --cos-lr=False", "cache", "ram"),
        ("--freeze 10", "freeze", (10,)),
        ("--freeze -1", "freeze", (-1,)),
        ("--freeze=-1", "freeze", (-1,)),
        ("--freeze backbone 3 *.bn", "freeze", ("backbone", 3, "*.bn")),
        ("--allow-licence a b c", "allow_licence", ("a", "b", "c")),
        ("--allow-licence a,b c", "allow_licence", ("a", "b", "c")),
        ("--allow-licence=", "allow_licence", ()),
    ],
)
def test_words_of_a_flag(argv: str, name: str, value: object) -> None:
    assert train(*argv.split(), "--rect") == TrainOptions(**{name: value}, rect=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--epohcs=3"], "--epochs"),
        # no abbreviations: they change their meaning with a new flag
        (["--optim", "SGD"], "--optimizer"),
        (["--cache", "all"], "--cache"),
        (["--epochs"], "--epochs"),
        (["--epochs", "0"], "--epochs"),
        (["--dist-timeout", "inf"], "--dist-timeout"),
        (["--log-with", "none,wandb"], "--log-with"),
        (["--allow-licence"], "--allow-licence"),
        (["--hyp.lr0", "0.1", "0.2"], "0.2"),
        (["--evolve-population=data/hyps"], "--evolve-population"),
        (["--lr0", "0.1"], "--hyp.lr0"),
        (["--wandb-project", "cats"], "flags-of-earlier-versions"),
        (["--mosaic", "0"], "--hyp.mosaic"),
        (["--comm_hook", "bf16"], "--comm-hook"),
        ([""], "''"),
        (["--name", "--hyp.lr0", "0.1"], "--name"),
        (["--hyp.lr0", "--epochs", "3"], "--hyp.lr0"),
        (["--artifact_alias", "v3"], "--artifact-alias"),
        (["x" * 500_000], "xxx"),
    ],
)
def test_a_wrong_flag_is_one_short_line(argv: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        options_of(TrainOptions, argv)
    assert caught.value.code == 2
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_values_of_others_that_ask_for_nothing() -> None:
    words = ["--local_rank", "-1", "--artifact_alias=latest", "--save=True", "--epochs", "3"]
    assert options_of(TrainOptions, words) == TrainOptions(epochs=3)


# The built-in job


@pytest.mark.parametrize("flag", ["data", "cfg", "weights", "hyp"])
def test_the_built_in_job_applies_if_no_file_is_named(flag: str) -> None:
    options = read_settings(["--epochs", "3", "--hyp.lr0", "0.01"], pytest.fail).options
    assert options == TrainOptions(**{**BUILT_IN_JOB, "epochs": 3, "overrides": {"lr0": "0.01"}})
    for value in ("x", "", getattr(TrainOptions(), flag)):  # even if it is the default
        assert read_settings([f"--{flag}={value}"], pytest.fail).options == TrainOptions(**{flag: value})


# Single hyperparameters


@pytest.mark.parametrize(
    ("argv", "overrides"),
    [
        ("", {}),
        ("--hyp.lr0 0.005", {"lr0": "0.005"}),
        ("--hyp.degrees -.5 --hyp.box=-1e-3 --hyp.cls -inf", {"degrees": "-.5", "box": "-1e-3", "cls": "-inf"}),
        ("--hyp.nonsense x=y", {"nonsense": "x=y"}),  # the task checks the name
        ("--hyp.weight-decay=1 --hyp.weight_decay=2 --hyp.lr0=", {"weight_decay": "2", "lr0": ""}),
    ],
)
def test_overrides_are_text(argv: str, overrides: dict[str, str]) -> None:
    options = train(*argv.split())
    assert options == TrainOptions(overrides=overrides)
    assert given_flags(TrainOptions, argv.split()).get("overrides", {}) == overrides
    assert TrainOptions(**yaml.safe_load(yaml.safe_dump(vars(options)))).overrides == overrides


# Defaults of a task and a data set


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([1, 2], "defaults"),
        ({"imgzs": 64}, "imgsz"),
        ({"device": "cpu"}, "device"),  # a flag, but no YAML may set it
        ({"close_mosaic": 3}, "close_mosaic"),  # a hyperparameter file may
        ({5: 1}, "5"),
        ({"optimizer": "package:Class"}, "--optimizer package:Class"),  # would import code
    ],
)
def test_an_error_names_the_suggested_default(values: Any, named: str) -> None:
    with pytest.raises(UserError, match=rf"^mine\.yaml: .*{named}"):
        suggested_defaults(values, Path("mine.yaml"))
