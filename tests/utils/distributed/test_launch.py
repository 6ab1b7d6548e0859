"""The start of a run: the Accelerator, devices, the rendezvous, and the processes of one machine."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from torch import distributed

from tests.conftest import OnProcesses, without_greetings
from tests.cuda_queries import GIB, CudaQueries
from tests.making import launched, without_launcher
from utils.distributed import launch
from utils.distributed.failure import run_main
from utils.distributed.launch import (
    LAUNCHER_PRECISION,
    RENDEZVOUS,
    Precision,
    choose_precision,
    connect,
    describe_device,
    device_kind,
    device_name,
    device_numbers,
    loader_workers,
    log_plan,
    one_device,
    open_store,
    processes_to_start,
    rendezvous_errors,
    reset_accelerate,
    seed_everything,
    spawn,
    start,
)
from utils.distributed.ranks import Ranks, ranks
from utils.errors import UserError
from utils.files import ROOT

# The Accelerator


DEFAULTS = {"cpu": "no", "mps": "no", "cuda": "bf16", "cuda without bf16": "fp16"}
LAUNCH_FILES = sorted(
    file for file in (ROOT / "accelerate_configs").glob("*.yaml") if "compute_environment" in file.read_text()
)  # the others are for clusters


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)
    monkeypatch.delenv(LAUNCHER_PRECISION, raising=False)


def start_twice() -> int:
    """Start as if the launcher had restarted the processes with the same store, the second one late."""
    start("cpu", "no", 60.0)
    distributed.destroy_process_group()
    reset_accelerate()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if ranks().rank == 1:
        time.sleep(1)
    accelerator, _ = start("cpu", "no", 10.0)
    return int(accelerator.reduce(torch.tensor([ranks().rank + 1]))[0])


def test_a_restarted_launch_ignores_the_addresses_of_the_last_attempt(on_processes: OnProcesses) -> None:
    assert on_processes(2, start_twice) == [3, 3]


@pytest.mark.parametrize(
    ("processes", "accumulation", "batch", "epoch"),
    [
        (1, 2, "batch size 8 (1 process), 2 batches per optimizer step (16 images)", "5 batches, 3 optimizer steps"),
        (2, 1, "batch size 8 (2 processes x 4), 1 batch per optimizer step (8 images)", "5 batches, 5 optimizer steps"),
    ],
)
def test_plan(processes: int, accumulation: int, batch: str, epoch: str, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator: Any = SimpleNamespace(num_processes=processes, gradient_accumulation_steps=accumulation)
    log_plan(accelerator, batch_size=8, batches=5, epochs=4)
    assert capsys.readouterr().out.splitlines() == [batch, f"{epoch} per epoch; 4 epochs"]


@pytest.mark.parametrize(
    ("cuda", "deterministic", "message"),
    [
        (True, True, ""),
        (False, True, ""),
        (True, False, "--no-deterministic: equal runs differ by rounding\n"),
        (False, False, "--no-deterministic: no effect without CUDA\n"),
    ],
)
def test_deterministic_kernels(
    cuda: bool,
    deterministic: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(cuda and not deterministic)  # of a run before
    try:
        seed_everything(7, deterministic)
        assert capsys.readouterr().out == message
        assert torch.are_deterministic_algorithms_enabled() == (cuda and deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    assert int(torch.randint(10**9, ())) == int(torch.randint(10**9, (), generator=torch.Generator().manual_seed(7)))


def test_a_process_on_the_cpu_keeps_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr("utils.distributed.launch.keep_freed_memory", lambda: calls.append("kept"))
    start("cpu", "no", 60.0)
    reset_accelerate()
    assert calls == ["kept"]


# Precision: the same rule for every way to launch, every launch file and every device


def set_device(monkeypatch: pytest.MonkeyPatch, device: str) -> str:
    """Stub what the device is fast at; return its kind."""
    kind, _, lacking = device.partition(" ")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: not lacking)
    return kind


@pytest.mark.parametrize("device", DEFAULTS)
@pytest.mark.parametrize("named", ["", "no", "bf16", "fp16"])
def test_a_flag_then_the_launcher_then_the_device(named: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """'no' of a launcher is not a choice: `accelerate launch` sets it if its user names nothing."""
    kind = set_device(monkeypatch, device)
    monkeypatch.setenv(LAUNCHER_PRECISION, named)
    for requested in ("", "no", "bf16", "fp16"):
        expected = requested or named.removeprefix("no") or DEFAULTS[device]
        if (kind, expected) == ("cpu", "fp16"):
            with pytest.raises(UserError, match=r"fp16 .* on the CPU; use one of no, bf16"):
                choose_precision(requested, kind, by_zero=False)
        else:
            assert choose_precision(requested, kind, by_zero=False).name == expected


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda file: file.name)
def test_a_launch_file_that_names_a_precision_gets_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `accelerate launch` passes it on."""
    named = yaml.safe_load(file.read_text()).get("mixed_precision", "no")
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    monkeypatch.setenv(LAUNCHER_PRECISION, _validate_launch_command(arguments)[0].mixed_precision)
    assert choose_precision("", "cpu", by_zero=False).name == named


