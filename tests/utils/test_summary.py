"""The printed table, evenly spaced indices, sparse counts, and the confusion matrix as text."""

from __future__ import annotations

import numpy as np
import pytest

from utils.summary import Summary, confusion_text, dense_counts, evenly_spaced, sparse_counts


def test_the_table_has_rows_and_lines() -> None:
    summary = Summary({}, 0.0, [("Class", "Images"), ("all", 12)], ["  a line", ("disc", 0.5)])
    assert summary.table() == ["Class Images", "  all     12", "  a line", " disc 0.5000"]
    assert summary.table(brief=True) == ["Class Images", "  all     12"]


def test_the_table_of_a_run_that_an_older_version_began() -> None:
    """Its state has lines of text."""
    assert Summary({}, 0.0, ["Class  Images", "  all      12"], ["disc 8"]).table() == [
        *("Class  Images", "  all      12", "disc 8")
    ]


@pytest.mark.parametrize(
    ("images", "count", "expected"),
    [
        (10, 5, [0, 2, 4, 6, 8]),
        (10, 4, [0, 2, 5, 7]),
        (7, 1, [0]),
        (3, 3, [0, 1, 2]),
        (3, 16, [0, 1, 2]),
        (0, 16, []),
        (5, 0, []),
    ],
)
def test_evenly_spaced(images: int, count: int, expected: list[int]) -> None:
    assert evenly_spaced(images, count) == expected


def test_spacings_differ_by_one_at_most() -> None:
    for images, count in ((128, 16), (5000, 16), (1000, 999), (2**40, 7)):
        indices = evenly_spaced(images, count)
        assert (len(indices), indices[0]) == (count, 0)
        steps = np.diff([*indices, images])
        assert 0 < min(steps) <= max(steps) <= min(steps) + 1


def test_sparse_counts_have_no_zeros() -> None:
    matrix = np.array([[0, 3, 0], [0, 0, 0], [1, 0, 70000]])
    counts = sparse_counts(matrix)
    assert counts == [[0, 1, 3], [2, 0, 1], [2, 2, 70000]]
    assert {type(value) for row in counts for value in row} == {int}
    assert np.array_equal(dense_counts(counts, 3), matrix)
    assert dense_counts(counts, 3).dtype == np.int64
    assert sparse_counts(np.zeros((2, 2), np.int64)) == []
    assert dense_counts([], 2).tolist() == [[0, 0], [0, 0]]


def test_confusion_text() -> None:
    text = confusion_text(np.array([[2, 0], [10, 1]]), ["a", 'b, "c"'])
    assert text == 'true \\ predicted,a,"b, ""c"""\na,2,0\n"b, ""c""",10,1\n'
