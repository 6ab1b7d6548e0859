"""The segmenter's task: its model, its loss and its predictions against YOLOv5's numbers and plain implementations."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.export import ExportJob, ExportMetadata, read_exported, write
from models.heads.anchors import Segment, match, near_cells
from models.heads.contract import UnavailableCriterion
from models.loading import transfer
from models.tasks import segment
from models.tasks.contract import Model, Thresholds
from models.tasks.segment import (
    DecodedSegmenter,
    SegmentationCriterion,
    SegmentationPostprocess,
    SegmentationTask,
    SegmentationView,
    SuppressedSegmenter,
)
from models.tasks.segment_metrics import SegmentationPrediction, target_masks
from models.weights import read_weights
from models.yolo import YoloModel, build_model
from tests.making import CLASS_NAMES, image_info
from tests.models.reference import agrees_with_yolov5
from tests.models.tasks.mask_batches import MAP, SIDE, mask_batch, tiny_model, tiny_segmenter, tiny_task
from utils.batch import SegmentationBatch
from utils.config.hyperparameters import AnchorKeys, keys_of
from utils.errors import UserError
from utils.plots.drawing import COLOURS

CLASSES, MASKS = 3, 4
SIZES = ((8, 8), (4, 4))  # of the levels' maps
BOX_GAIN = 0.3


@pytest.fixture(scope="module")
def reference(shared: Path) -> dict[str, Any]:
    """What YOLOv5 computed."""
    content: dict[str, Any] = torch.load(shared / "reference" / "yolov5n_seg.pt", weights_only=True)
    return content


@pytest.fixture
def official(shared: Path) -> YoloModel:
    """YOLOv5's own segmenter."""
    weights = read_weights(shared / "weights" / "yolov5n-seg-coco128.pt")
    assert (weights.task, weights.source) == ("segment", "yolov5")
    model = build_model("yolov5n-seg.yaml")
    assert transfer(model, weights.state)[:2] == (367, 367)
    return model


# The loss


@pytest.mark.parametrize("mode", ["eval", "train"])  # of BatchNorm
def test_loss_and_gradients_are_those_of_yolov5(mode: str, official: YoloModel, reference: dict[str, Any]) -> None:
    model = official.train(mode == "train")
    gains = {name: reference["hyp"][name] for name in keys_of(AnchorKeys) & {*reference["hyp"]}}
    criterion = SegmentationCriterion(AnchorKeys(**gains), model.head, reference["hyp"].get("label_smoothing", 0.0))
    targets, index_maps = reference["targets"].numpy(), reference["masks_overlap"].numpy()
    image = targets[:, 0].astype(int)
    number = [list(image[:k]).count(one) + 1 for k, one in enumerate(image)]  # in its image's map
    batch = mask_batch(targets, [index_maps[one] == k for one, k in zip(image, number, strict=True)])
    images = reference["im_uint8"].float() / 255
    terms = criterion(model(images), batch)
    agrees_with_yolov5(model, criterion, terms, len(images), reference[mode], "items_box_seg_obj_cls")


def criterion_of(
    class_weights: tuple[float, ...] = (), label_smoothing: float = 0.0, **gains: float
) -> SegmentationCriterion:
    head = build_model(tiny_segmenter()).head
    assert isinstance(head, Segment)
    return SegmentationCriterion(AnchorKeys(box=BOX_GAIN, **gains), head, label_smoothing, class_weights)


def random_outputs(images: int = 3, dtype: torch.dtype = torch.float32, wide: int = 1) -> tuple[list[Tensor], Tensor]:
    """Return raw maps of both levels, and prototypes, of images that are `wide` times as wide as high."""
    shapes = [(images, 2, height, width * wide, 5 + CLASSES + MASKS) for height, width in SIZES]
    maps = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    return maps, torch.randn(images, MASKS, MAP, MAP * wide).to(dtype).requires_grad_()


