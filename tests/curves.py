"""Read and compare run folders; kill and resume runs."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.weights import read_weights
from tests.faults.fault_points import planted
from utils.checkpoint import StateFiles

LOSSES = [f"{split}/{term}_loss" for split in ("train", "val") for term in ("box", "obj", "cls")]
CLASSIFIED = ["train/loss", "metrics/accuracy_top1", "metrics/accuracy_top5", "val/loss"]
ANCHOR_FREE = [
    *(f"train/{term}_loss" for term in ("box", "cls", "dfl")),
    *(f"metrics/{name}" for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")),
    *(f"val/{term}_loss" for term in ("box", "cls", "dfl")),
]
SCORES = ["metrics/mAP_0.5", "metrics/mAP_0.5:0.95"]
SEGMENTED = [
    *(f"train/{term}_loss" for term in ("box", "seg", "obj", "cls")),
    *(f"metrics/{name}({kind})" for kind in "BM" for name in ("precision", "recall", "mAP_0.5", "mAP_0.5:0.95")),
    *(f"val/{term}_loss" for term in ("box", "seg", "obj", "cls")),
]


def rows(folder: Path) -> list[dict[str, float]]:
    """Return the rows of results.csv, without empty cells."""
    with (folder / "results.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Check that nothing in a folder is written, not even the same bytes, added or removed inside the context."""
    before = _snapshot(folder)
    yield
    assert _snapshot(folder) == before


def _snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


def floats(folder: Path) -> Tensor:
    state = read_weights(folder / "weights" / "last.pt").state
    return torch.cat([value.double().flatten() for value in state.values() if value.is_floating_point()])


def same_curve(folder: Path, single: Path, losses: float = 1e-5, scores: float = 0.001, weights: float = 1e-5) -> None:
    """Check that two runs agree: losses and weights relatively, scores absolutely, rates and epochs exactly.

    Precision and recall are not compared: the confidence that they are given at may jump.
    """
    for actual, expected in zip(rows(folder), rows(single), strict=True):
        compared = [name for name in expected if name.startswith(("train/", "val/", "metrics/"))]
        assert {*LOSSES, *SCORES} <= {*compared} or compared in (CLASSIFIED, SEGMENTED, ANCHOR_FREE)
        for name in compared:
            if name.startswith("metrics/") and not name.startswith(("metrics/precision", "metrics/recall")):
                assert actual[name] == pytest.approx(expected[name], abs=scores), name
            elif name.endswith("loss"):
                assert actual[name] == pytest.approx(expected[name], rel=losses), name
        rest = [name for name in expected if name not in compared]
        assert rest == ["epoch", *(f"x/lr{number}" for number in range(len(rest) - 1))]
        assert [actual[name] for name in rest] == [expected[name] for name in rest]
    gap = (floats(folder) - floats(single)).norm() / floats(single).norm()
    assert gap <= weights


def identical(folder: Path, other: Path) -> None:
    """Check that two finished runs are equal: results.csv to the byte, the EMA to the bit, and the counters."""
    assert (folder / "results.csv").read_bytes() == (other / "results.csv").read_bytes()
    for name in ("last.pt", "best.pt"):
        contents = [torch.load(run / "weights" / name, weights_only=True) for run in (folder, other)]
        one, two = (content.pop("state") for content in contents)
        assert contents[0]["origin"] == contents[1]["origin"]
        assert contents[0]["licence"] == contents[1]["licence"]
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one), name
    one, two = (state(run) for run in (folder, other))
    assert {**one["progress"], "summary": None} == {**two["progress"], "summary": None}


def killed_and_moved(train: Callable[..., str], run_script: Callable[..., str], alone: Path, *more: str) -> None:
    """Check that a run that is killed on two processes, and continues on one, equals one that nothing has disturbed.

    train: of train.py, for two logical processes. alone: the undisturbed run. more: flags of the resumed run.
    """
    fault = planted("SIGKILL", "optimizer step", 2, rank=1)  # of the first one there is a state
    train(alone.parent, "--processes", "2", "--name", "killed", "--save-steps", "1", **fault, code=1)
    killed = alone.with_name("killed")
    resume = ("train.py", "--resume", str(killed), "--processes", "1", *more)
    assert "resuming " in run_script(*resume, OMP_NUM_THREADS="1")
    identical(killed, alone)


def state(folder: Path) -> dict[str, Any]:
    """Return the last state of a run."""
    content = StateFiles(folder / "checkpoint").read(print)
    assert content is not None
    return content


def refused(printed: str, message: str) -> None:
    assert printed.count("error: ") == 1, printed
    assert message in printed
    assert 'train.py", line' not in printed  # no traceback of ours; a launcher adds one of its own
