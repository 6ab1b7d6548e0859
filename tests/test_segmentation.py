"""Instance segmentation: the same promises as a detector's, on drawn shapes with outlines."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import detect
from data.builtin import shapes
from data.images import read_image
from models.tasks.segment import SegmentationTask
from models.tasks.segment_metrics import SegmentationPrediction
from tests import wandb_files
from tests.conftest import ROOT, RunScript
from tests.curves import SEGMENTED, rows
from tests.making import noise, write_image
from tests.models.tasks.mask_batches import tiny_segmenter
from utils.checkpoint import serialise, weights_content
from utils.config.hyperparameters import Hyperparameters


@pytest.fixture(scope="module")
def alone(
    run_script: RunScript, drawn_outlines: Path, learned: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run folder of yolov5n-seg, from a detector's weights, with pictures and W&B's files."""
    project = tmp_path_factory.mktemp("alone")
    what = ("--data", str(drawn_outlines), "--cfg", "yolov5n-seg.yaml", "--weights", str(learned), "--hyp", str(recipe))
    how = ("--imgsz", "96", "--noautoanchor", "--epochs", "2", "--batch-size", "8", "--workers", "1", "--device", "cpu")
    home = {"HOME": str(project), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_MODE": None, "OMP_NUM_THREADS": "1"}
    printed = run_script("train.py", *what, *how, "--project", str(project), plots=True, **home)
    assert "tensors taken" in printed
    return project / "exp"


def test_the_run_folder(alone: Path) -> None:
    """Curves of boxes and of masks, and pictures of labels and predictions; masks in W&B with the classes' names."""
    assert list(rows(alone)[0]) == ["epoch", *SEGMENTED, "x/lr0", "x/lr1", "x/lr2"]
    files = {file.name for file in alone.iterdir()}
    assert {"mask_curves.csv", "mask_PR_curve.csv", "val_masks.csv", "PR_curve.png", "mask_PR_curve.png"} <= files
    assert {"mask_F1_curve.png", "val_batch0_pred.jpg", "train_batch0.jpg"} <= files
    head = (alone / "classes.csv").read_text().splitlines()[0].split(",")
    assert head[-4:] == ["mask_precision", "mask_recall", "mask_AP50", "mask_AP50-95"]
    assert (alone / "val_masks.csv").read_text().splitlines()[1].split(",")[2] in shapes.names
    pytest.importorskip("wandb")
    (file,) = wandb_files.runs(alone)
    drawn = [row for row in wandb_files.read(file).rows if "examples/validation/all_masks" in row]
    (truth, *_) = [masks["ground_truth"]["path"] for masks in drawn[-1]["examples/validation/all_masks"]]
    classes = {*np.unique(np.asarray(Image.open(file.parent / "files" / truth))).tolist()}
    assert len(classes) > 1
    assert classes <= {*range(len(shapes.names) + 1)}


def test_detect_writes_outlines(tmp_path: Path) -> None:
    """They are the largest contours of the masks of the Python results; the weights find objects everywhere."""
    names, weights = dict(enumerate(shapes.names)), tmp_path / "segmenter.pt"
    model = SegmentationTask(names, Hyperparameters()).build_model({**tiny_segmenter(), "nc": len(names)}, 96)
    with torch.no_grad():
        for convolve in model.head.m:
            convolve.weight.normal_()
            convolve.bias.view(model.head.na, -1)[:, 4:] = 0.5
    weights.write_bytes(serialise(weights_content(model, {**model.yaml, "task": "segment"}, names, {})))
    image = write_image(tmp_path / "photo.png", noise(130, 90))
    how = {"imgsz": 96, "conf_thres": 0.3, "max_det": 20, "device": "cpu"}
    prediction = detect.Predictor(weights, **how, quiet=True)(image)
    detect.run(weights=weights, source=image, save_txt=True, save_crop=True, project=tmp_path, **how)
    folder = tmp_path / "exp"
    lines = [line.split() for line in (folder / "labels" / f"{image.stem}.txt").read_text().splitlines()]
    assert isinstance(prediction, SegmentationPrediction)
    masks = prediction.masks
    assert len(lines) == len(masks) == len(prediction.scores) > 1
    assert masks.shape[1:] == read_image(image).shape[:2]
    assert [int(words[0]) for words in lines] == prediction.classes.tolist()
    outlined = 0
    for words, mask in zip(lines, masks, strict=True):
        contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
        points = (np.array(words[1:], float).reshape(-1, 2) * mask.shape[::-1] - 0.5).round(2)
        if largest := max((cv2.contourArea(contour) for contour in contours), default=0):
            outlined += 1
            assert cv2.contourArea(points.astype(np.float32)) == pytest.approx(largest)
            assert mask[points[:, 1].astype(int), points[:, 0].astype(int)].all()
    assert outlined
    drawn = cv2.imread(str(folder / image.name))
    assert abs(drawn.astype(int) - read_image(image))[masks.any(0)].mean() > 10
    assert len(list((folder / "crops").rglob("*.jpg"))) == len(lines)


@pytest.mark.long
def test_the_built_in_job_learns(run_script: RunScript, tmp_path: Path) -> None:
    """`python train.py --cfg models/yolov5n-seg.yaml --data data/shapes-seg.yaml`, as a new user types it."""
    what = ("--cfg", "models/yolov5n-seg.yaml", "--data", "data/shapes-seg.yaml", "--device", "cpu")
    run_script("train.py", *what, "--project", str(tmp_path), OMP_NUM_THREADS=str(os.cpu_count()))
    last = rows(tmp_path / "exp")[-1]
    assert last["metrics/mAP_0.5(B)"] > 0.8
    assert last["metrics/mAP_0.5(M)"] > 0.75


@pytest.mark.long
def test_scores_of_yolov5(shared: Path, run_script: RunScript, tmp_path: Path) -> None:
    """Of its own weights on coco128. Square batches: YOLOv5 has 0.6212, 0.3863 of boxes and 0.3964, 0.1825 of masks."""
    names = yaml.safe_load((ROOT / "data" / "coco128.yaml").read_text())["names"]
    annotations = "annotations/instances_train2017.json"
    spec = {"path": str(shared / "data/coco128"), "train": annotations, "val": annotations, "names": names}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({**spec, "images": "images/train"}))
    what = ("--data", str(tmp_path / "data.yaml"), "--weights", str(shared / "weights" / "yolov5n-seg-coco128.pt"))
    how = ("--imgsz", "320", "--square", "--workers", "1", "--device", "cpu", "--project", str(tmp_path))
    (overall,) = (line.split() for line in run_script("val.py", *what, *how).splitlines() if " all " in f" {line}")
    *_, box50, box, mask_p, mask_r, mask50, mask = map(float, overall[1:])
    assert (box50, box) == pytest.approx((0.6212, 0.3863), abs=0.003)
    assert (mask50, mask) == pytest.approx((0.3964, 0.1825), abs=0.0006)
    assert min(mask_p, mask_r) > 0.3
