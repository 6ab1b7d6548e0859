"""export.py on the command line, its files in val.py, and the code in docs/export.md."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
from data.builtin import NAMES as SHAPES
from detect import Predictor
from export import main, prepare
from models.ensemble import Members, export_base
from models.export import ExportJob, read_exported, read_model
from models.loading import ImageSize
from models.tasks import TASKS
from models.weights import Origin, read_weights
from models.yolo import build_model
from tests.conftest import RunScript, not_here
from tests.making import contents, noise, tiny_detector, write_image
from utils.checkpoint import serialise, weights_content
from utils.config.flags import REFUSED, ExportOptions
from utils.distributed.failure import run_main
from utils.errors import UserError
from utils.files import ROOT, read_yaml

NAMES = dict(enumerate(SHAPES))
FILES = ("best.onnx", "best.torchscript", "best_openvino_model")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a detector as train.py does. It detects objects of all confidences."""
    torch.manual_seed(0)  # module fixtures are made before the seed of a test is set
    model = build_model(tiny_detector(), nc=len(NAMES))
    for level in model.head.m:
        nn.init.normal_(level.weight, std=4)
        nn.init.normal_(level.bias)
    file = tmp_path_factory.mktemp("weights") / "best.pt"
    file.write_bytes(serialise(weights_content(model, model.yaml, NAMES, {"imgsz": 64})))
    return file


@pytest.fixture(scope="module")
def exported(weights: Path, run_script: RunScript) -> str:
    """Export all formats beside the weights and return what export.py prints."""
    formats = ("--include", "onnx", "torchscript", "openvino", "safetensors")
    flags = (*formats, "--imgsz", "60", "--dynamic", "--simplify")
    return run_script("export.py", "--weights", str(weights), *flags)


def test_files(weights: Path, exported: str, tmp_path: Path) -> None:
    """Safetensors are the weights; files of downloaded weights go to the working folder."""
    names = {path.name for path in weights.parent.iterdir()}
    assert names == {"best.pt", "best.receipt.yaml", "best.safetensors", *FILES}
    metadata = read_exported(weights.with_suffix(".onnx")).metadata
    assert (metadata.imgsz, metadata.names, metadata.task) == ((64, 64), NAMES, "detect")  # whole strides of 8 pixels
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    assert read_model(weights.with_suffix(".onnx")).origin == Origin("unknown", [{"file": "best.pt", "sha256": digest}])
    expected, read = read_weights(weights), read_weights(weights.with_suffix(".safetensors"))
    torch.testing.assert_close(read.state, expected.state, rtol=0, atol=0)
    assert {**vars(read), "state": {}, "origin": None} == {**vars(expected), "state": {}, "origin": None}
    assert [each["file"] for each in read.origin.files] == ["best.pt", "best.safetensors"]
    for name in ("wandb:me/project/run:best", "yolov5n.pt"):
        assert export_base(name, tmp_path / "cache" / "best.pt") == Path("best.pt")
    assert export_base(str(weights), weights) == export_base(str(weights.parents[1]), weights) == weights


def rows(run: Path) -> dict[str, np.ndarray]:
    """Return the rows that --save-txt wrote for each image."""
    return {file.name: np.loadtxt(file, ndmin=2) for file in sorted((run / "labels").iterdir())}


@pytest.mark.long
def test_a_file_with_suppression_keeps_its_own_values(
    weights: Path, small_data: Path, tmp_path: Path, run_script: RunScript
) -> None:
    """val.py and detect.py say which."""
    best = shutil.copy(weights, tmp_path / "best.pt")
    run_script("export.py", "--weights", best, "--imgsz", "64", "--nms", "--iou-thres", "0.5", "--include", "onnx")
    flags = ("--weights", str(tmp_path / "best.onnx"), "--conf-thres", "0.1", "--iou-thres", "0.6")
    device = ("--device", "cpu", "--project", str(tmp_path))
    images = read_yaml(small_data)["path"] + "/images/val"
    for printed in (
        run_script("val.py", *flags, *device, "--data", str(small_data), "--workers", "0"),
        run_script("detect.py", *flags, *device, "--source", images, "--quiet", "--nosave"),
    ):
        (line,) = [line for line in printed.splitlines() if line.startswith("warning: ") and "best.onnx" in line]
        assert "iou_thres 0.5" in line
        assert "conf_thres 0.25" in line


def test_files_of_others_are_not_replaced(weights: Path, exported: str, tmp_path: Path) -> None:
    """Before anything is written; earlier exports are, beside the user's files."""
    shutil.copytree(weights.parent, tmp_path, dirs_exist_ok=True)
    best, folder = tmp_path / "best.pt", tmp_path / "best_openvino_model"
    formats = ["torchscript", "safetensors", "onnx", "openvino"]
    (folder / "notes.txt").write_text("mine")
    assert len(export.run(weights=best, imgsz=32, include=formats)) == 4
    assert (folder / "notes.txt").read_text() == "mine"
    assert read_exported(folder).metadata.imgsz == (32, 32)
    for file in (
        folder / "metadata.yaml",
        *(tmp_path / f"best.{kind}" for kind in ("onnx", "torchscript", "safetensors")),
    ):
        content = file.read_bytes()
        file.write_bytes(b"of another program")
        before = contents(tmp_path)
        with pytest.raises(UserError, match=f"{folder if file.parent == folder else file} exists"):
            export.run(weights=best, imgsz=64, include=formats)
        assert contents(tmp_path) == before
        file.write_bytes(content)


