"""Models of one ensemble: which files fit together, at what image size, in what precision; folded BatchNorm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.ensemble import Members, common_task, for_inference, fuse, halve, load_model, read_members
from models.export import Exported, ExportMetadata
from models.heads.contract import require_head
from models.layers import RepConv
from models.tasks import TASKS
from models.tasks.contract import Model
from models.tasks.detect import DetectionTask
from models.weights import Weights
from models.yolo import YoloModel, build_model
from tests.making import tiny_anchor_free, tiny_detector
from utils.config.hyperparameters import Hyperparameters
from utils.errors import UserError

NAMES = {0: "a", 1: "b", 2: "c"}
LIMITS = {"conf_thres": 0.25, "iou_thres": 0.45, "most": 100, "most_per_class": 50, "agnostic": False}


def content(names: Mapping[int, str] | None = None, task: str = "detect", imgsz: Any = None) -> Weights:
    settings = {} if imgsz is None else {"imgsz": imgsz}
    return Weights({}, {"nc": 2}, dict(names or {}), task, settings, "lockstep")


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


# Files that fit together


@pytest.mark.parametrize(
    "other",
    [
        content({0: "cat", 1: "cow"}),
        content({0: "cat"}),
        content({0: "cat", 1: "dog"}, "classify"),
        Weights({}, None, {0: "cat", 1: "dog"}, "", {}, "tensors"),
    ],
)
def test_files_of_one_task_and_class_list_fit_together(other: Weights) -> None:
    first = content({0: "cat", 1: "dog"})
    assert common_task({"a.pt": first, "c.pt": first}) == "detect"
    with pytest.raises(UserError, match=r"b\.pt"):
        common_task({"a.pt": first, "b.pt": other})


def test_exported_files_do_not_support_augmentation_nor_suppression_in_an_ensemble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {"a.pt": content(NAMES), "b.onnx": exported((64, 64), True), "c.onnx": exported((64, 64), True, LIMITS)}
    monkeypatch.setattr("models.ensemble.find_weights", lambda name, training: Path(name))
    monkeypatch.setattr("models.export.read_model", lambda path: files[path.name])
    for names, augment in ((["a.pt"], True), (["c.onnx"], False), (["a.pt", "b.onnx"], False)):
        assert list(read_members(names, "", "", augment).weights) == names
    for names, augment in ((["a.pt", "b.onnx"], True), (["a.pt", "c.onnx"], False)):
        with pytest.raises(UserError, match=names[1]):
            read_members(names, "", "", augment)


def test_an_ensemble_has_one_size() -> None:
    """Files without a size go along with the others."""
    weights = {"a.pt": content(), "b.pt": content(imgsz=64), "c.onnx": exported((64, 64), dynamic=True)}
    assert ensemble(weights).image_size(0).sides == (64, 64)
    weights["d.pt"] = content(imgsz=224)
    assert ensemble(weights).image_size(96).sides == (96, 96)
    two = {"e.onnx": exported((64, 64), False), "d.pt": exported((32, 32), False)}
    for files in (weights, two):
        with pytest.raises(UserError, match=r"d\.pt"):
            ensemble(files).image_size(0)


def test_the_models_of_an_ensemble_have_one_size() -> None:
    """With strides of 8 and 16, 72 pixels would do for the first model only."""
    rows = [*tiny_detector()["backbone"], [-1, 1, "Conv", [12, 3, 2]]]
    coarse = {"nc": 3, "anchors": [[20, 20]], "backbone": rows, "head": [[[3], 1, "Detect", ["nc", "anchors"]]]}
    models = build({"fine.pt": initial(tiny_detector()), "coarse.pt": initial(coarse)}, 72)
    assert [(model.imgsz, model.stride) for model in models] == [(80, 8), (80, 16)]


def test_another_number_of_classes_than_the_data_set() -> None:
    for weights in (initial(tiny_detector()), exported((64, 64), True)):
        with pytest.raises(UserError, match=r"fine\.pt .*my\.yaml"):
            build({"fine.pt": weights}, 64, {0: "a", 1: "b"})


def test_tensors_that_the_file_or_its_layers_lack(capsys: pytest.CaptureFixture[str]) -> None:
    """As after a change of the layers' code, or in a fork of YOLOv5."""
    weights = initial(tiny_detector())
    more, fewer = dict(weights.state) | {"model.0.attention": torch.ones(1)}, dict(list(weights.state.items())[1:])
    build({"fine.pt": replace(weights, state=more)}, 64)
    assert "1 tensor that no layer here takes, such as model.0.attention\n" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"fine\.pt: only .* --layers"):
        build({"fine.pt": replace(weights, state=fewer)}, 64)


def test_half_precision_leaves_anchors_and_strides() -> None:
    """In half precision boxes would move."""
    model = DetectionTask(NAMES, Hyperparameters()).build_model(tiny_detector(), 64)
    tensors = {**dict(halve(model).named_parameters()), **dict(model.named_buffers())}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"model.3.anchors", "model.3.stride"}
    assert torch.float16 in dtypes.values()


def test_what_inference_leaves_out() -> None:
    """The auxiliary branch; and a `RepConv` is one convolution, though nothing else is folded without `fold`."""
    task, cpu = DetectionTask(NAMES, Hyperparameters()), torch.device("cpu")
    model = load_model(task, initial(tiny_anchor_free()), 64, "best.pt", "data.yaml")
    assert [type(layer).__name__ for layer in model.model] == ["Conv", "Conv", "RepNCSPELAN", "AConv", "DetectDFL"]
    images = torch.rand(1, 3, 64, 64)
    used = for_inference(model, cpu, half=False)
    assert not any(module.conv2 for module in used.modules() if isinstance(module, RepConv))
    with torch.no_grad():
        before, after = (require_head(one).decode(one(images)) for one in (model.eval(), used))
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    anchors = for_inference(load_model(task, initial(tiny_detector()), 64, "", ""), cpu, half=False)
    assert batch_norms(anchors)


def with_statistics(model: YoloModel) -> YoloModel:
    """Draw the statistics and weights of BatchNorm, as after training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)
    return model.eval()


def batch_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@torch.no_grad()
def test_folded_outputs_are_equal_up_to_rounding() -> None:
    model = with_statistics(build_model(tiny_detector()).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fused, images = fuse(model), torch.rand(2, 3, 32, 48)
    for ours, expected in zip(fused(images), model(images), strict=True):
        assert float((ours - expected).abs().max() / expected.abs().max()) < 1e-5
    assert (batch_norms(model), batch_norms(fused)) == (3, 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert fused.model[1].conv.weight.is_contiguous(memory_format=torch.channels_last)
