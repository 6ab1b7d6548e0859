"""examples/oriented_boxes, a task that `--task` names: its geometry and loss by hand, and whole runs of the scripts."""

from __future__ import annotations

import csv
import importlib
import math
import shutil
import sys
from collections.abc import Callable, Iterator
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
from models.tasks.contract import Thresholds
from models.yolo import LAYERS
from tests.conftest import ROOT, RunScript, not_here
from tests.curves import rows
from tests.making import write_image, write_yaml
from utils.batch import Batch, GlobalCounts, ImageInfo, Placement
from utils.checkpoint import serialised, weights_content
from utils.errors import UserError
from utils.files import read_yaml

PACKAGE = ROOT / "examples" / "oriented_boxes"
PARTS = ("geometry", "head", "loss", "prediction", "metrics", "task", "data", "drawing")
NAMES = {0: "plate", 1: "frame", 2: "ladder"}
TRAIN, VAL = 21, 11  # images, no multiples of the batches
PAIRS = 200
COLUMNS = [
    *(f"train/{term}_loss" for term in ("box", "cls", "angle")),
    *(f"metrics/{name}" for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")),
    *(f"val/{term}_loss" for term in ("box", "cls", "angle")),
]


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


def drawn_boxes(count: int, seed: int) -> Tensor:
    """Return boxes of many shapes, some very thin; about half of two drawings overlap."""
    rng = np.random.default_rng(seed)
    centre, size = rng.uniform(0, 8, (count, 2)), np.exp(rng.uniform(-1, 3, (count, 2)))
    return torch.from_numpy(np.concatenate((centre, size, rng.uniform(-7, 7, (count, 1))), 1))


# Geometry


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
        pair = [torch.cat((parts.geometry.turned(each[:, :2], turn), each[:, 2:4], each[:, 4:] + turned), 1)
                for each in (one, other)]  # fmt: skip
        assert parts.geometry.rotated_iou(*pair).tolist() == pytest.approx([iou], abs=1e-12)
        assert parts.geometry.rotated_iou(*pair[::-1]).tolist() == pytest.approx([iou], abs=1e-12)


def test_overlaps_of_shapely(parts: SimpleNamespace) -> None:
    try:
        from shapely.geometry import Polygon
    except ImportError:
        not_here("the package shapely (requirements-dev.txt)")
    a, b = drawn_boxes(PAIRS, 2), drawn_boxes(PAIRS, 3)
    one, other = ([Polygon(each) for each in parts.geometry.corners(boxes).numpy()] for boxes in (a, b))
    expected = [p.intersection(q).area / p.union(q).area for p, q in zip(one, other, strict=True)]
    np.testing.assert_allclose(parts.geometry.rotated_iou(a, b).numpy(), expected, atol=1e-6)


def test_symmetries(parts: SimpleNamespace) -> None:
    """A turn by half a turn, and an exchange of the sides with a quarter of a turn, make the same box."""
    geometry, boxes = parts.geometry, drawn_boxes(PAIRS, 4) + box(20, 20, 1, 1, 0)
    x, y, width, height, angle = boxes.unbind(1)
    for same in (
        torch.stack((x, y, width, height, angle - math.pi), 1),
        torch.stack((x, y, height, width, angle + math.pi / 2), 1),
        geometry.canonical(boxes),
        geometry.unspun(geometry.spun(boxes)),
        torch.from_numpy(geometry.smallest_boxes(geometry.corners(boxes).numpy())).double(),
    ):
        tolerance = 1e-9 if same.dtype == boxes.dtype else 1e-3
        assert geometry.rotated_iou(boxes, same).min() > 1 - max(tolerance, 2e-4)
        assert geometry.prob_iou(geometry.spun(boxes), geometry.spun(same)).min() > 0.99
        assert geometry.turn(geometry.spun(boxes), geometry.spun(same)).max() < 1e-6
    long = geometry.canonical(boxes)
    assert (long[:, 2] >= long[:, 3]).all()
    assert (long[:, 4] >= -math.pi / 2).all()
    assert (long[:, 4] < math.pi / 2).all()


def test_no_edge_of_the_angle(parts: SimpleNamespace) -> None:
    """Across the angles at which numbers of a box jump, the loss changes as it does elsewhere, and so its gradient."""
    geometry, target = parts.geometry, parts.geometry.spun(box(0, 0, 40, 10, 90))
    losses, gradients = [], []
    for degrees in (89.999, 90.001, -89.999, -90.001):
        guess = geometry.spun(box(1, 2, 38, 12, degrees)).requires_grad_()
        loss = 1 - geometry.prob_iou(guess, target)
        (gradient,) = torch.autograd.grad(loss.sum(), guess)
        losses.append(loss.item())
        gradients.append(gradient)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-4)
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0], rtol=1e-3, atol=1e-3)


