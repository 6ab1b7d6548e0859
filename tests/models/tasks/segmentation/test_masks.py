"""Masks in pixels of the files: placement, contours, run lengths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.tasks.masks import DetectedMasks, JoinedMasks, MaskMaps, MaskPart, OutlineMasks, Rows
from utils.batch import Placement


@dataclass
class Maps(MaskMaps):
    """Given probabilities (k, h, w)."""

    values: Tensor

    @property
    def size(self) -> tuple[int, int]:
        return self.values.shape[1], self.values.shape[2]

    def probabilities(self, rows: Rows) -> Tensor:
        return self.values[rows]

    def inside(self, rows: Rows) -> Tensor:
        return self.values[rows] > 0.5


def smooth(count: int, height: int, width: int) -> Tensor:
    """Return random maps with large shapes."""
    coarse = torch.rand(1, count, 4, 4, generator=torch.Generator().manual_seed(0))
    return functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)[0]


def whole(size: tuple[int, int], part: MaskPart) -> np.ndarray:
    """Return the mask of a whole file. size: width and height."""
    mask = np.zeros(size[::-1], bool)
    rows, columns = part.pixels.shape
    mask[part.top : part.top + rows, part.left : part.left + columns] = part.pixels
    return mask


def cut(values: Tensor, boxes: Tensor) -> Tensor:
    """Set the numbers outside of boxes to 0, pixel by pixel."""
    left, top, right, bottom = (boxes[:, k, None, None] for k in range(4))
    rows, columns = torch.arange(values.shape[1])[:, None], torch.arange(values.shape[2])
    return values * ((columns >= left) & (columns < right) & (rows >= top) & (rows < bottom))


BOXES = torch.tensor([[3.2, 5.1, 40.7, 52.3], [-4.0, 10.0, 70.0, 44.0], [20.0, 20, 20, 20], [8, 30, 24, 61]])  # network


@pytest.mark.parametrize("retina", [False, True])
def test_masks_of_a_file_of_the_networks_size(retina: bool) -> None:
    """By torch's bilinear interpolation: cut on the map before it, or in the file after it."""
    values, size = smooth(4, 16, 16), (64, 64)
    source = DetectedMasks(Maps(values), BOXES, BOXES.clamp(0, 64).numpy(), size, Placement(), retina)
    given = values if retina else cut(values, BOXES / 4)
    scaled = functional.interpolate(given[None], (64, 64), mode="bilinear", align_corners=False)[0]
    expected = (cut(scaled, BOXES) if retina else scaled) > 0.5
    masks = [whole(size, part) for part in source.parts(range(4))]
    assert np.array_equal(np.stack(masks), expected.numpy())
    assert expected.flatten(1).any(1).tolist() == [True, True, False, True]


@pytest.mark.parametrize("retina", [False, True])
def test_masks_of_a_letterboxed_file(retina: bool) -> None:
    """A file of 128 x 64 in the middle of 64 x 64: the padding is cut off, and every pixel appears twice."""
    values, size = smooth(1, 16, 16), (128, 64)
    boxes = torch.tensor([[0.0, 16, 64, 48]])
    placement = Placement((0.5, 0.5), (0, 16))
    source = DetectedMasks(Maps(values), boxes, np.array([[0.0, 0, 128, 64]]), size, placement, retina)
    image = values[None, :, 4:12]
    if retina:
        expected = functional.interpolate(image, (64, 128), mode="bilinear", align_corners=False)[0] > 0.5
    else:
        network = functional.interpolate(cut(values, boxes / 4)[None], (64, 64), mode="bilinear")[:, :, 16:48]
        expected = functional.interpolate((network > 0.5).float(), (64, 128), mode="nearest")[0] > 0.5
    (part,) = source.parts([0])
    assert np.array_equal(whole(size, part), expected[0].numpy())


def test_the_largest_contour() -> None:
    pixels = np.zeros((6, 9), bool)
    pixels[1:4, 1:5] = pixels[5, 7] = True
    contour = MaskPart(10, 20, pixels).contour()
    assert {tuple(point) for point in contour.tolist()} == {(11, 21), (11, 23), (14, 23), (14, 21)}
    assert MaskPart(0, 0, np.zeros((3, 0), bool)).contour().shape == (0, 2)
    assert MaskPart(0, 0, np.zeros((3, 3), bool)).contour().shape == (0, 2)


def test_a_filled_outline_is_the_mask() -> None:
    """Outlines are the centres of pixels, so that rounding of their numbers in a file does not move them."""
    size, at = (333, 217), torch.linspace(-1, 1, 16)
    disc = (1.2 - at[:, None] ** 2 - at**2)[None]
    boxes, scale = torch.tensor([[0.0, 0, 64, 64]]), (64 / 333, 64 / 217)
    source = DetectedMasks(Maps(disc), boxes, np.array([[0.0, 0, 333, 217]]), size, Placement(scale), True)
    (part,), (outline,) = source.parts([0]), source.outlines([0])
    written = np.array([float(f"{value:.6g}") for value in outline.ravel()], np.float32).reshape(-1, 2)
    (filled,) = OutlineMasks([written], size).parts([0])
    assert part.pixels.sum() > 10_000
    assert np.array_equal(whole(size, filled), whole(size, part))


@pytest.mark.parametrize("outline", [np.zeros((0, 2)), np.array([[2.0, 2.0], [3, 3], [2, 3]]), np.array([[0.5, 0.5]])])
def test_outlines_without_area_or_outside_of_the_file(outline: np.ndarray) -> None:
    (part,) = OutlineMasks([outline.astype(np.float32)], (20, 10)).parts([0])
    assert part.pixels.sum() == (1 if len(outline) == 1 else 0)


def test_run_lengths() -> None:
    """Decoded by faster-coco-eval."""
    from faster_coco_eval import mask as coco

    size = (33, 20)
    parts = [
        MaskPart(4, 3, smooth(1, 12, 20)[0].numpy() > 0.5),
        MaskPart(0, 0, np.ones((20, 33), bool)),
        MaskPart(0, 0, np.zeros((0, 0), bool)),
        MaskPart(32, 19, np.ones((1, 1), bool)),
        MaskPart(0, 0, np.ones((1, 1), bool)),
    ]
    for part in parts:
        coded = part.run_lengths(size)
        assert coded["size"] == [20, 33]
        assert isinstance(coded["counts"], str)
        assert np.array_equal(coco.decode(coded).astype(bool), whole(size, part))


def test_joined_masks() -> None:
    outlines = [
        np.array([[k / 10, 0], [k / 10 + 0.1, 0], [k / 10 + 0.1, 1], [k / 10, 1]], np.float32) for k in range(4)
    ]
    first, second = OutlineMasks(outlines[:2], (20, 10)), OutlineMasks(outlines[2:], (20, 10))
    joined = JoinedMasks([(first, 1), (second, 0), (second, 1), (first, 0)], (20, 10))
    assert [part.left for part in joined.parts(range(4))] == [2, 4, 6, 0]
    assert [part.left for part in joined.parts([3, 0])] == [0, 2]
    assert [one.tolist() for one in joined.outlines([2])] == [outlines[3].tolist()]
