"""Charts: the content of the figures, and their pictures."""

from __future__ import annotations

import io
import math
import warnings
from typing import Any

import numpy as np
import pytest

from utils.plots.charts import (
    Curves,
    axis_text,
    colours,
    confidence_figure,
    confusion_figure,
    f1,
    labels_figure,
    recall_figure,
    render,
    results_figure,
    smooth,
)

NAN, INF = math.nan, math.inf
TERMS = ("box_loss", "obj_loss", "cls_loss")
DETECTOR = [
    *(f"train/{term}" for term in TERMS),
    *("metrics/precision", "metrics/recall", "metrics/mAP_0.5", "metrics/mAP_0.5:0.95"),
    *(f"val/{term}" for term in TERMS),
    *("x/lr0", "x/lr1", "x/lr2"),
]
CLASSIFIER = ["train/loss", "metrics/accuracy_top1", "metrics/accuracy_top5", "val/loss", "x/lr0", "x/lr1", "x/lr2"]
ODD = ["$x_$", "$$", "a $", "\\$1", "猫", "line\nbreak", "lone \udcff", "", "{}", "long " * 30]


def run(names: list[str], epochs: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"epoch": np.arange(epochs, dtype=float), **{name: rng.random(epochs) for name in names}}


def titles(figure: Any) -> list[str]:
    return [axes.get_title().partition("\n")[0] for axes in figure.axes]


def subplot(figure: Any, name: str) -> Any:
    return figure.axes[titles(figure).index(name)]


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))


@pytest.mark.parametrize(("epochs", "width"), [(range(81), 2), (range(1000), 4), (range(11), 1), (range(5), 0.4)])
def test_smoothing(epochs: range, width: float) -> None:
    """Weights are a Gaussian's of a width that depends on the epochs."""
    x, values = np.array(epochs, float), np.random.default_rng(0).random(len(epochs))
    weights = np.exp(-0.5 * ((x - x[0]) / width) ** 2)
    assert smooth(x, values)[0] == pytest.approx(weights @ values / weights.sum())


@pytest.mark.parametrize("names", [DETECTOR, CLASSIFIER])
@pytest.mark.parametrize("epochs", [1, 300])
def test_every_column_has_a_subplot(names: list[str], epochs: int) -> None:
    """Validation losses are below the training losses."""
    results = run(names, epochs)
    figure = results_figure(results)
    assert sorted(titles(figure)) == sorted(names)
    for name in names:
        values, *smoothed = subplot(figure, name).get_lines()
        assert points(values) == list(zip(range(epochs), results[name].tolist(), strict=True))
        assert len(smoothed) == (epochs > 1 and not name.startswith("x/"))  # learning rates are not smoothed
    place = dict(zip(titles(figure), (axes.get_subplotspec() for axes in figure.axes), strict=True))
    positions = [(place[name].rowspan.start, place[name].colspan.start) for name in names]
    if names == DETECTOR:
        assert positions[:3] == [(0, 0), (0, 1), (0, 2)]  # training losses
        assert positions[3:7] == [(0, 3), (0, 4), (1, 3), (1, 4)]  # metrics
        assert positions[7:] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]  # validation losses, rates


def test_values_that_are_not_finite_are_omitted() -> None:
    values = {"train/loss": [1, INF, NAN, 3], "val/loss": [NAN] * 4, "metrics/top1": [NAN] * 4}
    values |= {"metrics/top5": [NAN, 0.5, -INF, 0.5], "epoch": [0, 1, 2, 3]}
    figure = results_figure({name: np.array(column, float) for name, column in values.items()})
    assert points(subplot(figure, "train/loss").get_lines()[0]) == [(0, 1), (3, 3)]
    assert points(subplot(figure, "val/loss").get_lines()[0]) == []
    best = {"metrics/top1", "metrics/top5\nbest 0.5 in epoch 1"}
    assert best <= {axes.get_title() for axes in figure.axes}
    figure.savefig(io.BytesIO())


def test_the_confusion_matrix_shows_shares() -> None:
    """The largest numbers first, without zeros and shares that round to 0."""
    counts = np.array([[8, 1, 1], [0, 12345, 5], [3, 1, 0]])  # the last is the background
    names = ["disc", "intermediate hinged traffic-sign", "background"]
    axes = confusion_figure(counts, names).axes[0]
    (mesh,) = axes.collections
    assert np.array_equal(mesh.get_array(), counts / [[10], [12350], [4]])
    assert axes.yaxis_inverted()  # the first class is on top
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        assert [label.get_text() for label in labels] == names
    written = [(*text.get_position()[::-1], text.get_text()) for text in axes.texts]
    assert written == [(1, 1, "1"), (0, 0, ".80"), (2, 0, ".75"), (2, 1, ".25"), (0, 1, ".10"), (0, 2, ".10")]


# Curves


def curves(classes: int, positions: int = 5) -> Curves:
    """Class k is a tent of height (k + 1) / classes, with its top in the middle."""
    tent = 1 - np.abs(np.linspace(-1, 1, positions))
    heights = (np.arange(classes) + 1) / classes
    return Curves([f"c{k}" for k in range(classes)], np.linspace(0, 1, positions), heights[:, None] * tent)


