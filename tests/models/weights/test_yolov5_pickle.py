"""YOLOv5's weight files, and pickles that would run code."""

from __future__ import annotations

import argparse
import builtins
import copy
import datetime
import functools
import os
import pathlib
import pickle
import subprocess
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.layers import Conv
from models.loading import transfer
from models.weights import Weights, read_weights
from models.yolo import YoloModel, build_model
from models.yolov5_pickle import rebuild_tensor
from tests.models.weights.files import Call, save_bytes, save_legacy, save_old_pickle, save_pickle, save_zip, text
from utils.errors import UserError

# YOLOv5's files


def test_official_file(shared: Path) -> None:
    official = read_weights(shared / "weights" / "yolov5n.pt")
    assert (official.task, official.source, len(official.names), official.names[16]) == ("detect", "yolov5", 80, "dog")
    assert official.model is not None
    assert official.model["backbone"][0] == [-1, 1, "Conv", [64, 6, 2, 2]]
    model = build_model("yolov5n.yaml")
    assert transfer(model, official.state) == (349, 349, [])
    torch.testing.assert_close(model.state_dict(), official.state, rtol=0, atol=0, check_dtype=True)


class Pickled(torch.nn.Module):
    """A network that is pickled under the name of a class of YOLOv5."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value, dtype=torch.float16))
        self.register_buffer("anchor_grid", torch.ones(1))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.names = ["cat", "dog"]
        self.yaml = {"nc": 2, "anchors": ((1, 2),)}


def save_as_yolov5(value: Any, path: Path, legacy: bool, kind: type = Pickled, alias: str = "PoseModel") -> None:
    """Save `value`, with class `kind` renamed to models.yolo.`alias`."""
    name, alias_name = f"{kind.__module__}\n{kind.__name__}\n".encode(), f"models.yolo\n{alias}\n".encode()
    plain = path.with_suffix(".plain")
    torch.save(value, plain, _use_new_zipfile_serialization=not legacy)
    if legacy:
        path.write_bytes(plain.read_bytes().replace(name, alias_name))
        return
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for record in old.namelist():
            new.writestr(record, old.read(record).replace(name, alias_name))


@pytest.mark.parametrize(("ema", "expected"), [(Pickled(2.0), 2.0), (None, 1.0)])
def test_the_ema_is_preferred(ema: Any, expected: float, file: Path) -> None:
    save_as_yolov5({"epoch": 3, "model": Pickled(1.0), "ema": ema, "optimizer": None}, file, legacy=False)
    weights = read_weights(file)
    torch.testing.assert_close(weights.state, {"weight": torch.full((2,), expected)}, rtol=0, atol=0)
    assert (weights.names, weights.model) == ({0: "cat", 1: "dog"}, {"nc": 2, "anchors": [[1, 2]]})
    assert weights.task == "PoseModel"  # for no task of ours


OLD: dict[str, Any] = {  # as up to release 4.0: Focus, BottleneckCSP and SPP
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


def network(activation: str = "nn.SiLU()", slope: float | None = None) -> Any:
    """Build `OLD` with statistics as after training, and the buffers and YAML of older files.

    slope: of the LeakyReLU in every `BottleneckCSP`.
    """
    rows = {part: [with_slope(row, slope) for row in OLD[part]] for part in ("backbone", "head")}
    model = build_model({**OLD, **rows, "activation": activation}).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(part.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(part.running_var, 0.5, 2)
            torch.nn.init.uniform_(part.bias, -0.5, 0.5)
    model.yaml = {**OLD, "ch": 3, "flips": (1, torch.nn.Identity())}
    model.names = ["cat", "dog"]
    model.head.register_buffer("anchor_grid", torch.ones(2, 1, 2, 1, 1, 2))
    return model


def with_slope(row: list[Any], slope: float | None) -> list[Any]:
    if row[2] != "BottleneckCSP":
        return row
    return [*row[:3], [row[3][0], len(row[3]) == 1, 1, 0.5, slope]]


@torch.no_grad()
def assert_same_outputs(model: Any, file: Path) -> Weights:
    """Read the file, build its network again, and compare its outputs with those of `model`."""
    weights = read_weights(file)
    assert weights.model is not None
    again = build_model(weights.model).eval()
    assert transfer(again, weights.state)[1:] == (len(again.state_dict()), [])
    assert set(again.state_dict()) <= set(weights.state)
    images = torch.rand(1, 3, 32, 48)
    torch.testing.assert_close(again(images), model(images), rtol=1e-4, atol=1e-5)
    return weights


@pytest.mark.parametrize("bare", [False, True])
def test_older_layers_compute_the_same(bare: bool, file: Path) -> None:
    model = network()
    value = model if bare else {"epoch": -1, "model": model, "ema": None}
    save_as_yolov5(value, file, legacy=False, kind=YoloModel, alias="Model")
    weights = assert_same_outputs(model, file)
    assert (weights.task, weights.names) == ("detect", {0: "cat", 1: "dog"})


@pytest.mark.parametrize(("activation", "slope"), [("nn.Hardswish()", None), ("nn.SiLU()", 0.1)])
def test_releases_before_5_are_refused(activation: str, slope: float | None, file: Path) -> None:
    """Their activations are in YOLOv5's code, not in the file's YAML."""
    save_as_yolov5({"model": network(activation, slope)}, file, legacy=False, kind=YoloModel, alias="Model")
    with pytest.raises(UserError, match=r"weights.pt is from a YOLOv5 release before v5\.0: .*; give"):
        read_weights(file)


def test_networks_in_files_of_old_torch_are_refused(file: Path) -> None:
    save_as_yolov5({"model": Pickled(1.0)}, file, legacy=True)
    with pytest.raises(UserError, match=r"weights.pt holds classes as torch before 1\.6 wrote them, .*; give"):
        read_weights(file)


def test_a_pickle_that_is_too_large(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.yolov5_pickle.MAX_PICKLE_BYTES", 2**16)
    save_bytes(b"\x80\x02" + b"]" * 2**16, file)
    with pytest.raises(UserError, match=r"weights.pt was refused: it describes its tensors in more than"):
        read_weights(file)


def test_an_activation_in_the_yaml_is_preferred(file: Path) -> None:
    model = network("nn.Hardswish()")
    model.yaml["activation"] = "nn.ReLU()"
    torch.save(model, file)
    assert (read_weights(file).model or {})["activation"] == "nn.ReLU()"


def test_half_precision(file: Path) -> None:
    model = network()
    torch.save({"model": model.half(), "ema": None}, file)
    assert_same_outputs(model.float(), file)


class Wrapper(torch.nn.Module):
    """A module around a network, pickled under another name."""

    def __init__(self, **children: torch.nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Average:
    """An object that holds averaged weights, pickled under another name."""

    def __init__(self, network: torch.nn.Module) -> None:
        self.ema, self.updates = network, 7


@pytest.mark.parametrize(
    ("alias", "child"),
    [("DistributedDataParallel", "module"), ("DataParallel", "module"), ("AutoShape", "model"), ("Ensemble", "0")],
)
@pytest.mark.parametrize("key", ["ema", "model", None])
def test_wrappers_around_a_network(alias: str, child: str, key: str | None, file: Path) -> None:
    model = network()
    wrapped = Wrapper(**{child: model})
    save_as_yolov5({key: wrapped, "epoch": 1} if key else wrapped, file, False, Wrapper, alias)
    assert_same_outputs(model, file)


def test_the_ema_as_an_object(file: Path) -> None:
    model = network()
    save_as_yolov5({"ema": Average(model), "model": None}, file, False, Average, "ModelEMA")
    assert_same_outputs(model, file)


def test_an_ensemble_of_several(file: Path) -> None:
    several = Wrapper(**{"0": network(), "1": network()})
    save_as_yolov5(several, file, False, Wrapper, "Ensemble")
    with pytest.raises(UserError, match=r"weights.pt is an ensemble of 2 networks; give the weights of one"):
        read_weights(file)


@torch.no_grad()
def test_fused_layers(file: Path) -> None:
    """A BatchNorm that YOLOv5 folded into its convolution is restored, so that the network can be trained."""
    model = network()
    fused = copy.deepcopy(model)
    for part in fused.modules():
        if isinstance(part, Conv):
            scale = part.bn.weight / (part.bn.running_var + part.bn.eps).sqrt()
            part.conv.weight *= scale.view(-1, 1, 1, 1)
            part.conv.bias = torch.nn.Parameter(part.bn.bias - part.bn.running_mean * scale)
            del part.bn
            part.forward = part.set_activation  # a method, as in YOLOv5's files
    torch.save(fused, file)
    assert_same_outputs(model, file)


@pytest.mark.parametrize("key", [None, "model", "ema", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_bare_tensors(key: str | None, prefix: str, file: Path) -> None:
    state = {prefix + name: tensor for name, tensor in network().state_dict().items()}
    torch.save({key: state, "epoch": 3} if key else state, file)
    weights = read_weights(file)
    assert (weights.model, weights.task, weights.source) == (None, "", "tensors")
    torch.testing.assert_close(weights.state, {name.removeprefix("module."): x for name, x in state.items()})
    assert transfer(build_model(OLD), weights.state).misfits == []


@pytest.mark.parametrize("name", ["yolov5n-cls.yaml", "yolov5m-cls.yaml"])
def test_a_classifier_is_known_by_its_first_convolution(name: str, file: Path) -> None:
    names = {0: "cat", 1: "dog", 2: "cow"}
    model = build_model(name, nc=3)
    pickled = Wrapper(model=model.model)
    pickled.names = names
    save_as_yolov5({"model": pickled}, file, False, Wrapper, "ClassificationModel")
    weights = read_weights(file)
    assert (weights.task, weights.names) == ("classify", names)
    assert weights.model is not None
    again = build_model(weights.model)
    assert transfer(again, weights.state) == (len(model.state_dict()), len(model.state_dict()), [])


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ({"imgsz": 128, "weights": pathlib.PosixPath("x")}, 128),
        (argparse.Namespace(imgsz=128), 128),
        ({"imgsz": "128"}, None),
        ({"lr0": 0.1}, None),
        (None, None),
    ],
)
def test_the_image_size_of_the_training(flags: Any, size: int | None, file: Path) -> None:
    save_as_yolov5({"model": Pickled(1.0), "opt": flags}, file, legacy=False)
    assert read_weights(file).image_sides == (size and (size, size))


def test_other_values_in_a_file(file: Path) -> None:
    values = {
        "best_fitness": np.float64(0.5),
        "curve": np.arange(3),
        "opt": argparse.Namespace(weights=pathlib.PosixPath("x"), evolve={1, 2}),
        "date": datetime.datetime(2026, 1, 1),
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "dtype": torch.float16,
    }
    save_as_yolov5({"model": Pickled(1.0), "ema": None, **values}, file, legacy=False)
    assert list(read_weights(file).state) == ["weight"]


# Files that would run code


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
    with pytest.raises(UserError, match=f"it names '{name}'|as torch before 1.6 wrote them"):
        read_weights(file)
    assert list(file.parent.iterdir()) == [file]


def test_getattr_is_not_called(file: Path) -> None:
    """Methods are pickled with it. The result is a stub, which must not be called."""
    save_zip({"model": Call(builtins.getattr, "a", "upper"), "ema": None}, file)
    with pytest.raises(UserError, match="contains no model"):
        read_weights(file)
    save_bytes(b"\x80\x02cbuiltins\ngetattr\n" + text("a") + text("upper") + b"\x86R)R.", file)
    with pytest.raises(UserError, match=r"was refused, and nothing in it was run: it names 'builtins.getattr'"):
        read_weights(file)


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
    save_bytes(b"\x80\x04" + text(module) + text(name) + b"\x93.", file)
    with pytest.raises(UserError, match=f"it names '{module}.{name}'"):
        read_weights(file)


def test_a_stub_is_not_the_real_function(file: Path) -> None:
    save_bytes(b"\x80\x02cmodels.yolo\nbuild_model\n(" + text("none.yaml") + b"tR.", file)
    with pytest.raises(UserError, match="contains no model"):
        read_weights(file)


@pytest.mark.parametrize(
    "target", ["torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "models.yolo\nModel"]
)
def test_build_does_not_change_shared_objects(target: str, file: Path) -> None:
    state = b"N}" + text("__defaults__") + b")s\x86"  # (None, {"__defaults__": ()}): attributes to set
    save_bytes(b"\x80\x02c" + target.encode() + b"\n" + state + b"b.", file)
    with pytest.raises(UserError):
        read_weights(file)
    assert rebuild_tensor.__defaults__ is None


def test_sources_of_classes_are_not_compared(file: Path) -> None:
    """If they differ, torch would write text from the file to `<name>.patch`."""
    attributes = b"N}" + text("dump_patches") + b"\x88s" + text("__name__") + text("evil") + b"s\x86"
    container = b"ctorch._utils\n_rebuild_tensor_v2\n" + attributes + b"b"
    network = b"(" + text("module") + container + text("a.py") + text("source") + b"tQ"
    head = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    file.write_bytes(head + b"\x80\x02" + network + b"." + pickle.dumps([], 2))
    with pytest.raises(UserError, match="holds classes as torch before 1"):
        read_weights(file)
    assert list(file.parent.iterdir()) == [file]
