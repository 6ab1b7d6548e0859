"""Charts as matplotlib figures: results by epoch, confusion matrix, curves of classes, labels.

Called by pictures.py. matplotlib is imported when the first chart is drawn; pyplot and torch are never imported.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np

from utils.plots.drawing import printable

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PIXELS_PER_INCH = 100
WHOLE_FIGURE = {"left": 0.0, "right": 1.0, "bottom": 0.0, "top": 1.0}  # for axes; labels extend beyond it, see `render`
CHARACTER_INCHES = 0.075  # mean width of a character in the small fonts
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
MIN_RELATIVE_SPAN = 0.03  # least span of an axis as a share of the largest value: a smaller one would show noise
MAX_SMOOTHING_POINTS = 4.0  # largest width of the smoothing, in points
MAX_CONFUSION_NAMES = 121  # 120 classes and background: a larger matrix is drawn without names
MAX_CELL_TEXTS = 1000  # numbers that are written, the largest ones: each takes 1 ms
MAX_NAMED_CURVES = 20  # classes; if there are more, only the best and the worst have colours and names
EXTREME_CLASSES = 5  # number of best classes, and of worst classes
MAX_BAR_NAMES = 160  # classes whose names are written below their bars
MAX_OUTLINES = 1000  # boxes drawn around one centre
DENSITY_BINS = 50  # bins along each side
LOG_SCALE_RATIO = 50  # ratio of a split's largest to smallest count above which the axis is logarithmic


@contextmanager
def chart_style() -> Iterator[None]:
    """Draw with matplotlib's defaults and our settings instead of the user's matplotlibrc.

    Warnings, such as about a character that the font lacks, are silenced.
    """
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(MATPLOTLIB_SETTINGS)
        yield


def render(make_figure: Callable[..., Figure], *arguments: Any) -> np.ndarray:
    """Return the picture of `make_figure(*arguments)`, uint8 (h, w, 3) BGR.

    The picture includes everything that extends beyond the figure, such as long names.
    """
    with chart_style():
        content = io.BytesIO()
        figure = make_figure(*arguments)
        figure.savefig(content, dpi=PIXELS_PER_INCH, bbox_inches="tight", pil_kwargs={"compress_level": 0})
        return np.asarray(cv2.imdecode(np.frombuffer(content.getbuffer(), np.uint8), cv2.IMREAD_COLOR))


def axis_text(name: str) -> str:
    """Return a name for matplotlib: printable, shortened, and not parsed as a formula."""
    if len(name) > MAX_NAME_CHARACTERS:
        name = f"{name[: MAX_NAME_CHARACTERS // 2]}…{name[-(MAX_NAME_CHARACTERS // 2 - 1) :]}"
    return printable(name).replace("$", r"\$")


def colours(count: int) -> list[Any]:
    """Return `count` colours, as distinct as possible."""
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](index) for index in range(count)]
    if count <= 20:
        return [colormaps["tab20"](index) for index in (*range(0, 20, 2), *range(1, 20, 2))][:count]
    return [colormaps["turbo"](share) for share in np.linspace(0.03, 0.97, count)]


# Results by epoch


def results_figure(results: Mapping[str, np.ndarray]) -> Figure:
    """Plot every column of results.csv but `epoch` over the epochs, in a subplot each: exact and smoothed values.

    Validation losses are below the training losses, metrics beside them in two rows, learning rates below all.
    """
    from matplotlib.figure import Figure

    groups = {group: [name for name in results if name.startswith(group)] for group in ("train/", "val/", "metrics/")}
    train, val, metrics = groups.values()
    others = [name for name in results if not name.startswith((*groups, "epoch"))]
    half = math.ceil(len(metrics) / 2)
    rows = [row for row in ([*train, *metrics[:half]], [*val, *metrics[half:]], others) if row]
    columns = max(map(len, rows), default=1)
    figure = Figure((columns * SUBPLOT_INCHES[0], len(rows) * SUBPLOT_INCHES[1]))
    grid = figure.add_gridspec(max(len(rows), 1), columns, wspace=0.3, hspace=0.45, **WHOLE_FIGURE)
    for number, row in enumerate(rows):
        for column, name in enumerate(row):
            axes = figure.add_subplot(grid[number, column])
            finite = np.isfinite(results[name])
            _draw_subplot(axes, name, results["epoch"][finite], results[name][finite])
            if number + 1 == len(rows) or column >= len(rows[number + 1]):
                axes.set_xlabel("epoch")
    return figure


def smooth(epochs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the means of `values` (n,) around each epoch, weighted by a Gaussian of one to four points' width."""
    span = max(np.ptp(epochs), 1.0)
    step = span / max(len(epochs) - 1, 1)
    width = np.clip(span / 40, min(step, span / 10), MAX_SMOOTHING_POINTS * step)
    weights = np.exp(-0.5 * ((epochs[:, None] - epochs) / width) ** 2)
    return weights @ values / weights.sum(1)


