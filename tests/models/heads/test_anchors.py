"""YOLOv5's head: assignment, the loss (YOLOv5's own numbers, and terms by hand), decoding and transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.heads.anchors import Detect, DetectionCriterion, match, near_cells
from models.heads.contract import HeadView, xywh_to_xyxy
from models.loading import transfer
from models.weights import read_weights
from models.yolo import YoloModel, build_model
from tests.making import grey_batch, tiny_detector
from tests.models.reference import agrees_with_yolov5
from utils.batch import Batch
from utils.config.hyperparameters import AnchorKeys, keys_of

THREE = math.log(3)  # the logit of 3/4; of 1/4 with a minus
OLD = {0: "person", 1: "car", 2: "Dog", 3: "bowl"}
NEW = {0: "dog", 1: "cell", 2: "person"}


# Assignment


def match_target(
    centre: tuple[float, float], size: tuple[float, float] = (1, 1), threshold: float = 4.0
) -> tuple[set[tuple[int, int]], list[int]]:
    """Match a target in cells, of image 3, on a map 6 cells wide and 4 high with anchors 1 x 1 and 8 x 8.

    Returns the matched cells, each by its row and column, and the anchors.
    """
    grid = torch.tensor([6, 4])
    row = torch.cat((torch.tensor([3, 1]), torch.tensor(centre) / grid, torch.tensor(size) / grid))
    cells = near_cells(((4, 6),), row[None])
    matched = match(cells, torch.tensor([[[1.0, 1], [8, 8]]]), threshold)[0]
    assert matched.shape == (5, 2)
    images, rows, columns = (part.tolist() for part in cells.indices[0])
    # Cells that do not match are on the map too.
    assert (set(images), set(rows) <= set(range(4)), set(columns) <= set(range(6))) == ({3}, True, True)
    which, anchors = (part.tolist() for part in matched.nonzero(as_tuple=True))
    return {(rows[k], columns[k]) for k in which}, anchors


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
    cells, anchors = match_target(centre)
    assert cells == {(int(centre[1]), int(centre[0])), *neighbours}
    assert set(anchors) == {0}  # the second anchor is 8 times as large


def test_the_far_edge_belongs_to_the_last_cell() -> None:
    assert match_target((6, 4))[0] == {(3, 5)}


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
    assert match_target((2.5, 1.5), size)[1] == anchors


# The loss


def zeros(batch: int, anchors: int, height: int, width: int, classes: int) -> Tensor:
    """Return a raw map whose predictions are the anchors in the middle of their cells, with scores of 0.5."""
    return torch.zeros(batch, anchors, height, width, 5 + classes, requires_grad=True)


def make_head(anchors: Tensor, strides: list[int], classes: int) -> Detect:
    """Return a head with anchors (levels, anchors, 2), in cells."""
    head = Detect(classes, anchors.shape[1], strides)
    head.anchors.copy_(anchors)
    head.stride.copy_(torch.tensor(strides))
    return head


def criterion_of(
    classes: int, anchors: Tensor, label_smoothing: float = 0.0, weights: Sequence[float] = (), **gains: float
) -> DetectionCriterion:
    """Return the loss of a head with anchors (levels, anchors, 2), in cells."""
    head = make_head(anchors, [1] * len(anchors), classes).to(anchors.dtype)
    return DetectionCriterion(AnchorKeys(**gains), head, label_smoothing, weights)


def batch_of(targets: Tensor) -> Batch:
    """Return a batch with targets (n, 6): image, class, normalised xywh."""
    return grey_batch(targets=targets)


@pytest.mark.parametrize("mode", ["eval", "train"])  # of BatchNorm
def test_loss_and_gradients_are_those_of_yolov5(mode: str, shared: Path) -> None:
    reference = torch.load(shared / "reference" / "yolov5n_loss.pt", weights_only=True)
    model = build_model("yolov5n.yaml")
    loaded, total, _ = transfer(model, read_weights(shared / "weights" / "yolov5n.pt").state)
    assert loaded == total
    model.train(mode == "train")
    gains = {name: reference["hyp"][name] for name in keys_of(AnchorKeys) & {*reference["hyp"]}}
    criterion = DetectionCriterion(AnchorKeys(**gains), model.head, reference["hyp"].get("label_smoothing", 0.0))
    images = reference["im_uint8"].float() / 255
    assert images.is_contiguous()
    terms = criterion(model(images), batch_of(reference["targets"]))
    agrees_with_yolov5(model, criterion, terms, len(images), reference[mode], "items_box_obj_cls")


def objectness_targets(raw: Tensor, targets: Tensor, anchors: Tensor) -> Tensor:
    """Return the objectness target of each cell, (b, anchors, h, w), from the gradient, which is sigmoid - target."""
    raw = raw.detach().requires_grad_()
    criterion_of(raw.shape[-1] - 5, anchors)([raw], batch_of(targets)).sums[1].sum().backward()
    assert raw.grad is not None
    return raw.detach()[..., 4].sigmoid() - raw.grad[..., 4]


def test_the_last_target_counts_if_several_share_a_cell() -> None:
    raw = zeros(1, 1, 4, 4, 2)
    perfect, half = [0, 0, 1.5, 1.5, 2, 2], [0, 1, 1.5, 1.5, 2, 1]  # the prediction there is 2 x 2
    anchors = torch.tensor([[[2.0, 2]]])
    scale = torch.tensor([1, 1, 4, 4, 4, 4])
    first = objectness_targets(raw, torch.tensor([perfect, half]) / scale, anchors)
    second = objectness_targets(raw, torch.tensor([half, perfect]) / scale, anchors)
    # CIoU of 2 x 1 in 2 x 2: 1/2 - alpha v with v = 4 / pi^2 (atan 2 - atan 1)^2 and alpha = v / (v + 1/2)
    shape = 4 / math.pi**2 * (math.atan(2) - math.atan(1)) ** 2
    assert first[0, 0, 1, 1].item() == pytest.approx(0.5 - shape**2 / (shape + 0.5), abs=1e-5)
    assert second[0, 0, 1, 1].item() == pytest.approx(1, abs=1e-5)
    assert first.count_nonzero() == second.count_nonzero() == 1


def test_the_target_of_a_shared_cell_does_not_depend_on_the_rest_of_the_batch() -> None:
    raw = torch.randn(5, 2, 4, 4, 7)
    anchors = torch.tensor([[[1.0, 1], [2, 2]]])
    image = torch.randint(5, (120, 1))  # some 24 targets for each image's 16 cells
    targets = torch.cat((image.float(), torch.randint(2, (120, 1)), torch.rand(120, 2), torch.rand(120, 2) / 2), 1)
    targets[:, 1] = targets[:, 1].round()
    whole = objectness_targets(raw, targets, anchors)
    for k in range(5):
        of_image = targets[image[:, 0] == k]
        of_image[:, 0] = 0
        assert torch.equal(objectness_targets(raw[k : k + 1], of_image, anchors)[0], whole[k])
    grouped = targets[image[:, 0].argsort(stable=True)]
    assert torch.equal(objectness_targets(raw, grouped, anchors), whole)


def random_case() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return three levels of a batch of 4 images, 20 targets, and anchors."""
    generator = torch.Generator().manual_seed(0)
    outputs = [torch.randn(4, 2, side, side, 8, generator=generator, requires_grad=True) for side in (8, 4, 2)]
    image, label = torch.arange(20) % 4, torch.arange(20) % 3
    centre, size = torch.rand(2, 20, 2, generator=generator)
    targets = torch.cat((image[:, None], label[:, None], centre, size * 0.5 + 0.05), 1)
    return outputs, targets, torch.tensor([[[1.0, 1], [2, 2]], [[1, 2], [2, 1]], [[0.5, 0.5], [1, 1]]])


