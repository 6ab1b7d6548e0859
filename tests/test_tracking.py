"""Whole runs with trackers; their W&B files and TensorBoard events are read."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
UNSET = ("env", "-u", "WANDB_MODE", sys.executable)  # the usual environment
KILL_IN_STEP_6 = planted("SIGKILL", "optimizer step", 6)
PICTURES = [
    *("labels", "train_batch0", "train_batch1", "train_batch2", "val_batch0_labels", "val_batch0_pred", "results"),
    *("PR_curve", "P_curve", "R_curve", "F1_curve", "confusion_matrix"),
]
STEP = [
    *("box_loss", "obj_loss", "cls_loss", "epoch", "gradient_norm", "data_wait"),
    *("lr0", "lr1", "lr2", "momentum0", "momentum1", "momentum2"),
    *("images_per_second", "images_per_second_per_device"),
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


@pytest.fixture(scope="module")
def tracked(train: Train, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder and the output of a run of two processes with all trackers and uploads, without W&B's key."""
    project = tmp_path_factory.mktemp("tracked")
    flags = "--processes 2 --log-with wandb,tensorboard --profile 2:3"
    flags += " --upload-model --save-period 1 --upload-dataset --bbox-interval 1"
    variables = {"HOME": str(project), "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_NOTES": "why", **SHAPES}
    variables |= {"WANDB_TAGS": "one,two", "WANDB_NAME": "first"}
    return project / "exp", train(project, *flags.split(), launcher=UNSET, plots=True, **variables)


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


def test_two_processes_are_one_run(tracked: tuple[Path, str]) -> None:
    folder, printed = tracked
    run = only(folder)
    assert (run.project, run.group, run.name, sorted(run.tags)) == ("shapes", "small", "first", ["one", "two"])
    assert run.code == 0
    assert (run.job, run.notes, run.program) == ("train", "why", str(ROOT / "train.py"))
    assert run.commit == run.config["git_commit"].rstrip("+")
    assert printed.count("wandb sync") == 1
    assert "not logged in" in printed
    assert "warning" not in printed
    assert run.id == read_yaml(folder / "settings.yaml")["wandb_id"]


