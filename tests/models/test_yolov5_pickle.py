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
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.layers import BottleneckCSP, Conv
from models.loading import transfer
from models.weights import Weights, read_weights
from models.yolo import YoloModel, build_model
from models.yolov5_pickle import rebuild_tensor
from utils.errors import UserError


def refused(file: Path, names: str = "weights.pt") -> None:
    """Check that the file is refused in one sentence that contains `names`, and that nothing was written beside it."""
    with pytest.raises(UserError, match=names) as caught:
        read_weights(file)
    assert "\n" not in str(caught.value)
    assert list(file.parent.iterdir()) == [file]


class Call:
    """An object whose pickle is a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def save_zip(value: Any, path: Path) -> None:
    torch.save(value, path)


def save_legacy(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def save_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=4))


def save_old_pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, protocol=0))


def save_bytes(data: bytes, path: Path) -> None:
    """Write the bytes of a pickle as a zip file of torch."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")


def text(value: str) -> bytes:
    """Return the opcode that pushes a string (protocol 2)."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


class Pickled(torch.nn.Module):
    """A network that is pickled under the name of a class of YOLOv5."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value, dtype=torch.float16))
        self.register_buffer("anchor_grid", torch.ones(1))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.names = ["cat", "dog"]
        self.yaml = {"nc": 2, "anchors": ((1, 2),)}


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


def save_as_yolov5(
    value: Any, path: Path, kind: type = Pickled, alias: str = "PoseModel", module: str = "models.yolo"
) -> None:
    """Save `value`, with class `kind` renamed to `module`.`alias`."""
    name, alias_name = f"{kind.__module__}\n{kind.__name__}\n".encode(), f"{module}\n{alias}\n".encode()
    plain = path.with_suffix(".plain")
    torch.save(value, plain)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for record in old.namelist():
            new.writestr(record, old.read(record).replace(name, alias_name))
    plain.unlink()


# YOLOv5's files


@pytest.mark.parametrize(("ema", "expected"), [(Pickled(2.0), 2.0), (None, 1.0)])
def test_the_ema_is_preferred_and_other_values_are_ignored(ema: Any, expected: float, file: Path) -> None:
    others = {
        **{"best_fitness": np.float64(0.5), "curve": np.arange(3), "date": datetime.datetime(2026, 1, 1)},
        **{"size": torch.Size([1, 2]), "device": torch.device("cpu"), "dtype": torch.float16},
        "opt": argparse.Namespace(weights=pathlib.PosixPath("x"), evolve={1, 2}, imgsz=128),
    }
    save_as_yolov5({"epoch": 3, "model": Pickled(1.0), "ema": ema, "optimizer": None, **others}, file)
    weights = read_weights(file)
    torch.testing.assert_close(weights.state, {"weight": torch.full((2,), expected)}, rtol=0, atol=0)
    assert (weights.names, weights.model) == ({0: "cat", 1: "dog"}, {"nc": 2, "anchors": [[1, 2]]})
    assert (weights.task, weights.image_sides) == ("PoseModel", (128, 128))  # for no task of ours


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


def network(activation: str = "nn.SiLU()") -> Any:
    """Build `OLD` with statistics as after training, and the buffers and YAML of older files."""
    model = build_model({**OLD, "activation": activation}).eval()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(part.running_mean, -0.5, 0.5)
            torch.nn.init.uniform_(part.running_var, 0.5, 2)
            torch.nn.init.uniform_(part.bias, -0.5, 0.5)
    model.yaml = {**OLD, "ch": 3, "flips": (1, torch.nn.Identity())}
    model.names = ["cat", "dog"]
    model.head.register_buffer("anchor_grid", torch.ones(2, 1, 2, 1, 1, 2))
    return model


def older() -> Any:
    """Return a network whose `BottleneckCSP`s have the activation of releases before v5.0."""
    model = network()
    for part in model.modules():
        if isinstance(part, BottleneckCSP):
            part.act = torch.nn.LeakyReLU(0.1)
    return model


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


@pytest.mark.parametrize("key", [None, "model"])
def test_older_layers_compute_the_same(key: str | None, file: Path) -> None:
    """In half precision, as YOLOv5 saves them."""
    model = network()
    save_as_yolov5({"epoch": -1, key: model.half()} if key else model.half(), file, YoloModel, "Model")
    weights = assert_same_outputs(model.float(), file)
    assert (weights.task, weights.names) == ("detect", {0: "cat", 1: "dog"})


@pytest.mark.parametrize(
    ("alias", "child"),
    [("DistributedDataParallel", "module"), ("AutoShape", "model"), ("Ensemble", "0"), ("ModelEMA", "")],
)
def test_wrappers_around_a_network(alias: str, child: str, file: Path) -> None:
    model = network()
    wrapped = Wrapper(**{child: model}) if child else Average(model)
    save_as_yolov5({"ema": wrapped, "model": None}, file, type(wrapped), alias)
    assert_same_outputs(model, file)


