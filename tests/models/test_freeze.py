"""--freeze: which layers it means, in our models and torchvision's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vit_b_32

from models.loading import freeze, freeze_parts, parameters_of, rate_factors
from models.yolo import YoloModel, build_model
from tests.making import tiny_anchor_free, tiny_detector
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
    assert str(caught.value) == f"--freeze {flag}: the model has layers 0 to 4, but no layer {wrong}"


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
    with pytest.raises(UserError, match=rf"--freeze {number}: the model has layers 0 to 4, but no layer"):
        freeze(layered(), (number,))


# Parts by name, also those of --lr-factor


class Transformer(nn.Module):
    """Named as transformers' models are: the backbone is a module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"backbone": nn.Linear(2, 2), "projection": nn.Linear(2, 2)})
        self.classes = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("build", "backbone"),
    [
        (lambda: build_model(tiny_detector()), ("model.0.", "model.1.", "model.2.")),
        (lambda: on_meta(resnet18), ("conv1.", "bn1.", "layer")),
        (lambda: on_meta(vit_b_32), ("class_token", "conv_proj.", "encoder.")),
        (Transformer, ("encoder.backbone.",)),
    ],
)
def test_backbone_and_head(build: Callable[[], nn.Module], backbone: tuple[str, ...]) -> None:
    model = build()
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in names if name.startswith(backbone)}
    assert 0 < len(expected) < len(names)
    assert parameters_of(model, "backbone", "--freeze") == expected
    assert parameters_of(model, "head", "--freeze") == names - expected
    freeze_parts(model, ["backbone"])
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["model.1"], {"model.1.weight", "model.1.bias"}),
        (["1", "3"], {"model.1.weight", "model.1.bias", "model.3.weight", "model.3.bias"}),
        (["*.bias", "4"], {*(f"model.{k}.bias" for k in range(5)), "model.4.weight"}),
        (["model.[0-1].w*"], {"model.0.weight", "model.1.weight"}),
        (["head"], {"model.4.weight", "model.4.bias"}),
    ],
)
def test_patterns_of_layers_and_parameters(words: list[str], expected: set[str]) -> None:
    model = layered()
    assert freeze_parts(model, words) == f"{len(expected)} of 10 parameters are frozen: {', '.join(words)}"
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.7"], r"^--freeze 'model.7' matches no layer or parameter of the model \(did you mean 'model"),
        (["backbone", "9"], "^--freeze '9' matches no layer or parameter of the model"),
        (["model"], "^--freeze model freezes all parameters; freeze fewer$"),
        (["backbone", "head"], "^--freeze backbone head freezes all parameters; freeze fewer$"),
    ],
)
def test_words_that_freeze_nothing_or_everything(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        freeze_parts(layered(), words)


def test_factors_of_learning_rates() -> None:
    factors = rate_factors(layered(), {"backbone": 0.1, "*.bias": 2.0, "4": 0.0})
    weights = {f"model.{k}.weight": 0.1 for k in range(4)}
    assert factors == {**weights, **{f"model.{k}.bias": 2.0 for k in range(4)}, "model.4.weight": 0, "model.4.bias": 0}
    assert rate_factors(layered(), {}) == {}
    with pytest.raises(UserError, match="bakbone"):
        rate_factors(layered(), {"bakbone": 1.0})
