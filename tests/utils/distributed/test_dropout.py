"""Dropout with the masks of the global batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from utils.distributed.dropout import GlobalDropout, synchronise_dropout


def test_dropout_layers_are_replaced() -> None:
    """At any depth, without a change of names; not those of probability 0, or that drop by batch."""
    inner = nn.Sequential(nn.Dropout(0.25, inplace=True), StochasticDepth(0.75, "row"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), inner, nn.Dropout2d(0.5))
    model.extend([nn.Dropout(0.0), StochasticDepth(0.5, "batch")])
    names, kept = [name for name, _ in model.named_modules()], [*model[4:]]
    synchronise_dropout(model)
    assert [name for name, _ in model.named_modules()] == names
    assert [*model[4:]] == kept
    replaced = [layer for layer in model.modules() if isinstance(layer, GlobalDropout)]
    expected = [(0.5, False, False), (0.25, False, False), (0.75, True, False), (0.5, False, True)]
    assert [(layer.p, layer.rows, layer.maps) for layer in replaced] == expected


def test_evaluation_and_the_limits_of_dropout() -> None:
    values, before = torch.rand(4, 3), torch.get_rng_state()
    assert GlobalDropout(0.5).eval()(values) is values
    assert torch.equal(torch.get_rng_state(), before)
    assert GlobalDropout(1.0)(torch.ones(3, 4)).tolist() == [[0] * 4] * 3
    assert GlobalDropout(0.25)(torch.ones(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
    dropped = GlobalDropout(0.5, maps=True)(torch.ones(50, 8, 3, 4)) == 0
    assert torch.equal(dropped.all((2, 3)), dropped.any(3).any(2))  # whole channels
    assert 0 < dropped[0].float().mean() < 1


@pytest.mark.parametrize("rows", [True, False])
def test_the_mean_stays(rows: bool) -> None:
    values = GlobalDropout(0.2, rows)(torch.full((40_000, 2, 1), 4.0))
    assert values.unique().tolist() == [0, 5]  # 4 / 0.8
    assert values.mean().item() == pytest.approx(4, abs=0.06)  # 6 standard deviations of the mean of 40000 rows
    alike = (values[:, 0] == values[:, 1]).float().mean().item()
    assert alike == pytest.approx(1 if rows else 0.8**2 + 0.2**2, abs=0.02 if not rows else 0)


def dropped_by(images: Tensor, rank: int, processes: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, float]:
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
    whole, number = dropped_by(images, 0, 1, monkeypatch)
    parts, numbers = zip(*(dropped_by(images, rank, processes, monkeypatch) for rank in range(processes)), strict=True)
    assert torch.equal(torch.cat(parts), whole)
    assert set(numbers) == {number}
    dropped = [part == 0 for part in parts]
    assert not torch.equal(dropped[0], dropped[1])  # of different images
