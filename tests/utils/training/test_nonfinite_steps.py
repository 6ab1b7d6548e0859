"""Skipped steps are undone, and too many end with a message that names images and a cause."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from utils.training.nonfinite_steps import DeviceValue, NonFiniteGuard, explain_skipped_steps

TERMS = ("box", "obj", "cls")
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """Return loss sums and running statistics."""
    return [torch.zeros(3), torch.ones(2, 2)]


def add(tensors: Sequence[torch.Tensor], value: float) -> None:
    for tensor in tensors:
        tensor += value


TAKEN, SKIPPED = torch.tensor(True), torch.tensor(False)


def test_a_skipped_step_is_undone(tensors: list[torch.Tensor]) -> None:
    guard = NonFiniteGuard(tensors, limit=3)
    add(tensors, 1)
    guard.keep_if(TAKEN)
    add(tensors, 2)
    add(tensors, NAN)
    guard.keep_if(SKIPPED)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1.0], [2.0]]
    add(tensors, 3)
    guard.keep_if(TAKEN)
    assert [tensor.unique().tolist() for tensor in tensors] == [[4.0], [5.0]]
    add(tensors, INF)
    guard.keep_if(SKIPPED)
    assert [tensor.unique().tolist() for tensor in tensors] == [[4.0], [5.0]]


def test_a_new_snapshot(tensors: list[torch.Tensor]) -> None:
    """At the end of an epoch the sums are set to zero, and the statistics are averaged."""
    guard = NonFiniteGuard(tensors, limit=3)
    add(tensors, 1)
    guard.keep_if(TAKEN)
    tensors[0].zero_()
    guard.snapshot()
    add(tensors, NAN)
    guard.keep_if(SKIPPED)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [2.0]]


def test_parameters_and_two_types_are_restored_in_place() -> None:
    weight = nn.Parameter(torch.ones(2))
    precise = torch.tensor([1 / 3], dtype=torch.float64)
    guard = NonFiniteGuard([weight, precise], limit=2)
    with torch.no_grad():
        weight += NAN
        precise += 1
    guard.keep_if(SKIPPED)
    assert weight.tolist() == [1.0, 1.0]
    assert precise.item() == 1 / 3
    assert weight.requires_grad


def test_the_limit_counts_steps_in_a_row(tensors: list[torch.Tensor]) -> None:
    guard = NonFiniteGuard(tensors, limit=3)
    assert [guard.count(False), guard.count(False), guard.count(True)] == [False, False, False]
    assert [guard.count(False), guard.count(False), guard.count(False)] == [False, False, True]
    assert guard.skipped_in_a_row == 3
    assert NonFiniteGuard(tensors, limit=1).count(False)


def test_images_whose_loss_is_not_finite(tensors: list[torch.Tensor]) -> None:
    guard = NonFiniteGuard(tensors, limit=2)
    guard.add_batch(torch.tensor([1.0, NAN, 1.0]), ["before.jpg"])
    assert guard.suspects(guard.end_window(), TERMS) == [("before.jpg", "obj")]
    guard.add_batch(torch.tensor([1.0, 2.0, 3.0]), ["sound.jpg"])
    guard.add_batch(torch.tensor([NAN, 2.0, -INF]), iter(["a.jpg", "b.jpg"]))
    guard.add_batch(torch.tensor([1.0, INF, 3.0]), ["c.jpg"])
    window = guard.end_window()
    assert guard.suspects(window, TERMS) == [("a.jpg", "box, cls"), ("b.jpg", "box, cls"), ("c.jpg", "obj")]
    assert [images for _, images in window] == [["sound.jpg"], ["a.jpg", "b.jpg"], ["c.jpg"]]
    assert guard.end_window() == []


def test_device_values() -> None:
    assert [DeviceValue(TAKEN).read(), DeviceValue(SKIPPED).read()] == [True, False]


# The message


def model(*sizes: float) -> nn.Module:
    """Return a model whose parameters have these absolute values."""
    return nn.ParameterList([nn.Parameter(torch.full((2,), -size)) for size in sizes])


def explained(suspects: Sequence[tuple[str, str]] = (), sound: nn.Module | None = None, precision: str = "no") -> str:
    return explain_skipped_steps(120, 20, suspects, 64, sound or model(1.0), precision, 0.01)


def test_images_whose_loss_is_not_finite_are_named() -> None:
    assert explained([("a.jpg", "box, obj"), ("b.jpg", "obj")]) == (
        "20 optimizer steps in a row were skipped, because the gradients were not finite; the last is step 120 (not "
        "finite: box, obj, obj of the images a.jpg, b.jpg); check these images and their labels, and try a lower lr0 "
        "than 0.01"
    )


def test_the_message_about_a_single_step() -> None:
    message = explain_skipped_steps(7, 1, [], 64, model(1.0), "no", 0.01)
    assert message.startswith(
        "an optimizer step was skipped, because the gradients were not finite; the last is step 7 ("
    )


def test_at_most_five_images_are_named() -> None:
    five = [(f"{number}.jpg", "cls") for number in range(5)]
    assert "cls of the images 0.jpg, 1.jpg, 2.jpg, 3.jpg, 4.jpg)" in explained(five)
    assert "3.jpg, 4.jpg and 2 more)" in explained([*five, ("5.jpg", "cls"), ("6.jpg", "cls")])


def test_a_finite_loss_without_a_finite_gradient() -> None:
    assert "(the loss of its 64 images is finite, and its gradient is not); check" in explained()


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(("sizes", "largest"), [((1.0, 2e4), "2e+04"), ((INF, 1.0), "inf"), ((1.0, NAN, 1.0), "nan")])
def test_weights_that_have_grown(sizes: Sequence[float], largest: str, precision: str) -> None:
    message = explained(sound=model(*sizes), precision=precision)
    assert message.endswith(
        f"; the weights have grown to {largest}, so the learning rate (lr0 0.01) is probably too high"
    )


def test_fp16() -> None:
    message = explained(precision="fp16")
    assert message.endswith("; fp16 probably overflows: try --mixed-precision bf16 or no")


def test_models_without_parameters_or_with_empty_ones() -> None:
    assert explained(sound=nn.ReLU()) == explained(sound=nn.ParameterList([nn.Parameter(torch.empty(0))]))
