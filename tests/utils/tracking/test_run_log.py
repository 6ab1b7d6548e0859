"""The values that a run sends to its trackers, and when."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import ROOT
from utils.checkpoint.training_state import Progress
from utils.config.flags import TrainOptions
from utils.summary import Box, Example, Summary
from utils.tracking.run_log import LOGGED_IMAGES, RunLog, git_commit, wandb_run_id


class Recorder:
    """A tracker that records its calls."""

    def __init__(self) -> None:
        self.examples: list[tuple[Any, ...]] = []
        self.artifacts: list[tuple[Any, ...]] = []
        self.documents: list[tuple[Any, ...]] = []

    def log_documents(self, *arguments: Any) -> None:
        self.documents.append(arguments)

    def log_examples(self, *arguments: Any) -> None:
        self.examples.append(arguments)

    def log_artifact(self, name: str, kind: str, aliases: Any, **content: Any) -> None:
        self.artifacts.append((name, kind, [*aliases], content))


def some_examples(count: int = 8) -> list[Example]:
    box = Box(1, 0.5, (0.0, 0.25, 0.5, 1.0))
    return [Example(f"{k}.jpg", k, (4, 4), [], [box]) for k in range(count)]


def shown(image: int, side: int) -> np.ndarray:
    return np.full((side, side, 3), image, np.uint8)


SUMMARY = Summary({"mAP_0.5": 0.5}, 0.4, [], [], by_class={"AP": {"cat": 0.25}})


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def make_log(recorder: Recorder | None, folder: Path = Path("runs/exp"), **options: Any) -> RunLog:
    points: list[tuple[Any, int]] = []
    trackers = [recorder] if recorder else []
    run = SimpleNamespace(
        trackers=trackers,
        path=folder,
        step=7,
        log_point=lambda values, step: points.append((values, step)),
        points=points,
    )
    return RunLog(run, TrainOptions(**options), "abc", shown, ["cat", "dog"])  # type: ignore[arg-type]


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
def test_the_epochs_with_examples(epochs: int, interval: int, expected: list[int], recorder: Recorder) -> None:
    log = make_log(recorder, epochs=epochs, bbox_interval=interval)
    for epoch in range(epochs):
        log.log_examples(some_examples, epoch)
    assert [epoch for *_, epoch in recorder.examples] == expected


@pytest.mark.parametrize(("count", "step"), [(8, 1), (2 * LOGGED_IMAGES, 2)])
def test_the_same_examples_are_logged_each_time(count: int, step: int, recorder: Recorder) -> None:
    log = make_log(recorder, epochs=2)
    for epoch in (0, 1):
        log.log_examples(lambda: some_examples(count), epoch)
    (key, first, reader, names, at, _), (_, second, *_) = recorder.examples
    assert first == second == some_examples(count)[::step]
    assert (key, reader, names, at) == ("examples/validation", shown, ["cat", "dog"], 7)


def test_nothing_is_logged_without_examples(recorder: Recorder) -> None:
    make_log(recorder).log_examples(list, 0)
    assert recorder.examples == []


def test_examples_are_made_only_if_they_are_logged(recorder: Recorder) -> None:
    calls: list[int] = []

    def examples() -> list[Example]:
        calls.append(1)
        return some_examples()

    make_log(None).log_examples(examples, 0)
    log = make_log(recorder, bbox_interval=2)
    log.log_examples(examples, 1)
    assert calls == []
    log.log_examples(examples, 2)
    assert len(calls) == len(recorder.examples) == 1


def test_the_point_of_an_epoch() -> None:
    """Epochs count from 1."""
    log = make_log(None)
    progress = Progress(step=12, best=0.4, best_epoch=1, summary=SUMMARY)
    log.log_epoch({"epoch": 2, "train/loss": 0.5}, {"train_seconds": 3.0}, SUMMARY, progress)
    ((values, step),) = log.run.points  # type: ignore[attr-defined]
    assert step == 12
    assert values == {
        **{"epoch": 3, "train/loss": 0.5, "epoch/train_seconds": 3.0, "class/AP/cat": 0.25},
        **{"best/epoch": 2, "best/fitness": 0.4, "best/mAP_0.5": 0.5},
    }
    log.log_epoch({"epoch": 0}, {}, None, Progress())
    assert log.run.points[1] == ({"epoch": 1}, 0)  # type: ignore[attr-defined]


def test_the_last_weights_are_uploaded(recorder: Recorder) -> None:
    log = make_log(recorder, upload_model=True)
    log.log_results(Progress(epoch=3, best_epoch=1))
    log.log_results(Progress(epoch=3, best_epoch=2))
    uploads = [
        (kind, aliases, [file.name for file in content["files"]]) for _, kind, aliases, content in recorder.artifacts
    ]
    assert uploads == [
        ("model", ["best", "epoch-1"], ["best.pt"]),
        ("model", ["latest", "epoch-2"], ["last.pt"]),
        ("model", ["latest", "best", "epoch-2"], ["best.pt"]),
    ]
    assert {name for name, *_ in recorder.artifacts} == {"run_abc_model"}


def test_uploaded_weights_say_what_they_are(recorder: Recorder, tmp_path: Path) -> None:
    """The epoch's metrics, the data set and the command."""
    log = make_log(recorder, tmp_path, upload_model=True)
    log.metadata = {"dataset": {"yaml": "a"}, "command": "train.py"}
    progress = Progress(epoch=3, best=0.4, best_epoch=1, summary=SUMMARY)
    log.log_epoch({"epoch": 2}, {}, replace(SUMMARY, metrics={"mAP_0.5": 0.25}), progress)
    log.log_results(progress)
    best, last = [content for *_, content in recorder.artifacts]
    common = {"dataset": {"yaml": "a"}, "command": "train.py"}
    assert best["metadata"] == {**common, "epoch": 1, "metrics": {"mAP_0.5": 0.5}}
    assert last["metadata"] == {**common, "epoch": 2, "metrics": {"mAP_0.5": 0.25}}


