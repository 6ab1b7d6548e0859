"""A new task is new files: examples/keypoints, which `--task` names.

The scripts train, validate, resume, detect and export it.
"""

from __future__ import annotations

import copy
import csv
import shutil
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.conftest import ROOT, OnProcesses, RunScript
from tests.curves import refused, rows
from tests.whole_runs import Parts, within
from utils.errors import UserError

TASK = ROOT / "examples" / "keypoints"
COLOURS = {"red": (255, 40, 40), "blue": (40, 40, 255)}
TRAIN_IMAGES, VAL_IMAGES = 37, 13  # primes, so that no batch size divides them
PRECISION = 1e-3  # relative, of the losses of several processes against those of one
CELL = 0.05  # change of a metric if one keypoint of 26 moves to the next cell

# The parts of a task without the scripts: training steps, predictions, metrics and an exported module.
PARTS = """
import sys
from pathlib import Path
import numpy as np, torch
from data.dataset import DataOptions, data_source
from models.tasks import TASKS, add_tasks, model_words, task_of
from models.tasks.contract import ExportSettings, Thresholds
from utils.config.flags import DetectOptions, TrainOptions
from utils.config.parser import refuse_flags
from utils.errors import UserError
from utils.files import read_yaml
from utils.plots.drawing import Style

add_tasks(sys.argv[1])
from keypoints.loss import heat
from keypoints.prediction import HeatmapView

yaml = read_yaml(Path(sys.argv[1]) / "model.yaml")
name = task_of(yaml, "model.yaml")
assert name == task_of({"head": yaml["head"]}, "model.yaml") == "keypoints"
source = data_source(sys.argv[2], TASKS[name].data)
kind = TASKS[name].load()
refuse_flags(DetectOptions, {"conf_thres": 0.5}, kind.features_of(yaml), model_words(yaml))
try:
    refuse_flags(TrainOptions, {"noautoanchor": True}, kind.features_of(yaml), model_words(yaml))
except UserError as error:
    assert "--noautoanchor needs anchors, which keypoints with the head Heatmap does not have" in str(error), error
else:
    raise AssertionError("--noautoanchor is accepted")
task = kind(source.names(), kind.recipe())
torch.manual_seed(0)
model = task.build_model(task.model_yaml(yaml), 61)
assert (model.imgsz, model.stride, model.names) == (64, 4, {0: "red", 1: "blue"}), model.imgsz
assert model.yaml["task"] == "keypoints"
data = source.open(model.imgsz, model.stride, DataOptions(cache="ram", image_weights=True))
train, val = data.split("train", kind.recipe()), data.split("val")
classes, sampling = data.messages(train, val)[2:]
assert classes == "2 classes: red, blue" and "--image-weights" in sampling, (classes, sampling)
assert data.documents(train, val)["labels.csv"].count("\\n") == 5
assert task.adapt(model, train) == []
criterion, optimizer = task.criterion(model), torch.optim.Adam(model.parameters(), 0.01)
loader = data.train_loader(train, 8, kind.recipe(), 0)
losses = []
for epoch in range(6):
    loader.batch_sampler.set_epoch(epoch)
    for batch in loader:
        outputs = model(task.inputs(batch), *criterion.hints(batch))
        terms = criterion(outputs, batch)
        loss = criterion.objective(terms.local_means(), len(batch.infos))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
assert losses[-1] < losses[0], losses
assert task.draw_batch(batch).ndim == 3

model.eval()
batches = data.evaluation_batches(val, 4, False)
val_loader = data.evaluation_loader(val, batches)
postprocess, metrics = task.postprocess(model, Thresholds()), task.metrics(frozenset([0, 2]))
records, predictions, ideal = [], [], []
with torch.inference_mode():
    for batch in val_loader:
        inputs = task.inputs(batch)
        views = [*postprocess.views(model, inputs, True), *postprocess.views(model, inputs, False)]
        predictions += postprocess(views, batch)
        records += metrics.update(predictions[-len(batch.infos):], batch)
    maps = HeatmapView(heat(batch.targets, views[0].outputs.shape))
    ideal += metrics.update(postprocess([maps], batch), batch)
summary = metrics.summarise(records)
assert metrics.summarise(records[::-1]) == summary
assert tuple(summary.metrics) == task.metric_names and 0 <= summary.fitness <= 1, summary
assert metrics.summarise(ideal).fitness == 1  # the highest cells of the target maps are the keypoints
assert list(metrics.documents(summary)) == ["points.csv"]
assert list(metrics.pictures(summary, val, model.imgsz)) == ["keypoints.jpg"]
for prediction in predictions:
    image = np.zeros((*prediction.size[::-1], 3), np.uint8)
    assert prediction.array.shape == (2, 4) and len(prediction.items) == 2 and prediction.describe() == "1 blue, 1 red"
    assert prediction.draw(image, Style()).any() and not image.any()
    assert all(part.size for _, part in prediction.crops(image))
    assert len(prediction.label_rows(True)) == 2

module, suppression = task.export_module(model, ExportSettings())
assert suppression is None
with torch.inference_mode():
    torch.testing.assert_close(module(task.inputs(batch)), model(task.inputs(batch)), rtol=1e-3, atol=1e-3)
print("all parts work")
"""


