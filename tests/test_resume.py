"""Whole runs that are killed, stopped and resumed end like undisturbed ones."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import NOT_HERE, RECIPE, ROOT, CallMain, RunScript, data_yaml, not_here
from tests.curves import identical, refused, same_curve, untouched
from tests.faults.fault_points import planted
from tests.machines import ACCELERATE, CONFIGS, left_behind, on_machine
from tests.making import write_yaml
from utils.checkpoint import StateFiles
from utils.files import lock_folder, read_yaml

HERE = ("--processes", "2")
FILES_OF_DATA = {
    f"{folder}/{split}": f"the {what} of `{split}:`"
    for folder, what in (("images", "file sizes"), ("labels", "labels"))
    for split in ("train", "val")
}
Train = Callable[..., str]


@pytest.fixture(scope="module")
def flags(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Three epochs of seven batches of four images: optimizer steps after the second, fourth, sixth and seventh."""
    recipe = write_yaml(tmp_path_factory.mktemp("hyp") / "often.yaml", {**RECIPE, "nbs": 8})
    what = ("--data", str(small_data), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(recipe))
    how = ("--imgsz", "64", "--epochs", "3", "--batch-size", "4", "--workers", "1", "--device", "cpu")
    return *what, *how, "--noautoanchor", "--noplots"


@pytest.fixture(scope="module")
def train(run_script: RunScript, flags: tuple[str, ...]) -> Train:
    """Train into a project; return what was printed."""

    def run(project: Path, *more: str, **how: Any) -> str:
        return run_script("train.py", *flags, "--project", str(project), *more, **{"OMP_NUM_THREADS": "1", **how})

    return run


@pytest.fixture(scope="module")
def resume(run_script: RunScript) -> Train:
    """Resume the run in a project, with no other flag; return what was printed."""

    def run(project: Path, *more: str, **how: Any) -> str:
        given = ("--resume", "--project", str(project), *more)
        return run_script("train.py", *given, **{"OMP_NUM_THREADS": "1", **how})

    return run


