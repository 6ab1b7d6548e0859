"""Compressed gradients: the results of DDP's hooks on two processes."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import OnProcesses
from utils.config.options import TrainOptions
from utils.distributed.comm_hooks import BUCKET_MB, HOOKS, CompressionMemory, register_comm_hook
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


# PowerSGD's memory


def wrapped(hook: str) -> tuple[DistributedDataParallel, CompressionMemory]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 96, bias=False), bucket_cap_mb=BUCKET_MB.get(hook))
    return model, register_comm_hook(model, hook, warmup=2)


def stepped(model: DistributedDataParallel, steps: range, scale: float = 1.0) -> list[Tensor]:
    """Return the gradient after each step; its inputs depend on number and process."""
    gradients = []
    for step in steps:
        torch.manual_seed(100 * step + ranks().rank)
        model.zero_grad()
        (scale * model(torch.randn(8, 64)).square().mean()).backward()
        gradients.append(model.module.weight.grad.clone())
    return gradients


def saved(memory: CompressionMemory) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(memory.state(), file)
    return dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))


def continued() -> dict[str, Any]:
    """Return the gradients of steps 4 and 5 of a model, and of three others that continue from its step 3; and whether
    those of an infinite step and of the next two are finite.
    """
    distributed.init_process_group("gloo")
    model, memory = wrapped("powersgd")
    stepped(model, range(4))
    share = saved(memory)
    results: dict[str, Any] = {"uninterrupted": stepped(model, range(4, 6)), "messages": {}}
    for name, (own, main) in {"same": (share, share), "other": (None, share), "none": ({}, {})}.items():
        again, its_memory = wrapped("powersgd")
        stepped(again, range(1))  # makes the final buckets
        its_memory.restart()
        results["messages"][name] = its_memory.load_state(own, main)
        results[name] = stepped(again, range(4, 6))
    infinite = stepped(model, range(6, 7), scale=float("inf"))
    memory.clear()
    results["finite"] = [bool(gradient.isfinite().all()) for gradient in (*infinite, *stepped(model, range(7, 9)))]
    return results


def test_powersgd_continues_with_its_memory(on_processes: OnProcesses) -> None:
    for process in on_processes(2, continued):
        expected = process["uninterrupted"]
        assert all(torch.equal(one, other) for one, other in zip(process["same"], expected, strict=True))
        assert process["messages"]["same"] == []
        empty = "warning: the error memory of --comm-hook powersgd starts empty, because the state was saved "
        assert process["messages"]["other"] == [f"{empty}on another number of processes"]
        assert process["messages"]["none"] == [f"{empty}by a run without one"]
        assert torch.linalg.matrix_rank(process["other"][0]) == 2  # goes on compressing, with nothing added
        assert not torch.equal(process["other"][0], expected[0])
        assert torch.linalg.matrix_rank(process["none"][0]) > 2  # its first steps are not compressed
        assert process["finite"] == [False, True, True]  # what is not finite is forgotten


def test_other_hooks_have_no_memory() -> None:
    memory = CompressionMemory()
    memory.restart()
    memory.clear()
    assert not memory
    assert memory.state() == {}
    assert memory.load_state(None, {}) == []


def test_the_flag_offers_all_hooks() -> None:
    choices = next(f.metadata["choices"] for f in TrainOptions.__dataclass_fields__.values() if f.name == "comm_hook")
    assert choices == HOOKS
