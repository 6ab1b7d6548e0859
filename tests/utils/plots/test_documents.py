"""Reading the text files of a run folder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.utils.plots.run_folder import write_table
from utils.plots.documents import Table, read_confusion, read_curves, read_labels


def test_numbers_of_a_table(tmp_path: Path) -> None:
    """YOLOv5 pads its columns with spaces."""
    table = write_table(tmp_path / "a.csv", "   epoch,    train/loss,x", "  0, 1.5,inf", "", "1,  ,nan")
    assert table.columns == ["epoch", "train/loss", "x"]
    assert table.numbers("train/loss") == pytest.approx([1.5, math.nan], nan_ok=True)
    assert table.numbers("x") == pytest.approx([math.inf, math.nan], nan_ok=True)
    assert table.numbers("epoch", "train/loss")[0].tolist() == [0, 1.5]


def test_texts_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfname,b\r\n"a, b\n", \xff \r\n')
    table = Table(tmp_path / "a.csv")
    assert (table.texts("name"), table.texts("b")) == (["a, b\n"], [" \udcff "])


def test_confusion_is_read(tmp_path: Path) -> None:
    table = write_table(
        tmp_path / "c.csv", "true \\ predicted,a,a,background", "a,1,0,2", "a,0,3,0", "background,4,5,0"
    )
    counts, names = read_confusion(table)
    assert counts.tolist() == [[1, 0, 2], [0, 3, 0], [4, 5, 0]]
    assert names == ["a", "a", "background"]


def test_curves_are_read(tmp_path: Path) -> None:
    """Two classes of one name are separated by the confidence, which starts again."""
    rows = ("a,0,.5,1", "a,1,1,0", "b,0,.25,", "b,1,nan,.5", "b,0,.125,.5", "b,1,1,.25")
    table = write_table(tmp_path / "c.csv", "class,confidence,precision,recall", *rows)
    recall, precision = read_curves(table, "confidence", ["recall", "precision"])
    assert recall.names == precision.names == ["a", "b", "b"]
    assert recall.x.tolist() == [0, 1]
    assert recall.values == pytest.approx(np.array([[1, 0], [math.nan, 0.5], [0.5, 0.25]]), nan_ok=True)
    assert precision.values == pytest.approx(np.array([[0.5, 1], [0.25, math.nan], [0.125, 1]]), nan_ok=True)


def test_labels_are_read(tmp_path: Path) -> None:
    rows = ("train,a,9,20", "train,b,1,2", "val,b,1,3")
    labels = read_labels(write_table(tmp_path / "l.csv", "split,class,images,instances", *rows))
    assert (labels.splits, labels.names) == (["train", "val"], ["a", "b"])
    assert labels.counts.tolist() == [[20, 2], [0, 3]]
