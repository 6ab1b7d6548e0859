"""How much fits, and what is said where it does not."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from utils.errors import UserError
from utils.training.memory import MIB, explained, fitting_workers, is_out_of_memory, largest_batch


def launched(monkeypatch: pytest.MonkeyPatch, processes: int, here: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))


# Shared memory


def shared_memory(monkeypatch: pytest.MonkeyPatch, mib: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=mib * MIB // 4096, f_frsize=4096))


@pytest.mark.parametrize(
    ("mib", "workers", "here", "fit"),
    [
        (64, 8, 1, 2),  # three batches of 10 MiB for each loader process
        (60, 8, 1, 2),
        (59, 8, 1, 1),
        (29, 8, 1, 0),
        (240, 8, 1, 8),
        (1000, 8, 1, 8),
        (240, 8, 2, 4),  # training processes share it
        (29, 0, 1, 0),
    ],
)
def test_loader_processes_that_fit(
    mib: int, workers: int, here: int, fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_memory(monkeypatch, mib)
    launched(monkeypatch, 2 * here, here)
    found, said = fitting_workers(workers, 10 * MIB)
    assert found == fit
    assert len(said) == (fit < workers)


def test_fewer_loader_processes_than_asked_for_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    shared_memory(monkeypatch, 64)
    assert fitting_workers(8, 10 * MIB)[1] == [
        "warning: /dev/shm has 64 MiB free, enough for the batches of 2 loader processes of each training process "
        "instead of 8; make it larger (docker run --shm-size)"
    ]


def test_systems_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", missing)
    assert fitting_workers(8, 10 * MIB) == (8, [])
    monkeypatch.delattr(os, "statvfs")
    assert fitting_workers(8, 10 * MIB) == (8, [])


# Running out of memory


def told(error: BaseException, batch_size: int = 16) -> str:
    """What is said of an error."""
    with pytest.raises(UserError) as caught, explained(batch_size, 640):
        raise error
    assert caught.value.__suppress_context__
    return str(caught.value)


CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "a GPU"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), "a GPU"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "a GPU"),
        (MemoryError(), "the machine"),
        (RuntimeError(CPU), "the machine"),
    ],
)
def test_out_of_memory(error: BaseException, where: str) -> None:
    assert told(error) == (
        f"out of memory of {where} with --batch-size 16 at 640 pixels; try --batch-size 8 (in a new run: the batch "
        "size is part of a curve)"
    )


def test_torch_s_own_error_on_a_cpu() -> None:
    with pytest.raises(UserError, match="out of memory of the machine"), explained(16, 640):
        torch.empty(2**50)


@pytest.mark.parametrize(
    ("batch_size", "processes", "tried"),
    [
        (16, 1, "--batch-size 8"),
        (9, 1, "--batch-size 4"),
        (2, 1, "--batch-size 1"),
        (12, 4, "--batch-size 4"),  # 6 cannot be shared by 4
        (30, 3, "--batch-size 15"),
        (1, 1, "a smaller --imgsz than 640, or a smaller model"),
        (4, 4, "a smaller --imgsz than 640, or a smaller model"),
    ],
)
def test_what_to_try(batch_size: int, processes: int, tried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, processes, processes)
    assert f"; try {tried} (in a new run" in told(MemoryError(), batch_size)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("no"), UserError("mend it")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explained(16, 640):
        raise error
    assert caught.value is error
    assert not is_out_of_memory(error)


def test_nothing_wrong() -> None:
    with explained(16, 640):
        pass


# AutoBatch


class Device:
    """One with so much memory, a model that takes `kept`, and `each` for an image; notes which batches were tried."""

    def __init__(self, memory: float, kept: int = 100, each: int = 10) -> None:
        self.memory, self.kept, self.each = memory, kept, each
        self.tried: list[int] = []

    def peak(self, size: int) -> int:
        self.tried.append(size)
        if (used := self.kept + self.each * size) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return used


def test_the_largest_batch_leaves_a_fifth_of_the_memory() -> None:
    device = Device(1000)
    assert largest_batch(device.peak, 1000, 10_000) == 70  # 100 + 70 x 10 are 800
    assert device.tried == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(("kept", "each", "free"), [(1, 1, 99), (3, 7, 12345), (500, 1, 1000), (0, 100, 1000)])
def test_no_larger_one_would_do(kept: int, each: int, free: int) -> None:
    size = largest_batch(Device(free, kept, each).peak, free, 10**6)
    assert kept + each * size <= 0.8 * free < kept + each * (size + 1)


@pytest.mark.parametrize("most", [1, 5, 28])
def test_no_more_than_there_are_images(most: int) -> None:
    device = Device(1e9)
    assert largest_batch(device.peak, 10**9, most) == most
    assert max(device.tried) <= most


def test_a_batch_that_did_not_fit_is_not_taken() -> None:
    """Less can be had than is free: the line through what was measured leads beyond what has failed."""
    device = Device(200)
    assert largest_batch(device.peak, 1000, 10_000) == 8  # 100 + 8 x 10; 16 failed
    assert device.tried == [1, 2, 4, 8, 16]


def test_an_image_alone_that_takes_more_than_the_share() -> None:
    assert largest_batch(Device(1000, 850).peak, 1000, 64) == 1


def test_an_image_alone_that_does_not_fit() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        largest_batch(Device(1000, 1200).peak, 1000, 64)


def test_memory_that_does_not_grow() -> None:
    assert largest_batch(Device(1000, 450, 0).peak, 1000, 64) == 64