def test_its_config(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    config, settings = only(folder).config, read_yaml(folder / "settings.yaml")
    for key in ("class_weights", "lr_factor"):
        assert settings["hyperparameters"].pop(key) == {}  # W&B leaves out what is empty
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
    for actual in epochs(run.rows, folder):
        assert {f"class/{kind}/disc" for kind in ("AP", "AP50")} <= {*actual}
        assert actual["epoch/validation_seconds"] > 0
        assert 0 <= actual["epoch/data_wait"] <= 1
    best = max(rows(folder), key=lambda row: 0.1 * row["metrics/mAP_0.5"] + 0.9 * row["metrics/mAP_0.5:0.95"])
    for name in ("mAP_0.5", "mAP_0.5:0.95", "precision", "recall"):
        assert run.summary[f"best/{name}"] == pytest.approx(best[f"metrics/{name}"], rel=1e-8)
    assert run.summary["best/epoch"] == best["epoch"] + 1
    assert run.axes["metrics/mAP_0.5"] == run.axes["class/AP/disc"] == "epoch"


def test_its_summary_has_the_best_values(tracked: tuple[Path, str]) -> None:
    """Also of keys with dots; `best/fitness`, which sweeps optimise, is a number."""
    folder, _ = tracked
    run = only(folder)
    for name in rows(folder)[0]:
        values = [row[name] for row in rows(folder)]
        if name.startswith("metrics/"):
            assert run.summary[name] == {"max": pytest.approx(max(values), rel=1e-8)}
        elif name.startswith("val/"):
            assert run.summary[name] == {"min": pytest.approx(min(values), rel=1e-8)}
    assert isinstance(run.summary["best/fitness"], float)
    assert {key.split("/")[0] for key in run.hidden} == {"class"}


def test_its_tables_and_charts(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    run = only(folder)
    files = wandb_files.runs(folder)[0].parent / "files"

    def table(key: str) -> Any:
        return json.loads((files / run.summary[f"{key}/path"]).read_text())

    classes = [line.partition(",")[0] for line in (folder / "classes.csv").read_text().splitlines()[1:]]
    assert {row[0] for row in table("charts/PR_curve_table")["data"]} <= {*classes}
    assert table("charts/F1_curve_table")["columns"] == ["class", "confidence", "F1"]
    cells = table("charts/confusion_matrix_table")["data"]
    assert len(cells) == (len(classes) + 1) ** 2
    assert sum(count for *_, count in cells) > 0
    panels = {key for key in run.config if key.startswith("_wandb/visualize/")}
    assert panels == {f"_wandb/visualize/charts/{name}" for name in ("PR_curve", "F1_curve", "confusion_matrix")}


def test_its_profile(tracked: tuple[Path, str]) -> None:
    """Of two steps, on both processes."""
    folder, printed = tracked
    assert {file.name for file in (folder / "profile").iterdir()} == {"profile_0.json", "profile_1.json"}
    assert "convolution" in printed.partition("profile of the optimizer steps")[2]
    assert f"profile of the optimizer steps 2 to 3: {folder / 'profile'}" in printed
    for name in ("profile_0.json", "profile_1.json"):
        events = json.loads((folder / "profile" / name).read_text())["traceEvents"]
        steps = [event for event in events if "SGD.step" in event.get("name", "")]
        assert len(steps) == 2


@pytest.mark.long
def test_it_is_the_run_without_trackers_and_profile(tracked: tuple[Path, str], train: Train, tmp_path: Path) -> None:
    train(tmp_path, "--processes", "2", "--log-with", "none")
    identical(tracked[0], tmp_path / "exp")


# Keys of runs of another kind: on CUDA, in fp16, of a classifier, of a segmenter.
OTHER_KEYS = {"step/gpu_memory", "step/loss_scale", "step/loss", "class/precision/NAME", "class/recall/NAME"}
OTHER_KEYS |= {"charts/mask_PR_curve_table", "charts/mask_F1_curve_table"}


def test_the_page_names_every_key(tracked: tuple[Path, str]) -> None:
    """Every logged key is in a table of docs/tracking.md, and every key of the tables was logged."""
    folder, _ = tracked
    page = (ROOT / "docs" / "tracking.md").read_text().partition("\n### Logged keys\n")[2].partition("\n### ")[0]
    cells = re.findall(r"^\| (`.*) \|.*\|$", page, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    assert named >= OTHER_KEYS
    run = only(folder)
    keys = {key for row in run.rows for key in row if not key.startswith("_")} - {"step", "epoch"}

    def matches(name: str, key: str) -> bool:
        pattern = re.escape(name).replace(r"\.\.\.", ".+").replace("NAME", "[^/]+")
        return re.fullmatch(rf"{pattern}(/\w+)?", key) is not None  # W&B's own fields of a picture or table

    assert {key for key in keys if not any(matches(name, key) for name in named)} == set()
    assert {name for name in named - OTHER_KEYS if not any(matches(name, key) for key in keys)} == set()


def test_its_steps(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    run = only(folder)
    points = [row for row in run.rows if row["_step"]]  # labels.jpg may be drawn before the first step: at step 0
    assert run.column("step") == [row["_step"] for row in points] == list(range(1, 9))
    assert all({f"step/{name}" for name in STEP} <= {*row} for row in points)
    assert all("step" not in row for row in run.rows if row not in points)
    assert run.axes["step/lr0"] == "step"
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
    assert len(shown[0]["examples/validation/captions"]) == 8
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
    assert run.artifacts[0].use_after_commit  # an input of the run
    metadata = json.loads(next(a for a in run.artifacts if "best" in a.aliases).metadata)
    assert metadata["dataset"]["train"]["count"] == "28"
    assert "--upload-model" in metadata["command"]
    contents = run.artifacts[0].manifest.contents
    assert sum(entry.ref.startswith("file://") for entry in contents) == 2 * 36  # images and labels, as references
    assert [entry.path for entry in contents if not entry.ref] == ["small.yaml"]


def test_tensorboard_has_the_same(tracked: tuple[Path, str]) -> None:
    folder, _ = tracked
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), {"scalars": 0}).Reload()
    for name in [name for name in rows(folder)[0] if name != "epoch"]:
        values = [event.value for event in events.Scalars(name)]
        assert values == pytest.approx([row[name] for row in rows(folder)], rel=1e-6)
    assert [event.step for event in events.Scalars("step/box_loss")] == list(range(1, 9))


@pytest.fixture(scope="module")
def plain(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of one process without trackers."""
    project = tmp_path_factory.mktemp("plain")
    train(project, "--log-with", "none", WANDB_MODE="offline")
    assert not (project / "exp" / "wandb").exists()
    return project / "exp"


@pytest.mark.long
def test_noplots(plain: Path) -> None:
    assert not [file for file in plain.rglob("*") if file.suffix in (".jpg", ".png")]


@pytest.mark.long
def test_a_killed_run_is_continued(train: Train, run_script: RunScript, plain: Path, tmp_path: Path) -> None:
    """It is killed after its sixth step, with a state of its fourth, and then in its last validation."""
    variables = {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    train(tmp_path, "--log-with", "wandb", **KILL_IN_STEP_6, code=-signal.SIGKILL, **variables)
    again = ("train.py", "--resume", "--project", str(tmp_path))
    run_script(*again, code=-signal.SIGKILL, **variables, **planted("SIGKILL", "validation summary"))
    run_script(*again, **variables)
    identical(tmp_path / "exp", plain)
    parts = [wandb_files.read(file) for file in wandb_files.runs(tmp_path / "exp")]
    assert len(parts) == 3
    assert len({part.id for part in parts if part.id}) == 1  # W&B has written nothing in the first second
    assert [part.code for part in parts] == [None, None, 0]
    logged = [row for part in parts for row in part.rows]
    steps = [row["step"] for row in logged if "step" in row]  # but for those of the second before it was killed
    assert steps == sorted(set(steps))
    assert 7 in steps
    epochs(logged, plain)


def test_an_evaluation_joins_the_training(tracked: tuple[Path, str], run_script: RunScript, tmp_path: Path) -> None:
    """By the training run's id, which is in the weights, and W&B's variables."""
    folder, _ = tracked
    flags = ("--data", "", "--weights", str(folder / "weights" / "best.pt"), "--imgsz", "64", "--device", "cpu")
    data = read_yaml(folder / "settings.yaml")["data"]
    flags = ("--data", data, *flags[2:], "--workers", "0", "--project", str(tmp_path), "--log-with", "wandb")
    printed = run_script("val.py", *flags, OMP_NUM_THREADS="1", WANDB_MODE="offline", **SHAPES)
    run, training = only(tmp_path / "exp"), only(folder)
    assert run.job == "val"
    assert run.program == str(ROOT / "val.py")
    assert (run.project, run.group, run.config["training_run"]) == ("shapes", "small", training.id)
    assert run.id != training.id
    assert run.config["conf_thres"] == 0.001
    for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95"):
        assert run.summary[f"metrics/{name}"]["max"] == pytest.approx(training.summary[f"best/{name}"], abs=0.02)
    assert "charts/PR_curve_table/path" in run.summary
    assert run.code == 0
    assert "warning" not in printed


@contextmanager
def server(answers: bool) -> Iterator[str]:
    """Return an address on loopback. Nothing listens there, or if `answers` a server that never sends anything."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        if answers:
            taken.listen(50)
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.long
@pytest.mark.parametrize("answers", [False, True])
def test_a_server_that_cannot_be_reached(answers: bool, train: Train, plain: Path, tmp_path: Path) -> None:
    with server(answers) as address:
        key = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": address, "WANDB_INIT_TIMEOUT": "3"}
        printed = train(tmp_path, "--profile", "1:2", launcher=UNSET, **key)
    identical(tmp_path / "exp", plain)
    assert (tmp_path / "exp" / "profile" / "profile_0.json").is_file()
    assert printed.count("warning") == 1
    assert "warning: W&B: " in printed
    assert printed.count("wandb sync") == 1
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
import numpy as np
import train
import wandb

plain = train.train_one_epoch


def train_one_epoch(run, *rest):
    tracked = run.accelerator.get_tracker("wandb", unwrap=True)
    assert isinstance(tracked, wandb.Run)
    tracked.log({"mine/photo": wandb.Image(np.full((40, 60, 3), 90, np.uint8), caption="grey")})
    return plain(run, *rest)


if __name__ == "__main__":
    train.train_one_epoch = train_one_epoch
    train.main()
"""


def test_a_picture_of_the_users(small_data: Path, run_script: RunScript, tmp_path: Path) -> None:
    """Logged through the `wandb.Run` that Accelerate returns, it is in the run's file and folder."""
    (tmp_path / "program.py").write_text(PROGRAM)
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--epochs", "1")
    how = ("--batch-size", "8", "--workers", "0", "--device", "cpu", "--noautoanchor", "--noplots")
    flags = (*what, *how, "--project", str(tmp_path), "--noval")
    run_script(str(tmp_path / "program.py"), *flags, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", WANDB_MODE="offline")
    run = only(tmp_path / "exp")
    picture = wandb_files.runs(tmp_path / "exp")[0].parent / "files" / run.summary["mine/photo/path"]
    assert np.asarray(Image.open(picture)).shape == (40, 60, 3)
    assert run.summary["mine/photo/caption"] == "grey"
    assert run.code == 0


WATCHED = """
import multiprocessing
import sys

import train
from utils.distributed.failure import run_main

def watch(event, arguments):
    if event == "import" and multiprocessing.current_process().daemon:
        print("a loader process imports", arguments[0], file=sys.stderr)

if __name__ == "__main__":
    sys.addaudithook(watch)
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


@pytest.mark.parametrize(
    ("data", "cfg"),
    [
        ("uneven_data", "yolov5n.yaml"),
        pytest.param("drawn_outlines", "yolov5n-seg.yaml", marks=pytest.mark.long),
        pytest.param("drawn_classes", "yolov5n-cls.yaml", marks=pytest.mark.long),
    ],
)
def test_loader_processes(
    data: str, cfg: str, request: pytest.FixtureRequest, run_script: RunScript, tmp_path: Path
) -> None:
    """Those forked while W&B runs import nothing, and images of several sizes are logged without a warning."""
    (tmp_path / "program.py").write_text(WATCHED)
    what = ("--data", str(request.getfixturevalue(data)), "--weights", "", "--cfg", cfg, "--imgsz", "64")
    how = ("--epochs", "1", "--batch-size", "8", "--workers", "1", "--device", "cpu", "--noplots")
    flags = (*what, *how, "--project", str(tmp_path))
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    variables["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    printed = run_script(str(tmp_path / "program.py"), *flags, **variables)
    assert "imports" not in printed
    assert "warning" not in printed.lower()
    assert only(tmp_path / "exp").code == 0


@pytest.mark.long
def test_a_run_that_is_stopped_by_a_signal_is_logged(train: Train, tmp_path: Path) -> None:
    """It is stopped by SIGTERM after its third step."""
    printed = train(tmp_path, **planted("SIGTERM", "optimizer step", 3), code=143, WANDB_MODE="offline")
    assert "continue with --resume" in printed
    run = only(tmp_path / "exp")
    assert run.code == 0
    assert run.column("step")[:3] == [1, 2, 3]
    assert any("continue with --resume" in line for line in run.lines)
