"""What trackers are told of a run, and when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from utils.checkpoint.progress import Progress
from utils.config.options import TrainOptions
from utils.summary import Box, Example, Summary
from utils.tracking.run_log import Dashboard, wandb_arguments


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.examples_of: list[tuple[Any, ...]] = []
        self.artifacts: list[tuple[Any, ...]] = []

    def examples(self, *told: Any) -> None:
        self.examples_of.append(told)

    def artifact(self, name: str, kind: str, aliases: Any, **content: Any) -> None:
        self.artifacts.append((name, kind, [*aliases], content))


class Task:
    def __init__(self) -> None:
        self.names = {0: "cat", 1: "dog"}

    def examples(self, summary: Summary) -> list[Example]:
        box = Box(1, 0.5, (0.0, 0.25, 0.5, 1.0))
        return [Example(f"{k}.jpg", k, (4, 4), [], [box]) for k in range(8)]


SUMMARY = Summary({"mAP_0.5": 0.5}, 0.4, [], [], by_class={"AP": {"cat": 0.25}})


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def dashboard(recorder: Recorder | None, folder: Path = Path("runs/exp"), **options: Any) -> Dashboard:
    points: list[tuple[Any, int]] = []
    trackers = [recorder] if recorder else []
    run = SimpleNamespace(
        trackers=trackers,
        path=folder,
        step=7,
        log_point=lambda values, step: points.append((values, step)),
        points=points,
    )
    images = [folder / f"{k}.jpg" for k in range(8)]
    return Dashboard(run, Task(), TrainOptions(wandb_id="abc", **options), images)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("epochs", "interval", "expected"),
    [
        (3, -1, [0, 1, 2]),
        (30, -1, [0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 29]),
        (5, 2, [0, 2, 4]),
        (6, 4, [0, 4, 5]),
        (5, 0, []),
    ],
)
def test_when_examples_are_shown(epochs: int, interval: int, expected: list[int], recorder: Recorder) -> None:
    mine = dashboard(recorder, epochs=epochs, bbox_interval=interval)
    for epoch in range(epochs):
        mine.examples(SUMMARY, epoch)
    assert [epoch for *_, epoch in recorder.examples_of] == expected


@pytest.mark.parametrize(("most", "shown"), [(2, [0, 4]), (16, list(range(8)))])
def test_the_same_examples_every_time(most: int, shown: list[int], recorder: Recorder) -> None:
    mine = dashboard(recorder, epochs=2, max_images=most)
    mine.examples(SUMMARY, 0)
    mine.examples(SUMMARY, 1)
    (key, first, names, step, _), (_, second, *_) = recorder.examples_of
    assert first == second
    assert [image["file"] for image in first] == [f"runs/exp/{k}.jpg" for k in shown]
    assert first[0]["found"] == [{"label": 1, "confidence": 0.5, "xyxy": (0.0, 0.25, 0.5, 1.0)}]
    assert (key, names, step) == ("examples/validation", ["cat", "dog"], 7)


def test_nothing_to_show(recorder: Recorder) -> None:
    dashboard(recorder, max_images=0).examples(SUMMARY, 0)
    dashboard(recorder).examples(None, 0)
    assert recorder.examples_of == []
    mine = dashboard(None)
    mine.task = None  # nobody looks, so it is not asked
    mine.examples(SUMMARY, 0)


def test_the_point_of_an_epoch() -> None:
    mine = dashboard(None)
    progress = Progress(step=12, best=0.4, best_epoch=1, summary=SUMMARY)
    mine.epoch({"epoch": 2, "train/loss": 0.5}, {"train_seconds": 3.0}, SUMMARY, progress)
    ((values, step),) = mine.run.points  # type: ignore[attr-defined]
    assert step == 12
    assert values == {
        **{"epoch": 2, "train/loss": 0.5, "epoch/train_seconds": 3.0, "class/AP/cat": 0.25},
        **{"best/epoch": 1, "best/fitness": 0.4, "best/mAP_0.5": 0.5},
    }
    mine.epoch({"epoch": 0}, {}, None, Progress())
    assert mine.run.points[1] == ({"epoch": 0}, 0)  # type: ignore[attr-defined]


def test_weights_at_the_end(recorder: Recorder) -> None:
    mine = dashboard(recorder, upload_model=True)
    mine.upload_last(Progress(epoch=3, best_epoch=1))
    mine.upload_last(Progress(epoch=3, best_epoch=2))
    found = [
        (kind, aliases, [file.name for file in content["files"]]) for _, kind, aliases, content in recorder.artifacts
    ]
    assert found == [
        ("model", ["best", "epoch-1"], ["best.pt"]),
        ("model", ["latest", "epoch-2"], ["last.pt"]),
        ("model", ["latest", "best", "epoch-2"], ["best.pt"]),
    ]
    assert {name for name, *_ in recorder.artifacts} == {"run_abc_model"}


def test_nothing_is_uploaded_unasked(recorder: Recorder, tmp_path: Path) -> None:
    mine = dashboard(recorder)
    mine.upload_last(Progress(epoch=3, best_epoch=1))
    mine.upload_dataset(tmp_path / "a.yaml", dict, {})
    dashboard(recorder, upload_model=True).upload([], "latest")
    assert recorder.artifacts == []


def test_a_data_set_as_references(recorder: Recorder, tmp_path: Path) -> None:
    for name in ("a/0.jpg", "b/0.jpg", "0.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = {"train": [tmp_path / "a/0.jpg", tmp_path / "b/0.jpg"], "labels": [tmp_path / "0.txt", tmp_path / "1.txt"]}
    dashboard(recorder, upload_dataset=True).upload_dataset(tmp_path / "my set.yaml", lambda: files, {"count": 2})
    ((name, kind, _, content),) = recorder.artifacts
    assert (name, kind, content["metadata"]) == ("my-set", "dataset", {"count": 2})
    found = [(Path(path).relative_to(tmp_path).as_posix(), where) for path, where in content["references"]]
    assert found == [("a/0.jpg", "train/a/0.jpg"), ("b/0.jpg", "train/b/0.jpg"), ("0.txt", "labels/0.txt")]


@pytest.mark.parametrize(
    ("options", "project", "name"),
    [
        ({}, "lockstep", "exp3"),
        ({"project": "runs/cats"}, "cats", "exp3"),
        ({"project": "runs/cats", "wandb_project": "mine", "wandb_name": "first"}, "mine", "first"),
    ],
)
def test_where_a_run_belongs(options: dict[str, Any], project: str, name: str) -> None:
    found = wandb_arguments(TrainOptions(wandb_id="abc", **options), Path("runs/train/exp3"))
    assert (found["project"], found["name"], found["id"]) == (project, name, "abc")
    assert (found["entity"], found["group"], found["tags"]) == (None, None, None)
