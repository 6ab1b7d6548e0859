"""Exported files: that they compute what the model does, and what is said of files that do not."""

from __future__ import annotations

import io
import json
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.export.formats import ExportJob, write
from models.export.runtime import Exported, ExportMetadata, read_exported, read_metadata, read_model, whole_strides
from models.tasks.detection.export_module import DecodedDetector, GraphSuppression, SuppressedDetector
from models.weights.reader import EXPORTED_SUFFIXES, read_weights
from models.yolo import build_model
from utils.errors import UserError

FORMATS = ("torchscript", "exported", "onnx", "openvino")
NAMES = {0: "a", 1: "b", 2: "it's"}
YAML = {
    "nc": 3,
    "anchors": [[4, 4, 8, 4], [16, 16, 32, 24]],
    "backbone": [
        *([-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]]),
        *([-1, 1, "nn.Upsample", [None, 2, "nearest"]], [[-1, 1], 1, "Concat", [1]]),
    ],
    "head": [[[4, 2], 1, "Detect", ["nc", "anchors"]]],
}
METADATA = ExportMetadata(
    task="detect",
    names=NAMES,
    stride=8,
    model=YAML,
    imgsz=(64, 64),
    batch=1,
    dynamic=True,
    half=False,
    device="cpu",
    suppression=None,
    settings={"imgsz": 64},
)
Sizes = list[tuple[int, int, int]]


def detector() -> DecodedDetector:
    torch.manual_seed(0)
    model = build_model(dict(YAML)).eval()
    for level in model.detect.m:
        nn.init.normal_(level.weight, std=2)
        nn.init.normal_(level.bias, std=0.5)
    return DecodedDetector(model).eval().requires_grad_(False)


def images(count: int, height: int, width: int) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(count + height))


def written(folder: Path, job: ExportJob) -> dict[str, Path]:
    return {name: write(job, name, folder / "best") for name in FORMATS}


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A detector in all formats, for any size."""
    return written(tmp_path_factory.mktemp("free"), ExportJob(detector(), METADATA))


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With suppression, for two images of 32x48."""
    limits = GraphSuppression(0.3, 0.45, 20, 20)
    metadata = replace(METADATA, dynamic=False, imgsz=(32, 48), batch=2, suppression=limits._asdict())
    return written(tmp_path_factory.mktemp("fixed"), ExportJob(SuppressedDetector(detector(), limits), metadata))


def test_names(free: dict[str, Path]) -> None:
    assert [path.name for path in free.values()] == [
        *("best.torchscript", "best.pt2", "best.onnx", "best_openvino_model"),
    ]
    (folder,) = {path.parent for path in free.values()}
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in free.values())
    assert all(path.name.endswith(EXPORTED_SUFFIXES) for path in free.values())


@pytest.mark.parametrize("name", FORMATS)
def test_free_sizes(name: str, free: dict[str, Path]) -> None:
    model, exported = detector(), read_exported(free[name])
    assert exported.metadata == METADATA
    for size in ((1, 64, 64), (3, 16, 40), (2, 104, 64)):
        expected, given = model(images(*size)), exported(images(*size))
        assert isinstance(given, Tensor)
        # Boxes by the image's side, the rest by 1.
        scale = torch.tensor([64.0] * 4 + [1.0] * 4)
        assert float(((given - expected) / scale).abs().max()) < 1e-5, size


@pytest.mark.parametrize("name", FORMATS)
def test_batches_of_one_size_are_filled_up(name: str, fixed: dict[str, Path]) -> None:
    model, exported = SuppressedDetector(detector(), GraphSuppression(0.3, 0.45, 20, 20)), read_exported(fixed[name])
    assert exported.metadata.dynamic == (name == "torchscript")  # a trace takes any size
    for count in (1, 2, 5):
        detections, counts = exported(images(count, 32, 48))
        expected, numbers = model(images(count, 32, 48))
        assert counts.tolist() == numbers.tolist()
        assert min(numbers.tolist()) > 2
        torch.testing.assert_close(detections, expected, rtol=1e-4, atol=1e-3)
    if name != "torchscript":
        with pytest.raises(
            UserError, match=re.escape("takes images of 32x48 (height x width), not 64x64; give --imgsz")
        ):
            exported(images(1, 64, 64))


