"""Decoding of an anchor-free head's outputs, by hand, and the candidates of suppression."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.heads.dfl import DetectDFL, DFLLevel, DFLView, decode, distances
from models.tasks.contract import Thresholds
from models.tasks.detect import detect


def level(rows: int, columns: int, classes: int = 2) -> DFLLevel:
    """Return outputs without objects, whose distances are 7.5 strides."""
    return DFLLevel(torch.zeros(1, 64, rows, columns), torch.full((1, classes, rows, columns), -20.0))


def point(given: DFLLevel, row: int, column: int, reach: tuple[int, int, int, int], logit: float) -> DFLLevel:
    """Put an object of class 1 into a cell: whole distances to left, top, right and bottom, in strides."""
    sides = torch.full((4, 16), -50.0)
    sides[range(4), reach] = 50.0
    given.sides[0, :, row, column] = sides.flatten()
    given.scores[0, 1, row, column] = logit
    return given


EIGHT = torch.tensor([8.0])


def test_a_cell_by_hand() -> None:
    """Around the centre of row 1, column 2, (20, 12): 1 and 3 strides to the sides, 2 up and none down."""
    decoded = decode(DFLView([point(level(3, 4), 1, 2, (1, 2, 3, 0), 0.0)], EIGHT))
    assert decoded.shape == (1, 12, 6)
    torch.testing.assert_close(decoded[0, 4 + 2], torch.tensor([28.0, 4, 32, 16, 0, 0.5]))
    torch.testing.assert_close(decoded[0, 0, :4], torch.tensor([4.0, 4, 120, 120]))  # equal bins: 7.5 strides


def test_levels_follow_each_other_and_may_be_left_out() -> None:
    view = DFLView([level(2, 2), level(1, 1)], torch.tensor([8.0, 16]))
    centres = decode(view)[0, :, :2].tolist()
    assert centres == [[4, 4], [12, 4], [4, 12], [12, 12], [8, 8]]
    assert decode(view.without_level(0))[0, :, :2].tolist() == centres[4:]


@pytest.mark.parametrize(
    ("scale", "mirrored_width", "expected"),
    [
        ((1.0, 1.0), 0, [12, -4, 44, 12]),
        ((1.0, 1.0), 48, [4, -4, 36, 12]),
        ((0.5, 0.8), 0, [24, -5, 88, 15]),
        ((0.5, 0.8), 96, [8, -5, 72, 15]),
    ],
)
def test_scaled_and_mirrored_views(scale: tuple[float, float], mirrored_width: int, expected: list[float]) -> None:
    view = DFLView([point(level(3, 4), 1, 2, (1, 2, 3, 0), 0.0)], EIGHT).augmented(scale, mirrored_width)
    (detections,) = detect([view], Thresholds())
    torch.testing.assert_close(detections, torch.tensor([[*map(float, expected), 0.5, 1]]))


def random_view(batch: int, seed: int = 0) -> DFLView:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((6, 8), (3, 4))
    maps = [[torch.randn(batch, c, *size, generator=generator) * 2 for c in (64, 3)] for size in sizes]
    return DFLView([DFLLevel(*one) for one in maps], torch.tensor([8.0, 16]))


def test_candidates_are_the_boxes_above_the_threshold() -> None:
    view = random_view(2)
    for candidates, image in zip(view.candidates(0.7), decode(view), strict=True):
        expected = image[image[:, 4:].amax(1) > 0.7]
        assert 0 < len(expected) < len(image)
        torch.testing.assert_close(candidates.scores, DetectDFL.scored(expected), rtol=1e-5, atol=1e-4)
        assert candidates.more.shape == (len(expected), 0)


def test_the_detections_of_an_image_do_not_depend_on_the_others() -> None:
    view = random_view(3)

    def only(image: int) -> Tensor:
        outputs = [DFLLevel(*(one[image : image + 1] for one in level)) for level in view.outputs]
        return detect([view._replace(outputs=outputs)], Thresholds())[0]

    for image, detections in enumerate(detect([view], Thresholds())):
        assert len(detections) > 5
        assert torch.equal(detections, only(image))


def test_a_fresh_head_expects_few_small_objects() -> None:
    """Scores predict 5 objects per level in an image of 640 px, over all classes; boxes are 3 strides wide and high."""
    head = DetectDFL(4, (8, 16))
    head.placed([8, 16])
    for branches, cells in zip(head.heads, (80**2, 40**2), strict=True):
        bias = branches.get_parameter("class_conv.2.bias")
        torch.testing.assert_close(bias.exp() * 4 * cells, torch.full((4,), 5.0))
        assert (distances(branches.get_parameter("anchor_conv.2.bias")) - 1.54).abs().max() < 0.01
