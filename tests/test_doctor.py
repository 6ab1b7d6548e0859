"""The doctor: whole runs of `train.py --doctor`, on one machine and on two."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, CallMain, RunScript, data_yaml
from tests.machines import by_hand
from tests.making import write_image, write_yaml

PORT = "29500"
NAMED = 'name=$1; shift; echo "$name" > /proc/sys/kernel/hostname; exec "$@"'


@pytest.fixture
def flags(small_data: Path, tmp_path: Path) -> list[str]:
    what = ["--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--batch-size", "4"]
    return [*what, "--device", "cpu", "--workers", "1", "--project", str(tmp_path / "runs"), "--doctor"]


@pytest.fixture
def doctor(run_script: RunScript, flags: list[str], tmp_path: Path) -> Callable[..., str]:
    """Run the doctor on a small job on the CPU; return its output."""

    def run(*more: str, **how: Any) -> str:
        printed = run_script("train.py", *flags, *more, **{"OMP_NUM_THREADS": "1", **how})
        assert not (tmp_path / "runs").exists()
        return printed

    return run


def tables(printed: str) -> int:
    """Return the number of printed tables."""
    return sum(line.split()[:2] == ["host", "rank"] for line in printed.splitlines())


def errors(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("error: ")]


def test_one_process(call_main: CallMain, flags: list[str], tmp_path: Path) -> None:
    code, printed = call_main("train.py", *flags)
    assert (code, tables(printed), errors(printed)) == (0, 1, [])
    assert "train: 28 images" in printed
    for name in ("train", "val"):
        write_image(tmp_path / f"images/{name}/a.png")
    unlabelled = write_yaml(tmp_path / "my.yaml", {"train": "images/train", "val": "images/val", "names": ["a"]})
    for data, named in ((str(unlabelled), "`train:`"), ("nowhere.yaml", "nowhere.yaml")):
        code, printed = call_main("train.py", *flags, "--data", data)
        (error,) = errors(printed)
        assert (code, tables(printed)) == (1, 1)
        assert named in error
    assert not (tmp_path / "runs").exists()


def on_host(hosts: Sequence[str], rank: int) -> tuple[str, ...]:
    """Return the prefix of a command on one of two machines, with host names a and b if that is permitted."""
    named = ("unshare", "--uts", "bash", "-c", NAMED, "-", "ab"[rank])
    works = subprocess.run([*named, "true"], capture_output=True).returncode == 0
    return ("ip", "netns", "exec", hosts[rank], *(named if works else ()))


def test_differences_between_machines_are_errors(
    hosts: tuple[str, str], doctor: Callable[..., str], small_data: Path, tmp_path: Path
) -> None:
    """Machine b has another copy of the repository and of the data, and another flag."""
    copy = tmp_path / "repository"
    for part in ("models", "data", "utils", "accelerate_configs"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("*.py"):
        shutil.copy(script, copy)
    with (copy / "utils" / "training" / "optimizer.py").open("a") as file:
        file.write("# changed\n")
    other_data = data_yaml(shutil.copytree(small_data.with_suffix(""), tmp_path / "other"))
    next((tmp_path / "other" / "images" / "train").iterdir()).unlink()

    def machine(rank: int, *more: str) -> str:
        # run_script appends the repository's train.py, which bash gets as $1 and drops.
        other = ("bash", "-c", f'{sys.executable} {copy / "train.py"} "${{@:2}}"', "-")
        launcher = (*on_host(hosts, rank), *(other if rank else (sys.executable,)))
        more = more if rank else ()
        return doctor("--dist-timeout", "30", *more, launcher=launcher, fails=True, **by_hand(rank, PORT, "10.77.0.1"))

    with ThreadPoolExecutor() as pool:
        printed = list(pool.map(lambda rank: machine(rank, "--data", str(other_data), "--epochs", "7"), (0, 1)))
        main, _ = pool.map(lambda rank: machine(rank, "--data", "nowhere.yaml"), (0, 1))
    assert [tables(text) for text in printed] == [1, 0]
    found = errors(printed[0])
    for error, what in zip(found, ["the code", "the data (train)", "labels of train", "--epochs"], strict=True):
        assert what in error
        assert "rank 0 has " in error
        assert "rank 1 has " in error
    assert not errors(printed[1])
    assert "rank 1: data set 'nowhere.yaml'" in errors(main)[0]
