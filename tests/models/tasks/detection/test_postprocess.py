"""Views of models, and predictions in pixels of the files, with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.heads.anchors import RawView, decode
from models.heads.contract import DecodedView
from models.tasks import contract
from models.tasks.contract import Thresholds
from models.tasks.detect import (
    AUGMENTATIONS,
    PADDING_GREY,
    DetectionPostprocess,
    ScaledCopy,
    SuppressedView,
    boxes_in_files,
)
from models.yolo import YoloModel, build_model
from tests.making import CLASS_NAMES, grey_batch, image_info, tiny_detector
from utils.batch import Placement
from utils.errors import UserError


@pytest.fixture
def model() -> YoloModel:
    """Return a model of strides 4 and 8."""
    model = build_model(tiny_detector()).eval()
    model.stride = 8
    return model


@pytest.fixture
def postprocess() -> DetectionPostprocess:
    return DetectionPostprocess(CLASS_NAMES, Thresholds())


def view_of(model: YoloModel, outputs: list[Tensor]) -> RawView:
    return RawView(outputs, model.head.anchors, model.head.stride)


def inputs_of(model: nn.Module) -> list[Tensor]:
    """Return a list that collects the inputs of the model from now on."""
    calls: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, given: calls.append(given[0]))
    return calls


# Predictions


def test_predictions_are_in_pixels_of_the_file(model: YoloModel, postprocess: DetectionPostprocess) -> None:
    outputs = [torch.full((2, 2, 16, 16, 8), -20.0), torch.full((2, 2, 8, 8, 8), -20.0)]
    # Image 1, anchor 16 x 16, cell (column 3, row 5) of stride 8: centre (28, 44), so 20, 36, 36, 52
    outputs[1][1, 0, 5, 3] = torch.tensor([0, 0, 0, 0, 0, -20, 20, -20])
    info = image_info(7, size=(100, 70), placement=Placement((0.5, 0.8), (4, 12)), path="/data/b.jpg")
    empty, prediction = postprocess([view_of(model, outputs)], grey_batch(image_info(), info))
    assert empty.rows.shape == (0, 6)
    expected = torch.tensor([[32, 30, 64, 50, 0.5, 1.0]])
    torch.testing.assert_close(prediction.rows, expected, rtol=1e-5, atol=1e-4, check_dtype=False)
    assert (prediction.image, prediction.path, prediction.size) == (7, "/data/b.jpg", (100, 70))


def test_thresholds(model: YoloModel) -> None:
    outputs = [torch.full((1, 2, 16, 16, 8), -20.0), torch.full((1, 2, 8, 8, 8), -20.0)]
    for column, objectness in enumerate((0.0, 1.0, -1.0)):
        outputs[1][0, 0, 4, 2 * column + 1] = torch.tensor([0, 0, 0, 0, objectness, 20, -20, -20])

    def confidences(thresholds: Thresholds) -> list[float]:
        postprocess = DetectionPostprocess(CLASS_NAMES, thresholds)
        (prediction,) = postprocess([view_of(model, outputs)], grey_batch(image_info()))
        return prediction.rows[:, 4].tolist()

    assert confidences(Thresholds()) == pytest.approx([0.7311, 0.5, 0.2689], abs=1e-4)
    assert confidences(Thresholds(conf_thres=0.3, iou_thres=0.6, max_det=300)) == pytest.approx([0.7311, 0.5], abs=1e-4)
    assert confidences(Thresholds(conf_thres=0.001, iou_thres=0.6, max_det=1)) == pytest.approx([0.7311], abs=1e-4)


def test_an_unknown_class_is_an_error() -> None:
    DetectionPostprocess(CLASS_NAMES, Thresholds(classes=(0, 2)))
    with pytest.raises(UserError, match="--classes 3: the model has classes 0 to 2"):
        DetectionPostprocess(CLASS_NAMES, Thresholds(classes=(0, 4, 3)))


def test_boxes_in_files_undo_the_placement_and_are_cut_at_the_edges() -> None:
    info = image_info(size=(100, 50), placement=Placement((2.0, 0.5), (10, 20)))
    detections = torch.tensor([[30, 25, 110, 40, 0.9, 2], [0, 0, 300, 100, 0.5, 1], [-20, 10, 5, 15, 0.4, 0]])
    expected = torch.tensor([[10, 10, 50, 40, 0.9, 2], [0, 0, 100, 50, 0.5, 1], [0, 0, 0, 0, 0.4, 0]])
    exact, empty, boxes = boxes_in_files(
        [torch.tensor([[1, 2, 3, 4, 0.5, 0]]), torch.zeros(0, 6), detections], [image_info(), info, info]
    )
    assert exact.tolist() == [[1, 2, 3, 4, 0.5, 0]]
    assert empty.shape == (0, 6)
    torch.testing.assert_close(boxes, expected, check_dtype=False)
    assert boxes_in_files([], []) == []


# Views


def test_one_view_is_the_model_on_the_images(model: YoloModel, postprocess: DetectionPostprocess) -> None:
    images = torch.rand(1, 3, 48, 64)
    (view,) = postprocess.views(model, images, augment=False)
    assert isinstance(view, RawView)
    assert all(torch.equal(*pair) for pair in zip(view.outputs, model(images), strict=True))
    assert torch.equal(view.anchors, model.head.anchors)
    assert view.strides.tolist() == [4, 8]
    assert (view.scale, view.mirrored_width, view.skipped_level) == ((1, 1), 0, None)


def test_augmented_views(model: YoloModel, postprocess: DetectionPostprocess) -> None:
    """Three sizes, the second mirrored; the first skips the coarse level, the last the fine one."""
    calls = inputs_of(model)
    images = torch.rand(1, 3, 48, 64)
    views = postprocess.views(model, images, augment=True)
    assert calls[0] is images
    assert [tuple(one.shape[2:]) for one in calls] == [(48, 64), (40, 56), (32, 48)]
    raw = [view for view in views if isinstance(view, RawView)]
    assert [view.mirrored_width for view in raw] == [0, 64, 0]
    assert [view.skipped_level for view in raw] == [1, None, 0]
    # 0.83 and 0.67 of 64 and 48 are 53, 39 and 42, 32 whole pixels; the padding is grey
    assert [view.scale for view in raw] == [(1, 1), (53 / 64, 39 / 48), (42 / 64, 32 / 48)]
    for one, height, width in ((calls[1], 39, 53), (calls[2], 32, 42)):
        assert (one[..., width:] == PADDING_GREY).all()
        assert (one[..., height:, :] == PADDING_GREY).all()
        assert (one[..., :height, :width] != PADDING_GREY).all()
    mean = images.flip(3)[..., :24].mean()
    torch.testing.assert_close(calls[1][..., :39, :20].mean(), mean, atol=0.03, rtol=0)
    assert len(postprocess(views, grey_batch(image_info()))) == 1


def test_the_level_of_a_model_of_one_level_is_not_skipped(postprocess: DetectionPostprocess) -> None:
    head = [[[1], 1, "Detect", ["nc", "anchors"]]]
    model = build_model({**tiny_detector(), "anchors": tiny_detector()["anchors"][:1], "head": head}).eval()
    model.stride = 4
    views = postprocess.views(model, torch.rand(1, 3, 32, 32), augment=True)
    assert [view.skipped_level for view in views if isinstance(view, RawView)] == [None] * 3


class Exported(contract.Model):
    """An exported file that returns the same for all images."""

    def __init__(self, outputs: Tensor | tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.outputs, self.yaml = outputs, tiny_detector()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.outputs


def test_an_exported_file_returns_boxes(model: YoloModel, postprocess: DetectionPostprocess) -> None:
    images = torch.rand(2, 3, 48, 64)
    views = postprocess.views(model, images, augment=False)
    (decoded,) = postprocess.views(Exported(decode(view_of(model, model(images)))), images, augment=False)
    assert isinstance(decoded, DecodedView)
    assert decoded.outputs is None
    given = grey_batch(image_info(), image_info())
    for prediction, expected in zip(postprocess([decoded], given), postprocess(views, given), strict=True):
        torch.testing.assert_close(prediction.rows, expected.rows, rtol=1e-4, atol=1e-3)


def test_an_exported_file_returns_detections(postprocess: DetectionPostprocess) -> None:
    rows = torch.zeros(1, 3, 6)
    rows[0, :2] = torch.tensor([[1, 2, 3, 4, 0.5, 2], [5, 6, 7, 8, 0.25, 0]])
    (view,) = postprocess.views(Exported((rows, torch.tensor([2]))), torch.rand(1, 3, 8, 8), augment=False)
    assert isinstance(view, SuppressedView)
    assert view.outputs is None
    (prediction,) = postprocess([view], grey_batch(image_info()))
    assert prediction.rows.tolist() == [[1, 2, 3, 4, 0.5, 2], [5, 6, 7, 8, 0.25, 0]]


# Augmented copies of a batch


def test_scaled_images_are_padded_to_whole_strides() -> None:
    images = torch.rand(2, 3, 48, 64)
    scaled, scale = ScaledCopy(0.5, False).apply(images, 32)
    assert scaled.shape == (2, 3, 32, 32)
    assert scale == (0.5, 0.5)
    assert (scaled[..., 24:, :] == PADDING_GREY).all()
    torch.testing.assert_close(scaled[..., :24, :].mean(), images.mean(), atol=0.02, rtol=0)


def test_mirrored_images() -> None:
    images = torch.rand(1, 3, 8, 8)
    mirrored, scale = ScaledCopy(1.0, True).apply(images, 8)
    assert torch.equal(mirrored, images.flip(3))
    assert scale == (1, 1)


def test_the_first_augmentation_changes_nothing() -> None:
    images = torch.rand(1, 3, 8, 8)
    assert AUGMENTATIONS[0].apply(images, 8)[0] is images