def _draw_subplot(axes: Axes, name: str, epochs: np.ndarray, values: np.ndarray) -> None:
    """Plot the finite values of a column."""
    is_exact = name.startswith("x/") or len(epochs) < 2  # learning rates are free of noise
    marker = "" if is_exact and len(epochs) > 60 else "."
    look: Any = {"linewidth": 1.2, "alpha": 1} if is_exact else {"linewidth": 0.8, "alpha": 0.35}
    axes.plot(epochs, values, color="C0", marker=marker, ms=6 if len(epochs) < 60 else 3, **look)
    if not is_exact:
        axes.plot(epochs, smooth(epochs, values), color="C0", linewidth=1.6)
    has_best = name.startswith("metrics/")
    axes.set_title(axis_text(name), fontweight="bold", pad=15 if has_best else 5)
    if has_best:
        best = int(np.argmax(values)) if len(values) else 0  # the first of equals
        text = f"best {values[best]:.4g} in epoch {epochs[best]:g}" if len(values) else "no value"
        axes.text(0.5, 1.02, text, transform=axes.transAxes, ha="center", va="bottom", color="0.35", fontsize=8)
    axes.locator_params("x", nbins=6, integer=True, min_n_ticks=1)
    axes.locator_params("y", nbins=6)
    least = MIN_RELATIVE_SPAN * np.abs(values).max(initial=0)
    if len(values) and np.ptp(values) < least:
        axes.set_ylim(values.mean() - least / 2, values.mean() + least / 2)


# Confusion matrix


def confusion_figure(counts: np.ndarray, names: Sequence[str], by_share: bool) -> Figure:
    """Draw the confusion matrix `counts` (c, c), true class by predicted class, with the numbers in its cells.

    If there are many cells, only the largest have numbers.

    Args:
        by_share: whether to draw shares of the true class instead of counts
    """
    from matplotlib.colors import Normalize, SymLogNorm
    from matplotlib.figure import Figure

    size = len(names)
    named = size <= MAX_CONFUSION_NAMES
    side = max(0.24 * size, 3.6 + 0.15 * size) if named else 12.0  # inches of the matrix
    figure = Figure((side, side))
    axes = figure.add_axes((0, 0, 1, 1))
    values = shares_of(counts) if by_share else counts
    largest = max(int(counts.max(initial=0)), 1)
    scale: Normalize = Normalize(0, 1) if by_share else SymLogNorm(1, 0.3, vmin=0, vmax=largest)
    edges = np.arange(size + 1) - 0.5
    borders = "0.85" if named else "none"
    mesh = axes.pcolormesh(edges, edges, values, cmap="Blues", norm=scale, edgecolors=borders, linewidth=0.5)
    bar = axes.inset_axes((1 + 0.15 / side, 0, 0.2 / side, 1))
    figure.colorbar(mesh, cax=bar, label="share of the true class (of a row)" if by_share else "count")
    axes.set_xlabel("predicted class", fontsize=11, fontweight="bold")
    axes.set_ylabel("true class", fontsize=11, fontweight="bold")
    axes.invert_yaxis()
    if named:
        labels = [axis_text(name) for name in names]
        font_size = 8 if size > 12 else 9
        axes.set_xticks(range(size), labels, rotation=90, fontsize=font_size)
        axes.set_yticks(range(size), labels, fontsize=font_size)
        dark = np.asarray(scale(values), float) > 0.55
        for true, predicted, text in cell_texts(counts, by_share, short=size > 12):
            colour = "white" if dark[true, predicted] else "black"
            font = 7 if size > 12 or len(text) > 4 else 9
            axes.text(predicted, true, text, ha="center", va="center", color=colour, fontsize=font, clip_on=True)
    return figure


def cell_texts(counts: np.ndarray, by_share: bool, short: bool = False) -> list[tuple[int, int, str]]:
    """Return row, column and text of the cells of `counts` (c, c), the largest numbers first.

    Args:
        by_share: whether to write shares of the row's sum; shares that round to 0 are omitted
        short: whether to write counts in at most four characters
    """
    from matplotlib.ticker import EngFormatter

    shorten = EngFormatter(places=0, sep="")  # 12k for 12345

    def text(value: float) -> str:
        if by_share:
            return "1" if value >= 0.995 else f"{value:.2f}".removeprefix("0")
        return shorten(value) if short and value >= 10_000 else f"{value:.0f}"

    values = shares_of(counts) if by_share else counts
    cells = np.argwhere(values >= 0.005)
    largest = cells[np.argsort(-values[tuple(cells.T)], kind="stable")[:MAX_CELL_TEXTS]].tolist()
    return [(row, column, text(values[row, column])) for row, column in largest]


