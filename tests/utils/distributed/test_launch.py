"""The start of a run: the Accelerator, devices, the rendezvous, and the processes of one machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch import distributed

from tests.conftest import OnProcesses, free_port, without_greetings
from tests.making import launched, without_launcher
from tests.processes import forking
from utils.distributed import launch
from utils.distributed import ranks as ranks_module
from utils.distributed.failure import run_main
from utils.distributed.launch import RENDEZVOUS
from utils.distributed.ranks import Ranks, RunStore, open_store, ranks
from utils.errors import UserError
from utils.files import ROOT

LAUNCH_FILES = sorted(
    file for file in (ROOT / "accelerate_configs").glob("*.yaml") if "compute_environment" in file.read_text()
)  # the others are for clusters


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    monkeypatch.delenv(launch.LAUNCHER_PRECISION, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


# The Accelerator


def start_twice() -> tuple[str, int, str]:
    """Start as if the launcher had restarted the processes with the same store, the second one late.

    The launchers of the processes name different precisions, and no network.
    """
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ[launch.LAUNCHER_PRECISION] = ("bf16", "fp16")[ranks().rank]
    _, precision = launch.start("cpu", "", 60.0)
    distributed.destroy_process_group()
    launch.reset_accelerate()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if ranks().rank == 1:
        time.sleep(1)
    accelerator, _ = launch.start("cpu", "no", 10.0)
    total = int(accelerator.reduce(torch.tensor([ranks().rank + 1]))[0])
    return precision.name, total, os.environ["GLOO_SOCKET_IFNAME"]


def test_a_restart_ignores_old_addresses_and_all_take_the_main_processs_precision(on_processes: OnProcesses) -> None:
    """Gloo uses the interface with a route to the main process."""
    assert on_processes(2, start_twice) == [("bf16", 3, "lo")] * 2


@pytest.mark.parametrize(("cuda", "deterministic"), [(True, True), (False, True), (True, False)])
def test_deterministic_kernels(cuda: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(cuda and not deterministic)  # of a run before
    try:
        launch.seed_everything(7, deterministic)
        assert torch.are_deterministic_algorithms_enabled() == (cuda and deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.initial_seed() == 7


# Precision: the same rule for every way to launch, every launch file and every device

DEFAULTS = {"cpu": "no", "mps": "no", "cuda": "bf16", "cuda without bf16": "fp16"}


@pytest.mark.parametrize("device", DEFAULTS)
@pytest.mark.parametrize("named", ["", "no", "bf16", "fp16"])
def test_a_flag_then_the_launcher_then_the_device(named: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """'no' of a launcher is not a choice: `accelerate launch` sets it if its user names nothing."""
    kind, _, lacking = device.partition(" ")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not lacking)
    monkeypatch.setenv(launch.LAUNCHER_PRECISION, named)
    for requested in ("", "no", "bf16", "fp16"):
        expected = requested or named.removeprefix("no") or DEFAULTS[device]
        if (kind, expected) == ("cpu", "fp16"):
            with pytest.raises(UserError, match="no, bf16"):
                launch.choose_precision(requested, kind, by_zero=False)
        else:
            assert launch.choose_precision(requested, kind, by_zero=False).name == expected


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda file: file.name)
def test_a_launch_file_that_names_a_precision_gets_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` passes it on."""
    named = yaml.safe_load(file.read_text()).get("mixed_precision", "no")
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    monkeypatch.setenv(launch.LAUNCHER_PRECISION, _validate_launch_command(arguments)[0].mixed_precision)
    assert launch.choose_precision("", "cpu", by_zero=False).name == named


def test_deepspeed_has_no_fp16_and_fp8_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    assert launch.choose_precision("", "cuda", by_zero=True).name == "no"
    for name, by_zero in (("fp8", False), ("fp16", True)):
        monkeypatch.setenv(launch.LAUNCHER_PRECISION, name)
        with pytest.raises(UserError, match=name):
            launch.choose_precision("", "cuda", by_zero)


# Devices


@pytest.mark.parametrize(
    ("device", "numbers"),
    [
        *(("", []), ("cpu", []), ("mps", []), ("0", [0]), ("2,3", [2, 3]), ("cuda:1, cuda:0", [1, 0]), ("cuda", [0])),
        *((device, None) for device in ("gpu", "0,", "0,0", "-1", "0;1")),
    ],
)
def test_device_numbers(device: str, numbers: list[int] | None) -> None:
    with pytest.raises(UserError, match=f"--device {device}") if numbers is None else nullcontext():
        assert launch.device_numbers(device) == numbers


