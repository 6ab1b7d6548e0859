"""The cross-entropy of a classifier, with numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.tasks.classify import ClassificationCriterion
from tests.models.tasks.classification.toy_batches import Identity, make, of_classes
from utils.batch import GlobalCounts

# Probabilities 1/3 each, and 1/2, 1/4, 1/4.
LOGITS = torch.tensor([[5.0, 5.0, 5.0], [math.log(2), 0.0, 0.0]])
LN2, LN3 = math.log(2), math.log(3)


def criterion(label_smoothing: float = 0.0) -> ClassificationCriterion:
    return make(label_smoothing).criterion(Identity())


@pytest.mark.parametrize(
    ("smoothing", "targets", "expected"),
    [
        (0.0, [[1, 0, 0], [1, 0, 0]], LN3 + LN2),
        (0.0, [[0, 0, 1], [0, 1, 0]], LN3 + 2 * LN2),
        (0.3, [[0, 0, 1], [0, 1, 0]], LN3 + 0.1 * LN2 + 0.9 * 2 * LN2),  # 0.7 for the class, and 0.1 for each
        (0.0, [[0.5, 0, 0.5], [0.25, 0.75, 0]], LN3 + 0.25 * LN2 + 0.75 * 2 * LN2),
        (0.3, [[0.5, 0, 0.5], [0.25, 0.75, 0]], LN3 + 0.275 * LN2 + 0.725 * 2 * LN2),  # 0.7 x 0.25 + 0.1, the others
    ],
)
def test_losses_by_hand(smoothing: float, targets: list[list[float]], expected: float) -> None:
    terms = criterion(smoothing)(LOGITS, of_classes(0, 0, targets=targets))
    assert terms.sums.tolist() == [[pytest.approx(expected)]]
    assert terms.counts.tolist() == [[2]]
    assert terms.local_means().tolist() == [pytest.approx(expected / 2)]
    assert len(make().loss_names) == 1


def test_the_loss_equals_torchs_cross_entropy() -> None:
    logits, labels = torch.randn(16, 3, dtype=torch.float64, requires_grad=True), torch.randint(3, (16,))
    terms = criterion(0.1)(logits, of_classes(*labels.tolist()))
    expected = cross_entropy(logits, labels, label_smoothing=0.1)
    torch.testing.assert_close(terms.local_means(), expected.view(1))
    (gradient,) = torch.autograd.grad(criterion().objective(terms.local_means(), images=16), logits)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])


def test_shares_of_processes_with_different_numbers_of_images_add_up() -> None:
    logits, labels = torch.randn(5, 3), [0, 2, 1, 1, 0]
    whole = criterion()(logits, of_classes(*labels))
    parts = [criterion()(logits[cut], of_classes(*labels[cut])) for cut in (slice(0, 3), slice(3, 5))]
    counts = sum(part.counts for part in parts)
    assert isinstance(counts, Tensor)
    torch.testing.assert_close(sum(part.share_of(GlobalCounts(counts)) for part in parts), whole.local_means())


@pytest.mark.parametrize("precision", [torch.float16, torch.bfloat16])
def test_arithmetic_is_in_fp32(precision: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 0.125, -2.0]], dtype=precision, requires_grad=True)
    terms = criterion()(logits, of_classes(2))
    assert terms.sums.dtype == torch.float32
    assert torch.equal(terms.sums, criterion()(logits.float(), of_classes(2)).sums)
    assert terms.sums.item() == pytest.approx(math.log(math.exp(3) + math.exp(0.125) + math.exp(-2)) + 2, rel=1e-6)
    terms.sums.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == precision


def test_the_objective_is_the_mean_over_images() -> None:
    """Not the sum, as a detector's."""
    means = torch.tensor([0.75])
    assert criterion().objective(means, 64).item() == criterion().objective(means, 8).item() == 0.75


def test_batches_are_weighted_by_images_and_have_no_hints() -> None:
    assert criterion().weight(of_classes(0, 1, 2)) == 3
    assert criterion().hints(of_classes(0, 1)) == ()


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_class_weights_are_duplicated_images(smoothing: float) -> None:
    logits, labels = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), torch.arange(7) % 3
    repeats = torch.tensor([1, 4, 2])[labels]
    weighted, plain = ClassificationCriterion(3, smoothing, (1.0, 4.0, 2.0)), ClassificationCriterion(3, smoothing)
    again = logits.detach().repeat_interleave(repeats, 0)
    terms = weighted(logits, of_classes(*labels.tolist()))
    expected = plain(again, of_classes(*labels.repeat_interleave(repeats).tolist()))
    assert terms.counts.item() == expected.counts.item()
    torch.testing.assert_close(terms.sums, expected.sums, rtol=1e-6, atol=1e-6)
    repeated = logits.repeat_interleave(repeats, 0)
    duplicated = plain(repeated, of_classes(*labels.repeat_interleave(repeats).tolist()))
    gradients = [torch.autograd.grad(each.local_means().sum(), logits)[0] for each in (terms, duplicated)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_the_shares_of_a_mixture_are_weighted_by_their_classes() -> None:
    """As an image of each class would be, with its share as its weight."""
    terms = ClassificationCriterion(3, 0.0, (2.0, 0.5, 1.0))(
        LOGITS, of_classes(0, 0, targets=[[0.5, 0.5, 0], [0, 0, 1]])
    )
    assert terms.sums.item() == pytest.approx(1.25 * LN3 + 2 * LN2)
    assert terms.counts.item() == pytest.approx(2.25)
