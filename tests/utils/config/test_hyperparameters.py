"""Hyperparameter files and the flags that override them."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.tasks.classify import ClassificationRecipe
from tests.making import write_yaml
from utils.config.flags import POSITIVE
from utils.config.hyperparameters import (
    Augmentation,
    Hyperparameters,
    Recipe,
    is_shipped,
    log_unused,
    number,
    read_hyperparameters,
)
from utils.errors import UserError
from utils.files import ROOT, read_yaml


def hyperparameters(tmp_path: Path, text: str) -> Hyperparameters:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return read_hyperparameters(str(path), Hyperparameters)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        *(("lr0: 0.01\nmosiac: 1", "mosiac"), ("5: 1", "5"), ("lr0:", "lr0"), ("lr0: [0.1]", "lr0"), ("lr0: 0", "lr0")),
        *(("mosaic: yes", "mosaic"), ("nbs: 1.5", "nbs"), ("nbs: .nan", "nbs"), ("perspective: 0.01", "perspective")),
    ],
)
def test_an_error_names_the_file_and_the_key(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(UserError, match=rf"mine\.yaml: .*{named}"):
        hyperparameters(tmp_path, text)


def test_a_recipe_of_another_task_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"mine\.yaml is a classifier's recipe: this task has no crop_scale"):
        hyperparameters(tmp_path, "crop_scale: 0.5")


# Single hyperparameters


def test_overrides_replace_values_of_the_file(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "mine.yaml", {"lr0": 0.02, "mosaic": 0})
    recipe = read_hyperparameters(str(path), Hyperparameters, {"lr0": "1e-3", "box": "7", "nbs": "32.0"})
    assert recipe == Hyperparameters(lr0=0.001, mosaic=0.0, box=7.0, nbs=32)
    assert type(recipe.nbs) is int
    assert read_hyperparameters("classify", ClassificationRecipe, {"crop_scale": "0.5"}).crop_scale == 0.5


def test_class_weights_by_name(tmp_path: Path) -> None:
    path = write_yaml(tmp_path / "mine.yaml", {"class_weights": {"cat": 2, 7: 0.5}})
    assert read_hyperparameters(str(path), Hyperparameters).class_weights == {"cat": 2.0, "7": 0.5}
    override, weights = "{traffic light: 1.5, no: 2, 010: 3}", {"traffic light": 1.5, "no": 2, "010": 3}
    assert read_hyperparameters(str(path), Hyperparameters, {"class_weights": override}).class_weights == weights


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("lr0", "abc"), ("lr0", ""), ("nbs", "1.5"), ("degrees", "-3"), ("weightdecay", "1"), ("", "1")),
        ("keep_head", "False"),  # as from Python: a number, not a flag
        *(("class_weights", text) for text in ("2", "{cat: 0}", "{cat: many}", "{cat: 101}", "{cat", "{cat: true}")),
        ("cutmix", "0.5"),  # of another task
    ],
)
def test_an_error_names_the_override(key: str, text: str) -> None:
    with pytest.raises(UserError, match=rf"--hyp\.{key}"):
        read_hyperparameters("low", Hyperparameters, {"box": "1", key: text})


# Keys without effect


@dataclass(frozen=True)
class SpotRecipe(Augmentation):
    """The keys of a task that augments as a detector and has a loss of its own."""

    spot: float = number(1.0, POSITIVE)


def test_a_task_takes_augmentation_without_the_losses_of_detectors() -> None:
    """From a file of a detector, YOLOv5's too: the keys of its loss are left out, unknown ones are not."""
    recipe = read_hyperparameters("high", SpotRecipe, {"spot": "2"})
    assert (recipe.mixup, recipe.scale, recipe.lrf, recipe.spot) == (0.1, 0.9, 0.1, 2.0)
    assert not {"box", "tal_box", "keep_head"} & set(vars(recipe))
    with pytest.raises(UserError, match=r"--hyp\.box"):
        read_hyperparameters("low", SpotRecipe, {"box": "0.1"})


def test_keys_of_a_file_without_effect_are_named_if_they_are_not_the_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hyp = Hyperparameters(box=0.1, obj=0.7, lr0=0.1)
    log_unused(hyp, ("box", "cls", "obj"), "this model")
    assert capsys.readouterr().out.endswith(": box, obj\n")
    log_unused(hyp, ("cls",), "this model")
    assert capsys.readouterr().out == ""


# Shipped recipes


