"""Preparation of model, optimizer and loader for one process, for two, and for DeepSpeed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import OnProcesses
from utils.distributed.accelerator import start
from utils.distributed.distributed_model import DistributedModel
from utils.distributed.logical_processes import SyncOptions
from utils.distributed.prepare import order_buckets, place_model, prepare
from utils.distributed.ranks import ranks
from utils.distributed.sync_batchnorm import ExactBatchNorm
from utils.distributed.sync_dropout import GlobalDropout
from utils.errors import UserError

BATCH = 4  # of all processes
PIXELS = 8


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    )


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2 * BATCH, 3, 8, 8, generator=generator)


def prepared(accelerator: Any, model: nn.Module, sync_bn: bool = False) -> tuple[DistributedModel, Any, Any]:
    """Return model, optimizer and loader, prepared as in train.py."""
    place_model(accelerator, model)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(images()), batch_size=BATCH)
    options = SyncOptions(BATCH, sync_bn, logical_processes=0, comm_hook="")
    return prepare(accelerator, model, optimizer, loader, options, precision="no", clip_norm=10.0)  # type: ignore[arg-type]


# One process


def test_one_process() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    distributed, optimizer, loader = prepared(Accelerator(cpu=True), model)
    assert distributed.prepared is distributed.bare
    after = distributed.bare.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert isinstance(distributed.bare[1], ExactBatchNorm)  # type: ignore[index]
    assert isinstance(distributed.bare[2], GlobalDropout)  # type: ignore[index]
    assert distributed.bare[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    assert [len(batch) for ((batch,),) in loader] == [BATCH, BATCH]
    weight = next(distributed.bare.parameters())
    weight.sum().backward()
    optimizer.step()
    assert torch.allclose(weight, before["0.weight"] - 0.1)  # the optimizer steps the model itself


@pytest.mark.parametrize("keep_norms", [False, True])
def test_training_may_keep_the_statistics_of_batchnorm(keep_norms: bool) -> None:
    accelerator, model = Accelerator(cpu=True), network()
    nn.init.uniform_(model[1].running_mean)  # type: ignore[arg-type]
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(images()))
    how: Any = {"precision": "no", "clip_norm": 10.0, "keep_norms": keep_norms}
    options = SyncOptions(BATCH, sync_bn=False, logical_processes=0, comm_hook="")
    distributed, *_ = prepare(accelerator, model, optimizer, loader, options, **how)  # type: ignore[arg-type]
    before = copy.deepcopy(distributed.bare.state_dict())
    distributed.train()
    distributed.prepared(images()).sum().backward()
    after = distributed.bare.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(after[name], value)]
    assert changed == ([] if keep_norms else ["1.running_mean", "1.running_var", "1.num_batches_tracked"])
    assert distributed.bare[2].training  # type: ignore[index]  # dropout
    assert distributed.bare[1].weight.grad is not None  # type: ignore[index]


def test_one_process_gathers_and_averages_nothing() -> None:
    distributed, *_ = prepared(Accelerator(cpu=True), network())
    ema = copy.deepcopy(distributed.bare)
    before = copy.deepcopy([distributed.bare.state_dict(), ema.state_dict()])
    with distributed.gathered():
        distributed.average_statistics([ema])
    for state, saved in zip((distributed.bare.state_dict(), ema.state_dict()), before, strict=True):
        assert all(torch.equal(state[name], value) for name, value in saved.items())


# Two processes


def trained(sync_bn: bool, comm_hook: str) -> dict[str, Any]:
    """Return the results of a process after a backward pass on its part of the first batch."""
    accelerator, _ = start("cpu", "no", 60.0, comm_hook)
    distributed, _, loader = prepared(accelerator, network(), sync_bn)
    distributed.prepared.train()
    ((batch,),) = next(iter(loader))
    torch.manual_seed(2)  # of the dropout
    distributed.prepared(batch).square().sum().backward()
    statistics = distributed.bare.get_buffer("1.running_mean").clone()
    ema = copy.deepcopy(distributed.bare)
    ema.get_buffer("1.running_mean").fill_(1.0 + ranks().rank)
    distributed.average_statistics([ema])
    return {
        "wrapped": isinstance(distributed.prepared, DistributedDataParallel),
        "broadcast": distributed.prepared.broadcast_buffers,
        "batch": batch,
        "gradients": {name: parameter.grad for name, parameter in distributed.bare.named_parameters()},
        "statistics": statistics,
        "averaged": [model.get_buffer("1.running_mean") for model in (distributed.bare, ema)],
    }


def place_and_train() -> dict[str, Any]:
    """Return the weights of a process after drawing its own, and its results of training in three ways."""
    (accelerator, _), model = start("cpu", "no", 60.0), network(seed=ranks().rank)
    place_model(accelerator, model)  # type: ignore[arg-type]
    ways = {"plain": (False, ""), "sync_bn": (True, ""), "bf16": (False, "bf16")}
    return {"placed": model.state_dict(), **{name: trained(*way) for name, way in ways.items()}}


def test_two_processes(on_processes: OnProcesses) -> None:
    first, second = on_processes(2, place_and_train)
    for state in (first["placed"], second["placed"]):  # the main process's
        assert all(torch.equal(state[name], value) for name, value in network().state_dict().items())
    check_plain(first["plain"], second["plain"])
    check_sync_bn(first["sync_bn"], second["sync_bn"])
    for name, gradient in first["bf16"]["gradients"].items():
        assert torch.equal(gradient, gradient.bfloat16().float())
        assert torch.equal(gradient, second["bf16"]["gradients"][name])


def check_plain(first: dict[str, Any], second: dict[str, Any]) -> None:
    for process in (first, second):
        assert process["wrapped"]
        assert not process["broadcast"]
    assert torch.equal(torch.cat((first["batch"], second["batch"])), images()[:BATCH])  # each has its slice
    assert all(torch.equal(gradient, second["gradients"][name]) for name, gradient in first["gradients"].items())
    assert not torch.equal(first["statistics"], second["statistics"])  # of each slice
    mean, average = first["averaged"]
    assert torch.allclose(mean, (first["statistics"] + second["statistics"]) / 2)
    assert average.tolist() == [1.5] * 6
    assert torch.equal(mean, second["averaged"][0])
    assert torch.equal(average, second["averaged"][1])


def check_sync_bn(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Statistics and gradients are those of one process with the whole batch."""
    alone, _, loader = prepared(Accelerator(cpu=True), network())
    ((batch,),) = next(iter(loader))
    torch.manual_seed(2)
    alone.bare.train()(batch).square().sum().backward()
    for process in (first, second):
        assert torch.allclose(process["statistics"], alone.bare.get_buffer("1.running_mean"), atol=1e-7)
        for name, parameter in alone.bare.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(2 * process["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-5)


# DDP's gradient buckets: final before the first step, so that every step sums in the same order


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


@pytest.mark.long
def test_the_first_step_has_the_buckets_of_all_others(on_processes: OnProcesses) -> None:
    for process in on_processes(3, compared):
        first, second = process["sent"]
        assert first != second
        assert process["ordered"] == [second]
        _, expected, ordered = process["gradients"]
        assert all(torch.equal(one, other) for one, other in zip(ordered, expected, strict=True))
        assert process["traces"] == dict.fromkeys(process["traces"], True)


# DeepSpeed


@pytest.fixture
def plugin() -> SimpleNamespace:
    """Accelerate's plugin with the settings of a launch file."""
    return SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})