# Suppression


def test_suppression(parts: SimpleNamespace) -> None:
    """As one box after another: a suppressed box suppresses nothing, and groups are apart."""
    boxes = drawn_boxes(150, 5)
    group = torch.arange(150) % 2
    remaining: list[int] = []
    for k in range(150):
        others = [j for j in remaining if group[j] == group[k]]
        pairs = boxes[others], boxes[k].expand(len(others), -1)
        if not (parts.geometry.rotated_iou(*pairs) > 0.3).any():
            remaining.append(k)
    assert 0 < len(remaining) < 150
    assert parts.prediction.not_suppressed(boxes, group, 0.3).tolist() == remaining
    assert parts.prediction.not_suppressed(boxes[:0], group[:0], 0.3).tolist() == []
    crossed = torch.cat((box(0, 0, 8, 1, 45), box(0, 0, 8, 1, -45)))  # one upright hull
    assert parts.prediction.not_suppressed(crossed, torch.zeros(2), 0.3).tolist() == [0, 1]


# Loss


def test_assignment(parts: SimpleNamespace) -> None:
    """Of images of 64 pixels: levels by size, cells by what a box covers, and of two boxes the smaller one's cell."""
    sizes, strides = [(8, 8), (4, 4), (2, 2)], torch.tensor([8.0, 16.0, 32.0])
    large = [0, 0, 32.0, 32.0, 128, 128, 0.3]  # on the coarsest level, with cells outside of the image
    middle = [0, 0, 24.0, 24.0, 120, 30, math.pi / 2]  # a column of cells: it is 30 pixels wide
    small = [1, 2, 12.0, 20.0, 6, 6, 0]  # smaller than a cell
    smaller = [1, 0, 12.0, 20.0, 4, 4, 0]  # at the same place
    targets = torch.tensor([large, middle, small, smaller], dtype=torch.float32)
    cell, used = parts.loss.assign(targets, 2, sizes, strides)
    assert cell.shape == used.shape == (4, 9)
    taken = [sorted(cell[k][used[k]].tolist()) for k in range(4)]
    first = 64 + 16  # cells of the finer levels
    assert taken[0] == [first, first + 1, first + 2, first + 3]
    assert taken[1] == [64 + 4 * row + 1 for row in (0, 1, 2)]
    assert taken[2] == []
    assert taken[3] == [84 + 2 * 8 + 1]
    assert (cell[~used] == 0).all()
    assert parts.loss.assign(targets[:0], 2, sizes, strides).cell.shape == (0, 9)


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


def drawn_batch(parts: SimpleNamespace, images: int) -> Batch:
    """Return a batch of noise with targets, none on the second image."""
    generator = torch.Generator().manual_seed(1)
    boxes = torch.rand(9, 5, generator=generator) * torch.tensor([64.0, 64, 40, 40, 6]) + torch.tensor(
        [0.0, 0, 6, 6, 0]
    )
    image = torch.tensor([0, 0, 0, 0, 2, 2, 2, 3, 3]) % images
    targets = torch.cat((image[:, None], torch.arange(9)[:, None] % 3, boxes), 1)
    pixels = torch.randint(256, (images, 3, 64, 64), generator=generator, dtype=torch.uint8)
    infos = [ImageInfo(k, f"{k}.jpg", (64, 64), Placement(), np.zeros((0, 5), np.float32)) for k in range(images)]
    return Batch(pixels, targets, tuple(infos))


