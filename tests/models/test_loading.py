"""What a training starts from: transfer, frozen layers, and the work of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet18, vit_b_32

from job import read_job
from models.loading import StartingPoint, count_gflops, find_parameters, freeze, load_and_freeze, rate_factors, transfer
from models.tasks import TASKS
from models.tasks.detect import DetectionTask
from models.weights import Weights
from models.yolo import YoloModel, build_model
from tests.making import tiny_anchor_free, tiny_detector, write_yaml
from utils.config.flags import TrainOptions
from utils.config.hyperparameters import Hyperparameters
from utils.config.settings import read_settings
from utils.errors import UserError
from utils.files import read_yaml

# The work of a model


class Scaled(nn.Conv2d):
    """A network with a buffer that no state dict contains; it may read values."""

    def __init__(self, reads: bool) -> None:
        super().__init__(3, 5, 1)
        self.reads = reads
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[2] < 8:
            raise ValueError("too small")
        scale = torch.stack((self.scale, self.scale)).sum()
        return super().forward(images) * (float(scale) if self.reads else scale)


def test_a_model_that_cannot_be_traced() -> None:
    assert count_gflops(Scaled(reads=False), 10) == pytest.approx(2 * 3 * 5 * 100 / 1e9)
    model = Scaled(reads=True)
    assert count_gflops(model, 10) == 0
    with pytest.raises(UserError, match=r"mine\.yaml .*--imgsz"):
        count_gflops(model, 4, "mine.yaml")


# Frozen layers, and factors of the learning rate


def layered() -> nn.Module:
    model = nn.Module()
    model.model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    return model


def on_meta(build: Callable[..., nn.Module], *args: object) -> nn.Module:
    """Build a model without memory for its weights."""
    with torch.device("meta"):
        return build(*args)


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


def trainable(model: nn.Module) -> set[str]:
    """Return the trainable children of a model, or of its attribute `model`."""
    depth = 1 if "model" in dict(model.named_children()) else 0
    return {name.split(".")[depth] for name, parameter in model.named_parameters() if parameter.requires_grad}


RESNET = {"layer2", "layer3", "layer4"}  # after conv1, bn1, relu, maxpool and layer1, before avgpool and fc


@pytest.mark.parametrize(
    ("build", "words", "expected"),
    [
        *((layered, [count], {*map(str, range(count, 5))}) for count in (0, 3)),
        *((layered, [count], {*map(str, range(count + 5, 5))}) for count in (-1, -3)),
        (lambda: build_model(tiny_anchor_free()), [-1], {"4"}),  # the auxiliary branch, rows 5 to 10, is frozen too
        # Layers without parameters count too.
        (lambda: on_meta(resnet18), [5], {*RESNET, "fc"}),
        (lambda: on_meta(resnet18), [-1], {"fc"}),
        (lambda: on_meta(resnet18), [0, 9], {"bn1", "layer1", *RESNET}),
        (lambda: on_meta(vit_b_32), [-1], {"heads"}),  # the class token is no layer
        (layered, ["1", 3], {"0", "2", "4"}),
        (layered, ["head"], {"0", "1", "2", "3"}),
    ],
)
def test_freeze(build: Callable[[], nn.Module], words: list[int | str], expected: set[str]) -> None:
    model = build()
    freeze(model, words)
    assert trainable(model) == expected


def test_patterns_of_layers_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    freeze(model := layered(), ["*.bias", "4", "model.[0-1].w*"])
    names = {*(f"model.{k}.bias" for k in range(5)), *(f"model.{k}.weight" for k in (0, 1, 4))}
    assert frozen(model) == names
    assert f"{len(names)} of 10 parameters are frozen" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        *([number] for number in (6, -5, 5)),
        *([1, 9], [0, 1, 2, 3, 4], ["model.7"], ["backbone", "9"], ["model"], ["backbone", "head"]),
    ],
)
def test_layers_that_do_not_exist_and_all_layers(words: list[int | str]) -> None:
    with pytest.raises(UserError, match="--freeze"):
        freeze(layered(), words)


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
        (Transformer, ("encoder.backbone.",)),
    ],
)
def test_backbone_and_head(build: Callable[[], nn.Module], backbone: tuple[str, ...]) -> None:
    model = build()
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in names if name.startswith(backbone)}
    assert 0 < len(expected) < len(names)
    assert find_parameters(model, "backbone", "--freeze") == expected
    assert find_parameters(model, "head", "--freeze") == names - expected


def test_factors_of_learning_rates() -> None:
    factors = rate_factors(layered(), {"backbone": 0.1, "*.bias": 2.0, "4": 0.0})
    weights = {f"model.{k}.weight": 0.1 for k in range(4)}
    assert factors == {**weights, **{f"model.{k}.bias": 2.0 for k in range(4)}, "model.4.weight": 0, "model.4.bias": 0}
    with pytest.raises(UserError, match="bakbone"):
        rate_factors(layered(), {"bakbone": 1.0})


# Transfer


def test_tensors_of_equal_name_and_shape_are_loaded() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "anchors": nn.Linear(2, 3)})
    given = {
        "a.weight": torch.ones(3, 2),
        "a.bias": torch.ones(4),  # another shape
        "b.weight": torch.ones(3, 2),  # another name
        "anchors.bias": torch.ones(3),
    }
    assert transfer(model, given, exclude=("anchor",)) == (1, 4, ["a.bias"])
    assert (model["a"].weight == 1).all()
    assert not (model["anchors"].bias == 1).any()
    assert transfer(model, given) == (2, 4, ["a.bias"])
    assert transfer(model, given, exclude=("bias",)) == (1, 4, [])  # excluded tensors are no misfits


def test_the_share_of_the_classes_that_weights_know() -> None:
    """By name; for a segmenter a detector's file, without masks, knows half."""
    names, new = {0: "person", 1: "Car ", 2: "cell", 3: "dog"}, {0: "car", 1: "tree"}
    states = {name: build_model(f"{name}.yaml", nc=4).state_dict() for name in ("yolov5n", "yolov5n-seg")}
    for name, file, wanted, share in (
        ("yolov5n", "yolov5n", new, 0.5),
        ("yolov5n", "yolov5n", names, 1.0),
        ("yolov5n-seg", "yolov5n", names, 0.5),
        ("yolov5n-seg", "yolov5n-seg", new, 0.5),
        ("yolov5s", "yolov5n", new, None),
    ):
        weights = Weights(states[file], None, names, "", {}, "tensors")
        start = StartingPoint(TASKS["detect"], {}, "", from_yaml=True, weights=weights)
        model = build_model(f"{name}.yaml", nc=len(wanted))
        assert start.pretrained_share(model, DetectionTask(wanted, Hyperparameters())) == share


