"""Compressed gradients: the results of DDP's hooks on two processes."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import OnProcesses
from utils.config.options import TrainOptions
from utils.distributed.comm_hooks import BUCKET_MB, HOOKS, register_comm_hook
from utils.distributed.ranks import ranks

STEPS = 6


def gradients() -> dict[str, list[Tensor]]:
    """Return the gradients of a matrix after each step by hook, '' for none; PowerSGD compresses from the third on."""
    distributed.init_process_group("gloo")
    return {hook: gradients_of(hook) for hook in ("", *HOOKS)}


def gradients_of(hook: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 96, bias=False), bucket_cap_mb=BUCKET_MB.get(hook))
    if hook:
        register_comm_hook(model, hook, warmup=2)
    results = []
    for step in range(STEPS):
        torch.manual_seed(100 * step + ranks().rank)
        model.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        results.append(model.module.weight.grad.clone())
    return results


def test_compressed_gradients(on_processes: OnProcesses) -> None:
    first, second = on_processes(2, gradients)
    exact = first[""]
    for hook in HOOKS:
        assert all(torch.equal(one, other) for one, other in zip(first[hook], second[hook], strict=True))
    for hook, largest_error in {"fp16": 1e-3, "bf16": 1e-2}.items():
        for gradient, reference in zip(first[hook], exact, strict=True):
            assert 0 < (gradient - reference).norm() / reference.norm() < largest_error
    assert torch.equal(first["powersgd"][0], exact[0])
    assert torch.linalg.matrix_rank(first["powersgd"][-1]) == 2 < torch.linalg.matrix_rank(exact[-1])


def test_the_flag_offers_all_hooks() -> None:
    choices = next(f.metadata["choices"] for f in TrainOptions.__dataclass_fields__.values() if f.name == "comm_hook")
    assert choices == HOOKS
