"""The classification task: its recipe, models and inputs, with numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.tasks import TASKS, task_of
from models.tasks.classify import ClassificationRecipe, ClassificationTask
from models.yolo import YoloModel
from tests.making import CLASS_NAMES, grey_batch
from tests.models.tasks.classification.toy_batches import Identity, make, of_classes
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import find_hyperparameters, from_mapping
from utils.errors import UserError
from utils.plots.drawing import draw_captioned


@pytest.fixture
def task() -> ClassificationTask:
    return make()


# The registry


def test_the_task_of_a_model_yaml() -> None:
    assert TASKS["classify"].load() is ClassificationTask
    assert task_of({"task": "classify", "nc": 3}, "mine.yaml") == "classify"
    assert task_of({"nc": 3, "head": [[-1, 1, "Classify", ["nc"]]]}, "mine.yaml") == "classify"
    assert task_of({"nc": 3}, "mine.yaml") == "detect"
    message = f"mine.yaml is a model for the task 'pose'; give one for {' or '.join(TASKS)}"
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        task_of({"task": "pose"}, "mine.yaml")


def test_defaults_are_flags() -> None:
    known = {field.name: type(field.default) for field in fields(TrainOptions)}
    assert {name: type(value) for name, value in ClassificationTask.defaults.items()}.items() <= known.items()
    assert find_hyperparameters(ClassificationTask.recipes.trained).is_file()
    assert TASKS["detect"].load().defaults == {}  # the flags' own


# The recipe


@pytest.mark.parametrize(
    ("key", "fits", "refused"),
    [
        ("crop_scale", [0.001, 1], [0, 1.01, -0.1]),
        ("fliplr", [0, 1], [-0.1, 1.1]),
        ("flipud", [0, 1], [-0.1, 1.1]),
        ("brightness", [0, 3], [-0.1]),
        ("contrast", [0, 3], [-0.1]),
        ("saturation", [0, 3], [-0.1]),
        ("hue", [0, 0.5], [-0.1, 0.51]),
        ("randaugment", [0, 16], [-1, 17, 1.5]),
        ("randaugment_magnitude", [0, 30], [-1, 31, 0.5]),
        ("erasing", [0, 1], [-0.1, 1.1]),
        ("mixup", [0, 1], [-0.1, 1.1]),
        ("cutmix", [0, 1], [-0.1, 1.1]),
        ("mixup_alpha", [0.01, 9], [0, -1]),
        ("cutmix_alpha", [0.01, 9], [0, -1]),
        ("nbs", [0, 64], [-1]),
        ("momentum", [0, 0.99], [1]),
        ("weight_decay", [0, 1], [-0.1]),
        ("warmup_epochs", [0, 5], [-1]),
        ("lr0", [0.001, 2], [0]),
    ],
)
def test_ranges_of_the_recipe(key: str, fits: list[float], refused: list[float]) -> None:
    for value in fits:
        assert getattr(from_mapping(ClassificationRecipe, {key: value}, Path("a.yaml")), key) == value
    for value in refused:
        with pytest.raises(UserError, match=rf"^a\.yaml: {key} "):
            from_mapping(ClassificationRecipe, {key: value}, Path("a.yaml"))


def test_a_detectors_keys_are_unknown() -> None:
    with pytest.raises(UserError, match="unknown key 'mosaic'"):
        from_mapping(ClassificationRecipe, {"mosaic": 1}, Path("a.yaml"))


def test_an_image_gets_mixup_or_cutmix() -> None:
    names = {0: "disc", 1: "bar"}
    ClassificationTask(names, ClassificationRecipe(mixup=0.5, cutmix=0.5))
    with pytest.raises(UserError, match=r"^mixup 0\.75 and cutmix 0\.5 are probabilities, .* add up to 1 or less$"):
        ClassificationTask(names, ClassificationRecipe(mixup=0.75, cutmix=0.5))


# The model


@pytest.mark.parametrize(("names", "listed"), [({0: "disc"}, "disc"), ({}, "none")])
def test_one_class_is_not_enough(names: dict[int, str], listed: str) -> None:
    with pytest.raises(UserError, match=f"^a classifier needs at least two classes; the data set has {listed}$"):
        make(names=names)
    assert make(names={0: "disc", 1: "bar"}).names == {0: "disc", 1: "bar"}


ROWS = {
    "task": "classify",
    "nc": 1000,
    "backbone": [[-1, 1, "Conv", [8, 3, 2]]],
    "head": [[-1, 1, "Classify", ["nc"]]],
}


@pytest.mark.parametrize("yaml", [ROWS, {"architecture": "squeezenet1_1", "nc": 1000}])
def test_the_model_has_the_tasks_classes(task: ClassificationTask, yaml: dict[str, Any]) -> None:
    model: Any = task.build_model(yaml, 50)
    assert isinstance(model, YoloModel) == ("backbone" in yaml)
    assert (model.imgsz, model.stride) == (50, 1)  # any size
    assert model.names == CLASS_NAMES
    assert (model.yaml["task"], model.yaml["nc"], yaml["nc"]) == ("classify", 3, 1000)
    assert model(task.inputs(grey_batch(count=2, side=50))).shape == (2, 3)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ({"task": "classify"}, "`architecture` is None; give a classification model"),
        ({"architecture": "resnet99"}, "`architecture` is 'resnet99'"),
        ({**ROWS, "head": []}, "not a classification head"),
        ({**ROWS, "architecture": "resnet18"}, "unknown key 'backbone'"),
    ],
)
def test_errors_name_the_yaml(task: ClassificationTask, yaml: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^mine.yaml.*{message}"):
        task.build_model(yaml, 64, "mine.yaml")


def test_nothing_is_adapted_to_the_data(task: ClassificationTask) -> None:
    yaml = {"architecture": "resnet18"}
    resolved = task.model_yaml(yaml)
    assert resolved == yaml
    assert resolved is not yaml
    assert (task.fresh_tensors(True), task.fresh_tensors(False)) == ((), ())
    task.adapt(Identity(), None)


def test_batchnorm_is_folded_in_the_exported_module(task: ClassificationTask) -> None:
    model = task.build_model(ROWS, 32).eval()
    module = task.export_module(model, None)
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(module(images), model(images))


def test_official_weights() -> None:
    for name, official in {"yolov5s-cls.pt": True, "yolov5x-cls.pt": True, "yolov5s.pt": False}.items():
        assert (re.fullmatch(ClassificationTask.official_weights, name) is not None) == official


def test_inputs_are_normalised_by_imagenets_statistics(task: ClassificationTask) -> None:
    given = of_classes(0, 1)
    given.images[1] = torch.tensor([0, 255, 102], dtype=torch.uint8).view(3, 1, 1)
    inputs = task.inputs(given)
    assert inputs.dtype == torch.float32
    assert inputs.shape == (2, 3, 8, 8)
    grey = [(0.2 - 0.485) / 0.229, (0.2 - 0.456) / 0.224, (0.2 - 0.406) / 0.225]  # 51 is 0.2 of 255
    assert inputs[0, :, 3, 5].tolist() == pytest.approx(grey, abs=1e-6)
    assert inputs[1, :, 0, 0].tolist() == pytest.approx(
        [-0.485 / 0.229, (1 - 0.456) / 0.224, (0.4 - 0.406) / 0.225], abs=1e-6
    )
    assert given.images.dtype == torch.uint8


def test_a_batch_is_drawn_with_classes_and_shares(task: ClassificationTask) -> None:
    batch = of_classes(0, 1, 0, targets=[[1, 0, 0], [0.25, 0.75, 0], [0.2, 0.5, 0.3]])
    batch.images[1] = torch.tensor([1, 2, 3], dtype=torch.uint8).view(3, 1, 1)
    grey, colour = np.full((8, 8, 3), 51, np.uint8), np.full((8, 8, 3), (3, 2, 1), np.uint8)  # blue first
    captions = ["disc", "traffic light 0.75\ndisc 0.25", "traffic light 0.50\nbar 0.30"]
    assert np.array_equal(task.draw_batch(batch), draw_captioned([grey, colour, grey], captions))
