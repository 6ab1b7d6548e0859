"""What an exported detector computes, against the detections of a validation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

from models.heads.anchors import RawView
from models.tasks.contract import Thresholds
from models.tasks.detect import DecodedDetector, GraphSuppression, SuppressedDetector, detect
from models.yolo import YoloModel, build_model
from tests.making import tiny_detector


@pytest.fixture
def model() -> YoloModel:
    """Return a detector with many detections of different confidence."""
    torch.manual_seed(0)
    model = build_model(tiny_detector()).eval()
    for level in model.head.m:
        nn.init.normal_(level.weight, std=2)
        nn.init.normal_(level.bias, std=0.5)
    return model.requires_grad_(False)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, 32, 48)


def detections_of(model: YoloModel, images: Tensor, thresholds: Thresholds) -> list[Tensor]:
    return detect([RawView(model(images), model.head.anchors, model.head.stride)], thresholds)


def test_boxes_by_hand(model: YoloModel, images: Tensor) -> None:
    """YOLOv5's formula for one box."""
    decoded = DecodedDetector(model)(images)
    assert decoded.shape == (3, 2 * (8 * 12 + 4 * 6), 8)
    raw = model(images)[1].sigmoid()  # of stride 8: after the two anchors of stride 4
    anchor, row, column = 1, 2, 3
    given, one = raw[2, anchor, row, column], decoded[2, 2 * 8 * 12 + (anchor * 4 + row) * 6 + column]
    x, y = (2 * given[0] - 0.5 + column) * 8, (2 * given[1] - 0.5 + row) * 8
    width, height = (2 * given[2]) ** 2 * 32, (2 * given[3]) ** 2 * 24
    torch.testing.assert_close(one[:4], torch.stack((x, y, width, height)))
    assert torch.equal(one[4:], given[4:])


@pytest.mark.parametrize("most", [5, 40])
def test_suppression_in_the_graph_returns_the_detections_of_a_validation(
    model: YoloModel, images: Tensor, most: int
) -> None:
    limits = GraphSuppression(0.3, 0.45, most, most)
    detections, counts = SuppressedDetector(DecodedDetector(model), limits)(images)
    expected = detections_of(model, images, Thresholds(0.3, 0.45, most))
    assert detections.shape == (3, most, 6)
    assert counts.tolist() == [len(one) for one in expected]
    assert counts.min() > 3
    for image, one in zip(detections, expected, strict=True):
        torch.testing.assert_close(image[: len(one)], one, rtol=1e-4, atol=1e-3)
        assert not image[len(one) :].any()


def test_without_detections_all_rows_are_zeros(model: YoloModel, images: Tensor) -> None:
    detections, counts = SuppressedDetector(DecodedDetector(model), GraphSuppression(conf_thres=1.0))(images)
    assert (int(counts.sum()), float(detections.abs().sum())) == (0, 0.0)


def test_most_detections_of_a_class(model: YoloModel, images: Tensor) -> None:
    everything = SuppressedDetector(DecodedDetector(model), GraphSuppression(0.3, 0.45, 300, 300))(images)[0]
    few = SuppressedDetector(DecodedDetector(model), GraphSuppression(0.3, 0.45, 300, 2))(images)[0]
    for whole, part in zip(everything, few, strict=True):
        of_class = [whole[(whole[:, 5] == k) & (whole[:, 4] > 0)][:2] for k in range(3)]
        expected = torch.cat(of_class)
        expected = expected[expected[:, 4].argsort(descending=True)]
        torch.testing.assert_close(part[part[:, 4] > 0], expected)


def test_classes_suppress_each_other_if_agnostic(model: YoloModel, images: Tensor) -> None:
    def overlaps(agnostic: bool) -> int:
        limits = GraphSuppression(0.3, 0.45, 300, 300, agnostic)
        detections, _ = SuppressedDetector(DecodedDetector(model), limits)(images)
        boxes = [image[image[:, 4] > 0, :4] for image in detections]
        return sum(int((box_iou(one, one).triu(1) > 0.45).sum()) for one in boxes)

    assert overlaps(False) > 0
    assert overlaps(True) == 0