def test_halves_of_a_batch_add_up_to_the_whole() -> None:
    outputs, targets, anchors = random_case()
    criterion = criterion_of(3, anchors, label_smoothing=0.1)
    whole = criterion(outputs, batch_of(targets))
    halves = []
    for start in (0, 2):
        half = targets[(targets[:, 0] >= start) & (targets[:, 0] < start + 2)]
        half[:, 0] -= start
        halves.append(criterion([raw[start : start + 2] for raw in outputs], batch_of(half)))
    assert (whole.counts[0] > 0).all()
    assert not torch.equal(halves[0].counts[0], halves[1].counts[0])  # so a mean of means would differ
    assert torch.equal(halves[0].counts + halves[1].counts, whole.counts)
    torch.testing.assert_close(halves[0].sums + halves[1].sums, whole.sums)
    shares = halves[0].share_of_mean(whole.counts) + halves[1].share_of_mean(whole.counts)
    expected = whole.local_means()
    torch.testing.assert_close(shares, expected)
    for of_halves, of_whole in zip(
        torch.autograd.grad(shares.sum(), outputs), torch.autograd.grad(expected.sum(), outputs), strict=True
    ):
        torch.testing.assert_close(of_halves, of_whole)


def test_each_level_has_its_own_mean() -> None:
    """By hand: two perfect boxes and one of half the height on the finest level, another such on the coarsest."""
    sides, anchors = (4, 2, 1), torch.tensor([[[2.0, 2]], [[50, 50]], [[2, 2]]])
    outputs = [zeros(1, 1, side, side, 2) for side in sides]
    targets = torch.tensor(
        [
            [0, 0, 0.125, 0.125, 0.5, 0.5],  # in cells of the finest: 0.5, 0.5, 2, 2
            [0, 0, 0.375, 0.375, 0.5, 0.5],
            [0, 0, 0.875, 0.875, 0.5, 0.25],
        ]
    )
    targets = torch.cat((targets, torch.tensor([[0, 1, 0.5, 0.5, 2.0, 1.0]])))  # in cells of the coarsest: .5, .5, 2, 1
    terms = criterion_of(2, anchors, box=0.3, obj=2, cls=0.5, anchor_t=1.5)(outputs, batch_of(targets))
    # On the finest the third target's height is half the anchor's: a factor of 2, too much for 1.5.
    assert terms.counts.tolist() == [[2, 0, 0], [16, 4, 1], [4, 0, 0]]
    terms = criterion_of(2, anchors, box=0.3, obj=2, cls=0.5, anchor_t=2.5)(outputs, batch_of(targets))
    assert terms.counts.tolist() == [[3, 0, 1], [16, 4, 1], [6, 0, 2]]
    shape = 4 / math.pi**2 * (math.atan(2) - math.atan(1)) ** 2
    missing = 0.5 + shape**2 / (shape + 0.5)  # 1 - CIoU
    box, obj, cls = terms.local_means().tolist()
    assert box == pytest.approx(0.3 * (missing / 3 + missing), rel=1e-5)
    assert obj == pytest.approx(2 * (4 + 1 + 0.4) * math.log(2), rel=1e-5)  # at a logit of 0 any target costs log 2
    assert cls == pytest.approx(0.5 * (math.log(2) + math.log(2)), rel=1e-5)


