"""The mask term: YOLOv5's own numbers, a plain implementation, and the cases without anything to learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.heads.anchors import LossSettings, Segment, match, near_cells
from models.loading import transfer
from models.tasks import segment as mask_loss
from models.tasks.contract import LossTerms
from models.tasks.segment import SegmentationCriterion
from models.weights import read_weights
from models.yolo import build_model
from tests.models.reference import agrees_with_yolov5
from tests.models.tasks.segmentation.batches import MAP, SIDE, mask_batch, tiny_segmenter
from utils.batch import SegmentationBatch

CLASSES, MASKS = 3, 4
SIZES = ((8, 8), (4, 4))  # of the levels' maps
BOX_GAIN = 0.3


@pytest.mark.parametrize("mode", ["eval", "train"])  # of BatchNorm
def test_loss_and_gradients_are_those_of_yolov5(mode: str, shared: Path) -> None:
    reference = torch.load(shared / "reference" / "yolov5n_seg.pt", weights_only=True)
    model = build_model("yolov5n-seg.yaml")
    loaded, total, _ = transfer(model, read_weights(shared / "weights" / "yolov5n-seg-coco128.pt").state)
    assert loaded == total
    model.train(mode == "train")
    gains = {name: reference["hyp"][name] for name in vars(LossSettings()) if name in reference["hyp"]}
    assert isinstance(model.head, Segment)
    criterion = SegmentationCriterion(LossSettings(**gains), model.head)
    targets, index_maps = reference["targets"].numpy(), reference["masks_overlap"].numpy()
    image = targets[:, 0].astype(int)
    number = [list(image[:k]).count(one) + 1 for k, one in enumerate(image)]  # in its image's map
    batch = mask_batch(targets, [index_maps[one] == k for one, k in zip(image, number, strict=True)])

    images = reference["im_uint8"].float() / 255
    terms = criterion(model(images), batch)
    agrees_with_yolov5(model, criterion, terms, len(images), reference[mode], "items_box_seg_obj_cls")


# Against a plain implementation


def criterion_of() -> SegmentationCriterion:
    head = build_model(tiny_segmenter()).head
    assert isinstance(head, Segment)
    return SegmentationCriterion(LossSettings(box=BOX_GAIN), head)


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
    matched = match(cells, build_model(tiny_segmenter()).head.anchors, criterion.settings.anchor_t)
    ends = ((batch.windows[:, 2:] - batch.windows[:, :2]).prod(1)).cumsum()
    sums = []
    for level, raw in enumerate(maps):
        values: dict[int, list[Tensor]] = {}
        for cell, anchor in matched[level].nonzero().tolist():
            target = cell % len(batch.targets)
            image, row, column = cells.indices[level][:, cell].tolist()
            _, _, x, y, w, h = batch.targets[target].tolist()
            left, top, right, bottom = batch.windows[target]
            truth = torch.zeros(len(rows), len(columns))
            pixels = batch.mask_pixels[ends[target] - (right - left) * (bottom - top) : ends[target]]
            truth[top:bottom, left:right] = pixels.view(bottom - top, right - left).float()
            logits = (raw[image, anchor, row, column, 5 + CLASSES :, None, None] * prototypes[image]).sum(0)
            loss = functional.binary_cross_entropy_with_logits(logits, truth.to(logits), reduction="none")
            in_x = (columns >= (x - w / 2) * len(columns)) & (columns < (x + w / 2) * len(columns))
            in_y = (rows >= (y - h / 2) * len(rows)) & (rows < (y + h / 2) * len(rows))
            values.setdefault(image, []).append((loss * in_y[:, None] * in_x).mean() / (w * h))
        sums.append(sum((torch.stack(each).mean() for each in values.values()), torch.zeros(())))
    return torch.stack(sums)


@pytest.mark.parametrize(("most", "wide"), [(2**20, 1), (2**9, 1), (2**20, 2)])
def test_sums_and_gradients_are_those_of_a_plain_implementation(
    most: int, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few and many numbers in a group's largest tensor, and for images that are wider than high."""
    monkeypatch.setattr(mask_loss, "MAX_GROUP_VALUES", most)
    criterion, outputs, batch = criterion_of(), random_outputs(wide=wide), random_batch(wide=wide)
    assert (batch.windows[:, 2:] <= batch.windows[:, :2]).any()  # a window without pixels
    terms, expected = criterion(outputs, batch), plain_sums(criterion, outputs, batch)
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


