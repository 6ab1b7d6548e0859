"""What trackers promise: they are chosen by flags and environment, wait for nothing, and never fail a run."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.wandb_files import read, runs
from tests.wandb_server import serve
from utils.background import own_python
from utils.tracking import tracker as tracking
from utils.tracking import wandb_process
from utils.tracking.tracker import TENSORBOARD, WANDB, TensorBoard, WandB, git_commit, new_id, wanted
from utils.tracking.wandb_process import has_key


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_DISABLED", "WANDB_RUN_ID", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that count as installed."""
    names = {WANDB, TENSORBOARD}
    there = SimpleNamespace(origin="somewhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there if name in names else None)
    return names


@pytest.mark.parametrize(
    ("log_with", "no_wandb", "expected"),
    [
        ("", False, [WANDB]),
        ("", True, []),
        ("none", False, []),
        ("wandb", False, [WANDB]),
        ("tensorboard", False, [TENSORBOARD]),
        ("all", False, [WANDB, TENSORBOARD]),
        ("all", True, [TENSORBOARD]),
    ],
)
def test_which_are_wanted(log_with: str, no_wandb: bool, expected: list[str], installed: set[str]) -> None:
    assert wanted(log_with, no_wandb) == (expected, [])


@pytest.mark.parametrize(
    ("name", "value", "off"),
    [("WANDB_MODE", "disabled", True), ("WANDB_MODE", "offline", False), ("WANDB_DISABLED", "true", True)],
)
def test_the_environment_can_switch_wandb_off(
    name: str, value: str, off: bool, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert wanted("all", False)[0] == ([TENSORBOARD] if off else [WANDB, TENSORBOARD])


def test_what_is_not_installed_is_missed_only_where_it_was_asked_for(installed: set[str]) -> None:
    installed.clear()
    assert wanted("", False) == ([], [])
    names, said = wanted("all", False)
    assert names == []
    assert [line.split()[1] for line in said] == [WANDB, TENSORBOARD]
    assert all("pip install" in line for line in said)


def test_a_folder_of_that_name_is_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=None))
    assert wanted("", False) == ([], [])


def test_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({new_id() for _ in range(100)}) == 100
    assert all(character.isalnum() for character in new_id())
    monkeypatch.setenv("WANDB_RUN_ID", "fromthesweep")
    assert new_id() == "fromthesweep"


def test_the_commit_of_the_code() -> None:
    told = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True)
    assert git_commit().rstrip("+") == told.stdout.strip()


# The other process, played


