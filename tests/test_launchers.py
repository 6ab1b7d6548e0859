"""A whole run without the names that Windows lacks, and a start by srun that is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import RunScript
from tests.curves import refused, rows
from utils.files import read_yaml

# Removes names that the modules `signal` and `os` do not have on Windows, and runs a script. The rest of Linux stays.
ABSENT = """
import enum, os, runpy, signal, sys
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "sigtimedwait", "pthread_sigmask"):
    delattr(signal, name)
signal.Signals = enum.IntEnum("Signals", {n: int(getattr(signal, n)) for n in ("SIGINT", "SIGTERM", "SIGABRT")})
for name in ("setpgid", "getpgid", "killpg", "sched_getaffinity"):
    delattr(os, name)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_a_run_without_the_names_that_windows_lacks(run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    """Loader processes too; --no-deterministic is said at the start."""
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--device", "cpu")
    how = ("--epochs", "1", "--batch-size", "8", "--workers", "1", "--no-deterministic", "--project", str(tmp_path))
    printed = run_script("train.py", *what, *how, launcher=(sys.executable, "-c", ABSENT), OMP_NUM_THREADS="1")
    assert "--no-deterministic: " in printed.partition("yolov5n.yaml: ")[0]
    assert read_yaml(tmp_path / "exp" / "settings.yaml")["no_deterministic"] is True
    assert len(rows(tmp_path / "exp")) == 1


def test_srun_without_start_sh_is_refused(run_script: RunScript) -> None:
    """Each task would train alone."""
    printed = run_script("train.py", "--device", "cpu", SLURM_STEP_NUM_TASKS="2", fails=True)
    refused(printed, "accelerate_configs/start.sh")