@pytest.fixture(scope="session")
def keypoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw dark images with a red and a blue disc each; return the data YAML."""
    folder = tmp_path_factory.mktemp("keypoints")
    rng = np.random.default_rng(0)
    for split, count in {"train": TRAIN_IMAGES, "val": VAL_IMAGES}.items():
        (folder / "images" / split).mkdir(parents=True)
        (folder / "labels" / split).mkdir(parents=True)
        for number in range(count):
            width, height = int(rng.integers(60, 100)), int(rng.integers(60, 100))
            pixels = rng.integers(0, 60, (height, width, 3), np.uint8)
            lines = []
            for label, colour in enumerate(COLOURS.values()):
                # The red disc is on the left, so that the discs do not overlap.
                x, y = rng.uniform(0.1 + 0.45 * label, 0.4 + 0.45 * label), rng.uniform(0.15, 0.85)
                near = np.hypot(np.arange(width) - x * width, np.arange(height)[:, None] - y * height) < 5
                pixels[near] = colour
                lines.append(f"{label} {x:.6f} {y:.6f}")
            Image.fromarray(pixels).save(folder / "images" / split / f"{number:02}.png")
            (folder / "labels" / split / f"{number:02}.txt").write_text("\n".join(lines))
    file = folder / "keypoints.yaml"
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": dict(enumerate(COLOURS))}
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.fixture(scope="session")
def run(run_script: RunScript) -> Callable[..., str]:
    """Return a function that runs a script with one thread and with pictures; it must succeed."""
    return lambda script, *flags: run_script(script, *flags, plots=True, OMP_NUM_THREADS="1")


def train_flags(data: Path, project: Path, *more: str) -> list[str]:
    how = ["--epochs", "3", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--project", str(project), *more]
    return ["train.py", "--task", str(TASK), "--cfg", str(TASK / "model.yaml"), "--data", str(data), *how]


@pytest.fixture(scope="session")
def trained(run: Callable[..., str], keypoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with one process; return the run folder, with pictures."""
    project = tmp_path_factory.mktemp("trained")
    run(*train_flags(keypoints, project))
    return project / "exp"


