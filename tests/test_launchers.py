"""Whole runs as srun and mpirun start them: one training of all tasks; a run without names that Windows lacks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.conftest import RunScript, free_port
from tests.curves import rows, same_curve
from tests.machines import by_hand
from utils.files import read_yaml

# Removes names that the modules `signal` and `os` do not have on Windows, and runs a script. The rest of Linux stays.
ABSENT = """
import enum, os, runpy, signal, sys
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT", "SIGKILL", "sigtimedwait", "pthread_sigmask"):
    delattr(signal, name)
signal.Signals = enum.IntEnum("Signals", {n: int(getattr(signal, n)) for n in ("SIGINT", "SIGTERM", "SIGABRT")})
for name in ("setpgid", "getpgid", "killpg", "sched_getaffinity"):
    delattr(os, name)
sys.argv = sys.argv[1:]
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def by_srun(rank: int) -> dict[str, str]:
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "here"}
    return {**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}


def by_mpirun(rank: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in numbers.items()}


@pytest.mark.long
@pytest.mark.parametrize("variables", [by_srun, by_mpirun])
def test_one_training_of_all_tasks(
    variables: Callable[[int], dict[str, str]], fine_tune: Callable[..., str], single: Path, tmp_path: Path
) -> None:
    port = free_port()
    with ThreadPoolExecutor() as pool:
        tasks = [
            pool.submit(fine_tune, tmp_path, "--sync-bn", MASTER_PORT=port, **variables(rank)) for rank in range(2)
        ]
    first, second = (task.result() for task in tasks)
    assert "batch size 8 (2 processes x 4)" in first
    assert "epoch" not in second  # only one of them prints
    assert [folder.name for folder in tmp_path.iterdir()] == ["exp"]
    same_curve(tmp_path / "exp", single)


@pytest.mark.parametrize(
    "variables",
    [{**by_hand(0, "29500", "no.such.host.invalid"), "WORLD_SIZE": "1"}, {**by_mpirun(1), "WORLD_SIZE": "1"}],
)
def test_one_process(variables: dict[str, str], run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    """It needs no store at the main process's address; mpirun may have started it as one of several separate runs."""
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--device", "cpu")
    how = ("--epochs", "1", "--batch-size", "8", "--workers", "0", "--dist-timeout", "5", "--project", str(tmp_path))
    printed = run_script("train.py", *what, *how, OMP_NUM_THREADS="1", **variables)
    assert "1 process," in printed
    assert len(rows(tmp_path / "exp")) == 1


@pytest.mark.long
def test_a_run_without_the_names_that_windows_lacks(run_script: RunScript, small_data: Path, tmp_path: Path) -> None:
    """Loader processes too; --no-deterministic is said at the start, and kept by --resume."""
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--device", "cpu")
    how = ("--epochs", "1", "--batch-size", "8", "--workers", "1", "--no-deterministic", "--project", str(tmp_path))
    printed = run_script("train.py", *what, *how, launcher=(sys.executable, "-c", ABSENT), OMP_NUM_THREADS="1")
    assert "--no-deterministic: " in printed.partition("yolov5n.yaml: ")[0]
    more = ("--resume", str(tmp_path / "exp"), "--epochs", "2")
    printed = run_script("train.py", *more, launcher=(sys.executable, "-c", ABSENT), OMP_NUM_THREADS="1")
    assert "--no-deterministic: " in printed.partition("yolov5n.yaml: ")[0]
    assert read_yaml(tmp_path / "exp" / "settings.yaml")["no_deterministic"] is True
    assert len(rows(tmp_path / "exp")) == 2
