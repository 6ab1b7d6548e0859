"""The W&B workspace of a project: what is sent to the server, and the errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.wandb_server import serve
from utils.files import ROOT, read_yaml
from utils.tracking.workspace import SECTIONS, SWEPT, main


def workspace(project: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "utils.tracking.workspace", project]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(command, cwd=ROOT, env={**kept, **variables}, capture_output=True, text=True, timeout=60)


def test_the_sections_in_their_order() -> None:
    pytest.importorskip("wandb_workspaces")
    with serve() as server:
        ended = workspace("me/shapes", WANDB_API_KEY="0" * 40, WANDB_BASE_URL=server.address)
    assert (ended.returncode, ended.stdout) == (0, f"saved: {server.address}/me/shapes?nw=x\n")
    (view,) = server.views
    assert (view["entityName"], view["projectName"], view["displayName"]) == ("me", "shapes", "Lockstep")
    bank = json.loads(view["spec"])["section"]["panelBankConfig"]
    assert not bank["settings"]["sortAlphabetically"]
    assert [section["name"] for section in bank["sections"]][: len(SECTIONS)] == [*SECTIONS]
    assert all(section["isOpen"] for section in bank["sections"][: len(SECTIONS)])
    (panel,) = bank["sections"][SECTIONS.index("sweep")]["panels"]
    columns = [column["accessor"] for column in panel["config"]["columns"]]
    assert columns == [*(f"config:hyperparameters.value.{name}" for name in SWEPT), "summary:best/fitness"]


def test_its_hyperparameters_are_those_of_the_sweep() -> None:
    assert {f"hyp.{name}" for name in SWEPT} <= {*read_yaml(ROOT / "sweep.yaml")["parameters"]}
    assert read_yaml(ROOT / "sweep.yaml")["metric"]["name"] == "best/fitness"


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["shapes"])
    assert raised.value.code == 2
    assert "give ENTITY/PROJECT" in capsys.readouterr().err
