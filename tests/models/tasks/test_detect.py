"""The detector: suppression by hand and against a plain implementation, predictions, exported modules and the task."""

from __future__ import annotations

import copy
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import box_iou

from models.heads.anchors import Detect, DetectionCriterion
from models.heads.contract import Candidates, DecodedView, HeadView
from models.tasks import contract
from models.tasks import detect as module
from models.tasks.contract import Thresholds
from models.tasks.detect import (
    PADDING_GREY,
    DecodedDetector,
    DetectionPostprocess,
    DetectionTask,
    SuppressedDetector,
)
from models.tasks.segment import SegmentationTask
from models.yolo import YoloModel, build_model
from tests.making import CLASS_NAMES, grey_batch, image_info, tiny_detector
from utils.batch import Batch, Placement
from utils.config.hyperparameters import Hyperparameters
from utils.files import ROOT, read_yaml

THREE = math.log(3)  # the logit of 3/4; of 1/4 with a minus
ANCHOR = [[[1.0, 2.0]]]


def view_of(outputs: list[Tensor], anchors: Any, strides: list[float], **changes: Any) -> HeadView:
    """Return a view of raw maps of a head with anchors (levels, anchors, 2), in cells."""
    anchors = torch.as_tensor(anchors)
    head = Detect(outputs[0].shape[-1] - 5, anchors.shape[1], [1] * len(anchors))
    head.anchors.copy_(anchors)
    head.stride.copy_(torch.tensor(strides))
    return HeadView(head, outputs)._replace(**changes)


def decoded(view: HeadView) -> Tensor:
    return view.head.decode(view.outputs)


# Suppression of one image


def run(
    *rows: tuple[float, ...], conf_thres: float = 0.1, iou_thres: float = 0.5, max_det: int = 300, **more: Any
) -> Tensor:
    """Return the detections of an image from rows x, y, w, h, objectness, class scores."""
    scores = torch.tensor(rows, dtype=torch.float)
    candidates = Candidates(1, torch.zeros(len(rows), dtype=torch.long), scores, scores[:, :0])
    return module.suppress(candidates, Thresholds(conf_thres, iou_thres, max_det, **more))[0]


SAME, OTHER = (50, 50, 20, 20, 1, 0.8, 0), (51, 50, 20, 20, 1, 0, 0.75)
THREE_CLASSES = (10, 20, 4, 6, 0.5, 0.5, 0.1, 0.75)
PAIR = ((10, 10, 4, 4, 1, 0.9), (12, 10, 4, 4, 1, 0.8))  # IoU 8 / 24
# In a row, each overlaps the next by half: the middle one falls to the first, and the third stays.
ROW = ((14, 10, 4, 4, 1, 0.7), (10, 10, 4, 4, 1, 0.9), (12, 10, 4, 4, 1, 0.8))
# Distant classes and large images need a large offset.
FAR = ((10, 10, 20, 20, 1, *[0.0] * 78, 0.5, 0), (4000, 4000, 20, 20, 1, *[0.0] * 79, 0.5))
NAN = ((50, 50, 20, 20, 1, 0.5, math.nan), (150, 50, 20, 20, math.nan, 0.5, 0.5))


