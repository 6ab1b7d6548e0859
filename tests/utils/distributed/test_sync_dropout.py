"""Dropout with the masks of the global batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import convnext_tiny, mobilenet_v3_small
from torchvision.ops import StochasticDepth

from tests.making import without_launcher
from utils.distributed.sync_dropout import GlobalDropout, synchronise_dropout


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    without_launcher(monkeypatch)


def network() -> nn.Sequential:
    """Make a network with layers to replace, at two depths, and layers to leave as they are."""
    inner = nn.Sequential(nn.Dropout(0.25, inplace=True), StochasticDepth(0.75, "row"))
    return nn.Sequential(
        nn.Linear(3, 3), nn.Dropout(0.5), inner, nn.Dropout(0.0), nn.Dropout2d(0.5), StochasticDepth(0.5, "batch")
    )


def test_dropout_layers_are_replaced() -> None:
    model = network()
    names, state = [name for name, _ in model.named_modules()], model.state_dict()
    inner = model[2]
    synchronise_dropout(model)
    assert [name for name, _ in model.named_modules()] == names
    assert model.state_dict().keys() == state.keys()
    assert model[2] is inner
    replaced = [part for part in model.modules() if isinstance(part, GlobalDropout)]
    assert [(part.p, part.rows, part.maps) for part in replaced] == [
        (0.5, False, False),
        (0.25, False, False),
        (0.75, True, False),
        (0.5, False, True),
    ]
    assert [type(part) for part in model[3:]] == [nn.Dropout, GlobalDropout, StochasticDepth]  # p is 0, or not by row


@pytest.mark.parametrize("training", [True, False])
def test_the_training_mode_stays(training: bool) -> None:
    model = network().train(training)
    synchronise_dropout(model)
    assert {part.training for part in model.modules()} == {training}


@pytest.mark.parametrize(("build", "kind"), [(mobilenet_v3_small, nn.Dropout), (convnext_tiny, StochasticDepth)])
def test_torchvision_models(build: type, kind: type) -> None:
    with torch.device("meta"):
        model = build()
    dropping = [name for name, part in model.named_modules() if isinstance(part, kind) and part.p]
    keys = list(model.state_dict())
    assert dropping
    synchronise_dropout(model)
    assert [name for name, part in model.named_modules() if isinstance(part, GlobalDropout)] == dropping
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("rows", [True, False])
def test_evaluation_drops_and_draws_nothing(rows: bool) -> None:
    values, before = torch.rand(4, 3), torch.get_rng_state()
    assert GlobalDropout(0.5, rows).eval()(values) is values
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rows", [True, False])
def test_the_mean_stays(rows: bool) -> None:
    torch.manual_seed(0)
    values = GlobalDropout(0.2, rows)(torch.full((40_000, 2, 1), 4.0))
    assert values.unique().tolist() == [0, 5]  # 4 / 0.8
    assert values.mean().item() == pytest.approx(4, abs=0.06)  # 6 standard deviations of the mean of 40000 rows
    alike = (values[:, 0] == values[:, 1]).float().mean().item()
    assert alike == pytest.approx(1 if rows else 0.8**2 + 0.2**2, abs=0.02 if not rows else 0)


def test_whole_channels_are_dropped() -> None:
    torch.manual_seed(0)
    dropped = GlobalDropout(0.5, rows=False, maps=True)(torch.ones(50, 8, 3, 4)) == 0
    assert torch.equal(dropped.all((2, 3)), dropped.any(3).any(2))
    assert 0 < dropped[0].float().mean() < 1


@pytest.mark.parametrize("rows", [True, False])
def test_the_gradient_has_the_same_mask(rows: bool) -> None:
    values = torch.ones(8, 5, requires_grad=True)
    output = GlobalDropout(0.5, rows)(values)
    output.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, output.detach())


@pytest.mark.parametrize("rows", [True, False])
def test_probability_1_drops_everything(rows: bool) -> None:
    assert GlobalDropout(1.0, rows)(torch.ones(3, 4)).tolist() == [[0] * 4] * 3


def test_the_dtype_stays() -> None:
    assert GlobalDropout(0.25, False)(torch.ones(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def run(images: Tensor, rank: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, float]:
    """Return the output of a process for its part of the images, and its next random number."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Dropout1d(0.2), nn.Dropout(0.5), nn.Flatten(), nn.Dropout(0.25), StochasticDepth(0.5, "row")
    )
    synchronise_dropout(model)
    return model(images.tensor_split(processes)[rank]), torch.rand(1).item()


@pytest.mark.parametrize("processes", [2, 3])
def test_the_mask_does_not_depend_on_the_number_of_processes(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(12, 4, 5) + 1
    whole, number = run(images, 0, 1, monkeypatch)
    parts, numbers = zip(*(run(images, rank, processes, monkeypatch) for rank in range(processes)), strict=True)
    assert torch.equal(torch.cat(parts), whole)
    assert set(numbers) == {number}
    dropped = [part == 0 for part in parts]
    assert not torch.equal(dropped[0], dropped[1])  # of different images
