"""The trackers that flags and environment request, and the names of their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from utils.tracking.requested import make_trackers, wandb_arguments

NAMES = ("project", "entity", "group", "tags", "name", "notes", "job_type", "id")


@pytest.mark.parametrize(
    ("project", "variables", "expected"),
    [
        ("runs/train", {}, {"project": "lockstep", "name": "exp3", "job_type": "train"}),
        ("runs/cats", {}, {"project": "cats", "name": "exp3", "job_type": "train"}),
        (
            "runs/cats",
            {
                **{"PROJECT": "p", "NAME": "n", "ENTITY": "e", "RUN_GROUP": "g", "TAGS": "one,two", "NOTES": "why"},
                **{"JOB_TYPE": "search", "DIR": "/elsewhere"},
            },
            {
                **{"project": "p", "name": "n", "entity": "e", "group": "g", "tags": ["one", "two"], "notes": "why"},
                **{"job_type": "search", "dir": "/elsewhere"},
            },
        ),
    ],
)
def test_wandbs_variables_name_the_run(
    project: str, variables: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    arguments = wandb_arguments(project, "abc", Path("runs/train/exp3"), "train")
    assert arguments == {**dict.fromkeys(NAMES), "id": "abc", **expected}


def test_other_jobs_are_named_by_their_folder(installed: set[str]) -> None:
    assert wandb_arguments("runs/train", "abc", Path("runs/val/exp3"), "val")["name"] == "val-exp3"
    assert wandb_arguments("runs/train", "abc", Path("best-val"), "val")["name"] == "best-val"


def test_trackers_of_all_kinds(installed: set[str], tmp_path: Path) -> None:
    """Those of Accelerate know the same project and name as W&B."""
    installed.add("mlflow")
    trackers, warnings = make_trackers("runs/cats", "mlflow,tensorboard,wandb", "abc", tmp_path / "exp", print, "train")
    assert warnings == []
    assert [tracker.name for tracker in trackers] == ["mlflow", "tensorboard", "wandb"]
    assert trackers[0].run == {"project": "cats", "name": "exp", "id": "abc"}
