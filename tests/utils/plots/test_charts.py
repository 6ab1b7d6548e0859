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
    confusion_figure,
    f1,
    labels_figure,
    recall_figure,
    render,
    results_figure,
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


def points(line: Any) -> list[tuple[float, float]]:
    return list(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))


@pytest.mark.parametrize("names", [DETECTOR, CLASSIFIER])
@pytest.mark.parametrize("epochs", [1, 300])
def test_every_column_has_a_subplot(names: list[str], epochs: int) -> None:
    results = run(names, epochs)
    figure = results_figure(results)
    assert sorted(titles(figure)) == sorted(names)
    for name in names:
        values, *smoothed = subplot(figure, name).get_lines()
        assert points(values) == list(zip(range(epochs), results[name].tolist(), strict=True))
        assert len(smoothed) == (epochs > 1 and not name.startswith("x/"))  # learning rates are not smoothed


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