def test_class_names_of_a_data_set(weights: Path) -> None:
    def job_for(names: list[str]) -> ExportJob:
        options, size = ExportOptions(data="d.yaml"), ImageSize((60, 96))
        members = Members({"best.pt": weights}, {"best.pt": read_weights(weights)}, TASKS["detect"])
        return prepare(members, options, size, torch.device("cpu"), dict(enumerate(names)))

    names = [f"thing {k}" for k in NAMES]
    metadata = job_for(names).metadata
    assert (metadata.names, metadata.imgsz) == (dict(enumerate(names)), (64, 96))
    with pytest.raises(UserError, match=rf"^best.pt has {len(NAMES)} classes and .*d.yaml has 1"):
        job_for(["one"])


def test_export_from_python(weights: Path, tmp_path: Path) -> None:
    """export.run returns the files."""
    best = Path(shutil.copy(weights, tmp_path / "best.pt"))
    files = export.run(weights=best, include=["safetensors", "torchscript"], img=64)
    assert files == [str(tmp_path / "best.safetensors"), str(tmp_path / "best.torchscript")]
    for formats, named in {"paddle": "paddle", "onxn": "onxn"}.items():
        with pytest.raises(UserError, match=named):
            export.run(weights=best, imgsz=64, include=formats)
    with pytest.raises(UserError, match="overwrite"):
        export.run(weights=files[0], imgsz=64, include="safetensors")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        *((f"--include onnx {name[8:]}", name[8:]) for name in REFUSED if name.startswith("include ")),
        ("--opset 11", "--opset"),
        ("--opset 22", "--opset"),
        ("--device mps", "--device mps"),
        ("--include onnx --int8", "--int8 needs images"),
        ("--include ncnn --int8 --data coco128.yaml", "--int8 is not possible with ncnn"),
        ("--include onnx tflite --dynamic", "--dynamic is not possible with tflite"),
        ("--include onnx tflite --nms", "--nms is not possible with tflite"),
        ("--include ncnn --batch-size 2", "--batch-size 2: ncnn takes one image at a time"),
    ],
)
def test_refused(flags: str, named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["export.py", *flags.split()])
    with pytest.raises(SystemExit):
        run_main(main)
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line


