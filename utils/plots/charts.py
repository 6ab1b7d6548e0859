"""Charts as matplotlib figures: results by epoch, confusion matrix, curves of classes, labels.

Called by pictures.py. matplotlib is imported when the first chart is drawn; pyplot and torch are never imported.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np

from utils.plots.drawing import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 100
MATPLOTLIB_SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
MAX_NAME_CHARACTERS = 40  # the middle of a longer name is cut out
GREY = "0.6"
SUBPLOT_INCHES = (3.2, 2.5)  # width and height, with title and ticks
MAX_SMOOTHING_POINTS = 4.0  # largest width of the smoothing, in points
MAX_CONFUSION_NAMES = 121  # 120 classes and background: a larger matrix is drawn without names
MAX_CELL_TEXTS = 1000  # numbers that are written, the largest ones: each takes 1 ms
MAX_NAMED_CURVES = 20  # classes; if there are more, they have neither colours nor names
MAX_BAR_NAMES = 160  # classes whose names are written below their bars
MAX_DRAWN_BOXES = 1000  # around one centre
DENSITY_BINS = 50  # bins along each side
LOG_SCALE_RATIO = 50  # ratio of a split's largest to smallest count above which the axis is logarithmic


def render(make_figure: Callable[..., Figure], *arguments: Any) -> np.ndarray:
    """Return the picture of `make_figure(*arguments)`, uint8 (h, w, 3) BGR, with all that extends beyond the figure.

    It has matplotlib's defaults and our settings; warnings of characters that the font lacks are silenced.
    """
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(MATPLOTLIB_SETTINGS)
        png = io.BytesIO()
        make_figure(*arguments).savefig(png, dpi=PIXELS_PER_INCH, bbox_inches="tight", pil_kwargs={"compress_level": 0})
    return np.asarray(cv2.imdecode(np.frombuffer(png.getbuffer(), np.uint8), cv2.IMREAD_COLOR))


def axis_text(name: str) -> str:
    """Return a name for matplotlib: printable, shortened, and not parsed as a formula."""
    if len(name) > MAX_NAME_CHARACTERS:
        name = f"{name[: MAX_NAME_CHARACTERS // 2]}…{name[-(MAX_NAME_CHARACTERS // 2 - 1) :]}"
    return printable(name).replace("$", r"\$")


def colours(count: int) -> list[Any]:
    """Return `count` colours, as distinct as possible."""
    from matplotlib import colormaps

    if count <= 20:
        return [colormaps["tab20"](index) for index in (*range(0, 20, 2), *range(1, 20, 2))][:count]
    return [colormaps["turbo"](share) for share in np.linspace(0.03, 0.97, count)]


def results_figure(results: Mapping[str, np.ndarray]) -> Figure:
    """Plot every column of results.csv but `epoch` over the epochs, in a subplot each: exact and smoothed values.

    Validation losses are below the training losses, metrics beside them in two rows, learning rates below all.
    """
    from matplotlib.figure import Figure

    groups = {group: [name for name in results if name.startswith(group)] for group in ("train/", "val/", "metrics/")}
    train, val, metrics = groups.values()
    other_columns = [name for name in results if not name.startswith((*groups, "epoch"))]
    half = math.ceil(len(metrics) / 2)
    rows = [row for row in ([*train, *metrics[:half]], [*val, *metrics[half:]], other_columns) if row]
    columns = max(map(len, rows), default=1)
    figure = Figure((columns * SUBPLOT_INCHES[0], len(rows) * SUBPLOT_INCHES[1]), layout="constrained")
    grid = figure.add_gridspec(max(len(rows), 1), columns)
    for number, row in enumerate(rows):
        for column, name in enumerate(row):
            axes, finite = figure.add_subplot(grid[number, column]), np.isfinite(results[name])
            epochs, values = results["epoch"][finite], results[name][finite]
            is_exact = name.startswith("x/") or len(epochs) < 2  # learning rates are free of noise
            size, opacity = 6 if len(epochs) < 60 else 3, 1 if is_exact else 0.35
            axes.plot(epochs, values, color="C0", marker=".", ms=size, alpha=opacity)
            if not is_exact:
                axes.plot(epochs, smooth(epochs, values), color="C0", linewidth=1.6)
            title = axis_text(name)
            if name.startswith("metrics/") and len(values):
                best = int(np.argmax(values))  # the first of equals
                title += f"\nbest {values[best]:.4g} in epoch {epochs[best]:g}"
            axes.set(title=title, xlabel="epoch")
            axes.locator_params("x", nbins=6, integer=True, min_n_ticks=1)
            axes.locator_params("y", nbins=6)
    return figure


def smooth(epochs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the means of `values` (n,) around each epoch, weighted by a Gaussian of one to four points' width."""
    span = max(np.ptp(epochs), 1.0)
    step = span / max(len(epochs) - 1, 1)
    width = np.clip(span / 40, min(step, span / 10), MAX_SMOOTHING_POINTS * step)
    weights = np.exp(-0.5 * ((epochs[:, None] - epochs) / width) ** 2)
    return weights @ values / weights.sum(1)


