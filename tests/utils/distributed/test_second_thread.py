"""Tests of utils/distributed/second_thread.py: a second thread gives the bytes of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from utils.distributed import second_thread as module
from utils.distributed.second_thread import OverlappedConv2d, SecondThread, WeightGradients, fix_threads


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Network(nn.Module):
    """Convolutions of all kinds: used three times, in groups, frozen, with a bias, with padding by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.again = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.groups = nn.Conv2d(8, 8, 3, groups=4, dilation=2, bias=False)
        self.frozen = nn.Conv2d(8, 8, 1, bias=False).requires_grad_(False)
        self.biased, self.named = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding="same", bias=False)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.first(images)
        for layer in (self.again, self.again, self.groups, self.again, self.frozen, self.biased, self.named):
            maps = torch.nn.functional.silu(layer(maps))
        return maps.square().mean()


def gradients(network: Network, finish: Callable[[], object] = lambda: None) -> dict[str, Tensor]:
    """Return the gradients of two batches, which are added."""
    images = torch.randn(2, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for batch in images.to(torch.float32):
        network(batch.contiguous(memory_format=torch.channels_last)).backward()  # type: ignore[no-untyped-call]
        finish()
    return {name: weight.grad for name, weight in network.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("busy", [False, True], ids=["helps", "never begins"])
def test_gradients_have_the_bits_of_one_thread(busy: bool) -> None:
    network, second, free = Network().to(memory_format=torch.channels_last), SecondThread(), threading.Event()
    expected = {name: gradient.clone() for name, gradient in gradients(network).items()}
    network.zero_grad()
    taken = WeightGradients(network, second)
    overlapped = [name for name, layer in network.named_children() if isinstance(layer, OverlappedConv2d)]
    assert overlapped == ["first", "again", "groups"]
    if busy:
        second.start(free.wait)
    found = gradients(network, taken.finish)
    free.set()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_maps_in_order_and_raises() -> None:
    second, main = SecondThread(), threading.current_thread()
    results = list(second.map(lambda item: (item, threading.current_thread() is main), range(5)))
    assert [item for item, _ in results] == [0, 1, 2, 3, 4]
    assert all(on_main for item, on_main in results if item % 2 == 0)
    assert list(second.map(str, [])) == []
    with pytest.raises(ZeroDivisionError):
        list(second.map(lambda item: 1 / item, [1, 0]))


def accelerator(**changes: Any) -> Accelerator:
    real = Accelerator(cpu=True)
    names = ("distributed_type", "device", "mixed_precision", "state")
    plain: Any = SimpleNamespace(**{name: getattr(real, name) for name in names} | changes)
    return plain  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("gflops", "changes", "variable", "layer", "halved"),
    [
        (1.0, {}, "", nn.Identity, True),
        (module.SMALL_STEP + 0.1, {}, "", nn.Identity, False),
        (0.0, {}, "", nn.Identity, False),  # unknown
        (1.0, {"mixed_precision": "bf16"}, "", nn.Identity, False),
        (1.0, {"distributed_type": "MULTI_CPU"}, "", nn.Identity, False),
        (1.0, {}, "2", nn.Identity, False),  # what the user sets stays
        (1.0, {}, "", Network, False),  # a user's module may keep something of a call
    ],
)
def test_half_of_the_threads_compute_small_steps(
    gflops: float,
    changes: dict[str, Any],
    variable: str,
    layer: type[nn.Module],
    halved: bool,
    threads: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    torch.set_num_threads(2)
    plain, model = accelerator(**changes), nn.Sequential(layer())
    fix_threads(plain, model, gflops)
    assert torch.get_num_threads() == (1 if halved else 2)
    for cores, expected in (2, halved), (1, False):
        monkeypatch.setattr(module, "cores_per_process", lambda cores=cores: cores)
        assert (SecondThread.beside(plain, model) is not None) == expected
