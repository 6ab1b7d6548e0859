"""The anchor-free head: decoding by hand, and the loss against numbers of plain loops and of the MIT implementation."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.heads import dfl
from models.heads.contract import HeadView, xywh_to_xyxy
from models.heads.dfl import DetectDFL, DFLCriterion, DFLLevel, assign, cell_geometry
from models.tasks.detect import DetectionTask
from models.yolo import YoloModel, build_model
from utils.batch import Batch
from utils.config.hyperparameters import AlignmentKeys, Hyperparameters

STRIDES = (4, 8)


# Decoding


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


def make_head(*strides: int, classes: int = 2) -> DetectDFL:
    head = DetectDFL(classes, channels=(8,) * len(strides))
    head.set_strides(strides)
    return head


def test_a_cell_by_hand() -> None:
    """Around the centre of row 1, column 2, (20, 12): 1 and 3 strides to the sides, 2 up and none down."""
    decoded = make_head(8).decode([point(level(3, 4), 1, 2, (1, 2, 3, 0), 0.0)])
    assert decoded.shape == (1, 12, 6)
    torch.testing.assert_close(decoded[0, 4 + 2], torch.tensor([28.0, 4, 32, 16, 0, 0.5]))
    torch.testing.assert_close(decoded[0, 0, :4], torch.tensor([4.0, 4, 120, 120]))  # equal bins: 7.5 strides


@torch.no_grad()
def test_candidates_are_the_decoded_boxes_above_the_threshold() -> None:
    levels, head = level_outputs(0), make_head(*STRIDES, classes=3)
    decoded, view = head.decode(levels), HeadView(head, levels)
    finest = levels[0].sides[0, 0].numel()
    for given, boxes in ((view, decoded), (view._replace(skipped_level=0), decoded[:, finest:])):
        for candidates, image in zip(given.candidates(0.3), boxes, strict=True):
            expected = DetectDFL.scored(image[image[:, 4:].amax(1) > 0.3])
            assert 0 < len(expected) < len(image)
            torch.testing.assert_close(candidates.scores, expected, rtol=1e-5, atol=1e-4)
            assert candidates.extra.shape == (len(expected), 0)


# The loss


def level_outputs(seed: int, batch: int = 2, height: int = 48, width: int = 64, classes: int = 3) -> list[DFLLevel]:
    """Return random raw outputs, whose boxes are a few strides wide."""
    generator = torch.Generator().manual_seed(seed)
    levels = []
    for stride in STRIDES:
        rows, columns = height // stride, width // stride
        sides = torch.randn(batch, 4, 16, rows, columns, generator=generator) - torch.arange(16).view(16, 1, 1) / 3
        scores = torch.randn(batch, classes, rows, columns, generator=generator) - 2
        levels.append(DFLLevel(sides.flatten(1, 2).requires_grad_(), scores.requires_grad_()))
    return levels


def random_targets(seed: int, count: int, batch: int = 2, classes: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(batch, (count, 1), generator=generator).float()
    label = torch.randint(classes, (count, 1), generator=generator).float()
    sides = torch.rand(count, 2, generator=generator) * 0.5 + 0.01
    centre = sides / 2 + torch.rand(count, 2, generator=generator) * (1 - sides)
    return torch.cat((image, label, centre, sides), 1)


def batch_of(targets: Tensor, images: int = 2, height: int = 48, width: int = 64) -> Batch:
    return Batch(torch.zeros(images, 3, height, width, dtype=torch.uint8), targets, ())


def criterion(class_weights: Sequence[float] = (), **gains: float) -> DFLCriterion:
    return DFLCriterion(AlignmentKeys(**gains), make_head(*STRIDES, classes=3), class_weights)


# Sums of the terms, and the sum of the class targets, as a loop over images, targets and cells in float64 made them.
LOSSES = [
    (1, (0.52806, 258.98596, 2.74665, 1.40728), (0.47596, 269.45857, 2.55115, 1.01511)),
    (7, (2.8286, 267.63182, 13.6149, 5.82463), (3.33391, 279.15279, 15.55208, 6.63131)),
    (40, (11.61481, 294.66918, 50.5303, 21.59392), (11.67492, 305.82248, 50.01761, 22.24843)),
]  # targets, of which the last have many cells in common; the main head's, the auxiliary head's
REPEATED = [
    ((3, 1, 2), (5.49059, 300.85705, 25.95712, 11.16463)),
    ((1, 4, 1), (6.1533, 314.32162, 31.61927, 13.56824)),
]  # class weights of 7 targets, whose cells they repeat


@pytest.mark.parametrize(("count", "expected", "of_auxiliary"), LOSSES)
def test_sums_and_counts(count: int, expected: tuple[float, ...], of_auxiliary: tuple[float, ...]) -> None:
    gains = {"tal_box": 2, "tal_cls": 3, "tal_dfl": 5, "tal_aux": 0.5}
    terms = criterion(**gains)((level_outputs(1), level_outputs(2)), batch_of(random_targets(count, count)))
    for part, (*sums, weights) in enumerate((expected, of_auxiliary)):
        assert terms.sums[:, part].tolist() == pytest.approx(sums, rel=2e-5)
        assert terms.counts[:, part].tolist() == pytest.approx([weights] * 3, rel=2e-5)
    assert terms.weights.tolist() == [[2, 1], [3, 1.5], [5, 2.5]]


@pytest.mark.parametrize(("repeats", "expected"), REPEATED)
def test_class_weights_repeat_the_cells_of_objects(repeats: tuple[int, ...], expected: tuple[float, ...]) -> None:
    """With one head, as in evaluation."""
    terms = criterion(repeats)(level_outputs(1), batch_of(random_targets(7, 7)))
    assert [*terms.sums[:, 0].tolist(), terms.counts[0, 0].item()] == pytest.approx(expected, rel=2e-5)
    assert terms.weights.tolist() == [[7.5], [0.5], [1.5]]


def test_the_objective_is_yolov9s() -> None:
    """The sum of the terms, each divided by the sum of the class targets but at least by 1, times the batch size."""
    loss = criterion()
    terms = loss(level_outputs(1), batch_of(random_targets(0, 5)))
    few = terms.share_of_mean(terms.counts / 100)
    torch.testing.assert_close(few, terms.sums[:, 0] * torch.tensor([7.5, 0.5, 1.5]))
    assert loss.objective(few, 4).item() == pytest.approx(4 * few.sum().item())


@pytest.mark.parametrize("class_weights", [(), (3.0, 0.5, 1.0)])
def test_terms_add_up_over_processes(class_weights: tuple[float, ...]) -> None:
    """Each has a part of the images, one of them no boxes."""
    levels, targets = level_outputs(3, batch=3), random_targets(3, 12, batch=2)
    loss = criterion(class_weights)
    whole = loss(levels, batch_of(targets, 3))
    parts = []
    for image in range(3):
        of_image = targets[targets[:, 0] == image] * torch.tensor([0, 1, 1, 1, 1, 1])
        given = [DFLLevel(*(one[image : image + 1] for one in level)) for level in levels]
        parts.append(loss(given, batch_of(of_image, 1)))
    torch.testing.assert_close(sum(part.sums for part in parts), whole.sums)
    torch.testing.assert_close(sum(part.counts for part in parts), whole.counts)


def test_without_boxes_every_output_has_a_gradient() -> None:
    levels = level_outputs(1)
    terms = criterion()(levels, batch_of(torch.zeros(0, 6)))
    assert terms.counts.tolist() == [[0], [0], [0]]
    terms.local_means().sum().backward()
    for level in levels:
        assert level.sides.grad is not None
        assert not level.sides.grad.any()
        torch.testing.assert_close(level.scores.grad, level.scores.detach().sigmoid() / 2)


def test_of_equal_cells_and_of_equal_targets_the_first_ones_are_taken() -> None:
    cells = cell_geometry(torch.zeros(1, 1, 6, 6), torch.tensor(8.0))
    boxes = torch.tensor([24.0, 24, 40, 40]).expand(1, 36, 4)
    assigned = assign(boxes, torch.zeros(1, 36, 3), cells, torch.zeros(2, 6), torch.tensor([[4.0, 4, 44, 44]] * 2))
    assert assigned.cell.tolist() == [[*range(10)], [0] * 10]
    assert assigned.weight.tolist() == [[pytest.approx(1.0)] * 10, [0] * 10]


def test_a_target_without_a_cell_inside_takes_its_best_cell() -> None:
    """Between four centres; every prediction overlaps it a little, and the first cell has the highest score."""
    cells = cell_geometry(torch.zeros(1, 1, 6, 6), torch.tensor(8.0))
    scores = torch.zeros(1, 36, 3)
    scores[0, 17, 2] = 1
    boxes = torch.tensor([24.0, 24, 20, 20]).expand(1, 36, 4)
    target = torch.tensor([[0, 2.0, 0, 0, 0, 0]])
    assigned = assign(boxes, scores, cells, target, torch.tensor([[21.0, 21, 27, 27]]))
    assert assigned.cell[assigned.weight > 0].tolist() == [17]
    nothing = assign(boxes, scores, cells, target, torch.tensor([[1.0, 1, 3, 3]]))  # no prediction overlaps it
    assert not nothing.weight.any()


def test_targets_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the bit, whatever the number of pairs at a time."""
    levels, targets = level_outputs(1), random_targets(2, 23)
    whole = criterion()(levels, batch_of(targets))
    monkeypatch.setattr(dfl, "MAX_PAIRS", 5 * (12 * 16 + 6 * 8))
    parts = criterion()(levels, batch_of(targets))
    assert torch.equal(whole.sums, parts.sums)
    assert torch.equal(whole.counts, parts.counts)


