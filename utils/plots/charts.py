"""Charts of numbers, as matplotlib figures. matplotlib is imported when the first is drawn, and never its pyplot."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Columns = Mapping[str, np.ndarray]  # numbers by name, all of one length
DPI = 100  # pixels per inch
STYLE: Any = {
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
LONGEST = 40  # characters of a name; what is longer is cut in its middle
PALE, GREY = 0.35, "0.6"
MANY_RUNS = 10  # from here on their colours come from a scale

MOST_COLUMNS = 5  # panels side by side
PANEL = (3.2, 2.5)  # inches, with title and ticks
STEADIER, WIDEST = 40, 4.0  # the smoothing is as wide as this part of the epochs, and so many points at most
FLAT = 0.03  # an axis spans at least this share of the values: more of their digits would be noise

MOST_NAMES = 121  # classes that a confusion matrix names: 120 and background
MOST_CELLS = 1000  # cells of it that have their number written in, the largest ones: each takes 1 ms

MOST_CURVES = 20  # classes with colours and names of their own; of more the extremes are named
EXTREMES = 5  # the best so many, and the worst

MOST_BARS = 160  # classes that a histogram names
MOST_OUTLINES = 1000
BINS = 50
WIDE_RANGE = 50  # largest by smallest count of a split from which on their axis is logarithmic


@contextmanager
def style() -> Iterator[None]:
    """Within, matplotlib's own settings and ours, whatever the user's matplotlibrc says, and no warnings: a character
    that the font lacks is drawn as a box."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    with warnings.catch_warnings(), matplotlib.rc_context():
        warnings.simplefilter("ignore")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        yield


def drawn(make: Callable[..., Figure], *given: Any) -> np.ndarray:
    """The picture of the figure that `make` makes of what is `given`, uint8 (h, w, 3) BGR."""
    with style():
        canvas: Any = make(*given).canvas
        canvas.draw()
        return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., 2::-1])


