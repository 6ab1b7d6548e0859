"""The loss of an exported file, constants on a device, and class weights."""

from __future__ import annotations

import pytest
import torch

from models.heads.contract import UnavailableCriterion
from models.tasks.contract import device_constant, weights_by_class
from tests.making import CLASS_NAMES, grey_batch
from utils.errors import UserError


def test_losses_of_an_exported_file_are_nan() -> None:
    criterion = UnavailableCriterion(3)
    terms = criterion(None, grey_batch())
    assert terms.local_means().isnan().tolist() == [True] * 3
    assert criterion.hints(grey_batch()) == ()
    assert criterion.weight(grey_batch()) == 1
    assert criterion.objective(terms.local_means(), 16).isnan()


def test_a_constant_is_copied_once_and_serves_in_training() -> None:
    with torch.inference_mode():
        constant = device_constant((0.5, 2.0), torch.device("cpu"))
    assert constant is device_constant((0.5, 2.0), torch.device("cpu"))
    weight = torch.ones(2, requires_grad=True)
    (weight * constant).sum().backward()  # a tensor of the inference mode would raise an error here
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5, 2.0]


def test_class_weights_in_the_order_of_the_classes() -> None:
    assert weights_by_class(CLASS_NAMES, {"bar": 2, "disc": 0.5}) == (0.5, 1.0, 2.0)
    assert weights_by_class(CLASS_NAMES, {}) == weights_by_class(CLASS_NAMES, {"bar": 1.0}) == ()
    with pytest.raises(UserError, match=r"^class_weights: the data set has no class 'bra' \(did you mean 'bar'\?\)"):
        weights_by_class(CLASS_NAMES, {"bra": 2})
