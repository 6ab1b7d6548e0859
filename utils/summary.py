"""The result of an evaluation, for every task. Made by tasks; read by val.py, train.py, utils/plots and trackers."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from utils.console import log, table
from utils.errors import UserError, quoted
from utils.files import csv_text

RESULT = "LOCKSTEP_RESULT"  # environment variable, also of spawned processes: the file for the result of a call
Row = Sequence[str | float]
PREPARING, INFERENCE, POSTPROCESSING = STAGES = ("preprocess", "inference", "postprocess")  # of an evaluation
DRAWN_IMAGES = 48  # validation images that are drawn with their predictions


@dataclass(frozen=True)
class Summary:
    """The metrics of a split. The names of the fields are part of the format of a saved state."""

    metrics: dict[str, float]  # by column of results.csv, without "metrics/"
    fitness: float  # highest in the best epoch
    overall: list[Row]  # titles of the printed table, and the row of all classes, which start with a name
    details: list[Row]  # rows of classes
    evidence: dict[str, Any] = field(default_factory=dict)  # plain values, for documents and pictures
    losses: dict[str, float] = field(default_factory=dict)  # mean of each loss term over the batches
    rate: float = 0.0  # images per second
    by_class: dict[str, dict[str, float]] = field(default_factory=dict)  # metric -> class with labels -> value
    # Metrics in the console's line of an epoch, by short title; the last is beside the bar. Empty: `metrics`.
    headline: dict[str, float] = field(default_factory=dict)
    highest_fitness: float = 1.0  # upper bound of `fitness`
    sets: list[Row] = field(default_factory=list)  # rows of the data sets, if the split lists several

    def table(self, brief: bool = False) -> list[str]:
        """Return the lines of the printed table, without the rows of classes if `brief`."""
        return table([*self.overall, *([] if brief else self.details), *self.sets])

    def with_set(self, name: str, part: Summary) -> Summary:
        """Return the summary with the metrics of one data set of the split."""
        metrics = {**self.metrics, **{f"{metric}({name})": value for metric, value in part.metrics.items()}}
        rows: list[Row] = [*self.sets, *((name, *row[1:]) for row in part.overall[1:])]
        return replace(self, metrics=metrics, sets=rows, headline=self.headline or self.metrics)

    def columns(self) -> dict[str, float]:
        """Return metrics and losses by the names of results.csv."""
        metrics = {f"metrics/{name}": value for name, value in self.metrics.items()}
        return {**metrics, **{f"val/{name}": value for name, value in self.losses.items()}}

    def write_result(self, folder: Path) -> None:
        """Write the metrics of the run in `folder` for the caller, if the script was called from Python."""
        if file := os.environ.get(RESULT):
            Path(file).write_text(json.dumps({**self.columns(), "fitness": self.fitness, "folder": str(folder)}))

    def with_fitness(self, weights: Mapping[str, float]) -> Summary:
        """Return the summary with the sum of its metrics with `weights` as its fitness, if any; NaN becomes -inf."""
        if not weights:
            return self if self.fitness > -math.inf else replace(self, fitness=-math.inf)
        value = sum(weight * self.metrics[name] for name, weight in weights.items())
        highest = sum(max(weight, 0.0) for weight in weights.values()) or 1.0
        headline = {**(self.headline or self.metrics), "fitness": value}
        return replace(self, fitness=max(-math.inf, value), highest_fitness=highest, headline=headline)


def metric_columns(metrics: Sequence[str], sets: Sequence[Any]) -> list[str]:
    """Return the names of a task's metrics: of the whole split, then of each data set in it, which has a `name`."""
    return [*metrics, *(f"{metric}({part.name})" for part in sets for metric in metrics)]


def fitness_weights(text: str, metrics: Sequence[str]) -> dict[str, float]:
    """Return the weights of --fitness, such as `mAP_0.5=0.2,recall=0.8`, by the task's metric. Raises `UserError`."""
    with suppress(ValueError):
        terms = dict(term.split("=") for term in text.split(","))
        weights = {name.strip().removeprefix("metrics/"): float(number) for name, number in terms.items()}
        if {*weights} <= {*metrics} and any(weights.values()) and all(map(math.isfinite, weights.values())):
            return weights
    raise UserError(f"--fitness {quoted(text)}: give finite weights, such as {metrics[0]}=1, of {', '.join(metrics)}")


class Box(NamedTuple):
    """A box to draw; coordinates are fractions of the image's width and height."""

    label: int  # class number
    confidence: float | None  # None for a label
    xyxy: tuple[float, float, float, float]
    outline: tuple[float, ...] = ()  # x, y, x, y, ... of what the box surrounds, such as a mask; () for an upright box


class Example(NamedTuple):
    """An image of a split with its labels and predictions."""

    name: str  # file name
    image: int  # index in the split
    size: tuple[int, int]  # width and height of the file's image in pixels
    labels: list[Box]
    predictions: list[Box]  # the most confident first


def evenly_spaced(items: int, count: int) -> list[int]:
    """Return `count` evenly spaced, ascending indices below `items`, or all of them if there are fewer."""
    return [k * items // count for k in range(count)] if count < items else list(range(items))


def sparse_counts(matrix: np.ndarray) -> list[list[int]]:
    """Return [row, column, count] of every nonzero element of a matrix of counts."""
    return np.column_stack((np.argwhere(matrix), matrix[matrix != 0])).tolist()


def confusion_text(sparse: Sequence[Sequence[int]], names: Sequence[str]) -> str:
    """Return the content of confusion_matrix.csv: the `sparse_counts` by true class (rows) and predicted class."""
    matrix = np.zeros((len(names), len(names)), np.int64)
    for row, column, count in sparse:
        matrix[row, column] = count
    return csv_text(("true \\ predicted", *names), zip(names, *matrix.T.tolist(), strict=True))


@dataclass
class StageTimer:
    """Measures the stages of this process's batches, without the first, which warms up, unless it is the only one."""

    synchronise: Callable[[], object] = lambda: None  # waits for the device before the clock is read
    batches: int = 0
    images: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by stage

    def start_batch(self, images: int) -> None:
        if self.batches == 1:
            self.images, self.seconds = 0, {}
        self.batches += 1
        self.images += images
        self.synchronise()
        self._last = time.perf_counter()

    def end_stage(self, stage: str) -> None:
        """Add the time since the last reading of the clock to `stage`."""
        self.synchronise()
        before, self._last = self._last, time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + self._last - before


def log_times(times: Sequence[tuple[int, Mapping[str, float]]], batch_size: int = 0, always: bool = True) -> None:
    """Print the mean time of the stages from each process's images and seconds; with a batch size the rate too."""
    images = max(sum(count for count, _ in times), 1)
    means = [1000 * sum(seconds.get(stage, 0.0) for _, seconds in times) / images for stage in STAGES]
    rate = f"; {1000 / max(sum(means), 1e-9):.1f} images/s at batch size {batch_size}" if batch_size else ""
    stage_times = ", ".join(f"{mean:.1f} ms {stage}" for mean, stage in zip(means, STAGES, strict=True))
    log(f"speed per image: {stage_times}; image loading and warm-up excluded{rate}", always=always)
