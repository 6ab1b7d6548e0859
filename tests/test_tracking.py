"""Whole runs with trackers; their W&B files and TensorBoard events are read."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from PIL import Image

from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData
from tests import wandb_files
from tests.conftest import RECIPE, RunScript, data_yaml
from tests.curves import identical, rows
from tests.faults.fault_points import planted
from tests.wandb_files import Logged
from tests.wandb_server import serve
from utils.files import ROOT, read_yaml

Train = Callable[..., str]
SHAPES = {"WANDB_PROJECT": "shapes", "WANDB_RUN_GROUP": "small"}
UNSET = {"WANDB_MODE": None}  # the usual environment
KILL_IN_STEP_6 = planted("SIGKILL", "optimizer step", 6)
PICTURES = [
    *("labels", "train_batch0", "train_batch1", "train_batch2", "val_batch0_labels", "val_batch0_pred", "results"),
    *("PR_curve", "P_curve", "R_curve", "F1_curve", "confusion_matrix"),
]
STEP = [
    *("box_loss", "obj_loss", "cls_loss", "epoch", "gradient_norm", "data_wait"),
    *("lr0", "lr1", "lr2", "momentum0", "momentum1", "momentum2"),
    *("images_per_second", "images_per_second_per_device", "mfu"),
]


@pytest.fixture(scope="module")
def train(run_script: RunScript, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Return a function that trains two epochs of seven batches, eight optimizer steps, and returns the output."""
    recipe = tmp_path_factory.mktemp("hyp") / "often.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "nbs": 8}))
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(recipe))
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "4", "--workers", "1", "--device", "cpu", "--noautoanchor")

    def run(project: Path, *flags: str, **variables: Any) -> str:
        variables = {"OMP_NUM_THREADS": "1", **variables}
        return run_script("train.py", *what, *how, "--project", str(project), *flags, **variables)

    return run


class Tracked(NamedTuple):
    """A run with all trackers: its folder, what it printed, its W&B run and files, and the rows of results.csv."""

    folder: Path
    printed: str
    run: Logged
    files: Path
    rows: list[dict[str, float]]


