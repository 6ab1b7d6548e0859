"""Reading and comparing what runs leave behind."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.weights import read_weights

LOSSES = [f"{split}/{term}_loss" for split in ("train", "val") for term in ("box", "obj", "cls")]
SCORES = ["metrics/mAP_0.5", "metrics/mAP_0.5:0.95"]


def rows(folder: Path) -> list[dict[str, float]]:
    """Of results.csv, without what was not measured."""
    with (folder / "results.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Within, no file of a folder may be written, be it with the same bytes, nor come or go."""
    before = _snapshot(folder)
    yield
    assert _snapshot(folder) == before


def _snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def floats(folder: Path) -> Tensor:
    state = read_weights(folder / "weights" / "last.pt").state
    return torch.cat([value.double().flatten() for value in state.values() if value.is_floating_point()])


def same_curve(folder: Path, single: Path, losses: float = 1e-5, scores: float = 0.005, weights: float = 1e-5) -> None:
    """Losses and weights relative, scores absolute; everything else in results.csv but precision and recall equal."""
    for found, expected in zip(rows(folder), rows(single), strict=True):
        for name in LOSSES:
            assert found[name] == pytest.approx(expected[name], rel=losses), name
        for name in SCORES:
            assert found[name] == pytest.approx(expected[name], abs=scores), name
        rest = [name for name in expected if name not in (*LOSSES, *SCORES, "metrics/precision", "metrics/recall")]
        assert rest == ["epoch", "x/lr0", "x/lr1", "x/lr2"]
        assert [found[name] for name in rest] == [expected[name] for name in rest]
    gap = (floats(folder) - floats(single)).norm() / floats(single).norm()
    assert gap <= weights


def refused(printed: str, said: str) -> None:
    assert printed.count("error: ") == 1, printed
    assert said in printed
    assert 'train.py", line' not in printed  # no traceback of ours; a launcher adds one of its own