def random_batch(images: int = 3, count: int = 25, wide: int = 1) -> SegmentationBatch:
    """Return targets of all sizes, some of them partly outside of their image or without a pixel."""
    image, label = np.arange(count) % images, np.arange(count) % CLASSES
    rng = np.random.default_rng(0)
    rows = np.column_stack((image, label, rng.random((count, 2)), rng.random((count, 2)) ** 2 * 0.9 + 0.01))
    return mask_batch(rows.tolist(), list(rng.random((count, MAP, MAP * wide)) < 0.5), images=images)


def plain_sums(
    criterion: SegmentationCriterion, outputs: tuple[list[Tensor], Tensor], batch: SegmentationBatch
) -> Tensor:
    """Return the sums of the mask term, match by match, over whole maps."""
    maps, prototypes = outputs
    rows, columns = (torch.arange(side) for side in prototypes.shape[2:])
    cells = near_cells([(raw.shape[2], raw.shape[3]) for raw in maps], batch.targets)
    matched = match(cells, build_model(tiny_segmenter()).head.anchors, criterion.hyp.anchor_t)
    masks = target_masks(batch, np.arange(len(batch.targets)), (len(rows), len(columns))).float()
    sums = []
    for level, raw in enumerate(maps):
        values: dict[int, list[Tensor]] = {}
        for cell, anchor in matched[level].nonzero().tolist():
            target = cell % len(batch.targets)
            image, row, column = cells.indices[level][:, cell].tolist()
            _, _, x, y, w, h = batch.targets[target].tolist()
            logits = (raw[image, anchor, row, column, 5 + CLASSES :, None, None] * prototypes[image]).sum(0)
            loss = functional.binary_cross_entropy_with_logits(logits, masks[target], reduction="none")
            in_x = (columns >= (x - w / 2) * len(columns)) & (columns < (x + w / 2) * len(columns))
            in_y = (rows >= (y - h / 2) * len(rows)) & (rows < (y + h / 2) * len(rows))
            values.setdefault(image, []).append((loss * in_y[:, None] * in_x).mean() / (w * h))
        sums.append(sum((torch.stack(each).mean() for each in values.values()), torch.zeros(())))
    return torch.stack(sums)