def test_an_activation_in_the_yaml_is_preferred(file: Path) -> None:
    model = network("nn.Hardswish()")
    model.yaml["activation"] = "nn.ReLU()"
    torch.save(model, file)
    assert (read_weights(file).model or {})["activation"] == "nn.ReLU()"


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
            part.forward = part.half  # a method, as in YOLOv5's files
    torch.save(fused, file)
    assert_same_outputs(model, file)


@pytest.mark.parametrize(("key", "prefix"), [(None, ""), ("ema", "module."), ("state_dict", "")])
def test_bare_tensors(key: str | None, prefix: str, file: Path) -> None:
    state = {prefix + name: tensor for name, tensor in network().state_dict().items()}
    torch.save({key: state, "epoch": 3} if key else state, file)
    weights = read_weights(file)
    assert (weights.model, weights.task, weights.source) == (None, "", "tensors")
    torch.testing.assert_close(weights.state, {name.removeprefix("module."): x for name, x in state.items()})
    assert transfer(build_model(OLD), weights.state)[2] == []


def test_a_classifier_is_known_by_its_first_convolution(file: Path) -> None:
    model = build_model("yolov5m-cls.yaml", nc=2)
    pickled = Wrapper(model=model.model)
    pickled.names = {0: "cat", 1: "dog"}
    save_as_yolov5({"model": pickled}, file, Wrapper, "ClassificationModel")
    weights = read_weights(file)
    assert (weights.task, weights.names) == ("classify", pickled.names)
    assert weights.model is not None
    assert transfer(build_model(weights.model), weights.state)[::2] == (len(model.state_dict()), [])


# Refused files


@pytest.mark.parametrize(
    "save",
    [
        lambda file: save_as_yolov5({"model": network("nn.Hardswish()")}, file, YoloModel, "Model"),
        lambda file: save_as_yolov5({"model": older()}, file, YoloModel, "Model"),
        lambda file: save_as_yolov5(Wrapper(**{"0": network(), "1": network()}), file, Wrapper, "Ensemble"),
        lambda file: save_legacy({"model": Pickled(1.0)}, file),  # classes in the format before torch 1.6
        lambda file: save_bytes(b"\x80\x02" + b"]" * 2**23, file),  # each byte makes an object
        # Methods are pickled with getattr. The result is a stub, which must not be called.
        lambda file: save_zip({"model": Call(builtins.getattr, "a", "upper"), "ema": None}, file),
        lambda file: save_bytes(b"\x80\x02cmodels.yolo\nbuild_model\n(" + text("none.yaml") + b"tR.", file),
    ],
)
def test_files_without_a_usable_network(save: Callable[[Path], None], file: Path) -> None:
    save(file)
    refused(file)


def test_a_file_of_ultralytics(file: Path) -> None:
    save_as_yolov5({"model": network()}, file, YoloModel, "DetectionModel", "ultralytics.nn.tasks")
    refused(file, r"ultralytics.* v9-t\.pt")


WRITE = "open('written', 'w').close()"


CALLS = [
    (Call(os.system, "touch written"), "posix.system"),
    (Call(builtins.eval, WRITE), "builtins.eval"),
    (Call(builtins.open, "written", "w"), "(_?io).open"),
    (Call(builtins.__import__, "antigravity"), "builtins.__import__"),
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
    refused(file, f"it names '{name}'|as torch before 1.6 wrote them")


@pytest.mark.parametrize(
    "path",
    [
        *("torch hub.load", "torch serialization.os.system", "torch.nn.modules module.torch.hub.load"),
        *("models.yolo os.system", "collections OrderedDict.fromkeys", "modelsx Model", "torch nn"),
    ],
)
def test_names_through_attributes_are_refused(path: str, file: Path) -> None:
    module, name = path.split()
    save_bytes(b"\x80\x04" + text(module) + text(name) + b"\x93.", file)
    refused(file, f"it names '{module}.{name}'")


def test_the_result_of_getattr_is_not_called(file: Path) -> None:
    save_bytes(b"\x80\x02cbuiltins\ngetattr\n" + text("a") + text("upper") + b"\x86R)R.", file)
    refused(file, "it names 'builtins.getattr'")


@pytest.mark.parametrize(
    "target", ["torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict", "models.yolo\nModel"]
)
def test_build_does_not_change_shared_objects(target: str, file: Path) -> None:
    state = b"N}" + text("__defaults__") + b")s\x86"  # (None, {"__defaults__": ()}): attributes to set
    save_bytes(b"\x80\x02c" + target.encode() + b"\n" + state + b"b.", file)
    refused(file)
    assert rebuild_tensor.__defaults__ is None


def test_sources_of_classes_are_not_compared(file: Path) -> None:
    """If they differ, torch would write text from the file to `<name>.patch`."""
    attributes = b"N}" + text("dump_patches") + b"\x88s" + text("__name__") + text("evil") + b"s\x86"
    container = b"ctorch._utils\n_rebuild_tensor_v2\n" + attributes + b"b"
    network = b"(" + text("module") + container + text("a.py") + text("source") + b"tQ"
    head = b"".join(pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    file.write_bytes(head + b"\x80\x02" + network + b"." + pickle.dumps([], 2))
    refused(file, "holds classes as torch before 1")