def shares_of(counts: np.ndarray) -> np.ndarray:
    """Divide each row of counts (c, c) by its sum; a row of zeros stays zero."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


# Curves of classes


class Curves(NamedTuple):
    """A curve for each class over the same x."""

    names: Sequence[str]  # c
    x: np.ndarray  # (p,): confidences or recalls
    values: np.ndarray  # (c, p)


def f1(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Return the harmonic mean of precision and recall; 0 if both are 0."""
    return 2 * precision * recall / np.maximum(precision + recall, 1e-12)


def mean_curve(values: np.ndarray) -> np.ndarray:
    """Return the mean of curves (c, p) over the classes that have a value, (p,)."""
    finite = np.isfinite(values)
    return np.where(finite, values, 0).sum(0) / np.maximum(finite.sum(0), 1)


def confidence_figure(metric: str, curves: Curves, operating_point: int) -> Figure:
    """Plot the curves of a metric over the confidence.

    Args:
        operating_point: index of the confidence that is marked and whose values are in the legend
    """
    mean = mean_curve(curves.values)
    top = int(np.argmax(mean))
    label = f"best {mean[top]:.3f} at {curves.x[top]:.3f}"
    heading = f"{metric} at {curves.x[operating_point]:.3f} (best F1)"
    figure = _curves_figure(curves, curves.values[:, operating_point], mean, label, heading)
    axes = figure.axes[0]
    axes.axvline(curves.x[operating_point], color=GREY, linewidth=1, linestyle=":")
    axes.plot(curves.x[top], mean[top], "o", color="black", markersize=5)
    axes.set(xlabel="confidence", ylabel=metric)
    return figure


def recall_figure(curves: Curves, ap50: np.ndarray) -> Figure:
    """Plot precision over recall.

    Args:
        ap50: AP of each class at an IoU of 0.5, (c,), or nan
    """
    mean = float(np.mean(ap50[np.isfinite(ap50)])) if np.isfinite(ap50).any() else 0.0
    figure = _curves_figure(curves, ap50, mean_curve(curves.values), f"mAP50 {mean:.3f}", "AP50")
    figure.axes[0].set(xlabel="recall", ylabel="precision")
    return figure


def _curves_figure(curves: Curves, scores: np.ndarray, mean: np.ndarray, label: str, heading: str) -> Figure:
    """Plot a thin line for each class, a thick one for their mean, and a legend with the score (c,) of each class.

    Args:
        label: text of the mean in the legend
        heading: heading of the classes in the legend
    """
    from matplotlib import colormaps
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    figure, count = Figure((10, 6), layout="constrained"), len(curves.names)
    axes = figure.add_subplot(xlim=(0, 1), ylim=(0, 1.02))
    label = f"{axis_text(curves.names[0]) if count == 1 else 'all classes'}: {label}"
    entries: list[Artist] = [*axes.plot(curves.x, mean, color="black", linewidth=3, zorder=3, label=label)]
    groups: list[tuple[str, Any, list[Any]]] = [(heading, range(count), colours(count))] if count > 1 else []
    if count > MAX_NAMED_CURVES:
        best, middle, worst = np.split(
            np.argsort(-np.where(np.isfinite(scores), scores, 0), kind="stable"), [EXTREME_CLASSES, -EXTREME_CLASSES]
        )
        lines = [np.column_stack((curves.x, values)) for values in curves.values[middle]]
        label = f"the other {len(middle)} classes"
        entries.append(axes.add_collection(LineCollection(lines, linewidths=0.5, colors=GREY, alpha=0.5, label=label)))
        shades = np.linspace(0.9, 0.4, EXTREME_CLASSES)
        groups = [
            (f"best {heading}", best, [*colormaps["GnBu"](shades)]),
            (f"worst {heading}", worst[::-1], [*colormaps["OrRd"](shades)]),
        ]
    for title, members, member_colours in groups:
        entries += axes.plot([], [], " ", label=title)
        for member, colour in zip(members, member_colours, strict=True):
            label = f"{axis_text(curves.names[member])} {scores[member]:.3f}"
            entries += axes.plot(curves.x, curves.values[member], color=colour, linewidth=1.1, label=label)
    figure.legend(handles=entries, loc="outside right upper")
    return figure


# Labels


class Labels(NamedTuple):
    """The number of labels of each class in each split."""

    names: Sequence[str]  # c
    splits: Sequence[str]  # s
    counts: np.ndarray  # (s, c)