def test_an_engine_is_its_onnx_file_and_a_command(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --half, on any machine."""
    best = tmp_path / "a b" / "best.pt"
    best.parent.mkdir()
    shutil.copy(weights, best)
    flags = ["--img", "64", "--include", "TRT", "torchscript", "--opset", "12", "--batch", "2", "--dynamic", "--half"]
    monkeypatch.setattr(sys, "argv", ["export.py", "--weights", str(best), *flags])
    run_main(main)
    names = {file.name for file in best.parent.iterdir()}
    assert names == {"best.onnx", "best.pt", "best.receipt.yaml", "best.torchscript"}
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].partition(" run ")[2])
    sizes = [f"--{name}Shapes=images:{count}x3x64x64" for name, count in (("min", 1), ("opt", 2), ("max", 2))]
    stem = best.with_suffix("")
    assert command == ["trtexec", f"--onnx={stem}.onnx", f"--saveEngine={stem}.engine", "--fp16", *sizes]


@pytest.mark.long
@pytest.mark.parametrize("name", ["ncnn", "tflite"])
def test_phone_formats_in_the_scripts(
    name: str, weights: Path, small_data: Path, tmp_path: Path, run_script: RunScript
) -> None:
    """val.py and detect.py find the same as with the weights."""
    pytest.importorskip({"tflite": "litert_torch"}.get(name, name))
    best = Path(shutil.copy(weights, tmp_path / "best.pt"))
    (file,) = export.run(weights=best, include=name, imgsz=64)
    image = write_image(tmp_path / "a.png", noise(64, 64))
    expected, given = (Predictor(str(path), imgsz=64, device="cpu")(image).array for path in (best, file))
    np.testing.assert_allclose(given, expected, atol=0.02)
    flags = ("--data", str(small_data), "--imgsz", "64", "--square", "--device", "cpu", "--workers", "0", "--noplots")
    printed = [
        run_script("val.py", "--weights", str(path), *flags, "--project", str(tmp_path)) for path in (best, file)
    ]
    rows = [re.findall(r"^ +all .*", text, re.MULTILINE) for text in printed]
    assert rows[0] == rows[1] != []


def test_int8_is_calibrated_on_the_training_split(
    weights: Path, small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command gives the same bytes; TensorRT's command has --int8."""
    pytest.importorskip("onnx")
    best = Path(shutil.copy(weights, tmp_path / "best.pt"))
    contents = []
    for size in (64, 64, (32, 64)):
        export.run(weights=best, include="engine", imgsz=size, int8=True, data=small_data, batch=2)
        contents.append(best.with_suffix(".onnx").read_bytes())
    assert contents[0] == contents[1] != contents[2]
    assert capsys.readouterr().out.count(" --int8") == 3
    assert read_exported(best.with_suffix(".onnx"))(torch.rand(2, 3, 32, 64)).isfinite().all()


@pytest.mark.gpu
def test_exported_on_a_gpu(weights: Path, tmp_path: Path, run_script: RunScript) -> None:
    """In half precision, to formats that keep their device; the boxes are those of the weights."""
    shutil.copy(weights, tmp_path / "best.pt")
    flags = ("--include", "torchscript", "onnx", "--half", "--device", "0", "--imgsz", "64")
    run_script("export.py", "--weights", str(tmp_path / "best.pt"), *flags)
    images = torch.rand(1, 3, 64, 64)
    program = read_exported(tmp_path / "best.torchscript")
    assert program.metadata.device.startswith("cuda")
    boxes = program(images.cuda())
    assert torch.allclose(boxes.float().cpu(), read_exported(tmp_path / "best.onnx")(images).float(), atol=1.0)


# docs/export.md


def test_the_code_in_the_docs_finds_the_same_objects(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, without this repository, on a photo that needs padding. Which of two boxes suppresses the other may
    hang on rounding, so a few may differ."""
    best = shutil.copy(weights, tmp_path / "best.pt")
    (file,) = export.run(weights=best, include="onnx", imgsz=(64, 96))
    photo = write_image(tmp_path / "photo.jpg", noise(150, 131))
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (code,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "onnxruntime" in code]
    assert re.findall(r"^(?:import|from) .*", code, re.MULTILINE) == ["import ast, cv2, numpy as np, onnxruntime"]
    predictor = Predictor(file, conf_thres=0.25, iou_thres=0.45, device="cpu")
    expected = predictor(photo)
    np.testing.assert_array_equal(predictor(photo, size=(64, 96)).array, expected.array)
    with pytest.raises(UserError, match="64 96"):
        predictor(photo, size=64)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code, {})
    lines = re.findall(r"^(.+) ([\d.]+): (\S+) (\S+) (\S+) (\S+)$", capsys.readouterr().out, re.MULTILINE)
    numbers = {name: number for number, name in NAMES.items()}
    found = np.array([[*map(float, box), float(score), numbers[name]] for name, score, *box in lines])
    found[:, :4] = found[:, :4].clip(0, (150, 131, 150, 131))
    gaps = np.abs(found[:, None] - expected.array[None]).max(2)
    assert len(expected) > 20
    assert min((gaps.min(axis) < 0.1).mean() for axis in (0, 1)) > 0.95


# In YOLOv5


def test_yolov5_detects_the_same_with_our_onnx_file(weights: Path, exported: str, tmp_path: Path) -> None:
    """Its detect.py, run as a program, finds stride and names in the file. It rounds boxes to pixels."""
    folder = Path(os.environ.get("YOLOV5") or ROOT.parent / "peers" / "yolov5")
    python = folder.parent / "venv" / "bin" / "python"
    if not (folder / "detect.py").is_file() or not python.is_file():
        not_here(f"a checkout of YOLOv5 in {folder} (or in the folder that YOLOV5 names), and its packages in ../venv")
    side = 64
    image, file = write_image(tmp_path / "a.png", noise(side, side)), str(weights.parent / "best.onnx")
    flags = ["--weights", file, "--source", str(image), "--imgsz", str(side), "--device", "cpu", "--nosave"]
    flags += ["--save-txt", "--save-conf", "--conf-thres", "0.5", "--project", str(tmp_path)]
    quiet = {"YOLOV5_CONFIG_DIR": str(tmp_path), "YOLO_CONFIG_DIR": str(tmp_path), "YOLO_AUTOINSTALL": "false"}
    how: dict[str, Any] = {"cwd": folder, "env": {**os.environ, **quiet}, "capture_output": True, "text": True}
    done = subprocess.run([python, "detect.py", *flags], **how)
    assert done.returncode == 0, done.stderr
    prediction = Predictor(file, imgsz=side, conf_thres=0.5, device="cpu")(image)
    summary = next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith("image 1/1"))
    assert all(f" {name}" in summary for name, _ in prediction.items)
    given = rows(tmp_path / "exp")["a.txt"][:, [0, 5, 1, 2, 3, 4]]
    expected = np.array([list(map(float, row.split())) for row in prediction.label_rows(True)])[:, [0, 5, 1, 2, 3, 4]]
    assert len(expected) > 3
    given, expected = (every[np.argsort(every[:, 1])] for every in (given, expected))
    np.testing.assert_allclose(given[:, :2], expected[:, :2], atol=1e-4)
    np.testing.assert_allclose(given[:, 2:], expected[:, 2:], atol=1 / side)
