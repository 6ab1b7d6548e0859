"""examples/oriented_boxes, a task that `--task` names: its geometry and loss by hand, and whole runs of the scripts."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.data_yaml import read_spec
from data.dataset import DataOptions, DataSource
from models.tasks import TASKS
from models.yolo import LAYERS
from tests.conftest import ROOT, RunScript
from tests.curves import rows
from tests.making import plain, write_image, write_yaml
from utils.batch import Batch, ImageInfo, Placement
from utils.checkpoint import serialise, weights_content
from utils.files import read_yaml

PACKAGE = ROOT / "examples" / "oriented_boxes"
PARTS = ("geometry", "head", "loss", "prediction", "metrics", "task", "data", "drawing")
NAMES = {0: "plate", 1: "frame", 2: "ladder"}
TRAIN, VAL = 21, 11  # images, no multiples of the batches


@pytest.fixture(scope="module")
def parts() -> Iterator[SimpleNamespace]:
    """The modules of the package. What they add to this process is removed after the tests."""
    layers, path, modules = dict(LAYERS), list(sys.path), set(sys.modules)
    sys.path.append(str(PACKAGE.parent))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(f"oriented_boxes.{name}") for name in PARTS})
    finally:
        LAYERS.clear()
        LAYERS.update(layers)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if name.partition(".")[0] == "oriented_boxes":
                del sys.modules[name]


def box(*numbers: float) -> Tensor:
    """Return one box, (1, 5): the angle is given in degrees."""
    *sides, degrees = numbers
    return torch.tensor([[*sides, math.radians(degrees)]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("one", "other", "iou"),
    [
        (box(3, 4, 5, 2, 30), box(3, 4, 5, 2, 30), 1),
        (box(0, 0, 2, 2, 0), box(0, 0, 2, 2, 45), 1 / math.sqrt(2)),  # an octagon
        (box(0, 0, 4, 1, 10), box(0, 0, 4, 1, 100), 1 / 7),  # a cross
        (box(0, 0, 4, 4, 20), box(0, 0, 2, 1, 77), 1 / 8),  # one inside of the other
        (box(0, 0, 2, 2, 0), box(1, 0, 2, 2, 0), 1 / 3),
        (box(0, 0, 2, 2, 0), box(2, 0, 2, 2, 0), 0),  # they touch
        (box(0, 0, 2, 2, 0), box(0, 1.5, math.sqrt(2), math.sqrt(2), 45), 0.25 / 5.75),  # a corner reaches in
        (box(0, 0, 1, 1, 5), box(50, 0, 1, 1, 5), 0),
        (box(0, 0, 0, 0, 0), box(0, 0, 0, 0, 0), 0),
    ],
)
def test_overlaps_by_hand(parts: SimpleNamespace, one: Tensor, other: Tensor, iou: float) -> None:
    for turned in (0.0, 0.7):  # both around the origin
        turn = torch.tensor([turned], dtype=torch.float64)
        pair = [torch.cat((parts.geometry.turned(box[:, :2], turn), box[:, 2:4], box[:, 4:] + turned), 1)
                for box in (one, other)]  # fmt: skip
        assert parts.geometry.rotated_iou(*pair).tolist() == pytest.approx([iou], abs=1e-12)
        assert parts.geometry.rotated_iou(*pair[::-1]).tolist() == pytest.approx([iou], abs=1e-12)


def oriented_model(parts: SimpleNamespace, imgsz: int = 64) -> tuple[Any, Any]:
    """Return the task and a model that finds boxes of 24 x 10 pixels in all directions everywhere, on any machine."""
    torch.manual_seed(0)
    task = parts.task.OrientedTask(NAMES, parts.task.OrientedRecipe())
    TASKS["oriented"] = sys.modules["oriented_boxes"].TASKS["oriented"]
    try:
        model = task.build_model(read_yaml(PACKAGE / "model.yaml"), imgsz)
    finally:
        del TASKS["oriented"]
    assert (model.stride, model.head.stride.tolist()) == (32, [8, 16, 32])
    with torch.no_grad():
        for level, stride in zip(model.head.levels, model.head.stride, strict=True):
            level[1].weight.normal_(std=0.2)
            level[1].weight[:4] = 0.0
            level[1].bias[:] = 0.0
            level[1].bias[2:4] = torch.log(torch.tensor([24.0, 10.0]) / stride / parts.head.TYPICAL_STRIDES)
    return task, model


def drawn_batch() -> Batch:
    """Return a batch of noise with targets, none on the second image."""
    boxes = torch.rand(9, 5) * torch.tensor([64.0, 64, 40, 40, 6]) + torch.tensor([0.0, 0, 6, 6, 0])
    image = torch.tensor([0, 0, 0, 0, 2, 2, 2, 3, 3])
    targets = torch.cat((image[:, None], torch.arange(9)[:, None] % 3, boxes), 1)
    pixels = torch.randint(256, (4, 3, 64, 64), dtype=torch.uint8)
    infos = tuple(ImageInfo(k, f"{k}.jpg", (64, 64), Placement(), np.zeros((0, 5), np.float32)) for k in range(4))
    return Batch(pixels, targets, infos)


def test_the_loss_of_two_processes_is_that_of_one(parts: SimpleNamespace) -> None:
    """Sums and counts of the parts of a batch add up to its own; a process may have no target."""
    task, model = oriented_model(parts)
    criterion, batch = task.criterion(model.eval()), drawn_batch()
    outputs = model(task.inputs(batch))
    whole = criterion(outputs, batch)
    shares = []
    for numbers in ([0], [1], [2, 3]):
        targets = batch.targets[torch.isin(batch.targets[:, 0], torch.tensor(numbers).float())].clone()
        targets[:, 0] -= numbers[0]
        part = Batch(batch.images[numbers], targets, tuple(batch.infos[k] for k in numbers))
        shares.append(criterion([level[numbers] for level in outputs], part))
    assert whole.counts.unique().tolist() == [sum(share.counts[0].item() for share in shares)]
    means = [share.share_of_mean(whole.counts) for share in shares]
    torch.testing.assert_close(sum(means), whole.local_means())
    criterion.objective(means[1], 4).backward()  # without a target every parameter has a gradient
    assert all(parameter.grad is not None for parameter in model.head.parameters())


def test_metrics(parts: SimpleNamespace) -> None:
    """Overlaps are rotated ones: a bar of the other diagonal has the same upright hull and is no hit."""
    boxes = torch.cat((box(30, 25, 40, 6, 45), box(75, 25, 30, 12, -20)))
    others = torch.cat((box(30, 25, 40, 6, -45), box(75, 25, 12, 30, 70)))  # the second is the same box
    outlines = [points / (100, 50) for points in parts.geometry.corners(boxes).numpy()]
    upright = [[2 * k, *(o.min(0) + o.max(0)) / 2, *np.ptp(o, 0)] for k, o in enumerate(outlines)]
    info = ImageInfo(0, "one.jpg", (100, 50), Placement(), np.array(upright, np.float32), tuple(outlines))
    batch = Batch(torch.zeros(1, 3, 64, 128, dtype=torch.uint8), torch.zeros(0, 7), (info,))
    metrics = parts.metrics.OrientedMetrics(NAMES, frozenset([0]))
    for found, expected in ((boxes, 1.0), (others, 0.5)):
        detected = torch.cat((found, torch.tensor([[0.9, 0], [0.8, 2]])), 1)
        prediction = parts.prediction.OrientedPrediction(0, "one.jpg", NAMES, (100, 50), detected, info.outlines)
        summary = metrics.summarise(metrics.update([prediction], batch))
        assert summary.metrics["mAP_0.5:0.95"] == pytest.approx(expected, abs=0.01)
    # By true and predicted class, background last: the bar is missed, and what was found instead is background.
    assert sorted(summary.evidence["confusion"]) == [[0, 3, 1], [2, 2, 1], [3, 0, 1]]


def test_labels(parts: SimpleNamespace, tmp_path: Path) -> None:
    """Corners of label files arrive as boxes in pixels of the batch, also of an image that is no square."""
    truth = torch.cat((box(60, 30, 50, 12, 25), box(100, 60, 20, 36, -80)))
    points = parts.geometry.corners(truth).numpy() / (160, 80)
    lines = [f"{k} {' '.join(f'{value:.6f}' for value in corners.ravel())}" for k, corners in enumerate(points)]
    for split in ("train", "val"):
        write_image(tmp_path / "images" / split / "a.png", plain(160, 80), *lines)
    content = {"path": str(tmp_path), "train": "images/train", "val": "images/val", "names": NAMES}
    source = DataSource(read_spec(write_yaml(tmp_path / "set.yaml", content)), parts.data.OrientedData)
    data = source.open(80, 8, DataOptions())
    split = data.split("val")
    (batch,) = data.evaluation_loader(split, data.evaluation_batches(split, 1, True))
    assert batch.targets[:, :2].tolist() == [[0, 0], [0, 1]]
    expected = torch.cat((truth[:, :2] / 2 + torch.tensor([0, 20]), truth[:, 2:4] / 2, truth[:, 4:]), 1)
    assert parts.geometry.rotated_iou(batch.targets[:, 2:], expected).min() > 0.999
    still = dict.fromkeys(("flipud", "mosaic", "translate", "scale", "hsv_h", "hsv_s", "hsv_v"), 0.0)
    hyp = parts.task.OrientedRecipe(fliplr=1.0, **still)
    (batch,) = data.train_loader(data.split("train", hyp), 1, hyp, 0)
    mirrored = torch.cat((80 - expected[:, :1], expected[:, 1:4], -expected[:, 4:]), 1)
    assert parts.geometry.rotated_iou(batch.targets[:, 2:], mirrored).min() > 0.99
    before = split.identity()
    (tmp_path / "labels" / "val" / "a.txt").write_text("\n".join(reversed(lines)))
    assert data.split("val").identity() != before


@pytest.fixture(scope="module")
def drawn_rectangles(parts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawing of the set; return the data YAML."""
    folder = parts.drawing.draw_dataset(tmp_path_factory.mktemp("data") / "rectangles", train=TRAIN, val=VAL)
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": NAMES}
    return write_yaml(folder.with_suffix(".yaml"), content)


