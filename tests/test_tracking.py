"""What trackers get: whole runs, whose W&B files and TensorBoard events are read back."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import wandb_files
from tests.conftest import RECIPE, ROOT, RunScript
from tests.curves import identical, rows
from tests.wandb_files import Logged
from tests.wandb_server import serve
from utils.files import read_yaml

Train = Callable[..., str]
UNSET = ("env", "-u", "WANDB_MODE", sys.executable)  # as most people have it
PICTURES = [
    *("labels", "train_batch0", "train_batch1", "train_batch2", "val_batch0_labels", "val_batch0_pred", "results"),
    *("PR_curve", "P_curve", "R_curve", "F1_curve", "confusion_matrix", "confusion_matrix_counts"),
]
STEP = [
    *("box_loss", "obj_loss", "cls_loss", "epoch", "gradient_norm", "data_wait"),
    *("lr0", "lr1", "lr2", "momentum0", "momentum1", "momentum2"),
    *("images_per_second", "images_per_second_per_device"),
]


@pytest.fixture(scope="module")
def train(run_script: RunScript, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Trains two epochs of seven batches of four images, eight optimizer steps, into a project; what it printed."""
    recipe = tmp_path_factory.mktemp("hyp") / "often.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "nbs": 8}))
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(recipe))
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "4", "--workers", "1", "--device", "cpu", "--noautoanchor")

    def run(project: Path, *more: str, fault: str = "", **given: Any) -> str:
        planted = {"FAULT": fault, "PYTHONPATH": str(ROOT / "tests" / "faults"), "OMP_NUM_THREADS": "1"}
        return run_script("train.py", *what, *how, "--project", str(project), *more, **{**planted, **given})

    return run