def cost(x: float, t: float, positive_weight: float = 1.0, gamma: float = 0.0) -> float:
    """Return the cross-entropy of a logit with target t; with `gamma` the focal loss, whose factors are mixed by t."""
    p = 1 / (1 + math.exp(-x))
    entropy = -positive_weight * t * math.log(p) - (1 - t) * math.log(1 - p)
    return entropy * (t * 0.25 + (1 - t) * 0.75) * (t * (1 - p) + (1 - t) * p) ** gamma if gamma else entropy


@pytest.mark.parametrize(
    "settings",
    [{}, {"label_smoothing": 0.1}, {"cls_pw": 3.0, "obj_pw": 2.0}, {"fl_gamma": 2.0, "label_smoothing": 0.1}],
)
def test_class_and_objectness_terms(settings: dict[str, float]) -> None:
    """One target, of class 0, which the cell of row 1 and column 1 predicts exactly; objectness is -1 everywhere."""
    raw, logits = torch.zeros(1, 1, 2, 2, 8), (2.0, -1.0, 0.5)
    raw[..., 4] = -1
    raw[0, 0, 1, 1, 5:] = torch.tensor(logits)
    targets = torch.tensor([[0, 0, 0.75, 0.75, 1, 1.0]])
    terms = criterion_of(3, torch.tensor([[[2.0, 2]]]), **settings)([raw], batch_of(targets))
    off, gamma = settings.get("label_smoothing", 0.0) / 2, settings.get("fl_gamma", 0.0)
    classes = [cost(x, t, settings.get("cls_pw", 1.0), gamma) for x, t in zip(logits, (1 - off, off, off), strict=True)]
    obj = 3 * cost(-1, 0, 1, gamma) + cost(-1, 1, settings.get("obj_pw", 1.0), gamma)
    assert terms.sums[1:, 0].tolist() == pytest.approx([obj, sum(classes)], rel=1e-5)
    assert terms.counts[1:, 0].tolist() == [4, 3]
    assert terms.local_means()[1].item() == pytest.approx(4 * obj / 4, rel=1e-5)  # 4: weight of the finest level


