"""The trackers that flags and environment request, and the names of their runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from utils.tracking.requested import TrackerOptions, make_trackers, wandb_arguments

NAMES = ("project", "entity", "group", "tags", "name", "notes", "job_type", "id")


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        ({}, {}, {"project": "lockstep", "name": "exp3", "job_type": "train"}),
        ({"project": "runs/cats"}, {}, {"project": "cats", "name": "exp3", "job_type": "train"}),
        (
            {"project": "runs/cats"},
            {
                **{"PROJECT": "p", "NAME": "n", "ENTITY": "e", "RUN_GROUP": "g", "TAGS": "one,two", "NOTES": "why"},
                **{"JOB_TYPE": "search", "DIR": "/elsewhere"},
            },
            {
                **{"project": "p", "name": "n", "entity": "e", "group": "g", "tags": ["one", "two"], "notes": "why"},
                **{"job_type": "search", "dir": "/elsewhere"},
            },
        ),
        (
            {
                **{"wandb_project": "mine", "wandb_name": "first", "wandb_entity": "me", "wandb_group": "all"},
                **{"wandb_tags": ("three",), "wandb_notes": "because", "wandb_job_type": "tune"},
            },
            {
                **{"PROJECT": "p", "NAME": "n", "ENTITY": "e", "RUN_GROUP": "g", "TAGS": "one,two", "NOTES": "why"},
                "JOB_TYPE": "search",
            },
            {
                **{"project": "mine", "name": "first", "entity": "me", "group": "all", "tags": ["three"]},
                **{"notes": "because", "job_type": "tune"},
            },
        ),
    ],
)
def test_flags_count_more_than_variables(
    options: dict[str, Any], variables: dict[str, str], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    given = TrackerOptions(**{"project": "runs/train", "wandb_id": "abc", **options})
    arguments = wandb_arguments(given, Path("runs/train/exp3"), "train")
    assert arguments == {**dict.fromkeys(NAMES), "id": "abc", **expected}


def test_other_jobs_are_named_by_their_folder(installed: set[str]) -> None:
    given = TrackerOptions(project="runs/train", wandb_id="abc")
    assert wandb_arguments(given, Path("runs/val/exp3"), "val")["name"] == "val-exp3"
    assert wandb_arguments(given, Path("best-export"), "export")["name"] == "best-export"


def test_trackers_of_all_kinds(installed: set[str], tmp_path: Path) -> None:
    """Those of Accelerate know the same project and name as W&B."""
    installed.add("mlflow")
    options = TrackerOptions(project="runs/cats", log_with="mlflow,tensorboard,wandb", wandb_id="abc")
    trackers, warnings = make_trackers(options, tmp_path / "exp", print, "train")
    assert warnings == []
    assert [tracker.name for tracker in trackers] == ["mlflow", "tensorboard", "wandb"]
    assert trackers[0].run == {"project": "cats", "name": "exp", "id": "abc"}
