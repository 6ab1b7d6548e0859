"""Detectors without anchors: the same promises as for those with anchors, and the other scripts, on drawn shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
import val
from data.builtin import shapes
from detect import Predictor
from models.export import read_model
from models.heads.contract import head_of
from models.heads.dfl import DetectDFL
from models.tasks.contract import Thresholds
from models.tasks.detect import detect
from models.tasks.predictions import DetectionPrediction
from models.weights import read_weights
from models.yolo import YoloModel, build_model
from tests.conftest import CallMain, RunScript
from tests.curves import ANCHOR_FREE, refused, rows, same_bytes_when_killed
from tests.making import noise, tiny_anchor_free, write_image, write_yaml
from utils.checkpoint import serialised, weights_content

NAMES = dict(enumerate(shapes.names))
Train = Callable[..., str]


def model_yaml(folder: Path) -> Path:
    return write_yaml(folder / "tiny.yaml", {**tiny_anchor_free(), "nc": len(NAMES)})


@pytest.fixture(scope="module")
def train(run_script: RunScript, drawn: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Train a small detector with an auxiliary branch for two epochs, on one thread per process; return the output."""
    cfg = model_yaml(tmp_path_factory.mktemp("model"))
    what = ("--data", str(drawn), "--cfg", str(cfg), "--weights", "", "--hyp", str(recipe), "--workers", "1")
    how = ("--imgsz", "96", "--epochs", "2", "--batch-size", "8", "--device", "cpu")

    def run(project: Path, *flags: str, **more: Any) -> str:
        given = (*what, *how, "--project", str(project), *flags)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **more})

    return run


# One curve


@pytest.mark.long
def test_the_same_bytes_on_one_and_two_processes(train: Train, run_script: RunScript, tmp_path: Path) -> None:
    same_bytes_when_killed(train, run_script, tmp_path)
    assert list(rows(tmp_path / "straight")[0]) == ["epoch", *ANCHOR_FREE, "x/lr0", "x/lr1", "x/lr2"]


@pytest.mark.long
def test_a_process_without_boxes(train: Train, tmp_path: Path) -> None:
    """One image of eight has boxes, so in every step one of the two processes has none."""
    for split in ("train", "val"):
        for number in range(8):
            labels = ["0 0.5 0.5 0.4 0.4"] if number == 3 else []
            write_image(tmp_path / "images" / split / f"{number}.png", noise(96, 96, number), *labels)
    content = {"path": str(tmp_path), "train": "images/train", "val": "images/val", "names": NAMES}
    data = write_yaml(tmp_path / "data.yaml", content)
    mixing = ("--hyp.mosaic", "0", "--hyp.translate", "0", "--hyp.scale", "0", "--hyp.nbs", "2")
    flags = ("--data", str(data), "--batch-size", "2", "--sync-bn", *mixing)
    for processes in ("1", "2"):
        train(tmp_path, *flags, "--processes", processes, "--name", processes)
    one, two = (rows(tmp_path / name) for name in ("1", "2"))
    assert len(one) == len(two) == 2
    assert all(np.isfinite(list(row.values())).all() for row in two)
    assert one[0]["train/box_loss"] == pytest.approx(two[0]["train/box_loss"], rel=1e-4)


