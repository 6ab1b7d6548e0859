"""Targets matched to cells and anchors by hand, and the logits read there."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from models.heads.anchors import match, near_cells, read_level


class TargetMatches(NamedTuple):
    """The matches of one target, a row each."""

    cells: list[tuple[int, int]]  # row and column
    anchors: list[int]
    boxes: list[list[float]]
    images: list[int]


def match_target(
    centre: tuple[float, float], size: tuple[float, float] = (1, 1), threshold: float = 4.0
) -> TargetMatches:
    """Match a target in cells, of image 3, on a map 6 cells wide and 4 high with anchors 1 x 1 and 8 x 8."""
    grid = torch.tensor([6, 4])
    row = torch.cat((torch.tensor([3, 1]), torch.tensor(centre) / grid, torch.tensor(size) / grid))
    cells = near_cells(((4, 6),), row[None])
    matched = match(cells, torch.tensor([[[1.0, 1], [8, 8]]]), threshold)[0]
    assert matched.shape == (5, 2)
    image, rows, columns = (part.tolist() for part in cells.indices[0])
    assert all(0 <= row < 4 for row in rows)
    assert all(0 <= column < 6 for column in columns)  # cells that do not match are on the map too
    which, anchors = (part.tolist() for part in matched.nonzero(as_tuple=True))
    return TargetMatches(
        [(rows[k], columns[k]) for k in which],
        anchors,
        [cells.box[0, k].tolist() for k in which],
        [image[k] for k in which],
    )


@pytest.mark.parametrize(
    ("centre", "neighbours"),
    [
        ((2.5, 1.5), []),  # in the middle
        ((2.25, 1.5), [(1, 1)]),  # left
        ((2.75, 1.5), [(1, 3)]),  # right
        ((2.5, 1.25), [(0, 2)]),  # up
        ((2.5, 1.75), [(2, 2)]),  # down
        ((2.25, 1.75), [(1, 1), (2, 2)]),  # left and down, not the cell between them
        ((2.75, 1.25), [(0, 2), (1, 3)]),  # right and up
        ((0.25, 1.5), []),  # no neighbour left of the first column
        ((2.5, 0.25), []),
        ((5.75, 1.5), []),  # or right of the last
        ((2.5, 3.75), []),
        ((0.25, 0.25), []),
        ((5.75, 3.25), [(2, 5)]),
    ],
)
def test_cell_of_the_centre_and_near_neighbours(centre: tuple[float, float], neighbours: list[tuple[int, int]]) -> None:
    centre_cell = (int(centre[1]), int(centre[0]))
    cells, anchors, _, images = match_target(centre)
    assert sorted(cells) == sorted([centre_cell, *neighbours])
    assert set(images) == {3}
    assert set(anchors) == {0}  # the second anchor is 8 times as large


def test_box_is_relative_to_the_matched_cell() -> None:
    cells, _, boxes, _ = match_target((2.25, 1.75), (1, 1.5))
    assert dict(zip(cells, boxes, strict=True)) == {
        (1, 2): pytest.approx([0.25, 0.75, 1, 1.5]),
        (1, 1): pytest.approx([1.25, 0.75, 1, 1.5]),
        (2, 2): pytest.approx([0.25, -0.25, 1, 1.5]),
    }


def test_a_centre_on_the_far_edge_belongs_to_the_last_cell() -> None:
    cells, _, boxes, _ = match_target((6, 4), (1, 1))
    assert set(cells) == {(3, 5)}
    assert {tuple(box) for box in boxes} == {(1, 1, 1, 1)}


@pytest.mark.parametrize(
    ("size", "anchors"),
    [
        ((1, 1), [0]),
        ((3.75, 1), [0]),
        ((4, 1), []),  # a factor of exactly 4 is too much
        ((1, 4), []),
        ((0.28125, 1), [0]),  # also if the target is smaller
        ((0.25, 1), []),
        ((1, 0.25), []),
        ((3, 3), [0, 1]),  # 3 from the one, 8 / 3 from the other
        ((8, 2.5), [1]),
        ((0, 1), []),
    ],
)
def test_anchor_threshold(size: tuple[float, float], anchors: list[int]) -> None:
    assert match_target((2.5, 1.5), size).anchors == anchors


def test_anchor_threshold_is_a_setting() -> None:
    assert match_target((2.5, 1.5), (4, 1), threshold=4.5).anchors == [0]
    assert match_target((2.5, 1.5), (2, 1), threshold=2).anchors == []


def test_each_level_has_its_own_cells() -> None:
    targets = torch.tensor([[0, 0, 0.25, 0.75, 0.5, 0.5], [1, 2, 0.5, 0.5, 0.1, 0.1]])
    both = near_cells(((4, 8), (2, 2)), targets)
    for level, size in enumerate(((4, 8), (2, 2))):
        alone = near_cells((size,), targets)
        assert all(torch.equal(one[level], other[0]) for one, other in zip(both, alone, strict=True))
    assert both.indices.shape == (2, 3, 10)
    assert both.indices[0, 0].tolist() == [0, 1] * 5  # the targets, neighbour by neighbour


def test_no_targets_no_cells() -> None:
    cells = near_cells(((4, 8), (2, 2)), torch.zeros(0, 6))
    assert cells.indices.shape == (2, 3, 0)
    assert match(cells, torch.ones(2, 3, 2), 4.0).shape == (2, 0, 3)


def test_a_level_of_a_raw_map() -> None:
    raw = torch.arange(2 * 2 * 3 * 4 * 7).view(2, 2, 3, 4, 7)
    level = read_level(raw, torch.tensor([[1, 0], [2, 0], [3, 1]]))
    assert torch.equal(level.objectness, raw[..., 4])
    assert level.rows.shape == (2, 2, 7)
    assert torch.equal(level.rows[0], raw[1, :, 2, 3])
    assert torch.equal(level.rows[1], raw[0, :, 0, 1])
