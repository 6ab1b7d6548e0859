"""Exported files: they compute what the model computes, and unusable or unsafe files are refused."""

from __future__ import annotations

import ast
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.export import ONNX_OPSET, Exported, ExportJob, ExportMetadata, read_exported, read_model, write
from models.tasks.classify import ClassificationRecipe, ClassificationTask
from models.tasks.contract import Thresholds
from models.tasks.detect import DecodedDetector, SuppressedDetector
from models.weights import read_weights
from models.yolo import build_model
from tests.conftest import not_here
from tests.making import tiny_detector
from utils.config.flags import OPSETS
from utils.errors import UserError
from utils.files import ROOT

FORMATS = ("torchscript", "onnx", "openvino")
MOBILE = {"ncnn": "ncnn", "tflite": "litert_torch", "coreml": "coremltools"}  # the packages that write them
NAMES = {0: "a", 1: "b", 2: "it's"}
YAML = {
    **tiny_detector(),
    "head": [
        *([-1, 1, "nn.Upsample", [None, 2, "nearest"]], [[-1, 1], 1, "Concat", [1]]),
        [[4, 2], 1, "Detect", ["nc", "anchors"]],
    ],
}
METADATA = ExportMetadata(
    **{"task": "detect", "names": NAMES, "stride": 8, "model": YAML, "settings": {"imgsz": 64}},
    **{"imgsz": (64, 64), "batch": 1, "dynamic": True, "half": False, "device": "cpu", "suppression": None},
)
LIMITS = Thresholds(0.3, 0.45, 20, max_det_per_class=20)
SUPPRESSION = {"conf_thres": 0.3, "iou_thres": 0.45, "most": 20, "most_per_class": 20, "agnostic": False}


def detector() -> DecodedDetector:
    torch.manual_seed(0)  # the same weights in every call
    model = build_model(YAML).eval()
    for level in model.head.m:
        nn.init.normal_(level.weight, std=2)
        nn.init.normal_(level.bias, std=0.5)
    return DecodedDetector(model).eval().requires_grad_(False)


def images(count: int, height: int, width: int) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count + height))


def written(folder: Path, job: ExportJob) -> dict[str, Path]:
    return {name: write(job, name, folder / "best") for name in FORMATS}


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export a detector to all formats, for images of any size."""
    return written(tmp_path_factory.mktemp("dynamic"), ExportJob(detector(), METADATA))


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export a detector with suppression to all formats, for two images of 32x48."""
    metadata = replace(METADATA, dynamic=False, imgsz=(32, 48), batch=2, suppression=SUPPRESSION)
    return written(tmp_path_factory.mktemp("fixed"), ExportJob(SuppressedDetector(detector(), LIMITS), metadata))


@pytest.mark.parametrize("name", FORMATS)
def test_any_size(name: str, dynamic: dict[str, Path]) -> None:
    weights = read_model(dynamic[name])
    values = (weights.task, weights.names, weights.source, weights.state, weights.model)
    assert values == ("detect", NAMES, "exported", {}, YAML)
    model, exported = detector(), weights.program
    assert isinstance(exported, Exported)
    assert exported.metadata == METADATA
    assert (exported.stride, exported.names, exported.yaml, exported.imgsz) == (8, NAMES, YAML, 64)
    exported.resize(65)
    assert exported.imgsz == 72
    for size in ((1, 64, 64), (3, 16, 40), (2, 104, 64)):
        expected, given = model(images(*size)), exported(images(*size))
        assert isinstance(given, Tensor)
        scale = torch.tensor([64.0] * 4 + [1.0] * 4)  # boxes in pixels, then scores
        assert float(((given - expected) / scale).abs().max()) < 1e-5, size