@pytest.mark.parametrize(
    ("requested", "named", "reason"),
    [("no", "bf16", "by a flag"), ("", "bf16", LAUNCHER_PRECISION), ("", "no", "the default on the CPU")],
)
def test_the_reason_names_its_source(requested: str, named: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_PRECISION, named)
    assert reason in str(choose_precision(requested, "cpu", by_zero=False))


def test_a_default_of_deepspeed_is_never_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    set_device(monkeypatch, "cuda without bf16")
    assert choose_precision("", "cuda", by_zero=True).name == "no"


@pytest.mark.parametrize(
    ("name", "by_zero", "message"), [("fp8", False, "use one of no, fp16"), ("fp16", True, "bf16")]
)
def test_other_precisions_are_refused(name: str, by_zero: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER_PRECISION, name)
    with pytest.raises(UserError, match=message):
        choose_precision("", "cuda", by_zero)


def chosen_by_two() -> Precision:
    """Return the precision of a process whose own launcher names another one than the main process's."""
    os.environ[LAUNCHER_PRECISION] = ("bf16", "fp16")[ranks().rank]
    return start("cpu", "", 60.0)[1]


def test_all_processes_take_the_choice_of_the_main_one(on_processes: OnProcesses) -> None:
    first, second = itertools.repeat(choose_precision("bf16", "cpu", by_zero=False).name, 2)
    assert [precision.name for precision in on_processes(2, chosen_by_two)] == [first, second]


# Devices


@pytest.mark.parametrize(
    ("device", "numbers"),
    [("", []), ("cpu", []), ("mps", []), ("0", [0]), ("2,3", [2, 3]), ("cuda:1", [1]), ("cuda:1, cuda:0", [1, 0])],
)
def test_device_numbers(device: str, numbers: list[int]) -> None:
    assert device_numbers(device) == numbers


@pytest.mark.parametrize("device", ["gpu", "0,", "0,0", "-1", "0;1", "cuda"])
def test_an_invalid_device_is_refused(device: str) -> None:
    with pytest.raises(UserError, match=f"--device {device}"):
        device_numbers(device)


@pytest.mark.parametrize(
    ("device", "processes", "expected"),
    [("", 0, 1), ("cpu", 0, 1), ("0", 0, 1), ("0,1", 0, 2), ("0,1", 2, 2), ("cpu", 3, 3), ("", 2, 2), ("0", 1, 1)],
)
def test_processes_to_start(device: str, processes: int, expected: int) -> None:
    assert processes_to_start(processes, device) == expected


@pytest.mark.parametrize(("device", "processes"), [("0,1", 3), ("0", 2), ("mps", 2), ("0,1", 1)])
def test_processes_must_match_the_devices(device: str, processes: int) -> None:
    with pytest.raises(UserError, match=f"--processes {processes} --device {device}"):
        processes_to_start(processes, device)


def test_processes_must_match_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 4, 4)
    with pytest.raises(UserError, match="the launcher has started 4"):
        processes_to_start(2, "cpu")
    assert processes_to_start(4, "cpu") == 4


