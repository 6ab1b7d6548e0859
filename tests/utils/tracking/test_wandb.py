"""The tracker of W&B neither waits for its process nor fails if the process does."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

from tests.wandb_files import read, runs
from tests.wandb_server import serve
from utils.tracking import process_tracker
from utils.tracking.wandb import WandbTracker


def replace_process(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Start another program in place of the one that talks to W&B."""
    monkeypatch.setattr(process_tracker, "own_python", lambda module: ["python3", "-c", script])


ECHO = "import sys\nfor line in sys.stdin: open(sys.argv[1], 'a').write(line)"


def test_messages_arrive_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_process(monkeypatch, ECHO)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "calls"), "\udcff"])
    tracker = WandbTracker(tmp_path, {"id": "x"}, print)
    tracker.store_init_configuration({"lr0": 0.1, "path": Path("a"), "data": "\udcc3\udcbc\udcff"})
    tracker.log({"step": 3, "step/loss": float("nan")}, step=3)
    tracker.log({"epoch": 1, "step": 3}, step=3)
    tracker.log_pictures({"pictures/a": tmp_path / "\udcff.jpg"}, 3)
    tracker.log_line("a line")
    tracker.finish()
    messages = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [message["method"] for message in messages] == ["start", "log", "log", "log_pictures", "log_line", "finish"]
    assert messages[0]["config"] == {"lr0": 0.1, "path": "a", "data": "\u00fc\ufffd"}  # wandb refuses other bytes
    assert messages[0]["run"] == {"id": "x"}
    assert [message["axis"] for message in messages[1:3]] == ["step", "epoch"]
    assert messages[3]["files"]["pictures/a"].endswith("\udcff.jpg")


def test_a_process_that_never_ends_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_process(monkeypatch, "import subprocess; subprocess.run(['sleep', '600'])")
    printed: list[str] = []
    monkeypatch.setattr(process_tracker, "EXIT_SECONDS", 0.0)
    tracker = WandbTracker(tmp_path, {"id": "x"}, printed.append)
    tracker.store_init_configuration({})
    process = tracker.process
    time.sleep(0.5)
    tracker.finish(0.2)
    assert process is not None
    assert process.wait(5) == -signal.SIGKILL
    assert len(printed) == 1
    assert printed[0].startswith("warning: W&B has not ended after 0 s; its data is in ")


@pytest.mark.parametrize(
    ("limit", "timeout", "expected"), [(900.0, math.inf, 910.0), (60.0, 10.0, 20.0), (60.0, 90.0, 70.0)]
)
def test_the_time_limit_of_the_end(
    limit: float, timeout: float, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_process(monkeypatch, "")
    limits: list[float] = []
    tracker = WandbTracker(tmp_path, {"id": "x"}, print, limit)
    tracker.store_init_configuration({})
    assert tracker.process is not None
    monkeypatch.setattr(tracker.process, "wait", limits.append)
    tracker.finish(timeout)
    tracker.finish()
    assert limits == [expected]


def test_messages_to_a_dead_process_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_process(monkeypatch, "")
    tracker = WandbTracker(tmp_path, {"id": "x"}, print)
    tracker.store_init_configuration({})
    assert tracker.process is not None
    tracker.process.wait()
    for number in range(100):
        tracker.log({"step": number, "text": "x" * 10**5}, step=number)
        time.sleep(0.001)
    assert tracker.closed
    assert tracker.messages.qsize() < 100
    tracker.finish()


def test_a_process_that_cannot_be_started_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tracker, "own_python", lambda module: [str(tmp_path / "nowhere")])
    printed: list[str] = []
    tracker = WandbTracker(tmp_path, {"id": "x"}, printed.append)
    tracker.store_init_configuration({})
    tracker.log({"step": 1}, step=1)
    tracker.finish()
    assert printed == ["warning: W&B cannot be started (No such file or directory); training continues"]


def test_replies_are_printed_and_can_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [{"print": "hello"}, "not a reply", {"print": "stopped", "stop": True}]
    replace_process(monkeypatch, f"print({json.dumps('rubbish')}, *{list(map(json.dumps, replies))!r}, sep=chr(10))")
    printed: list[str] = []
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    tracker = WandbTracker(tmp_path, {"id": "x"}, printed.append)
    tracker.store_init_configuration({})
    tracker.finish()
    assert printed == ["hello", "stopped"]
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_a_server_that_stops_answering_does_not_delay_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    printed: list[str] = []
    with serve() as server:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        arguments = {"project": "p", "id": "abc", "name": "n", "entity": None, "group": None, "tags": None}
        tracker = WandbTracker(tmp_path, arguments, printed.append, timeout=2.0)
        tracker.store_init_configuration({})
        end = time.monotonic() + 60
        while not printed and time.monotonic() < end:
            time.sleep(0.1)
        assert printed == [f"W&B: {server.address}/me/p/runs/abc"]
        server.silent.set()
        tracker.log({"step": 1, "step/loss": 0.5}, step=1)
        process = tracker.process
        tracker.finish()
    assert process is not None
    assert process.returncode in (0, 1)  # by itself
    assert [line.partition(";")[0] for line in printed[1:]] == ["warning: W&B has not received everything within 2 s"]
    (file,) = runs(tmp_path)
    assert [row["step/loss"] for row in read(file).rows] == [0.5]  # stored for `wandb sync`


def test_lineage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set is an input of the run, the weights are its output and linked to a registry."""
    pytest.importorskip("wandb")
    printed: list[str] = []
    for name in ("a.jpg", "best.pt"):
        (tmp_path / name).write_text(name)
    with serve() as server:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        run = {"project": "p", "id": "abc", "job_type": "train"}
        tracker = WandbTracker(tmp_path, run, printed.append, inputs=["run_xyz_model:best"])
        tracker.store_init_configuration({})
        references = [(str(tmp_path / "a.jpg"), "train/a.jpg")]
        tracker.log_artifact("cats", "dataset", ["latest"], references=references, is_input=True)
        where, content = "wandb-registry-model/cats", {"metrics": {"mAP_0.5": 0.5}}
        files = [tmp_path / "best.pt"]
        tracker.log_artifact("run_abc_model", "model", ["best"], files=files, metadata=content, link=where)
        tracker.finish()
    assert printed == [f"W&B: {server.address}/me/p/runs/abc"]
    types = [artifact["artifactTypeName"] for artifact in server.artifacts]
    assert sorted(types) == ["dataset", "model"]
    assert server.inputs == [f"a{types.index('dataset') + 1}"]
    model = server.artifacts[types.index("model")]
    assert {alias["alias"] for alias in model["aliases"]} >= {"best"}
    assert json.loads(model["metadata"]) == content
    assert server.links == [(f"a{types.index('model') + 1}", "cats")]
    assert server.files["artifacts/best.pt"] == b"best.pt"
