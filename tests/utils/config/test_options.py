"""Flags and hyperparameter files: what is read, and what is said where it cannot be."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from models.tasks.classification.task import ClassificationRecipe
from utils.config.hyperparameters import Hyperparameters, Recipe, from_mapping, read_hyperparameters
from utils.config.options import BUILT_IN_JOB, TrainOptions, ValOptions, flags_of
from utils.config.parser import SUGGESTED, given_flags, parse_options, suggestions, with_defaults
from utils.config.select import select
from utils.config.yolov5_flags import REFUSED
from utils.errors import UserError
from utils.files import ROOT, read_yaml

KINDS = (TrainOptions, ValOptions)
EVERY_FIELD = [
    pytest.param(kind, field, id=f"{kind.__name__}.{field.name}") for kind in KINDS for field in flags_of(kind)
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
    "multi_scale": False,
    "image_weights": False,
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
    "weights": ("yolov5s.pt",),
    "batch_size": 32,
    "imgsz": 640,
    "conf_thres": 0.001,
    "iou_thres": 0.6,
    "max_det": 300,
    "task": "val",
    "device": "",
    "workers": 8,
    "single_cls": False,
    "augment": False,
    "verbose": False,
    "save_txt": False,
    "save_hybrid": False,
    "save_conf": False,
    "save_json": False,
    "half": False,
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


def test_all_fields_but_one_are_flags() -> None:
    assert [field.name for field in fields(TrainOptions) if field not in flags_of(TrainOptions)] == ["overrides"]
    assert flags_of(ValOptions) == list(fields(ValOptions))


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
        value = tuple(map(typing.get_args(hint)[0], words))
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
    for field in flags_of(kind):
        assert f"--{field.name.replace('_', '-')}" in text
        assert field.metadata["help"] in text
    assert "(default 640)" in text
    assert text.count("(default ") == len(flags_of(kind))
    assert ("--hyp.lr0 0.005" in text) == (kind is TrainOptions)


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
    assert [train("--cache", where).cache for where in ("disk", "val")] == ["disk", "val"]


def test_freeze_takes_several_numbers() -> None:
    assert train("--freeze", "10").freeze == (10,)
    assert train("--freeze", "-1").freeze == train("--freeze=-1").freeze == (-1,)
    assert train("--freeze", "1", "2", "3", "--epochs", "5") == TrainOptions(freeze=(1, 2, 3), epochs=5)


def test_tags_are_parted_by_spaces_or_commas() -> None:
    for words in (["a", "b", "c"], ["a,b,c"], ["a,b", "c"], ["a, b", ",c,"]):
        assert train("--wandb-tags", *words) == TrainOptions(wandb_tags=("a", "b", "c"))
    assert train("--wandb-tags=a,7").wandb_tags == ("a", "7")
    assert train("--wandb-tags", "").wandb_tags == ()


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
        (["--cache", "all"], "argument --cache: invalid choice: 'all'"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--epochs"], "argument --epochs: expected one argument"),
        (["--freeze", "1", "x"], "argument --freeze: invalid int value: 'x'"),
        (["--freeze", "1.5"], "argument --freeze: invalid int value: '1.5'"),
        (["--patience", "-1"], "argument --patience: -1 is out of range; give 0 or more"),
        (["--epochs", "0"], "argument --epochs: 0 is out of range; give 1 or more"),
        (["--seed", "-1"], "argument --seed: -1 is out of range; give 0 to 4294967295"),
        (["--dist-timeout", "inf"], "argument --dist-timeout/--dist_timeout: inf is out of range; give 1 to 1000000"),
        (["--time-limit", "nan"], "argument --time-limit/--time_limit: nan is out of range; give 0 or more"),
        (["--label-smoothing", "1"], "argument --label-smoothing/--label_smoothing: 1 is out of range; give 0 or more"),
        (["--wandb-tags"], "argument --wandb-tags/--wandb_tags: expected at least one argument"),
        (["--hyp.lr0"], "argument --hyp.lr0: expected one argument"),
        (["--hyp.lr0", "--epochs", "3"], "argument --hyp.lr0: expected one argument"),
        (["--hyp.lr0", "0.1", "0.2"], "unknown flag 0.2"),
        (["--name", "--hyp.lr0", "0.1"], "argument --name: expected one argument"),
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


EVOLUTION = "is not built in: W&B sweeps tune hyperparameters, each trial on as many devices as you like"


@pytest.mark.parametrize(
    "argv",
    [
        ["--evolve"],
        ["--evolve", "300"],
        ["--evolve=300"],
        ["--evolve_population", "data/hyps"],
        ["--evolve-population=data/hyps"],
        ["--resume_evolve", "runs/evolve"],
        ["--data", "x", "--resume_evolve=runs/evolve"],
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_yolov5_has_and_we_do_not(kind: type, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """One line and exit code 2, with what to do instead."""
    with pytest.raises(SystemExit) as caught:
        parse_options(kind, argv)
    assert caught.value.code == 2
    name = next(word for word in argv if "evolve" in word).partition("=")[0]
    assert capsys.readouterr().err == f"error: {name} {EVOLUTION}; see sweep.yaml and docs/tracking.md#sweeps\n"


@pytest.mark.parametrize(
    ("kind", "argv", "says"),
    [
        (ValOptions, ["--task", "study"], "--task study is not built in: call val.py once for each --imgsz"),
        (ValOptions, ["--task=study"], "--task study is not built in"),
        (ValOptions, ["--task", "speeed"], "argument --task: invalid choice: 'speeed'"),
        (TrainOptions, ["--quad"], "--quad is not built in: train at a larger --imgsz"),
        (TrainOptions, ["--lr0", "0.1"], "--lr0 is a hyperparameter: give --hyp.lr0"),
    ],
)
def test_what_takes_its_place_is_said(
    kind: type, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(kind, argv)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {says}")
    assert said.count("\n") == 1


def test_what_is_refused_is_no_flag_of_both_scripts() -> None:
    """A flag of one script may be refused in the other."""
    names = [{name for field in flags_of(kind) for name in (field.name, *field.metadata["aliases"])} for kind in KINDS]
    assert not set(REFUSED) & names[0] & names[1]
    assert all("-" not in name for name in REFUSED)  # it is looked up with underscores


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


def test_a_single_hyperparameter_leaves_the_built_in_job() -> None:
    found = parse_options(TrainOptions, ["--hyp.lr0", "0.01"], BUILT_IN_JOB)
    assert found == TrainOptions(**BUILT_IN_JOB, overrides={"lr0": "0.01"})


# Hyperparameter files


def hyperparameters(tmp_path: Path, text: str) -> Hyperparameters:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_hyperparameters(str(path), Hyperparameters)


def test_keys_left_out_have_defaults(tmp_path: Path) -> None:
    assert hyperparameters(tmp_path, "lr0: 0.02\nmosaic: 0\n") == Hyperparameters(lr0=0.02, mosaic=0.0)


def test_numbers_come_in_every_spelling(tmp_path: Path) -> None:
    found = hyperparameters(tmp_path, "lr0: 1e-3\nweight_decay: '5e-4'\nnbs: 32.0\nwarmup_epochs: 2\n")
    assert (found.lr0, found.weight_decay, found.nbs, found.warmup_epochs) == (0.001, 0.0005, 32, 2.0)
    assert (type(found.nbs), type(found.warmup_epochs)) == (int, float)
    assert hyperparameters(tmp_path, "nbs: '1e2'").nbs == 100
    assert hyperparameters(tmp_path, "nbs: 0").nbs == 0


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
        ("nbs: -1", "nbs is -1; give 0 or more"),
        ("crop_scale: 0.5", "unknown key 'crop_scale'"),  # of another task
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"mine\.yaml: {message}"):
        hyperparameters(tmp_path, text)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"hyperparameter file 'x' is not a file.*high\.yaml, low\.yaml, med\.yaml"):
        read_hyperparameters("x", Hyperparameters)


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
        (["--hyp", "low", "--hyp.nonsense", "x=y"], {"nonsense": "x=y"}),  # the task knows which there are
        (["--hyp.lr0="], {"lr0": ""}),
        (["--hyp.KEY", "1"], {"KEY": "1"}),
    ],
)
def test_overrides_are_kept_as_text(argv: list[str], overrides: dict[str, str]) -> None:
    found = train(*argv)
    assert found.overrides == overrides
    assert found == TrainOptions(hyp=found.hyp, epochs=found.epochs, overrides=overrides)
    assert given_flags(TrainOptions, argv).get("overrides", {}) == overrides
    assert with_defaults(found, argv, {"imgsz": 64}).overrides == overrides
    assert TrainOptions(**yaml.safe_load(yaml.safe_dump(vars(found)))).overrides == overrides


def test_overrides_are_for_training(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(ValOptions, ["--hyp.lr0", "0.1"])
    assert capsys.readouterr().err.startswith("error: unknown flag --hyp.lr0")


def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("lr0: 0.02\nmosaic: 0\n")
    found = read_hyperparameters(str(path), Hyperparameters, {"lr0": "1e-3", "box": "7", "nbs": "32.0"})
    assert found == Hyperparameters(lr0=0.001, mosaic=0.0, box=7.0, nbs=32)
    assert type(found.nbs) is int
    assert read_hyperparameters("classify", ClassificationRecipe, {"crop_scale": "0.5"}).crop_scale == 0.5


@pytest.mark.parametrize("kind", [Hyperparameters, ClassificationRecipe])
def test_every_hyperparameter_can_be_overridden(kind: type[Recipe]) -> None:
    name = "low" if kind is Hyperparameters else "classify"
    for field in fields(kind):
        value = next(value for value in (1, 0.5, 0.0005, 2) if value in field.metadata["within"])
        assert getattr(read_hyperparameters(name, kind, {field.name: str(value)}), field.name) == value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lr0": "abc"}, "--hyp.lr0 must be a number, not 'abc'"),
        ({"lr0": ""}, "--hyp.lr0 must be a number, not ''"),
        ({"lr0": "inf"}, "--hyp.lr0 must be a number, not inf"),
        ({"nbs": "1.5"}, "--hyp.nbs must be a whole number, not 1.5"),
        ({"lr0": "-1e-3"}, "--hyp.lr0 is -0.001; give more than 0"),
        ({"degrees": "-3"}, "--hyp.degrees is -3.0; give 0 to 180"),
        ({"box": "1", "mosaic": "2"}, "--hyp.mosaic is 2.0; give 0 to 1"),
        ({"lr_0": "1"}, "unknown flag --hyp.lr_0 (did you mean '--hyp.lr0'?)"),
        ({"weightdecay": "1"}, "unknown flag --hyp.weightdecay (did you mean '--hyp.weight_decay'?)"),
        ({"zzzz": "1"}, "unknown flag --hyp.zzzz"),
        ({"": "1"}, "unknown flag --hyp."),
        ({"cutmix": "0.5"}, "unknown flag --hyp.cutmix"),  # of another task
    ],
)
def test_what_is_wrong_in_an_override_is_named(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_hyperparameters("low", Hyperparameters, overrides)
    assert str(caught.value) == message


CLASSIFY = ("classify", "shapes-cls")  # recipes for classifiers
AUGMENTATION = ("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "mosaic")
# what differs from the recipe `low`
STRONGER = {"lrf": 0.1, "cls": 0.3, "obj": 0.7}
RECIPES = {
    "low": {},
    "med": {**STRONGER, "scale": 0.9, "mixup": 0.1},
    "high": {**STRONGER, "scale": 0.9, "mixup": 0.1, "copy_paste": 0.1},
    "VOC": {
        **{"lr0": 0.00334, "lrf": 0.15135, "momentum": 0.74832, "weight_decay": 0.00025, "warmup_epochs": 3.3835},
        **{"warmup_momentum": 0.59462, "warmup_bias_lr": 0.18657, "box": 0.02, "cls": 0.21638, "cls_pw": 0.5},
        **{"obj": 0.51728, "obj_pw": 0.67198, "anchor_t": 3.3744, "anchors": 3.412, "hsv_h": 0.01041},
        **{"hsv_s": 0.54703, "hsv_v": 0.27739, "translate": 0.04591, "scale": 0.75544, "mosaic": 0.85834},
        **{"mixup": 0.04266},
    },
    "Objects365": {
        **{"lr0": 0.00258, "lrf": 0.17, "momentum": 0.779, "weight_decay": 0.00058, "warmup_epochs": 1.33},
        **{"warmup_momentum": 0.86, "warmup_bias_lr": 0.0711, "box": 0.0539, "cls": 0.299, "cls_pw": 0.825},
        **{"obj": 0.632, "anchor_t": 3.44, "anchors": 3.2, "hsv_h": 0.0188, "hsv_s": 0.704, "hsv_v": 0.36},
        **{"translate": 0.0902, "scale": 0.491},
    },
    "none": {**STRONGER, **dict.fromkeys(AUGMENTATION, 0.0)},
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_those_of_yolov5(name: str) -> None:
    expected = Hyperparameters(**RECIPES[name])
    assert read_hyperparameters(name, Hyperparameters) == expected
    assert read_hyperparameters(f"data/hyps/{name}.yaml", Hyperparameters) == expected


def test_all_shipped_recipes_can_be_read() -> None:
    shipped = sorted((ROOT / "data" / "hyps").glob("*.yaml"))
    assert {"low", "med", "high", "none", "shapes", *CLASSIFY} <= {path.stem for path in shipped}
    for path in shipped:
        kind = ClassificationRecipe if path.stem in CLASSIFY else Hyperparameters
        found = read_hyperparameters(str(path), kind)
        assert set(read_yaml(path)) <= {field.name for field in fields(found)}
    for name in CLASSIFY:
        with pytest.raises(UserError, match=rf"{name}\.yaml: unknown key 'crop_scale'"):
            read_hyperparameters(name, Hyperparameters)


def test_the_recipe_classify_states_the_defaults() -> None:
    content = read_yaml(ROOT / "data" / "hyps" / "classify.yaml")
    assert content == vars(ClassificationRecipe())
    assert {key: type(value) for key, value in content.items()} == typing.get_type_hints(ClassificationRecipe)


def test_the_recipe_of_the_built_in_classification() -> None:
    """Outlines are all that tells the shapes apart: most of each must stay in the crop, and nothing else is changed."""
    recipe = read_hyperparameters("shapes-cls", ClassificationRecipe)
    assert recipe.crop_scale > 0.5
    others = ("brightness", "contrast", "saturation", "hue", "randaugment", "erasing", "mixup", "cutmix")
    assert [name for name in others if getattr(recipe, name)] == []


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("hyp.scratch-low.yaml", "low"),
        ("hyp.scratch-med.yaml", "med"),
        ("hyp.scratch-high.yaml", "high"),
        ("hyp.no-augmentation.yaml", "none"),
        ("hyp.VOC.yaml", "VOC"),
        ("hyp.Objects365.yaml", "Objects365"),
    ],
)
def test_yolov5s_file_names(theirs: str, ours: str) -> None:
    expected = read_hyperparameters(ours, Hyperparameters)
    for name in (theirs, f"data/hyps/{theirs}"):
        assert read_hyperparameters(name, Hyperparameters) == expected


def test_a_users_file_of_yolov5s_name_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hyp.scratch-low.yaml"
    path.write_text("lr0: 0.5\n")
    assert read_hyperparameters(str(path), Hyperparameters) == Hyperparameters(lr0=0.5)


# What follows from a recipe


@pytest.mark.parametrize(
    ("nbs", "batch_size", "batches", "decay"),
    [
        (64, 16, 4, 1.0),
        (64, 64, 1, 1.0),
        (64, 24, 3, 72 / 64),  # 2.67 batches: three of them, 72 images
        (64, 50, 1, 50 / 64),  # 1.28 batches
        (64, 256, 1, 4.0),  # a step cannot be less than a batch
        (16, 5, 3, 15 / 16),
        (0, 16, 1, 1.0),  # every batch is a step, and the decay is what the file says
        (0, 512, 1, 1.0),
    ],
)
def test_batches_and_decay_of_a_step(nbs: int, batch_size: int, batches: int, decay: float) -> None:
    recipe = Recipe(nbs=nbs, weight_decay=0.002)
    assert recipe.accumulation(batch_size) == batches
    assert recipe.decay(batch_size) == pytest.approx(0.002 * decay)


# Better defaults


def test_suggestions() -> None:
    values = {
        "hyp": "data/hyps/none.yaml",
        "epochs": 12,
        "batch_size": 32,
        "imgsz": 64,
        "optimizer": "AdamW",
        "cos_lr": True,
        "label_smoothing": 0.1,
    }
    assert set(values) == set(SUGGESTED)
    found = suggestions(values, Path("a.yaml"))
    assert found == values
    assert found is not values
    assert suggestions({}, Path("a.yaml")) == {}
    assert suggestions({"label_smoothing": 0}, Path("a.yaml")) == {"label_smoothing": 0}


def test_a_suggested_whole_number_is_one() -> None:
    found = suggestions({"imgsz": 64.0, "label_smoothing": 0}, Path("a.yaml"))
    assert (type(found["imgsz"]), type(found["label_smoothing"])) == (int, float)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, 2], r"`defaults` must be lines such as `imgsz: 64`, not \[1, 2\]$"),
        ("imgsz", "`defaults` must be lines such as `imgsz: 64`, not 'imgsz'$"),
        (
            {"imgzs": 64},
            r"unknown key 'imgzs' under `defaults` \(did you mean 'imgsz'\?\); known are hyp, epochs, batch_size, ",
        ),
        ({"device": "cpu"}, "unknown key 'device' under `defaults`; known are"),  # a flag, but not the data's business
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
def test_suggestions_that_are_none(values: Any, message: str) -> None:
    with pytest.raises(UserError, match=rf"^mine\.yaml: {message}"):
        suggestions(values, Path("mine.yaml"))


def test_better_defaults_give_way_to_flags() -> None:
    argv = ["--epochs", "5", "--imgsz=640", "--name", "x"]
    task, data = {"epochs": 30, "imgsz": 224, "weights": "", "batch_size": 32}, {"batch_size": 8, "cos_lr": True}
    found = with_defaults(train(*argv), argv, task, data)
    assert found == TrainOptions(
        epochs=5, name="x", weights="", batch_size=8, cos_lr=True
    )  # 640 is no 224, though given
    assert with_defaults(train(*argv), argv, data, task).batch_size == 32  # the later one is stronger
    assert with_defaults(train(*argv), argv) == train(*argv)
    assert with_defaults(ValOptions(), ["--batch", "4"], {"imgsz": 224, "batch_size": 1}).batch_size == 32


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
    for kind in (Hyperparameters, ClassificationRecipe, TrainOptions, ValOptions):
        for field in fields(kind):
            if type(field.default) in (int, float) and field.name != "processes":  # 0: as many as devices
                assert field.default in field.metadata["within"], field.name