def test_the_loss_of_two_processes_is_that_of_one(parts: SimpleNamespace) -> None:
    """Sums and counts of the parts of a batch add up to its own; a process may have no target."""
    task, model = oriented_model(parts)
    criterion, batch = task.criterion(model.eval()), drawn_batch(parts, 4)
    outputs = model(task.inputs(batch))
    whole = criterion(outputs, batch)
    shares = []
    for numbers in ([0], [1], [2, 3]):
        targets = batch.targets[torch.isin(batch.targets[:, 0], torch.tensor(numbers).float())].clone()
        targets[:, 0] -= numbers[0]
        part = Batch(batch.images[numbers], targets, tuple(batch.infos[k] for k in numbers))
        shares.append(criterion([level[numbers] for level in outputs], part))
    assert whole.sums.shape == whole.counts.shape == whole.weights.shape == (3, 1)
    assert whole.counts.unique().tolist() == [sum(share.counts[0].item() for share in shares)]
    torch.testing.assert_close(sum(share.sums for share in shares), whole.sums)
    means = sum(share.share_of(GlobalCounts(whole.counts)) for share in shares)
    torch.testing.assert_close(means, whole.local_means())
    criterion.objective(
        shares[1].share_of(GlobalCounts(whole.counts)),
        4,
        # Without a target every parameter has a gradient.
    ).backward()
    assert all(parameter.grad is not None for parameter in model.head.parameters())


# Predictions and metrics


def test_a_prediction_depends_on_its_image_alone(parts: SimpleNamespace) -> None:
    task, model = oriented_model(parts)
    batch = drawn_batch(parts, 4)
    postprocess = task.postprocess(model.eval(), Thresholds(conf_thres=0.3, max_det=30))
    with torch.inference_mode():
        views = postprocess.views(model, task.inputs(batch), False)
    together = postprocess(views, batch)
    for k, expected in enumerate(together):
        view = views[0]._replace(rows=views[0].rows[k : k + 1])
        (alone,) = postprocess([view], Batch(batch.images[k : k + 1], batch.targets[:0], (batch.infos[k],)))
        assert len(alone) > 3
        assert alone.rows.equal(expected.rows)
    few = task.postprocess(model, Thresholds(classes=(2,), max_det=4))(views, batch)
    assert {len(one) for one in few} == {4}
    assert {label for one in few for label in one.classes.tolist()} == {2}
    assert all((np.diff(one.scores) <= 0).all() for one in few)
    with pytest.raises(UserError, match="--classes 7"):
        task.postprocess(model, Thresholds(classes=(7,)))


def labelled(parts: SimpleNamespace, boxes: Tensor, classes: list[int], found: Tensor) -> Any:
    """Return the prediction of `found` boxes for an image of 100 x 50 pixels with labels. boxes, found: (k, 5)."""
    outlines = [points / (100, 50) for points in parts.geometry.corners(boxes).numpy()]
    upright = np.array([[*(each.min(0) + each.max(0)) / 2, *np.ptp(each, 0)] for each in outlines]).reshape(-1, 4)
    info_rows = np.concatenate((np.reshape(classes, (-1, 1)), upright), 1).astype(np.float32)
    info = ImageInfo(0, "one.jpg", (100, 50), Placement(), info_rows, tuple(outlines))
    confidence = torch.linspace(0.9, 0.8, len(found), dtype=torch.float64)
    detected = torch.cat((found, confidence[:, None], torch.tensor(classes).view(-1, 1)), 1)
    prediction = parts.prediction.OrientedPrediction(0, "one.jpg", NAMES, (100, 50), detected, info.outlines)
    return prediction, Batch(torch.zeros(1, 3, 64, 128, dtype=torch.uint8), torch.zeros(0, 7), (info,))


