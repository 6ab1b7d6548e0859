"""Thresholds and non-maximum suppression, by hand and against a plain implementation."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.heads.anchors import RawView, cell_geometry, decode, decode_xywh
from models.heads.contract import Candidates, DecodedView, least_logit, row_sigmoids, xywh_to_xyxy
from models.tasks import detect as suppression
from models.tasks.contract import Thresholds
from models.tasks.detect import SuppressedView, detect, detect_with_more, filter_detections, suppress, suppress_together
from utils.files import ROOT

THREE = math.log(3)  # the logit of 3/4; of 1/4 with a minus


def exact_boxes(outputs: list[Tensor], anchors: Tensor, strides: Tensor) -> Tensor:
    """Return all boxes (b, n, 5 + classes): xyxy in pixels, objectness, class scores, bit-identical to `detect`'s."""
    cells = torch.cat([cell_geometry(*level) for level in zip(outputs, anchors, strides, strict=True)])
    images = [row_sigmoids([raw[image].flatten(0, 2) for raw in outputs]) for image in range(len(outputs[0]))]
    return torch.stack([torch.cat((xywh_to_xyxy(decode_xywh(scores, cells)), scores[:, 4:]), 1) for scores in images])


def test_detections_are_in_fp32() -> None:
    raw = torch.randn(1, 1, 64, 64, 6).to(torch.bfloat16)
    args = torch.ones(1, 1, 2), torch.tensor([8.0])
    (detections,) = detect([RawView([raw], *args)], Thresholds())
    assert detections.dtype == torch.float32
    assert torch.equal(detections, detect([RawView([raw.float()], *args)], Thresholds())[0])


def view(raw: Tensor) -> RawView:
    """Return a view of one level, with one anchor of 1 x 1 cells and stride 1."""
    return RawView([raw], torch.ones(1, 1, 2), torch.ones(1))


def predictions(*rows: tuple[float, ...]) -> Tensor:
    """Return an image's predictions from rows x, y, w, h, objectness, class scores."""
    return torch.tensor(rows, dtype=torch.float)


def run(given: Tensor, conf_thres: float = 0.1, iou_thres: float = 0.5, max_det: int = 300, **more: Any) -> Tensor:
    """Return the detections of an image from its `predictions`."""
    return suppress(given, Thresholds(conf_thres, iou_thres, max_det, **more))[0]


def test_a_box_counts_for_its_most_probable_class_only() -> None:
    given = predictions((10, 20, 4, 6, 0.5, 0.5, 0.1, 0.75))
    assert run(given, one_class=True)[:, 4:].tolist() == [[0.375, 2]]
    assert run(given, classes=(0, 1))[:, 4:].tolist() == [[0.25, 0]]
    assert not len(run(given, classes=(0, 1), one_class=True))  # the most probable one is not among them


def test_classes_suppress_each_other_if_agnostic() -> None:
    given = predictions((50, 50, 20, 20, 1, 0.8, 0), (51, 50, 20, 20, 1, 0, 0.75))
    assert len(run(given)) == 2
    assert run(given, agnostic_nms=True)[:, 5].tolist() == [0]


def test_a_box_counts_for_every_class() -> None:
    detections = run(predictions((10, 20, 4, 6, 0.5, 0.5, 0.1, 0.75)))
    expected = [[8, 17, 12, 23, 0.375, 2], [8, 17, 12, 23, 0.25, 0]]
    torch.testing.assert_close(detections, torch.tensor(expected))


def test_classes_do_not_suppress_each_other() -> None:
    same, other = (50, 50, 20, 20, 1, 0.8, 0), (51, 50, 20, 20, 1, 0, 0.75)
    assert run(predictions(same, other))[:, 4:].tolist() == [[pytest.approx(0.8), 0], [0.75, 1]]
    assert len(run(predictions(same, (51, 50, 20, 20, 1, 0.75, 0)))) == 1
    # Also not for distant classes and large images, which need a large offset.
    far = predictions((10, 10, 20, 20, 1, *[0.0] * 78, 0.5, 0), (4000, 4000, 20, 20, 1, *[0.0] * 79, 0.5))
    assert len(run(far)) == 2


