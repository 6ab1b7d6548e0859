"""--freeze: which layers it means, in our models and torchvision's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vit_b_32

from models.initial_weights import freeze
from models.yolo import YoloModel, build_model
from tests.making import tiny_anchor_free
from utils.errors import UserError


def layered() -> nn.Module:
    model = nn.Module()
    model.model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    return model


def frozen(model: nn.Module) -> list[int]:
    layers = model.get_submodule("model").children()
    return [k for k, layer in enumerate(layers) if not any(p.requires_grad for p in layer.parameters())]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ((0,), []),
        ((1,), [0]),
        ((3,), [0, 1, 2]),
        ((1, 3), [1, 3]),
        ((0, 4), [0, 4]),
        ((-1,), [0, 1, 2, 3]),  # all but the last
        ((-4,), [0]),
        ((-5,), []),
    ],
)
def test_freeze(layers: tuple[int, ...], expected: list[int]) -> None:
    model = layered()
    assert freeze(model, layers) == expected
    assert frozen(model) == expected
    partly = [p.requires_grad for layer in model.get_submodule("model").children() for p in layer.parameters()]
    assert partly.count(False) == 2 * len(expected)  # weight and bias of these, of no other


def test_all_but_the_head_of_a_model_with_an_auxiliary_branch() -> None:
    model = build_model(tiny_anchor_free())
    assert freeze(model, (-1,)) == [0, 1, 2, 3, *range(5, 11)]
    assert frozen(model) == [0, 1, 2, 3, *range(5, 11)]


@pytest.mark.parametrize(
    ("layers", "flag", "wrong"), [((6,), "6", 5), ((1, 9), "1 9", 9), ((2, -1), "2 -1", -1), ((-1, 2), "-1 2", -1)]
)
def test_freezing_a_missing_layer(layers: tuple[int, ...], flag: str, wrong: int) -> None:
    with pytest.raises(UserError) as caught:
        freeze(layered(), layers)
    assert str(caught.value) == f"--freeze {flag}: the model has layers 0 to 4, no {wrong}"


@pytest.mark.parametrize("layers", [(5,), (0, 1, 2, 3, 4)])
def test_freezing_everything(layers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"^--freeze [\d ]+ freezes all layers, 0 to 4; freeze fewer"):
        freeze(layered(), layers)


def on_meta(build: Callable[..., nn.Module], *args: object) -> nn.Module:
    """Build a model without memory for its weights."""
    with torch.device("meta"):
        return build(*args)


def trainable(model: nn.Module) -> set[str]:
    """Return the trainable children of a model, or of its attribute `model`."""
    depth = 1 if isinstance(model, YoloModel) else 0
    return {name.split(".")[depth] for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("layers", "count", "expected"),
    [
        # conv1, bn1, relu, maxpool, layer1 to layer4, avgpool, fc: layers without parameters count too
        ((5,), 5, {"layer2", "layer3", "layer4", "fc"}),
        ((-1,), 9, {"fc"}),
        ((-3,), 7, {"layer4", "fc"}),
        ((0, 9), 2, {"bn1", "layer1", "layer2", "layer3", "layer4"}),
        ((0,), 0, {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "fc"}),
    ],
)
def test_layers_of_a_torchvision_model(layers: tuple[int, ...], count: int, expected: set[str]) -> None:
    model = on_meta(resnet18)
    assert len(freeze(model, layers)) == count
    assert trainable(model) == expected


@pytest.mark.parametrize(("yaml", "head"), [("yolov5n.yaml", "24"), ("yolov5n-cls.yaml", "9")])
def test_all_but_the_head(yaml: str, head: str) -> None:
    model = on_meta(build_model, yaml)
    assert freeze(model, (-1,)) == list(range(int(head)))
    assert trainable(model) == {head}


def test_all_but_the_head_of_a_transformer() -> None:
    model = on_meta(vit_b_32)
    freeze(model, (-1,))
    assert trainable(model) == {"heads"}


@pytest.mark.parametrize("number", [10**20, -(10**20), 5 * 10**9])
def test_a_huge_number_is_no_layer(number: int) -> None:
    with pytest.raises(UserError, match=rf"--freeze {number}: the model has layers 0 to 4, no"):
        freeze(layered(), (number,))
