"""The flags of the scripts: defaults, what each says of itself, and values as the types of fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from tests.making import options_of
from utils.config.flags import (
    BELOW_ONE,
    BUILT_IN_JOB,
    NOT_NEGATIVE,
    POSITIVE,
    WRONG_VALUE,
    Range,
    TrainOptions,
    ValOptions,
    flags_of,
    typed,
)
from utils.files import ROOT

KINDS = (TrainOptions, ValOptions)
# Of YOLOv5, except for the recipe, and for --imgsz of val.py, whose default depends on the weights.
BOTH = {"data": "data/coco128.yaml", "device": "", "workers": 8, "single_cls": False, "name": "exp", "exist_ok": False}
YOLOV5_TRAIN = {
    **BOTH,
    **{"weights": "yolov5s.pt", "cfg": "", "hyp": "auto", "epochs": 100, "batch_size": 16, "imgsz": 640, "cache": ""},
    **dict.fromkeys(("rect", "multi_scale", "image_weights", "nosave", "noval", "noautoanchor", "noplots"), False),
    **{"optimizer": "SGD", "project": "runs/train", "cos_lr": False, "label_smoothing": 0.0, "patience": 100},
    **{"freeze": (0,), "save_period": -1, "seed": 0},
}
YOLOV5_VAL = {
    **BOTH,
    **{"weights": ("yolov5s.pt",), "batch_size": 32, "conf_thres": 0.001, "iou_thres": 0.6, "max_det": 300},
    **{"task": "val", "project": "runs/val"},
    **dict.fromkeys(("augment", "verbose", "save_txt", "save_hybrid", "save_conf", "save_json", "half"), False),
}


@pytest.mark.parametrize(("kind", "expected"), [(TrainOptions, YOLOV5_TRAIN), (ValOptions, YOLOV5_VAL)])
def test_defaults_equal_those_of_yolov5(kind: type, expected: dict[str, Any]) -> None:
    options = options_of(kind, [])
    assert {name: getattr(options, name) for name in expected} == expected
    assert options == kind()


def test_the_built_in_job_has_flags_and_files() -> None:
    assert {"data", "cfg", "weights", "hyp"} <= set(BUILT_IN_JOB) <= {field.name for field in fields(TrainOptions)}
    assert all((ROOT / BUILT_IN_JOB[name]).is_file() for name in ("data", "cfg", "hyp"))


def test_the_flags_of_train_are_frozen() -> None:
    """A new flag needs an issue that asks for it; then flags.txt has it too."""
    listed = (ROOT / "tests/utils/config/flags.txt").read_text().split()
    assert [field.name for field in flags_of(TrainOptions)] == listed


def test_a_resume_compares_what_the_curve_depends_on() -> None:
    curve = {field.name for field in flags_of(TrainOptions) if field.metadata["curve"]}
    assert {"weights", "cfg", "batch_size", "optimizer", "freeze", "seed", "logical_processes", "fitness"} <= curve
    assert not {"epochs", "patience", "workers", "device", "project", "data"} & curve


# Values


CHOICES = {"choices": ("none", "all", "wandb", "FILE.py"), "comma_separated": True}
WRONG = object()  # in place of a result


@pytest.mark.parametrize(
    ("hint", "metadata", "value", "result"),
    [
        (int, {"within": NOT_NEGATIVE}, "7", 7),
        (int, {}, 7.0, 7),
        *((float, {"within": BELOW_ONE}, value, value) for value in (0.0, 0.999)),
        (float, {}, "1e-3", 0.001),
        (float, {}, 3, 3.0),
        (bool, {}, True, True),
        (str, {}, 0, "0"),  # such as `device: 0`
        (str, CHOICES, " wandb , a/b.py,", "wandb,a/b.py"),
        (tuple[int, ...], {}, "90", (90,)),
        (tuple[int, ...], {}, [90, "128"], (90, 128)),
        (tuple[str, ...], {"comma_separated": True}, ["a, b", "c"], ("a", "b", "c")),
        (tuple[int | str, ...], {}, ["10", "*.bn", 3], (10, "*.bn", 3)),
        (Mapping[str, float], {"within": POSITIVE}, "{cat: 2}", {"cat": 2.0}),
        (Mapping[str, float], {}, {7: 1}, {"7": 1.0}),
        *((int, {}, value, WRONG) for value in ("many", 2.5, True)),
        (int, {"within": NOT_NEGATIVE}, -1, WRONG),
        *((float, {"within": allowed}, value, WRONG) for allowed, value in ((BELOW_ONE, 1.0), (POSITIVE, 0.0))),
        (float, {"within": Range(-1, 2)}, 2.1, WRONG),
        *((float, {}, value, WRONG) for value in ("nan", None)),
        *((bool, {}, value, WRONG) for value in ("yes", 1)),
        *((str, {}, value, WRONG) for value in (None, True)),
        *((str, CHOICES, value, WRONG) for value in ("wandb,x", "none,wandb", ".py")),
        (tuple[int, ...], {}, [1.5], WRONG),
        (tuple[int | str, ...], {}, [1.5], WRONG),
        *((Mapping[str, float], {"within": POSITIVE}, value, WRONG) for value in ({"cat": 0}, "cat", [1])),
    ],
)
def test_values_of_a_command_line_and_of_yaml(
    hint: Any, metadata: dict[str, Any], value: object, result: object
) -> None:
    try:
        read = typed(hint, metadata, value)
    except WRONG_VALUE:
        read = WRONG
    assert (read, type(read)) == (result, type(result))
