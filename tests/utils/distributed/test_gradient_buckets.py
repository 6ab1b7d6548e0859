"""The gradient buckets of DDP: final before the first step, so that every step sums in the same order."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from tests.conftest import OnProcesses
from utils.distributed.gradient_buckets import order_buckets
from utils.distributed.ranks import ranks

PIXELS = 8


class Network(nn.Module):
    """Uses its layers in another order than it has made them, and returns nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 5)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Conv2d(3, 6, 3)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, images: Tensor) -> dict[str, Any]:
        maps = self.dropout(self.norm(self.first(images)))
        return {"maps": [maps], "scores": (self.frozen(self.last(maps.mean((2, 3)))), None)}


def wrapped(sent: list[Any]) -> DistributedDataParallel:
    """Return a network whose gradients are recorded in `sent`: bucket, and shapes of the gradients in it."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Network(), broadcast_buffers=False, gradient_as_bucket_view=True)

    def record(group, bucket):  # without types: torch reads them, and not as text
        sent.append((bucket.index(), [tuple(gradient.shape) for gradient in bucket.gradients()]))
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, record)
    return model


def step(model: DistributedDataParallel) -> list[Tensor]:
    """Return the gradients of a step on this process's images."""
    torch.manual_seed(1 + ranks().rank)
    outputs = model(torch.rand(2, 3, PIXELS, PIXELS))
    model.zero_grad()
    (outputs["maps"][0].square().mean() + outputs["scores"][0].exp().mean()).backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def compared() -> dict[str, Any]:
    """Return what two steps send with and without `order_buckets`, their gradients, and the traces it leaves."""
    distributed.init_process_group("gloo")
    sent: list[Any] = []
    model = wrapped(sent)
    gradients = [step(model), step(model)]
    sent_ordered: list[Any] = []
    ordered = wrapped(sent_ordered)
    ordered.module.norm.eval()
    before, modes = copy.deepcopy(ordered.state_dict()), [module.training for module in ordered.modules()]
    torch.manual_seed(7)
    order_buckets(ordered, PIXELS)
    sent_ordered.clear()
    traces = {
        "drawn": torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7))),
        "state": all(torch.equal(ordered.state_dict()[name], value) for name, value in before.items()),
        "modes": modes == [module.training for module in ordered.modules()],
        "gradients": all(parameter.grad is None for parameter in ordered.parameters()),
    }
    ordered.module.norm.train()
    return {"sent": sent, "ordered": sent_ordered, "gradients": [*gradients, step(ordered)], "traces": traces}


def test_the_first_step_has_the_buckets_of_all_others(on_processes: OnProcesses) -> None:
    for process in on_processes(3, compared):
        first, second = process["sent"]
        assert first != second
        assert process["ordered"] == [second]
        _, expected, ordered = process["gradients"]
        assert all(torch.equal(one, other) for one, other in zip(ordered, expected, strict=True))
        assert process["traces"] == dict.fromkeys(process["traces"], True)
