"""Batches and loader processes that fit the memory, and the messages if they do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.cuda_queries import GIB, CudaQueries
from tests.making import launched
from utils.errors import UserError
from utils.training.memory import BYTES_PER_MIB, explain_out_of_memory, fitted_batch, loader_processes

# Shared memory


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Return a function that sets the number of cores and the free shared memory in MiB."""

    def set_machine(cores: int, mib: int) -> None:
        free = SimpleNamespace(f_bavail=mib * BYTES_PER_MIB // 4096, f_frsize=4096)
        monkeypatch.setattr(os, "statvfs", lambda path: free)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)

    return set_machine


@pytest.mark.parametrize(
    ("mib", "workers", "here", "expected"),
    [
        (64, 8, 1, 2),  # three batches of 10 MiB for each loader process
        (59, 8, 1, 1),
        (29, 8, 1, 0),
        (1000, 8, 1, 8),
        (240, 8, 2, 4),  # training processes share the memory
        (240, 80, 4, 2),  # and the 8 cores
        (29, 0, 1, 0),
    ],
)
def test_loader_processes_that_fit(
    mib: int,
    workers: int,
    here: int,
    expected: int,
    machine: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    machine(8, mib)
    launched(monkeypatch, 2 * here, here)
    assert loader_processes(workers, 10 * BYTES_PER_MIB) == expected
    assert ("/dev/shm" in capsys.readouterr().out) == (expected < min(workers, 8 // here))


# Running out of memory


CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.parametrize(
    ("error", "batch_size", "processes", "named"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 16, 1, "--batch-size 8 "),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"), 9, 1, "--batch-size 4 "),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), 12, 4, "--batch-size 4 "),
        (MemoryError(), 30, 3, "--batch-size 15 "),
        (RuntimeError(CPU), 4, 4, "--imgsz than 640"),
        (RuntimeError("shape mismatch"), 16, 1, "^shape mismatch$"),
        (UserError("fix it"), 16, 1, "^fix it$"),
    ],
)
def test_out_of_memory(
    error: Exception, batch_size: int, processes: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the batch is proposed, or less: 6 cannot be shared by 4. Other errors pass."""
    launched(monkeypatch, processes, processes)
    expected = type(error) if "^" in named else UserError
    with pytest.raises(expected, match=named), explain_out_of_memory(batch_size, 640):
        raise error


class Group:
    """Collectives with other processes, whose devices do or do not hold a batch."""

    def __init__(self, *fits: bool) -> None:
        self.fits = fits

    def gather(self, items: list[bool]) -> list[bool]:
        return [*items, *self.fits]


@pytest.mark.parametrize(("processes", "expected"), [(1, 16), (3, 15), (32, 32)])
def test_without_a_gpu_nothing_is_measured(
    processes: int, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(monkeypatch, processes, processes)
    model = torch.nn.Linear(1, 1)
    fitted = fitted_batch(-1, pytest.fail, model, torch.device("cpu"), 64, Group(), 1)  # type: ignore[arg-type]
    assert fitted == (expected, 1)
    assert "--batch-size -1" in capsys.readouterr().out
    given = fitted_batch(24, pytest.fail, model, torch.device("cpu"), 64, Group(), 1)  # type: ignore[arg-type]
    assert given == (24, 1)


class PlacedLayer(torch.nn.BatchNorm1d):
    """A layer that is on a device as soon as it is asked to."""

    def to(self, *given: object, **options: object) -> PlacedLayer:
        self.placed = given
        return self


@pytest.mark.parametrize(
    ("size", "images", "logical", "others", "expected"),
    [
        # Of 6 GiB, of which 0.8 may be used: an image takes 0.07 GiB.
        *((-1, 1000, 1, True, (64, 1)), (-1, 50, 1, True, (32, 1)), (-1, 1000, 1, False, (1, 1))),
        *((64, 1000, 1, True, (64, 1)), (256, 1000, 1, True, (64, 4)), (128, 1000, 1, False, (1, 128))),
        (128, 1000, 4, False, (4, 32)),  # an image each is not tried: the step itself will say that it does not fit
        (264, 1000, 1, True, (66, 4)),
    ],
)
def test_every_gpu_tries_the_batch(
    size: int, images: int, logical: int, others: bool, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics that the tries change are restored."""
    launched(monkeypatch, 1, 1)
    queries = CudaQueries(free=6 * GIB, allocated=0).install(monkeypatch)
    device, model = torch.device("cuda", 0), PlacedLayer(4)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def train_step(images: int) -> None:
        model(torch.rand(2 * images, 4))
        queries.allocate(images * 7 * GIB // 100)

    fitted = fitted_batch(size, train_step, model, device, images, Group(others), logical)  # type: ignore[arg-type]
    assert fitted == expected
    assert model.placed == (device,)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