def test_metrics(parts: SimpleNamespace) -> None:
    """Overlaps are rotated ones: a bar of the other diagonal has the same upright hull and is no hit."""
    boxes = torch.cat((box(30, 25, 40, 6, 45), box(75, 25, 30, 12, -20)))
    others = torch.cat((box(30, 25, 40, 6, -45), box(75, 25, 12, 30, 70)))  # the second is the same box
    metrics = parts.metrics.OrientedMetrics(NAMES, frozenset([0]))
    for found, expected in ((boxes, 1.0), (others, 0.5)):
        prediction, batch = labelled(parts, boxes, [0, 2], found)
        summary = metrics.summarise(metrics.update([prediction], batch))
        assert summary.metrics["mAP_0.5:0.95"] == pytest.approx(expected, abs=0.01)
    # By true and predicted class, background last: the bar is missed, and what was found instead is background.
    assert sorted(summary.evidence["confusion"]) == [[0, 3, 1], [2, 2, 1], [3, 0, 1]]
    (shown,) = metrics.examples(summary)
    for drawn, expected in ((shown.labels, boxes), (shown.predictions, others)):
        outlines = np.array([each.outline for each in drawn]).reshape(-1, 4, 2) * (100, 50)
        np.testing.assert_allclose(outlines, parts.geometry.corners(expected).numpy(), atol=0.01)
    assert metrics.documents(summary)["val_boxes.csv"].splitlines()[0].endswith(",outline")


# Data


def test_labels(parts: SimpleNamespace, tmp_path: Path) -> None:
    """Corners of label files arrive as boxes in pixels of the batch, also of an image that is no square."""
    truth = torch.cat((box(60, 30, 50, 12, 25), box(100, 60, 20, 36, -80)))
    points = parts.geometry.corners(truth).numpy() / (160, 80)
    lines = [f"{k} {' '.join(f'{value:.6f}' for value in each.ravel())}" for k, each in enumerate(points)]
    for split in ("train", "val"):
        write_image(tmp_path / "images" / split / "a.png", np.full((80, 160, 3), 90, np.uint8), *lines)
    content = {"path": str(tmp_path), "train": "images/train", "val": "images/val", "names": NAMES}
    source = DataSource(read_spec(write_yaml(tmp_path / "set.yaml", content)), parts.data.OrientedData)
    data = source.open(80, 8, DataOptions())
    split = data.split("val")
    (batch,) = data.evaluation_loader(split, data.evaluation_batches(split, 1, True))
    assert batch.targets[:, :2].tolist() == [[0, 0], [0, 1]]
    expected = torch.cat((truth[:, :2] / 2 + torch.tensor([0, 20]), truth[:, 2:4] / 2, truth[:, 4:]), 1)
    assert parts.geometry.rotated_iou(batch.targets[:, 2:], expected).min() > 0.999
    np.testing.assert_allclose(np.stack(batch.infos[0].outlines), points, atol=1e-5)
    hyp = parts.task.OrientedRecipe(
        fliplr=1.0, flipud=0.0, mosaic=0.0, translate=0.0, scale=0.0, hsv_h=0.0, hsv_s=0.0, hsv_v=0.0
    )
    (batch,) = data.train_loader(data.split("train", hyp), 1, hyp, 0)
    mirrored = torch.cat((80 - expected[:, :1], expected[:, 1:4], -expected[:, 4:]), 1)
    assert parts.geometry.rotated_iou(batch.targets[:, 2:], mirrored).min() > 0.99
    before = split.identity()
    (tmp_path / "labels" / "val" / "a.txt").write_text("\n".join([lines[1], lines[0]]))
    assert data.split("val").identity() != before


# Whole runs


