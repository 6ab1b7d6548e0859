"""BatchNorm over several processes against one BatchNorm on the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.conftest import OnProcesses
from utils.distributed.ranks import ranks
from utils.distributed.sync_batchnorm import ExactBatchNorm, average_statistics, synchronise_batchnorm

PARTS = {2: (3, 5), 3: (4, 1, 2)}  # images of each process: unequal on purpose
SHAPE = (6, 9, 7)  # channels, height, width


def layer(dtype: torch.dtype, affine: bool = True) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    made = nn.BatchNorm2d(SHAPE[0], eps=1e-3, momentum=0.03, affine=affine)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.to(dtype)


def batch(processes: int, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Values (b, channels, h, w) about `offset`, of another size in each image, and the gradient of the output."""
    made = torch.Generator().manual_seed(1)
    size = (sum(PARTS[processes]), *SHAPE)
    values = torch.randn(size, generator=made) * torch.rand(size[0], 1, 1, 1, generator=made) + offset
    return values.to(dtype), torch.randn(size, generator=made).to(dtype)


def two_steps(norm: nn.Module, values: Tensor, slope: Tensor) -> list[Tensor]:
    """The output, the gradients, and after a second batch the statistics."""
    values = values.clone().requires_grad_()
    output = norm(values)
    output.backward(slope)
    norm(values.detach() * 2)
    return [output.detach(), values.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]


def my_part(processes: int, offset: float, dtype: torch.dtype, affine: bool, device: str = "cpu") -> list[Tensor]:
    """What this process's layer makes of its part of the batch; the parameters' gradients are summed as DDP would."""
    distributed.init_process_group("gloo" if device == "cpu" else "nccl")
    if device == "cuda":
        torch.cuda.set_device(ranks().rank)
    model = synchronise_batchnorm(nn.Sequential(layer(dtype, affine)).to(device), True)
    values, slope = (
        whole.split(PARTS[processes])[ranks().rank].to(device) for whole in batch(processes, offset, dtype)
    )
    found = two_steps(model, values, slope)
    for gradient in found[2 : 2 + len(list(model.parameters()))]:
        distributed.all_reduce(gradient)
    return [tensor.cpu() for tensor in found]


def compare(parts: list[list[Tensor]], whole: list[Tensor], tolerance: float) -> None:
    """Outputs and input gradients are put together; all else is the same on every process."""
    for number, expected in enumerate(whole):
        pieces = [part[number] for part in parts]
        for found in [torch.cat(pieces)] if number < 2 else pieces:
            gap = (found.double() - expected.double()).abs().max() / expected.double().abs().max()
            assert gap <= tolerance, f"tensor {number} differs by {gap:.2g}"


@pytest.mark.parametrize(
    ("processes", "offset", "dtype", "affine", "tolerance"),
    [
        (2, 0.0, torch.float32, True, 1e-6),
        (2, 100.0, torch.float64, True, 1e-11),
        (3, 3.0, torch.float32, False, 1e-6),
    ],
)
def test_equals_one_layer_on_the_whole_batch(
    on_processes: OnProcesses, processes: int, offset: float, dtype: torch.dtype, affine: bool, tolerance: float
) -> None:
    parts = on_processes(processes, my_part, processes, offset, dtype, affine)
    compare(parts, two_steps(layer(dtype, affine), *batch(processes, offset, dtype)), tolerance)


@pytest.mark.gpu2
def test_equals_one_layer_on_the_whole_batch_on_gpus(on_processes: OnProcesses) -> None:
    parts = on_processes(2, my_part, 2, 0.0, torch.float32, True, "cuda")
    compare(parts, two_steps(layer(torch.float32), *batch(2, 0.0, torch.float32)), 1e-5)


def far_from_zero(offset: float) -> tuple[float, float]:
    """How far float32 is from float64 where the mean is large beside the deviation: ours, and one process's."""
    distributed.init_process_group("gloo")
    values, slope = (whole.split(PARTS[2])[ranks().rank] for whole in batch(2, offset, torch.float32))
    ours = two_steps(synchronise_batchnorm(nn.Sequential(layer(torch.float32)), True), values, slope)[0]
    precisely = two_steps(
        synchronise_batchnorm(nn.Sequential(layer(torch.float64)), True), values.double(), slope.double()
    )[0]
    whole = batch(2, offset, torch.float32)
    single = two_steps(layer(torch.float32), *whole)[0]
    precise = two_steps(layer(torch.float64), *(tensor.double() for tensor in whole))[0]
    return float((ours - precisely).abs().max()), float((single - precise).abs().max())


def test_is_as_precise_as_one_process_far_from_zero(on_processes: OnProcesses) -> None:
    for ours, single in on_processes(2, far_from_zero, 1000.0):
        assert ours <= 2 * single


def test_one_process_has_nothing_to_average() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    before = copy.deepcopy(model)
    assert synchronise_batchnorm(model, True) is model
    average_statistics(model)
    assert all(torch.equal(value, before.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("affine", [True, False])
def test_one_process_is_as_exact_in_any_layout(layout: torch.memory_format, affine: bool) -> None:
    made = torch.Generator().manual_seed(0)
    size = (8, 6, 100, 90)  # of the statistics' 72,000 values, torch's kernel for channels_last loses three digits
    values = (torch.randn(size, generator=made) * 2 + 3).contiguous(memory_format=layout)
    slope = torch.randn(size, generator=made) + 0.1
    found = two_steps(synchronise_batchnorm(nn.Sequential(layer(torch.float32, affine)), False), values, slope)
    wanted = two_steps(layer(torch.float64, affine), values.double(), slope.double())
    assert found[0].is_contiguous(memory_format=layout)
    tolerances = [2e-6, 2e-6, *[5e-5] * (2 * affine), 1e-6, 1e-6, 0]
    for own, other, tolerance in zip(found, wanted, tolerances, strict=True):
        assert ((own - other).abs().max() / other.abs().max()).item() <= tolerance


def test_one_value_per_channel_has_no_statistics() -> None:
    norm = ExactBatchNorm.of(nn.BatchNorm2d(3), False)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.zeros(1, 3, 1, 1))


def names_and_evaluation() -> tuple[list[str], bool, bool]:
    distributed.init_process_group("gloo")
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4))).eval()
    weight, picture = model[1][0].weight, torch.randn(2, 3, 5, 5)
    before = model(picture)
    after = synchronise_batchnorm(model, True)(picture)
    return list(model.state_dict()), torch.equal(before, after), model[1][0].weight is weight


def test_names_and_evaluation_stay(on_processes: OnProcesses) -> None:
    plain = list(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(nn.BatchNorm2d(4))).state_dict())
    assert on_processes(2, names_and_evaluation) == [(plain, True, True)] * 2


def averaged() -> list[Tensor]:
    distributed.init_process_group("gloo")
    model = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(1))
    rank = ranks().rank
    model[0].running_mean.copy_(torch.tensor([1.0, -2.0]) * rank)
    model[0].running_var.fill_(1 / 3)
    model[1].running_var.fill_(rank + 1.0)
    average_statistics(model)
    return [model[0].running_mean, model[0].running_var, model[1].running_mean, model[1].running_var]


def test_average(on_processes: OnProcesses) -> None:
    """Of 0, 1, 2 times (1, -2), and of 1, 2, 3; what is equal already keeps its bits."""
    for mean, same, zero, var in on_processes(3, averaged):
        assert mean.tolist() == [1.0, -2.0]
        assert torch.equal(same, torch.full((2,), 1 / 3))
        assert (zero.tolist(), var.tolist()) == ([0.0], [2.0])
