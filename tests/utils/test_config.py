"""Flags and hyperparameter files: what is read, and what is said where it cannot be."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from utils.config import (
    BUILT_IN_JOB,
    Hyperparameters,
    TrainOptions,
    ValOptions,
    from_mapping,
    parse_options,
    read_hyperparameters,
    select,
)
from utils.errors import UserError
from utils.files import ROOT

KINDS = (TrainOptions, ValOptions)
EVERY_FIELD = [
    pytest.param(kind, field, id=f"{kind.__name__}.{field.name}") for kind in KINDS for field in fields(kind)
]
# YOLOv5's own, except for the recipe's file name.
YOLOV5_TRAIN = {
    "weights": "yolov5s.pt",
    "cfg": "",
    "data": "data/coco128.yaml",
    "hyp": "data/hyps/low.yaml",
    "epochs": 100,
    "batch_size": 16,
    "imgsz": 640,
    "rect": False,
    "nosave": False,
    "noval": False,
    "noautoanchor": False,
    "noplots": False,
    "cache": "",
    "device": "",
    "single_cls": False,
    "optimizer": "SGD",
    "workers": 8,
    "project": "runs/train",
    "name": "exp",
    "exist_ok": False,
    "cos_lr": False,
    "label_smoothing": 0.0,
    "patience": 100,
    "freeze": (0,),
    "save_period": -1,
    "seed": 0,
}
YOLOV5_VAL = {
    "data": "data/coco128.yaml",
    "weights": "yolov5s.pt",
    "batch_size": 32,
    "imgsz": 640,
    "conf_thres": 0.001,
    "iou_thres": 0.6,
    "max_det": 300,
    "task": "val",
    "device": "",
    "workers": 8,
    "single_cls": False,
    "verbose": False,
    "save_txt": False,
    "save_conf": False,
    "project": "runs/val",
    "name": "exp",
    "exist_ok": False,
}


def train(*argv: str) -> TrainOptions:
    return parse_options(TrainOptions, argv)


# Flags


@pytest.mark.parametrize(("kind", "expected"), [(TrainOptions, YOLOV5_TRAIN), (ValOptions, YOLOV5_VAL)])
def test_defaults_are_those_of_yolov5(kind: type, expected: dict[str, Any]) -> None:
    options = parse_options(kind, [])
    assert {name: getattr(options, name) for name in expected} == expected
    assert options == kind()


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
        words, value = ["7", "8"], (7, 8)
    for name in {field.name, field.name.replace("_", "-"), *field.metadata["aliases"]}:
        options = parse_options(kind, [f"--{name}", *words])
        assert getattr(options, field.name) == value
        assert type(getattr(options, field.name)) is (typing.get_origin(hint) or hint)
        assert dataclasses.replace(options, **{field.name: field.default}) == kind()  # and nothing else changed


@pytest.mark.parametrize("kind", KINDS)
def test_help_tells_every_flag_and_default(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(kind, ["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(kind):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"] in text
    assert "(default 640)" in text
    assert text.count("(default ") == len(fields(kind))


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
def test_yolov5s_other_names(kind: type, argv: list[str]) -> None:
    options = parse_options(kind, argv)
    assert (options.batch_size, options.imgsz) == (4, 320)


def test_a_bare_cache_is_in_memory() -> None:
    assert train("--cache").cache == "ram"
    assert train("--cache", "--rect").cache == "ram"
    assert train("--cache", "disk").cache == "disk"


def test_freeze_takes_several_numbers() -> None:
    assert train("--freeze", "10").freeze == (10,)
    assert train("--freeze", "1", "2", "3", "--epochs", "5") == TrainOptions(freeze=(1, 2, 3), epochs=5)


def test_options_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        train().epochs = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epoch", "3"], "unknown flag --epoch (did you mean '--epochs'?)"),
        (["--epohcs=3"], "unknown flag --epohcs=3 (did you mean '--epochs'?)"),
        (["--batchsize", "3", "--rect"], "unknown flag --batchsize (did you mean '--batch"),
        (["--zzzzzzz"], "unknown flag --zzzzzzz"),
        (["--optim", "SGD"], "unknown flag --optim"),  # no abbreviations: they change their meaning with a new flag
        (["--optimizer", "sgd"], "argument --optimizer: invalid choice: 'sgd'"),
        (["--cache", "val"], "argument --cache: invalid choice: 'val'"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--epochs"], "argument --epochs: expected one argument"),
        (["--freeze", "1", "x"], "argument --freeze: invalid int value: 'x'"),
        (["--freeze", "-1"], "argument --freeze: -1 is out of range; give 0 or more"),
        (["--epochs", "0"], "argument --epochs: 0 is out of range; give 1 or more"),
        (["--seed", "-1"], "argument --seed: -1 is out of range; give 0 to 4294967295"),
        (["--dist-timeout", "inf"], "argument --dist-timeout/--dist_timeout: inf is out of range; give 1 to 1000000"),
        (["--time-limit", "nan"], "argument --time-limit/--time_limit: nan is out of range; give 0 or more"),
        (["--label-smoothing", "1"], "argument --label-smoothing/--label_smoothing: 1 is out of range; give 0 or more"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(TrainOptions, argv)
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.endswith(" --help\n")
    assert err.count("\n") == 1


# The built-in job


def test_the_built_in_job_has_flags_and_files() -> None:
    assert set(BUILT_IN_JOB) <= {field.name for field in fields(TrainOptions)}
    assert {"data", "cfg", "weights", "hyp"} <= set(BUILT_IN_JOB)
    for name in ("data", "cfg", "hyp"):
        assert (ROOT / BUILT_IN_JOB[name]).is_file()


def test_the_built_in_job_applies_where_no_file_is_named() -> None:
    assert parse_options(TrainOptions, [], BUILT_IN_JOB) == TrainOptions(**BUILT_IN_JOB)
    given = parse_options(TrainOptions, ["--epochs", "3", "--device", "cpu"], BUILT_IN_JOB)
    assert given == TrainOptions(**{**BUILT_IN_JOB, "epochs": 3, "device": "cpu"})


@pytest.mark.parametrize("flag", ["data", "cfg", "weights", "hyp"])
def test_yolov5s_defaults_apply_as_soon_as_a_file_is_named(flag: str) -> None:
    assert parse_options(TrainOptions, [f"--{flag}", "x"], BUILT_IN_JOB) == TrainOptions(**{flag: "x"})
    default = getattr(TrainOptions(), flag)
    assert parse_options(TrainOptions, [f"--{flag}", default], BUILT_IN_JOB) == TrainOptions()  # even the default's
    assert parse_options(TrainOptions, [f"--{flag}="], BUILT_IN_JOB) == TrainOptions(**{flag: ""})


# Hyperparameter files


def hyperparameters(tmp_path: Path, text: str) -> Hyperparameters:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_hyperparameters(str(path))


def test_keys_left_out_have_defaults(tmp_path: Path) -> None:
    assert hyperparameters(tmp_path, "lr0: 0.02\nmosaic: 0\n") == Hyperparameters(lr0=0.02, mosaic=0.0)


def test_numbers_come_in_every_spelling(tmp_path: Path) -> None:
    found = hyperparameters(tmp_path, "lr0: 1e-3\nweight_decay: '5e-4'\nnbs: 32.0\nwarmup_epochs: 2\n")
    assert (found.lr0, found.weight_decay, found.nbs, found.warmup_epochs) == (0.001, 0.0005, 32, 2.0)
    assert (type(found.nbs), type(found.warmup_epochs)) == (int, float)
    assert hyperparameters(tmp_path, "nbs: '1e2'").nbs == 100


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr_0: 0.01", r"unknown key 'lr_0' \(did you mean 'lr0'\?\)"),
        ("lr0: 0.01\nmosiac: 1", r"unknown key 'mosiac' \(did you mean 'mosaic'\?\)"),
        ("zzzz: 1", "unknown key 'zzzz'$"),
        ("5: 1", "unknown key '5'"),
        ("lr0: fast", "lr0 must be a number, not 'fast'"),
        ("lr0:", "lr0 must be a number, not None"),
        ("lr0: [0.1]", r"lr0 must be a number, not \[0.1\]"),
        ("mosaic: yes", "mosaic must be a number, not True"),
        ("nbs: 1.5", "nbs must be a whole number, not 1.5"),
        ("nbs: true", "nbs must be a whole number, not True"),
        ("nbs: .inf", "nbs must be a whole number, not inf"),
        ("nbs: .nan", "nbs must be a whole number, not nan"),
        ("lr0: 0", "lr0 is 0; give more than 0"),
        ("lr0: -1e-3", "lr0 is -0.001; give more than 0"),
        ("momentum: 1", "momentum is 1; give 0 or more and less than 1"),
        ("mosaic: 2", "mosaic is 2; give 0 to 1"),
        ("perspective: 0.01", "perspective is 0.01; give 0 to 0.001"),
        ("anchor_t: 1", "anchor_t is 1; give more than 1"),
        ("nbs: 0", "nbs is 0; give 1 or more"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"mine\.yaml: {message}"):
        hyperparameters(tmp_path, text)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"hyperparameter file 'x' is not a file.*high\.yaml, low\.yaml, med\.yaml"):
        read_hyperparameters("x")


AUGMENTATION = ("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "mosaic")
# FIELD.md 1.2: what differs from the recipe `low`
STRONGER = {"lrf": 0.1, "cls": 0.3, "obj": 0.7}
RECIPES = {
    "low": {},
    "med": {**STRONGER, "scale": 0.9, "mixup": 0.1},
    "high": {**STRONGER, "scale": 0.9, "mixup": 0.1, "copy_paste": 0.1},
    "none": {**STRONGER, **dict.fromkeys(AUGMENTATION, 0.0)},
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_those_of_yolov5(name: str) -> None:
    expected = Hyperparameters(**RECIPES[name])
    assert read_hyperparameters(name) == read_hyperparameters(f"data/hyps/{name}.yaml") == expected


def test_all_shipped_recipes_can_be_read() -> None:
    shipped = sorted((ROOT / "data" / "hyps").glob("*.yaml"))
    assert {"low", "med", "high", "none", "shapes"} <= {path.stem for path in shipped}
    for path in shipped:
        read_hyperparameters(str(path))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("hyp.scratch-low.yaml", "low"),
        ("hyp.scratch-med.yaml", "med"),
        ("hyp.scratch-high.yaml", "high"),
        ("hyp.no-augmentation.yaml", "none"),
    ],
)
def test_yolov5s_file_names(theirs: str, ours: str) -> None:
    expected = read_hyperparameters(ours)
    assert read_hyperparameters(theirs) == read_hyperparameters(f"data/hyps/{theirs}") == expected


def test_a_users_file_of_yolov5s_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hyp.scratch-low.yaml"
    path.write_text("lr0: 0.5\n")
    assert read_hyperparameters(str(path)) == Hyperparameters(lr0=0.5)


# Parts


@dataclass(frozen=True)
class Part:
    lr0: float = 5.0
    momentum: float = 5.0
    colour: str = "red"


def test_select_takes_the_fields_of_the_same_names() -> None:
    whole = Hyperparameters(lr0=0.3)
    assert select(Part, whole) == Part(lr0=0.3, momentum=whole.momentum, colour="red")
    assert select(Part, whole, colour="blue").colour == "blue"


def test_from_mapping_of_another_type() -> None:
    @dataclass(frozen=True)
    class Counts:
        number: int = 1

    with pytest.raises(UserError, match=r"^a\.yaml: unknown key 'numbre' \(did you mean 'number'\?\)$"):
        from_mapping(Counts, {"numbre": 2}, Path("a.yaml"))


def test_defaults_are_in_their_ranges() -> None:
    for kind in (Hyperparameters, TrainOptions, ValOptions):
        for field in fields(kind):
            if type(field.default) in (int, float) and field.name != "processes":  # 0: as many as devices
                assert field.default in field.metadata["within"], field.name