def labels_figure(
    labels: Labels, classes: np.ndarray, boxes: np.ndarray, outlines: Sequence[np.ndarray] = ()
) -> Figure:
    """Plot the number of labels of each class and split and, if there are boxes, their outlines, centres and sizes.

    Args:
        classes: class number of each box, (n,)
        boxes: (n, 4), normalised xywh
        outlines: outline of each box, (p, 2), x and y as fractions of width and height, drawn instead of the box; ()
            for upright boxes
    """
    from matplotlib.figure import Figure

    count = len(labels.names)
    names = [axis_text(name) for name in labels.names] if count <= MAX_BAR_NAMES else []
    width = max(12.0, 0.14 * len(names))
    name_inches = CHARACTER_INCHES * max(map(len, names), default=0)
    horizontal = (name_inches + 0.1) * len(names) < width - 1  # names fit side by side
    rows = (2.7, 3.3) if len(boxes) else (2.7,)  # inches
    gap = (len(rows) - 1) * (0.75 if horizontal else 0.45 + name_inches)
    figure = Figure((width, sum(rows) + gap))
    grid = figure.add_gridspec(len(rows), 3, height_ratios=rows, hspace=gap / np.mean(rows), **WHOLE_FIGURE)
    axes = figure.add_subplot(grid[0, :])
    _draw_bars(axes, labels)
    if names:
        axes.set_xticks(range(count), names, rotation=0 if horizontal else 90, fontsize=8 if count < 100 else 7)
        axes.tick_params(axis="x", length=0)
    else:
        axes.set_xlabel("class")
    if len(boxes):
        shapes, centres, sizes = (figure.add_subplot(grid[1, column], box_aspect=1) for column in range(3))
        _draw_outlines(shapes, classes, boxes, outlines, count)
        _draw_density(centres, boxes[:, :2], "centres", "x", "y")
        _draw_density(sizes, boxes[:, 2:], "sizes", "width", "height")
        centres.invert_yaxis()  # as in an image
    return figure


def _draw_bars(axes: Axes, labels: Labels) -> None:
    """Draw a bar for each class and split, side by side."""
    count, splits = len(labels.names), len(labels.splits)
    width = 0.8 / splits
    for number, (split, counts) in enumerate(zip(labels.splits, labels.counts, strict=True)):
        left = np.arange(count) + (number - (splits - 1) / 2) * width
        bars = axes.bar(left, counts, width, label=f"{axis_text(split)}: {counts.sum():.0f}", color=f"C{number}")
        if count * splits <= 24:
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
    if any(counts.max() > LOG_SCALE_RATIO * counts[counts > 0].min(initial=np.inf) for counts in labels.counts):
        axes.set_yscale("log")
        axes.set_ylim(0.7)
    axes.set_ylabel("labels")
    axes.set_xlim(-0.6, count - 0.4)
    axes.margins(y=0.1)
    axes.grid(False, axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=splits, borderaxespad=0)


def _draw_outlines(
    axes: Axes, classes: np.ndarray, boxes: np.ndarray, outlines: Sequence[np.ndarray], class_count: int
) -> None:
    """Draw boxes, or their outlines, around one centre, coloured by class."""
    from matplotlib.collections import LineCollection

    some = np.linspace(0, len(boxes) - 1, min(len(boxes), MAX_OUTLINES)).astype(int)
    corners = 0.5 + np.array([(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)]) / 2 * boxes[some, None, 2:]
    lines = [*corners]
    if outlines:
        closed = [np.concatenate((outlines[k], outlines[k][:1])) - boxes[k, :2] + 0.5 for k in some]
        lines = [line if len(line) else box for line, box in zip(closed, corners, strict=True)]
    class_colours = np.array(colours(class_count))
    axes.add_collection(LineCollection(lines, linewidths=0.6, colors=class_colours[classes[some]], alpha=0.25))
    title = f"{len(some)} {'outlines' if outlines else 'boxes'} around one centre"
    axes.set(title=title, xlim=(0, 1), ylim=(0, 1), xlabel="width", ylabel="height")


def _draw_density(axes: Axes, points: np.ndarray, title: str, xlabel: str, ylabel: str) -> None:
    """Draw a histogram of `points` (n, 2), whose coordinates are from 0 to 1."""
    counts, _, _ = np.histogram2d(points[:, 1], points[:, 0], DENSITY_BINS, [[0, 1], [0, 1]])
    shown = np.sqrt(np.where(counts, counts, np.nan))  # rare positions stay visible
    axes.imshow(shown, "viridis_r", origin="lower", extent=(0, 1, 0, 1), aspect="auto", vmin=0)
    axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