@pytest.mark.parametrize(
    ("rows", "thresholds", "expected"),  # confidences and classes
    [
        ([THREE_CLASSES], {}, [(0.375, 2), (0.25, 0)]),  # a box counts for every class
        ([THREE_CLASSES], {"one_class": True}, [(0.375, 2)]),
        ([THREE_CLASSES], {"classes": (0, 1)}, [(0.25, 0)]),
        ([THREE_CLASSES], {"classes": (0, 1), "one_class": True}, []),  # the most probable one is not among them
        ([THREE_CLASSES], {"conf_thres": 0.25}, [(0.375, 2)]),  # exclusive
        ([THREE_CLASSES], {"conf_thres": 0.375}, []),
        ([SAME, OTHER], {}, [(0.8, 0), (0.75, 1)]),
        ([SAME, OTHER], {"agnostic_nms": True}, [(0.8, 0)]),
        (FAR, {}, [(0.5, 78), (0.5, 79)]),
        (PAIR, {"iou_thres": 0.3}, [(0.9, 0)]),
        (PAIR, {"iou_thres": 0.35}, [(0.9, 0), (0.8, 0)]),
        (ROW, {"iou_thres": 0.3}, [(0.9, 0), (0.7, 0)]),
        (ROW, {"iou_thres": 0.6, "max_det": 2}, [(0.9, 0), (0.8, 0)]),
        (NAN, {}, [(0.5, 0)]),  # a score of NaN hides no other box
        (NAN, {"max_det": 1}, [(0.5, 0)]),
    ],
)
def test_thresholds_by_hand(rows: Any, thresholds: dict[str, Any], expected: list[tuple[float, int]]) -> None:
    detections = run(*rows, **thresholds)
    assert detections[:, 4].tolist() == pytest.approx([confidence for confidence, _ in expected])
    assert detections[:, 5].tolist() == [label for _, label in expected]
    for *box, _, _ in detections.tolist():  # corners of the rows' boxes
        assert any(box == [x - w / 2, y - h / 2, x + w / 2, y + h / 2] for x, y, w, h, *_ in rows)


def detect(views: list[Any], thresholds: Thresholds) -> list[Tensor]:
    return [image.boxes for image in module.detect(views, thresholds)]


def test_detections_are_in_fp32_without_gradient_and_leave_the_maps_unchanged() -> None:
    raw = torch.randn(2, 1, 64, 64, 6).to(torch.bfloat16).requires_grad_()
    copy = raw.detach().clone()
    detections = detect([view_of([raw * 1], torch.ones(1, 1, 2), [8])], Thresholds())
    assert torch.equal(raw, copy)
    assert (detections[0].dtype, detections[0].requires_grad) == (torch.float32, False)
    expected = detect([view_of([copy.float()], torch.ones(1, 1, 2), [8])], Thresholds())
    assert all(map(torch.equal, detections, expected))
    assert detect([view_of([torch.zeros(0, 1, 2, 2, 7)], torch.ones(1, 1, 2), [8])], Thresholds()) == []


# Against a plain implementation


def plain_detections(boxes: Tensor, thresholds: Thresholds, most: int) -> Tensor:
    """Compute `detect` of one image from every box (n, 5 + classes) of every class and every pair of them."""
    confidence = (boxes[:, 5:] * boxes[:, 4:5]).numpy()
    candidates = [(-confidence[k, c], k, c) for k, c in np.argwhere(confidence > np.float32(thresholds.conf_thres))]
    remaining: list[tuple] = []
    for negative, k, c in sorted(candidates)[:most]:
        x, y, w, h = boxes[k, :4]
        box = torch.stack((x - w / 2, y - h / 2, x + w / 2, y + h / 2))
        others = torch.tensor(np.array([other[:4] for other in remaining if other[5] == c])).view(-1, 4)
        if not (box_iou(box[None], others) > thresholds.iou_thres).any():
            remaining.append((*box, -negative, c))
    return torch.tensor(np.array(remaining[: thresholds.max_det], np.float32)).view(-1, 6)


