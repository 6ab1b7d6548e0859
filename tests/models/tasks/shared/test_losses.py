"""The loss of an exported file, and constants on a device."""

from __future__ import annotations

import torch

from models.tasks.shared.losses import UnavailableCriterion, device_constant
from tests.making import grey_batch


def test_losses_of_an_exported_file_are_nan() -> None:
    criterion = UnavailableCriterion(3)
    terms = criterion(None, grey_batch())
    assert terms.means(terms.counts).isnan().tolist() == [True] * 3
    assert criterion.hints(grey_batch()) == ()
    assert criterion.weight(grey_batch()) == 1
    assert criterion.objective(terms.means(terms.counts), 16).isnan()


def test_a_constant_is_copied_once_and_serves_in_training() -> None:
    with torch.inference_mode():
        constant = device_constant((0.5, 2.0), torch.device("cpu"))
    assert constant is device_constant((0.5, 2.0), torch.device("cpu"))
    weight = torch.ones(2, requires_grad=True)
    (weight * constant).sum().backward()  # a tensor of the inference mode would raise an error here
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5, 2.0]