class Prefixed(DetectionTask):
    """A task that knows another program's names."""

    @classmethod
    def renamed(cls, state: Any) -> dict[str, Tensor]:
        return {name.replace("theirs.", "model."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("lost", "warns"),
    [((), False), (("model.3.m.0.weight",), False), (("model.1.bn.bias",), True)],  # row 3 is the head
)
def test_what_a_file_lacks_is_named(
    lost: tuple[str, ...], warns: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the task has renamed the tensors of another program."""
    task = Prefixed({0: "a", 1: "b", 2: "c"}, Hyperparameters())
    model, source = task.build_model(tiny_detector(), 64), task.build_model(tiny_detector(), 64)
    state = {name.replace("model.", "theirs."): x for name, x in source.state_dict().items() if name not in lost}
    monkeypatch.setattr(type(TASKS["detect"]), "load", lambda _: Prefixed)
    monkeypatch.setattr("models.loading.find_weights", lambda *_: "w.pt")
    monkeypatch.setattr("models.loading.read_weights", lambda *_: Weights(state, None, {}, "", {}, "tensors"))
    start = StartingPoint(TASKS["detect"], tiny_detector(), "tiny.yaml", from_yaml=True).with_weights("w.pt")
    load_and_freeze(model, start, task, TrainOptions(imgsz=64))
    assert isinstance(model, YoloModel)
    assert torch.equal(model.model[0].conv.weight, source.model[0].conv.weight)
    printed = capsys.readouterr().out
    assert f"{len(model.state_dict()) - 1 - len(lost)} of" in printed  # the anchors are the YAML's
    assert ("warning: w.pt lacks 1 tensor" in printed and lost[0] in printed) if warns else "warning" not in printed


@pytest.mark.parametrize("keep_head", [0, 1])
def test_other_names_are_a_warning_unless_the_head_keeps_classes_by_name(
    keep_head: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if a tensor has another shape."""
    task = DetectionTask({0: "a", 1: "b", 2: "c"}, Hyperparameters(keep_head=keep_head))
    model, source = task.build_model(tiny_detector(), 64), task.build_model(tiny_detector(), 64)
    state = {**source.state_dict(), "model.1.bn.bias": torch.zeros(1)}
    weights = Weights(state, None, {0: "b", 1: "a", 2: "c"}, "detect", {}, "lockstep")
    start = StartingPoint(TASKS["detect"], {}, "tiny.yaml", True, weights=weights, weights_name="w.pt")
    load_and_freeze(model, start, task, TrainOptions(imgsz=64))
    assert ("the names of 2 of 3 classes differ in w.pt" in capsys.readouterr().out) == (not keep_head)


def test_the_weights_that_a_data_yaml_names_contain_the_model(small_data: Path, tmp_path: Path) -> None:
    """Unless the command line names a model or weights."""
    data = write_yaml(tmp_path / "data.yaml", {**read_yaml(small_data), "defaults": {"weights": "mine.pt"}})
    for flags, named in (
        ([], "mine.pt"),
        (["--weights", "yours.pt"], "yours.pt"),
        (["--cfg", "none.yaml"], "none.yaml"),
    ):
        with pytest.raises(UserError, match=named):
            read_job(read_settings(["--data", str(data), *flags], pytest.fail))