def set_cuda_devices(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [("", "2,3", "2,3"), ("", "1", "1"), ("4,5,6,7", "3,0", "7,4"), ("GPU-a,GPU-b", "1", "GPU-b")],
)
def test_only_the_named_devices_are_visible(
    visible: str, device: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cuda_devices(monkeypatch, visible.count(",") + 1 if visible else 4)
    launched(monkeypatch, device.count(",") + 1, device.count(",") + 1)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_kind(device) == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_a_second_run_of_a_process_gets_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA numbers the devices anew once some are hidden."""
    set_cuda_devices(monkeypatch, 4)
    assert device_kind("1") == "cuda"
    set_cuda_devices(monkeypatch, 1)
    assert device_kind("1") == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(UserError, match=r"^--device 2: torch sees 1 CUDA device"):
        device_kind("2")


def test_the_cpu_is_used_without_a_gpu_or_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cuda_devices(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert device_kind("") == "cpu"
    set_cuda_devices(monkeypatch, 1)
    assert device_kind("") == "cuda"
    assert device_kind("cpu") == "cpu"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # by accelerate launch --cpu
    assert device_kind("") == "cpu"


@pytest.mark.parametrize(("gpus", "apple", "expected"), [(0, False, "cpu"), (0, True, "mps"), (2, False, "cuda")])
def test_the_best_device_of_a_prediction(
    gpus: int, apple: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cuda_devices(monkeypatch, gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: apple)
    assert one_device("") == torch.device(expected)


@pytest.mark.parametrize(
    ("device", "devices", "processes", "message"),
    [
        ("7", 4, 1, "torch sees 4 CUDA devices here; try --device 3"),
        ("0", 0, 1, "no CUDA device here; try --device cpu"),
        ("0", 4, 2, "names 1 CUDA device for the 2 processes"),
        ("", 1, 4, "torch sees 1 CUDA device for the 4 processes"),
    ],
)
def test_too_few_devices_are_an_error(
    device: str, devices: int, processes: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cuda_devices(monkeypatch, devices)
    launched(monkeypatch, processes, processes)
    with pytest.raises(UserError, match=message):
        device_kind(device)


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert (loader_workers(8), loader_workers(3), loader_workers(0)) == (8, 3, 0)
    launched(monkeypatch, 8, 4)
    assert loader_workers(8) == 2


def test_descriptions() -> None:
    cpu = torch.device("cpu")
    threads = f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)}"
    assert describe_device(cpu) == threads
    assert device_name(cpu) == f"{os.uname().nodename} cpu ({threads})"


def test_descriptions_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    CudaQueries(devices=2, name="NVIDIA H200", total=139 * GIB).install(monkeypatch)
    gpu = torch.device("cuda", 1)
    assert describe_device(gpu) == "NVIDIA H200, 139 GiB"
    assert device_name(gpu) == f"{os.uname().nodename} cuda:1 (NVIDIA H200, 139 GiB)"
    assert one_device("") == torch.device("cuda")
    assert one_device("1") == gpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [device_kind(device) for device in ("0,1", "", "cpu")] == ["cuda", "cuda", "cpu"]


def test_an_apple_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for choose in (one_device, device_kind):
        with pytest.raises(UserError, match="--device mps: this machine has no Apple GPU"):
            choose("mps")


# The rendezvous


def test_gloo_uses_the_interface_with_a_route_to_the_main_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    device_kind("cpu")
    assert "GLOO_SOCKET_IFNAME" not in os.environ  # not needed by one process
    for processes in (2, 4):  # on one machine, and on two
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        launched(monkeypatch, processes, 2)
        device_kind("cpu")
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    device_kind("cpu")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"


def test_an_unreachable_main_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("RANK", "1")
    with socket.socket() as closed:  # bound, but not listening
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(UserError) as raised:
            open_store(0.1)
    assert f"127.0.0.1 port {port} cannot be reached within 0.1 s" in str(raised.value)


def test_errors_of_the_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2, 1)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29501")
    with pytest.raises(UserError, match=r"10.0.0.1:29501 within 5 s \(no route\)"), rendezvous_errors(5.0):
        raise RuntimeError("no route\nmore")


# A process per device


def my_ranks() -> tuple[Ranks, str, str, int]:
    distributed.init_process_group("gloo")
    total = torch.tensor([ranks().rank + 1])
    distributed.all_reduce(total)
    return ranks(), os.environ["OMP_NUM_THREADS"], multiprocessing.get_start_method(), int(total)


def test_spawn(on_processes: OnProcesses) -> None:
    """The start method, that of loader processes, is the default of the system."""
    method, environment = multiprocessing.get_start_method(), dict(os.environ)
    assert on_processes(3, my_ranks) == [(Ranks(rank, 3, rank, 3), "1", method, 6) for rank in range(3)]
    assert dict(os.environ) == environment  # a later run of this process may have other numbers


def listening_addresses() -> list[str]:
    """Return the addresses at which this process and the one that started it listen."""
    distributed.init_process_group("gloo", init_method=f"{RENDEZVOUS}://")
    connections = [
        each for process in (psutil.Process(), psutil.Process().parent()) for each in process.net_connections()
    ]
    distributed.barrier()
    return [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]


def test_no_other_machine_can_connect_to_the_processes_of_one(on_processes: OnProcesses) -> None:
    (addresses, others) = on_processes(2, listening_addresses)
    assert set(addresses) | set(others) == {"127.0.0.1"}


def test_spawn_does_nothing_for_one_process_or_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not spawn(pytest.fail, 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not spawn(pytest.fail, 2)


# The end of processes: functions that they run


def all_fail() -> None:
    distributed.init_process_group("gloo")
    raise UserError("the same on all")


def fail_before_meeting() -> None:
    raise UserError("the same on all")


def the_first_fails() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 0:
        raise UserError("on the first only")
    distributed.all_reduce(torch.ones(1))


def the_last_fails() -> None:
    distributed.init_process_group("gloo")
    if ranks().rank == 2:
        raise UserError("on the last only")
    distributed.all_reduce(torch.ones(1))


def the_last_is_killed() -> None:
    connect("cpu", 60.0)
    if ranks().rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(torch.ones(1))


def the_last_leaves_silently() -> None:
    connect("cpu", 60.0)
    if ranks().rank == 2:
        time.sleep(1)  # the others are waiting for it
        os._exit(0)
    distributed.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("work", "processes", "part"),
    [
        (all_fail, 2, "the same on all"),
        pytest.param(fail_before_meeting, 2, "the same on all", marks=pytest.mark.long),
        pytest.param(the_first_fails, 2, "on the first only", marks=pytest.mark.long),
        pytest.param(the_last_fails, 3, "on the last only", marks=pytest.mark.long),
        pytest.param(the_last_is_killed, 3, "process 2 on", marks=pytest.mark.long),
        (the_last_leaves_silently, 3, "process 2 on"),
    ],
)
def test_a_failed_run_prints_one_line(
    work: object, processes: int, part: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: spawn(work, processes))  # type: ignore[arg-type]
    assert caught.value.code == 1
    printed = capfd.readouterr()
    assert printed.err.count("error: ") == 1, printed
    assert part in printed.err
    assert "Traceback" not in printed.err
    assert without_greetings(printed.out) == ""


def test_a_killed_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(launch, "SHUTDOWN_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"process 1 on \S+ was killed by SIGKILL"):
        spawn(kill_the_second, 2)


def kill_the_second() -> None:
    if ranks().rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def test_the_second_ctrl_c_kills_processes_that_ignore_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("SURVIVED", str(tmp_path / "survived"))
    before = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        spawn(press_ctrl_c_twice, 2)
    assert (tmp_path / "survived").exists()
    assert time.monotonic() - before < 300  # far less than the processes sleep


def press_ctrl_c_twice() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ranks().rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(1)
        Path(os.environ["SURVIVED"]).touch()
        os.kill(os.getppid(), signal.SIGINT)
    time.sleep(1000)
