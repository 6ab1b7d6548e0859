"""The table of operators in docs/exact.md: it is complete, and what each row says is so, to the bit."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import train
from utils.distributed.tree import LogicalProcesses
from utils.files import ROOT

Function = Callable[[Tensor], Tensor]
ROW = re.compile(r"^\| (`.*`) \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
TABLE = [
    (set(re.findall(r"`(\w+)`", row[0])), *row[1:]) for row in ROW.findall((ROOT / "docs" / "exact.md").read_text())
]
IMAGES, PARTS = 16, 4
REAL_EPOCH = train.train_one_epoch


class Operators(TorchDispatchMode):
    """Collects the names of the operators that are called, those in place by the name of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = operator._schema.name.removeprefix("aten::").rpartition("::")[2]
        self.names.add(name if name.endswith("__") else name.removesuffix("_"))
        return operator(*arguments, **(named or {}))


@pytest.mark.parametrize(
    ("data", "model"),
    [
        ("small_data", "yolov5n"),
        ("small_data", "yolov9t"),
        ("drawn_outlines", "yolov5n-seg"),
        ("drawn_classes", "yolov5n-cls"),
    ],
)
def test_the_table_has_every_operator(
    data: str, model: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    operators = Operators()

    def epoch(*parts: Any) -> Any:
        with operators:
            return REAL_EPOCH(*parts)

    monkeypatch.setattr(train, "train_one_epoch", epoch)
    how = {"imgsz": 64, "epochs": 1, "batch_size": 16, "workers": 0, "device": "cpu", "noplots": True, "noval": True}
    source = str(request.getfixturevalue(data))
    train.run(data=source, weights="", cfg=f"{model}.yaml", project=str(tmp_path), logical_processes=2, **how)
    assert "convolution_backward" in operators.names
    assert operators.names - set().union(*(row[0] for row in TABLE)) == set()


def gradient(function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> Function:
    """Return the function that maps a batch to the gradient of a weight, added up over the batch."""

    def of(batch: Tensor) -> Tensor:
        weight = numbers(*shape).requires_grad_()
        return torch.autograd.grad(function(batch, weight).square().sum(), weight)[0]

    return of


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def input_gradient(function: Function) -> Function:
    def of(batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        return torch.autograd.grad(function(batch).square().sum(), batch)[0]

    return of


def scattered(batch: Tensor) -> Tensor:
    values = batch.flatten(1)
    return torch.zeros(5, values.shape[1]).index_add_(0, torch.arange(len(values)) % 5, values)


def norm(batch: Tensor, weight: Tensor) -> Tensor:
    return functional.batch_norm(batch, None, None, weight, weight, training=True)


# An operator of each row, by a function of images (n, 8, 12, 12); of sums over the batch, the sum.
CASES: dict[str, Function] = {
    "silu": functional.silu,
    "silu_backward": input_gradient(functional.silu),
    "sigmoid": torch.sigmoid,
    "index": lambda batch: batch[:, [3, 1]],
    "amax": lambda batch: batch.amax((2, 3)),
    "max_pool2d_with_indices": lambda batch: functional.max_pool2d(batch, 5, 1, 2),
    "max_pool2d_with_indices_backward": input_gradient(lambda batch: functional.max_pool2d(batch, 5, 1, 2)),
    "upsample_nearest2d_backward": input_gradient(lambda batch: functional.interpolate(batch, scale_factor=2.0)),
    "avg_pool2d": lambda batch: functional.avg_pool2d(batch, 2),
    "_softmax": lambda batch: batch.softmax(1),
    "_log_softmax_backward_data": input_gradient(lambda batch: batch.log_softmax(1)),
    "convolution": lambda batch: functional.conv2d(batch, numbers(16, 8, 3, 3), padding=1),
    "mm": lambda batch: batch.flatten(1) @ numbers(1152, 6),
    "convolution_backward": gradient(lambda batch, weight: functional.conv2d(batch, weight, padding=1), 16, 8, 3, 3),
    "native_batch_norm_backward": gradient(norm, 8),
    "sum": lambda batch: batch.sum((0, 2, 3)),
    "mean": lambda batch: batch.mean((0, 2, 3)),
    "var_mean": lambda batch: torch.cat(torch.var_mean(batch, (0, 2, 3))),
    "linalg_vector_norm": lambda batch: nn.utils.get_total_norm([batch])[None],
    "index_add": scattered,
    "rand": lambda batch: torch.rand(len(batch), 3, generator=torch.Generator().manual_seed(1)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_row_says(name: str) -> None:
    """Two calls are equal; so are half a batch, if the table says so, and the sums of the parts of P processes."""
    ((_, _, independent, equal),) = [row for row in TABLE if name in row[0]]
    call, batch = CASES[name], numbers(IMAGES, 8, 12, 12)
    assert torch.equal(call(batch), call(batch.clone()))
    if independent == "yes" and name != "rand":
        assert torch.equal(call(batch)[: IMAGES // 2], call(batch[: IMAGES // 2]))
    assert equal in ("yes", "with `--logical-processes`")
    parts = [call(part) for part in batch.chunk(PARTS)]
    whole = LogicalProcesses(PARTS).sum(parts)
    for processes in range(2, PARTS + 1):
        logical = [LogicalProcesses(PARTS, processes, rank) for rank in range(processes)]
        sums = [each.local_sums(parts[each.local.start : each.local.stop]) for each in logical]
        assert torch.equal(logical[0].root(chain(*sums)), whole)


def test_every_row_is_held() -> None:
    assert [row for row in TABLE if not row[0] & CASES.keys()] == []
