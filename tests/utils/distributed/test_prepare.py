"""A model, its optimizer and its loader, made ready for one process, for two, and for DeepSpeed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import OnProcesses
from utils.distributed.accelerator import start
from utils.distributed.prepare import DistributedModel, SyncOptions, place_model, prepare
from utils.distributed.ranks import ranks
from utils.distributed.sync_batchnorm import ExactBatchNorm
from utils.distributed.sync_dropout import GlobalDropout

BATCH = 4  # of all processes


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)
    )


def images() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2 * BATCH, 3, 8, 8, generator=generator)


def prepared(
    accelerator: Any, model: nn.Module, sync_bn: bool = False, comm_hook: str = ""
) -> tuple[DistributedModel, Any, Any]:
    """Return model, optimizer and loader, prepared as train.py does."""
    place_model(accelerator, model)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(images()), batch_size=BATCH)
    options = SyncOptions(BATCH, sync_bn, comm_hook)
    return prepare(accelerator, model, optimizer, loader, options, clip_norm=10.0, warmup_steps=2)  # type: ignore[arg-type]


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
    assert [len(batch) for (batch,) in loader] == [BATCH, BATCH]
    weight = next(distributed.bare.parameters())
    weight.sum().backward()
    optimizer.step()
    assert torch.allclose(weight, before["0.weight"] - 0.1)  # of the model itself, not of a copy


def test_one_process_has_nothing_to_gather_or_average() -> None:
    distributed, *_ = prepared(Accelerator(cpu=True), network())
    ema = copy.deepcopy(distributed.bare)
    before = copy.deepcopy([distributed.bare.state_dict(), ema.state_dict()])
    with distributed.gathered():
        distributed.average_statistics(ema)
    for state, saved in zip((distributed.bare.state_dict(), ema.state_dict()), before, strict=True):
        assert all(torch.equal(state[name], value) for name, value in saved.items())


# Two processes


def placed() -> list[Any]:
    """Return the weights of two processes that have drawn different ones."""
    accelerator, model = start("cpu", "no", 60.0), network(seed=ranks().rank)
    place_model(accelerator, model)  # type: ignore[arg-type]
    return [model.state_dict()]


def test_two_processes_start_from_the_weights_of_the_main_one(on_processes: OnProcesses) -> None:
    for (state,) in on_processes(2, placed):
        assert all(torch.equal(state[name], value) for name, value in network().state_dict().items())


def trained(sync_bn: bool, comm_hook: str) -> dict[str, Any]:
    """Return what a process of two has after a backward pass on its share of the first batch."""
    accelerator = start("cpu", "no", 60.0, comm_hook)
    distributed, _, loader = prepared(accelerator, network(), sync_bn, comm_hook)
    distributed.prepared.train()
    (batch,) = next(iter(loader))
    torch.manual_seed(2)  # of the dropout
    distributed.prepared(batch).square().sum().backward()
    statistics = distributed.bare.get_buffer("1.running_mean").clone()
    ema = copy.deepcopy(distributed.bare)
    ema.get_buffer("1.running_mean").fill_(1.0 + ranks().rank)
    distributed.average_statistics(ema)
    return {
        "wrapped": isinstance(distributed.prepared, DistributedDataParallel),
        "broadcast": distributed.prepared.broadcast_buffers,
        "batch": batch,
        "gradients": {name: parameter.grad for name, parameter in distributed.bare.named_parameters()},
        "statistics": statistics,
        "averaged": [model.get_buffer("1.running_mean") for model in (distributed.bare, ema)],
    }


def test_two_processes(on_processes: OnProcesses) -> None:
    one, other = on_processes(2, trained, False, "")
    for process in (one, other):
        assert process["wrapped"]
        assert not process["broadcast"]
    assert torch.equal(torch.cat((one["batch"], other["batch"])), images()[:BATCH])  # each has its slice
    assert all(torch.equal(gradient, other["gradients"][name]) for name, gradient in one["gradients"].items())
    assert not torch.equal(one["statistics"], other["statistics"])  # each has seen its share only
    mean, average = one["averaged"]
    assert torch.allclose(mean, (one["statistics"] + other["statistics"]) / 2)
    assert average.tolist() == [1.5] * 6
    assert torch.equal(mean, other["averaged"][0])
    assert torch.equal(average, other["averaged"][1])


def test_two_processes_with_exact_batchnorm(on_processes: OnProcesses) -> None:
    """Statistics and gradients are those of one process that sees the whole batch."""
    one, other = on_processes(2, trained, True, "")
    alone, _, loader = prepared(Accelerator(cpu=True), network())
    (batch,) = next(iter(loader))
    torch.manual_seed(2)
    alone.bare.train()(batch).square().sum().backward()
    for process in (one, other):
        assert torch.allclose(process["statistics"], alone.bare.get_buffer("1.running_mean"), atol=1e-7)
        for name, parameter in alone.bare.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(2 * process["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_compressed_gradients(on_processes: OnProcesses) -> None:
    one, other = on_processes(2, trained, False, "bf16")
    for name, gradient in one["gradients"].items():
        assert torch.equal(gradient, gradient.bfloat16().float())
        assert torch.equal(gradient, other["gradients"][name])


# DeepSpeed


@pytest.fixture
def plugin() -> SimpleNamespace:
    """Return Accelerate's plugin with what a launch file says."""
    return SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0})


def test_deepspeed_is_configured_before_its_engine_is_made(plugin: SimpleNamespace) -> None:
    accelerator = Accelerator(cpu=True)
    configs: list[dict[str, Any]] = []

    def make_engine(*parts: Any) -> tuple[Any, ...]:
        configs.append(dict(plugin.deepspeed_config))
        return parts

    fake = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=plugin),
        device=accelerator.device,
        num_processes=2,
        process_index=0,
        gradient_accumulation_steps=3,
        prepare=make_engine,
    )
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
