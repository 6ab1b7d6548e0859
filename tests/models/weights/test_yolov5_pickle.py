"""YOLOv5's weight files, and pickles that would run something."""

from __future__ import annotations

import builtins
import copy
import functools
import os
import pickle
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import layers
from models.weights import yolov5_pickle
from models.weights.reader import Weights, read_weights
from models.weights.transfer import transfer
from models.yolo import YoloModel, build_model
from tests.models.weights.files import save_bytes, save_legacy, save_old_pickle, save_pickle, save_zip, text
from utils.errors import UserError

SHARED = Path(__file__).resolve().parents[4] / "shared"


# YOLOv5's files


@pytest.fixture(scope="module")
def official() -> Weights:
    path = SHARED / "weights" / "yolov5n.pt"
    if not path.exists():
        pytest.skip(f"needs the official checkpoint {path}")
    return read_weights(path)


def test_official_checkpoint_loads_by_name_whole(official: Weights) -> None:
    model = build_model("yolov5n.yaml")
    assert set(model.state_dict()) == set(official.state)
    assert transfer(model, official.state) == (349, 349, [])
    torch.testing.assert_close(model.state_dict(), official.state, rtol=0, atol=0, check_dtype=True)


def test_official_checkpoints_description(official: Weights) -> None:
    assert (official.task, official.source, len(official.names), official.names[16]) == ("detect", "yolov5", 80, "dog")
    assert official.model is not None
    assert official.model["backbone"][0] == [-1, 1, "Conv", [64, 6, 2, 2]]