def test_an_exported_model_carries_its_size(free: dict[str, Path], fixed: dict[str, Path]) -> None:
    exported = read_exported(free["onnx"])
    assert (exported.stride, exported.names, exported.yaml, exported.imgsz) == (8, NAMES, YAML, 64)
    for imgsz, expected in ((640, 640), (60, 64), (65, 72), (3, 16)):
        exported.resize(imgsz)
        assert exported.imgsz == expected
    exported = read_exported(fixed["onnx"])
    exported.resize(640)
    assert exported.imgsz == 48  # the longer side of the only size that it takes


@pytest.mark.parametrize(
    ("side", "stride", "expected"), [(640, 32, 640), (641, 32, 672), (5, 32, 64), (33, 1, 33), (1, 1, 1)]
)
def test_whole_strides(side: int, stride: int, expected: int) -> None:
    assert whole_strides(side, stride) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_as_weights(name: str, free: dict[str, Path]) -> None:
    found = read_model(free[name])
    assert (found.task, found.names, found.source, found.state) == ("detect", NAMES, "exported", {})
    assert found.model == YAML
    assert isinstance(found.program, Exported)
    with pytest.raises(UserError, match=r"is an exported file, which has no weights to take; give the .pt"):
        read_weights(free[name])


def test_weights_are_read_too(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "w.pt")
    assert read_model(tmp_path / "w.pt").source == "tensors"


def test_neither_precision_nor_device_is_of_the_module(free: dict[str, Path]) -> None:
    exported = read_exported(free["torchscript"])
    exported.half().to("meta")
    assert torch.equal(exported(images(1, 64, 64)), detector()(images(1, 64, 64)))
    assert exported(images(1, 64, 64).half()).dtype == torch.float


def test_the_same_again_is_the_same_file(free: dict[str, Path], tmp_path: Path) -> None:
    again = write(ExportJob(detector(), METADATA), "onnx", tmp_path / "best")
    assert again.read_bytes() == free["onnx"].read_bytes()


def test_onnx_tells_what_it_takes(free: dict[str, Path], fixed: dict[str, Path]) -> None:
    """By names that programs for YOLOv5's files know, and nothing of this machine."""
    onnx = pytest.importorskip("onnx")
    model = onnx.load(free["onnx"])

    def shape(value: Any) -> list[Any]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert [(x.name, shape(x)) for x in model.graph.input] == [("images", ["batch", 3, "height", "width"])]
    assert [(x.name, shape(x)) for x in model.graph.output] == [("output0", ["batch", "anchors", 8])]
    props = {prop.key: prop.value for prop in model.metadata_props}
    assert (props["stride"], eval(props["names"])) == ("8", NAMES)
    assert model.opset_import[0].version == 18
    suppressed = onnx.load(fixed["onnx"])
    assert [(x.name, shape(x)) for x in suppressed.graph.output] == [("output0", [2, 20, 6]), ("count", [2])]
    onnx.checker.check_model(model)
    assert str(Path(__file__).resolve().parents[3]).encode() not in free["onnx"].read_bytes()


def test_torchscript_has_yolov5s_config(free: dict[str, Path]) -> None:
    extra: dict[str, Any] = {"config.txt": ""}
    torch.jit.load(free["torchscript"], _extra_files=extra)
    told = json.loads(extra["config.txt"])
    assert (told["shape"], told["stride"], told["names"]["1"]) == ([1, 3, 64, 64], 8, "b")


def test_metadata_come_back() -> None:
    assert read_metadata(METADATA.text()) == METADATA


# What is not run