@pytest.mark.parametrize("name", FORMATS)
def test_a_classifier_of_any_size(name: str, tmp_path: Path) -> None:
    """Its stride is 1, and maps of small images have one pixel."""
    torch.manual_seed(0)
    task = ClassificationTask(NAMES, ClassificationRecipe())
    model = task.export_module(task.build_model({"architecture": "resnet18"}, 64).eval(), None)
    path = write(ExportJob(model, replace(METADATA, task="classify", stride=1)), name, tmp_path / "best")
    with torch.no_grad():
        for size in ((1, 64, 64), (3, 9, 10), (2, 33, 70)):
            torch.testing.assert_close(read_exported(path)(images(*size)), model(images(*size)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_incomplete_batches_are_padded(name: str, fixed: dict[str, Path]) -> None:
    model, exported = SuppressedDetector(detector(), LIMITS), read_exported(fixed[name])
    assert exported.metadata.dynamic == (name == "torchscript")  # a trace supports any size
    for count in (1, 2, 5):
        detections, counts = exported(images(count, 32, 48))
        expected, numbers = model(images(count, 32, 48))
        assert counts.tolist() == numbers.tolist()
        assert min(numbers.tolist()) > 2
        torch.testing.assert_close(detections, expected, rtol=1e-4, atol=1e-3)
    if name != "torchscript":
        with pytest.raises(UserError, match=r"best.*--imgsz 32 48"):
            exported(images(1, 64, 64))


@pytest.mark.parametrize("opset", [12, 17])
def test_suppression_in_old_opsets(opset: int, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    suppressing = SuppressedDetector(detector(), LIMITS).eval()
    metadata = replace(METADATA, suppression=SUPPRESSION)
    path = write(ExportJob(suppressing, metadata, opset), "onnx", tmp_path / "detections")
    assert shapes(onnx.load(path))[1] == {"output0": ["batch", 20, 6], "count": ["batch"]}
    detections, counts = read_exported(path)(images(2, 32, 48))
    rows, numbers = suppressing(images(2, 32, 48))
    assert counts.tolist() == numbers.tolist()
    torch.testing.assert_close(detections, rows, rtol=1e-4, atol=1e-3)


def shapes(model: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the shapes of an ONNX model's inputs and outputs by name; sizes that vary are names."""

    def of(values: Any) -> dict[str, list[Any]]:
        dims = {value.name: value.type.tensor_type.shape.dim for value in values}
        return {name: [dim.dim_param or dim.dim_value for dim in sizes] for name, sizes in dims.items()}

    return of(model.graph.input), of(model.graph.output)


def test_names_and_metadata_of_yolov5(dynamic: dict[str, Path], fixed: dict[str, Path]) -> None:
    """Files have them for programs that run YOLOv5's files. They name no folder of this machine."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(dynamic["onnx"])
    assert shapes(model) == ({"images": ["batch", 3, "height", "width"]}, {"output0": ["batch", "anchors", 8]})
    props = {prop.key: prop.value for prop in model.metadata_props}
    assert (props["stride"], ast.literal_eval(props["names"])) == ("8", NAMES)
    suppressed = onnx.load(fixed["onnx"])
    assert shapes(suppressed)[1] == {"output0": [2, 20, 6], "count": [2]}
    extra: dict[str, Any] = {"config.txt": ""}
    torch.jit.load(dynamic["torchscript"], _extra_files=extra)
    config = json.loads(extra["config.txt"])
    assert (config["shape"], config["stride"], config["names"]["1"]) == ([1, 3, 64, 64], 8, "b")
    assert str(ROOT).encode() not in dynamic["onnx"].read_bytes()


@pytest.mark.parametrize(
    "opset",
    [
        # torch.export takes seconds for each from 18 on; the highest, and 18 in other tests, are enough.
        pytest.param(opset, marks=[pytest.mark.long] if ONNX_OPSET <= opset < OPSETS.maximum else [])
        for opset in range(int(OPSETS.minimum), int(OPSETS.maximum) + 1)
    ],
)
def test_each_opset(opset: int, tmp_path: Path) -> None:
    """ONNX Runtime runs it, for any size; names and sizes are the same in each, and so are the bytes of two exports."""
    onnx = pytest.importorskip("onnx")
    job = ExportJob(detector(), METADATA, opset)
    path = write(job, "onnx", tmp_path / "boxes")
    model = onnx.load(path)
    assert model.opset_import[0].version == opset
    onnx.checker.check_model(model)
    assert shapes(model) == ({"images": ["batch", 3, "height", "width"]}, {"output0": ["batch", "anchors", 8]})
    assert str(ROOT).encode() not in path.read_bytes()
    expected = detector()(images(3, 40, 64))
    torch.testing.assert_close(read_exported(path)(images(3, 40, 64)), expected, rtol=1e-4, atol=1e-3)
    if opset == OPSETS.minimum:
        assert write(replace(job), "onnx", tmp_path / "again").read_bytes() == path.read_bytes()


def refused(path: Path) -> None:
    for read in (read_exported, read_weights):  # an exported file is not trained
        with pytest.raises(UserError, match=re.escape(path.name)) as caught:
            read(path)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_files_and_missing_runtimes(
    name: str, dynamic: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, path = dynamic[name], tmp_path / dynamic[name].name
    refused(path)
    for file in source.iterdir() if source.is_dir() else [source]:
        part = path / file.relative_to(source)
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    refused(path)
    if name != "torchscript":
        monkeypatch.setitem(sys.modules, {"onnx": "onnxruntime"}.get(name, name), None)
        refused(source)


@pytest.mark.parametrize(
    "text",
    [
        None,
        json.dumps({"stride": 32, "names": {"0": "a"}}),  # YOLOv5's
        *("[" * 100_000, '{"a":' * 50_000, '{"format": "' + "x" * 10**6),
        *([] if torch.cuda.is_available() else [replace(METADATA, device="cuda").text()]),
    ],
)
def test_metadata_of_other_programs_and_machines(text: str | None, tmp_path: Path) -> None:
    class Foreign(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    path = tmp_path / "a.torchscript"
    traced = torch.jit.trace(Foreign(), torch.ones(1))
    torch.jit.save(traced, path, _extra_files={} if text is None else {"config.txt": text})
    refused(path)
    (tmp_path / "c_openvino_model").mkdir()
    refused(tmp_path / "c_openvino_model")


def test_a_format_that_does_not_support_a_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")

    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum().item() > 3)

    job = ExportJob(Reading(), replace(METADATA, dynamic=False))
    with pytest.raises(UserError, match=r"^onnx "):
        write(job, "onnx", tmp_path / "best")
    assert not list(tmp_path.iterdir())


# Phones


def require(package: str) -> None:
    """Skip the test if a package cannot be installed here."""
    if package == "litert_torch" and sys.version_info < (3, 11):
        not_here("litert-torch, which needs Python 3.11")
    pytest.importorskip(package)


@pytest.mark.parametrize("name", MOBILE)
def test_formats_of_phones(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They compute what the model computes, and have its metadata; what is missing is named with its pip line."""
    require(MOBILE[name])
    metadata = replace(METADATA, dynamic=False, imgsz=(32, 48), batch=2)
    path = write(ExportJob(detector(), metadata), name, tmp_path / "best")
    if name == "coreml":  # only a Mac runs it
        import coremltools

        spec = coremltools.models.MLModel(str(path), skip_model_load=True).get_spec()
        (source,), (result,) = spec.description.input, spec.description.output
        assert (source.name, list(source.type.multiArrayType.shape)) == ("images", [2, 3, 32, 48])
        assert (result.name, list(result.type.multiArrayType.shape)) == ("output0", [2, 240, 8])
        assert ExportMetadata.parse(spec.description.metadata.userDefined["lockstep"]) == metadata
        with pytest.raises(UserError, match=r"exported file.*give the \.pt"):
            read_model(path)
    else:
        exported = read_exported(path)
        assert exported.metadata == replace(metadata, batch=1 if name == "ncnn" else 2)
        expected = detector()(images(3, 32, 48))
        torch.testing.assert_close(exported(images(3, 32, 48)), expected, rtol=1e-4, atol=1e-3)
    monkeypatch.setitem(sys.modules, {"ncnn": "pnnx"}.get(name, MOBILE[name]), None)
    with pytest.raises(UserError, match=r"which is not installed; pip install .*-r requirements-export.txt"):
        write(ExportJob(detector(), metadata), name, tmp_path / "best")


@pytest.mark.parametrize(
    "name", ["onnx", *(pytest.param(name, marks=pytest.mark.long) for name in ("openvino", "tflite"))]
)
def test_int8(name: str, tmp_path: Path) -> None:
    """Boxes and confidences stay near the model's; the same images give the same bytes of ONNX."""
    require({"openvino": "nncf", "tflite": "litert_torch"}.get(name, name))
    metadata, calibration = replace(METADATA, dynamic=False, imgsz=(32, 48)), [images(1, 32, 48)]
    paths = [
        write(ExportJob(detector(), metadata, calibration=lambda: calibration), name, tmp_path / stem)
        for stem in ("best", "again")[: 1 + (name == "onnx")]
    ]
    contents = [path.read_bytes() for path in paths if path.is_file()]
    assert len({*contents}) <= 1
    exported, expected = read_exported(paths[0])(images(1, 32, 48)), detector()(images(1, 32, 48))
    gaps = (exported - expected).abs()
    assert 0 < float(gaps[..., 4:].mean()) < 0.02
    assert 0 < float(gaps[..., :4].mean()) < 1  # pixels
