"""Devices: those that --device names, the processes for them, and the CPU cores."""

from __future__ import annotations

import os

import pytest
import torch

from tests.making import launched, without_launcher
from tests.rehearsal.cuda_queries import GIB, CudaQueries
from utils.distributed.devices import (
    choose_devices,
    describe_device,
    device_kind,
    device_name,
    device_numbers,
    loader_workers,
    one_device,
    processes_to_start,
    refuse_unsupported_launch,
)
from utils.errors import UserError


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


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
    assert processes_to_start(device, processes) == expected


@pytest.mark.parametrize(("device", "processes"), [("0,1", 3), ("0", 2), ("mps", 2), ("0,1", 1)])
def test_processes_must_match_the_devices(device: str, processes: int) -> None:
    with pytest.raises(UserError, match=f"--processes {processes} --device {device}"):
        processes_to_start(device, processes)


def test_processes_must_match_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 4, 4)
    with pytest.raises(UserError, match="the launcher has started 4"):
        processes_to_start("cpu", 2)
    assert processes_to_start("cpu", 4) == 4


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
    assert not choose_devices(device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_a_second_run_of_a_process_gets_the_same_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA numbers the devices anew once some are hidden."""
    set_cuda_devices(monkeypatch, 4)
    assert not choose_devices("1")
    set_cuda_devices(monkeypatch, 1)
    assert not choose_devices("1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(UserError, match=r"^--device 2: torch sees 1 CUDA device"):
        choose_devices("2")


def test_the_cpu_is_used_without_a_gpu_or_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cuda_devices(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_devices("")
    set_cuda_devices(monkeypatch, 1)
    assert not choose_devices("")
    assert choose_devices("cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")  # by accelerate launch --cpu
    assert choose_devices("")


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
        ("0", 4, 2, "names 1 device for the 2 processes"),
        ("", 1, 4, "started 4 processes on this machine, but torch sees 1 CUDA device;"),
    ],
)
def test_too_few_devices_are_an_error(
    device: str, devices: int, processes: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cuda_devices(monkeypatch, devices)
    launched(monkeypatch, processes, processes)
    with pytest.raises(UserError, match=message):
        choose_devices(device)


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
    for choose in (one_device, choose_devices):
        with pytest.raises(UserError, match="--device mps: this machine has no Apple GPU"):
            choose("mps")


# What would train otherwise without a word


def test_fsdp_is_refused_on_the_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="accelerate launch requests FSDP"):
        refuse_unsupported_launch("cpu")


@pytest.mark.parametrize("name", ["xpu", "hpu"])
def test_another_accelerator_needs_a_decision(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"an accelerator that is not supported: {name}; add --device cpu"):
        refuse_unsupported_launch("")
    refuse_unsupported_launch("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    refuse_unsupported_launch("")


def test_a_tpu_needs_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="not supported: TPU; add --device cpu"):
        refuse_unsupported_launch("")


@pytest.mark.parametrize("processes", [9, 1000, 10**20])
def test_far_more_processes_than_cores_are_refused(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert processes_to_start("cpu", 8) == 8
    with pytest.raises(UserError, match=rf"--processes {processes} is more than 4 .* 2 cores; give at most 8"):
        processes_to_start("cpu", processes)