@pytest.mark.parametrize(
    ("levels", "balance"), [(2, (4.0, 1.0)), (3, (4.0, 1.0, 0.4)), (4, (4.0, 1.0, 0.25, 0.06)), (5, None)]
)
def test_balance_of_the_levels(levels: int, balance: tuple[float, ...] | None) -> None:
    outputs = [zeros(1, 1, 2, 2, 2) for _ in range(levels)]
    criterion = criterion_of(2, torch.ones(levels, 1, 2), box=0.1, obj=0.5, cls=0.2)
    terms = criterion(outputs, batch_of(torch.zeros(0, 6)))
    expected = torch.tensor(balance or (4.0, 1.0, 0.25, 0.06, 0.02))
    torch.testing.assert_close(
        terms.weights, torch.stack([0.1 * torch.ones(levels), 0.5 * expected, torch.full((levels,), 0.2)])
    )


def test_the_anchors_are_those_of_the_model_when_it_is_called() -> None:
    """Loading a state changes the anchors in place."""
    model = build_model(tiny_detector())
    criterion = DetectionCriterion(AnchorKeys(anchor_t=1.5), model.head)
    given, images = batch_of(torch.tensor([[0, 0, 0.5, 0.5, 4 / 64, 4 / 64]])), torch.rand(1, 3, 64, 64)
    before = criterion(model(images), given).counts[0].tolist()
    model.head.anchors.fill_(100)
    assert before[0] > 0
    assert criterion(model(images), given).counts[0].tolist() == [0, 0]


# Decoding


def corners(decoded: Tensor) -> Tensor:
    """Convert decoded boxes (b, n, 5 + classes) from xywh to xyxy."""
    return torch.cat((xywh_to_xyxy(decoded[..., :4]), decoded[..., 4:]), 2)


def test_decode_one_cell() -> None:
    raw = torch.zeros(2, 2, 3, 4, 7)  # 3 rows, 4 columns
    raw[1, 1, 2, 3] = torch.tensor([THREE, -THREE, THREE, -THREE, -THREE, THREE, 0])
    boxes = corners(make_head(torch.tensor([[[1, 1], [2, 5]]]), [8], 2).decode([raw]))
    assert boxes.shape == (2, 2 * 3 * 4, 7)
    # x (1.5 - 0.5 + 3) 8, y (0.5 - 0.5 + 2) 8, w 1.5^2 2 x 8, h 0.5^2 5 x 8: around 32, 16 by 36, 10
    expected = torch.tensor([14, 11, 50, 21, 0.25, 0.75, 0.5])
    torch.testing.assert_close(boxes[1, 1 * 12 + 2 * 4 + 3], expected)
    torch.testing.assert_close(boxes[0, 12 + 11], torch.tensor([20, 0, 36, 40, 0.5, 0.5, 0.5]))
    torch.testing.assert_close(boxes[0, 0], torch.tensor([0, 0, 8, 8, 0.5, 0.5, 0.5]))


