"""--augmentations in whole runs: the same bytes on one, two and four processes, resumed, recorded, and trusted."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import RECIPE, CallMain, RunScript
from tests.curves import identical, refused, untouched
from tests.faults.fault_points import planted
from tests.making import write_yaml
from utils.files import ROOT

EXAMPLE = str(ROOT / "examples" / "own_augmentations.py")
Train = Callable[..., str]


@pytest.fixture(scope="module")
def train(run_script: RunScript, small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Two epochs of four batches of eight images, computed as by four processes."""
    hyp = write_yaml(tmp_path_factory.mktemp("hyp") / "often.yaml", {**RECIPE, "nbs": 16})
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(hyp), "--noautoanchor")
    how = ("--imgsz", "64", "--epochs", "2", "--batch-size", "8", "--device", "cpu", "--logical-processes", "4")

    def run(project: Path, *more: str, **variables: Any) -> str:
        return run_script("train.py", *what, *how, "--project", str(project), *more, **variables)

    return run


@pytest.fixture(scope="module")
def alone(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of one process without loader processes."""
    printed = train(project := tmp_path_factory.mktemp("alone"), "--augmentations", EXAMPLE, "--workers", "0")
    assert f"augmentations of {EXAMPLE}: fog, Cutout" in printed
    return project / "exp"


@pytest.mark.long
def test_killed_and_resumed_on_two_processes(train: Train, run_script: RunScript, alone: Path, tmp_path: Path) -> None:
    """With loader processes. The file is recorded, and run again without being named."""
    flags = ("--augmentations", EXAMPLE, "--workers", "2", "--save-steps", "1")
    train(tmp_path, *flags, **planted("SIGKILL", "optimizer step", 3), code=-signal.SIGKILL)
    assert yaml.safe_load((tmp_path / "exp" / "settings.yaml").read_text())["augmentations"] == EXAMPLE
    printed = run_script("train.py", "--resume", "--project", str(tmp_path), "--processes", "2")
    assert "augmentations of" in printed
    identical(tmp_path / "exp", alone)


def test_a_resumed_run_keeps_its_augmentations(call_main: CallMain, alone: Path) -> None:
    """Another file is refused."""
    with untouched(alone):
        code, printed = call_main("train.py", "--resume", str(alone), "--augmentations", "x.py")
    assert code == 1
    refused(printed, "--augmentations is 'x.py'")


@pytest.mark.long
def test_an_augmentation_that_fails(train: Train, tmp_path: Path) -> None:
    """One sentence, from a loader process of one of two processes."""
    file = tmp_path / "own_failing.py"
    file.write_text("def fail(image, rng):\n    assert rng.random() < 0\n\nAUGMENTATIONS = [fail]\n")
    flags = ("--augmentations", str(file), "--workers", "2", "--processes", "2")
    printed = train(tmp_path / "runs", *flags, fails=True)
    sentence = printed.partition("error: ")[2].splitlines()[0]
    assert sentence.startswith(f"{file}, line 2: AssertionError: AssertionError, in the augmentation 'fail' of ")
    assert sentence.endswith(".jpg; fix it there")
    assert "Traceback" not in printed
