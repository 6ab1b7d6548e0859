"""Models of one ensemble: which files fit together, at what image size, in what precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from models.ensemble import Members, check_programs, common_task, for_inference, halve, load_model, weight_files
from models.export import Exported, ExportMetadata
from models.heads.contract import head_of
from models.layers import RepConv
from models.tasks import TASKS
from models.tasks.contract import Model
from models.tasks.detect import DetectionTask
from models.weights import Weights
from tests.making import tiny_anchor_free, tiny_detector
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError

NAMES = {0: "a", 1: "b", 2: "c"}


def content(names: Mapping[int, str] | None = None, task: str = "detect") -> Weights:
    return Weights({}, {"nc": 2}, dict(names or {}), task, {}, "lockstep")


def initial(yaml: dict[str, Any]) -> Weights:
    """Return the weights of a new model."""
    state = DetectionTask(NAMES, Hyperparameters()).build_model(yaml, 64).state_dict()
    return Weights(state, yaml, NAMES, "detect", {}, "lockstep")


def exported(imgsz: tuple[int, int], dynamic: bool, suppression: dict[str, Any] | None = None) -> Weights:
    """Return an exported file whose outputs are its images."""
    task_and_names = {"task": "detect", "names": NAMES, "stride": 8, "model": tiny_detector()}
    size = {"imgsz": imgsz, "batch": 1, "dynamic": dynamic, "half": False, "device": "cpu"}
    metadata = ExportMetadata(**task_and_names, **size, suppression=suppression, settings={})
    program = Exported(metadata, lambda images: [images], "best.onnx")
    return Weights({}, tiny_detector(), NAMES, "detect", {}, "exported", program, metadata)


def ensemble(weights: dict[str, Weights]) -> Members:
    return Members({name: Path(name) for name in weights}, weights, TASKS["detect"])


def build(weights: dict[str, Weights], imgsz: int, names: dict[int, str] = NAMES) -> list[Model]:
    return ensemble(weights).build(DetectionTask(names, Hyperparameters()), imgsz, "my.yaml")


def test_other_names_in_the_data_set() -> None:
    members = ensemble({"a.pt": content({0: "cat", 1: "dog"}), "b.pt": content({0: "cat", 1: "dog"})})
    (warning,) = members.class_warnings({0: "dog", 1: "cat"})
    assert "2 of 2 classes have other names in a.pt than in the data set" in warning


def test_files_of_one_task_and_class_list_fit_together() -> None:
    assert common_task({"a.pt": content({0: "cat"}), "b.pt": content({0: "cat"})}) == "detect"
    assert common_task({"a.pt": content(task="classify")}) == "classify"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (content({0: "cat", 1: "cow"}), "class 1 is 'dog' in the first and 'cow' in the second"),
        (content({0: "cat"}), "class 1 is 'dog' in the first and absent in the second"),
        (content({0: "cat", 1: "dog", 2: "cow"}), "class 2 is absent in the first and 'cow' in the second"),
        (content({0: "cat", 1: "dog"}, "classify"), "their tasks are 'detect' and 'classify'"),
    ],
)
def test_files_that_do_not_fit_together(other: Weights, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"a.pt and b.pt cannot be one ensemble: {message}")):
        common_task({"a.pt": content({0: "cat", 1: "dog"}), "b.pt": other})


def test_tensors_without_a_model() -> None:
    with pytest.raises(UserError, match=r"b\.pt holds bare tensors"):
        common_task({"a.pt": content(), "b.pt": Weights({}, None, {}, "", {}, "tensors")})


@pytest.mark.parametrize("names", [(), ("",)])
def test_weights_without_a_name(names: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--weights is empty"):
        weight_files(names)


def test_an_ensemble_has_one_image_size() -> None:
    """With strides of 8 and 16, 72 pixels would do for the first model only."""
    rows = [*tiny_detector()["backbone"], [-1, 1, "Conv", [12, 3, 2]]]
    coarse = {"nc": 3, "anchors": [[20, 20]], "backbone": rows, "head": [[[3], 1, "Detect", ["nc", "anchors"]]]}
    models = build({"fine.pt": initial(tiny_detector()), "coarse.pt": initial(coarse)}, 72)
    assert [(model.imgsz, model.stride) for model in models] == [(80, 8), (80, 16)]


def test_an_exported_file_is_used_as_a_model() -> None:
    names = {0: "x", 1: "y", 2: "z"}
    dynamic = exported((64, 64), dynamic=True)
    (model,) = build({"a.onnx": dynamic}, 90, names)
    assert model is dynamic.program
    assert (model.imgsz, model.stride, model.names) == (96, 8, names)
    (model,) = build({"a.onnx": exported((64, 64), dynamic=False)}, 90)
    assert model.imgsz == 64


LIMITS = {"conf_thres": 0.25, "iou_thres": 0.45, "most": 100, "most_per_class": 50, "agnostic": False}


def test_flags_that_exported_files_override_are_named_in_one_line() -> None:
    given = {"imgsz": 320, "conf_thres": 0.001, "iou_thres": 0.6, "max_det": 300, "agnostic_nms": True, "half": True}
    assert ensemble({"a.pt": content()}).overridden(given) == []
    assert ensemble({"a.pt": content(), "b.onnx": exported((64, 96), False)}).overridden(given) == [
        "warning: b.onnx was exported with its own values: --imgsz 64 96 (not 320), --half off (not on)"
    ]
    assert ensemble({"a.onnx": exported((64, 64), False, LIMITS)}).overridden(given) == [
        "warning: a.onnx was exported with its own values: --imgsz 64 (not 320), --half off (not on), "
        "--iou-thres 0.45 (not 0.6), --agnostic-nms off (not on), --conf-thres 0.25 (not 0.001), "
        "--max-det 100 (not 300)"
    ]
    assert ensemble({"a.onnx": exported((64, 64), False, LIMITS)}).overridden({"weights": ("a.onnx",)}) == []


def test_a_file_with_suppression_is_described() -> None:
    assert ensemble({"a.pt": content(), "b.onnx": exported((64, 64), True)}).suppression == ""
    assert ensemble({"a.onnx": exported((64, 64), True, LIMITS)}).suppression == (
        "a.onnx was exported with --nms --conf-thres 0.25 --iou-thres 0.45 --topk-all 100 --topk-per-class 50"
    )


def test_exported_files_do_not_support_augmentation_nor_suppression_in_an_ensemble() -> None:
    plain, suppressing = exported((64, 64), True), exported((64, 64), True, {"iou_thres": 0.5})
    check_programs({"a.pt": content()}, augment=True)
    check_programs({"a.onnx": suppressing}, augment=False)
    check_programs({"a.pt": content(), "b.onnx": plain}, augment=False)
    message = r"^--augment needs maps of all sizes, which the exported b\.onnx does not give"
    with pytest.raises(UserError, match=message):
        check_programs({"a.pt": content(), "b.onnx": plain}, augment=True)
    with pytest.raises(UserError, match=r"^b\.onnx was exported with --nms and cannot be in an ensemble"):
        check_programs({"a.pt": content(), "b.onnx": suppressing}, augment=False)


def test_another_number_of_classes_than_the_data_set() -> None:
    for weights in (initial(tiny_detector()), exported((64, 64), True)):
        with pytest.raises(UserError, match=r"fine\.pt has 3 classes and my\.yaml has 2; give the data set"):
            build({"fine.pt": weights}, 64, {0: "a", 1: "b"})


def test_half_precision_leaves_anchors_and_strides() -> None:
    """In half precision boxes would move."""
    model = DetectionTask(NAMES, Hyperparameters()).build_model(tiny_detector(), 64)
    tensors = {**dict(halve(model).named_parameters()), **dict(model.named_buffers())}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"model.3.anchors", "model.3.stride"}
    assert torch.float16 in dtypes.values()


def test_what_inference_leaves_out() -> None:
    """The auxiliary branch; and a `RepConv` is one convolution, though nothing else is folded without `fold`."""
    weights = initial(tiny_anchor_free())
    task = DetectionTask(NAMES, Hyperparameters())
    model = load_model(task, weights, 64, "best.pt", "data.yaml")
    assert [type(layer).__name__ for layer in model.model] == ["Conv", "Conv", "RepNCSPELAN", "AConv", "DetectDFL"]
    images = torch.rand(1, 3, 64, 64)
    used = for_inference(model, torch.device("cpu"), half=False)
    assert not any(module.conv2 for module in used.modules() if isinstance(module, RepConv))
    with torch.no_grad():
        before, after = (head_of(one).decode(one(images)) for one in (model.eval(), used))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    anchors = for_inference(load_model(task, initial(tiny_detector()), 64, "", ""), torch.device("cpu"), half=False)
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in anchors.modules())
