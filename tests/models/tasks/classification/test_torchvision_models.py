"""torchvision's classifiers, from a YAML with `architecture:`."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models as zoo
from torchvision.ops import StochasticDepth

from models.loading import transfer
from models.tasks.torchvision_models import architecture, architectures, build_classifier
from utils.distributed.logical import synchronise_dropout
from utils.errors import UserError
from utils.files import ROOT, read_yaml
from utils.training.ema import ModelEMA

# Too many parameters for a small machine.
NOT_BUILT = "regnet_y_128gf"  # 2.6 GB, and not possible on the meta device
LARGE = ("vit_h_14", "vit_l_16", "vit_l_32", "convnext_large", "efficientnet_v2_l", "vgg")


def on_meta(name: str, nc: int = 3, imgsz: int = 64, **yaml: Any) -> Any:
    """Build the model without memory for its weights."""
    with torch.device("meta"):
        return build_classifier({"architecture": name, **yaml}, nc, imgsz)


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in model.state_dict().items()}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_architectures_are_classifiers() -> None:
    known = architectures()
    assert {"resnet34", "googlenet", "vit_b_16", "convnext_tiny", "mobilenet_v3_small"} <= set(known)
    assert not [name for name in known if name.startswith(("fcn", "fasterrcnn", "raft", "quantized", "r3d"))]


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet18", 11_689_512), ("resnet34", 21_797_672), ("resnet50", 25_557_032)]
)
def test_shipped_yamls(name: str, parameters: int) -> None:
    yaml = read_yaml(ROOT / "models" / f"{name}.yaml")
    assert (yaml["task"], yaml["nc"]) == ("classify", 1000)
    with torch.device("meta"):
        model = build_classifier(yaml, yaml["nc"], 224)
        theirs = zoo.get_model(name)
    assert count(model) == parameters
    assert shapes(model) == shapes(theirs)
    assert {"conv1.weight", "layer1.0.bn1.running_mean", "layer4.1.conv2.weight", "fc.bias"} <= set(shapes(model))


def test_number_of_logits() -> None:
    model = on_meta("resnet18", nc=7)
    assert count(model) == 11_689_512 - 993 * 513  # 993 rows of 512 weights and a bias
    assert model(torch.zeros(2, 3, 50, 41, device="meta")).shape == (2, 7)


@pytest.mark.parametrize(("name", "side"), [("googlenet", 32), ("inception_v3", 75)])
@pytest.mark.parametrize("training", [True, False])
def test_auxiliary_heads_are_removed(name: str, side: int, training: bool) -> None:
    model = on_meta(name, imgsz=side).train(training)
    outputs = model(torch.zeros(2, 3, side, side, device="meta"))
    assert isinstance(outputs, torch.Tensor)
    assert outputs.shape == (2, 3)
    assert not [key for key in model.state_dict() if "aux" in key.lower()]


def test_weights_are_torchvisions_own() -> None:
    """Under the same seed; the check of the image size draws no random numbers, in spite of dropout."""
    torch.manual_seed(3)
    theirs = zoo.mobilenet_v3_small(num_classes=5)
    number = torch.rand(1)
    torch.manual_seed(3)
    ours = build_classifier({"architecture": "mobilenet_v3_small"}, 5, 64)
    assert torch.equal(torch.rand(1), number)
    assert ours.training
    state = ours.state_dict()
    assert list(state) == list(theirs.state_dict())
    assert all(torch.equal(state[key], value) for key, value in theirs.state_dict().items())  # statistics too
    assert all(value.device.type == "cpu" for value in state.values())


def test_the_yaml_builds_it_again() -> None:
    yaml = {"architecture": "mobilenet_v3_small", "nc": 1000, "args": {"dropout": 0.35}}
    given = copy.deepcopy(yaml)
    with torch.device("meta"):
        model: Any = build_classifier(yaml, 4, 64)
        again: Any = build_classifier(model.yaml, 4, 64)
    assert model.yaml == {"task": "classify", "architecture": "mobilenet_v3_small", "nc": 4, "args": {"dropout": 0.35}}
    assert again.yaml == model.yaml
    assert shapes(again) == shapes(model)
    assert again.classifier[2].p == 0.35
    model.yaml["args"]["dropout"] = 0.9
    assert yaml == given  # the model has a copy


def test_arguments_reach_the_architecture() -> None:
    assert on_meta("mobilenet_v3_small").classifier[2].p == 0.2
    assert on_meta("mobilenet_v3_small", args={"dropout": 0.35}).classifier[2].p == 0.35
    assert on_meta("mobilenet_v3_small", args=None).classifier[2].p == 0.2  # an empty `args:`
    assert on_meta("resnet18", args={"zero_init_residual": True}) is not None
    assert on_meta("googlenet", args={"transform_input": True}).transform_input


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ({"architecture": "resnt18"}, r"`architecture` is 'resnt18'; .*torchvision \(did you mean 'resnet18'\?\)$"),
        ({"architecture": "zzz"}, "`architecture` is 'zzz'; give a classification model of torchvision, such as resn"),
        ({"architecture": 18}, "`architecture` is 18; give"),
        ({"architecture": ["resnet18"]}, r"`architecture` is \['resnet18'\]; give"),
        ({"architecture": "fcn_resnet50"}, r"`architecture` is 'fcn_resnet50'; give"),  # not a classifier
        ({"task": "classify"}, "`architecture` is None; give"),
        ({"arg": {}}, r"unknown key 'arg' \(did you mean 'args'\?\); known are task, architecture, nc, args$"),
        ({"backbone": []}, "unknown key 'backbone'; known are"),
        ({7: 1}, "unknown key '7'; known are"),
        ({"args": [0.3]}, r"`args` is \[0\.3\]; write lines such as `dropout: 0\.3`"),
        ({"args": "dropout"}, "`args` is 'dropout'; write lines"),
        ({"args": {"weights": "DEFAULT"}}, r"`args` is .*\(weights are for --weights\)$"),
        ({"args": {"num_classes": 3}}, "`args` is {'num_classes': 3}; write"),
        ({"args": {"droput": 0.3}}, "resnet18 cannot be built with the arguments {'droput': 0.3} .*unexpected keyword"),
        ({"args": {1: 2}}, "resnet18 cannot be built with the arguments {1: 2}"),
        ({"args": {"norm_layer": "BatchNorm2d"}}, "resnet18 cannot be built with the arguments .*not callable"),
        ({"architecture": "googlenet", "args": {"aux_logits": True}}, "googlenet cannot be built with the arguments"),
        ({"architecture": "mobilenet_v3_small", "args": {"dropout": 7}}, "small cannot be built .*probability"),
    ],
)
def test_yaml_that_describes_no_classifier(yaml: dict[str, Any], message: str) -> None:
    known = {} if "task" in yaml else {"architecture": "resnet18"}
    with pytest.raises(UserError, match=rf"^mine\.yaml: .*{message}") as caught, torch.device("meta"):
        build_classifier({**known, **yaml}, 3, 64, "mine.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "convnext_tiny"])
def test_arguments_that_torchvision_ignores(name: str) -> None:
    with pytest.raises(UserError, match="droput"):
        on_meta(name, args={"droput": 0.3})


def test_architecture_of_a_yaml() -> None:
    assert architecture({"architecture": "resnet34"}, "mine.yaml") == "resnet34"
    with pytest.raises(UserError, match=r"^mine\.yaml: "):
        architecture({}, "mine.yaml")


@pytest.mark.parametrize(
    ("name", "imgsz", "args"),
    [("vit_b_32", 96, {}), ("vit_b_32", 224, {"image_size": 96}), ("inception_v3", 64, {}), ("alexnet", 32, {})],
)
def test_images_of_an_unsuitable_size(name: str, imgsz: int, args: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        on_meta(name, imgsz=imgsz, args=args)
    message = str(caught.value)
    assert message.startswith(f"the model YAML: {name} does not work with --imgsz {imgsz} (")
    assert message.endswith("); most are made for 224")
    assert "\n" not in message


def test_a_transformer_of_another_image_size() -> None:
    model = on_meta("vit_b_32", imgsz=96, args={"image_size": 96})
    assert model.encoder.pos_embedding.shape == (1, 3 * 3 + 1, 768)


# Weights of other sizes and versions


def test_another_number_of_classes_changes_the_last_layer_alone() -> None:
    state = build_classifier({"architecture": "squeezenet1_1"}, 1000, 64).state_dict()
    model = build_classifier({"architecture": "squeezenet1_1"}, 4, 64)
    assert transfer(model, state) == (
        50,
        52,
        [("classifier.1.weight", (1000, 512, 1, 1), (4, 512, 1, 1)), ("classifier.1.bias", (1000,), (4,))],
    )


def test_weights_with_a_version_are_loaded() -> None:
    model = build_classifier({"architecture": "mnasnet0_5"}, 3, 64)
    result = transfer(model, {key: value + 1 for key, value in model.state_dict().items()})
    assert result.loaded == result.total


# All of them


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in architectures() if name != NOT_BUILT])
def test_every_architecture(name: str) -> None:
    """It is built, its average returns logits, and every dropout layer is synchronised."""
    place: AbstractContextManager[object] = nullcontext()
    if name.startswith(LARGE):
        place = torch.device("meta")
    with place:
        model = build_classifier({"architecture": name}, 3, 224)
    before = shapes(model)
    synchronise_dropout(model)
    assert shapes(model) == before
    dropping = (nn.modules.dropout._DropoutNd, StochasticDepth)
    assert not [part for part in model.modules() if isinstance(part, dropping) and part.p]
    ema = ModelEMA(model)
    assert ema.model.yaml == {"architecture": name, "task": "classify", "nc": 3}
    ema.model.to("meta")
    assert ema.model.eval()(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 3)