def test_the_parts_of_the_task(run_script: RunScript, keypoints: Path, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    printed = run_script(str(tmp_path / "parts.py"), str(TASK), str(keypoints), PYTHONPATH=str(ROOT))
    assert "all parts work" in printed


def test_target_maps(run_script: RunScript, tmp_path: Path) -> None:
    """Each keypoint has its peak in its cell, and of two near each other the higher one counts in every cell."""
    (tmp_path / "maps.py").write_text(
        f"""
import math, torch
from models.tasks import add_tasks
add_tasks({str(TASK)!r})
from keypoints.loss import heat

rows = torch.tensor([[0, 1, 0.125, 0.375], [0, 1, 0.625, 0.375], [1, 0, 0.25, 0.5]])  # image, class, x, y
maps = heat(rows, torch.Size((2, 2, 4, 4)))
cell = lambda steps: math.exp(-steps / 2)
expected = [cell(0), cell(1), cell(0), cell(1)]
torch.testing.assert_close(maps[0, 1, 1], torch.tensor(expected))
torch.testing.assert_close(maps[0, 1, 3], torch.tensor(expected) * cell(4))
torch.testing.assert_close(maps[1, 0, 1:3, 0:2], torch.full((2, 2), cell(0.5)))
assert not maps[0, 0].any() and not maps[1, 1].any()
assert heat(rows[:0], torch.Size((2, 2, 4, 4))).eq(0).all()
assert heat(rows.to("meta"), torch.Size((2, 2, 4, 4))).shape == (2, 2, 4, 4)  # which has no values to ask for
print("as by hand")
"""
    )
    assert "as by hand" in run_script(str(tmp_path / "maps.py"), PYTHONPATH=str(ROOT))


def test_training(trained: Path) -> None:
    table = rows(trained)
    assert list(table[0])[:5] == ["epoch", "train/heat_loss", "metrics/distance", "metrics/PCK", "val/heat_loss"]
    assert len(table) == 3
    assert table[-1]["train/heat_loss"] < table[0]["train/heat_loss"]
    names = {path.name for path in trained.iterdir()}
    assert {"points.csv", "labels.csv", "keypoints.jpg", "train_batch0.jpg", "results.png"} <= names


def wrong(real: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """Return a copy of an object, of a class `Wrong`, whose method returns the changed result."""

    def changed(self: Any, *arguments: Any) -> Any:
        return change(getattr(type(real), method)(self, *arguments))

    other = copy.copy(real)
    other.__class__ = type("Wrong", (type(real),), {method: changed})
    return other


def refusals(flags: list[str]) -> dict[str, str]:
    """Return the error of a validation, of a batch or of an epoch, by what is wrong in it."""
    errors: dict[str, str] = {}

    def note(fault: str, work: Callable[[], object]) -> None:
        try:
            work()
        except UserError as error:
            errors[fault] = str(error)

    within(flags, lambda parts: make_faults(parts, note))
    return errors


def make_faults(parts: Parts, note: Callable[[str, Callable[[], object]], None]) -> None:
    evaluate, models = parts.evaluate, [parts.steps.ema.model]
    note("nothing", lambda: evaluate(models))
    for fault, change in {
        "fewer predictions": lambda made: made[1:],
        "an image twice in predictions": lambda made: [replace(each, image=0) for each in made],
    }.items():
        inference = replace(evaluate.inference, postprocess=wrong(evaluate.inference.postprocess, "__call__", change))
        note(fault, lambda inference=inference: replace(evaluate, inference=inference)(models))
    for fault, method, change in (
        ("fewer records", "update", lambda made: made[1:]),
        ("a metric is missing", "summarise", lambda made: replace(made, metrics={"PCK": 0.5})),
    ):
        metrics = wrong(evaluate.metrics, method, change)
        note(fault, lambda metrics=metrics: replace(evaluate, metrics=metrics)(models))
    dataset = evaluate.loader.dataset
    for fault, change in {
        "an image twice in a batch": lambda made: (*made[:2], made[2]._replace(image=0)),
        "an image of another split": lambda made: (*made[:2], made[2]._replace(image=made[2].image + 1)),
    }.items():
        loader = torch.utils.data.DataLoader(
            wrong(dataset, "__getitem__", change),
            batch_sampler=evaluate.loader.batch_sampler,
            collate_fn=evaluate.loader.collate_fn,
        )
        note(fault, lambda loader=loader: replace(evaluate, loader=loader)(models))
    (shares,) = islice(parts.loader, 1)

    def one_batch() -> Generator[Any, None, None]:
        yield shares

    for fault, method, change in (
        ("negative counts", "__call__", lambda terms: replace(terms, counts=-terms.counts)),
        ("sums without parts", "__call__", lambda terms: replace(terms, sums=terms.sums[0])),
        ("two terms", "__call__", lambda terms: type(terms)(*(terms.sums.expand(2, 1) for _ in range(3)))),
        ("no terms", "__call__", lambda terms: terms.sums.sum()),
        ("two objectives", "objective", lambda scalar: scalar.expand(2)),
    ):
        criterion = wrong(parts.criterion, method, change)
        note(fault, lambda criterion=criterion: parts._replace(criterion=criterion).take_steps(one_batch()))
        note(f"{fault} in validation", lambda criterion=criterion: replace(evaluate, criterion=criterion)(models))
    batches = type(parts.sampler)
    parts.sampler.__class__ = type("Short", (batches,), {"__iter__": lambda self: islice(batches.__iter__(self), 2)})
    note("fewer batches", parts.train_one_epoch)


def test_what_a_task_returns_is_checked(on_processes: OnProcesses, keypoints: Path, tmp_path: Path) -> None:
    """Each fault is one sentence that names the class."""
    flags = train_flags(keypoints, tmp_path, "--noplots", "--workers", "0")[1:]
    (errors,) = on_processes(1, refusals, flags)
    assert errors.pop("fewer batches").startswith("keypoints.data.KeypointItems gave 2 of 5 batches")
    assert {fault: error.partition(" ")[0].rpartition(".")[2] for fault, error in errors.items()} == dict.fromkeys(
        [
            *("fewer predictions", "an image twice in predictions", "fewer records", "a metric is missing"),
            *("an image twice in a batch", "an image of another split"),
            *("negative counts", "sums without parts", "two terms", "no terms", "two objectives"),
            *("negative counts in validation", "sums without parts in validation", "two terms in validation"),
            *("no terms in validation", "two objectives in validation"),
        ],
        "Wrong",
    )


CHANGED = {  # what is appended to a module of the task
    "data.py": """
KeypointItems.right = KeypointItems.__getitem__

def stop(self, sample):
    if sample.position == 9:
        raise StopIteration
    return self.right(sample)

KeypointItems.__getitem__ = stop
""",
    "loss.py": """
def leave(self, outputs, batch):
    raise SystemExit(0)

HeatmapCriterion.__call__ = leave
""",
    "metrics.py": """
from dataclasses import replace

HeatmapMetrics.right = HeatmapMetrics.summarise
HeatmapMetrics.summarise = lambda self, records: replace(self.right(records), fitness=float("nan"))
""",
}


def changed_task(file: str, folder: Path) -> Path:
    """Return a copy of the task with a change in a module."""
    shutil.copytree(TASK, folder / "changed", ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "changed" / file).open("a") as module:
        module.write(CHANGED[file])
    return folder / "changed"


@pytest.mark.parametrize(("file", "flags"), [("data.py", ("--workers", "1")), ("loss.py", ("--processes", "2"))])
def test_what_a_task_raises_ends_the_run(
    file: str, flags: tuple[str, ...], run_script: RunScript, keypoints: Path, tmp_path: Path
) -> None:
    """With its file and exit code 1, on every process, also what ends a loop or a process without an error."""
    task = changed_task(file, tmp_path)
    how = ("--task", str(task), "--noplots", *flags)
    printed = run_script(*train_flags(keypoints, tmp_path, *how), fails=True, OMP_NUM_THREADS="1")
    refused(printed, f"error: {task / file}, line ")
    assert "Traceback" not in printed


def test_a_fitness_that_is_nan(run_script: RunScript, keypoints: Path, tmp_path: Path) -> None:
    """It is the worst, and the run ends as any other, with its best weights and their table."""
    how = ("--task", str(changed_task("metrics.py", tmp_path)), "--noplots", "--workers", "0")
    printed = run_script(*train_flags(keypoints, tmp_path, *how), OMP_NUM_THREADS="1")
    assert "best epoch: 1 of 3" in printed
    assert len(rows(tmp_path / "exp")) == 3
    assert (tmp_path / "exp" / "weights" / "best.pt").is_file()


@pytest.mark.long
def test_two_processes_train_alike(run: Callable[..., str], keypoints: Path, trained: Path, tmp_path: Path) -> None:
    run(*train_flags(keypoints, tmp_path, "--noplots", "--workers", "0", "--processes", "2", "--sync-bn"))
    for two, one in zip(rows(tmp_path / "exp"), rows(trained), strict=True):
        assert list(two) == list(one)
        for name, value in one.items():
            scale = CELL if name.startswith("metrics/") else PRECISION * abs(value)
            assert two[name] == pytest.approx(value, abs=scale), name


@pytest.mark.long
@pytest.mark.parametrize("processes", [(), ("--processes", "2")], ids=["one", "two"])
def test_resuming(
    processes: tuple[str, ...], run: Callable[..., str], keypoints: Path, trained: Path, tmp_path: Path
) -> None:
    """For one more epoch."""
    shutil.copytree(trained, tmp_path / "exp")
    how = ("--epochs", "4", "--device", "cpu", "--workers", "0", "--noplots")
    run("train.py", "--resume", str(tmp_path / "exp"), *how, *processes)
    table = rows(tmp_path / "exp")
    assert len(table) == 4
    assert table[:3] == rows(trained)


def points_of(project: Path, name: str = "exp") -> list[list[str]]:
    with open(project / name / "points.csv", encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


@pytest.mark.long
def test_validation_on_one_and_two_processes(
    run: Callable[..., str], keypoints: Path, trained: Path, tmp_path: Path
) -> None:
    best, last = (str(trained / "weights" / name) for name in ("best.pt", "last.pt"))
    data = ("--data", str(keypoints), "--project", str(tmp_path))
    how = (*data, "--batch-size", "4", "--device", "cpu", "--workers", "0", "--noplots")
    assert "PCK" in run("val.py", "--weights", best, *how, "--save-txt", "--save-conf")
    run("val.py", "--weights", best, *how, "--processes", "2", "--name", "two")
    assert points_of(tmp_path) == points_of(tmp_path, "two") == points_of(trained.parent)
    assert len(list((tmp_path / "exp/labels").iterdir())) == VAL_IMAGES
    run("val.py", "--weights", best, last, *how, "--augment", "--name", "ensemble")
    assert [row[:2] for row in points_of(tmp_path, "ensemble")] == [row[:2] for row in points_of(tmp_path)]


@pytest.mark.long
def test_detection(run: Callable[..., str], keypoints: Path, trained: Path, tmp_path: Path) -> None:
    source = keypoints.parent / "images/val"
    how = ("--device", "cpu", "--project", str(tmp_path), "--conf-thres", "0.001")
    keep = ("--save-txt", "--save-csv", "--save-crop")
    printed = run("detect.py", "--weights", str(trained / "weights/best.pt"), "--source", str(source), *how, *keep)
    assert printed.count("1 blue, 1 red") == VAL_IMAGES
    assert len(list((tmp_path / "exp").glob("*.jpg")) + list((tmp_path / "exp").glob("*.png"))) == VAL_IMAGES
    assert len(list((tmp_path / "exp/labels").iterdir())) == VAL_IMAGES
    assert {path.name for path in (tmp_path / "exp/crops").iterdir()} == set(COLOURS)


@pytest.fixture(scope="session")
def exported(run: Callable[..., str], trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the model; return the folder of the files."""
    folder = tmp_path_factory.mktemp("exported")
    weights = shutil.copy2(trained / "weights/best.pt", folder / "best.pt")
    formats = ("--include", "torchscript")
    assert "keypoints, 2 classes" in run("export.py", "--weights", str(weights), *formats)
    return folder


@pytest.mark.long
def test_export(run: Callable[..., str], keypoints: Path, trained: Path, exported: Path, tmp_path: Path) -> None:
    what = ("--weights", str(exported / "best.torchscript"), "--data", str(keypoints), "--project", str(tmp_path))
    how = ("--batch-size", "1", "--device", "cpu", "--workers", "0", "--noplots")
    run("val.py", *what, *how)
    for row, expected in zip(points_of(tmp_path), points_of(trained.parent), strict=True):
        assert row[:2] == expected[:2]
        if row[0] != "class":
            assert float(row[2]) == pytest.approx(float(expected[2]), abs=0.1)  # a cell may be on the edge of two