def test_truth_outside_of_the_box_does_not_count() -> None:
    """In an evaluation a window contains the whole mask, which may exceed the box."""
    criterion, outputs, batch = criterion_of(), random_outputs(), random_batch()
    ends = ((batch.windows[:, 2:] - batch.windows[:, :2]).prod(1)).cumsum()
    masks = []
    for (left, top, right, bottom), end in zip(batch.windows.tolist(), ends, strict=True):
        mask = np.ones((MAP, MAP), bool)
        pixels = batch.mask_pixels[end - (right - left) * (bottom - top) : end].numpy()
        mask[top:bottom, left:right] = pixels.reshape(bottom - top, right - left)
        masks.append(mask)
    whole = np.tile(np.array([0, 0, MAP, MAP]), (len(masks), 1))
    larger = mask_batch(batch.host_targets.tolist(), masks, images=3, windows=whole)
    torch.testing.assert_close(criterion(outputs, larger).sums, criterion(outputs, batch).sums)


def test_hints_change_no_term() -> None:
    model = build_model(tiny_segmenter())
    assert isinstance(model.head, Segment)
    criterion, batch = SegmentationCriterion(LossSettings(), model.head), random_batch()
    images = torch.rand(3, 3, SIDE, SIDE)
    with_hints, without = criterion(model(images, *criterion.hints(batch)), batch), criterion(model(images), batch)
    torch.testing.assert_close(with_hints.sums, without.sums)


def halves(outputs: tuple[list[Tensor], Tensor], batch: SegmentationBatch) -> list[LossTerms]:
    """Return the terms of the first image and those of the others."""
    terms = []
    sides = batch.windows[:, 2:] - batch.windows[:, :2]
    image_of_pixel = np.repeat(batch.host_targets[:, 0], sides.prod(1))
    for part in (slice(0, 1), slice(1, 3)):
        chosen = (batch.host_targets[:, 0] >= part.start) & (batch.host_targets[:, 0] < part.stop)
        rows = batch.host_targets[chosen] - np.array([part.start, 0, 0, 0, 0, 0], np.float32)
        pixels = batch.mask_pixels[(image_of_pixel >= part.start) & (image_of_pixel < part.stop)]
        images = batch.images[part]
        one = SegmentationBatch(images, torch.from_numpy(rows), (), pixels, batch.windows[chosen], rows)
        terms.append(criterion_of()(([raw[part] for raw in outputs[0]], outputs[1][part]), one))
    return terms


def test_parts_of_a_batch_add_up_to_the_whole() -> None:
    outputs, batch = random_outputs(), random_batch()
    whole, (first, second) = criterion_of()(outputs, batch), halves(outputs, batch)
    assert torch.equal(first.counts + second.counts, whole.counts)
    torch.testing.assert_close(first.sums + second.sums, whole.sums)


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_arithmetic_is_in_fp32(precision: torch.dtype) -> None:
    low, batch = random_outputs(dtype=precision), random_batch()
    terms = criterion_of()(low, batch)
    expected = criterion_of()(([raw.float() for raw in low[0]], low[1].float()), batch)
    assert terms.sums.dtype == torch.float32
    assert torch.equal(terms.sums, expected.sums)
    terms.local_means().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (*low[0], low[1]))


# Nothing to learn


@pytest.mark.parametrize("case", ["no targets", "none in one image", "no pixels"])
def test_without_masks(case: str) -> None:
    rows = {
        "no targets": [],
        "none in one image": [[1, 0, 0.5, 0.5, 0.4, 0.4]],
        "no pixels": [[0, 0, 0.515, 0.515, 0.02, 0.02], [1, 1, 0.5, 0.515, 0.3, 0.02]],
    }[case]
    batch = mask_batch(rows, [np.ones((MAP, MAP), bool)] * len(rows), images=2)
    outputs = random_outputs(2)
    terms = criterion_of()(outputs, batch)
    means = terms.local_means()
    means.sum().backward()
    gradient = outputs[1].grad
    assert gradient is not None
    assert all(raw.grad is not None and raw.grad.isfinite().all() for raw in outputs[0])
    assert means.isfinite().all()
    assert not gradient[0].any()
    assert bool(gradient[1].any()) == (case == "none in one image")
    assert (means[1] > 0) == (case == "none in one image")


def test_class_weights_are_duplicated_objects() -> None:
    """The mean over the masks of an image too."""
    batch, outputs = random_batch(), random_outputs()
    repeats = np.array([1, 3, 2])[batch.host_targets[:, 1].astype(int)]
    order = np.repeat(np.arange(len(repeats)), repeats)
    sizes = (batch.windows[:, 2:] - batch.windows[:, :2]).prod(1)
    pixels = batch.mask_pixels.split(sizes.tolist())
    duplicated = SegmentationBatch(
        batch.images,
        batch.targets[torch.from_numpy(order)],
        batch.infos,
        torch.cat([pixels[k] for k in order]),
        batch.windows[order],
        batch.host_targets[order],
    )
    plain = criterion_of()
    weighted = SegmentationCriterion(plain.settings, plain._head, (1.0, 3.0, 2.0))
    tensors = [*outputs[0], outputs[1]]
    results = []
    for criterion, given in ((weighted, batch), (plain, duplicated)):
        terms = criterion(outputs, given)
        means = terms.local_means()
        results.append([means, *torch.autograd.grad(criterion.objective(means, 3), tensors)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
