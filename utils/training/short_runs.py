"""Warm-up and EMA of runs that are short for YOLOv5's: the rules of `warmup_share` and `ema_share`, and their messages.

Called by optimizer_steps.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

from utils.training.ema import RAMP_UPDATES
from utils.training.optimizer import Schedule


def ramp_of(share: float, updates: int) -> float:
    """Return the ramp of a run of `updates` at whose end the average spans `share` of them: 1 / (1 - decay) updates.

    It is at most `RAMP_UPDATES`, which share 0 stands for.
    """
    return min(updates / max(math.log(max(share * updates, 1)), 1), RAMP_UPDATES) if share else RAMP_UPDATES


def messages(schedule: Schedule, ramp: float, updates: int) -> list[str]:
    """Return a message for a shorter warm-up, and for a shorter ramp of the EMA. updates: optimizer steps."""
    usual = replace(schedule, warmup_share=0.0).warmup
    lines = []
    if schedule.warmup < usual:
        share = f"{schedule.warmup_share:.0%} of the run's {schedule.epochs * schedule.batches:,}"
        lines.append(f"warm-up: {schedule.warmup} batches instead of {usual}, for they are {share}")
    if ramp < RAMP_UPDATES:
        lines.append(f"EMA: a ramp of {ramp:.0f} steps instead of {RAMP_UPDATES}, for the run has only {updates:,}")
    return lines