@pytest.mark.parametrize(
    ("device", "processes", "launched_processes", "expected"),
    [("", 0, 1, 0), ("0", 0, 1, 0), ("0,1", 0, 1, 2), ("0,1", 2, 1, 2), ("cpu", 3, 1, 3), ("cpu", 4, 4, 0),
     ("0,1", 3, 1, None), ("0", 2, 1, None), ("mps", 2, 1, None), ("0,1", 1, 1, None), ("cpu", 2, 4, None),
     ("cpu", 1000, 1, None), ("cpu", 10**20, 1, None)],
)  # fmt: skip
def test_the_number_of_processes_to_start(
    device: str, processes: int, launched_processes: int, expected: int | None, monkeypatch: Any, tmp_path: Path
) -> None:
    launched(monkeypatch, launched_processes, launched_processes)
    if launched_processes == 1:
        monkeypatch.delenv("LOCAL_RANK")
    refused = pytest.raises(UserError, match=f"--processes {processes}")
    with forking(), nullcontext() if expected is not None else refused:
        assert launch.spawn(partial(write_rank, tmp_path), processes, device) == bool(expected)
    assert {file.name for file in tmp_path.iterdir()} == {str(rank) for rank in range(expected or 0)}


def write_rank(folder: Path) -> None:
    (folder / str(ranks().rank)).touch()


def set_devices(monkeypatch: pytest.MonkeyPatch, devices: int, apple: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [("", "2,3", "2,3"), ("", "1", "1"), ("4,5,6,7", "3,0", "7,4"), ("GPU-a,GPU-b", "1", "GPU-b")],
)
def test_only_the_named_devices_are_visible(
    visible: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run of the process gets the same ones, though CUDA numbers the devices anew once some are hidden."""
    count = device.count(",") + 1
    launched(monkeypatch, count, count)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    for devices in (visible.count(",") + 1 if visible else 4, count):
        set_devices(monkeypatch, devices)
        assert launch.select_device_type(device) == "cuda"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
    with pytest.raises(UserError, match="another GPU"):
        launch.select_device_type("0,1,2")


def test_the_best_device_or_the_requested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpus, apple, expected in ((0, False, "cpu"), (0, True, "mps"), (2, False, "cuda")):
        set_devices(monkeypatch, gpus, apple)
        assert launch.select_device_type("") == expected
        assert launch.devices_named("")[0].type == expected
        assert launch.select_device_type("cpu") == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # by accelerate launch --cpu
    assert launch.select_device_type("") == "cpu"
    for choose in (launch.devices_named, launch.select_device_type):
        with pytest.raises(UserError, match="--device mps"):
            choose("mps")


@pytest.mark.parametrize(("device", "devices", "processes"), [("7", 4, 1), ("0", 0, 1), ("0", 4, 2), ("", 1, 4)])
def test_too_few_devices_are_an_error(
    device: str, devices: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_devices(monkeypatch, devices)
    launched(monkeypatch, processes, processes)
    with pytest.raises(UserError, match=f"--device {device}" if device else "CUDA device"):
        launch.select_device_type(device)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "450000 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_processes_of_a_machine_share_its_cores(
    quota: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cores of the affinity mask, or fewer if a container has a quota (cgroup v2 and v1)."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(ranks_module, "CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    for name, text in quota.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert launch.cores_per_process() == cores
    launched(monkeypatch, 8, 4)
    assert launch.cores_per_process() == cores // 4


# The environment


@pytest.mark.parametrize(
    "variables",
    [
        *(
            "ACCELERATE_USE_CPU=maybe",
            "ACCELERATE_USE_CPU=",
            "ACCELERATE_TORCH_DEVICE=x",
            "ACCELERATE_DYNAMO_BACKEND=x",
        ),
        *("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=x", "ACCELERATE_USE_FSDP=true", "ACCELERATE_USE_MEGATRON_LM=1"),
        "ACCELERATE_USE_DEEPSPEED=true",  # no launcher
        "LOCAL_RANK=0 ACCELERATE_USE_DEEPSPEED=true ACCELERATE_DEEPSPEED_ZERO_STAGE=9",
        "RANK=1 WORLD_SIZE=2 MASTER_PORT=99999",
        "RANK=1 WORLD_SIZE=2 OMP_NUM_THREADS=abc",
    ],
)
def test_a_wrong_variable_is_named(variables: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is wrong."""
    for variable in variables.split():
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{name} is '{value}'"):
        launch.start("cpu", "", 0.1)
    launch.reset_accelerate()


# The rendezvous


def test_an_unreachable_main_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("RANK", "1")
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError, match=f"127.0.0.1 port {port}"):
            launch.connect("cpu", 0.1)
    launch.reset_accelerate()