def _figure(width: float, height: float, **more: Any) -> Figure:
    """An empty figure of that many inches that draws on memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=DPI, **more)
    FigureCanvasAgg(figure)
    return figure


def printable(text: str) -> str:
    """`text` with a ? for every character that has no shape: a lone surrogate kills OpenCV."""
    return "".join(character if character.isprintable() else "?" for character in text)


def plain(name: str) -> str:
    """A name as matplotlib shows it on one line: no formulas, not too long."""
    if len(name) > LONGEST:
        name = f"{name[: LONGEST // 2]}…{name[-(LONGEST // 2 - 1) :]}"
    return printable(name).replace("$", r"\$")


def colours(count: int) -> list[Any]:
    """Colours that can be told apart, as far as there are so many."""
    from matplotlib import colormaps

    if count <= MANY_RUNS:
        return [colormaps["tab10"](index) for index in range(count)]
    if count <= 20:
        return [colormaps["tab20"](index) for index in (*range(0, 20, 2), *range(1, 20, 2))][:count]
    return [colormaps["turbo"](share) for share in np.linspace(0.03, 0.97, count)]


def inches(figure: Figure, names: Sequence[str], size: float) -> float:
    """The width of the widest of `names` in letters of `size` points."""
    from matplotlib.font_manager import FontProperties

    canvas: Any = figure.canvas
    renderer, font = canvas.get_renderer(), FontProperties(size=size)
    return max((renderer.get_text_width_height_descent(name, font, False)[0] for name in names), default=0) / DPI


# What a run has written by epoch


def results_figure(runs: Mapping[str, Columns]) -> Figure:
    """A panel for every column of `runs` (their columns, by the run's name) but `epoch`, over the epochs.

    One run: its values, and smoothed. Several: smoothed, a colour for each.
    """
    names = list(dict.fromkeys(name for columns in runs.values() for name in columns if name != "epoch"))
    places = arrange(names)
    rows, wide = (1 + max((place[axis] for place in places.values()), default=0) for axis in (0, 1))
    width = wide * PANEL[0]
    labels = [plain(run) for run in runs] if len(runs) > 1 else []
    across = max(1, int(width / (0.075 * max(map(len, labels), default=0) + 0.6)))
    foot = 0.2 * math.ceil(len(labels) / across) + 0.15 * bool(labels)
    figure = _figure(width, rows * PANEL[1] + foot)
    height = figure.get_size_inches()[1]
    grid = figure.add_gridspec(
        rows,
        wide,
        left=0.65 / width,
        right=1 - 0.15 / width,
        top=1 - 0.4 / height,
        bottom=(0.45 + foot) / height,
        wspace=0.3,
        hspace=0.4,
    )
    for name, place in places.items():
        axes = figure.add_subplot(grid[place])
        _panel(axes, name, runs)
        if (place[0] + 1, place[1]) not in places.values():
            axes.set_xlabel("epoch")
    if labels:
        lines = [_line(colour) for colour in colours(len(runs))]
        figure.legend(lines, labels, loc="lower center", ncols=min(across, len(labels)))
    return figure


def arrange(names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Row and column of the panel of each of `names`: val terms below the train terms, metrics beside them in two rows,
    the rest beside these or, where that is too wide, below."""
    parts = {part: [name for name in names if name.startswith(part)] for part in ("train/", "val/", "metrics/")}
    train, val, metrics = parts.values()
    if not train or not val:
        return _flow(names, math.ceil(math.sqrt(len(names))))
    rest = [name for name in names if not name.startswith(tuple(parts))]
    left = max(len(train), len(val))
    wide = left + math.ceil(len(metrics) / 2)
    places = _flow(train, left) | _flow(val, left, row=1) | _flow(metrics, wide - left, column=left)
    if wide + math.ceil(len(rest) / 2) > MOST_COLUMNS:
        return places | _flow(rest, wide, row=2)
    return places | _flow(rest, math.ceil(len(rest) / 2), column=wide)


def _flow(names: Sequence[str], columns: int, row: int = 0, column: int = 0) -> dict[str, tuple[int, int]]:
    return {name: (row + index // columns, column + index % columns) for index, name in enumerate(names)}


def smooth(epochs: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """The means of `values` (n,) around each epoch, weighted by a Gaussian with a deviation of `width` epochs."""
    weights = np.exp(-0.5 * ((epochs[:, None] - epochs) / width) ** 2)
    return weights @ values / weights.sum(1)


def smoothing(epochs: Sequence[np.ndarray]) -> float:
    """The width of the smoothing, in epochs, that suits all of several runs: from one point to four, less in a run of
    ten or fewer, and one epoch where no run has two."""
    long = [some for some in epochs if len(some) > 1]
    step = max((np.ptp(some) / (len(some) - 1) for some in long), default=0.0)
    if not step:
        return 1.0
    span = min(map(np.ptp, long))
    return float(np.clip(span / STEADIER, min(step, span / 10), WIDEST * step))


def best(columns: Columns, name: str) -> tuple[float, float]:
    """The highest value of a column and its epoch, the first of equals; nan where there is no value."""
    epochs, values = _finite(columns, name)
    if not len(values):
        return math.nan, math.nan
    first = int(np.argmax(values))
    return float(values[first]), float(epochs[first])


def _finite(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column's epochs and values, less those that are not finite."""
    there = np.isfinite(columns[name]) & np.isfinite(columns["epoch"])
    return columns["epoch"][there], columns[name][there]


def _panel(axes: Axes, name: str, runs: Mapping[str, Columns]) -> None:
    """Draw the column `name` of every run that has it."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    there = [(_finite(columns, name), colour) for columns, colour in _coloured(runs) if name in columns]
    width = smoothing([epochs for (epochs, _), _ in there])
    for (epochs, values), colour in there:
        exact = name.startswith("x/")  # learning rates have no noise
        marker = "." if len(epochs) == 1 or (len(runs) == 1 and not (exact and len(epochs) > 60)) else ""
        size = 6 if len(epochs) < 60 else 3
        pale = PALE if len(epochs) > 1 and not exact else 1
        axes.plot(epochs, values, color=colour, alpha=pale, linewidth=1.2 if exact else 0.8, marker=marker, ms=size)
        if not exact:
            axes.plot(epochs, smooth(epochs, values, width), color=colour, linewidth=1.6)
    high = len(runs) == 1 and name.startswith("metrics/")
    axes.set_title(plain(name), fontweight="bold", pad=15 if high else 5)
    if high:
        value, epoch = best(next(iter(runs.values())), name)
        said = "no value" if math.isnan(value) else f"best {value:.4g} in epoch {epoch:g}"
        axes.text(0.5, 1.02, said, transform=axes.transAxes, ha="center", va="bottom", color="0.35", fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(value)))
    found = np.concatenate([np.zeros(0), *(values for (_, values), _ in there)])
    least = FLAT * np.abs(found).max(initial=0)
    if len(found) and np.ptp(found) < least:
        middle = (found.min() + found.max()) / 2
        axes.set_ylim(middle - least / 2, middle + least / 2)


def tick(value: float) -> str:
    """A number beside an axis, in at most 7 characters or so: 1.48e-4 for 0.000148."""
    if 0 < abs(value) < 0.001:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def _coloured(runs: Mapping[str, Columns]) -> Iterator[tuple[Columns, Any]]:
    return zip(runs.values(), colours(len(runs)), strict=True)


def _line(colour: Any, width: float = 1.6, **more: Any) -> Any:
    """A line for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, linewidth=width, **more)


# Confusion matrix


def confusion_figure(counts: np.ndarray, names: Sequence[str], by_share: bool) -> Figure:
    """The matrix `counts` (c, c) by true and predicted class, as shares of the true class or as the counts themselves.

    The numbers are written in, the largest ones where there are many.
    """
    from matplotlib.colors import SymLogNorm

    size = len(names)
    shares = shares_of(counts)
    named = size <= MOST_NAMES
    letters = 8 if size > 12 else 9
    side = max(0.24 * size, 3.6 + 0.15 * size) if named else 12.0  # inches of the matrix
    figure = _figure(1, 1)
    labels = [plain(name) for name in names] if named else []
    margin = inches(figure, labels or [str(size)], letters) + 0.5
    width, height = margin + side + 1.1, margin + side + 0.2
    figure.set_size_inches(width, height)
    axes = figure.add_axes((margin / width, margin / height, side / width, side / height))
    scale = figure.add_axes(((margin + side + 0.15) / width, margin / height, 0.2 / width, side / height))
    if by_share:
        shown = axes.imshow(shares, "Blues", vmin=0, vmax=1)
    else:
        shown = axes.imshow(counts, "Blues", norm=SymLogNorm(1, 0.3, vmin=0, vmax=max(int(counts.max(initial=0)), 1)))
    figure.colorbar(shown, cax=scale, label="share of the true class" if by_share else "count")
    axes.set(xlabel="predicted", ylabel="true")
    if named:
        axes.set_xticks(range(size), labels, rotation=90, fontsize=letters)
        axes.set_yticks(range(size), labels, fontsize=letters)
        _separate(axes, size)
        dark = np.asarray(shown.norm(shares if by_share else counts), float) > 0.55
        for true, predicted, text in cell_texts(counts, by_share, short=size > 12):
            colour = "white" if dark[true, predicted] else "black"
            font = 7 if size > 12 or len(text) > 4 else 9
            axes.text(predicted, true, text, ha="center", va="center", color=colour, fontsize=font)
    else:
        axes.grid(False)
    return figure


def _separate(axes: Axes, size: int) -> None:
    """Thin lines between the cells in place of the grid through their middles."""
    axes.grid(False)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(np.arange(size + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="0.85", linewidth=0.5, alpha=1)
    axes.tick_params(which="minor", length=0)


def cell_texts(counts: np.ndarray, by_share: bool, short: bool = False) -> list[tuple[int, int, str]]:
    """What is written into the cells of `counts` (c, c): row, column and number, the largest numbers first.

    Shares that round to nothing are left out. `short`: at most four characters.
    """
    shown = shares_of(counts) if by_share else counts
    cells = np.argwhere(shown >= 0.005)
    largest = cells[np.argsort(-shown[tuple(cells.T)], kind="stable")[:MOST_CELLS]].tolist()
    if not by_share:
        return [(row, column, _short(int(counts[row, column]), short)) for row, column in largest]
    written = [(row, column, f"{shown[row, column]:.2f}".removeprefix("0")) for row, column in largest]
    return [(row, column, "1" if text == "1.00" else text) for row, column, text in written]


def shares_of(counts: np.ndarray) -> np.ndarray:
    """Each row of counts (c, c) as shares of its sum; 0 where that is 0."""
    return counts / np.maximum(counts.sum(1, keepdims=True), 1)


def _short(count: int, short: bool) -> str:
    """A count in at most four characters where it should be `short`: 12k for 12345."""
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if short and count >= 10 ** (power + (power == 3)):
            return f"{count / 10**power:.0f}{letter}"
    return str(count)


# Curves of a detector's classes


class Curves(NamedTuple):
    """A curve for each class over the same places."""

    names: Sequence[str]  # c
    places: np.ndarray  # (p,): confidences or recalls
    values: np.ndarray  # (c, p)


def f1(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Their harmonic mean, 0 where both are 0."""
    return 2 * precision * recall / np.maximum(precision + recall, 1e-12)


def mean_curve(values: np.ndarray) -> np.ndarray:
    """The mean over the classes that have a value, (p,) of (c, p)."""
    there = np.isfinite(values)
    return np.where(there, values, 0).sum(0) / np.maximum(there.sum(0), 1)


def confidence_figure(title: str, curves: Curves, operating: int) -> Figure:
    """`curves` over the confidence. Classes come with their value at the place `operating`, which is marked."""
    mean = mean_curve(curves.values)
    top = int(np.argmax(mean))
    label = f"best {mean[top]:.3f} at {curves.places[top]:.3f}"
    heading = f"{title} at {curves.places[operating]:.3f} (best F1)"
    figure = _curves_figure(curves, curves.values[:, operating], mean, label, heading)
    axes = figure.axes[0]
    axes.axvline(curves.places[operating], color=GREY, linewidth=1, linestyle=":")
    axes.plot(curves.places[top], mean[top], "o", color="black", markersize=5)
    axes.set(xlabel="confidence", ylabel=title)
    return figure


def recall_figure(curves: Curves, areas: np.ndarray) -> Figure:
    """Precision over recall. `areas` (c,): each class's AP at an IoU of 0.5."""
    mean = float(np.mean(areas[np.isfinite(areas)])) if np.isfinite(areas).any() else 0.0
    figure = _curves_figure(curves, areas, mean_curve(curves.values), f"mAP50 {mean:.3f}", "AP50")
    figure.axes[0].set(xlabel="recall", ylabel="precision")
    return figure


def _curves_figure(curves: Curves, worth: np.ndarray, mean: np.ndarray, label: str, heading: str) -> Figure:
    """A thin line for each class, a thick one for their `mean`, and a legend: the classes with what each is `worth`."""
    figure = _figure(10, 6, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    alone = len(curves.names) == 1
    entries = [(_line("black", 3), f"{plain(curves.names[0]) if alone else 'all classes'}: {label}")]
    groups: list[tuple[str, Any, list[Any]]]
    order = np.argsort(-np.where(np.isfinite(worth), worth, 0), kind="stable")
    if len(curves.names) <= MOST_CURVES:
        groups = [(heading, range(len(curves.names)), colours(len(curves.names)))] * (not alone)
    else:
        from matplotlib import colormaps

        good, bad = ([colormaps[name](share) for share in np.linspace(0.9, 0.4, EXTREMES)] for name in ("GnBu", "OrRd"))
        others = [np.column_stack((curves.places, values)) for values in curves.values[order[EXTREMES:-EXTREMES]]]
        _add_lines(axes, others, GREY, 0.5, 0.5)
        groups = [(f"best {heading}", order[:EXTREMES], good), (f"worst {heading}", order[-EXTREMES:][::-1], bad)]
        entries.append((_line(GREY, 0.8), f"the other {len(others)} classes"))
    for title, members, shades in groups:
        entries.append((_line("none"), title))
        for member, shade in zip(members, shades, strict=True):
            axes.plot(curves.places, curves.values[member], color=shade, linewidth=1.1)
            entries.append((_line(shade), f"{plain(curves.names[member])} {worth[member]:.3f}"))
    axes.plot(curves.places, mean, color="black", linewidth=3)
    handles, texts = zip(*entries, strict=True)
    figure.legend(handles, texts, loc="outside right upper")
    return figure


def _add_lines(axes: Axes, lines: Sequence[np.ndarray], colour: Any, width: float, alpha: float) -> None:
    """Draw many lines (n, 2) at once."""
    from matplotlib.collections import LineCollection

    axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, alpha=alpha))


# What the labels are


class Labels(NamedTuple):
    """How often each class is in each split."""

    names: Sequence[str]  # c
    splits: Sequence[str]  # s
    counts: np.ndarray  # (s, c)


def labels_figure(labels: Labels, classes: np.ndarray, boxes: np.ndarray) -> Figure:
    """Classes by split; and where there are `boxes` (n, 4), normalised xywh, their outlines, centres and sizes.

    classes: (n,) the numbers of theirs.
    """
    many = len(labels.names)
    named = many <= MOST_BARS
    width = float(np.clip(0.14 * many, 12, 0.14 * MOST_BARS)) if named else 12.0
    figure = _figure(width, 1)
    names = [plain(name) for name in labels.names] if named else []
    letters = 8 if many < 100 else 7
    longest = inches(figure, names, letters)
    across = (longest + 0.1) * many < width - 1  # names fit side by side
    foot = 0.35 if across or not named else longest + 0.15
    below = 4.2 if len(boxes) else 0.0  # inches
    height = below + 3.0 + foot
    figure.set_size_inches(width, height)
    axes = figure.add_axes((0.8 / width, (below + foot) / height, 1 - 1 / width, 2.7 / height))
    _bars(axes, labels)
    if named:
        axes.set_xticks(range(many), names, rotation=0 if across else 90, fontsize=letters)
        axes.tick_params(axis="x", length=0)
    else:
        axes.set_xlabel("class", labelpad=0)
    if len(boxes):
        side, left = 3.3, 0.8
        gap = (width - 0.2 - left - 3 * side) / 2
        corners = [(left + number * (side + gap)) / width for number in range(3)]
        panels = [figure.add_axes((corner, 0.5 / height, side / width, side / height)) for corner in corners]
        _outlines(panels[0], classes, boxes, many)
        _density(panels[1], boxes[:, :2], "centres", "x", "y")
        _density(panels[2], boxes[:, 2:], "sizes", "width", "height")
        panels[1].invert_yaxis()  # as in an image
    return figure


def _bars(axes: Axes, labels: Labels) -> None:
    """A bar for each class and split, side by side."""
    many, splits = len(labels.names), len(labels.splits)
    thick = 0.8 / splits
    for number, (split, counts) in enumerate(zip(labels.splits, labels.counts, strict=True)):
        look: Any = {"label": f"{plain(split)}: {counts.sum():.0f}", "color": f"C{number}"}
        if many > MOST_BARS:
            axes.stairs(counts, np.arange(many + 1) - 0.5, fill=True, **look)
            continue
        bars = axes.bar(np.arange(many) + (number - (splits - 1) / 2) * thick, counts, thick, **look)
        if many * splits <= 24:
            axes.bar_label(bars, fmt="%.0f", fontsize=8)
    if any(counts.max() > WIDE_RANGE * counts[counts > 0].min(initial=np.inf) for counts in labels.counts):
        axes.set_yscale("log")
        axes.set_ylim(0.7)
    axes.set_ylabel("labels")
    axes.set_xlim(-0.6, many - 0.4)
    axes.margins(y=0.1)
    axes.grid(False, axis="x")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=splits, borderaxespad=0)


def _outlines(axes: Axes, classes: np.ndarray, boxes: np.ndarray, many: int) -> None:
    """Boxes around one centre, coloured by class."""
    some = np.linspace(0, len(boxes) - 1, min(len(boxes), MOST_OUTLINES)).astype(int)
    corners = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)]) / 2
    shades = np.array(colours(many))
    _add_lines(axes, 0.5 + corners * boxes[some, None, 2:], shades[classes[some]], 0.6, 0.25)
    axes.set(title=f"{len(some)} boxes around one centre", xlim=(0, 1), ylim=(0, 1), xlabel="width", ylabel="height")


def _density(axes: Axes, points: np.ndarray, title: str, across: str, up: str) -> None:
    """How many of `points` (n, 2), 0 to 1, lie where."""
    found, _, _ = np.histogram2d(points[:, 1], points[:, 0], BINS, [[0, 1], [0, 1]])
    shown = np.sqrt(np.where(found, found, np.nan))  # what is rare stays visible
    axes.imshow(shown, "viridis_r", origin="lower", extent=(0, 1, 0, 1), aspect="auto", vmin=0)
    axes.set(title=title, xlabel=across, ylabel=up)