def test_f1_and_means_by_hand() -> None:
    """The mean is over classes that have a value."""
    values = f1(np.array([1, 0.5, 0, 0.25, NAN]), np.array([1, 0.25, 0, 0, 1]))
    assert values == pytest.approx([1, 1 / 3, 0, 0, NAN], nan_ok=True)
    mean = curves(2)._replace(values=np.array([[1, NAN, NAN], [0.5, 0.25, NAN]])).mean()
    assert mean == pytest.approx([0.75, 0.25, 0])


def test_curves_of_classes() -> None:
    """Many have no names; the mean AP is over the classes that have one."""
    figure = confidence_figure("recall", curves(3), 1)
    names = ["c0 0.167", "c1 0.333", "c2 0.500"]
    assert legend(figure) == ["all classes: best 0.667 at 0.500", "recall at 0.250 (best F1)", *names]
    lines = {width: [] for width in (3, 1.1)}  # type: ignore[var-annotated]
    for line in figure.axes[0].get_lines():
        lines.setdefault(line.get_linewidth(), []).append(line)
    assert lines[3][0].get_ydata() == pytest.approx([0, 1 / 3, 2 / 3, 1 / 3, 0])
    assert np.array([line.get_ydata() for line in lines[1.1]]) == pytest.approx(curves(3).values)
    assert len({line.get_color() for line in lines[1.1]}) == 3
    figure = confidence_figure("precision", curves(80), 2)
    assert legend(figure) == ["all classes: best 0.506 at 0.500", "80 classes"]
    assert len([line for line in figure.axes[0].get_lines() if line.get_linewidth() == 0.5]) == 80
    figure = recall_figure(curves(3), np.array([0.5, NAN, 0.25]))
    assert legend(figure) == ["all classes: mAP50 0.375", "AP50", "c0 0.500", "c1 nan", "c2 0.250"]
    assert legend(recall_figure(curves(2), np.full(2, NAN)))[0] == "all classes: mAP50 0.000"


# Labels

NO_BOXES = np.zeros(0, int), np.zeros((0, 4))


def test_bars_are_the_counts() -> None:
    counts = {"train": np.array([30.0, 4.0]), "val": np.array([10.0, 0.0])}
    (axes,) = labels_figure(["disc", "bar"], counts, *NO_BOXES).axes
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == [[30, 4], [10, 0]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["train: 34", "val: 10"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["disc", "bar"]
    train, val = (bars[0] for bars in axes.containers)
    assert train.get_x() + train.get_width() == pytest.approx(val.get_x())  # side by side
    for row, scale in (([500, 10, 0], "linear"), ([501, 10, 0], "log"), ([0, 0, 0], "linear")):
        figure = labels_figure(["a", "b", "c"], {"train": np.array(row, float)}, *NO_BOXES)
        assert figure.axes[0].get_yscale() == scale
        figure.savefig(io.BytesIO())


def test_boxes_and_densities() -> None:
    """Boxes have one centre; colours of densities depend on the root of the count."""
    boxes = np.array([[0.5, 0.25, 0.2, 0.4], [0.5, 0.25, 1.0, 0.5]])  # xywh
    _, outlines, centres, sizes = labels_figure(["a", "b"], {"train": np.ones(2)}, np.array([1, 0]), boxes).axes
    (lines,) = outlines.collections
    corners = np.array([line[:4] for line in lines.get_segments()])
    assert corners.min(1) == pytest.approx(np.array([[0.4, 0.3], [0, 0.25]]))
    assert corners.max(1) == pytest.approx(np.array([[0.6, 0.7], [1, 0.75]]))
    assert lines.get_colors()[:, :3] == pytest.approx(np.array(colours(2))[[1, 0], :3])
    values = np.asarray(centres.get_images()[0].get_array().filled(0))
    assert np.argwhere(values).tolist() == [[12, 25]]  # row, column of 50: y 0.25, x 0.5
    assert values[12, 25] == pytest.approx(2**0.5)
    assert centres.yaxis_inverted()  # y goes down, as in an image
    values = np.asarray(sizes.get_images()[0].get_array().filled(0))
    assert np.argwhere(values).tolist() == [[20, 10], [25, 49]]
    assert not sizes.yaxis_inverted()


# Names and settings


def test_unusual_names_cause_no_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    """They are printable, short and no formulas; the user's settings are neither used nor changed."""
    assert axis_text("$x$") == r"\$x\$"
    assert axis_text("x" * 40) == "x" * 40
    assert axis_text("a" * 30 + "b" * 30) == "a" * 20 + "…" + "b" * 19
    size, results = len(ODD), run(["train/$loss$", *ODD], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        render(confusion_figure, np.eye(size, dtype=int), ODD)
        render(recall_figure, curves(size)._replace(names=ODD), np.ones(size))
        render(labels_figure, ODD, dict.fromkeys(ODD, np.ones(size)), *NO_BOXES)
        expected = render(results_figure, results)
    assert capfd.readouterr() == ("", "")
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.facecolor": "red"}):
        assert np.array_equal(render(results_figure, results), expected)
        assert matplotlib.rcParams["font.size"] == 30
