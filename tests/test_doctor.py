"""The doctor: whole runs of `train.py --doctor`, on one machine and on two."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, RunScript, free_port
from tests.machines import ACCELERATE, CONFIGS, by_hand
from tests.making import write_image, write_yaml
from utils.files import read_yaml

PORT = "29500"
LAUNCHER_LOGS = "/torch/distributed/elastic/agent/"
NAMED = 'name=$1; shift; echo "$name" > /proc/sys/kernel/hostname; exec "$@"'


@pytest.fixture
def doctor(run_script: RunScript, small_data: Path, tmp_path: Path) -> Callable[..., str]:
    """Run the doctor on a small job on the CPU; return its output."""
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--imgsz", "64", "--batch-size", "4")
    how = ("--device", "cpu", "--workers", "1", "--project", str(tmp_path / "runs"))

    def run(*flags: str, **more: Any) -> str:
        printed = run_script("train.py", *what, *how, "--doctor", *flags, **{"OMP_NUM_THREADS": "1", **more})
        assert not (tmp_path / "runs").exists()
        # A launcher logs its own traceback if the main machine ends first.
        assert not any("Traceback" in line for line in printed.splitlines() if LAUNCHER_LOGS not in line), printed
        return printed

    return run


def heads(printed: str) -> int:
    """Return the number of printed tables."""
    return sum(line.startswith("host  ") for line in printed.splitlines())


def errors(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("error: ")]


# One machine


def test_one_process(doctor: Callable[..., str]) -> None:
    printed = doctor()
    assert heads(printed) == 1
    assert not errors(printed)
    assert printed.splitlines()[-1] == "the job can start"
    train, val = (line for line in printed.splitlines() if line.startswith(("train: ", "val: ")))
    assert re.fullmatch(r"train: 28 images \(\d+ without boxes\), \d+ boxes", train)
    assert re.fullmatch(r"val: \d+ images \(\d+ without boxes\), \d+ boxes", val)


def test_a_data_set_without_labels_is_an_error(doctor: Callable[..., str], tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_image(tmp_path / f"images/{name}/a.png")
    content = {"train": "images/train", "val": "images/val", "names": ["a"]}
    printed = doctor("--data", str(write_yaml(tmp_path / "my.yaml", content)), fails=True)
    (error,) = errors(printed)
    assert "no image of `train:` has a label; the label file of" in error
    assert printed.splitlines()[-1] == "the job would fail: 1 error to fix first"


def test_an_error_fails_the_doctor(doctor: Callable[..., str]) -> None:
    printed = doctor("--data", "nowhere.yaml", fails=True)
    assert heads(printed) == 1
    (error,) = errors(printed)
    assert "rank 0: data set 'nowhere.yaml' is not a file" in error
    assert printed.splitlines()[-1] == "the job would fail: 1 error to fix first"


@pytest.mark.long
def test_two_processes(doctor: Callable[..., str]) -> None:
    printed = doctor("--processes", "2")
    assert heads(printed) == 1
    assert not errors(printed)
    assert printed.splitlines()[-1] == "the job can start"


@pytest.mark.long
def test_a_missing_process_is_an_error(doctor: Callable[..., str]) -> None:
    port = free_port()
    flags = ("--dist-timeout", "3")
    printed = doctor(*flags, fails=True, **by_hand(0, port))
    assert heads(printed) == 1
    (error,) = errors(printed)
    assert "no answer from rank 1" in error
    assert f"open 127.0.0.1 port {port}" in error
    printed = doctor(*flags, fails=True, **by_hand(1, port))
    assert heads(printed) == 0
    (error,) = errors(printed)
    assert f"the main process at 127.0.0.1 port {port} cannot be reached" in error


# Two machines


def on_host(hosts: Sequence[str], rank: int) -> tuple[str, ...]:
    """Return the prefix of a command on one of two machines, with host names a and b if that is permitted."""
    named = ("unshare", "--uts", "bash", "-c", NAMED, "-", "ab"[rank])
    works = subprocess.run([*named, "true"], capture_output=True).returncode == 0
    return ("ip", "netns", "exec", hosts[rank], *(named if works else ()))


@pytest.fixture
def both(hosts: tuple[str, str], doctor: Callable[..., str]) -> Callable[..., list[str]]:
    """Run the doctor on two machines with a process each; return both outputs. flags: of machine b."""

    def run(*flags: str, ends: Sequence[str] = (sys.executable,), patience: str = "30", **more: Any) -> list[str]:
        def machine(rank: int) -> str:
            launcher = (*on_host(hosts, rank), *(ends if rank else (sys.executable,)))
            given = ("--dist-timeout", patience, *(flags if rank else ()))
            return doctor(*given, launcher=launcher, **more, **by_hand(rank, PORT, "10.77.0.1"))

        with ThreadPoolExecutor() as pool:
            return list(pool.map(machine, (0, 1)))

    return run


@pytest.mark.long
def test_two_machines_by_accelerate(hosts: tuple[str, str], doctor: Callable[..., str]) -> None:
    config = ("--config_file", str(CONFIGS / "2node.yaml"), "--main_process_ip", "10.77.0.1")

    def machine(rank: int) -> str:
        launcher = (*on_host(hosts, rank), *ACCELERATE, *config, "--machine_rank", str(rank))
        return doctor("--dist-timeout", "60", launcher=launcher)

    with ThreadPoolExecutor() as pool:
        printed = list(pool.map(machine, (0, 1)))
    assert [heads(text) for text in printed] == [1, 0]
    assert not errors("".join(printed))
    assert "the job can start" in printed[0]


def test_differences_between_machines_are_errors(
    both: Callable[..., list[str]], small_data: Path, tmp_path: Path
) -> None:
    """Machine b has another copy of the repository and of the data, and another flag."""
    copy = tmp_path / "repository"
    for part in ("models", "data", "utils", "accelerate_configs"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("train.py", "job.py", "val.py"):
        shutil.copy(ROOT / script, copy)
    with (copy / "utils" / "training" / "ema.py").open("a") as file:
        file.write("# changed\n")
    content = read_yaml(small_data)
    shutil.copytree(content["path"], tmp_path / "elsewhere")
    next((tmp_path / "elsewhere" / "images" / "train").iterdir()).unlink()
    (tmp_path / "other.yaml").write_text(yaml.safe_dump({**content, "path": str(tmp_path / "elsewhere")}))

    # run_script appends the repository's train.py, which bash gets as $1 and drops.
    other = ("bash", "-c", f'{sys.executable} {copy / "train.py"} "${{@:2}}"', "-")
    printed = both("--data", str(tmp_path / "other.yaml"), "--epochs", "7", ends=other, fails=True)
    assert [heads(text) for text in printed] == [1, 0]
    messages = errors(printed[0])
    assert len(messages) == 4, printed
    for error, what in zip(
        messages,
        [
            "the code differs",
            "the data (train) differs",
            "the data (labels of train)",
            "--epochs",
        ],
        strict=True,
    ):
        assert what in error
        assert "rank 0 has " in error
        assert "rank 1 has " in error
    assert "rank 1 has 27 files" in messages[1]
    assert not errors(printed[1])


@pytest.mark.long
def test_missing_data_on_one_machine_is_an_error(both: Callable[..., list[str]]) -> None:
    printed = both("--data", "nowhere.yaml", fails=True)
    (error,) = errors(printed[0])
    assert "rank 1: data set 'nowhere.yaml' is not a file" in error
    assert not errors(printed[1])