def confusion_figure(counts: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw the confusion matrix `counts` (c, c), true class by predicted class, as shares of the true class."""
    from matplotlib.figure import Figure

    size = len(names)
    has_names = size <= MAX_CONFUSION_NAMES
    side = max(0.24 * size, 3.6 + 0.15 * size) if has_names else 12.0  # inches of the matrix
    figure = Figure((side, side))
    axes = figure.add_axes((0, 0, 1, 1))
    shares, edges = counts / np.maximum(counts.sum(1, keepdims=True), 1), np.arange(size + 1) - 0.5
    borders = "0.85" if has_names else "none"
    mesh = axes.pcolormesh(edges, edges, shares, cmap="Blues", vmin=0, vmax=1, edgecolors=borders, linewidth=0.5)
    figure.colorbar(mesh, cax=axes.inset_axes((1 + 0.15 / side, 0, 0.2 / side, 1)), label="share of the true class")
    axes.set_xlabel("predicted class", fontsize=11, fontweight="bold")
    axes.set_ylabel("true class", fontsize=11, fontweight="bold")
    axes.invert_yaxis()
    if has_names:
        labels, font_size = [axis_text(name) for name in names], 8 if size > 12 else 9
        axes.set_xticks(range(size), labels, rotation=90, fontsize=font_size)
        axes.set_yticks(range(size), labels, fontsize=font_size)
        cells = np.argwhere(shares >= 0.005)  # others round to 0
        largest = cells[np.argsort(-shares[tuple(cells.T)], kind="stable")[:MAX_CELL_TEXTS]]
        for true, predicted in largest.tolist():
            share = shares[true, predicted]
            text, colour = "1" if share >= 0.995 else f"{share:.2f}"[1:], "white" if share > 0.55 else "black"
            axes.text(predicted, true, text, ha="center", va="center", color=colour, fontsize=font_size - 1)
    return figure


class Curves(NamedTuple):
    """A curve for each class over the same x."""

    names: Sequence[str]  # c
    x: np.ndarray  # (p,): confidences or recalls
    values: np.ndarray  # (c, p)

    def mean(self) -> np.ndarray:
        """Return the mean of the curves (p,) over the classes that have a value; 0 without any."""
        finite = np.isfinite(self.values)
        return np.where(finite, self.values, 0).sum(0) / np.maximum(finite.sum(0), 1)


def f1(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Return the harmonic mean of precision and recall; 0 if both are 0."""
    return 2 * precision * recall / np.maximum(precision + recall, 1e-12)


def confidence_figure(metric: str, curves: Curves, operating_point: int) -> Figure:
    """Plot the curves of a metric over the confidence; the one with the index `operating_point` is marked."""
    mean = curves.mean()
    top = int(np.argmax(mean))
    label = f"best {mean[top]:.3f} at {curves.x[top]:.3f}"
    heading = f"{metric} at {curves.x[operating_point]:.3f} (best F1)"
    figure = _curves_figure(curves, curves.values[:, operating_point], label, heading)
    axes = figure.axes[0]
    axes.axvline(curves.x[operating_point], color=GREY, linewidth=1, linestyle=":")
    axes.plot(curves.x[top], mean[top], "o", color="black", markersize=5)
    axes.set(xlabel="confidence", ylabel=metric)
    return figure


def recall_figure(curves: Curves, ap50: np.ndarray) -> Figure:
    """Plot precision over recall; `ap50`, (c,), has the AP of each class at an IoU of 0.5, or nan."""
    mean = float(np.mean(ap50[np.isfinite(ap50)])) if np.isfinite(ap50).any() else 0.0
    figure = _curves_figure(curves, ap50, f"mAP50 {mean:.3f}", "AP50")
    figure.axes[0].set(xlabel="recall", ylabel="precision")
    return figure


def _curves_figure(curves: Curves, scores: np.ndarray, label: str, heading: str) -> Figure:
    """Plot a line for each class and a thick one for the mean; the legend has `label`, `heading` and `scores` (c,)."""
    from matplotlib.figure import Figure

    figure, count = Figure((10, 6), layout="constrained"), len(curves.names)
    axes = figure.add_subplot(xlim=(0, 1), ylim=(0, 1.02))
    label = f"{axis_text(curves.names[0]) if count == 1 else 'all classes'}: {label}"
    entries = axes.plot(curves.x, curves.mean(), color="black", linewidth=3, zorder=3, label=label)
    if count > MAX_NAMED_CURVES:
        lines = axes.plot(curves.x, curves.values.T, color=GREY, linewidth=0.5, alpha=0.5, label=f"{count} classes")
        entries.append(lines[0])
    elif count > 1:
        entries += axes.plot([], [], " ", label=heading)
        for name, score, values, colour in zip(curves.names, scores, curves.values, colours(count), strict=True):
            label = f"{axis_text(name)} {score:.3f}"
            entries += axes.plot(curves.x, values, color=colour, linewidth=1.1, label=label)
    figure.legend(handles=entries, loc="outside right upper")
    return figure


def labels_figure(
    names: Sequence[str], counts: Mapping[str, np.ndarray], classes: np.ndarray, boxes: np.ndarray
) -> Figure:
    """Plot `counts` (c,) of labels by split, and `boxes`, normalised xywh (n, 4), of the classes `classes` (n,)."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    size = max(12.0, 0.14 * min(len(names), MAX_BAR_NAMES)), 7.5 if len(boxes) else 4.0
    figure = Figure(size, layout="constrained")
    grid = figure.add_gridspec(2 if len(boxes) else 1, 3)
    _draw_bars(figure.add_subplot(grid[0, :]), names, counts)
    if len(boxes):
        shapes, centres, sizes = (figure.add_subplot(grid[1, column], box_aspect=1) for column in range(3))
        drawn = np.linspace(0, len(boxes) - 1, min(len(boxes), MAX_DRAWN_BOXES)).astype(int)
        corners = 0.5 + np.array([(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)]) / 2 * boxes[drawn, None, 2:]
        shades = np.array(colours(len(names)))[classes[drawn]]
        shapes.add_collection(LineCollection([*corners], linewidths=0.6, colors=shades, alpha=0.25))
        title = f"{len(drawn)} boxes around one centre"
        shapes.set(title=title, xlim=(0, 1), ylim=(0, 1), xlabel="width", ylabel="height")
        _draw_density(centres, boxes[:, :2], "centres", "x", "y")
        _draw_density(sizes, boxes[:, 2:], "sizes", "width", "height")
        centres.invert_yaxis()  # as in an image
    return figure


def _draw_bars(axes: Axes, names: Sequence[str], counts: Mapping[str, np.ndarray]) -> None:
    """Draw a bar for each class and split, side by side."""
    width = 0.8 / len(counts)
    for number, (split, labels) in enumerate(counts.items()):
        left = np.arange(len(names)) + (number - (len(counts) - 1) / 2) * width
        bars = axes.bar(left, labels, width, label=f"{axis_text(split)}: {labels.sum():.0f}", color=f"C{number}")
        if len(names) * len(counts) <= 24:
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
    if any(labels.max() > LOG_SCALE_RATIO * labels[labels > 0].min(initial=np.inf) for labels in counts.values()):
        axes.set_yscale("log")
        axes.set_ylim(0.7)
    axes.set(ylabel="labels", xlim=(-0.6, len(names) - 0.4))
    axes.grid(False, axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(counts), borderaxespad=0)
    if len(names) <= MAX_BAR_NAMES:
        axes.set_xticks(range(len(names)), [axis_text(name) for name in names], rotation=90, fontsize=8)
    else:
        axes.set_xlabel("class")


def _draw_density(axes: Axes, points: np.ndarray, title: str, xlabel: str, ylabel: str) -> None:
    """Draw a histogram of `points` (n, 2), whose coordinates are from 0 to 1."""
    counts, _, _ = np.histogram2d(points[:, 1], points[:, 0], DENSITY_BINS, [[0, 1], [0, 1]])
    roots = np.sqrt(np.where(counts, counts, np.nan))  # rare positions stay visible
    axes.imshow(roots, "viridis_r", origin="lower", extent=(0, 1, 0, 1), aspect="auto", vmin=0)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
