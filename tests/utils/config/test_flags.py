"""The flags of the scripts: defaults, ranges, and the built-in job."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from models.tasks.classify import ClassificationRecipe
from tests.making import options_of
from utils.config.flags import BUILT_IN_JOB, REFUSED, TrainOptions, ValOptions, flags_of
from utils.config.hyperparameters import Hyperparameters
from utils.files import ROOT

KINDS = (TrainOptions, ValOptions)
# Of YOLOv5, except for the recipe.
YOLOV5_TRAIN = {
    "weights": "yolov5s.pt",
    "cfg": "",
    "data": "data/coco128.yaml",
    "hyp": "auto",
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
YOLOV5_VAL = {  # beside --imgsz, whose default depends on the weights
    "data": "data/coco128.yaml",
    "weights": ("yolov5s.pt",),
    "batch_size": 32,
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


@pytest.mark.parametrize(("kind", "expected"), [(TrainOptions, YOLOV5_TRAIN), (ValOptions, YOLOV5_VAL)])
def test_defaults_equal_those_of_yolov5(kind: type, expected: dict[str, Any]) -> None:
    options = options_of(kind, [])
    assert {name: getattr(options, name) for name in expected} == expected
    assert options == kind()


def test_defaults_are_in_their_ranges() -> None:
    for kind in (Hyperparameters, ClassificationRecipe, TrainOptions, ValOptions):
        for field in fields(kind):
            if type(field.default) in (int, float) and "processes" not in field.name:  # 0: as many as there are
                assert field.default in field.metadata["within"], field.name


def test_the_built_in_job_has_flags_and_files() -> None:
    assert set(BUILT_IN_JOB) <= {field.name for field in fields(TrainOptions)}
    assert {"data", "cfg", "weights", "hyp"} <= set(BUILT_IN_JOB)
    for name in ("data", "cfg", "hyp"):
        assert (ROOT / BUILT_IN_JOB[name]).is_file()


# What a flag says of itself


def test_the_flags_of_train_are_frozen() -> None:
    """A new flag needs an issue that asks for it; then flags.txt has it too."""
    listed = (ROOT / "tests/utils/config/flags.txt").read_text().split()
    assert [field.name for field in flags_of(TrainOptions)] == listed
    assert len(listed) <= 55


def test_a_resume_compares_what_the_curve_depends_on() -> None:
    curve = {field.name for field in flags_of(TrainOptions) if field.metadata["curve"]}
    assert {"weights", "cfg", "batch_size", "optimizer", "freeze", "seed", "logical_processes", "fitness"} <= curve
    assert not {"epochs", "patience", "workers", "device", "project", "data"} & curve


def test_a_refused_flag_is_not_a_flag_of_both_scripts() -> None:
    """A flag of one script may be refused in the other."""
    names = [{name for field in flags_of(kind) for name in (field.name, *field.metadata["aliases"])} for kind in KINDS]
    assert not set(REFUSED) & names[0] & names[1]
    assert all("-" not in name for name in REFUSED)  # the parser looks up names with underscores