AUGMENTATION = ("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "mosaic")
# Differences from the recipe `low`
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
def test_recipes_equal_those_of_yolov5(name: str) -> None:
    expected = Hyperparameters(**RECIPES[name])
    assert read_hyperparameters(name, Hyperparameters) == expected
    assert read_hyperparameters(f"data/hyps/{name}.yaml", Hyperparameters) == expected


def test_the_recipe_classify_states_the_defaults() -> None:
    content = read_yaml(ROOT / "data" / "hyps" / "classify.yaml")
    assert content == vars(ClassificationRecipe())
    types = {key: type(value) for key, value in content.items()}
    by_name = {
        **dict.fromkeys(("class_weights", "lr_factor"), Mapping[str, float]),
        "optimizer_args": Mapping[str, Any],
    }
    assert {**types, **by_name} == typing.get_type_hints(ClassificationRecipe)


def test_file_names_of_yolov5() -> None:
    yolov5 = {"scratch-low": "low", "scratch-med": "med", "scratch-high": "high", "no-augmentation": "none"}
    yolov5 |= {"scratch": "low", "finetune": "VOC", "VOC": "VOC", "Objects365": "Objects365"}
    for old, name in yolov5.items():
        expected = read_hyperparameters(name, Hyperparameters)
        for path in (f"hyp.{old}.yaml", f"data/hyp.{old}.yaml", f"./data/hyps/hyp.{old}.yaml"):
            assert read_hyperparameters(path, Hyperparameters) == expected


@pytest.mark.parametrize(
    ("known", "factor", "norms", "named"),
    [(0, 1, 1, []), (1, 0.04, 1, ["0.04", "100%"]), (0.5, 0.2, 1, ["0.2", "50%"]), (None, 1, 0, [])],
)
def test_hyperparameters_for_weights(
    known: float | None, factor: float, norms: int, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Hyperparameters(keep_norms=1, known_lr=0.04)
    assert recipe.weights_factor(known) == pytest.approx(factor)
    assert recipe.freezes_batchnorm(known) == norms
    recipe.log_weights_rules(known)
    about_norms, *about_rates = capsys.readouterr().out.splitlines()
    assert "BatchNorm" in about_norms
    assert len(about_rates) == bool(named)
    assert all(text in about_rates[0] for text in named)


@pytest.mark.parametrize(("small", "batches", "factor"), [(3, 150, 2), (3, 149, 1), (2, 150, 1), (0, 150, 1)])
def test_rate_for_small_objects(small: int, batches: int, factor: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four boxes `small` ones are just smaller than a tenth of the image."""
    recipe, sides = Hyperparameters(small_lr=2), np.array([[0.3, 0.033]] * small + [[0.2, 0.06]] * (4 - small))
    assert recipe.for_boxes(sides, batches) == replace(recipe, lr0=recipe.lr0 * factor)
    assert ("times 2: 75% of the boxes" in capsys.readouterr().out) == (factor == 2)
    assert recipe.for_boxes(sides[:0], batches) is recipe


@pytest.mark.parametrize(("share", "epochs", "unmixed"), [(1, 20, 0), (0.75, 20, 5), (0.75, 1, 0), (0, 3, 3)])
def test_epochs_without_mosaic(share: float, epochs: int, unmixed: int) -> None:
    flags = Hyperparameters(mosaic_epochs=share).flags(epochs)
    assert flags == ({"close_mosaic": unmixed} if unmixed else {})


# Accumulation and weight decay


@pytest.mark.parametrize(
    ("nbs", "batch_size", "batches", "decay"),
    [
        (64, 16, 4, 1.0),
        (64, 64, 1, 1.0),
        (64, 24, 3, 72 / 64),  # 2.67 batches: three of them, 72 images
        (64, 50, 1, 50 / 64),  # 1.28 batches
        (64, 256, 1, 4.0),  # a step cannot be less than a batch
        (16, 5, 3, 15 / 16),
        (0, 16, 1, 1.0),  # every batch is a step, with the decay of the file
        (0, 512, 1, 1.0),
    ],
)
def test_accumulated_batches_and_weight_decay(nbs: int, batch_size: int, batches: int, decay: float) -> None:
    recipe = Recipe(nbs=nbs, weight_decay=0.002)
    assert recipe.accumulation(batch_size) == batches
    assert recipe.decay(batch_size * batches) == pytest.approx(0.002 * decay)


def test_a_shipped_file_is_not_a_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is named by its name, its path or YOLOv5's name; a user's file of the same name is the user's."""
    monkeypatch.chdir(tmp_path)
    for name in ("low", "hyp.scratch-low.yaml", str(ROOT / "data" / "hyps" / "low.yaml")):
        assert is_shipped(name)
    assert not is_shipped(str(write_yaml(tmp_path / "low.yaml", {})))
    assert not is_shipped("low.yaml")
