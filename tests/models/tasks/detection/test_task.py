"""`DetectionTask` makes the parts of the task from the model and the hyperparameters."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.heads.anchors import DetectionCriterion, LossSettings
from models.tasks import TASKS, contract
from models.tasks.contract import ExportSettings, Thresholds
from models.tasks.detect import DecodedDetector, DetectionTask, SuppressedDetector
from models.tasks.losses import UnavailableCriterion
from models.tasks.segment import SegmentationTask
from tests.making import CLASS_NAMES, grey_batch, image_info, tiny_detector
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError
from utils.files import ROOT, read_yaml


@pytest.fixture
def task() -> DetectionTask:
    return DetectionTask(CLASS_NAMES, Hyperparameters())


def test_the_registered_task() -> None:
    assert TASKS["detect"].load() is DetectionTask


@pytest.mark.parametrize(
    ("name", "official"),
    [("yolov5n.pt", True), ("yolov5x6.pt", True), ("yolov5n-cls.pt", False), ("yolov5n-seg.pt", False)],
)
def test_official_weights(name: str, official: bool) -> None:
    assert bool(re.fullmatch(DetectionTask.official_weights, name)) == official


# The model


@pytest.mark.parametrize(("asked", "taken"), [(64, 64), (60, 64), (65, 72), (3, 16), (16, 16)])
def test_image_size_is_whole_strides_and_at_least_two(task: DetectionTask, asked: int, taken: int) -> None:
    model = task.build_model(tiny_detector(), asked)
    assert model.stride == 8
    assert model.imgsz == taken


def test_the_model_has_the_tasks_classes(task: DetectionTask) -> None:
    model = task.build_model({**tiny_detector(), "nc": 80}, 64)
    assert model.names == CLASS_NAMES
    assert model.yaml["nc"] == model.head.nc == 3


def test_anchors_that_a_yaml_or_the_hyperparameters_ask_for(task: DetectionTask) -> None:
    assert task.model_yaml(tiny_detector()) == tiny_detector()
    assert task.fresh_tensors(from_yaml=False) == ()
    assert task.fresh_tensors(from_yaml=True) == ("anchors",)
    more = DetectionTask(CLASS_NAMES, Hyperparameters(anchors=3))
    assert more.model_yaml(tiny_detector()) == {**tiny_detector(), "anchors": 3}
    assert more.fresh_tensors(from_yaml=False) == ("anchors",)


def test_an_auxiliary_branch_without_weight_is_left_out() -> None:
    yaml = read_yaml(ROOT / "models" / "yolov9t.yaml")
    for weight in (0.25, 0.0):
        changed = DetectionTask(CLASS_NAMES, Hyperparameters(tal_aux=weight)).model_yaml(yaml)
        assert changed == {key: rows for key, rows in yaml.items() if weight or key != "auxiliary"}


def test_the_head_is_kept_if_the_recipe_says_so_and_classes_differ(task: DetectionTask) -> None:
    state = {"anything": torch.zeros(1)}
    names = {0: "other"}
    keeping = DetectionTask(CLASS_NAMES, Hyperparameters(keep_head=1))
    model = task.build_model(tiny_detector(), 64)
    assert task.keep_head(model, state, names) == ""
    assert keeping.keep_head(model, state, CLASS_NAMES) == ""
    assert keeping.keep_head(model, state, names) == "not its head: it has other anchors"


def test_the_head_is_kept_if_a_part_of_the_model_is_new_and_classes_are_equal() -> None:
    """A segmenter takes boxes and classes from a detector of the same classes."""
    detector = DetectionTask(CLASS_NAMES, Hyperparameters()).build_model(read_yaml(ROOT / "models/yolov5n.yaml"), 64)
    segmenter = SegmentationTask(CLASS_NAMES, Hyperparameters(keep_head=1))
    model = segmenter.build_model(read_yaml(ROOT / "models/yolov5n-seg.yaml"), 64)
    message = "from its head the boxes and 3 of 3 classes"
    assert segmenter.keep_head(model, detector.state_dict(), CLASS_NAMES) == message
    rows = [each.head.m[0].weight.view(3, -1, 64)[:, : 5 + 3] for each in (detector, model)]
    assert torch.equal(*rows)
    assert segmenter.keep_head(model, model.state_dict(), CLASS_NAMES) == ""


def test_anchors_are_adapted_to_the_split_at_the_models_size(task: DetectionTask) -> None:
    sizes = []

    def side_lengths(imgsz: int) -> np.ndarray:
        sizes.append(imgsz)
        return np.array([[4, 4], [30, 20.0]])

    split: Any = SimpleNamespace(side_lengths=side_lengths)
    (message,) = task.adapt(task.build_model(tiny_detector(), 60), split)
    assert message.startswith("AutoAnchor: 100.0% of the boxes match an anchor")
    assert sizes == [64]


# Parts


def test_gains_are_scaled_to_the_model() -> None:
    task = DetectionTask(CLASS_NAMES, Hyperparameters(box=0.1, obj=0.7, cls=0.3, anchor_t=3.0), label_smoothing=0.2)
    criterion = task.criterion(task.build_model(tiny_detector(), 60))  # 2 levels, 3 classes, 64 pixels
    assert isinstance(criterion, DetectionCriterion)
    expected = LossSettings(
        box=0.1 * 1.5, obj=0.7 * 1.5 * 0.01, cls=0.3 * 1.5 * 3 / 80, anchor_t=3.0, label_smoothing=0.2
    )
    assert vars(criterion.settings) == pytest.approx(vars(expected))
    assert criterion.classes == 3


def test_an_exported_file_has_no_criterion(task: DetectionTask) -> None:
    exported = contract.Model()
    exported.yaml = tiny_detector()
    assert isinstance(task.criterion(exported), UnavailableCriterion)
    assert task.loss_names_of(exported) == task.loss_names


def test_inputs_are_0_to_1(task: DetectionTask) -> None:
    inputs = task.inputs(grey_batch(image_info(), side=2))
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(inputs, torch.full((1, 3, 2, 2), 0.2))


def test_losses_are_of_the_batchs_targets(task: DetectionTask) -> None:
    model = task.build_model(tiny_detector(), 64)
    targets = torch.tensor([[1, 2, 0.5078125, 0.5078125, 4.5 / 64, 4.25 / 64]])  # near the anchor 4 x 4 of stride 4
    given = grey_batch(image_info(), image_info(), targets=targets)
    terms = task.criterion(model)(model(task.inputs(given)), given)
    assert len(terms.local_means()) == len(task.loss_names) == 3
    # Cell (8.125, 8.125): itself, left and up, for the anchors 4 x 4 and 8 x 4; 16 x 16 has about 3.8 times its size.
    assert terms.counts[0].tolist() == [6, 3]
    assert terms.counts[1].tolist() == [2 * 2 * 16**2, 2 * 2 * 8**2]


def test_postprocess_has_the_tasks_classes_and_the_thresholds(task: DetectionTask) -> None:
    model = task.build_model(tiny_detector(), 64)
    thresholds = Thresholds(conf_thres=0.3, classes=(1,))
    postprocess = task.postprocess(model, thresholds)
    assert (postprocess.names, postprocess.thresholds) == (CLASS_NAMES, thresholds)
    with pytest.raises(UserError, match="--classes 3: the model has classes 0 to 2"):
        task.postprocess(model, Thresholds(classes=(3,)))


def test_metrics_have_the_tasks_classes(task: DetectionTask) -> None:
    metrics = task.metrics(frozenset([3]))
    assert (metrics.names, metrics.shown) == (CLASS_NAMES, {3})


@pytest.mark.parametrize(("topk_per_class", "most_per_class"), [(7, 7), (100, 40)])
def test_export_module(task: DetectionTask, topk_per_class: int, most_per_class: int) -> None:
    model = task.build_model(tiny_detector(), 64).eval()
    decoded, nothing = task.export_module(model, ExportSettings())
    assert isinstance(decoded, DecodedDetector)
    assert nothing is None
    settings = ExportSettings(True, True, topk_per_class, topk_all=40, iou_thres=0.5, conf_thres=0.3)
    suppressed, suppression = task.export_module(model, settings)
    assert isinstance(suppressed, SuppressedDetector)
    assert suppression == {
        **{"conf_thres": 0.3, "iou_thres": 0.5, "most": 40},
        **{"most_per_class": most_per_class, "agnostic": True},
    }
    assert not decoded.training
    assert not suppressed.training


def test_draw_batch(task: DetectionTask) -> None:
    given = grey_batch(image_info(), targets=torch.tensor([[0, 1, 0.5, 0.5, 0.5, 0.5]]))
    picture = task.draw_batch(given)
    assert (picture.dtype, picture.shape) == (np.uint8, (64, 64, 3))
    assert (picture[40, 40] == 51).all()
    assert (picture[40, 16] != 51).any()  # the box's left edge
