"""Detectors without anchors: the same promises as for those with anchors, and the other scripts, on drawn shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import export
import train
from data.builtin import shapes
from detect import Predictor
from models.heads.dfl import DetectDFL
from models.tasks.predictions import DetectionPrediction
from models.weights import read_weights
from models.yolo import build_model
from tests.making import noise, tiny_anchor_free, write_image, write_yaml
from utils.checkpoint import serialise, weights_content

NAMES = dict(enumerate(shapes.names))


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
    file.write_bytes(serialise(weights_content(model, model.yaml, NAMES, {"imgsz": 64})))
    return file


@pytest.fixture(scope="module")
def exported(detector: Path) -> None:
    """Export the detector beside its weights."""
    export.run(weights=detector, imgsz=64, include=["onnx", "torchscript", "openvino"], dynamic=True)


HOW: dict[str, Any] = {"imgsz": 64, "conf_thres": 0.3, "iou_thres": 0.5, "max_det": 20, "device": "cpu", "quiet": True}


def found(weights: Path | list[Path], image: np.ndarray, **more: Any) -> np.ndarray:
    prediction = Predictor(weights, **{**HOW, **more})(image)
    assert isinstance(prediction, DetectionPrediction)
    return prediction.array


def test_exported_files_find_the_same_objects(detector: Path, exported: None) -> None:
    image = noise(64, 64)
    expected = found(detector, image)
    assert len(expected) > 5
    for name in ("best.onnx", "best.torchscript", "best_openvino_model"):
        np.testing.assert_allclose(found(detector.with_name(name), image), expected, rtol=1e-3, atol=1e-2)


def test_test_time_augmentation_and_ensembles(detector: Path) -> None:
    """Views of other sizes join the suppression; a second model of the same weights changes nothing."""
    image = noise(64, 64)
    plain = found(detector, image, max_det=300)
    augmented = found(detector, image, max_det=300, augment=True)
    assert len(augmented) > 5
    assert augmented.shape != plain.shape or not np.allclose(augmented, plain)
    np.testing.assert_allclose(found([detector, detector], image, max_det=300), plain, rtol=1e-4, atol=1e-3)


def test_other_classes_keep_the_branch_of_the_boxes(detector: Path, tmp_path: Path) -> None:
    """Classes of the same name are kept too, if the layers before them have as many channels."""
    names = {0: "bar", 1: "new", 2: "disc", 3: "a", 4: "b", 5: "c"}
    write_image(tmp_path / "images" / "0.png", noise(64, 64), "0 0.5 0.5 0.4 0.4")
    content = {"path": str(tmp_path), "train": "images", "val": "images", "names": names}
    data = write_yaml(tmp_path / "data.yaml", content)
    still: dict[str, Any] = {"keep_head": 1, "lr0": 1e-9, "warmup_epochs": 0, "epochs": 1, "batch_size": 1}
    how: dict[str, Any] = {"imgsz": 64, "workers": 0, "device": "cpu", "noval": True, "noplots": True}
    train.run(data=data, weights=detector, project=tmp_path, log_with="none", **still, **how)
    old, new = (read_weights(file).state for file in (detector, tmp_path / "exp" / "weights" / "last.pt"))
    for branch, kept, before in (("class", [0, 2], [5, 0]), ("anchor", slice(None), slice(None))):
        key = f"model.4.heads.1.{branch}_conv.2.weight"
        torch.testing.assert_close(new[key][kept], old[key][before], rtol=1e-4, atol=1e-4)
