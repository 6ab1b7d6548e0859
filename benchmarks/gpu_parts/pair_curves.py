"""Two processes against one: --device 0,1 with SyncBatchNorm over NCCL, or two CPU processes over gloo."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from benchmarks.gpu_parts.measuring import Machine, machine, rounded, row, run_flags, script


def devices(here: Machine, count: int) -> list[str]:
    """Return the flags of one device, or of two."""
    if not here.on_gpu:
        return ["--device", "cpu", "--processes", str(count)]
    return ["--device", ",".join(here.device.split(",")[:count])]


def values(folder: Path) -> list[dict[str, float]]:
    """Return the rows of results.csv."""
    with (folder / "results.csv").open() as file:
        return [{name.strip(): float(value) for name, value in line.items()} for line in csv.DictReader(file)]


def gap(first: Path, second: Path) -> dict[str, float]:
    """Return the largest relative difference of a loss, of the weights, and the largest difference of an mAP."""
    pairs = list(zip(values(first), values(second), strict=True))
    losses = [abs(one[name] / two[name] - 1) for one, two in pairs for name in one if "loss" in name and two[name]]
    scores = [abs(one[name] - two[name]) for one, two in pairs for name in one if "mAP" in name]
    states = [torch.load(folder / "weights" / "last.pt", map_location="cpu")["state"] for folder in (first, second)]
    weights = [
        float((one.double() - two.double()).norm() / one.double().norm().clamp(min=1e-12))
        for one, two in zip(*(state.values() for state in states), strict=True)
        if one.is_floating_point()
    ]
    return {"losses": rounded(max(losses), 2), "mAP": rounded(max(scores), 2), "weights": rounded(max(weights), 2)}


def main() -> None:
    """Compare in float32, and in bf16 on GPUs."""
    here = machine()
    for precision in ("no", "bf16") if here.on_gpu else ("no",):
        for count in (1, 2):
            flags = run_flags(here, f"{precision}{count}", precision, 1, "--sync-bn", *devices(here, count))
            script("train.py", *flags)
        runs = here.scratch / "runs"
        differences = gap(runs / f"{precision}1", runs / f"{precision}2")
        row("Two processes against one, with --sync-bn: largest differences", precision=precision, **differences)


if __name__ == "__main__":
    main()