def test_confidence_threshold() -> None:
    given = predictions((50, 50, 20, 20, 0.5, 0.5), (150, 50, 20, 20, 0.5, 0.75))
    assert run(given, conf_thres=0.24)[:, 4].tolist() == [0.375, 0.25]
    assert run(given, conf_thres=0.25)[:, 4].tolist() == [0.375]  # exclusive
    assert len(run(given, conf_thres=0.375)) == 0


def test_overlap_threshold() -> None:
    given = predictions((10, 10, 4, 4, 1, 0.9), (12, 10, 4, 4, 1, 0.8))  # IoU 8 / 24
    assert run(given, iou_thres=0.3)[:, 4].tolist() == [pytest.approx(0.9)]
    assert len(run(given, iou_thres=0.35)) == 2


def test_the_most_confident_stays_and_a_suppressed_box_suppresses_nothing() -> None:
    # In a row, each overlaps the next by half: the middle one falls to the first, and the third stays.
    given = predictions((14, 10, 4, 4, 1, 0.7), (10, 10, 4, 4, 1, 0.9), (12, 10, 4, 4, 1, 0.8))
    detections = run(given, iou_thres=0.3)
    assert detections[:, 4].tolist() == pytest.approx([0.9, 0.7])
    assert detections[:, 0].tolist() == [8, 12]


def test_most_detections_per_image() -> None:
    scores = torch.linspace(0.2, 0.9, 20)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    given = predictions(*((50 * k, 50, 20, 20, 1, score) for k, score in enumerate(scores.tolist())))
    detections = run(given, max_det=7)
    torch.testing.assert_close(detections[:, 4], scores.sort(descending=True).values[:7])


def test_most_candidates_are_the_most_confident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suppression, "MAX_CANDIDATES", 2)
    given = predictions(*((50 * k, 50, 20, 20, 1, score) for k, score in enumerate((0.2, 0.9, 0.5))))
    assert run(given)[:, 4].tolist() == pytest.approx([0.9, 0.5])


def test_no_detections() -> None:
    assert run(predictions((10, 10, 4, 4, 0.9, 0.05))).shape == (0, 6)
    assert run(torch.zeros(0, 7)).shape == (0, 6)
    assert detect([view(torch.zeros(0, 1, 2, 2, 7))], Thresholds()) == []


def test_the_raw_maps_are_not_written_to() -> None:
    given = torch.randn(2, 1, 4, 4, 7)
    copy = given.clone()
    detect([view(given)], Thresholds())
    assert torch.equal(given, copy)


def test_detections_have_no_gradient() -> None:
    given = torch.randn(2, 1, 4, 4, 7, requires_grad=True)
    assert not detect([view(given * 1)], Thresholds())[0].requires_grad


def test_no_image_is_dropped_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """YOLOv5 stops after 0.5 + 0.05 x batch seconds; this clock advances a minute with each reading."""
    count = 30
    given = torch.zeros(count, 1, 1, 1, 6)
    ticks = itertools.count(step=60)
    with monkeypatch.context() as clock:
        for name in ("time", "perf_counter", "monotonic"):
            clock.setattr(time, name, lambda: float(next(ticks)))
        detections = detect([view(given)], Thresholds())
    assert torch.equal(torch.cat(detections), torch.tensor([[0, 0, 1, 1, 0.25, 0]]).expand(count, 6))


# Against a plain implementation


def plain_detections(
    outputs: list[Tensor], anchors: Tensor, strides: Tensor, thresholds: Thresholds, most: int
) -> list[Tensor]:
    """Compute `detect` from every box of every class and every pair of them."""
    images = []
    for image in exact_boxes(outputs, anchors, strides):
        confidence = (image[:, 5:] * image[:, 4:5]).numpy()
        candidates = [(-confidence[k, c], k, c) for k, c in np.argwhere(confidence > np.float32(thresholds.conf_thres))]
        remaining: list[tuple] = []
        for negative, k, c in sorted(candidates)[:most]:
            box = image[k, :4].numpy()
            if all(c != other[5] or iou(box, other[:4]) <= thresholds.iou_thres for other in remaining):
                remaining.append((*box, -negative, c))
        images.append(torch.tensor(np.array(remaining[: thresholds.max_det], np.float32)).view(-1, 6))
    return images


def iou(a: np.ndarray, b: tuple) -> float:
    x, y = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    inside = max(x, 0) * max(y, 0)
    return inside / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - inside)