@pytest.fixture(scope="module")
def tracked(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of two processes with everything, whose user has no key; what it printed."""
    project = tmp_path_factory.mktemp("tracked")
    flags = (
        "--wandb-project",
        "shapes",
        "--wandb-group",
        "small",
        "--wandb-tags",
        "one",
        "two",
        "--wandb-name",
        "first",
    )
    uploads = ("--upload-model", "--save-period", "1", "--upload-dataset", "--bbox-interval", "1", "--max-images", "3")
    home = {"HOME": str(project), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    more = ("--processes", "2", "--log-with", "all", *flags, *uploads)
    return project / "exp", train(project, *more, launcher=UNSET, plots=True, **home)


def only(folder: Path) -> Logged:
    """The one W&B run of a folder."""
    (file,) = wandb_files.runs(folder)
    return wandb_files.read(file)


def epochs(logged: Logged) -> list[dict[str, Any]]:
    return [row for row in logged.rows if "train/box_loss" in row]


def test_one_run_of_two_processes(tracked: tuple[Path, str]) -> None:
    folder, printed = tracked
    run = only(folder)
    assert (run.project, run.group, run.name, sorted(run.tags)) == ("shapes", "small", "first", ["one", "two"])
    assert run.code == 0
    assert printed.count("wandb sync") == 1  # the hint
    assert "no key" in printed
    assert "warning" not in printed
    assert run.id == read_yaml(folder / "settings.yaml")["wandb_id"]


def test_its_config(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    config, settings = only(folder).config, read_yaml(folder / "settings.yaml")
    assert {key: config[key] for key in settings} == json.loads(json.dumps(settings))
    assert config["hyperparameters"]["lr0"] == RECIPE["lr0"]
    assert config["world_size"] == 2
    assert len(config["devices"]) == 2
    assert len(config["git_commit"].rstrip("+")) == 40
    assert config["command"].split()[0].endswith("train.py")
    assert "--bbox-interval 1" in config["command"]
    assert {split: config["dataset"][split]["count"] for split in ("train", "val")} == {"train": "28", "val": "8"}
    assert len(config["dataset"]["train"]["labels"]) == 64


def test_its_epochs_are_the_rows_of_results_csv(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    run = only(folder)
    for actual, expected in zip(epochs(run), rows(folder), strict=True):
        assert {key: actual[key] for key in expected} == pytest.approx(expected, rel=1e-8)
        assert {f"class/{kind}/disc" for kind in ("AP", "AP50")} <= {*actual}
        assert actual["epoch/validation_seconds"] > 0
        assert 0 <= actual["epoch/data_wait"] <= 1
    best = max(rows(folder), key=lambda row: 0.1 * row["metrics/mAP_0.5"] + 0.9 * row["metrics/mAP_0.5:0.95"])
    for name in ("mAP_0.5", "mAP_0.5:0.95", "precision", "recall"):
        assert run.summary[f"best/{name}"] == pytest.approx(best[f"metrics/{name}"], rel=1e-8)
    assert run.summary["best/epoch"] == best["epoch"]
    assert run.axes["metrics/*"] == run.axes["class/*"] == "epoch"


def test_its_steps(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    run = only(folder)
    points = [row for row in run.rows if row["_step"]]  # labels.jpg may be drawn before the first step: at step 0
    assert run.column("step") == [row["_step"] for row in points] == list(range(1, 9))
    assert all({f"step/{name}" for name in STEP} <= {*row} for row in points)
    assert all("step" not in row for row in run.rows if row not in points)
    assert run.axes["step/*"] == "step"
    # An epoch has steps of two batches and a last one of one batch: their means are the epoch's.
    for number, row in enumerate(rows(folder)):
        steps = run.column("step/box_loss")[4 * number : 4 * number + 4]
        assert (2 * sum(steps[:3]) + steps[3]) / 7 == pytest.approx(row["train/box_loss"], rel=1e-5)
    for row in points:
        assert row["step/images_per_second_per_device"] == pytest.approx(row["step/images_per_second"] / 2)
        assert row["step/gradient_norm"] > 0
    assert run.column("step/lr0")[3::4] == pytest.approx([row["x/lr0"] for row in rows(folder)], rel=1e-8)


def test_its_pictures(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    run = only(folder)
    logged = {key.split("/")[1] for row in run.rows for key in row if key.startswith("pictures/")}
    assert logged == {*PICTURES}
    assert {file.stem for file in folder.iterdir() if file.suffix in (".jpg", ".png")} == {*PICTURES}
    files = wandb_files.runs(folder)[0].parent / "files"
    assert all((files / run.summary[f"pictures/{name}/path"]).stat().st_size > 1000 for name in PICTURES)
    shown = [row for row in run.rows if "examples/validation/captions" in row]
    assert len(shown) == 2
    assert shown[0]["examples/validation/captions"] == shown[1]["examples/validation/captions"]
    assert len(shown[0]["examples/validation/captions"]) == 3
    truth = [boxes["ground_truth"]["path"] for boxes in shown[0]["examples/validation/all_boxes"]]
    drawn = json.loads((files / truth[0]).read_text())
    assert drawn["box_data"]
    assert drawn["class_labels"]["0"] == "disc"
    assert all(0 <= side <= 1 for box in drawn["box_data"] for side in box["position"].values())


def test_its_artifacts(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    run = only(folder)
    logged = [(artifact.type, {*artifact.aliases}) for artifact in run.artifacts]
    assert logged[0] == ("dataset", {"latest"})
    assert ("model", {"latest", "epoch-1", "best"}) in logged or ("model", {"latest", "epoch-1"}) in logged
    assert any("best" in aliases for kind, aliases in logged if kind == "model")
    contents = run.artifacts[0].manifest.contents
    assert (
        sum(entry.ref.startswith("file://") for entry in contents) == 2 * 36
    )  # images and labels, none of them copied
    assert [entry.path for entry in contents if not entry.ref] == ["small.yaml"]


def test_tensorboard_has_the_same(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    events = tensorboard(folder)
    for name in rows(folder)[0]:
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx([row[name] for row in rows(folder)], rel=1e-6)
    assert [event.step for event in events.Scalars("step/box_loss")] == list(range(1, 9))
    assert {f"pictures/{name}" for name in PICTURES} == {*events.Tags()["images"]}


def tensorboard(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    return accumulator.EventAccumulator(str(folder), {"scalars": 0, "images": 0}).Reload()


@pytest.fixture(scope="module")
def plain(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process without trackers."""
    project = tmp_path_factory.mktemp("plain")
    train(project, "--log-with", "none", WANDB_MODE="offline")
    assert not (project / "exp" / "wandb").exists()
    return project / "exp"


def test_a_killed_run_goes_on_in_the_same_run(train: Train, run_script: RunScript, plain: Path, tmp_path: Path) -> None:
    """Killed after its sixth step with a state of its fourth, and then in its last validation."""
    more = ("--log-with", "all")
    train(
        tmp_path,
        *more,
        fault="SIGKILL:utils.distributed.graceful_stop:GracefulStop.after:6",
        code=-signal.SIGKILL,
        WANDB_MODE="offline",
    )
    planted = "SIGKILL:models.tasks.detection.metrics:DetectionMetrics.summarise:1"
    fault = {"FAULT": planted, "PYTHONPATH": str(ROOT / "tests" / "faults")}
    again = ("--resume", "--project", str(tmp_path))
    run_script("train.py", *again, WANDB_MODE="offline", OMP_NUM_THREADS="1", code=-signal.SIGKILL, **fault)
    run_script("train.py", *again, WANDB_MODE="offline", OMP_NUM_THREADS="1")
    identical(tmp_path / "exp", plain)
    parts = [wandb_files.read(file) for file in wandb_files.runs(tmp_path / "exp")]
    assert len(parts) == 3
    assert len({part.id for part in parts}) == 1
    assert [part.code for part in parts] == [1, 1, 0]
    logged = [row for part in parts for row in part.rows]
    assert [row["step"] for row in logged if "step" in row] == list(range(1, 9))
    for actual, expected in zip((row for row in logged if "train/box_loss" in row), rows(plain), strict=True):
        assert {key: actual[key] for key in expected} == pytest.approx(expected, rel=1e-8)
    events = tensorboard(tmp_path / "exp")
    assert [event.step for event in events.Scalars("step/lr0")] == list(range(1, 9))
    assert [event.step for event in events.Scalars("val/box_loss")] == [4, 8]


@contextmanager
def server(answers: bool) -> Iterator[str]:
    """An address on loopback where nobody listens, or where somebody listens who never says a word."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if answers:
            taken.listen(50)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_server_that_cannot_be_reached(answers: bool, train: Train, plain: Path, tmp_path: Path) -> None:
    with server(answers) as address:
        key = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, "WANDB_INIT_TIMEOUT": "3"}
        printed = train(tmp_path, launcher=UNSET, **key)
    identical(tmp_path / "exp", plain)
    assert printed.count("warning") == 1
    assert "warning: W&B: " in printed
    assert printed.count("wandb sync") == 1
    run = only(tmp_path / "exp")
    assert [row["epoch"] for row in epochs(run)] == [0, 1]
    assert run.code == 0


def test_online_and_killed_and_online_again(train: Train, run_script: RunScript, plain: Path, tmp_path: Path) -> None:
    """Against a server on loopback: one run, in which every step and every epoch is once."""
    with serve() as server:
        online = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.address, "WANDB_MODE": "online"}
        killed = train(
            tmp_path,
            fault="SIGKILL:utils.distributed.graceful_stop:GracefulStop.after:6",
            code=-signal.SIGKILL,
            **online,
        )
        again = ("--resume", "--project", str(tmp_path))
        printed = run_script("train.py", *again, OMP_NUM_THREADS="1", **online)
    identical(tmp_path / "exp", plain)
    name = read_yaml(tmp_path / "exp" / "settings.yaml")["wandb_id"]
    assert f"W&B: {server.address}/me/p/runs/{name}" in printed
    assert "warning" not in killed + printed
    assert server.runs == {name}
    assert server.config["epochs"]["value"] == 2
    assert [row["step"] for row in server.rows if "step" in row] == list(range(1, 9))
    for actual, expected in zip((row for row in server.rows if "train/box_loss" in row), rows(plain), strict=True):
        assert {key: actual[key] for key in expected} == pytest.approx(expected, rel=1e-8)
    assert any(file.startswith("media/images/examples/") for file in server.files)
    assert server.code == 0


def test_wandb_that_breaks_or_is_killed(train: Train, plain: Path, tmp_path: Path) -> None:
    for name, fault in (
        ("breaks", "raise:utils.tracking.wandb_process:Session.log:3"),
        ("dies", "SIGKILL:utils.tracking.wandb_process:Session.log:3"),
    ):
        printed = train(tmp_path, "--name", name, fault=fault, WANDB_MODE="offline")
        identical(tmp_path / name, plain)
        assert printed.count("warning") == (name == "breaks")


def test_a_run_that_is_asked_to_end_closes_its_run(train: Train, tmp_path: Path) -> None:
    """By SIGTERM, after its third step: what was logged is there, and training says how to go on."""
    printed = train(
        tmp_path, fault="SIGTERM:utils.distributed.graceful_stop:GracefulStop.after:3", code=143, WANDB_MODE="offline"
    )
    assert "go on with --resume" in printed
    run = only(tmp_path / "exp")
    assert run.code == 0
    assert run.column("step")[:3] == [1, 2, 3]
    assert any("go on with --resume" in line for line in run.lines)


def test_quiet_and_verbose(train: Train, tmp_path: Path) -> None:
    printed = train(tmp_path, "--quiet")
    lines = printed.splitlines()
    assert lines[0].startswith("best epoch: ")
    assert lines[1].split()[0] == "Class"
    assert lines[2].split()[0] == "all"
    assert lines[3:] == [f"results in {tmp_path / 'exp'}"]
    printed = train(tmp_path, "--verbose", "--name", "more", "--epochs", "1")
    assert "process 0: " in printed
    assert sum(line.split()[:1] == ["disc"] for line in printed.splitlines()) == 2  # of the epoch, and at the end


def test_noplots_draws_none(plain: Path) -> None:
    assert not [file for file in plain.rglob("*") if file.suffix in (".jpg", ".png")]


def test_tensorboard_alone(train: Train, tmp_path: Path) -> None:
    train(tmp_path, "--log-with", "tensorboard", "--epochs", "1", launcher=UNSET)
    assert not (tmp_path / "exp" / "wandb").exists()
    assert list((tmp_path / "exp").glob("events.out.tfevents*"))