def random_view(seed: int, classes: int = 3, few: bool = False, max_side: int = 6) -> HeadView:
    """Return maps of three images on two levels, the second empty. few: distinct logits, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    outputs = [torch.randn(3, 2, side, side, 5 + classes, generator=generator) * 2 for side in (max_side, 3)]
    for raw in outputs:
        raw[..., :4] /= 4
        if few:
            raw[..., 4:] = raw[..., 4:].round()
        raw[1, ..., 4] = -200
        raw[2, ..., 4] -= 1
    return view_of(outputs, [[[2.0, 3], [4, 2]], [[3.0, 3], [2, 4]]], [8, 16])


@pytest.mark.parametrize("conf_thres", [0.001, 0.5, 1.0, 0.0])  # the logits 0 have sigmoids of 1/2
@pytest.mark.parametrize(("classes", "few", "max_det"), [(1, False, 300), (5, True, 300), (5, True, 7), (3, False, 20)])
def test_as_the_plain_implementation(
    classes: int, few: bool, max_det: int, conf_thres: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, most in enumerate((30_000, 150)):
        monkeypatch.setattr(module, "MAX_CANDIDATES", most)
        given, thresholds = random_view(seed, classes, few), Thresholds(conf_thres, 0.45, max_det)
        exact = [one.scores for one in given.candidates(0.0)]  # the sigmoids of `detect`, to the bit
        detections = detect([given], thresholds)
        for image, boxes in zip(detections, exact, strict=True):
            assert torch.equal(image, plain_detections(boxes, thresholds, most))
        assert not len(detections[1])


@pytest.mark.parametrize("threads", [1, 3])
def test_the_detections_of_an_image_do_not_depend_on_the_others(threads: int) -> None:
    """To the last bit, with any number of CPU threads."""
    before, view = torch.get_num_threads(), random_view(0, 80, max_side=20)
    try:
        torch.set_num_threads(threads)
        together = detect([view], Thresholds())
        apart = [
            detect([view._replace(outputs=[raw[k : k + 1] for raw in view.outputs])], Thresholds())[0] for k in range(3)
        ]
        backwards = detect([view._replace(outputs=[raw.flip(0) for raw in view.outputs])], Thresholds())[::-1]
    finally:
        torch.set_num_threads(before)
    for detections in (apart, backwards):
        assert all(torch.equal(*pair) for pair in zip(together, detections, strict=True))


# Several views


def one_box(columns: int, column: int, confidence: float, x: float = 0.0) -> Tensor:
    """Return a map of 4 rows of stride 8 with one box, in the second row; x: logit of its horizontal position."""
    raw = torch.full((1, 1, 4, columns, 6), -20.0)
    raw[0, 0, 1, column] = torch.tensor([x, 0, 0, 0, math.log(confidence / (1 - confidence)), 20])
    return raw


@pytest.mark.parametrize(
    ("columns", "changes", "expected"),
    [
        # 48 pixels wide: the centre is 8 (0.75 x 2 - 0.5 + 2) = 24 pixels from the right edge.
        (6, {"mirrored_width": 48}, [20.0, 4, 28, 20]),
        # Around 24, 12; 8 wide and 16 high. Each side is scaled back by its own factor.
        (4, {"scale": (0.5, 0.8)}, [40.0, 5, 56, 25]),
        (4, {"scale": (0.5, 0.8), "mirrored_width": 60}, [4.0, 5, 20, 25]),
    ],
)
def test_mirrored_and_scaled_views(columns: int, changes: dict[str, Any], expected: list[float]) -> None:
    (detections,) = detect([view_of([one_box(columns, 2, 0.5, THREE)], ANCHOR, [8], **changes)], Thresholds())
    torch.testing.assert_close(detections, torch.tensor([[*expected, 0.5, 0]]))


def test_views_are_joined_before_the_suppression() -> None:
    """The views of two models differ in size, anchors and levels. Of equal boxes the more confident remains."""
    one = view_of([one_box(6, 2, 0.5)], ANCHOR, [8])
    nothing, same = torch.full((1, 3, 2, 3, 6), -20.0), torch.full((1, 3, 4, 6, 6), -20.0)
    same[0, 1, 1, 2] = torch.tensor([0, 0, 0, 0, THREE, 20.0])
    same[0, 1, 3, 5] = torch.tensor([0, 0, 0, 0, -THREE, 20.0])
    two = view_of([same, nothing], [[[9.0, 9.0], [1.0, 2.0], [9.0, 9.0]]] * 2, [8, 16])
    expected = torch.tensor([[16.0, 4, 24, 20, 0.75, 0], [40, 20, 48, 36, 0.25, 0]])
    for views in ([one, two], [two, one], [one, DecodedView(decoded(two))]):
        torch.testing.assert_close(detect(views, Thresholds())[0], expected)
    detections = detect([one, two], Thresholds(iou_thres=1.0))[0]
    assert detections[:, 4].tolist() == pytest.approx([0.75, 0.5, 0.25])


# Several images together, as on a GPU


def check_together(nms: Callable[..., Tensor]) -> None:
    """Compare a way to suppress images together with the plain one: with equal boxes, without boxes, at limits."""
    generator = torch.Generator().manual_seed(0)
    for counts in ((30, 0, 12, 1, 0), (15,), (0, 0)):
        starts = torch.tensor((0, *counts)).cumsum(0)
        low = (torch.rand(sum(counts), 2, generator=generator) * 12).round()
        boxes = torch.cat((low, low + (torch.rand(sum(counts), 2, generator=generator) * 6).round() + 1), 1)
        for limits in ((0.5, 30_000, 300), (0.5, 20, 300), (0.25, 30_000, 5), (0.0, 30_000, 1), (0.75, 3, 2)):
            assert torch.equal(nms(boxes, starts, *limits), module.nms_by_image(boxes, starts, *limits))


def test_the_kernel_on_the_cpu() -> None:
    """By Triton's interpreter, in a process of its own: Triton reads the variable when it is imported."""
    pytest.importorskip("triton")
    code = f"from {__name__} import check_together; from models.triton_kernels import batch_nms as nms"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", f"{code}; check_together(nms)"], cwd=ROOT, env=environment, check=True)