# The other scripts


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a detector that finds objects of all confidences, on any machine, as train.py writes weights."""
    torch.manual_seed(0)
    model = build_model({**tiny_anchor_free(), "task": "detect"}, nc=len(NAMES))
    assert isinstance(model.head, DetectDFL)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):  # so that activations differ from cell to cell
            assert module.running_var is not None
            module.running_var.fill_(0.1)
    for branches in model.head.heads:
        for branch in ("anchor_conv", "class_conv"):
            nn.init.normal_(branches.get_parameter(f"{branch}.2.weight"), std=3)
        nn.init.constant_(branches.get_parameter("class_conv.2.bias"), -2)
    file = tmp_path_factory.mktemp("weights") / "best.pt"
    file.write_bytes(serialised(weights_content(model, model.yaml, NAMES, {"imgsz": 64})))
    return file


@pytest.fixture(scope="module")
def exported(detector: Path) -> Path:
    """Export the detector beside its weights, and with --nms into another folder; return that folder."""
    formats = ["onnx", "torchscript", "openvino", "safetensors"]
    export.run(weights=detector, imgsz=64, include=formats, dynamic=True)
    suppressing = detector.parent / "nms" / "best.pt"
    suppressing.parent.mkdir()
    suppressing.write_bytes(detector.read_bytes())
    export.run(
        weights=suppressing, imgsz=64, include="onnx", nms=True, conf_thres=0.3, iou_thres=0.5, topk_per_class=100
    )
    return suppressing.parent


def network(file: Path) -> YoloModel:
    """Return the model of a weight file, in evaluation mode."""
    weights = read_weights(file)
    assert weights.model is not None
    model = build_model(weights.model).eval()
    model.load_state_dict(weights.state)
    return model


HOW: dict[str, Any] = {"imgsz": 64, "conf_thres": 0.3, "iou_thres": 0.5, "max_det": 20, "device": "cpu", "quiet": True}


def found(weights: Path, image: np.ndarray, **more: Any) -> np.ndarray:
    prediction = Predictor(weights, **{**HOW, **more})(image)
    assert isinstance(prediction, DetectionPrediction)
    return prediction.array


def test_exported_files_find_the_same_objects(detector: Path, exported: Path) -> None:
    image = noise(64, 64)
    expected = found(detector, image)
    assert len(expected) > 5
    for name in ("best.onnx", "best.torchscript", "best_openvino_model"):
        np.testing.assert_allclose(found(detector.with_name(name), image), expected, rtol=1e-3, atol=1e-2)


@torch.no_grad()
def test_an_exported_file_that_suppresses(detector: Path, exported: Path) -> None:
    """It has the detections of the weights; a box may count for several classes."""
    model, program = network(detector), read_model(exported / "best.onnx").program
    assert program is not None
    images = torch.from_numpy(noise(64, 64)).permute(2, 0, 1)[None] / 255
    (expected,) = detect([head_of(model).view(model(images))], Thresholds(0.3, 0.5, 100))
    detections, counts = program(images)
    assert counts.tolist() == [len(expected)]
    torch.testing.assert_close(detections[0, : len(expected)], expected, rtol=1e-3, atol=1e-2)


def test_the_raw_output_of_an_exported_file(detector: Path, exported: Path) -> None:
    """(b, n, 4 + classes): xywh in pixels and class scores; stride 4 before stride 8, row after row."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(str(detector.with_suffix(".onnx")))
    images = torch.rand(2, 3, 64, 96)
    (output,) = session.run(None, {"images": images.numpy()})
    assert output.shape == (2, 16 * 24 + 8 * 12, 4 + len(NAMES))
    with torch.no_grad():
        fine, coarse = network(detector)(images)
    scores = [level.scores.flatten(2).transpose(1, 2).sigmoid() for level in (fine, coarse)]
    np.testing.assert_allclose(output[..., 4:], torch.cat(scores, 1), rtol=1e-4, atol=1e-5)
    # The box of row 2, column 5 of the coarse level: its sides' mean distances from (44, 20), in strides of 8 pixels
    sides = coarse.sides[1, :, 2, 5].view(4, 16).softmax(1) @ torch.arange(16.0)
    left, top, right, bottom = (sides * 8).tolist()
    box = [44 + (right - left) / 2, 20 + (bottom - top) / 2, left + right, top + bottom]
    np.testing.assert_allclose(output[1, 16 * 24 + 2 * 12 + 5, :4], box, rtol=1e-4, atol=1e-3)


def test_test_time_augmentation_and_ensembles(detector: Path, learned: Path) -> None:
    """Views of other sizes and a detector with anchors join the suppression."""
    image = noise(64, 64)
    plain = found(detector, image, max_det=300)
    augmented = found(detector, image, max_det=300, augment=True)
    assert len(augmented) > 5
    assert augmented.shape != plain.shape or not np.allclose(augmented, plain)
    twice = Predictor([detector, detector], **{**HOW, "max_det": 300})(image)
    assert isinstance(twice, DetectionPrediction)
    np.testing.assert_allclose(twice.array, plain, rtol=1e-4, atol=1e-3)
    joined = Predictor([detector, learned], **{**HOW, "max_det": 300})(image)
    assert isinstance(joined, DetectionPrediction)
    assert len(joined.array) >= 1


