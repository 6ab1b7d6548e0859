"""A new task is new files: a copy of examples/keypoints outside of the checkout, which `--task` names.

The scripts train, validate, resume, detect and export it, on one process and on two. What weights or a run folder name
is run again for the user who has run it, and refused for another.
"""

from __future__ import annotations

import copy
import csv
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import detect
import export
import val
from data.dataset import DataOptions, data_source
from models.tasks import TASKS, add_tasks
from models.tasks.contract import Task, Thresholds
from models.weights import read_weights
from tests.conftest import ROOT, CallMain, OnProcesses, RunScript
from tests.curves import killed_and_moved, refused, rows
from tests.making import plain, write_image, write_yaml
from tests.whole_runs import Parts, opened_files, within
from utils.distributed.launch import reset_accelerate
from utils.errors import UserError
from utils.files import read_yaml

TASK = ROOT / "examples" / "keypoints"
COLOURS = {"red": (255, 40, 40), "blue": (40, 40, 255)}
TRAIN_IMAGES, VAL_IMAGES = 37, 13  # primes, so that no batch size divides them


@pytest.fixture(scope="module")
def keypoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw dark images with a red disc on the left and a blue one on the right; return the data YAML."""
    folder = tmp_path_factory.mktemp("keypoints")
    rng = np.random.default_rng(0)
    for split, count in {"train": TRAIN_IMAGES, "val": VAL_IMAGES}.items():
        for number in range(count):
            width, height = int(rng.integers(60, 100)), int(rng.integers(60, 100))
            pixels, labels = plain(width, height, 30), []
            for label, colour in enumerate(COLOURS.values()):
                x, y = rng.uniform(0.1 + 0.45 * label, 0.4 + 0.45 * label), rng.uniform(0.15, 0.85)
                distance = np.hypot(np.arange(width) - x * width, np.arange(height)[:, None] - y * height)
                pixels[distance < 5] = colour
                labels.append(f"{label} {x:.6f} {y:.6f}")
            write_image(folder / f"images/{split}/{number:02}.png", pixels, *labels)
    content = {"path": str(folder), "train": "images/train", "val": "images/val", "names": dict(enumerate(COLOURS))}
    return write_yaml(folder / "keypoints.yaml", content)


def copied(folder: Path, file: str = "", more: str = "") -> Path:
    """Return a copy of the task, with `more` at the end of a file."""
    package = shutil.copytree(TASK, folder / "keypoints", ignore=shutil.ignore_patterns("__pycache__"))
    if file:
        with (package / file).open("a") as module:
            module.write(more)
    return package


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("outside"))


def train_flags(package: Path, data: Path, project: Path, *more: str) -> list[str]:
    what = ["train.py", "--task", str(package), "--cfg", str(package / "model.yaml"), "--data", str(data)]
    how = ["--epochs", "2", "--batch-size", "8", "--workers", "0", "--device", "cpu", "--project", str(project)]
    return [*what, *how, "--logical-processes", "2", *more]


@pytest.fixture(scope="module")
def trained(run_script: RunScript, package: Path, keypoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train with one process; return the run folder, with pictures."""
    project = tmp_path_factory.mktemp("trained")
    run_script(*train_flags(package, keypoints, project, "--workers", "1"), plots=True, OMP_NUM_THREADS="1")
    return project / "exp"


@contextmanager
def another_process() -> Iterator[None]:
    """Run a block without a trace of the task in this process, before and after it."""
    tasks, path = dict(TASKS), list(sys.path)
    assert "keypoints" not in {*tasks, *sys.modules}
    try:
        yield
    finally:
        TASKS.clear()
        TASKS.update(tasks)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] == "keypoints"]:
            del sys.modules[name]


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a user who has run nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def task(user: None, package: Path, keypoints: Path) -> Iterator[Task]:
    with another_process():
        add_tasks(str(package))
        kind = TASKS["keypoints"].load()
        yield kind(data_source(str(keypoints), TASKS["keypoints"].data).names(), kind.recipe())


# The parts of the task, without the scripts


def test_predictions(task: Task, package: Path, keypoints: Path) -> None:
    """The target maps themselves are rated 1; records add up in any order."""
    from keypoints.loss import heat
    from keypoints.prediction import HeatmapView

    model = task.build_model(task.model_yaml(read_yaml(package / "model.yaml")), 61)
    assert (model.imgsz, model.stride, model.names) == (64, 4, {0: "red", 1: "blue"})
    data: Any = data_source(str(keypoints), TASKS["keypoints"].data).open(model.imgsz, model.stride, DataOptions())
    val_split = data.split("val")
    model.eval()
    postprocess, metrics = task.postprocess(model, Thresholds()), task.metrics(frozenset())
    records, ideal = [], []
    with torch.inference_mode():
        for batch in data.evaluation_loader(val_split, data.evaluation_batches(val_split, 4, False)):
            inputs = task.inputs(batch)
            views = postprocess.views(model, inputs, True)
            records += metrics.update(postprocess(views, batch), batch)
            maps = HeatmapView(heat(batch.targets, views[0].outputs.shape))
            ideal += metrics.update(postprocess([maps], batch), batch)
    summary = metrics.summarise(records)
    assert metrics.summarise(records[::-1]) == summary
    assert tuple(summary.metrics) == task.metric_names
    assert metrics.summarise(ideal).fitness == 1  # the highest cells of the target maps are the keypoints