def test_a_missing_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 3, 1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    limit = timedelta(seconds=launch.COLLECTIVE_MARGIN_SECONDS + 0.2)
    with pytest.raises(UserError, match=r"1 of 3 .*rank 1, 2;"):
        distributed.init_process_group("gloo", init_method=f"{RENDEZVOUS}://", timeout=limit)


def test_two_processes_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be of two runs, neither of which may end the other."""
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("MASTER_PORT", free_port())
    store = RunStore(open_store(10.0))
    store.write_once("names/1", ["process 1 on another", 7])
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="process 1 on another"):
        open_store(10.0)


@pytest.mark.parametrize(("here", "warned"), [("192.0.2.7", True), ("192.0.2.1", False), ("127.0.0.1", False)])
def test_a_main_process_elsewhere(
    here: str, warned: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 has the address `here`, and should have 192.0.2.1, or a name for itself in 127.0.0.0/8."""
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("MASTER_PORT", free_port())
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: (here, 9))
    monkeypatch.setattr(socket.socket, "getpeername", lambda _: ("192.0.2.1", 9))
    try:
        with pytest.raises(UserError, match="1 of 2"):
            launch.connect("cpu", 2.0)
    finally:
        launch.reset_accelerate()
    assert ("warning: MASTER_ADDR 192.0.2.1 is no address of this machine" in capfd.readouterr().out) == warned


# A process per device

UNGUARDED = """
from functools import partial
from utils.distributed.launch import spawn
spawn(partial(print, "once by each process"), 2)
"""


@pytest.mark.parametrize("flags", [["unguarded.py"], []])
def test_a_call_from_python_needs_no_guard(flags: list[str], tmp_path: Path) -> None:
    """A started process does not run the caller's script again; without flags it is stdin."""
    (tmp_path / "unguarded.py").write_text(UNGUARDED)
    where = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *flags], input=UNGUARDED, cwd=tmp_path, env=where, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "once by each process\n" * 2, "")


def my_ranks() -> tuple[Ranks, str, str, int, set[str]]:
    """Return what a process knows, and the addresses at which it and the one that started it listen."""
    distributed.init_process_group("gloo", init_method=f"{RENDEZVOUS}://")
    total = torch.tensor([ranks().rank + 1])
    distributed.all_reduce(total)
    connections = [
        each for process in (psutil.Process(), psutil.Process().parent()) for each in process.net_connections()
    ]
    distributed.barrier()
    listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    return ranks(), os.environ["OMP_NUM_THREADS"], multiprocessing.get_start_method(), int(total), listening


def test_spawn(on_processes: OnProcesses) -> None:
    """The start method, that of loader processes, is the system's default; no other machine can connect."""
    method = multiprocessing.get_start_method()
    everywhere = ("1", method, 6, {"127.0.0.1"})
    assert on_processes(3, my_ranks) == [(Ranks(rank, 3, rank, 3), *everywhere) for rank in range(3)]


# The end of processes: functions that they run


def end_one(culprit: int, how: str) -> None:
    launch.connect("cpu", 60.0)
    if how == "error":
        raise UserError("an error of process 0, 1 and 2")
    if ranks().rank == culprit:
        time.sleep(1)  # the others are waiting for it
        os._exit(0)
    distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("culprit", "how", "named"), [(-1, "error", "an error of process"), (2, "leaves", "process 2 on")]
)
def test_a_failed_run_prints_one_line(culprit: int, how: str, named: str, capfd: pytest.CaptureFixture[str]) -> None:
    with forking(printing=True), pytest.raises(SystemExit) as caught:
        run_main(lambda: launch.spawn(partial(end_one, culprit, how), 3))
    assert caught.value.code == 1
    printed = capfd.readouterr()
    assert printed.err.startswith("error: ")
    assert named in printed.err
    assert printed.err.count("\n") == 1
    assert without_greetings(printed.out) == ""


def test_a_killed_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SHUTDOWN_SECONDS", 0.1)
    with forking(), pytest.raises(UserError, match=r"process 1 on \S+ was killed by SIGKILL"):
        launch.spawn(kill_the_second, 2)


def kill_the_second() -> None:
    if ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_the_second_ctrl_c_kills_processes_that_ignore_the_first(tmp_path: Path) -> None:
    before = time.monotonic()
    with forking(), pytest.raises(KeyboardInterrupt):
        launch.spawn(partial(press_ctrl_c_twice, tmp_path / "survived"), 2)
    assert (tmp_path / "survived").exists()
    assert time.monotonic() - before < 300  # far less than the processes sleep


def press_ctrl_c_twice(survived: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ranks().rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1)
        survived.touch()
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1000)


def test_a_signal_before_the_first_step_is_the_exit_code() -> None:
    with forking(), pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):
        launch.spawn(end_the_parent, 2)


def end_the_parent() -> None:
    if ranks().rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(1000)