def test_val_of_weights_and_of_an_exported_file(
    detector: Path, exported: Path, small_data: Path, tmp_path: Path
) -> None:
    how: dict[str, Any] = {"imgsz": 64, "device": "cpu", "workers": 0, "batch_size": 4, "noplots": True}
    one, two = (
        val.run(data=small_data, weights=detector.with_name(name), project=tmp_path, **how)
        for name in ("best.pt", "best.onnx")
    )
    scores = [name for name in one if name.startswith("metrics/")]
    assert [two[name] for name in scores] == pytest.approx([one[name] for name in scores], abs=2e-3)


# From other weights


def test_other_classes_keep_the_branch_of_the_boxes(detector: Path, run_script: RunScript, tmp_path: Path) -> None:
    """Classes of the same name are kept too, if the layers before them have as many channels."""
    names = {0: "bar", 1: "new", 2: "disc", 3: "a", 4: "b", 5: "c"}
    write_image(tmp_path / "images" / "0.png", noise(64, 64), "0 0.5 0.5 0.4 0.4")
    content = {"path": str(tmp_path), "train": "images", "val": "images", "names": names}
    data = write_yaml(tmp_path / "data.yaml", content)
    what = ("--data", str(data), "--weights", str(detector), "--hyp.keep_head", "1", "--hyp.lr0", "1e-9")
    how = ("--imgsz", "64", "--epochs", "1", "--batch-size", "1", "--workers", "0", "--device", "cpu", "--noval")
    printed = run_script("train.py", *what, *how, "--hyp.warmup_epochs", "0", "--project", str(tmp_path))
    assert "from its head the boxes and 2 of 6 classes" in printed
    old, new = (read_weights(file).state for file in (detector, tmp_path / "exp" / "weights" / "last.pt"))
    key = "model.4.heads.1.class_conv.2.weight"
    torch.testing.assert_close(new[key][[0, 2]], old[key][[5, 0]], rtol=1e-4, atol=1e-4)
    key = "model.4.heads.1.anchor_conv.2.weight"
    torch.testing.assert_close(new[key], old[key], rtol=1e-4, atol=1e-4)


def test_class_scores_of_other_channels_are_new(detector: Path) -> None:
    weights, new = read_weights(detector), {0: "bar", 1: "disc"}
    model = build_model({**tiny_anchor_free()}, nc=2)
    assert isinstance(model.head, DetectDFL)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = model.head.keep("model.4", weights.state, weights.names, new)
    assert message == "from its head the boxes, not the classes: the layers before them differ"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_hyperparameters_of_another_head(drawn: Path, call_main: CallMain, tmp_path: Path) -> None:
    """Of a file they have no effect, which one line says; as a flag they are refused, as are flags about anchors."""
    cfg = model_yaml(tmp_path)
    hyp = write_yaml(tmp_path / "yolov5.yaml", {"anchors": 3, "box": 0.1, "iou_t": 0.2, "mosaic": 0.5})
    how = ("--imgsz", "64", "--epochs", "1", "--batch-size", "8", "--workers", "0", "--device", "cpu", "--noplots")
    flags = ("train.py", "--data", str(drawn), "--cfg", str(cfg), "--weights", "", *how, "--project", str(tmp_path))
    code, printed = call_main(*flags, "--hyp", str(hyp))
    assert code == 0
    assert "hyperparameters without effect on detect with the head DetectDFL: box, anchors\n" in printed
    for flag in ("--hyp.obj", "--label-smoothing"):
        code, printed = call_main(*flags, "--hyp", str(hyp), flag, "0.5", "--name", "refused")
        assert code == 1
        refused(printed, flag)
    assert not (tmp_path / "refused").exists()