def test_training(run_script: RunScript, drawn_rectangles: Path, tmp_path: Path) -> None:
    what = ("--task", str(PACKAGE), "--cfg", str(PACKAGE / "model.yaml"), "--data", str(drawn_rectangles))
    how = ("--imgsz", "64", "--epochs", "1", "--batch-size", "8", "--workers", "0", "--device", "cpu")
    run_script("train.py", *what, *how, "--project", str(tmp_path), plots=True)
    (row,) = rows(tmp_path / "exp")
    assert {"train/angle_loss", "metrics/mAP_0.5:0.95", "val/angle_loss"} <= row.keys()
    assert all(map(math.isfinite, row.values()))
    written = {file.name for file in (tmp_path / "exp").iterdir()}
    assert {"labels.csv", "classes.csv", "val_boxes.csv", "train_batch0.jpg", "results.png"} <= written


@pytest.mark.long
def test_validation_and_detection(
    parts: SimpleNamespace, run_script: RunScript, drawn_rectangles: Path, tmp_path: Path
) -> None:
    """On one process and on two, of weights that find boxes everywhere, and of their .onnx."""
    _, model = oriented_model(parts)
    weights, settings = tmp_path / "found.pt", {"task_file": str(PACKAGE), "imgsz": 64}
    weights.write_bytes(serialise(weights_content(model, {**model.yaml, "task": "oriented"}, NAMES, settings)))
    task, project = ("--task-file", str(PACKAGE)), ("--device", "cpu", "--project", str(tmp_path))
    run_script("export.py", "--weights", str(weights), *task, "--include", "onnx", "--imgsz", "64")
    how = ("--data", str(drawn_rectangles), "--square", "--workers", "0", *task, *project)
    for name, file, more in (
        ("one", weights, ("--batch-size", "4")),
        ("two", weights, ("--batch-size", "2", "--processes", "2")),
        ("onnx", weights.with_suffix(".onnx"), ("--batch-size", "1")),
    ):
        run_script("val.py", "--weights", str(file), *how, *more, "--name", name, OMP_NUM_THREADS="1")
    texts = {name: (tmp_path / name / "classes.csv").read_text() for name in ("one", "two", "onnx")}
    assert texts["one"] == texts["two"]
    one, onnx = ([line.split(",") for line in texts[name].splitlines()[1:]] for name in ("one", "onnx"))
    assert [row[0] for row in one] == list(NAMES.values())
    assert sum(float(row[5]) for row in one) > 0  # boxes of all directions are everywhere
    for row, expected in zip(onnx, one, strict=True):
        assert list(map(float, row[1:])) == pytest.approx(list(map(float, expected[1:])), abs=0.05)
    source = drawn_rectangles.with_suffix("") / "images" / "val"
    keep = ("--save-txt", "--save-crop", "--max-det", "3")
    run_script("detect.py", "--weights", str(weights), *task, "--source", str(source), *keep, *project)
    labels = list((tmp_path / "exp" / "labels").iterdir())
    assert len(list((tmp_path / "exp").glob("*.jpg"))) == len(labels) == VAL
    assert {len(line.split()) for file in labels for line in file.read_text().splitlines()} == {9}
    assert {folder.name for folder in (tmp_path / "exp/crops").iterdir()} <= set(NAMES.values())
