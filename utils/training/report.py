"""The report of an epoch: its row of results.csv, its console line, its values for trackers. Called by train.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from utils.checkpoint.progress import Progress
from utils.console import Bar, RemainingTime, duration
from utils.summary import Summary
from utils.training.step_log import used_memory


def results_row(
    epoch: int,
    losses: Mapping[str, float],
    summary: Summary | None,
    metric_names: Sequence[str],
    optimizer: torch.optim.Optimizer,
) -> dict[str, float | None]:
    """Return a row of results.csv with YOLOv5's columns; those of the validation are None without a `summary`."""
    return {
        "epoch": epoch,
        **{f"train/{name}": value for name, value in losses.items()},
        **{f"metrics/{name}": summary.metrics[name] if summary else None for name in metric_names},
        **{f"val/{name}": summary.losses[name] if summary else None for name in losses},
        **{f"x/lr{number}": group["lr"] for number, group in enumerate(optimizer.param_groups)},
    }


def epoch_line(
    epoch: int, epochs: int, losses: Mapping[str, float], summary: Summary | None, rate: float, skipped: int
) -> str:
    """Return the console line of an epoch. rate: images per second. skipped: optimizer steps skipped so far."""
    parts = [f"{name} {value:.4f}" for name, value in losses.items()]
    parts += [f"{name} {value:.4f}" for name, value in (summary.metrics if summary else {}).items()]
    parts += [f"{rate:.0f} images/s"] if rate else []
    parts += [f"steps skipped so far, not finite: {skipped}"] if skipped else []
    return f"epoch {epoch + 1}/{epochs}: {', '.join(parts)}"


def epoch_timing(bar: Bar, validation_seconds: float, progress: Progress) -> dict[str, float]:
    """Return the timing of an epoch for trackers, and the optimizer steps skipped so far."""
    return {
        "images_per_second": bar.rate,
        "train_seconds": bar.seconds,
        "validation_seconds": validation_seconds,
        "data_wait": bar.waited / max(bar.seconds, 1e-9),
        "steps_skipped": progress.skipped,
    }


def best_epoch_table(progress: Progress, best: Summary, brief: bool) -> list[str]:
    """Return the table of the best epoch as lines of text."""
    head = f"best epoch: {progress.best_epoch + 1} of {progress.epoch}, fitness {progress.best:.4f}"
    return [head, *best.table(brief)]


def bar_values(
    losses: Mapping[str, float], best: Summary | None, bar: Bar, remaining: RemainingTime, device: torch.device
) -> dict[str, str]:
    """Return the values beside the progress bar. losses: means over the epoch so far. best: of the best epoch."""
    values = {name.removesuffix("_loss"): f"{value:.4f}" for name, value in losses.items()}
    if best:
        name, metric = list(best.metrics.items())[-1]
        values[f"best {name}"] = f"{metric:.3f}"
    values |= {"wait": f"{bar.waiting:.0%}", "memory": f"{used_memory(device):.1f} GiB"}
    return values | {"left": duration(remaining.seconds())}