@pytest.mark.parametrize("name", FORMATS)
def test_damaged(name: str, free: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / free[name].name
    if free[name].is_dir():
        path.mkdir()
        for file in free[name].iterdir():
            (path / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        path.write_bytes(free[name].read_bytes()[: free[name].stat().st_size // 2])
    with pytest.raises(UserError, match=rf"{re.escape(str(path))} cannot be read \(.*\); copy it again"):
        read_exported(path)


class Foreign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def test_of_another_program(tmp_path: Path) -> None:
    torch.jit.trace(Foreign(), torch.ones(1)).save(tmp_path / "a.torchscript")
    torch.export.save(torch.export.export(Foreign(), (torch.ones(1),)), tmp_path / "a.pt2")
    for name in ("a.torchscript", "a.pt2"):
        with pytest.raises(UserError, match=rf"{name} has no metadata of export.py; export it again from its .pt"):
            read_exported(tmp_path / name)
    extra = {"config.txt": json.dumps({"stride": 32, "names": {"0": "a"}})}  # YOLOv5's
    torch.jit.save(torch.jit.trace(Foreign(), torch.ones(1)), tmp_path / "b.torchscript", _extra_files=extra)
    with pytest.raises(UserError, match=r"has metadata of another program or version \(its format is None\)"):
        read_exported(tmp_path / "b.torchscript")
    (tmp_path / "c_openvino_model").mkdir()
    with pytest.raises(UserError, match=r"c_openvino_model holds 0 .xml files, and must hold one"):
        read_exported(tmp_path / "c_openvino_model")


@pytest.mark.parametrize(("name", "runtime"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_runtime_is_missing(name: str, runtime: str, free: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, runtime, None)
    with pytest.raises(UserError, match=f"is run by {runtime}, which is not installed; pip install -r requirements-ex"):
        read_exported(free[name])


def test_for_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "a.torchscript"
    extra = {"config.txt": replace(METADATA, device="cuda").text()}
    torch.jit.save(torch.jit.trace(Foreign(), torch.ones(1)), path, _extra_files=extra)
    with pytest.raises(UserError, match=r"a.torchscript was exported for CUDA, which this machine does not have"):
        read_exported(path)


def rewritten(source: Path, target: Path, change: Callable[[str, bytes], bytes]) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for one in old.infolist():
            new.writestr(one.filename, change(one.filename, old.read(one.filename)))
    return target


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return open, (str(self.marker), "w")


def test_a_program_is_read_again_when_it_was_packed_anew(free: dict[str, Path], tmp_path: Path) -> None:
    """So that the refusals below are for what was changed."""
    path = rewritten(free["exported"], tmp_path / "a.pt2", lambda name, content: content)
    assert read_exported(path).metadata == METADATA


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"expr_str": "', "\"expr_str\": \"[].append(open('MARK', 'w')) or "),
        ('"name": "images"', "\"name\": \"images=open('MARK', 'w')\""),
        ('"target": "torch.ops.aten.', '"target": "torch.hub.'),
    ],
    ids=["size", "name", "function"],
)
def test_a_program_with_code_in_it(old: str, new: str, free: dict[str, Path], tmp_path: Path) -> None:
    changed = []

    def plant(name: str, content: bytes) -> bytes:
        if not name.endswith("models/model.json"):
            return content
        text = json.dumps(json.loads(content))
        changed.append(old in text)
        return text.replace(old, new.replace("MARK", str(tmp_path / "mark")), 1).encode()

    path = rewritten(free["exported"], tmp_path / "a.pt2", plant)
    assert changed == [True]
    with pytest.raises(UserError, match="was refused, and nothing in it was run"):
        read_exported(path)
    assert not (tmp_path / "mark").exists()


def test_an_old_program_with_code_in_it(tmp_path: Path) -> None:
    """Of torch up to 2.7."""
    with zipfile.ZipFile(tmp_path / "a.pt2", "w") as archive:
        archive.writestr("version", "8.2")
        archive.writestr("serialized_exported_program.json", json.dumps({"sizes": [{"expr_str": "open('a')"}]}))
    with pytest.raises(UserError, match="was refused, and nothing in it was run"):
        read_exported(tmp_path / "a.pt2")


def test_a_program_with_a_pickle_in_it(free: dict[str, Path], tmp_path: Path) -> None:
    def plant(name: str, content: bytes) -> bytes:
        if name.endswith("sample_inputs/model.pt"):
            file = io.BytesIO()
            torch.save(((Evil(tmp_path / "mark"),), {}), file)
            changed.append(name)
            return file.getvalue()
        return content

    changed: list[str] = []
    path = rewritten(free["exported"], tmp_path / "a.pt2", plant)
    assert changed
    with pytest.raises(UserError, match="cannot be read"):
        read_exported(path)
    assert not (tmp_path / "mark").exists()


def test_a_format_that_does_not_take_a_model(tmp_path: Path) -> None:
    class Reading(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.sum().item() > np.pi)

    job = ExportJob(Reading(), replace(METADATA, dynamic=False))
    with pytest.raises(UserError, match=r"^exported does not take this model \(.*\); choose another format$"):
        write(job, "exported", tmp_path / "best")
    assert not list(tmp_path.iterdir())