@pytest.fixture(scope="module")
def tracked(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A run of two processes with all trackers and uploads, without W&B's key."""
    project = tmp_path_factory.mktemp("tracked")
    flags = "--processes 2 --log-with wandb,tensorboard --profile 2:3"
    flags += " --upload-model --save-period 1 --upload-dataset --bbox-interval 1"
    variables = {"HOME": str(project), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_NOTES": "why", **SHAPES}
    variables |= {"WANDB_TAGS": "one,two", "WANDB_NAME": "first"}
    printed = train(project, *flags.split(), plots=True, **variables, **UNSET)
    files = wandb_files.runs(project / "exp")[0].parent / "files"
    return Tracked(project / "exp", printed, only(project / "exp"), files, rows(project / "exp"))


def only(folder: Path) -> Logged:
    """Return the only W&B run of a folder."""
    (file,) = wandb_files.runs(folder)
    return wandb_files.read(file)


def epochs(logged: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the logged values of the epochs, which must contain the rows of results.csv in `folder`, from epoch 1."""
    values = [row for row in logged if "train/box_loss" in row]
    for actual, row in zip(values, rows(folder), strict=True):
        expected = {**row, "epoch": row["epoch"] + 1}
        assert {key: actual[key] for key in expected} == pytest.approx(expected, rel=1e-8)
    return values


def test_two_processes_are_one_run(tracked: Tracked) -> None:
    """With the variables of W&B, the settings, the data set and the command."""
    run, printed = tracked.run, tracked.printed
    assert (run.project, run.group, run.name, sorted(run.tags)) == ("shapes", "small", "first", ["one", "two"])
    assert (run.job, run.notes, run.program, run.code) == ("train", "why", str(ROOT / "train.py"), 0)
    assert printed.count("wandb sync") == 1
    assert "not logged in" in printed
    assert "warning" not in printed
    config, settings = run.config, read_yaml(tracked.folder / "settings.yaml")
    assert run.id == settings["wandb_id"]
    for key in ("optimizer_args", "class_weights", "lr_factor"):
        assert settings["hyperparameters"].pop(key) == {}  # W&B leaves out what is empty
    assert {key: config[key] for key in settings} == json.loads(json.dumps(settings))
    assert (config["world_size"], len(config["devices"])) == (2, 2)
    assert run.commit == config["git_commit"].rstrip("+")
    assert "--bbox-interval 1" in config["command"]
    assert {split: config["dataset"][split]["count"] for split in ("train", "val")} == {"train": "28", "val": "8"}


def test_its_epochs_are_the_rows_of_results_csv(tracked: Tracked) -> None:
    """The summary has the best values, also of keys with dots; `best/fitness`, which sweeps optimise, is a number."""
    run = tracked.run
    for actual in epochs(run.rows, tracked.folder):
        assert {f"class/{kind}/disc" for kind in ("AP", "AP50")} <= {*actual}
        assert actual["epoch/validation_seconds"] > 0
        assert actual["epoch/mfu"] > 0
        assert 0 <= actual["epoch/data_wait"] <= 1
    with (tracked.folder / "speed.csv").open() as file:
        assert [float(row["mfu"]) > 0 for row in csv.DictReader(file)] == [True] * len(tracked.rows)
    best = max(tracked.rows, key=lambda row: 0.1 * row["metrics/mAP_0.5"] + 0.9 * row["metrics/mAP_0.5:0.95"])
    for name in ("mAP_0.5", "mAP_0.5:0.95", "precision", "recall"):
        assert run.summary[f"best/{name}"] == pytest.approx(best[f"metrics/{name}"], rel=1e-8)
    assert run.summary["best/epoch"] == best["epoch"] + 1
    assert isinstance(run.summary["best/fitness"], float)
    assert run.axes["metrics/mAP_0.5"] == run.axes["class/AP/disc"] == "epoch"
    for name in tracked.rows[0]:
        values = [row[name] for row in tracked.rows]
        if name.startswith("metrics/"):
            assert run.summary[name] == {"max": pytest.approx(max(values), rel=1e-8)}
        elif name.startswith("val/"):
            assert run.summary[name] == {"min": pytest.approx(min(values), rel=1e-8)}
    assert {key.split("/")[0] for key in run.hidden} == {"class"}


def test_its_profile(tracked: Tracked) -> None:
    """Of two steps, on both processes."""
    folder = tracked.folder / "profile"
    assert {file.name for file in folder.iterdir()} == {"profile_0.json", "profile_1.json"}
    assert "convolution" in tracked.printed.partition("profile of the optimizer steps 2 to 3")[2]
    for file in folder.iterdir():
        events = json.loads(file.read_text())["traceEvents"]
        assert len([event for event in events if "SGD.step" in event.get("name", "")]) == 2


# Keys of runs of another kind: on CUDA, in fp16, of a classifier, of a segmenter.
OTHER_KEYS = {"step/gpu_memory", "step/loss_scale", "step/loss", "class/precision/NAME", "class/recall/NAME"}


def test_the_page_names_every_key(tracked: Tracked) -> None:
    """Every logged key is in a table of docs/tracking.md, and every key of the tables was logged."""
    page = (ROOT / "docs" / "tracking.md").read_text().partition("\n### Logged keys\n")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| (`.*) \|.*\|$", page, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert named >= OTHER_KEYS
    keys = {key for row in tracked.run.rows for key in row if not key.startswith("_")} - {"step", "epoch"}

    def matches(name: str, key: str) -> bool:
        pattern = re.escape(name).replace(r"\.\.\.", ".+").replace("NAME", "[^/]+")
        return re.fullmatch(rf"{pattern}(/\w+)?", key) is not None  # W&B's own fields of a picture or table

    assert {key for key in keys if not any(matches(name, key) for name in named)} == set()
    assert {name for name in named - OTHER_KEYS if not any(matches(name, key) for key in keys)} == set()


def test_its_steps(tracked: Tracked) -> None:
    run = tracked.run
    points = [row for row in run.rows if row["_step"]]  # labels.jpg may be drawn before the first step: at step 0
    assert run.column("step") == [row["_step"] for row in points] == list(range(1, 9))
    assert all({f"step/{name}" for name in STEP} <= {*row} for row in points)
    assert run.axes["step/lr0"] == "step"
    # An epoch has steps of two batches and a last one of one batch: their means are the epoch's.
    for number, row in enumerate(tracked.rows):
        steps = run.column("step/box_loss")[4 * number : 4 * number + 4]
        assert (2 * sum(steps[:3]) + steps[3]) / 7 == pytest.approx(row["train/box_loss"], rel=1e-5)
    for row in points:
        assert row["step/images_per_second_per_device"] == pytest.approx(row["step/images_per_second"] / 2)
        assert row["step/gradient_norm"] > 0
    assert run.column("step/lr0")[3::4] == pytest.approx([row["x/lr0"] for row in tracked.rows], rel=1e-8)


def test_its_pictures(tracked: Tracked) -> None:
    folder, run = tracked.folder, tracked.run
    logged = {key.split("/")[1] for row in run.rows for key in row if key.startswith("pictures/")}
    assert logged == {*PICTURES} == {file.stem for file in folder.iterdir() if file.suffix in (".jpg", ".png")}
    assert all((tracked.files / run.summary[f"pictures/{name}/path"]).stat().st_size > 1000 for name in PICTURES)
    first, second = [row for row in run.rows if "examples/validation/captions" in row]
    assert first["examples/validation/captions"] == second["examples/validation/captions"]
    assert len(first["examples/validation/captions"]) == 8
    file = tracked.files / first["examples/validation/all_boxes"][0]["ground_truth"]["path"]
    boxes = json.loads(file.read_text())
    assert boxes["class_labels"]["0"] == "disc"
    assert all(0 <= side <= 1 for box in boxes["box_data"] for side in box["position"].values())


def test_its_artifacts(tracked: Tracked) -> None:
    """The data set as references to its files, and the weights of each epoch."""
    data, *others = tracked.run.artifacts
    models = [artifact for artifact in others if artifact.type == "model"]
    assert data.type == "dataset"
    assert data.use_after_commit  # an input of the run
    contents = data.manifest.contents
    assert sum(entry.ref.startswith("file://") for entry in contents) == 2 * 36  # images and labels
    assert [entry.path for entry in contents if not entry.ref] == ["small.yaml"]
    assert {"latest", "epoch-1", "best"} <= {alias for artifact in models for alias in artifact.aliases}
    metadata = json.loads(next(artifact for artifact in models if "best" in artifact.aliases).metadata)
    assert metadata["dataset"]["train"]["count"] == "28"
    assert (metadata["epoch"] in (0, 1), "mAP_0.5" in metadata["metrics"]) == (True, True)
    assert "--upload-model" in metadata["command"]


def test_tensorboard_has_the_same(tracked: Tracked) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(tracked.folder / "tensorboard"), {"scalars": 0}).Reload()
    for name in [name for name in tracked.rows[0] if name != "epoch"]:
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx([row[name] for row in tracked.rows], rel=1e-6)
    assert [event.step for event in events.Scalars("step/box_loss")] == list(range(1, 9))


@pytest.fixture(scope="module")
def plain(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process without trackers."""
    project = tmp_path_factory.mktemp("plain")
    train(project, "--log-with", "none", WANDB_MODE="offline")
    assert not [file for file in project.rglob("*") if file.suffix in (".jpg", ".png") or file.name == "wandb"]
    return project / "exp"


def test_an_evaluation_joins_the_training(tracked: Tracked, run_script: RunScript, tmp_path: Path) -> None:
    """By the training run's id, which is in the weights, and W&B's variables."""
    data, training = read_yaml(tracked.folder / "settings.yaml")["data"], tracked.run
    flags = ("--data", data, "--weights", str(tracked.folder / "weights" / "best.pt"), "--imgsz", "64")
    how = ("--device", "cpu", "--workers", "0", "--project", str(tmp_path), "--log-with", "wandb")
    printed = run_script("val.py", *flags, *how, plots=True, OMP_NUM_THREADS="1", WANDB_MODE="offline", **SHAPES)
    run = only(tmp_path / "exp")
    assert (run.job, run.program, run.code) == ("val", str(ROOT / "val.py"), 0)
    assert (run.project, run.group, run.config["training_run"]) == ("shapes", "small", training.id)
    assert run.id != training.id
    assert run.config["conf_thres"] == 0.001
    for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95"):
        assert run.summary[f"metrics/{name}"]["max"] == pytest.approx(training.summary[f"best/{name}"], abs=0.02)
    assert "pictures/PR_curve/path" in run.summary
    assert "warning" not in printed


@pytest.mark.long
@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_cannot_be_reached(answers: bool, train: Train, plain: Path, tmp_path: Path) -> None:
    """Nothing listens at its address, or something that never sends anything."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if answers:
            taken.listen(50)
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        key = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, "WANDB_INIT_TIMEOUT": "3"}
        printed = train(tmp_path, "--profile", "1:2", **key, **UNSET)
    identical(tmp_path / "exp", plain)
    assert (tmp_path / "exp" / "profile" / "profile_0.json").is_file()
    assert printed.count("warning: W&B: ") == printed.count("wandb sync") == 1
    run = only(tmp_path / "exp")
    epochs(run.rows, plain)
    assert run.code == 0


@pytest.mark.long
def test_a_killed_run_is_continued_online(train: Train, run_script: RunScript, plain: Path, tmp_path: Path) -> None:
    """A server on loopback has one run, with each step and epoch once."""
    with serve() as server:
        online = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.address, "WANDB_MODE": "online"}
        killed = train(tmp_path, **KILL_IN_STEP_6, code=-signal.SIGKILL, **online)
        again = ("--resume", "--project", str(tmp_path))
        printed = run_script("train.py", *again, OMP_NUM_THREADS="1", **online)
    identical(tmp_path / "exp", plain)
    name = read_yaml(tmp_path / "exp" / "settings.yaml")["wandb_id"]
    assert f"W&B: {server.address}/me/p/runs/{name}" in printed
    assert "warning" not in killed + printed
    assert server.runs == {name}
    assert server.config["epochs"]["value"] == 2
    assert [row["step"] for row in server.rows if "step" in row][-4:] == [5, 6, 7, 8]
    epochs(server.rows, plain)
    assert any(file.startswith("media/images/examples/") for file in server.files)
    assert server.code == 0


def test_a_failure_of_wandb_does_not_change_the_run(train: Train, plain: Path, tmp_path: Path) -> None:
    printed = train(tmp_path, **planted("raise", "row for W&B", 3), WANDB_MODE="offline")
    identical(tmp_path / "exp", plain)
    assert printed.count("warning") == 1


PROGRAM = """
import multiprocessing
import sys

import numpy as np
import train
import wandb
from utils.distributed.failure import run_main

plain = train.train_one_epoch


def train_one_epoch(run, *rest):
    tracked = run.accelerator.get_tracker("wandb", unwrap=True)
    assert isinstance(tracked, wandb.Run)
    tracked.log({"mine/photo": wandb.Image(np.full((40, 60, 3), 90, np.uint8), caption="grey")})
    return plain(run, *rest)


def watch(event, arguments):
    if event == "import" and multiprocessing.current_process().daemon:
        print("a loader process imports", arguments[0], file=sys.stderr)


if __name__ == "__main__":
    sys.addaudithook(watch)
    train.train_one_epoch = train_one_epoch
    run_main(train.main)
"""


@pytest.fixture
def uneven_data(small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of two sizes, scanned already, of which one per split is in a format that only Pillow reads."""
    folder = shutil.copytree(small_data.with_suffix(""), tmp_path / "uneven")
    data = DetectionData(read_spec(data_yaml(folder)), 64, 32, DataOptions())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for split in ("train", "val"):
        file = min((folder / "images" / split).iterdir())
        Image.open(file).resize((60, 40)).save(file, "pcx")
        data.split(split)
    return data.spec.file


def test_a_program_of_the_users(uneven_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """A picture is logged through the `wandb.Run` that Accelerate returns. Loader processes, forked while W&B runs,
    import nothing, and images of several sizes are logged without a warning."""
    (tmp_path / "program.py").write_text(PROGRAM)
    what = ("--data", str(uneven_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64")
    how = ("--epochs", "1", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--noplots")
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    variables["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    printed = run_script(str(tmp_path / "program.py"), *what, *how, "--project", str(tmp_path), **variables)
    assert "imports" not in printed
    assert "warning" not in printed.lower()
    run = only(tmp_path / "exp")
    picture = wandb_files.runs(tmp_path / "exp")[0].parent / "files" / run.summary["mine/photo/path"]
    assert np.asarray(Image.open(picture)).shape == (40, 60, 3)
    assert (run.summary["mine/photo/caption"], run.code) == ("grey", 0)
