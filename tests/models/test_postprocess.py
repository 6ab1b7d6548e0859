"""Decoding and suppression, by hand."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from torch import Tensor

from models import postprocess
from models.postprocess import decode, suppress

THREE = math.log(3)  # the logit of 3/4; of 1/4 with a minus


def test_decode_one_cell() -> None:
    raw = torch.zeros(2, 2, 3, 4, 7)  # 3 rows, 4 columns
    raw[1, 1, 2, 3] = torch.tensor([THREE, -THREE, THREE, -THREE, -THREE, THREE, 0])
    anchors, strides = torch.tensor([[[1.0, 1], [2, 5]]]), torch.tensor([8.0])
    found = decode([raw], anchors, strides)
    assert found.shape == (2, 2 * 3 * 4, 7)
    # x (1.5 - 0.5 + 3) 8, y (0.5 - 0.5 + 2) 8, w 1.5^2 2 x 8, h 0.5^2 5 x 8
    expected = torch.tensor([32, 16, 36, 10, 0.25, 0.75, 0.5])
    torch.testing.assert_close(found[1, 1 * 12 + 2 * 4 + 3], expected)
    torch.testing.assert_close(found[0, 12 + 11], torch.tensor([28, 20, 16, 40, 0.5, 0.5, 0.5]))
    torch.testing.assert_close(found[0, 0], torch.tensor([4, 4, 8, 8, 0.5, 0.5, 0.5]))


def test_decode_levels_follow_each_other() -> None:
    outputs = [torch.zeros(1, 1, 2, 2, 6), torch.zeros(1, 1, 1, 1, 6)]
    found = decode(outputs, torch.tensor([[[1.0, 2]], [[3, 1]]]), torch.tensor([8.0, 16]))
    boxes = [[4, 4, 8, 16], [12, 4, 8, 16], [4, 12, 8, 16], [12, 12, 8, 16], [8, 8, 48, 16]]
    torch.testing.assert_close(found[0, :, :4], torch.tensor(boxes, dtype=torch.float))


def test_decode_is_in_fp32() -> None:
    raw = torch.randn(1, 1, 64, 64, 6).to(torch.bfloat16)
    args = torch.ones(1, 1, 2), torch.tensor([8.0])
    found = decode([raw], *args)
    assert found.dtype == torch.float32
    assert torch.equal(found, decode([raw.float()], *args))


def predictions(*rows: tuple[float, ...]) -> Tensor:
    """One image's predictions from rows x, y, w, h, objectness, class scores."""
    return torch.tensor(rows, dtype=torch.float)[None]


def run(given: Tensor, conf_thres: float = 0.1, iou_thres: float = 0.5, max_det: int = 300) -> Tensor:
    """The detections of the only image."""
    (found,) = suppress(given, conf_thres, iou_thres, max_det)
    return found


def test_a_box_counts_for_every_class() -> None:
    found = run(predictions((10, 20, 4, 6, 0.5, 0.5, 0.1, 0.75)))
    expected = [[8, 17, 12, 23, 0.375, 2], [8, 17, 12, 23, 0.25, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_classes_do_not_suppress_each_other() -> None:
    same, other = (50, 50, 20, 20, 1, 0.8, 0), (51, 50, 20, 20, 1, 0, 0.75)
    assert run(predictions(same, other))[:, 4:].tolist() == [[pytest.approx(0.8), 0], [0.75, 1]]
    assert len(run(predictions(same, (51, 50, 20, 20, 1, 0.75, 0)))) == 1
    # Nor do distant classes and large images, where an offset between them would have to be large.
    far = predictions((10, 10, 20, 20, 1, *[0.0] * 78, 0.5, 0), (4000, 4000, 20, 20, 1, *[0.0] * 79, 0.5))
    assert len(run(far)) == 2


def test_confidence_threshold() -> None:
    given = predictions((50, 50, 20, 20, 0.5, 0.5), (150, 50, 20, 20, 0.5, 0.75))
    assert run(given, conf_thres=0.24)[:, 4].tolist() == [0.375, 0.25]
    assert run(given, conf_thres=0.25)[:, 4].tolist() == [0.375]  # it must be exceeded
    assert len(run(given, conf_thres=0.375)) == 0


def test_overlap_threshold() -> None:
    given = predictions((10, 10, 4, 4, 1, 0.9), (12, 10, 4, 4, 1, 0.8))  # IoU 8 / 24
    assert run(given, iou_thres=0.3)[:, 4].tolist() == [pytest.approx(0.9)]
    assert len(run(given, iou_thres=0.35)) == 2


def test_the_most_confident_stays_and_what_is_dropped_suppresses_nothing() -> None:
    # In a row, each overlaps the next by half: the middle one falls to the first, and the third stays.
    given = predictions((14, 10, 4, 4, 1, 0.7), (10, 10, 4, 4, 1, 0.9), (12, 10, 4, 4, 1, 0.8))
    found = run(given, iou_thres=0.3)
    assert found[:, 4].tolist() == pytest.approx([0.9, 0.7])
    assert found[:, 0].tolist() == [8, 12]


def test_most_detections_per_image() -> None:
    scores = torch.linspace(0.2, 0.9, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    given = predictions(*((50 * k, 50, 20, 20, 1, score) for k, score in enumerate(scores.tolist())))
    found = run(given, max_det=7)
    torch.testing.assert_close(found[:, 4], scores.sort(descending=True).values[:7])


def test_most_candidates_are_the_most_confident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postprocess, "MOST_CANDIDATES", 2)
    given = predictions(*((50 * k, 50, 20, 20, 1, score) for k, score in enumerate((0.2, 0.9, 0.5))))
    assert run(given)[:, 4].tolist() == pytest.approx([0.9, 0.5])


def test_nothing_found() -> None:
    assert run(predictions((10, 10, 4, 4, 0.9, 0.05))).shape == (0, 6)
    assert run(torch.zeros(1, 0, 7)).shape == (0, 6)
    assert suppress(torch.zeros(0, 3, 7), 0.1, 0.5, 300) == []


def test_the_given_predictions_stay_as_they_were() -> None:
    given = predictions((10, 20, 4, 6, 0.5, 0.5, 0.1, 0.75))
    copy = given.clone()
    run(given)
    assert torch.equal(given, copy)


def test_no_image_is_dropped_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """YOLOv5 stops after 0.5 + 0.05 x batch seconds; here the clock runs a minute each time that somebody looks."""
    count = 300
    given = torch.zeros(count, 3, 6)
    given[:, :, 2:6] = torch.tensor([10, 10, 1, 0.5])
    given[:, :, :2] = torch.arange(count)[:, None, None]  # the three of an image on one spot
    ticks = itertools.count(step=60)
    with monkeypatch.context() as clock:
        for name in ("time", "perf_counter", "monotonic"):
            clock.setattr(time, name, lambda: float(next(ticks)))
        found = suppress(given, 0.1, 0.5, 300)
    assert [len(one) for one in found] == [1] * count
    assert torch.equal(torch.stack([one[0, 0] for one in found]), torch.arange(count) - 5.0)
