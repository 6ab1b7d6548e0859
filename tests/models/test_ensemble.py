"""Models that look together: which may, at what size, in what precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from models.ensemble import check_programs, common_task, fixed_size, halve, load_models, weight_files
from models.export.runtime import Exported, ExportMetadata
from models.tasks.detection.task import DetectionTask
from models.weights.reader import Weights
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError

NAMES = {0: "a", 1: "b", 2: "c"}


def content(names: Mapping[int, str] | None = None, task: str = "detect") -> Weights:
    return Weights({}, {"nc": 2}, dict(names or {}), task, {}, "lockstep")


def test_models_that_go_together() -> None:
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
def test_models_that_do_not_go_together(other: Weights, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"a.pt and b.pt cannot be one ensemble: {message}")):
        common_task({"a.pt": content({0: "cat", 1: "dog"}), "b.pt": other})


def test_tensors_without_a_model() -> None:
    with pytest.raises(UserError, match=r"b\.pt holds bare tensors"):
        common_task({"a.pt": content(), "b.pt": Weights({}, None, {}, "", {}, "tensors")})


@pytest.mark.parametrize("names", [(), ("",)])
def test_no_weights(names: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="--weights names no file"):
        weight_files(names)


def test_an_ensemble_has_one_size(tiny_yaml: dict[str, Any]) -> None:
    """Strides 8 and 16: 72 pixels would do for the first one."""
    rows = [*tiny_yaml["backbone"], [-1, 1, "Conv", [12, 3, 2]]]
    coarse = {"nc": 3, "anchors": [[20, 20]], "backbone": rows, "head": [[[3], 1, "Detect", ["nc", "anchors"]]]}
    weights = {}
    for name, model in {"fine.pt": tiny_yaml, "coarse.pt": coarse}.items():
        state = DetectionTask(NAMES, Hyperparameters()).build_model(model, 64).state_dict()
        weights[name] = Weights(state, model, NAMES, "detect", {}, "lockstep")
    models = load_models(DetectionTask(NAMES, Hyperparameters()), weights, 72, "data.yaml")
    assert [model.imgsz for model in models] == [80, 80]
    assert [model.stride for model in models] == [8, 16]


def exported(imgsz: tuple[int, int], dynamic: bool, suppression: dict[str, Any] | None = None) -> Weights:
    """A file whose outputs are its images."""
    metadata = ExportMetadata(
        task="detect",
        names=NAMES,
        stride=8,
        model={"nc": 3},
        imgsz=imgsz,
        batch=1,
        dynamic=dynamic,
        half=False,
        device="cpu",
        suppression=suppression,
        settings={},
    )
    program = Exported(metadata, lambda images: [images], "best.onnx")
    return Weights({}, {"nc": 3}, NAMES, "detect", {}, "exported", program)


def test_an_exported_file_is_its_model(tiny_yaml: dict[str, Any]) -> None:
    """It takes the size that its file is for, and other models the same."""
    weights = {"a.onnx": exported((64, 64), dynamic=True)}
    names = {0: "x", 1: "y", 2: "z"}
    (model,) = load_models(DetectionTask(names, Hyperparameters()), weights, 90, "data.yaml")
    assert model is weights["a.onnx"].program
    assert (model.imgsz, model.stride, model.names) == (96, 8, names)
    fixed = {"a.onnx": exported((64, 64), dynamic=False)}
    (model,) = load_models(DetectionTask(NAMES, Hyperparameters()), fixed, 90, "data.yaml")
    assert model.imgsz == 64


def test_sizes_of_exported_files() -> None:
    dynamic, square, oblong = exported((64, 64), True), exported((64, 64), False), exported((32, 64), False)
    assert fixed_size({"a.pt": content(), "b.onnx": dynamic}) is None
    assert fixed_size({"a.pt": content(), "b.onnx": oblong}) == (32, 64)
    with pytest.raises(
        UserError, match=r"different sizes \(a\.onnx 64x64, b\.onnx 32x64\); export them with --dynamic"
    ):
        fixed_size({"a.onnx": square, "b.onnx": oblong})


def test_what_exported_files_cannot_do() -> None:
    plain, suppressing = exported((64, 64), True), exported((64, 64), True, {"iou_thres": 0.5})
    check_programs({"a.pt": content()}, augment=True)
    check_programs({"a.onnx": suppressing}, augment=False)
    check_programs({"a.pt": content(), "b.onnx": plain}, augment=False)
    with pytest.raises(
        UserError, match=r"^--augment needs maps of all sizes, which the exported b\.onnx does not give"
    ):
        check_programs({"a.pt": content(), "b.onnx": plain}, augment=True)
    with pytest.raises(UserError, match=r"^b\.onnx was exported with --nms and cannot be in an ensemble"):
        check_programs({"a.pt": content(), "b.onnx": suppressing}, augment=False)


def test_other_classes_than_the_data_has(tiny_yaml: dict[str, Any]) -> None:
    state = DetectionTask(NAMES, Hyperparameters()).build_model(tiny_yaml, 64).state_dict()
    weights = {"fine.pt": Weights(state, tiny_yaml, NAMES, "detect", {}, "lockstep")}
    with pytest.raises(UserError, match=r"fine\.pt knows 3 classes and my\.yaml has 2; give the data set"):
        load_models(DetectionTask({0: "a", 1: "b"}, Hyperparameters()), weights, 64, "my.yaml")


def test_halved_weights_keep_the_places(tiny_yaml: dict[str, Any]) -> None:
    """A head's anchors and strides are no weights: in half precision boxes would be elsewhere."""
    model = DetectionTask(NAMES, Hyperparameters()).build_model(tiny_yaml, 64)
    kept = {"model.3.anchors", "model.3.stride"}
    tensors = {**dict(halve(model).named_parameters()), **dict(model.named_buffers())}
    kinds = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert {name for name, kind in kinds.items() if kind == torch.float32} == kept
    assert torch.float16 in kinds.values()