def random_maps(seed: int, classes: int, few: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return maps of three images on two levels, the second empty. few: distinct logits, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    outputs = [torch.randn(3, 2, side, side, 5 + classes, generator=generator) * 2 for side in (6, 3)]
    for raw in outputs:
        raw[..., :4] /= 4
        if few:
            raw[..., 4:] = raw[..., 4:].round()
        raw[1, ..., 4] = -200
        raw[2, ..., 4] -= 1
    return outputs, torch.tensor([[[2.0, 3], [4, 2]], [[3.0, 3], [2, 4]]]), torch.tensor([8.0, 16])


@pytest.mark.parametrize("conf_thres", [0.001, 0.25, 0.5, 1.0, 0.0])  # the logits 0 have sigmoids of 1/2
@pytest.mark.parametrize(("classes", "few", "max_det"), [(1, False, 300), (5, True, 300), (5, True, 7), (3, False, 20)])
def test_as_the_plain_implementation(
    classes: int, few: bool, max_det: int, conf_thres: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, most in enumerate((30_000, 150)):
        monkeypatch.setattr(suppression, "MAX_CANDIDATES", most)
        given, thresholds = random_maps(seed, classes, few), Thresholds(conf_thres, 0.45, max_det)
        detections = detect([RawView(*given)], thresholds)
        for image, expected in zip(detections, plain_detections(*given, thresholds, most), strict=True):
            assert torch.equal(image, expected)
        assert not len(detections[1])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_detections_of_an_image_do_not_depend_on_the_others(threads: int) -> None:
    """To the last bit, with any number of CPU threads."""
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(3, 2, side, side, 85, generator=generator) for side in (20, 11)]
    more = torch.ones(2, 2, 2) * 2, torch.tensor([8.0, 16])
    try:
        torch.set_num_threads(threads)
        together = detect([RawView(outputs, *more)], Thresholds())
        apart = [detect([RawView([raw[k : k + 1] for raw in outputs], *more)], Thresholds())[0] for k in range(3)]
        backwards = detect([RawView([raw.flip(0) for raw in outputs], *more)], Thresholds())[::-1]
    finally:
        torch.set_num_threads(before)
    for detections in (apart, backwards):
        assert all(torch.equal(*pair) for pair in zip(together, detections, strict=True))


def test_a_score_of_nan_hides_no_other_box() -> None:
    given = predictions((50, 50, 20, 20, 1, 0.5, math.nan), (150, 50, 20, 20, math.nan, 0.5, 0.5))
    assert run(given)[:, 4].tolist() == [0.5]
    assert run(given, max_det=1)[:, 4].tolist() == [0.5]


@pytest.mark.parametrize("probability", [0.0, 1e-30, 0.001, 0.5, 0.999999, 1 - 1e-7, 1.0])
def test_least_logit(probability: float) -> None:
    logits = torch.cat((torch.linspace(-110, 20, 200_001), torch.linspace(-17, 17, 200_001)))
    exceed = logits.sigmoid() > probability
    taken = logits > least_logit(probability)
    assert (taken | ~exceed).all()
    if 0 < probability < 0.99:  # near 1 a sigmoid hardly rises
        assert (taken & ~exceed).sum() < 20


# Several views


def one_box(columns: int, column: int, confidence: float, x: float = 0.0) -> Tensor:
    """Return a map of 4 rows of stride 8 with one box, in the second row; x: logit of its horizontal position."""
    raw = torch.full((1, 1, 4, columns, 6), -20.0)
    raw[0, 0, 1, column] = torch.tensor([x, 0, 0, 0, math.log(confidence / (1 - confidence)), 20])
    return raw


ANCHOR, EIGHT = torch.tensor([[[1.0, 2.0]]]), torch.tensor([8.0])


def test_a_mirrored_view() -> None:
    """48 pixels wide: the centre is 8 (0.75 x 2 - 0.5 + 2) = 24 pixels from the right edge."""
    (detections,) = detect([RawView([one_box(6, 2, 0.5, THREE)], ANCHOR, EIGHT, mirrored_width=48)], Thresholds())
    torch.testing.assert_close(detections, torch.tensor([[20.0, 4, 28, 20, 0.5, 0]]))


def test_a_scaled_view() -> None:
    """Boxes are scaled back, each side by its own factor; images 60 wide are 30 wide for the model, in 32 columns."""
    raw = one_box(4, 2, 0.5, THREE)  # around 24, 12; 8 wide and 16 high
    (detections,) = detect([RawView([raw], ANCHOR, EIGHT, (0.5, 0.8))], Thresholds())
    torch.testing.assert_close(detections, torch.tensor([[40.0, 5, 56, 25, 0.5, 0]]))
    (detections,) = detect([RawView([raw], ANCHOR, EIGHT, (0.5, 0.8), mirrored_width=60)], Thresholds())
    torch.testing.assert_close(detections, torch.tensor([[4.0, 5, 20, 25, 0.5, 0]]))


def test_views_are_joined_before_the_suppression() -> None:
    """The views of two models differ in size, anchors and levels. Of equal boxes the more confident remains."""
    one = RawView([one_box(6, 2, 0.5)], ANCHOR, EIGHT)
    nothing = torch.full((1, 3, 2, 3, 6), -20.0)
    same = torch.full((1, 3, 4, 6, 6), -20.0)
    same[0, 1, 1, 2] = torch.tensor([0, 0, 0, 0, THREE, 20.0])
    same[0, 1, 3, 5] = torch.tensor([0, 0, 0, 0, -THREE, 20.0])
    anchors = torch.tensor([[[9.0, 9.0], [1.0, 2.0], [9.0, 9.0]]]).repeat(2, 1, 1)
    two = RawView([same, nothing], anchors, torch.tensor([8.0, 16.0]))
    expected = torch.tensor([[16.0, 4, 24, 20, 0.75, 0], [40, 20, 48, 36, 0.25, 0]])
    for views in ([one, two], [two, one]):
        torch.testing.assert_close(detect(views, Thresholds())[0], expected)
    detections = detect([one, two], Thresholds(iou_thres=1.0))[0]
    assert detections[:, 4].tolist() == pytest.approx([0.75, 0.5, 0.25])


def test_a_skipped_level() -> None:
    maps, anchors, strides = [one_box(6, 2, 0.5), one_box(6, 4, 0.75)], ANCHOR.repeat(2, 1, 1), EIGHT.repeat(2)
    confidences = {
        level: detect([RawView(maps, anchors, strides, skipped_level=level)], Thresholds())[0][:, 4].tolist()
        for level in (None, 0, 1)
    }
    assert confidences == {None: pytest.approx([0.75, 0.5]), 0: pytest.approx([0.75]), 1: pytest.approx([0.5])}


def random_view(seed: int) -> RawView:
    """Return two levels of two anchors, of two images of 32x32."""
    generator = torch.Generator().manual_seed(seed)
    maps = [torch.randn(2, 2, side, side, 8, generator=generator) * 2 for side in (4, 2)]
    return RawView(maps, torch.rand(2, 2, 2, generator=generator) * 3 + 1, torch.tensor([8.0, 16]))


def test_decoded_boxes_are_suppressed_like_raw_maps() -> None:
    thresholds = Thresholds(0.1, 0.5, 30)
    expected = detect([random_view(0)], thresholds)
    assert min(map(len, expected)) > 10
    for detections, one in zip(detect([DecodedView(decode(random_view(0)))], thresholds), expected, strict=True):
        torch.testing.assert_close(detections, one, rtol=1e-5, atol=1e-4)


def test_decoded_boxes_join_raw_maps() -> None:
    thresholds = Thresholds(0.1, 0.5, 30)
    expected = detect([random_view(0), random_view(1)], thresholds)
    for views in (
        [random_view(0), DecodedView(decode(random_view(1)))],
        [DecodedView(decode(random_view(0))), random_view(1)],
    ):
        for detections, one in zip(detect(views, thresholds), expected, strict=True):
            torch.testing.assert_close(detections, one, rtol=1e-5, atol=1e-4)


def test_thresholds_apply_to_a_model_that_suppresses() -> None:
    rows = torch.zeros(2, 4, 6)
    rows[0, :3, 4] = torch.tensor([0.9, 0.5, 0.3])
    rows[1, :1, 4] = 0.2
    detections = filter_detections(SuppressedView(rows, torch.tensor([3, 1])), Thresholds(conf_thres=0.25, max_det=2))
    assert [image[:, 4].tolist() for image in detections] == [pytest.approx([0.9, 0.5]), []]


# Several images together, as on a GPU


def one_by_one(boxes: Tensor, starts: Tensor, iou_thres: float, most: int, max_det: int) -> Tensor:
    """Return what `batch_nms` returns, by torchvision's `nms`."""
    from torchvision.ops import nms

    found = torch.full((len(starts) - 1, max_det), -1)
    for row, first, end in zip(found, starts.tolist(), starts[1:].tolist(), strict=False):
        image = boxes[first : min(end, first + most)]
        remaining = nms(image, -torch.arange(float(len(image))), iou_thres)[:max_det]
        row[: len(remaining)] = remaining + first
    return found


def check_together(nms: Callable[..., Tensor]) -> None:
    """Compare images that are suppressed together with each by itself: with equal boxes, without boxes, at limits."""
    generator = torch.Generator().manual_seed(0)
    for counts in ((30, 0, 12, 1, 0), (15,), (0, 0)):
        image = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        image = image[torch.randperm(len(image), generator=generator)]
        scores = torch.rand(len(image), 8, generator=generator)
        scores[:, :4] = (scores[:, :4] * 12).round() + 1
        scores[:, 4:] = (scores[:, 4:] * 5).round() / 5
        scores[:1, 5] = math.nan
        for given in (
            Thresholds(0.1, 0.5),
            Thresholds(0.1, 0.5, agnostic_nms=True),
            Thresholds(0.1, 0.25, one_class=True),
            Thresholds(0.3, 0.0, classes=(0, 2)),
            Thresholds(0.1, 0.5, max_det=5),
            Thresholds(0.1, 0.75, max_det=1),
        ):
            boxes, row, each = suppress_together(Candidates(len(counts), image, scores, scores[:, :0]), given, nms)
            for number, of_image, rows in zip(range(len(counts)), boxes.split(each), row.split(each), strict=True):
                expected, expected_rows = suppress(scores[image == number], given)
                assert torch.equal(of_image, expected)
                assert torch.equal(rows, (image == number).nonzero()[expected_rows, 0])


@pytest.mark.parametrize("most", [30_000, 20])
def test_images_that_are_suppressed_together(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suppression, "MAX_CANDIDATES", most)
    check_together(one_by_one)


def test_the_kernel_on_the_cpu() -> None:
    """By Triton's interpreter, in a process of its own: Triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    code = f"from {__name__} import check_together; from models.tasks.batch_nms import batch_nms as nms"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", f"{code}; check_together(nms)"], cwd=ROOT, env=environment, check=True)


def test_groups_of_images_have_the_detections_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without Triton."""
    generator = torch.Generator().manual_seed(0)
    views = [RawView(*random_maps(seed, 3, few=True)) for seed in (0, 1)]
    views.append(DecodedView(torch.rand(3, 20, 8, generator=generator) * 4))
    expected = detect_with_more(views, Thresholds())
    for module in ("models.heads.anchors", "models.tasks.detect"):
        monkeypatch.setattr(f"{module}.image_groups", lambda outputs: iter([outputs]))
    for one, other in zip(detect_with_more(views, Thresholds()), expected, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.gpu
def test_a_gpu_has_the_detections_of_the_cpu() -> None:
    """To the bit, from the same boxes, as many as of an image of 640 px."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(8, 3, side, side, 85, generator=generator) for side in (80, 40, 20)]
    for raw in maps:
        raw[..., 4:] = raw[..., 4:] * 2 - 6
        raw[3, ..., 4] = -200
    anchors = torch.tensor([[[1.25, 1.625], [2, 3.75], [4.125, 2.875]]]).repeat(3, 1, 1)
    boxes = decode(RawView(maps, anchors, torch.tensor([8.0, 16, 32])))
    for thresholds in (
        Thresholds(),
        Thresholds(agnostic_nms=True, max_det=1000),
        Thresholds(0.01, 0.3, classes=(1, 7)),
    ):
        assert suppression._batch_nms(thresholds.max_det)
        on_gpu = detect([DecodedView(boxes.cuda())], thresholds)
        for one, expected in zip(on_gpu, detect([DecodedView(boxes)], thresholds), strict=True):
            assert torch.equal(one.cpu(), expected)
    assert len(on_gpu[0]) > len(on_gpu[3]) == 0
