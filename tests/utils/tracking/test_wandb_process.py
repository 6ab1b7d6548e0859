"""The W&B process: the end of a training that has died, the key, and the time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.wandb_files import read, runs
from utils.background import own_python
from utils.tracking import wandb_process
from utils.tracking.wandb_process import connect_timeout, has_key, unreachable


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
    assert "wandb sync" in json.loads(ended.stdout)["print"]
    (file,) = runs(tmp_path)
    run_file = read(file)
    assert [row["step/loss"] for row in run_file.rows] == [0.5]
    assert run_file.code == 1


@pytest.mark.parametrize(
    ("variable", "netrc", "setting", "expected"),
    [
        ("", "", None, False),
        ("WANDB_API_KEY", "", None, True),
        ("", "machine api.wandb.ai login user password secret", None, True),
        ("", "machine elsewhere.org login user password secret", None, False),
        ("", "machine", None, False),  # damaged
        ("", "", "secret", True),
    ],
)
def test_the_key_is_found(
    variable: str, netrc: str, setting: Any, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable:
        monkeypatch.setenv(variable, "secret")
    if netrc:
        (tmp_path / ".netrc").write_text(netrc)
    assert has_key(SimpleNamespace(base_url="https://api.wandb.ai", api_key=setting)) == expected


def test_the_time_to_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_timeout() == wandb_process.WANDB_CONNECT_SECONDS
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "7")
    assert connect_timeout() == 7


def test_a_server_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up long before wandb's own time limit; behind a proxy wandb tries by itself."""
    monkeypatch.setattr(wandb_process, "WANDB_REACH_SECONDS", 0.6)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert unreachable(url) == f"{url} cannot be reached (Connection refused)"
        monkeypatch.setenv("http_proxy", url)
        assert unreachable(url) == ""
        monkeypatch.delenv("http_proxy")
        taken.listen()
        assert unreachable(url) == ""