class Pickled(torch.nn.Module):
    """A module that pretends, in the pickle, to be one of YOLOv5's."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value, dtype=torch.float16))
        self.register_buffer("anchor_grid", torch.ones(1))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.names = ["cat", "dog"]
        self.yaml = {"nc": 2, "anchors": ((1, 2),)}


class PickledClassifier(torch.nn.Module):
    """As YOLOv5 saves a classifier: its layers and class names, and no YAML."""

    def __init__(self, layers: torch.nn.Module, names: dict[int, str]) -> None:
        super().__init__()
        self.model, self.names = layers, names


def save_as_yolov5(
    value: Any, path: Path, legacy: bool, kind: type = Pickled, alias: str = "SegmentationModel"
) -> None:
    """Save with `kind` under the name that YOLOv5 gives to a network."""
    name, alias_name = f"{kind.__module__}\n{kind.__name__}\n".encode(), f"models.yolo\n{alias}\n".encode()
    plain = path.with_suffix(".plain")
    torch.save(value, plain, _use_new_zipfile_serialization=not legacy)
    if legacy:
        path.write_bytes(plain.read_bytes().replace(name, alias_name))
        return
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for record in old.namelist():
            new.writestr(record, old.read(record).replace(name, alias_name))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(("ema", "expected"), [(Pickled(2.0), 2.0), (None, 1.0)])
def test_smoothed_weights_come_first(legacy: bool, ema: Any, expected: float, file: Path) -> None:
    save_as_yolov5({"epoch": 3, "model": Pickled(1.0), "ema": ema, "optimizer": None}, file, legacy)
    found = read_weights(file)
    torch.testing.assert_close(found.state, {"weight": torch.full((2,), expected)}, rtol=0, atol=0)
    assert (found.names, found.model) == ({0: "cat", 1: "dog"}, {"nc": 2, "anchors": [[1, 2]]})
    assert found.task == "SegmentationModel"  # for no task of ours


OLD: dict[str, Any] = {  # as up to release 4.0: Focus, BottleneckCSP and SPP; and as its YAMLs are written
    "nc": 2,
    "depth_multiple": 0.33,
    "width_multiple": 0.25,
    "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
    "backbone": [
        [-1, 1, "Focus", [64, 3]],
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 3, "BottleneckCSP", [64]],
        [-1, 1, "Conv", [128, 3, 2]],
        [-1, 1, "SPP", [128, [5, 9, 13]]],
        [-1, 3, "BottleneckCSP", [128, "False"]],
    ],
    "head": [
        [-1, 1, "Conv", [64, 1, 1]],
        [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
        [[-1, 2], 1, "Concat", [1]],
        [-1, 1, "BottleneckCSP", [64, False]],
        [[9, 5], 1, "Detect", ["nc", "anchors"]],
    ],
}


def network(activation: str | None = None, slope: float | None = None) -> Any:
    """A network of `OLD` with weights and statistics that are not those of a new one, and what older files have."""
    with_slope = {} if slope is None else {k: [_sloped(row, slope) for row in OLD[k]] for k in ("backbone", "head")}
    model = build_model({**OLD, **with_slope, **({"activation": activation} if activation else {})}).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(part.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(part.running_var, 0.5, 2)
            torch.nn.init.uniform_(part.bias, -0.5, 0.5)
    model.yaml = {**OLD, "ch": 3, "flips": (1, torch.nn.Identity())}
    model.names = ["cat", "dog"]
    model.detect.register_buffer("anchor_grid", torch.ones(2, 1, 2, 1, 1, 2))
    return model


def _sloped(row: list[Any], slope: float) -> list[Any]:
    settings = [False] if len(row[3]) > 1 else [True]
    return [*row[:3], [row[3][0], *settings, 1, 0.5, slope]] if row[2] == "BottleneckCSP" else row


@torch.no_grad()
def agrees(model: Any, file: Path) -> Weights:
    """The weights in a file, found to make a network that says what `model` says."""
    found = read_weights(file)
    assert found.model is not None
    again = build_model(found.model).eval()
    assert transfer(again, found.state)[1:] == (len(again.state_dict()), [])
    assert set(again.state_dict()) <= set(found.state)
    images = torch.rand(1, 3, 32, 48)
    torch.testing.assert_close(again(images), model(images), rtol=1e-4, atol=1e-5)
    return found


@pytest.mark.parametrize(
    ("activation", "slope"), [("nn.Hardswish()", 0.1), ("nn.LeakyReLU(0.1, inplace=True)", 0.1), (None, None)]
)
@pytest.mark.parametrize("bare", [False, True])
def test_older_networks_speak_as_they_did(activation: str | None, slope: float | None, bare: bool, file: Path) -> None:
    """Whose activations are in the layers alone, not in the YAML."""
    model = network(activation, slope)
    value = model if bare else {"epoch": -1, "model": model, "ema": None}
    save_as_yolov5(value, file, legacy=False, kind=YoloModel, alias="Model")
    found = agrees(model, file)
    assert (found.task, found.names) == ("detect", {0: "cat", 1: "dog"})


def test_an_activation_in_the_yaml_stays(file: Path) -> None:
    model = network("nn.Hardswish()")
    model.yaml["activation"] = "nn.ReLU()"
    torch.save(model, file)
    found = read_weights(file)
    assert found.model is not None
    assert found.model["activation"] == "nn.ReLU()"


def test_half_precision_networks(file: Path) -> None:
    model = network()
    torch.save({"model": model.half(), "ema": None}, file)
    agrees(model.float(), file)


class Wrapper(torch.nn.Module):
    """Pretends, in the pickle, to be what stands around a network."""

    def __init__(self, **children: torch.nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Smoothing:
    """Pretends to be what keeps smoothed weights."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.ema, self.updates = network, 7


@pytest.mark.parametrize(
    ("alias", "child"),
    [("DistributedDataParallel", "module"), ("DataParallel", "module"), ("AutoShape", "model"), ("Ensemble", "0")],
)
@pytest.mark.parametrize("key", ["ema", "model", None])
def test_what_stands_around_a_network(alias: str, child: str, key: str | None, file: Path) -> None:
    model = network()
    wrapped = Wrapper(**{child: model})
    save_as_yolov5({key: wrapped, "epoch": 1} if key else wrapped, file, False, Wrapper, alias)
    agrees(model, file)


def test_smoothed_weights_in_their_keeper(file: Path) -> None:
    model = network()
    save_as_yolov5({"ema": Smoothing(model), "model": None}, file, False, Smoothing, "ModelEMA")
    agrees(model, file)