@pytest.mark.parametrize(("most", "wide", "whole"), [(2**20, 1, False), (2**9, 1, True), (2**20, 2, False)])
def test_sums_and_gradients_are_those_of_a_plain_implementation(
    most: int, wide: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few and many numbers in a group's largest tensor, for wide images, and for windows larger than the boxes, as
    in an evaluation, where truth outside of the box does not count."""
    monkeypatch.setattr(segment, "MAX_GROUP_VALUES", most)
    criterion, outputs, batch = criterion_of(), random_outputs(wide=wide), random_batch(wide=wide)
    assert (batch.windows[:, 2:] <= batch.windows[:, :2]).any()  # a window without pixels
    expected = plain_sums(criterion, outputs, batch)
    if whole:
        every = np.tile(np.array([0, 0, MAP, MAP]), (len(batch.targets), 1))
        masks = target_masks(batch, np.arange(len(batch.targets)), (MAP, MAP)).numpy()
        for mask, (left, top, right, bottom) in zip(masks, batch.windows, strict=True):
            outside = np.ones_like(mask)
            outside[top:bottom, left:right] = False
            mask |= outside
        batch = mask_batch(batch.host_targets.tolist(), list(masks), images=3, windows=every)
    terms = criterion(outputs, batch)
    assert terms.counts[1].tolist() == [3, 3]
    assert terms.weights[1].tolist() == pytest.approx([BOX_GAIN] * 2)
    torch.testing.assert_close(terms.sums[1], expected)
    scale = torch.tensor([1.0, 0.4])  # levels may have different weights
    leaves = [*outputs[0], outputs[1]]
    computed = torch.autograd.grad((terms.sums[1] * scale).sum(), leaves)
    wanted = torch.autograd.grad((expected * scale).sum(), leaves)
    for one, other in zip(computed, wanted, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_arithmetic_is_in_fp32(precision: torch.dtype) -> None:
    low, batch = random_outputs(dtype=precision), random_batch()
    terms = criterion_of()(low, batch)
    expected = criterion_of()(([raw.float() for raw in low[0]], low[1].float()), batch)
    assert terms.sums.dtype == torch.float32
    assert torch.equal(terms.sums, expected.sums)
    terms.local_means().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (*low[0], low[1]))


@pytest.mark.parametrize(
    ("rows", "learns"),
    [
        ([], False),
        ([[1, 0, 0.5, 0.5, 0.4, 0.4]], True),  # in the second image
        ([[0, 0, 0.515, 0.515, 0.02, 0.02], [1, 1, 0.5, 0.515, 0.3, 0.02]], False),  # no pixel of a map
    ],
)
def test_images_without_masks(rows: list[list[float]], learns: bool) -> None:
    batch = mask_batch(rows, [np.ones((MAP, MAP), bool)] * len(rows), images=2)
    maps, prototypes = outputs = random_outputs(2)
    means = criterion_of()(outputs, batch).local_means()
    means.sum().backward()
    assert means.isfinite().all()
    assert all(raw.grad is not None and raw.grad.isfinite().all() for raw in maps)
    assert prototypes.grad is not None
    assert prototypes.grad.flatten(1).any(1).tolist() == [False, learns]
    assert (means[1] > 0) == learns


@pytest.mark.parametrize("settings", [{}, {"fl_gamma": 1.5, "cls_pw": 2.0, "label_smoothing": 0.1}])
def test_class_weights_are_duplicated_objects(settings: dict[str, float]) -> None:
    """In all terms, as many images and any scale of the weights: only their ratio matters."""
    batch, outputs = random_batch(), random_outputs()
    repeats = np.array([1, 3, 2])[batch.host_targets[:, 1].astype(int)]
    masks = target_masks(batch, np.arange(len(batch.targets)), (MAP, MAP)).numpy()
    rows = batch.host_targets.repeat(repeats, 0).tolist()
    duplicated = mask_batch(rows, list(masks.repeat(repeats, 0)), images=3)
    results = []
    for weights, given in (((), duplicated), ((1.0, 3.0, 2.0), batch), ((0.01, 0.03, 0.02), batch)):
        criterion = criterion_of(weights, **settings)
        means = criterion(outputs, given).local_means()
        results.append([means, *torch.autograd.grad(criterion.objective(means, 3), [*outputs[0], outputs[1]])])
    for expected, *ours in zip(*results, strict=True):
        for one in ours:
            torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-6)


def test_a_training_step_reaches_every_parameter() -> None:
    """Hints change no term."""
    task = tiny_task()
    model = task.build_model(tiny_segmenter(), SIDE).train()
    criterion: Any = task.criterion(model)
    assert criterion.hyp.box == pytest.approx(0.05 * 1.5)  # scaled to 2 levels
    batch = random_batch()
    inputs = task.inputs(replace(batch, images=torch.randint(0, 256, batch.images.shape, dtype=torch.uint8)))
    terms = criterion(model(inputs, *criterion.hints(batch)), batch)
    torch.testing.assert_close(terms.sums, criterion(model(inputs), batch).sums)
    losses = terms.local_means()
    assert (len(losses), bool((losses > 0).all())) == (len(task.loss_names_of(model)), True)
    criterion.objective(losses, 3).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert [name for name, one in gradients.items() if one is None or not one.isfinite().all() or not one.any()] == []


# Predictions

THRESHOLDS = Thresholds(0.3, 0.45, 20)
LIMITS = Thresholds(0.3, 0.45, 20, max_det_per_class=20)
SUPPRESSION = {"conf_thres": 0.3, "iou_thres": 0.45, "most": 20, "most_per_class": 20, "agnostic": False}


def images_of(count: int, height: int = SIDE, width: int = SIDE) -> Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(1))


def batch_of(count: int, side: int = SIDE) -> SegmentationBatch:
    return mask_batch([], [], [image_info(k, (side, side)) for k in range(count)])


def run(images: Tensor, *models: Any, thresholds: Thresholds = THRESHOLDS) -> list[SegmentationPrediction]:
    """Return the predictions of one or several models for square images."""
    postprocess = SegmentationPostprocess(CLASS_NAMES, thresholds)
    views = [view for model in models for view in postprocess.views(model, images, augment=False)]
    return postprocess(views, batch_of(len(images)))


def on_map(prediction: SegmentationPrediction) -> Tensor:
    """Return the masks at the prototypes' size, bool (k, h, w)."""
    return prediction.source.on_map(range(len(prediction.rows)))


def test_predictions_and_masks_are_those_of_yolov5(official: YoloModel, reference: dict[str, Any]) -> None:
    names = dict(enumerate(map(str, range(80))))
    postprocess = SegmentationPostprocess(names, Thresholds(0.25, 0.45, one_class=True))
    with torch.no_grad():
        (view,) = postprocess.views(official.eval(), reference["im_uint8"].float() / 255, augment=False)
    decoded = view.boxes.head.decode(view.boxes.outputs, view.boxes.num_extra)  # type: ignore[arg-type]
    torch.testing.assert_close(decoded[:1], reference["predictions"], rtol=0, atol=1e-3)
    torch.testing.assert_close(view.maps[:1], reference["prototypes"], rtol=0, atol=1e-3)
    for number, prediction in enumerate(postprocess([view], batch_of(4, 320))):
        detections, small, in_file = (
            reference[name][number] for name in ("detections", "masks_at_prototype_size", "masks_at_image_size")
        )
        torch.testing.assert_close(prediction.source.boxes, detections[:, :6], rtol=0, atol=1e-3)
        assert (on_map(prediction) == small).float().mean() > 0.999
        assert (torch.from_numpy(prediction.masks) == in_file).float().mean() > 0.999


@pytest.mark.parametrize("fewer", [False, True])
def test_every_detection_of_an_ensemble_has_the_prototypes_of_its_model(fewer: bool) -> None:
    """The models may have different numbers of prototypes."""
    images, thresholds = images_of(2), Thresholds(0.3, 1.0, 2000)
    postprocess = SegmentationPostprocess(CLASS_NAMES, thresholds)
    (first,), (second,) = (postprocess.views(tiny_model(seed), images, augment=False) for seed in (0, 1))
    assert not torch.equal(first.maps, second.maps)
    if fewer:
        boxes: Any = first.boxes
        boxes = boxes._replace(outputs=[raw[..., :-1] for raw in boxes.outputs], num_extra=MASKS - 1)
        first = SegmentationView(boxes, first.maps[:, :-1])
    alone = [postprocess([view], batch_of(2)) for view in (first, second)]
    for number, prediction in enumerate(postprocess([first, second], batch_of(2))):
        both = torch.cat([one[number].rows for one in alone])
        order = both[:, 4].argsort(descending=True, stable=True)
        assert torch.equal(prediction.rows, both[order])
        assert torch.equal(on_map(prediction), torch.cat([on_map(one[number]) for one in alone])[order])


@pytest.mark.parametrize("suppressed", [False, True])
def test_an_exported_file_has_the_instances_of_its_model(suppressed: bool) -> None:
    model, images = tiny_model(), images_of(3)
    decoding = DecodedSegmenter(model)
    exported = SuppressedSegmenter(decoding, LIMITS) if suppressed else decoding
    (view,) = SegmentationPostprocess(CLASS_NAMES, THRESHOLDS).views(exported, images, False)  # type: ignore[arg-type]
    assert view.outputs is None
    every = run(images, model)
    for prediction, expected in zip(run(images, exported), every, strict=True):
        torch.testing.assert_close(prediction.rows, expected.rows, rtol=1e-4, atol=1e-3)
        assert (on_map(prediction) == on_map(expected)).float().mean() > 0.999
        assert (prediction.masks == expected.masks).mean() > (0.95 if suppressed else 0.999)
    # Thresholds apply to the file's detections.
    common = int(np.bincount(every[0].classes).argmax())
    few, *_ = run(images, exported, thresholds=Thresholds(0.3, classes=(common,), max_det=2))
    (rows,) = np.nonzero(every[0].classes == common)
    assert len(rows) > 2
    torch.testing.assert_close(few.rows, every[0].rows[rows[:2]], rtol=1e-4, atol=1e-3)
    assert (on_map(few) == on_map(every[0])[rows[:2]]).all()


@pytest.mark.parametrize("suppressed", [False, True])
def test_files_of_all_formats(suppressed: bool, tmp_path: Path) -> None:
    """Without suppression for images of any size."""
    decoding = DecodedSegmenter(tiny_model()).eval()
    module = SuppressedSegmenter(decoding, LIMITS).eval() if suppressed else decoding
    metadata = ExportMetadata(
        **{"task": "segment", "names": CLASS_NAMES, "stride": 16, "model": tiny_segmenter(), "settings": {"imgsz": 64}},
        **{"imgsz": (64, 64), "batch": 1, "half": False, "device": "cpu", "dynamic": not suppressed},
        suppression=SUPPRESSION if suppressed else None,
    )
    job = ExportJob(module, metadata)
    names = [output.name for output in onnx.load_from_string(job.onnx).graph.output]
    assert names == (["output0", "count", "masks"] if suppressed else ["output0", "output1"])
    sizes = [(1, 64, 64)] if suppressed else [(1, 64, 64), (3, 32, 96)]
    for name in ("onnx",) if suppressed else ("torchscript", "onnx", "openvino"):  # a detector's are all suppressed
        exported = read_exported(write(job, name, tmp_path / "best"))
        for size in sizes:
            boxes, second, *masks = zip(exported(images_of(*size)), module(images_of(*size)), strict=True)
            for pair in (boxes, second):
                torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-3, check_dtype=False)
            assert all((one != other).float().mean() < 1e-3 for one, other in masks)  # a logit may be near 0


