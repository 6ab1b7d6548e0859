"""BatchNorm over several processes, against one layer on the whole batch; and its exactness in any layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, distributed, nn

from tests.conftest import OnProcesses
from utils.distributed.batchnorm import ExactBatchNorm, all_reduce, exact_batchnorm
from utils.distributed.ranks import ranks

PARTS = {2: (3, 5), 3: (4, 1, 2)}  # images of each process
SHAPE = (6, 9, 7)  # channels, height, width


def layer(dtype: torch.dtype, affine: bool = True) -> nn.BatchNorm2d:
    torch.manual_seed(0)
    made = nn.BatchNorm2d(SHAPE[0], eps=1e-3, momentum=0.03, affine=affine)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.to(dtype)


def batch(processes: int, offset: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values (b, channels, h, w) with mean `offset` and another scale per image, and an output gradient."""
    made = torch.Generator().manual_seed(1)
    size = (sum(PARTS[processes]), *SHAPE)
    values = torch.randn(size, generator=made) * torch.rand(size[0], 1, 1, 1, generator=made) + offset
    return values.to(dtype), torch.randn(size, generator=made).to(dtype)


def two_steps(norm: nn.Module, values: Tensor, slope: Tensor) -> list[Tensor]:
    """Return the output, the gradients, and after a second batch the statistics."""
    values = values.clone().requires_grad_()
    output = norm(values)
    output.backward(slope)
    norm(values.detach() * 2)
    return [output.detach(), values.grad, *(p.grad for p in norm.parameters()), *norm.buffers()]


CASES = {  # by number of processes: offset, dtype, affine, tolerance
    2: [(0.0, torch.float32, True, 1e-6), (100.0, torch.float64, True, 1e-11)],
    3: [(3.0, torch.float32, False, 1e-6)],
}


def local_results(processes: int, offset: float, dtype: torch.dtype, affine: bool, device: str = "cpu") -> list[Tensor]:
    """Return the results of this process's part of the batch, with DDP's sum of the parameters' gradients."""
    model = exact_batchnorm(nn.Sequential(layer(dtype, affine)).to(device), all_reduce)
    values, slope = (
        whole.split(PARTS[processes])[ranks().rank].to(device) for whole in batch(processes, offset, dtype)
    )
    results = two_steps(model, values, slope)
    for gradient in results[2 : 2 + len(list(model.parameters()))]:
        distributed.all_reduce(gradient)
    return [tensor.cpu() for tensor in results]


def compare(parts: list[list[Tensor]], whole: list[Tensor], tolerance: float) -> None:
    """Concatenate outputs and input gradients of all processes; all other tensors are equal on every process."""
    for number, expected in enumerate(whole):
        pieces = [part[number] for part in parts]
        for tensor in [torch.cat(pieces)] if number < 2 else pieces:
            gap = (tensor.double() - expected.double()).abs().max() / expected.double().abs().max()
            assert gap <= tolerance, f"tensor {number} differs by {gap:.2g}"


def results(processes: int) -> list[list[Tensor]]:
    distributed.init_process_group("gloo")
    return [local_results(processes, *case[:3]) for case in CASES[processes]]


@pytest.mark.parametrize("processes", CASES)
def test_several_processes_equal_one_layer_on_the_whole_batch(processes: int, on_processes: OnProcesses) -> None:
    by_rank = on_processes(processes, results, processes)
    for number, (offset, dtype, affine, tolerance) in enumerate(CASES[processes]):
        whole = two_steps(layer(dtype, affine), *batch(processes, offset, dtype))
        compare([result[number] for result in by_rank], whole, tolerance)


def results_on_gpus() -> list[Tensor]:
    distributed.init_process_group("nccl")
    torch.cuda.set_device(ranks().rank)
    return local_results(2, 0.0, torch.float32, True, "cuda")


@pytest.mark.gpu2
def test_two_gpus_equal_one_layer_on_the_whole_batch(on_processes: OnProcesses) -> None:
    parts = on_processes(2, results_on_gpus)
    compare(parts, two_steps(layer(torch.float32), *batch(2, 0.0, torch.float32)), 1e-5)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("affine", [True, False])
def test_one_process_is_as_exact_in_any_layout(layout: torch.memory_format, affine: bool) -> None:
    made = torch.Generator().manual_seed(0)
    size = (8, 6, 100, 90)  # for 72,000 values per channel, torch's kernel for channels_last loses three digits
    values = (torch.randn(size, generator=made) * 2 + 3).contiguous(memory_format=layout)
    slope = torch.randn(size, generator=made) + 0.1
    tensors = two_steps(exact_batchnorm(nn.Sequential(layer(torch.float32, affine)), None), values, slope)
    expected = two_steps(layer(torch.float64, affine), values.double(), slope.double())
    assert tensors[0].is_contiguous(memory_format=layout)
    tolerances = [2e-6, 2e-6, *[5e-5] * (2 * affine), 1e-6, 1e-6, 0]
    for tensor, reference, tolerance in zip(tensors, expected, tolerances, strict=True):
        assert ((tensor - reference).abs().max() / reference.abs().max()).item() <= tolerance


def test_one_value_per_channel_is_an_error() -> None:
    norm = ExactBatchNorm.from_layer(nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm(torch.zeros(1, 3, 1, 1))


def test_torch_synchronises_on_other_devices() -> None:
    """Nothing is replaced there without --sync-bn. "meta" stands for a GPU."""
    made = nn.Sequential(layer(torch.float32)).to("meta")
    assert type(exact_batchnorm(made, None)[0]) is nn.BatchNorm2d
    assert type(exact_batchnorm(made, all_reduce)[0]) is nn.SyncBatchNorm