@pytest.mark.parametrize("uses_autocast", [False, True])
def test_deepspeed_is_configured_before_its_engine_is_made(plugin: SimpleNamespace, uses_autocast: bool) -> None:
    accelerator = Accelerator(cpu=True)
    configs: list[dict[str, Any]] = []

    def make_engine(model: Any, *parts: Any) -> tuple[Any, ...]:
        configs.append(dict(plugin.deepspeed_config))
        model.torch_autocast_enabled, model.torch_autocast_dtype = lambda: uses_autocast, lambda: torch.bfloat16
        return model, *parts

    fake = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin),
        device=accelerator.device,
        num_processes=2,
        process_index=0,
        gradient_accumulation_steps=3,
        prepare=make_engine,
    )
    if uses_autocast:  # as its own configuration file says
        with pytest.raises(UserError, match=r"mixed precision no was requested, but DeepSpeed's autocast is bfloat16"):
            prepared(fake, network())
        return
    distributed, *_ = prepared(fake, network())
    assert configs == [
        {
            "zero_optimization": {"stage": 2},
            "gradient_accumulation_steps": 3,
            "train_micro_batch_size_per_gpu": 2,  # of a process
            "gradient_clipping": 10.0,
            "zero_force_ds_cpu_optimizer": False,
        }
    ]
    assert distributed.bare[0].weight.is_contiguous()  # type: ignore[index]
