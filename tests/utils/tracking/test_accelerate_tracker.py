"""Trackers of Accelerate, with stores on this machine. None blocks or fails a run.

MLflow's package is among those for tests; the others run by `make test-trackers`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sqlite3
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import RunScript, not_here
from utils.files import ROOT
from utils.tracking.accelerate_tracker import AccelerateTracker

RUN = {"project": "cats", "name": "exp", "id": "abc"}
CONFIG = {"epochs": 3, "hyperparameters": {"lr0": 0.01, "anchors": [1, 2]}}


def logged(name: str, folder: Path, first: int, last: int) -> list[str]:
    """Log steps and an epoch in a new tracker; return what it printed."""
    printed: list[str] = []
    folder.mkdir(exist_ok=True)
    tracker = AccelerateTracker(name, folder, RUN, printed.append)
    tracker.store_init_configuration(CONFIG)
    for step in range(first, last + 1):
        tracker.log({"step": step, "step/loss": step / 10}, step=step)
    tracker.log({"epoch": last, "metrics/mAP_0.5(B)": 0.5, "epoch/train_seconds": float("nan")}, step=last)
    tracker.finish()
    return printed


def points(run: Path, key: str) -> list[tuple[float, int]]:
    """Return the values of a metric with their steps, of a run in MLflow's files."""
    lines = (run / "metrics" / key).read_text().splitlines()
    return [(float(value), int(step)) for _, value, step in map(str.split, lines)]


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is continued logs no step twice, and the epochs of results.csv that a killed process did not log."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert logged("mlflow", tmp_path / "exp", 1, 3) == []
    (tmp_path / "exp" / "results.csv").write_text(
        "epoch,val/box_loss,extra\n" + "".join(f"{k},0.{k},\n" for k in range(5))
    )
    assert logged("mlflow", tmp_path / "exp", 2, 6) == []
    (run,) = [file.parent for file in tmp_path.glob("mlruns/*/*/meta.yaml")]
    assert run.name == json.loads((tmp_path / "exp" / ".mlflow.json").read_text())["remote_id"]
    assert points(run, "step/loss") == [(0.1, 1), (0.2, 2), (0.3, 3), (0.4, 4), (0.5, 5), (0.6, 6)]
    assert points(run, "metrics/mAP_0.5_B_") == [(0.5, 3), (0.5, 6)]
    assert points(run, "val/box_loss") == [(0.3, 3), (0.4, 3)]  # epochs 4 and 5, at the last step of that process
    assert (run / "params" / "hyperparameters.lr0").read_text() == "0.01"
    assert (run / "params" / "hyperparameters.anchors").read_text() == "[1, 2]"
    assert (run / "tags" / "mlflow.runName").read_text() == "exp"


