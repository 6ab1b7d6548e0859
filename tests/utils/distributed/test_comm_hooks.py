"""Compressed gradients: what comes out of DDP's hooks on two processes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import OnProcesses
from utils.config.options import TrainOptions
from utils.distributed.comm_hooks import BUCKET_MB, HOOKS, register_comm_hook
from utils.distributed.ranks import ranks

STEPS = 6


def gradients(how: str) -> list[Tensor]:
    """The gradients of a matrix after each of some steps, the first two uncompressed by PowerSGD."""
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 96, bias=False), bucket_cap_mb=BUCKET_MB.get(how))
    if how:
        register_comm_hook(model, how, warmup=2)
    found = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + ranks().rank)
        model.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        found.append(model.module.weight.grad.clone())
    return found


@pytest.fixture
def exact(on_processes: OnProcesses) -> list[Tensor]:
    return on_processes(2, gradients, "")[0]


@pytest.mark.parametrize(("how", "gap"), [("fp16", 1e-3), ("bf16", 1e-2)])
def test_halves(how: str, gap: float, exact: list[Tensor], on_processes: OnProcesses) -> None:
    first, second = on_processes(2, gradients, how)
    for own, other, true in zip(first, second, exact, strict=True):
        assert torch.equal(own, other)
        assert 0 < (own - true).norm() / true.norm() < gap


def test_powersgd(exact: list[Tensor], on_processes: OnProcesses) -> None:
    """After its warm-up a gradient is a matrix of rank 2."""
    first, second = on_processes(2, gradients, "powersgd")
    assert all(torch.equal(own, other) for own, other in zip(first, second, strict=True))
    assert torch.equal(first[0], exact[0])
    assert torch.linalg.matrix_rank(first[-1]) == 2 < torch.linalg.matrix_rank(exact[-1])


def test_the_flag_offers_them_all() -> None:
    choices = next(f.metadata["choices"] for f in TrainOptions.__dataclass_fields__.values() if f.name == "comm_hook")
    assert choices == HOOKS