def test_the_text_files_of_the_best_epoch(recorder: Recorder, tmp_path: Path) -> None:
    """The table of the classes whenever an epoch is the best, the curves at the end."""
    for name in ("classes.csv", "curves.csv", "val_boxes.csv"):
        (tmp_path / name).write_text(f"{name}\n")
    log = make_log(recorder, tmp_path)
    for epoch, best in ((0, 0), (1, 0), (2, 2)):
        log.log_epoch({"epoch": epoch}, {}, SUMMARY, Progress(epoch=epoch, step=epoch, best=0.4, best_epoch=best))
    log.log_results(Progress(epoch=3, step=9, best=0.4, best_epoch=2))
    table = {"classes.csv": "classes.csv\n"}
    assert recorder.documents == [(table, 0, 0), (table, 2, 2), ({"curves.csv": "curves.csv\n"}, 9, 2)]


def test_nothing_is_uploaded_without_the_flags(recorder: Recorder, tmp_path: Path) -> None:
    log = make_log(recorder)
    log.log_results(Progress(epoch=3, best_epoch=1))
    log.upload_dataset(tmp_path / "a.yaml", dict, {})
    make_log(recorder, upload_model=True).upload([], "latest")
    assert recorder.artifacts == []


def test_a_data_set_as_references(recorder: Recorder, tmp_path: Path) -> None:
    for name in ("a/0.jpg", "b/0.jpg", "0.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    files = {"train": [tmp_path / "a/0.jpg", tmp_path / "b/0.jpg"], "labels": [tmp_path / "0.txt", tmp_path / "1.txt"]}
    make_log(recorder, upload_dataset=True).upload_dataset(tmp_path / "my set.yaml", lambda: files, {"count": 2})
    ((name, kind, _, content),) = recorder.artifacts
    assert (name, kind, content["metadata"]) == ("my-set", "dataset", {"count": 2})
    references = [(Path(path).relative_to(tmp_path).as_posix(), name) for path, name in content["references"]]
    assert references == [("a/0.jpg", "train/a/0.jpg"), ("b/0.jpg", "train/b/0.jpg"), ("0.txt", "labels/0.txt")]


class Run:
    """The methods of a run that `RunLog.start` calls."""

    def __init__(self, folder: Path, devices: list[str]) -> None:
        self.path, self.devices, self.step, self.trackers = folder, devices, 0, []

    def start_trackers(self, make: Any, config: dict[str, Any], step: int) -> None:
        self.trackers, self.config, self.step = make(), config, step

    def log_point(self, values: Any, step: int) -> None: ...


@pytest.mark.parametrize(("uploads", "seconds"), [(False, 60.0), (True, 900.0)])
def test_the_start_of_a_run(
    uploads: bool, seconds: float, installed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--name", "a b"])
    run = Run(tmp_path / "exp", ["cpu", "cpu"])
    options = TrainOptions(log_with="all", upload_model=uploads)
    RunLog(run, options, "abc", shown, []).start({"lr0": 0.1}, {"yaml": "a"}, {"progress": Progress(step=12).state()})
    assert [tracker.name for tracker in run.trackers] == ["wandb", "tensorboard"]
    assert run.trackers[0].timeout == seconds
    assert run.step == 12
    assert {**run.config, "git_commit": ""} == {
        **{"lr0": 0.1, "git_commit": "", "command": "train.py --name 'a b'", "world_size": 2},
        **{"devices": ["cpu", "cpu"], "dataset": {"yaml": "a"}},
    }


def test_no_tracker_and_a_warning(installed: set[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    installed.clear()
    run = Run(tmp_path, ["cpu"])
    RunLog(run, TrainOptions(log_with="wandb"), "abc", shown, []).start({}, {}, None)
    assert run.trackers == []
    assert run.step == 0
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["warning: wandb is not installed"]


def test_the_id_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "sweep")
    assert wandb_run_id() == "sweep"


def test_a_new_id_is_random() -> None:
    ids = {wandb_run_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(id.isalnum() and len(id) == 8 for id in ids)


def test_the_commit_of_the_code() -> None:
    ended = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert git_commit().rstrip("+") == ended.stdout.strip()