# Whole runs


def test_training(trained: Path, package: Path) -> None:
    names = ["epoch", "train/heat_loss", "metrics/distance", "metrics/PCK", "val/heat_loss"]
    assert [list(row)[:5] for row in rows(trained)] == [names] * 2
    files = {path.name for path in trained.iterdir()}
    assert {"points.csv", "labels.csv", "keypoints.jpg", "train_batch0.jpg", "results.png"} <= files
    settings = read_yaml(trained / "settings.yaml")
    assert (settings["task_file"], settings["imgsz"], settings["hyperparameters"]["fliplr"]) == (str(package), 64, 0.5)
    weights = read_weights(trained / "weights" / "last.pt")
    assert (weights.task, weights.settings["task_file"]) == ("keypoints", str(package))


def as_points(folder: Path) -> list[list[str]]:
    with open(folder / "points.csv", encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_the_same_bytes_on_one_and_two_processes(
    run_script: RunScript, package: Path, keypoints: Path, trained: Path
) -> None:
    """When it is resumed, the hyperparameters are compared with the package's."""

    def train(project: Path, *flags: str, **more: Any) -> str:
        return run_script(*train_flags(package, keypoints, project, *flags), OMP_NUM_THREADS="1", **more)

    killed_and_moved(train, run_script, trained, "--hyp", str(package / "hyp.yaml"))
    assert as_points(trained.with_name("killed")) == as_points(trained)


def test_one_process_writes(
    user: None, on_processes: OnProcesses, package: Path, keypoints: Path, trained: Path, tmp_path: Path
) -> None:
    flags = ("--weights", str(trained), "--task-file", str(package), "--data", str(keypoints), "--device", "cpu")
    project = str(tmp_path / "runs")
    first, second = on_processes(2, opened_files, val.main, (*flags, "--workers", "0", "--project", project), project)
    assert any("points.csv" in name for name in first)
    assert second == []


def test_the_other_scripts(user: None, trained: Path, package: Path, keypoints: Path, tmp_path: Path) -> None:
    """The weights name the task, and so does the file that is exported."""
    best, last = (Path(shutil.copy(trained / "weights" / name, tmp_path)) for name in ("best.pt", "last.pt"))
    how: dict[str, Any] = {"project": tmp_path, "device": "cpu"}
    with another_process():
        (exported,) = export.run(weights=best, task_file=package)
    validated = {}
    for name, weights, more in (("one", best, {}), ("two", [best, last], {"augment": True}), ("file", exported, {})):
        with another_process():
            val.run(weights=weights, data=keypoints, name=name, batch_size=1, workers=0, noplots=True, **how, **more)
        validated[name] = as_points(tmp_path / name)
        assert [row[:2] for row in validated[name]] == [row[:2] for row in as_points(trained)]
    assert validated["one"] == as_points(trained)
    for one, row in zip(validated["file"][1:], as_points(trained)[1:], strict=True):
        assert float(one[2]) == pytest.approx(float(row[2]), abs=0.1)  # a cell may be on the edge of two
    with another_process():
        source = keypoints.parent / "images" / "val"
        keep: dict[str, Any] = {"save_txt": True, "save_csv": True, "save_crop": True}
        detect.run(weights=best, source=source, name="found", conf_thres=0.001, **keep, **how)
    found = tmp_path / "found"
    assert len(list(found.glob("*.png"))) == len(list((found / "labels").iterdir())) == VAL_IMAGES
    assert {path.name for path in (found / "crops").iterdir()} == set(COLOURS)


def test_another_user(
    user: None, trained: Path, package: Path, keypoints: Path, call_main: CallMain, tmp_path: Path
) -> None:
    """A file's code is not run before they have named it; a training from these weights must name it always."""
    weights, source = trained / "weights" / "best.pt", keypoints.parent / "images" / "val" / "00.png"
    how: dict[str, Any] = {"weights": weights, "project": tmp_path, "device": "cpu"}
    for script, more in ((detect, {"source": source}), (val, {"data": keypoints})):
        with another_process(), pytest.raises(UserError, match=f"--task-file {package}"):
            script.run(**how, **more)
    for flags in (("--resume", str(trained), "--hyp", "low"), ("--weights", str(weights), "--data", str(keypoints))):
        with another_process():
            code, printed = call_main("train.py", *flags, "--device", "cpu", "--project", str(tmp_path))
        assert (code, "--task-file" in printed) == (1, True)
    for more in ({"task_file": package}, {}):
        with another_process():
            detect.run(**how, **more, source=source)


# What a task does wrong


def wrong(real: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """Return a copy of an object, of a class `Wrong`, whose method returns the changed result."""

    def changed(self: Any, *arguments: Any) -> Any:
        return change(getattr(type(real), method)(self, *arguments))

    other = copy.copy(real)
    other.__class__ = type("Wrong", (type(real),), {method: changed})
    return other


# By the part that does it: the method, and what it returns instead.
WRONG = {
    "fewer predictions": ("postprocess", "__call__", lambda made: made[1:]),
    "an image twice": ("postprocess", "__call__", lambda made: [replace(one, image=0) for one in made]),
    "fewer records": ("metrics", "update", lambda made: made[1:]),
    "other metrics": ("metrics", "summarise", lambda made: replace(made, metrics={"PCK": 0.5})),
    "no metric": ("metrics", "summarise", lambda made: replace(made, metrics=dict.fromkeys(made.metrics))),
    "text as a metric": ("metrics", "summarise", lambda made: replace(made, metrics={**made.metrics, "more": "0.5"})),
    "no fitness": ("metrics", "summarise", lambda made: replace(made, fitness=None)),
    "another image": ("items", "__getitem__", lambda made: (*made[:2], made[2]._replace(image=made[2].image + 1))),
    "negative counts": ("criterion", "__call__", lambda terms: replace(terms, counts=-terms.counts)),
    "sums without parts": ("criterion", "__call__", lambda terms: replace(terms, sums=terms.sums[0])),
    "no terms": ("criterion", "__call__", lambda terms: terms.sums.sum()),
    "two objectives": ("criterion", "objective", lambda scalar: scalar.expand(2)),
}


def refusals_of(parts: Parts) -> dict[str, str]:
    evaluate, real = parts.evaluate, parts.evaluate.loader
    (shares,) = islice(parts.loader, 1)

    def one_batch() -> Generator[Any, None, None]:
        yield shares

    def work(part: str, method: str, change: Callable[[Any], Any]) -> None:
        if part == "criterion":
            parts._replace(criterion=wrong(parts.criterion, method, change)).take_steps(one_batch())
        elif part == "metrics":
            replace(evaluate, metrics=wrong(evaluate.metrics, method, change))([parts.steps.ema.model])
        elif part == "items":
            items = wrong(real.dataset, method, change)
            loader = torch.utils.data.DataLoader(items, batch_sampler=real.batch_sampler, collate_fn=real.collate_fn)
            replace(evaluate, loader=loader)([parts.steps.ema.model])
        else:
            inference = replace(evaluate.inference, postprocess=wrong(evaluate.inference.postprocess, method, change))
            replace(evaluate, inference=inference)([parts.steps.ema.model])

    errors = {}
    for fault, how in WRONG.items():
        with pytest.raises(UserError) as caught:
            work(*how)
        errors[fault] = str(caught.value)
    batches = type(parts.sampler)
    parts.sampler.__class__ = type("Short", (batches,), {"__iter__": lambda self: islice(batches.__iter__(self), 2)})
    with pytest.raises(UserError) as caught:
        parts.train_one_epoch()
    return {**errors, "fewer batches": str(caught.value)}


def test_what_a_task_returns_is_checked(user: None, package: Path, keypoints: Path, tmp_path: Path) -> None:
    """Each fault is one sentence that names the class."""
    flags = train_flags(package, keypoints, tmp_path, "--noplots", "--no-wandb", "--logical-processes", "1")
    with another_process():
        errors = within(flags[1:], refusals_of)
    reset_accelerate()
    assert errors.pop("fewer batches").startswith("keypoints.data.KeypointItems gave 2 of 5 batches")
    named = {fault: error.partition(" ")[0].rpartition(".")[2] for fault, error in errors.items()}
    assert named == dict.fromkeys(WRONG, "Wrong")


STOP = """
KeypointItems.right = KeypointItems.__getitem__

def stop(self, sample):
    if sample.position == 9:
        raise StopIteration
    return self.right(sample)

KeypointItems.__getitem__ = stop
"""


def test_what_a_task_raises_ends_the_run(run_script: RunScript, keypoints: Path, tmp_path: Path) -> None:
    """With its file and exit code 1, also what would end a loop without an error."""
    package = copied(tmp_path, "data.py", STOP)
    flags = train_flags(package, keypoints, tmp_path, "--workers", "1")
    printed = run_script(*flags, fails=True, OMP_NUM_THREADS="1")
    refused(printed, f"error: {package / 'data.py'}, line ")
    assert "Traceback" not in printed