def has(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        not_here(f"{package}: make test-trackers")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the user's own settings, such as keys; from a folder of no repository."""
    for name in [name for name in os.environ if name.startswith(("COMET_", "CLEARML_", "SWANLAB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")


STORED = "the run is stored on this machine, upload it with: "


@pytest.mark.usefixtures("home")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has("trackio")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert logged("trackio", tmp_path / "exp", 1, 3) == []
    assert logged("trackio", tmp_path / "exp", 2, 4) == []
    with sqlite3.connect(tmp_path / "trackio" / "cats.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert {name for name, *_ in rows} == {"exp-abc"}
    values = [(step, json.loads(metrics)) for _, step, metrics in rows]
    steps = [(step, value["step/loss"]) for step, value in values if "step/loss" in value]
    assert steps == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [value["metrics/mAP_0.5_B_"] for _, value in values if "step/loss" not in value] == [0.5, 0.5]


@pytest.mark.usefixtures("home")
def test_comet(tmp_path: Path) -> None:
    """Without a key: an archive for each start, all of one experiment. No code is in it."""
    has("comet_ml")
    expected = f"comet_ml: there is no API key (comet login); {STORED}comet upload {tmp_path / 'exp' / 'comet'}/*.zip"
    for first, last in ((1, 3), (2, 4)):
        assert logged("comet_ml", tmp_path / "exp", first, last) == [expected]
    archives = sorted((tmp_path / "exp" / "comet").glob("*.zip"), key=lambda file: file.stat().st_mtime)
    messages = []
    for archive in archives:
        with zipfile.ZipFile(archive) as content:
            messages += [json.loads(line) for line in content.read("messages.json").splitlines()]
            assert json.loads(content.read("experiment.json"))["project_name"] == "cats"
    assert len({archive.name.partition("-")[0] for archive in archives}) == 1
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    steps = [(point["step"], point["metricValue"]) for point in metrics if point["metricName"] == "step/loss"]
    assert steps == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [point["metricValue"] for point in metrics if point["metricName"] == "metrics/mAP_0.5_B_"] == [0.5, 0.5]
    parameters = [message["payload"]["param"] for message in messages if message["type"] == "parameter_msg"]
    assert {one["paramValue"] for one in parameters if one["paramName"] == "hyperparameters.lr0"} == {0.01}
    assert not {"source_code", "git_patch"} & {str(message) for message in messages}


@pytest.mark.usefixtures("home")
def test_clearml(tmp_path: Path) -> None:
    """Without credentials: a task for each start. What is not finite is left out, because it would become 0."""
    has("clearml")
    sessions = tmp_path / "exp" / "clearml" / "offline"
    for first, last in ((1, 3), (2, 4)):
        (line,) = logged("clearml", tmp_path / "exp", first, last)
        assert line.startswith("clearml: It seems ClearML is not configured on this machine!; ")
        assert line.endswith(f"{STORED}clearml-task --import-offline-session {sessions}/*.zip")
    points, tasks = [], []
    for archive in sorted(sessions.glob("*.zip"), key=lambda file: file.stat().st_mtime):
        with zipfile.ZipFile(archive) as content:
            tasks.append(json.loads(content.read("task.json")))
            points += [one for line in content.read("metrics.jsonl").splitlines() for one in json.loads(line)]
    assert [(task["name"], task["project_name"]) for task in tasks] == [("exp", "cats")] * 2
    assert '"hyperparameters.lr0" = 0.01' in tasks[0]["configuration"]["General"]["value"]
    steps = [(point["iter"], point["value"]) for point in points if point["metric"] == "step/loss"]
    assert steps == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [point["value"] for point in points if point["metric"] == "metrics/mAP_0.5_B_"] == [0.5, 0.5]
    assert not [point for point in points if point["metric"] == "epoch/train_seconds"]


@pytest.mark.usefixtures("home")
def test_aim(tmp_path: Path) -> None:
    """One run in the folder of the run folders."""
    has("aim")
    for first, last in ((1, 3), (2, 4)):
        assert logged("aim", tmp_path / "exp", first, last) == []
    aim = importlib.import_module("aim")
    (key,) = aim.Repo(str(tmp_path)).list_all_runs()
    quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
    run = aim.Run(key, repo=str(tmp_path), **quiet)  # not read-only: that would not see what is not yet indexed
    assert (run.name, run.experiment) == ("exp", "cats")
    assert run["hparams"]["hyperparameters.lr0"] == 0.01
    points = {metric.name: list(metric.data.items()) for metric in run.metrics()}
    assert [(step, value) for step, (value, *_) in points["step/loss"]] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [value for _, (value, *_) in points["metrics/mAP_0.5_B_"]] == [0.5, 0.5]


@pytest.mark.usefixtures("home")
def test_dvclive(tmp_path: Path) -> None:
    """Files in the run folder, and nothing in the current one."""
    has("dvclive")
    for first, last in ((1, 3), (2, 4)):
        assert logged("dvclive", tmp_path / "exp", first, last) == []
    folder = tmp_path / "exp" / "dvclive"
    assert (folder / "plots/metrics/steps/loss.tsv").read_text() == "step\tloss\n1\t0.1\n2\t0.2\n3\t0.3\n4\t0.4\n"
    assert (folder / "plots/metrics/metrics/mAP_0.5_B_.tsv").read_text().splitlines()[1:] == ["3\t0.5", "4\t0.5"]
    assert json.loads((folder / "metrics.json").read_text())["metrics"] == {"mAP_0.5_B_": 0.5}
    assert yaml.safe_load((folder / "params.yaml").read_text())["hyperparameters.lr0"] == 0.01
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.usefixtures("home")
def test_swanlab(tmp_path: Path) -> None:
    """Without a key: a folder for each start, all with the id of the run."""
    has("swanlab")
    folder = tmp_path / "exp" / "swanlab"
    for first, last in ((1, 3), (2, 4)):
        (line,) = logged("swanlab", tmp_path / "exp", first, last)
        assert line.startswith("swanlab: ")
        assert line.endswith(f"; {STORED}swanlab sync {folder}/run-*")
    points = [point for file in sorted(folder.glob("run-*/run-abc.swanlab")) for point in swanlab_scalars(file)]
    steps = [(step, value) for key, step, value in points if key == "step/loss"]
    assert steps == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert [value for key, _, value in points if key == "metrics/mAP_0.5_B_"] == [0.5, 0.5]
    config = yaml.safe_load(min(folder.glob("run-*/files/config.yaml")).read_text())
    assert config["hyperparameters.lr0"]["value"] == 0.01


def swanlab_scalars(file: Path) -> Iterator[tuple[str, int, float]]:
    """Yield key, step and value of the numbers in a file of SwanLab, by its own reader."""
    reader = importlib.import_module("swanlab.sdk.internal.core_python.store").DataStoreReader()
    record = importlib.import_module("swanlab.proto.swanlab.record.v1.record_pb2").Record
    reader.open(file)
    while (data := reader.scan()) is not None:
        message = record.FromString(data)
        if message.WhichOneof("record_type") == "scalar":
            yield message.scalar.key, message.scalar.step, message.scalar.value.number


def test_a_training_with_all_of_them(run_script: RunScript, small_data: Path, tmp_path: Path, home: None) -> None:
    """They do not change the training; a tracker without a server prints where it stores the run."""
    packages = ("comet_ml", "clearml", "aim", "dvclive", "swanlab", "trackio")
    for package in packages:
        has(package)
    job = f"--data {small_data} --weights= --cfg yolov5n.yaml --imgsz 64 --epochs 1 --batch-size 8 --workers 1"
    variables = {"OMP_NUM_THREADS": "1", "HOME": str(tmp_path / "home"), "TRACKIO_DIR": str(tmp_path / "trackio")}
    for name, trackers in (("plain", "none"), ("exp", ",".join(packages))):
        flags = ("--project", str(tmp_path), "--name", name, "--log-with", trackers, "--device", "cpu")
        printed = run_script("train.py", *job.split(), *flags, **variables)
        assert "warning" not in printed
        assert "Traceback" not in printed
    assert printed.count("the run is stored on this machine") == 3
    plain, exp = tmp_path / "plain", tmp_path / "exp"
    assert (exp / "results.csv").read_bytes() == (plain / "results.csv").read_bytes()
    assert {"comet", "clearml", "dvclive", "swanlab"} <= {file.name for file in exp.iterdir()}
    assert (tmp_path / ".aim").is_dir()
    assert list((tmp_path / "trackio").glob("*.db"))


RAISES = """
config = type("Config", (dict,), {"update": lambda self, *values, **how: None})()
class Run:
    def log(self, *values, **how):
        raise RuntimeError("out of order")
    finish = log
def init(**how):
    return Run()
"""


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        (RAISES, "out of order"),
        ("import nowhere", "No module named 'nowhere'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_tracker_that_raises_at_each_call_is_one_warning(
    package: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that name in its place."""
    (tmp_path / "swanlab.py").write_text(package)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "swanlab", raising=False)
    (line,) = logged("swanlab", tmp_path / "exp", 1, 3)
    assert line.startswith("warning: swanlab has failed")
    assert reason in line


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise UserError('bad')", 1), ("raise KeyError('lost')", 1)])
def test_a_tracker_that_hangs_delays_the_end_by_its_time_limit(end: str, code: int, tmp_path: Path) -> None:
    """Its call never returns, and a thread that it has started never ends: the process exits all the same."""
    (tmp_path / "swanlab.py").write_text(RAISES.replace('raise RuntimeError("out of order")', "hang()") + HANG)
    program = HANGING_PROGRAM.format(folder=str(tmp_path / "exp"), end=end)
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, timeout=60, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.count("warning: swanlab has not ended after 1 s") == (not end)
    assert ended.stderr.count("bad" if "bad" in end else "KeyError: 'lost'") == bool(end)


HANG = """
import atexit, threading, time
def hang():
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    atexit.register(time.sleep, 600)
    time.sleep(600)
"""
HANGING_PROGRAM = """
from pathlib import Path
from accelerate import PartialState
from utils.distributed.failure import on_failure, run_main
from utils.errors import UserError
from utils.tracking.accelerate_tracker import AccelerateTracker

def main():
    PartialState(cpu=True)
    Path({folder!r}).mkdir()
    tracker = AccelerateTracker("swanlab", Path({folder!r}), dict(project="a", name="b", id="c"), print)
    on_failure(tracker.fail)
    tracker.store_init_configuration({{}})
    for step in range(1, 4):
        tracker.log({{"step": step, "step/loss": 1.0}}, step=step)
    assert tracker.tracker
    {end}
    tracker.finish(1.0)

run_main(main)
"""


@pytest.mark.long
def test_a_server_of_mlflow_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        (line,) = logged("mlflow", tmp_path / "exp", 1, 3)
    assert line.startswith("warning: mlflow has failed")


def test_an_unknown_tracker_is_one_warning(tmp_path: Path) -> None:
    (line,) = logged("unknown", tmp_path, 1, 3)
    assert line.startswith("warning: unknown has failed")
    assert "pip install -U accelerate" in line