# The task


def test_the_task() -> None:
    names = ("yolov5n-seg.pt", "yolov5x-seg.pt", "yolov5n6-seg.pt", "yolov5n.pt")
    official = [bool(re.fullmatch(SegmentationTask.official_weights, name)) for name in names]
    assert official == [True, True, False, False]
    model = tiny_task().build_model({**tiny_segmenter(), "nc": 80}, 50)
    assert (model.names, model.yaml["nc"], model.head.nc, model.imgsz, model.stride) == (CLASS_NAMES, 3, 3, 64, 16)
    assert isinstance(tiny_task().criterion(Model()), UnavailableCriterion)  # of an exported file


@pytest.mark.parametrize(
    "row",
    [
        [[1, 3], 1, "Segment", ["nc", "anchors", 4, 8]],  # prototypes are not a quarter of the image
        [[2, 3], 1, "Detect", ["nc", "anchors"]],
        [[2, 3], 1, "DetectDFL", ["nc"]],
    ],
)
def test_refused_models_and_flags(row: list[Any]) -> None:
    with pytest.raises(UserError, match=r"mine\.yaml"):
        tiny_task().build_model({**tiny_segmenter(), "head": [row]}, 64, "mine.yaml")
    postprocess = SegmentationPostprocess(CLASS_NAMES, THRESHOLDS)
    with pytest.raises(UserError, match="--augment"):
        postprocess.views(tiny_model(), images_of(1), augment=True)


def test_draw_batch() -> None:
    """The mask covers the upper left quarter of the box. A grid has 16 images: targets of others are not drawn."""
    mask = np.zeros((MAP, MAP), bool)
    mask[4:8, 4:8] = True
    picture = tiny_task().draw_batch(mask_batch([[0, 1, 0.5, 0.5, 0.5, 0.5]], [mask]))
    assert (picture.dtype, picture.shape) == (np.uint8, (SIDE, SIDE, 3))
    assert picture[30, 30].tolist() == [int(51 * 0.6 + value * 0.4) for value in COLOURS[1]]
    assert (picture[40, 40] == 51).all()
    assert (picture[40, 16] != 51).any()  # the box's left edge
    assert (tiny_task().draw_batch(mask_batch([[16, 1, 0.5, 0.5, 0.5, 0.5]], [mask], images=17)) == 51).all()