# The MIT implementation's own numbers


def filled(key: str, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of the reference, a function of its name."""
    if key.endswith("num_batches_tracked"):
        return torch.zeros(shape, dtype=torch.int64)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(key.encode())))
    if key.endswith("running_var"):
        return 1 + 0.2 * x.abs()
    if key.endswith(("running_mean", ".bias")):
        return 0.1 * x - (4.0 if "class_conv.2.bias" in key else 0.0)
    if len(shape) == 1:
        return 1 + 0.1 * x
    return x * (2.0 / max(1, x[0].numel())) ** 0.5


def reference_model(reference: dict[str, Any]) -> YoloModel:
    """Build the model of a reference file with its weights; all names and shapes are the same, but for the bins."""
    model = build_model(f"yolo{reference['model'].replace('-', '')}.yaml")
    shapes = {key: shape for key, shape in reference["shapes"].items() if "anc2vec" not in key}
    model.load_state_dict({f"model.{key}": filled(key, shape) for key, shape in shapes.items()})
    return model


def images_of(reference: dict[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(reference["image_seed"])
    return torch.rand(2, 3, reference["size"], reference["size"], generator=generator)


@pytest.fixture(params=["t", "c"])
def reference(request: pytest.FixtureRequest, shared: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(shared / "reference" / f"yolov9_{request.param}.pt", weights_only=True)
    return content


@torch.no_grad()
def test_scores_and_boxes_are_those_of_the_reference(reference: dict[str, Any]) -> None:
    model = reference_model(reference).eval()
    assert isinstance(model.head, DetectDFL)
    decoded = model.head.decode(model(images_of(reference)))
    torch.testing.assert_close(decoded[..., 4:], reference["eval"]["scores"], rtol=0, atol=1e-5)
    torch.testing.assert_close(xywh_to_xyxy(decoded[..., :4]), reference["eval"]["boxes_xyxy"], rtol=0, atol=1e-2)


@pytest.mark.parametrize("mode", ["eval", "train"])  # of BatchNorm
def test_losses_and_gradients_are_those_of_the_reference(mode: str, reference: dict[str, Any]) -> None:
    model = reference_model(reference).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.train(mode == "train")
    task = DetectionTask({number: str(number) for number in range(80)}, Hyperparameters())
    loss, batch = task.criterion(model), batch_of(reference["targets"], 2, reference["size"], reference["size"])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # as the reference: with one, rounding alone moves its gradients by 2e-4
    try:
        terms = loss(model(images_of(reference)), batch)
        means = terms.local_means()
        loss.objective(means, 1).backward()
    finally:
        torch.set_num_threads(threads)
    wanted = reference[f"{mode}_loss"]
    names = ("box", "cls", "dfl")
    expected = torch.tensor([[wanted[f"{head}/{name}"] for head in ("Main", "AUX")] for name in names])
    torch.testing.assert_close(terms.sums.detach() / terms.counts, expected, rtol=1e-5, atol=0)
    assert means.sum().item() == pytest.approx(wanted["total"], rel=1e-5)
    for name, values in reference[f"{mode}_gradients"].items():
        gradient = model.get_parameter(f"model.{name}").grad
        assert gradient is not None
        first = values["first"]
        assert (gradient.flatten()[: len(first)] - first).abs().max() <= 1e-4 * first.abs().max(), name
        assert gradient.norm().item() == pytest.approx(values["norm"], rel=1e-4)