@pytest.fixture(scope="module")
def drawn_rectangles(parts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawing of the set; return the data YAML."""
    folder = parts.drawing.draw_dataset(tmp_path_factory.mktemp("data") / "rectangles", train=TRAIN, val=VAL)
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": NAMES}
    return write_yaml(folder.with_suffix(".yaml"), content)


@pytest.fixture(scope="module")
def train(run_script: RunScript, drawn_rectangles: Path) -> Callable[..., str]:
    """Train for two epochs on one thread per process; return the output."""
    what = ("--task", str(PACKAGE), "--cfg", str(PACKAGE / "model.yaml"), "--data", str(drawn_rectangles))
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu")

    def run(project: Path, *flags: str, **more: Any) -> str:
        given = (*what, *how, "--project", str(project), *flags)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **more})

    return run


@pytest.fixture(scope="module")
def trained(train: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process, with pictures."""
    project = tmp_path_factory.mktemp("trained")
    train(project, plots=True)
    return project / "exp"


@pytest.fixture(scope="module")
def found(parts: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that find boxes everywhere."""
    _, model = oriented_model(parts)
    file = tmp_path_factory.mktemp("found") / "found.pt"
    settings = {"task_file": str(PACKAGE), "imgsz": 64}
    file.write_bytes(serialised(weights_content(model, {**model.yaml, "task": "oriented"}, NAMES, settings)))
    return file


def test_training(trained: Path) -> None:
    assert list(rows(trained)[0]) == ["epoch", *COLUMNS, "x/lr0", "x/lr1", "x/lr2"]
    assert all(math.isfinite(value) for row in rows(trained) for value in row.values())
    written = {file.name for file in trained.iterdir()}
    assert {"labels.csv", "classes.csv", "val_boxes.csv", "train_batch0.jpg", "results.png"} <= written


def classes(project: Path, name: str) -> list[list[str]]:
    with open(project / name / "classes.csv", encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.long
def test_validation_and_detection(run_script: RunScript, drawn_rectangles: Path, found: Path, tmp_path: Path) -> None:
    """On one process and on two, of the weights and of their .onnx."""
    weights = Path(shutil.copy(found, tmp_path / "found.pt"))
    task = ("--task", str(PACKAGE))
    run_script("export.py", "--weights", str(weights), *task, "--include", "onnx", "--imgsz", "64")
    how = ("--data", str(drawn_rectangles), "--square", "--workers", "0", "--device", "cpu", "--project", str(tmp_path))
    for name, file, more in (
        ("one", weights, ("--batch-size", "4")),
        ("two", weights, ("--batch-size", "2", "--processes", "2")),
        ("onnx", weights.with_suffix(".onnx"), ("--batch-size", "1")),
    ):
        given = ("--weights", str(file), "--task-file", str(PACKAGE), *how, *more, "--name", name)
        run_script("val.py", *given, OMP_NUM_THREADS="1")
    one = classes(tmp_path, "one")
    assert [row[0] for row in one[1:]] == list(NAMES.values())
    assert sum(float(row[5]) for row in one[1:]) > 0  # boxes of all directions are everywhere
    assert classes(tmp_path, "two") == one
    for row, expected in zip(classes(tmp_path, "onnx")[1:], one[1:], strict=True):
        assert [float(value) for value in row[1:]] == pytest.approx([float(value) for value in expected[1:]], abs=0.05)
    source = drawn_rectangles.with_suffix("") / "images" / "val"
    keep = ("--save-txt", "--save-crop", "--device", "cpu", "--project", str(tmp_path), "--max-det", "3")
    run_script("detect.py", "--weights", str(found), *task, "--source", str(source), *keep)
    labels = list((tmp_path / "exp" / "labels").iterdir())
    assert len(list((tmp_path / "exp").glob("*.jpg"))) == len(labels) == VAL
    assert {len(line.split()) for file in labels for line in file.read_text().splitlines()} == {9}
    assert {folder.name for folder in (tmp_path / "exp/crops").iterdir()} <= set(NAMES.values())