def test_candidates_are_the_decoded_boxes_level_by_level() -> None:
    outputs = [torch.zeros(1, 1, 2, 2, 7), torch.zeros(1, 1, 1, 1, 7)]  # the last output belongs to a mask
    outputs[0][..., 6] = 3
    head = make_head(torch.tensor([[[1, 2]], [[3, 1]]]), [8, 16], 1)
    boxes = torch.tensor([[0, -4, 8, 12], [8, -4, 16, 12], [0, 4, 8, 20], [8, 4, 16, 20], [-16, 0, 32, 16]])
    decoded = head.decode(outputs, 1)
    torch.testing.assert_close(corners(decoded)[0, :, :4], boxes.float())
    view = HeadView(head, outputs, 1)
    for given, expected in ((view, decoded[0]), (view._replace(skipped_level=0), decoded[0, 4:])):
        (candidates,) = given.candidates(0.4)
        torch.testing.assert_close(torch.cat((candidates.scores, candidates.extra), 1), expected)
    assert [len(one.scores) for one in view.candidates(0.6)] == [0]


# Transfer from a file for other classes


def model_of(names: dict[int, str], yaml: str = "yolov5n.yaml", seed: int = 0) -> YoloModel:
    torch.manual_seed(seed)
    return build_model(yaml, nc=len(names))


def rows(model: YoloModel, name: str) -> Tensor:
    """Return a part of the finest level's convolution as (anchors, rows, ...)."""
    tensor = model.state_dict()[f"model.24.m.0.{name}"].clone()
    return tensor.view(3, -1, *tensor.shape[1:])


@pytest.mark.parametrize("yaml", ["yolov5n.yaml", "yolov5n-seg.yaml"])
def test_boxes_objectness_and_classes_of_the_same_name(yaml: str) -> None:
    old, new = model_of(OLD, yaml), model_of(NEW, yaml, seed=1)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    fresh = {name: rows(new, name) for name in ("weight", "bias")}
    how = new.head.keep("model.24", old.state_dict(), OLD, NEW)
    assert how.endswith(" and classes of the same names kept, 1 class output new")
    for name, unchanged in fresh.items():
        of_old, of_new = rows(old, name), rows(new, name)
        assert torch.equal(of_new[:, :5], of_old[:, :5])
        assert torch.equal(of_new[:, 5], of_old[:, 5 + 2])
        assert torch.equal(of_new[:, 6], unchanged[:, 6])  # a class that the file lacks
        assert torch.equal(of_new[:, 7], of_old[:, 5])
        assert torch.equal(of_new[:, 8:], of_old[:, 9:])  # masks
    others = [name for name in before if not name.startswith("model.24.m.")]
    assert all(torch.equal(new.state_dict()[name], before[name]) for name in others)
    detector, segmenter = model_of(OLD), model_of(NEW, "yolov5n-seg.yaml", seed=1)
    masks = rows(segmenter, "weight")[:, 8:]
    assert "1 class output new" in segmenter.head.keep("model.24", detector.state_dict(), OLD, NEW)
    assert torch.equal(rows(segmenter, "weight")[:, 8:], masks)
    fresh = model_of(NEW, yaml, seed=2)
    assert "3 class outputs new" in fresh.head.keep("model.24", old.state_dict(), {}, NEW)  # a file without names
    assert torch.equal(rows(fresh, "bias")[:, :5], rows(old, "bias")[:, :5])


def test_a_head_for_other_anchors_or_of_other_widths_is_not_taken() -> None:
    old, new = model_of(OLD), model_of(NEW, seed=1)
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    broken = {f"model.24.m.{level}.bias": torch.zeros(15) for level in (1, 2)}  # fewer rows than classes
    for state in (
        {**old.state_dict(), "model.24.anchors": old.head.anchors * 1.1},
        {},
        model_of(OLD, "yolov5s.yaml").state_dict(),
        {**old.state_dict(), **broken, "model.24.m.0.bias": torch.zeros(16)},
    ):
        assert "because" in new.head.keep("model.24", state, OLD, NEW)
    assert all(torch.equal(tensor, before[name]) for name, tensor in new.state_dict().items())
