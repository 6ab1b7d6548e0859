"""Compare a loss and its gradients with tensors that YOLOv5 computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from models.tasks.contract import Criterion, LossTerms


def agrees_with_yolov5(
    model: nn.Module, criterion: Criterion, terms: LossTerms, images: int, wanted: Mapping[str, Any], items_key: str
) -> None:
    """Run backward, and check terms, loss, three gradients and their norm.

    terms: of the criterion for the model's outputs. images: in the batch. wanted: what YOLOv5 computed; items_key: of
    the terms in it.
    """
    items = terms.local_means()
    loss = criterion.objective(items, images)
    loss.backward()

    torch.testing.assert_close(items.detach(), torch.tensor(wanted[items_key]), rtol=1e-4, atol=0)
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-4)
    parameters = dict(model.named_parameters())
    for name, gradient in wanted["grads"].items():
        computed = parameters[name].grad
        assert computed is not None
        assert (computed - gradient).abs().max() / gradient.abs().max() <= 1e-4, name
    norm = torch.cat([p.grad.flatten().double() for p in parameters.values() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(wanted["grad_norm"], rel=1e-4)
