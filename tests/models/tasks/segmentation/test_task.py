"""`SegmentationTask` makes the parts of the task from the model and the hyperparameters."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from models.tasks import TASKS, contract, task_of
from models.tasks.contract import Thresholds
from models.tasks.losses import UnavailableCriterion
from models.tasks.segment import DecodedSegmenter, SegmentationCriterion, SegmentationTask, SuppressedSegmenter
from models.weights.reader import read_weights
from models.weights.transfer import transfer
from models.yolo import build_model
from tests.making import CLASS_NAMES
from tests.models.tasks.segmentation.batches import MAP, SIDE, mask_batch, tiny_segmenter, tiny_task
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import ROOT, read_yaml
from utils.plots.drawing import COLOURS

# Parameters with 80 classes and with 1, and keys of the state dict.
SHIPPED = {
    "n": (1_991_549, 1_884_662, 367),
    "s": (7_621_277, 7_408_214, 367),
    "m": (21_990_397, 21_671_158, 499),
    "l": (47_924_957, 47_499_542, 631),
    "x": (88_819_517, 88_287_926, 763),
}


def test_the_registered_task() -> None:
    assert TASKS["segment"].load() is SegmentationTask
    assert SegmentationTask.loss_names == ("box_loss", "seg_loss", "obj_loss", "cls_loss")
    assert len(SegmentationTask.metric_names) == 8


@pytest.mark.parametrize(
    ("name", "official"),
    [("yolov5n-seg.pt", True), ("yolov5x-seg.pt", True), ("yolov5n6-seg.pt", False), ("yolov5n.pt", False)],
)
def test_official_weights(name: str, official: bool) -> None:
    assert bool(re.fullmatch(SegmentationTask.official_weights, name)) == official


# The model


@pytest.mark.parametrize(("size", "numbers"), SHIPPED.items())
def test_parameters_of_shipped_models(size: str, numbers: tuple[int, int, int]) -> None:
    content = read_yaml(ROOT / "models" / f"yolov5{size}-seg.yaml")
    assert task_of(content, "its YAML") == "segment"
    with torch.device("meta"):
        models = [build_model(content, nc=classes) for classes in (80, 1)]
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert (*counts, len(models[0].state_dict())) == numbers


def test_a_detectors_weights_fill_all_but_the_head(shared: Path) -> None:
    model = SegmentationTask(dict.fromkeys(range(80), "a"), Hyperparameters()).build_model(
        read_yaml(ROOT / "models" / "yolov5n-seg.yaml"), 64
    )
    loaded, total, misfits = transfer(model, read_weights(shared / "weights" / "yolov5n.pt").state)
    assert (loaded, total) == (343, 367)
    assert {name.rpartition(".")[0] for name, *_ in misfits} == {f"model.24.m.{level}" for level in range(3)}


def test_the_model_has_the_tasks_classes_and_size() -> None:
    model = tiny_task().build_model({**tiny_segmenter(), "nc": 80}, 50)
    assert (model.names, model.yaml["nc"], model.head.nc, model.imgsz, model.stride) == (CLASS_NAMES, 3, 3, 64, 16)


def test_prototypes_must_be_a_quarter_of_the_image() -> None:
    content = {**tiny_segmenter(), "head": [[[1, 3], 1, "Segment", ["nc", "anchors", 4, 8]]]}
    message = r"^mine\.yaml: the first map of Segment has stride 4, and masks need 8; name a row of that stride first$"
    with pytest.raises(UserError, match=message):
        tiny_task().build_model(content, 64, "mine.yaml")


def test_a_detector_is_no_segmenter() -> None:
    content = {**tiny_segmenter(), "head": [[[2, 3], 1, "Detect", ["nc", "anchors"]]]}
    with pytest.raises(UserError, match="the last row of `head` is not a segmentation head; end it with one, such as"):
        tiny_task().build_model(content, 64)


# Parts


def test_a_training_step_reaches_every_parameter() -> None:
    task = tiny_task()
    model = task.build_model(tiny_segmenter(), SIDE).train()
    criterion = task.criterion(model)
    assert isinstance(criterion, SegmentationCriterion)
    assert criterion.settings.box == pytest.approx(0.05 * 1.5)  # scaled to 2 levels
    mask = np.arange(MAP)[:, None] > np.arange(MAP)
    targets = [[0, 1, 0.5, 0.5, 0.3, 0.4], [1, 2, 0.3, 0.6, 0.5, 0.5], [1, 0, 0.6, 0.4, 0.15, 0.1]]
    batch = mask_batch(targets, [mask] * 3, images=2)
    noise = torch.randint(0, 256, batch.images.shape, dtype=torch.uint8)
    outputs = model(task.inputs(replace(batch, images=noise)), *criterion.hints(batch))
    terms = criterion(outputs, batch)
    losses = terms.local_means()
    assert len(losses) == len(task.loss_names)
    assert (losses > 0).all()
    criterion.objective(losses, 2).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, one in gradients.items() if one is None or not one.isfinite().all() or not one.any()] == []


def test_an_exported_file_has_no_criterion() -> None:
    criterion = tiny_task().criterion(contract.Model())
    assert isinstance(criterion, UnavailableCriterion)
    terms = criterion(None, mask_batch([], []))
    assert terms.local_means().isnan().tolist() == [True] * 4


def test_postprocess_and_metrics() -> None:
    task, thresholds = tiny_task(), Thresholds(conf_thres=0.3, classes=(1,))
    postprocess = task.postprocess(contract.Model(), thresholds)
    assert (postprocess.names, postprocess.thresholds) == (CLASS_NAMES, thresholds)
    metrics = task.metrics(frozenset([3]))
    assert (metrics.names, metrics.shown) == (CLASS_NAMES, {3})


def test_export_module() -> None:
    task = tiny_task()
    model = task.build_model(tiny_segmenter(), SIDE)
    decoded = task.export_module(model, None)
    suppressed = task.export_module(model, Thresholds(max_det=7))
    assert isinstance(decoded, DecodedSegmenter)
    assert isinstance(suppressed, SuppressedSegmenter)
    assert not decoded.training
    assert not suppressed.training


def test_draw_batch() -> None:
    """The mask covers the upper left quarter of the box."""
    mask = np.zeros((MAP, MAP), bool)
    mask[4:8, 4:8] = True
    picture = tiny_task().draw_batch(mask_batch([[0, 1, 0.5, 0.5, 0.5, 0.5]], [mask]))
    assert (picture.dtype, picture.shape) == (np.uint8, (SIDE, SIDE, 3))
    assert picture[30, 30].tolist() == [int(51 * 0.6 + value * 0.4) for value in COLOURS[1]]
    assert (picture[40, 40] == 51).all()
    assert (picture[40, 16] != 51).any()  # the box's left edge


def test_a_grid_has_the_first_sixteen_images() -> None:
    """The targets of the others are not drawn."""
    mask = np.zeros((MAP, MAP), bool)
    picture = tiny_task().draw_batch(mask_batch([[16, 1, 0.5, 0.5, 0.5, 0.5]], [mask], images=17))
    assert (picture == 51).all()
