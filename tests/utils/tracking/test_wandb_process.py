"""The W&B process: the end of a training that has died, the key, and the time limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.wandb_files import read, runs
from utils.background import own_python
from utils.files import ROOT
from utils.tracking import wandb_process
from utils.tracking.wandb import WandbTracker
from utils.tracking.wandb_process import connect_timeout


def test_half_a_line_closes_the_run(tmp_path: Path) -> None:
    """The training was killed while it wrote: the earlier lines are logged, and the run has failed."""
    pytest.importorskip("wandb")
    run = {"project": "p", "id": "abc", "name": "n", "entity": None, "group": None, "tags": None}
    messages = [
        {"method": "start", "folder": str(tmp_path), "run": run, "config": {}, "axes": [], "pid": os.getpid()}
        | {"timeout": 9.0},
        {"method": "log", "values": {"step": 1, "step/loss": 0.5}, "step": 1, "axis": "step"},
        {"method": "log", "values": {"step": 2, "step/loss": 0.25}, "step": 2, "axis": "step"},
    ]
    lines = "".join(f"{json.dumps(message)}\n" for message in messages)
    ended = subprocess.run(
        [*own_python("utils.tracking.wandb_process"), "train.py"],
        input=lines[:-20],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "WANDB_MODE": "offline"},
    )
    assert "wandb sync" in json.loads(ended.stdout.splitlines()[0])["print"]
    (file,) = runs(tmp_path)
    run_file = read(file)
    assert [row["step/loss"] for row in run_file.rows] == [0.5]
    assert run_file.code == 1
    assert run_file.alerts == []


def test_why_a_run_ended_is_an_alert(tmp_path: Path) -> None:
    """If it is asked for: the reason, and without one that the training process has vanished."""
    pytest.importorskip("wandb")
    started = []
    for name, reasons in (("failed", ["20 steps were not finite"]), ("vanished", [])):
        (tmp_path / name).mkdir()
        tracker = WandbTracker(tmp_path / name, {"project": "p", "id": "abc", "notes": "why"}, print, alerts=True)
        tracker.store_init_configuration({})
        tracker.log({"step": 1, "metrics/a.b": 0.5}, step=1)
        for reason in reasons:
            tracker.fail(reason)
        tracker.messages.put(None)  # the input ends, as if the training process did
        started.append(tracker)
    for tracker, expected in zip(started, ("20 steps were not finite", "without an error message"), strict=True):
        assert tracker.process is not None
        tracker.process.wait(60)
        (file,) = runs(tracker.folder)
        run = read(file)
        assert (run.code, run.notes) == (1, "why")
        ((title, text, level),) = run.alerts
        assert (title, level) == ("The run ended by an error", "ERROR")
        assert expected in text


def test_code_is_saved_only_if_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By W&B's variable, which counts more, or its settings."""
    pytest.importorskip("wandb")
    monkeypatch.setattr("sys.argv", [str(ROOT / "train.py"), "--epochs", "2"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "settings").write_text("[default]\nsave_code = true\n")
    (tmp_path / "nothing").mkdir()
    started = []
    for variable, configured, saved in (("true", False, True), ("false", True, False), ("", True, True)):
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path if configured else tmp_path / "nothing"))
        monkeypatch.setenv("WANDB_SAVE_CODE", variable) if variable else monkeypatch.delenv("WANDB_SAVE_CODE")
        (tmp_path / f"run{len(started)}").mkdir()
        tracker = WandbTracker(tmp_path / f"run{len(started)}", {"project": "p", "id": "abc"}, print)
        tracker.store_init_configuration({})
        started.append((tracker, saved))
    for tracker, saved in started:
        tracker.finish()
        (file,) = runs(tracker.folder)
        run, code = read(file), file.parent / "files" / "code"
        assert run.program == str(ROOT / "train.py")
        assert {"requirements.txt"} <= run.files <= {"requirements.txt", "diff.patch", "code/train.py"}
        assert ("code/train.py" in run.files) == saved
        assert {path.name for path in code.rglob("*.*")} == ({"train.py"} if saved else set())
        assert not saved or (code / "train.py").read_bytes() == (ROOT / "train.py").read_bytes()
        assert saved or "diff.patch" not in run.files


HAS_KEY = """
import json, os, sys
from utils.tracking.wandb_process import has_key
from wandb.sdk.lib import wbauth
for netrc in json.loads(sys.argv[1]):
    open(os.environ["NETRC"], "w").write(netrc)
    os.chmod(os.environ["NETRC"], 0o600)
    print(has_key(), flush=True)
    getattr(wbauth, "unauthenticate_session", lambda: None)()
"""


def keys_found(folder: Path, *netrc: str, **variables: str) -> list[str]:
    """Return whether the W&B process finds a key, for each content of ~/.netrc; nobody answers at the server."""
    pytest.importorskip("wandb")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ended = subprocess.run(
        [sys.executable, "-c", HAS_KEY, json.dumps(netrc)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        env={**kept, "HOME": str(folder), "NETRC": str(folder / "netrc"), "WANDB_BASE_URL": SERVER, **variables},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


SERVER = "http://127.0.0.1:9"


def test_the_key_is_found(tmp_path: Path) -> None:
    """It is wandb that looks for it, without asking anybody."""
    key = "password " + "0123456789" * 4
    damaged, elsewhere = "machine", f"machine elsewhere.org login user {key}"
    known = f"machine 127.0.0.1:9 login user {key}"
    began = time.monotonic()
    assert keys_found(tmp_path, "", damaged, elsewhere, known) == ["False", "False", "False", "True"]
    assert keys_found(tmp_path, "", WANDB_API_KEY=key.split()[1]) == ["True"]
    assert time.monotonic() - began < 30


def test_the_time_to_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_timeout() == wandb_process.WANDB_CONNECT_SECONDS
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "7")
    assert connect_timeout() == 7