def test_groups_of_images_have_the_detections_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU without Triton."""
    views: list[Any] = [random_view(seed, few=True) for seed in (0, 1)]
    views.append(DecodedView(torch.rand(3, 20, 8, generator=torch.Generator().manual_seed(0)) * 4))
    expected = module.detect(views, Thresholds())
    for place in ("models.heads.anchors", "models.heads.contract"):
        monkeypatch.setattr(f"{place}.image_groups", lambda outputs: iter([outputs]))
    for one, other in zip(module.detect(views, Thresholds()), expected, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.gpu
def test_a_gpu_has_the_detections_of_the_cpu() -> None:
    """To the bit, from the same boxes, as many as of an image of 640 px."""
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(8, 3, side, side, 85, generator=generator) for side in (80, 40, 20)]
    for raw in maps:
        raw[..., 4:] = raw[..., 4:] * 2 - 6
        raw[3, ..., 4] = -200
    boxes = decoded(view_of(maps, [[[1.25, 1.625], [2, 3.75], [4.125, 2.875]]] * 3, [8, 16, 32]))
    for thresholds in (
        Thresholds(),
        Thresholds(agnostic_nms=True, max_det=1000),
        Thresholds(0.01, 0.3, classes=(1, 7)),
    ):
        assert module._batch_nms(thresholds.max_det)
        on_gpu = detect([DecodedView(boxes.cuda())], thresholds)
        for one, expected in zip(on_gpu, detect([DecodedView(boxes)], thresholds), strict=True):
            assert torch.equal(one.cpu(), expected)
    assert len(on_gpu[0]) > len(on_gpu[3]) == 0


# Predictions in pixels of the files


@pytest.fixture
def model() -> YoloModel:
    """Return a detector of strides 4 and 8 with many detections of different confidence."""
    torch.manual_seed(0)
    model = build_model(tiny_detector()).eval()
    for level in model.head.m:
        nn.init.normal_(level.weight, std=2)
        nn.init.normal_(level.bias, std=0.5)
    model.stride = 8
    return model.requires_grad_(False)


@pytest.fixture
def images() -> Tensor:
    return torch.rand(3, 3, 32, 48)


@pytest.fixture
def postprocess() -> DetectionPostprocess:
    return DetectionPostprocess(CLASS_NAMES, Thresholds())


def test_predictions_undo_the_placement_and_are_cut_at_the_edges() -> None:
    info = image_info(7, size=(100, 50), placement=Placement((2.0, 0.5), (10, 20)), path="/data/b.jpg")
    detections = torch.tensor([[30, 25, 110, 40, 0.9, 2], [0, 0, 300, 100, 0.5, 1], [-20, 10, 5, 15, 0.4, 0]])
    expected = torch.tensor([[10, 10, 50, 40, 0.9, 2], [0, 0, 100, 50, 0.5, 1], [0, 0, 0, 0, 0.4, 0]])
    batch = grey_batch(image_info(), info, info)
    given = [torch.tensor([[1, 2, 3, 4, 0.5, 0]]), torch.zeros(0, 6), detections]
    exact, empty, last = module.box_predictions(given, batch, CLASS_NAMES, Thresholds())
    assert exact.rows.tolist() == [[1, 2, 3, 4, 0.5, 0]]
    assert empty.rows.shape == (0, 6)
    torch.testing.assert_close(last.rows, expected, check_dtype=False)
    assert (last.image, last.path, last.size) == (7, "/data/b.jpg", (100, 50))


def test_augmented_views(model: YoloModel, postprocess: DetectionPostprocess) -> None:
    """Three sizes, the second mirrored; the first skips the coarse level, the last the fine one."""
    calls: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, given: calls.append(given[0]))
    images = torch.rand(1, 3, 48, 64)
    views: Any = postprocess.views(model, images, augment=True)
    assert calls[0] is images
    assert [tuple(one.shape[2:]) for one in calls] == [(48, 64), (40, 56), (32, 48)]
    assert [view.mirrored_width for view in views] == [0, 64, 0]
    assert [view.skipped_level for view in views] == [1, None, 0]
    # 0.83 and 0.67 of 64 and 48 are 53, 39 and 42, 32 whole pixels; the padding is grey
    assert [view.scale for view in views] == [(1, 1), (53 / 64, 39 / 48), (42 / 64, 32 / 48)]
    for one, height, width in ((calls[1], 39, 53), (calls[2], 32, 42)):
        assert (one[..., width:] == PADDING_GREY).all()
        assert (one[..., height:, :] == PADDING_GREY).all()
        assert (one[..., :height, :width] != PADDING_GREY).all()
    mean = images.flip(3)[..., :24].mean()
    torch.testing.assert_close(calls[1][..., :39, :20].mean(), mean, atol=0.03, rtol=0)
    assert len(postprocess(views, grey_batch(image_info()))) == 1
    head = [[[1], 1, "Detect", ["nc", "anchors"]]]
    one_level = build_model({**tiny_detector(), "anchors": tiny_detector()["anchors"][:1], "head": head}, imgsz=32)
    views = postprocess.views(one_level.eval(), images, augment=True)
    assert [view.skipped_level for view in views] == [None] * 3


class Exported(contract.Model):
    """An exported file that returns the same for all images."""

    def __init__(self, outputs: Tensor | tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.outputs, self.yaml = outputs, tiny_detector()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.outputs


def test_an_exported_file_returns_boxes_or_detections(
    model: YoloModel, images: Tensor, postprocess: DetectionPostprocess
) -> None:
    given = grey_batch(*[image_info()] * 3)
    expected = postprocess(postprocess.views(model, images, augment=False), given)
    decoding = DecodedDetector(model)
    suppressed = SuppressedDetector(decoding, Thresholds())(images)
    for outputs in (decoding(images), suppressed):
        (view,) = postprocess.views(Exported(outputs), images, augment=False)
        assert view.outputs is None
        for prediction, one in zip(postprocess([view], given), expected, strict=True):
            torch.testing.assert_close(prediction.rows, one.rows, rtol=1e-4, atol=1e-3)


# Exported modules


@pytest.mark.parametrize(
    ("limits", "fewest"),
    [(Thresholds(0.3, 0.45, 5), 3), (Thresholds(0.3, 0.45, 40), 3), (Thresholds(1.0, 0.45, 40), 0)],
)
def test_suppression_in_the_graph_returns_the_detections_of_a_validation(
    limits: Thresholds, fewest: int, model: YoloModel, images: Tensor
) -> None:
    detections, counts = SuppressedDetector(DecodedDetector(model), limits)(images)
    expected = detect([HeadView(model.head, model(images))], limits)
    assert detections.shape == (3, limits.max_det, 6)
    assert counts.tolist() == [len(one) for one in expected]
    assert counts.min() >= fewest
    for image, one in zip(detections, expected, strict=True):
        torch.testing.assert_close(image[: len(one)], one, rtol=1e-4, atol=1e-3)
        assert not image[len(one) :].any()


def test_limits_in_the_graph_of_a_class_and_over_all_classes(model: YoloModel, images: Tensor) -> None:
    def detections(**limits: Any) -> list[Tensor]:
        padded, _ = SuppressedDetector(DecodedDetector(model), Thresholds(0.3, 0.45, 300, **limits))(images)
        return [image[image[:, 4] > 0] for image in padded]

    everything, agnostic = detections(), detections(agnostic_nms=True)
    for whole, part in zip(everything, detections(max_det_per_class=2), strict=True):
        expected = torch.cat([whole[whole[:, 5] == k][:2] for k in range(3)])
        torch.testing.assert_close(part, expected[expected[:, 4].argsort(descending=True)])
    overlaps = [
        sum(int((box_iou(one[:, :4], one[:, :4]).triu(1) > 0.45).sum()) for one in of_images)
        for of_images in (everything, agnostic)
    ]
    assert overlaps[0] > overlaps[1] == 0


# The task


@pytest.fixture
def task() -> DetectionTask:
    return DetectionTask(CLASS_NAMES, Hyperparameters())


@pytest.mark.parametrize(("imgsz", "rounded"), [(64, 64), (60, 64), (65, 72), (3, 16)])
def test_the_model_has_the_tasks_classes_and_at_least_two_whole_strides(
    task: DetectionTask, imgsz: int, rounded: int
) -> None:
    model = task.build_model({**tiny_detector(), "nc": 80}, imgsz)
    assert (model.stride, model.imgsz, model.names) == (8, rounded, CLASS_NAMES)
    assert model.yaml["nc"] == model.head.nc == 3
    names = ("yolov5n.pt", "yolov5x6.pt", "v9-c.pt", "yolov5n-cls.pt", "yolov5n-seg.pt")
    assert [bool(re.fullmatch(task.official_weights, name)) for name in names] == [True] * 3 + [False] * 2


def test_what_hyperparameters_change_in_a_yaml(task: DetectionTask) -> None:
    yaml = read_yaml(ROOT / "models" / "yolov9t.yaml")
    for weight in (0.25, 0.0):
        changed = DetectionTask(CLASS_NAMES, Hyperparameters(tal_aux=weight)).model_yaml(yaml)
        assert changed == {key: rows for key, rows in yaml.items() if weight or key != "auxiliary"}
    assert task.model_yaml(tiny_detector()) == tiny_detector()
    assert task.fresh_tensors(from_yaml=False) == ()
    assert task.fresh_tensors(from_yaml=True) == ("anchors",)
    more = DetectionTask(CLASS_NAMES, Hyperparameters(anchors=3))
    assert more.model_yaml(tiny_detector()) == {**tiny_detector(), "anchors": 3}
    assert more.fresh_tensors(from_yaml=False) == ("anchors",)


def test_the_head_is_kept_if_the_recipe_says_so_and_a_part_is_new(task: DetectionTask) -> None:
    """A segmenter takes boxes and classes from a detector of the same classes."""
    detector = task.build_model(read_yaml(ROOT / "models/yolov5n.yaml"), 64)
    segmenter = SegmentationTask(CLASS_NAMES, Hyperparameters(keep_head=1))
    model = segmenter.build_model(read_yaml(ROOT / "models/yolov5n-seg.yaml"), 64)
    assert "0 class outputs new" in segmenter.keep_head(model, detector.state_dict(), CLASS_NAMES)
    assert segmenter.keep_head(model, model.state_dict(), CLASS_NAMES) == ""
    assert task.keep_head(detector, detector.state_dict(), {0: "other"}) == ""
    keeping = DetectionTask(CLASS_NAMES, Hyperparameters(keep_head=1))
    assert "3 class outputs new" in keeping.keep_head(detector, detector.state_dict(), {0: "a", 1: "b", 2: "c"})


@pytest.mark.parametrize("kind", [DetectionTask, SegmentationTask])
def test_outputs_of_new_classes_start_fitted_to_the_training_photos(kind: type[DetectionTask]) -> None:
    """Dark, grey and bright images in a network that is not trained; the class of grey ones is known."""
    task = kind(CLASS_NAMES, Hyperparameters(fit_classes=1))
    model = task.build_model(
        read_yaml(ROOT / "models" / ("yolov5n-seg.yaml" if kind is SegmentationTask else "yolov5n.yaml")), 64
    )
    before = copy.deepcopy(model.head.m)
    pixels = torch.tensor([0, 120, 255], dtype=torch.uint8).repeat(8)
    targets = torch.tensor([[image, image % 3, 0.5, 0.5, 0.4, 0.4] for image in range(24)])
    batch = Batch(pixels[:, None, None, None].expand(24, 3, 64, 64), targets, ())
    task.fit_classes(model, [batch], [0, 2])
    assert model.training
    outputs = model.eval()(task.inputs(batch))
    for level, old, raw in zip(model.head.m, before, outputs[0] if kind is SegmentationTask else outputs, strict=True):
        changed = (level.weight != old.weight).flatten(1).any(1).view(3, -1)
        assert not changed[:, [0, 1, 2, 3, 4, 6]].any()
        if level is not model.head.m[2]:  # whose anchors no target matches
            assert changed[:, [5, 7]].all()
            scores = raw[..., [5, 7]].flatten(1, 3).mean(1).view(8, 3, 2)
            assert (scores.argmax(1) == torch.tensor([0, 2])).all()
    again = copy.deepcopy(model)
    kind(CLASS_NAMES, Hyperparameters()).fit_classes(again, [batch], [1])  # not by the recipe
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), model.parameters(), strict=True))


def test_anchors_are_adapted_to_the_split_at_the_models_size(task: DetectionTask) -> None:
    model, sizes = task.build_model(tiny_detector(), 60), []
    before = model.head.anchors.clone()
    split: Any = SimpleNamespace(side_lengths=lambda imgsz: sizes.append(imgsz) or np.full((50, 2), (3.0, 200.0)))
    task.adapt(model, split)
    assert sizes == [64]
    assert not torch.equal(model.head.anchors, before)


def test_gains_are_scaled_to_the_model() -> None:
    task = DetectionTask(CLASS_NAMES, Hyperparameters(box=0.1, obj=0.7, cls=0.3, anchor_t=3.0), label_smoothing=0.2)
    criterion = task.criterion(task.build_model(tiny_detector(), 60))  # 2 levels, 3 classes, 64 pixels
    assert isinstance(criterion, DetectionCriterion)
    gains = (criterion.hyp.box, criterion.hyp.obj, criterion.hyp.cls)
    assert gains == pytest.approx((0.1 * 1.5, 0.7 * 1.5 * 0.01, 0.3 * 1.5 * 3 / 80))
    assert (criterion.hyp.anchor_t, criterion.label_smoothing, criterion.classes) == (3.0, 0.2, 3)