def play(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Another program in the place of the one that talks to W&B."""
    monkeypatch.setattr(tracking, "own_python", lambda module: ["python3", "-c", script])


ECHO = "import sys\nfor line in sys.stdin: open(sys.argv[1], 'a').write(line)"


def test_calls_arrive_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, ECHO)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "calls")])
    mine = WandB(tmp_path, {"id": "x"}, print)
    mine.store_init_configuration({"lr0": 0.1, "path": Path("a")})
    mine.log({"step": 3, "step/loss": float("nan")}, step=3)
    mine.log({"epoch": 1, "step": 3}, step=3)
    mine.pictures({"pictures/a": tmp_path / "\udcff.jpg"}, 3)
    mine.line("said")
    mine.finish()
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    assert [call["do"] for call in calls] == ["begin", "log", "log", "pictures", "line", "finish"]
    assert calls[0]["config"] == {"lr0": 0.1, "path": "a"}
    assert calls[0]["run"] == {"id": "x"}
    assert [call["axis"] for call in calls[1:3]] == ["step", "epoch"]
    assert calls[3]["files"]["pictures/a"].endswith("\udcff.jpg")


def test_one_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "import subprocess; subprocess.run(['sleep', '600'])")
    said: list[str] = []
    monkeypatch.setattr(tracking, "GRACE", 0.0)
    mine = WandB(tmp_path, {"id": "x"}, said.append)
    mine.store_init_configuration({})
    process = mine.process
    time.sleep(0.5)
    mine.finish(0.2)
    assert process is not None
    assert process.wait(5) == -signal.SIGKILL
    assert len(said) == 1
    assert said[0].startswith("warning: W&B has not ended after 0 s; what it got is in ")


@pytest.mark.parametrize(("own", "asked", "waited"), [(900.0, math.inf, 910.0), (60.0, 10.0, 20.0), (60.0, 90.0, 70.0)])
def test_how_long_the_end_is_waited_for(
    own: float, asked: float, waited: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(monkeypatch, ECHO)
    monkeypatch.setattr("sys.argv", [str(tmp_path / "calls")])
    found: list[float] = []
    mine = WandB(tmp_path, {"id": "x"}, print, own)
    mine.store_init_configuration({})
    assert mine.process is not None
    monkeypatch.setattr(mine.process, "wait", found.append)
    mine.finish(asked)
    mine.finish()
    assert found == [waited]


def test_one_that_dies_is_not_talked_to_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "")
    mine = WandB(tmp_path, {"id": "x"}, print)
    mine.store_init_configuration({})
    assert mine.process is not None
    mine.process.wait()
    for number in range(100):
        mine.log({"step": number, "text": "x" * 10**5}, step=number)
        time.sleep(0.001)
    assert mine.deaf
    assert mine.calls.qsize() < 100
    mine.finish()


def test_one_that_cannot_be_started_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "own_python", lambda module: [str(tmp_path / "nowhere")])
    said: list[str] = []
    mine = WandB(tmp_path, {"id": "x"}, said.append)
    mine.store_init_configuration({})
    mine.log({"step": 1}, step=1)
    mine.finish()
    assert said == ["warning: W&B cannot be started (No such file or directory); training goes on"]


def test_answers_are_said_and_a_stop_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"say": "hello"}, "no answer", {"say": "stopped", "stop": True}]
    play(monkeypatch, f"print({json.dumps('rubbish')}, *{list(map(json.dumps, answers))!r}, sep=chr(10))")
    said: list[str] = []
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    mine = WandB(tmp_path, {"id": "x"}, said.append)
    mine.store_init_configuration({})
    mine.finish()
    assert said == ["hello", "stopped"]
    assert sent == [(os.getpid(), signal.SIGTERM)]


def test_tensorboard_that_fails_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    mine = TensorBoard(tmp_path / "file", "x", said.append)
    mine.store_init_configuration({"a": 1})
    mine.log({"step": 1, "step/loss": 0.5}, step=1)
    mine.finish()
    assert len(said) == 1
    assert said[0].startswith("warning: TensorBoard has failed (")


# The other process itself


def test_a_half_line_is_the_end_and_the_run_is_closed(tmp_path: Path) -> None:
    """Its writer was killed while it wrote: what came before is kept, and the run counts as failed."""
    pytest.importorskip("wandb")
    run = {"project": "p", "id": "abc", "name": "n", "entity": None, "group": None, "tags": None}
    calls = [
        {"do": "begin", "folder": str(tmp_path), "run": run, "config": {}, "axes": [], "pid": os.getpid()}
        | {"patience": 9.0},
        {"do": "log", "values": {"step": 1, "step/loss": 0.5}, "step": 1, "axis": "step"},
        {"do": "log", "values": {"step": 2, "step/loss": 0.25}, "step": 2, "axis": "step"},
    ]
    lines = "".join(f"{json.dumps(call)}\n" for call in calls)
    ended = subprocess.run(
        [*own_python("utils.tracking.wandb_process"), "train.py"],
        input=lines[:-20],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "WANDB_MODE": "offline"},
    )
    assert "wandb sync" in json.loads(ended.stdout)["say"]
    (file,) = runs(tmp_path)
    found = read(file)
    assert [row["step/loss"] for row in found.rows] == [0.5]
    assert found.code == 1


def test_a_server_that_falls_silent_cannot_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    said: list[str] = []
    with serve() as server:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        arguments = {"project": "p", "id": "abc", "name": "n", "entity": None, "group": None, "tags": None}
        mine = WandB(tmp_path, arguments, said.append, patience=2.0)
        mine.store_init_configuration({})
        end = time.monotonic() + 60
        while not said and time.monotonic() < end:
            time.sleep(0.1)
        assert said == [f"W&B: {server.address}/me/p/runs/abc"]
        server.silent.set()
        mine.log({"step": 1, "step/loss": 0.5}, step=1)
        process = mine.process
        mine.finish()
    assert process is not None
    assert process.returncode in (0, 1)  # by itself
    assert [line.partition(";")[0] for line in said[1:]] == ["warning: W&B has not got all within 2 s"]
    (file,) = runs(tmp_path)
    assert [row["step/loss"] for row in read(file).rows] == [0.5]  # kept, for `wandb sync`


# Keys


@pytest.mark.parametrize(
    ("variable", "netrc", "own", "expected"),
    [
        ("", "", None, False),
        ("WANDB_API_KEY", "", None, True),
        ("", "machine api.wandb.ai login user password secret", None, True),
        ("", "machine elsewhere.org login user password secret", None, False),
        ("", "machine", None, False),  # damaged
        ("", "", "secret", True),
    ],
)
def test_is_there_a_key(
    variable: str, netrc: str, own: Any, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable:
        monkeypatch.setenv(variable, "secret")
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
    assert has_key(SimpleNamespace(base_url="https://api.wandb.ai", api_key=own)) == expected


def test_the_patience_with_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert wandb_process.reach() == wandb_process.START
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "7")
    assert wandb_process.reach() == 7
