"""The report of an epoch: its row of results.csv, its console line, its values for trackers. Called by train.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from utils.checkpoint.progress import Progress
from utils.console import Bar, RemainingTime, columns, duration
from utils.errors import plural
from utils.summary import Summary
from utils.training.step_log import used_memory

LOW_FITNESS = 0.01  # a run with a lower fitness probably has something wrong


def results_row(
    epoch: int,
    losses: Mapping[str, float],
    summary: Summary | None,
    metric_names: Sequence[str],
    optimizer: torch.optim.Optimizer,
) -> dict[str, float | None]:
    """Return a row of results.csv with YOLOv5's columns; the validation columns are None without a `summary`."""
    return {
        "epoch": epoch,
        **{f"train/{name}": value for name, value in losses.items()},
        **{f"metrics/{name}": summary.metrics[name] if summary else None for name in metric_names},
        **{f"val/{name}": summary.losses[name] if summary else None for name in losses},
        **{f"x/lr{number}": group["lr"] for number, group in enumerate(optimizer.param_groups)},
    }


def epoch_lines(
    epoch: int, epochs: int, losses: Mapping[str, float], summary: Summary | None, rate: float, skipped: int
) -> list[str]:
    """Return the console lines of an epoch, which is counted from 0 and printed from 1.

    Args:
        rate: images per second
        skipped: number of optimizer steps skipped so far
    """
    head = f"epoch {epoch + 1}/{epochs}: "
    scores = [" ".join(f"{title} {value:.3f}" for title, value in _headline(summary).items())] if summary else []
    images = [f"{rate:.0f} img/s"] if rate else []
    # A line that is too wide for the terminal has fewer digits; if that is not enough, the rate is left out.
    fitting = (
        line
        for rest in ([*scores, *images], scores)
        for digits in (4, 3)
        if len(line := head + ", ".join([" ".join(_loss_texts(losses, digits)), *rest])) <= columns()
    )
    shortest = head + ", ".join([" ".join(_loss_texts(losses, 2)), *scores])
    lines = [next(fitting, shortest)]
    if skipped:
        lines.append(f"  {plural(skipped, 'optimizer step')} skipped so far: gradients that are not finite")
    return lines


def _headline(summary: Summary) -> dict[str, float]:
    return summary.headline or summary.metrics


def _loss_texts(losses: Mapping[str, float], digits: int) -> list[str]:
    return [f"{name.removesuffix('_loss')} {value:.{digits}f}" for name, value in losses.items()]


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
    """Return the table of the best epoch as lines of text, with a hint if the fitness is near 0."""
    share = progress.best / best.highest_fitness
    of = f" ({progress.best:.4f} of {best.highest_fitness:g})" if best.highest_fitness != 1 else ""
    head = f"best epoch: {progress.best_epoch + 1} of {progress.epoch}, fitness {share:.4f}{of}"
    table = [head, *best.table(brief)]
    if not brief and 0 <= share < LOW_FITNESS:
        table.append("the fitness is near 0: docs/map-is-zero.md lists the causes")
    return table


def bar_values(
    losses: Mapping[str, float], best: Summary | None, bar: Bar, remaining: RemainingTime, device: torch.device
) -> list[str]:
    """Return the values beside the progress bar, the most important first, as a narrow terminal shows fewer.

    Args:
        losses: mean loss terms over the epoch so far
        best: summary of the best epoch
    """
    values = [f"left {duration(remaining.seconds())}", " ".join(_loss_texts(losses, 3))]
    if best:
        title, value = list(_headline(best).items())[-1]
        values.append(f"best {title} {value:.3f}")
    rate, memory = f"{bar.rate_so_far:.0f} img/s", f"memory {used_memory(device):.1f} GiB"
    return [*values, rate, f"wait {bar.waiting:.0%}", memory]