def test_an_ensemble_of_several(file: Path) -> None:
    several = Wrapper(**{"0": network(), "1": network()})
    save_as_yolov5(several, file, False, Wrapper, "Ensemble")
    with pytest.raises(UserError, match=r"weights.pt holds 2 networks, an ensemble; give the weights of one"):
        read_weights(file)


def test_a_wrapper_that_contains_itself(file: Path) -> None:
    state = b"}(" + text("_modules") + b"}" + text("module") + b"h\x00su"
    save_bytes(b"\x80\x02cmodels.yolo\nDataParallel\n)\x81q\x00" + state + b"b.", file)
    with pytest.raises(UserError, match=r"weights.pt "):
        read_weights(file)


@torch.no_grad()
def test_fused_networks(file: Path) -> None:
    """Whose BatchNorms went into the convolutions, for speed: they can be trained again."""
    model = network()
    fused = copy.deepcopy(model)
    for part in fused.modules():
        if isinstance(part, layers.Conv):
            scale = part.bn.weight / (part.bn.running_var + part.bn.eps).sqrt()
            part.conv.weight *= scale.view(-1, 1, 1, 1)
            part.conv.bias = torch.nn.Parameter(part.bn.bias - part.bn.running_mean * scale)
            del part.bn
            part.forward = part.set_activation  # a method, as there is one of the fused layer in YOLOv5's files
    torch.save(fused, file)
    agrees(model, file)


