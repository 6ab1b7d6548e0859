"""BatchNorm and SiLU by Triton's kernels: against float64, by Triton's interpreter on the CPU and on a GPU."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from models.layers import C3, Conv
from tests.conftest import not_here
from utils.files import ROOT

NAMES = ("output", "input", "weight", "bias", "running mean", "running variance")
# shape, dtype, mean of the channels, whether the gradient is a slice of a larger map's
Case = tuple[tuple[int, ...], str, float, bool]
CASES: list[Case] = [
    ((2, 48, 12, 20), "float32", 0, False),  # the last tile is not full
    ((2, 128, 16, 4), "float16", 0, True),
    ((2, 32, 16, 12), "bfloat16", 0, False),
    ((3, 80, 17, 13), "float32", 1000, True),
    ((3, 9, 7, 5), "float32", 0, False),  # an odd number of channels
    ((1, 24, 3, 1), "bfloat16", 0, False),  # less than a row of pixels
]
LARGE: list[Case] = [((16, 80, 80, 80), "bfloat16", 0, True), ((4, 48, 161, 163), "float32", 10, False)]


def results(x: Tensor, norm: nn.BatchNorm2d, upstream: Tensor, fused: bool) -> list[Tensor]:
    """Return the values of NAMES."""
    from models import triton_kernels  # needs Triton

    x, norm = x.clone().requires_grad_(), copy.deepcopy(norm)
    y = triton_kernels.FusedNormSiLU.apply(x, norm.weight, norm.bias, norm) if fused else nn.functional.silu(norm(x))
    y.backward(upstream)
    assert norm.num_batches_tracked == 1
    assert (y.dtype, y.is_contiguous(memory_format=torch.channels_last)) == (x.dtype, True)
    tensors = (y, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var)
    return [tensor.detach() for tensor in tensors if tensor is not None]


def errors(case: Case, device: str) -> tuple[list[float], list[float]]:
    """Return relative errors by NAMES of the kernels and of torch; two calls of the kernels must agree to the byte."""
    (batch, channels, *size), name, mean, sliced = case
    layout = {"dtype": getattr(torch, name), "memory_format": torch.channels_last}
    x = 2 * torch.randn(batch, channels, *size, device=device) + mean * torch.rand(1, channels, 1, 1, device=device)
    upstream = torch.randn(batch, channels * (1 + sliced), *size, device=device).to(**layout)
    x, upstream = x.to(**layout), upstream[:, -channels:]
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03, device=device)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2)  # type: ignore[arg-type]
    exact = results(x.double(), copy.deepcopy(norm).double(), upstream.double(), fused=False)
    fused, again, by_torch = (results(x, norm, upstream, fused=way) for way in (True, True, False))
    assert all(map(torch.equal, fused, again))
    return distances(fused, exact), distances(by_torch, exact)


def distances(tensors: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((a - b).double().norm() / b.double().norm()) for a, b in zip(tensors, exact, strict=True)]


def small_enough(case: Case, ours: list[float], by_torch: list[float]) -> None:
    """Check the errors: rounding's, and torch's. The interpreter cuts bfloat16 off where a GPU rounds."""
    rounding = {"float32": 5e-7, "float16": 5e-4, "bfloat16": 5e-3}[case[1]]
    bounds = [max(4 * theirs, bound) for theirs, bound in zip(by_torch, [rounding] * 2 + [1e-6] * 4, strict=True)]
    assert [one for one in zip(NAMES, ours, by_torch, bounds, strict=True) if one[1] > one[3]] == [], case


def interpret() -> None:
    """Print the errors of CASES, with few programs, so that one has several tiles."""
    from models import triton_kernels

    triton_kernels.SUM_PROGRAMS, triton_kernels.MAP_PROGRAMS = 4, 6
    torch.manual_seed(0)
    print(json.dumps([errors(case, "cpu") for case in CASES]))


def test_the_kernels_by_the_interpreter() -> None:
    if importlib.util.find_spec("triton") is None:
        not_here("Triton, which comes with torch on Linux")
    command = [sys.executable, "-c", "from tests.models.test_triton_kernels import interpret; interpret()"]
    printed = subprocess.check_output(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"})
    for case, (ours, by_torch) in zip(CASES, json.loads(printed), strict=True):
        small_enough(case, ours, by_torch)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_the_kernels_on_a_gpu(case: Case) -> None:
    small_enough(case, *errors(case, "cuda"))


@pytest.mark.gpu
def test_a_network_launched_and_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of it have the same gradients and statistics, near torch's."""
    from models import triton_kernels

    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    last = torch.channels_last
    model = nn.Sequential(Conv(3, 16, 3, 2), C3(16, 32, 2), Conv(32, 64, 3, 2)).to("cuda", memory_format=last)
    images = torch.rand(4, 3, 96, 64, device="cuda").contiguous(memory_format=last)
    maps = (x := images.new_zeros(2, 16, 4, 4), x.contiguous(memory_format=last))
    assert [triton_kernels.can_fuse(each, model[0].bn, model[0].act) for each in maps] == [False, True]
    upstream = torch.randn(4, 64, 24, 16, device="cuda").bfloat16()  # contiguous, unlike the output

    def step(network: nn.Module) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            output = network(images)
        return [*torch.autograd.grad(output, list(network.parameters()), upstream), *network.buffers()]

    launched, recorded, unfused = (copy.deepcopy(model) for _ in range(3))
    near, expected, _ = [tensor.clone() for tensor in step(launched)], step(launched), step(recorded)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        replayed = step(recorded)
    graph.replay()
    assert all(map(torch.equal, replayed, expected))
    monkeypatch.setattr(triton_kernels, "can_fuse", lambda *given: False)
    assert max(distances(near, step(unfused))) < 0.1