@pytest.fixture(scope="module")
def undisturbed(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run of one process."""
    train(project := tmp_path_factory.mktemp("undisturbed"))
    return project / "exp"


@pytest.fixture(scope="module")
def undisturbed_on_two(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    train(project := tmp_path_factory.mktemp("undisturbed2"), *HERE)
    return project / "exp"


# Killed


def test_killed_in_an_epoch_and_later(train: Train, resume: Train, undisturbed: Path, tmp_path: Path) -> None:
    """One kill after another; files that were half written are removed."""
    train(tmp_path, "--save-steps", "1", **planted("SIGKILL", "optimizer step", 3), code=-signal.SIGKILL)
    resume(tmp_path, **planted("SIGKILL", "flush to disk", 3), code=-signal.SIGKILL)
    assert list(tmp_path.rglob("*.part"))
    assert "resuming " in resume(tmp_path)
    identical(tmp_path / "exp", undisturbed)
    assert not list(tmp_path.rglob("*.part"))


def test_a_second_thread_of_a_killed_run(train: Train, resume: Train, undisturbed: Path, tmp_path: Path) -> None:
    """On two cores the default is a thread, and a second one for the gradients of weights; resumed, it is so again."""
    if len(cores := sorted(os.sched_getaffinity(0))[:2]) < 2:
        not_here("two cores")
    how = {"launcher": ("taskset", "-c", ",".join(map(str, cores)), sys.executable), "OMP_NUM_THREADS": ""}
    fault = planted("SIGKILL", "optimizer step", 3)
    assert "steps are small: 1 thread" in train(tmp_path, "--save-steps", "1", **fault, **how, code=-signal.SIGKILL)
    assert "CPU threads" not in resume(tmp_path, **how)
    identical(tmp_path / "exp", undisturbed)
    receipt = read_yaml(tmp_path / "exp" / "receipt.yaml")
    assert (receipt["environment"]["device"], receipt["resumed"]) == ("1 thread", [])


@pytest.mark.long
def test_a_launcher_starts_it_again(train: Train, undisturbed_on_two: Path, tmp_path: Path) -> None:
    """With --max_restarts and --resume auto a killed process is started again and resumes the run."""
    launcher = (*ACCELERATE, "--config_file", str(CONFIGS / "cpu.yaml"), "--max_restarts", "1")
    fault = planted("SIGKILL", "optimizer step", 6, rank=1)
    printed = train(tmp_path, "--resume", "auto", launcher=launcher, **fault)
    assert "resuming " in printed
    identical(tmp_path / "exp", undisturbed_on_two)


# Asked to end


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("SIGTERM", 143),
        pytest.param("SIGUSR1", 138, marks=pytest.mark.long),
        pytest.param("SIGHUP", 129, marks=pytest.mark.long),
        pytest.param("SIGINT", 130, marks=pytest.mark.long),
    ],
)
def test_asked_to_end(word: str, code: int, train: Train, resume: Train, undisturbed: Path, tmp_path: Path) -> None:
    printed = train(tmp_path, **planted(word, "loss"), code=code)
    assert f"stopped by {word} in epoch 1, after batch 2; " in printed
    assert "--resume" in printed
    assert not (tmp_path / "exp" / "results.csv").exists()
    resume(tmp_path)
    identical(tmp_path / "exp", undisturbed)


@pytest.mark.long
def test_two_machines_without_a_shared_disk(
    hosts: tuple[str, str], train: Train, undisturbed_on_two: Path, tmp_path: Path
) -> None:
    """The second machine gets the signal, saves nothing, and resumes from the state of the first."""

    def on_both(*flags: str, **how: Any) -> list[str]:
        def machine(rank: int) -> str:
            return train(tmp_path / str(rank), *flags, launcher=on_machine(hosts[rank], rank), **how)

        with ThreadPoolExecutor() as pool:
            return list(pool.map(machine, (0, 1)))

    printed = on_both(**planted("SIGTERM", "loss", 9, rank=1), fails=True)
    assert "stopped by SIGTERM in epoch 2, after batch 4" in printed[0]
    assert "resuming " in on_both("--resume", "auto")[0]
    assert not (tmp_path / "1").exists()
    identical(tmp_path / "0" / "exp", undisturbed_on_two)


@pytest.mark.long
def test_under_another_stage_of_zero(train: Train, undisturbed: Path, tmp_path: Path) -> None:
    """A run under ZeRO-2 is resumed under another stage, and then by one process without DeepSpeed."""
    for config, number, rank in (("2", 2, 1), ("3", 6, 0)):
        launcher = (*ACCELERATE, "--config_file", str(CONFIGS / f"deepspeed_zero{config}.yaml"))
        fault = planted("SIGTERM", "loss", number, rank)
        printed = train(tmp_path, "--sync-bn", "--resume", "auto", launcher=launcher, fails=True, **fault)
        assert "stopped by SIGTERM" in printed
    train(tmp_path, "--sync-bn", "--resume", "auto")
    same_curve(tmp_path / "exp", undisturbed)


@pytest.mark.long
def test_the_time_limit(train: Train, undisturbed: Path, tmp_path: Path) -> None:
    """It is reached at the first step: the run is saved and validated, with exit code 0."""
    printed = train(tmp_path, "--time-limit", "0.0001")
    assert "stopped by the time limit in epoch 1, after batch 2; " in printed
    assert "mAP50-95" in printed
    assert (tmp_path / "exp" / "weights" / "last.pt").is_file()
    train(tmp_path, "--resume", "auto")
    identical(tmp_path / "exp", undisturbed)


# What is resumed


@pytest.mark.long
def test_a_finished_run(call_main: CallMain, flags: tuple[str, ...], undisturbed: Path, tmp_path: Path) -> None:
    """It is left unchanged and is small; more epochs, and changes that the curve depends on, are refused by name."""
    shutil.copytree(undisturbed, tmp_path / "exp")

    def resume(*more: str) -> str:
        return call_main("train.py", *flags, "--project", str(tmp_path), "--resume", *more)[1]

    (state,) = StateFiles(tmp_path / "exp" / "checkpoint").files()
    assert state.stat().st_size < 100_000
    with untouched(tmp_path):
        for run in ("auto", str(tmp_path / "exp" / "weights" / "best.pt")):
            assert f"{tmp_path / 'exp'} is finished" in resume(run)
        refused(resume("--batch-size", "8"), "--batch-size is 8")
        refused(resume("--epochs", "5"), "--epochs 5")


def test_other_classes_photos_and_labels_are_refused(
    call_main: CallMain, flags: tuple[str, ...], train: Train, small_data: Path, tmp_path: Path
) -> None:
    """Files of the same names, in either split, moved to another folder."""
    train(tmp_path, "--save-steps", "1", **planted("SIGKILL", "optimizer step", 3), code=-signal.SIGKILL)
    data = data_yaml(shutil.copytree(small_data.with_suffix(""), tmp_path / "data"))

    def resume(*more: str) -> tuple[int, str]:
        return call_main("train.py", *flags, "--data", str(data), "--project", str(tmp_path), "--resume", *more)

    with untouched(tmp_path / "exp"):
        refused(resume("--imgsz", "96")[1], "--imgsz (it was")
        first = {folder: sorted((data.with_suffix("") / folder).iterdir())[0] for folder in FILES_OF_DATA}
        for file, named in [*((file, FILES_OF_DATA[folder]) for folder, file in first.items()), (data, "the classes")]:
            content = file.read_bytes()
            file.write_bytes(content.replace(b"disc", b"disk") if file == data else content + b"0 0.5 0.5 0.5 0.5\n")
            refused(resume()[1], named)
            file.write_bytes(content)
    assert resume()[0] == 0


def test_nothing_to_resume(call_main: CallMain, tmp_path: Path) -> None:
    project = tmp_path / "runs"
    for more, named in {(): str(project), (str(project / "no"),): str(project / "no")}.items():
        code, printed = call_main("train.py", "--project", str(project), "--resume", *more)
        assert code == 1
        refused(printed, named)
    assert not project.exists()


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_on_a_gpu(precision: str, train: Train, tmp_path: Path) -> None:
    """The resumed run is equal to the bit, including the state of the loss scaler."""
    flags = ("--device", "0", "--mixed-precision", precision)
    train(tmp_path / "undisturbed", *flags)
    train(tmp_path, *flags, **planted("SIGKILL", "optimizer step", 6), code=-signal.SIGKILL)
    train(tmp_path, *flags, "--resume", "auto")
    identical(tmp_path / "exp", tmp_path / "undisturbed" / "exp")


@pytest.mark.long
def test_killed_before_there_was_a_state(train: Train, undisturbed: Path, tmp_path: Path) -> None:
    """It starts again in the same folder."""
    train(tmp_path, **planted("SIGKILL", "optimizer step"), code=-signal.SIGKILL)
    train(tmp_path, "--resume", "auto")
    assert [folder.name for folder in tmp_path.iterdir()] == ["exp"]
    identical(tmp_path / "exp", undisturbed)


def test_a_folder_that_a_live_run_is_writing(call_main: CallMain, flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "exp").mkdir()
    lock = lock_folder(tmp_path / "exp")
    try:
        code, printed = call_main("train.py", *flags, "--project", str(tmp_path), "--exist-ok")
    finally:
        lock.release()
    assert code == 1
    refused(printed, str(tmp_path / "exp"))


@pytest.mark.skipif(sys.platform != "linux", reason=f"{NOT_HERE}a folder in which root can make no files")
def test_a_folder_that_cannot_be_written(call_main: CallMain, flags: tuple[str, ...]) -> None:
    code, printed = call_main("train.py", *flags, "--project", "/sys", "--name", "kernel", "--exist-ok")
    assert code == 1
    refused(printed, "/sys/kernel")


# Nothing outlives its run


@contextmanager
def running(tmp_path: Path, command: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Start a run within the `with` block; check that no process of it is left behind."""
    mark = f"LOCKSTEP_TEST={tmp_path}"
    run = subprocess.Popen(
        ["env", mark, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield run
    finally:
        left = left_behind(mark)
        for process in left:
            process.kill()
    assert not left


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((sys.executable,), id="one"),
        pytest.param((sys.executable, *HERE), id="two", marks=pytest.mark.long),
        pytest.param((*ACCELERATE, "--config_file", str(CONFIGS / "cpu.yaml")), id="launcher", marks=pytest.mark.long),
    ],
)
def test_the_main_process_is_killed(launcher: Sequence[str], flags: tuple[str, ...], tmp_path: Path) -> None:
    """It is killed by SIGKILL, so it cannot notify the others."""
    more = [word for word in HERE if word in launcher]
    command = [*(word for word in launcher if word not in HERE), "train.py", *flags, "--project", str(tmp_path), *more]
    with running(tmp_path, [*command, "--epochs", "500", "--workers", "2"]) as run:
        while not (tmp_path / "exp" / "results.csv").exists():
            assert run.poll() is None
            time.sleep(0.1)
        assert len(left_behind(f"LOCKSTEP_TEST={tmp_path}", patience=0)) > 2  # loader processes
        run.kill()
        run.wait()


@pytest.mark.long
@pytest.mark.parametrize("processes", [(), HERE], ids=["one", "two"])
def test_ctrl_c_twice(processes: Sequence[str], flags: tuple[str, ...], tmp_path: Path) -> None:
    """The second one does not wait for the end of the step, which here never ends."""
    command = [sys.executable, "train.py", *flags, "--project", str(tmp_path), *processes, "--save-steps", "1"]
    with running(tmp_path, command, **planted("stall", "loss", 6, rank=0)) as run:
        while not StateFiles(tmp_path / "exp" / "checkpoint").files():  # the first step is over
            assert run.poll() is None
            time.sleep(0.1)
        time.sleep(1)
        run.send_signal(signal.SIGINT)
        time.sleep(1)
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        _, printed = run.communicate(timeout=60)
    assert run.returncode == 130
    assert printed.endswith("interrupted\n")