@pytest.mark.parametrize("key", [None, "model", "ema", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_bare_tensors(key: str | None, prefix: str, file: Path) -> None:
    state = {prefix + name: tensor for name, tensor in network().state_dict().items()}
    torch.save({key: state, "epoch": 3} if key else state, file)
    found = read_weights(file)
    assert (found.model, found.task, found.source) == (None, "", "tensors")
    torch.testing.assert_close(found.state, {name.removeprefix("module."): x for name, x in state.items()})
    assert transfer(build_model(OLD), found.state).misfits == []


@pytest.mark.parametrize("name", ["yolov5n-cls.yaml", "yolov5m-cls.yaml"])
def test_a_classifier_is_known_by_its_first_convolution(name: str, file: Path) -> None:
    """So that it can be validated and fine-tuned without a --cfg."""
    names = {0: "cat", 1: "dog", 2: "cow"}
    model = build_model(name, nc=3)
    pickled = {"model": PickledClassifier(model.model, names)}
    save_as_yolov5(pickled, file, legacy=False, kind=PickledClassifier, alias="ClassificationModel")
    found = read_weights(file)
    assert (found.task, found.names) == ("classify", names)
    assert found.model is not None
    again = build_model(found.model)
    assert transfer(again, found.state) == (len(model.state_dict()), len(model.state_dict()), [])


def test_values_beside_the_model_do_no_harm(file: Path) -> None:
    import argparse
    import datetime
    import pathlib

    import numpy as np

    beside = {
        "best_fitness": np.float64(0.5),
        "curve": np.arange(3),
        "opt": argparse.Namespace(weights=pathlib.PosixPath("x"), evolve={1, 2}),
        "date": datetime.datetime(2026, 1, 1),
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
    }
    save_as_yolov5({"model": Pickled(1.0), "ema": None, **beside}, file, legacy=False)
    assert list(read_weights(file).state) == ["weight"]


def test_a_model_that_contains_itself(file: Path) -> None:
    state = (
        b"}(" + text("_parameters") + b"}" + text("_buffers") + b"}" + text("_modules") + b"}" + text("0") + b"h\x00su"
    )
    save_bytes(b"\x80\x02cmodels.yolo\nModel\n)\x81q\x00" + state + b"b.", file)
    with pytest.raises(UserError, match=r"weights.pt is not a whole PyTorch weight file \(maximum recursion"):
        read_weights(file)


# Files that would run something


class Call:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


WRITE = "open('written', 'w').close()"
CALLS = [
    (Call(os.system, "touch written"), "posix.system"),
    (Call(builtins.eval, WRITE), "builtins.eval"),
    (Call(builtins.exec, WRITE), "builtins.exec"),
    (Call(builtins.open, "written", "w"), "(_?io).open"),
    (Call(builtins.__import__, "antigravity"), "builtins.__import__"),
    (Call(subprocess.Popen, ["touch", "written"]), "subprocess.Popen"),
    (Call(torch.hub.load, "a/b", "c"), "torch.hub.load"),
    (Call(functools.partial, os.system, "touch written"), "functools.partial"),
    (Call(torch.load, "other.pt"), "torch.serialization.load"),
    (Call(torch.storage._load_from_bytes, b""), "torch.storage._load_from_bytes"),
    (Call(OrderedDict, [("a", Call(os.system, "touch written"))]), "posix.system"),
    (Call(OrderedDict, Call(list, Call(tuple, [Call(builtins.exec, WRITE)]))), "builtins.exec"),
]


@pytest.mark.parametrize("save", [save_zip, save_legacy, save_pickle, save_old_pickle])
@pytest.mark.parametrize(("call", "name"), CALLS)
def test_calls_are_refused_by_name(save: Callable[[Any, Path], None], call: Call, name: str, file: Path) -> None:
    save({"model": call, "ema": None}, file)
    with pytest.raises(UserError, match=f"weights.pt was refused, and nothing in it was run: it names '{name}'"):
        read_weights(file)
    assert list(file.parent.iterdir()) == [file]


def test_attributes_are_not_looked_up(file: Path) -> None:
    """Methods are pickled that way; nothing stands in their place, and it cannot be called."""
    save_zip({"model": Call(builtins.getattr, "a", "upper"), "ema": None}, file)
    with pytest.raises(UserError, match="contains no model"):
        read_weights(file)
    save_bytes(b"\x80\x02cbuiltins\ngetattr\n" + text("a") + text("upper") + b"\x86R)R.", file)
    with pytest.raises(UserError, match=r"was refused, and nothing in it was run: it names 'builtins.getattr'"):
        read_weights(file)


def test_the_payload_would_work(file: Path) -> None:
    save_pickle({"model": CALLS[0][0]}, file)
    pickle.loads(file.read_bytes())
    assert (file.parent / "written").exists()


def short(value: str) -> bytes:
    """The opcode that pushes a string of at most 255 bytes (protocol 4)."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "hub.load"),
        ("torch", "serialization.os.system"),
        ("torch.nn.modules", "module.torch.hub.load"),
        ("models.yolo", "os.system"),
        ("collections", "OrderedDict.fromkeys"),
        ("modelsx", "Model"),
        ("torch", "nn"),
    ],
)
def test_names_through_attributes_are_refused(module: str, name: str, file: Path) -> None:
    save_bytes(b"\x80\x04" + short(module) + short(name) + b"\x93.", file)
    with pytest.raises(UserError, match=f"it names '{module}.{name}'"):
        read_weights(file)


def test_stubs_are_never_the_real_class(file: Path) -> None:
    save_bytes(b"\x80\x02cmodels.yolo\nbuild_model\n(" + text("none.yaml") + b"tR.", file)  # a function of ours
    with pytest.raises(UserError, match="contains no model"):
        read_weights(file)


@pytest.mark.parametrize(
    "target", ["torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "models.yolo\nModel"]
)
def test_build_cannot_change_what_we_share(target: str, file: Path) -> None:
    state = b"N}" + text("__defaults__") + b")s\x86"  # (None, {"__defaults__": ()}): attributes to set
    save_bytes(b"\x80\x02c" + target.encode() + b"\n" + state + b"b.", file)
    with pytest.raises(UserError):
        read_weights(file)
    assert yolov5_pickle.rebuild_tensor.__defaults__ is None


def test_sources_of_classes_are_not_compared(file: Path) -> None:
    """torch writes `<name>.patch`, with text from the file, where a class's source differs and it asks for patches."""
    attributes = b"N}" + text("dump_patches") + b"\x88s" + text("__name__") + text("evil") + b"s\x86"
    container = b"ctorch._utils\n_rebuild_tensor_v2\n" + attributes + b"b"
    network = b"(" + text("module") + container + text("a.py") + text("source") + b"tQ"
    head = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    file.write_bytes(head + b"\x80\x02" + network + b"." + pickle.dumps([], 2))
    with pytest.raises(UserError, match="contains no model"):
        read_weights(file)
    assert list(file.parent.iterdir()) == [file]
