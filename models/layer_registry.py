"""The layers that rows of a model YAML may name: `LAYERS`, torch.nn's layers, and the layers in a user's file.

Called by models/yolo.py, and by the scripts for --layers. A new layer is a class in models/layers.py and a line in
`LAYERS`, with the adapter that says which arguments its constructor takes.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from models import layers
from models.heads.anchors import Detect, Segment
from models.heads.dfl import DetectDFL
from utils.errors import UserError, nearest
from utils.files import looked_for
from utils.user_code import running, trust

MAX_COUNT = 4096  # largest number of classes, channels or repetitions; a larger one is a typing error
# Modules of torch.nn whose classes cannot be layers of a network.
NOT_LAYERS = ("torch.nn.modules.loss", "torch.nn.modules.container", "torch.nn.modules.module", "torch.nn.parallel")
OTHER_LAYERS = "and torch.nn's layers, such as nn.MaxPool2d; to use your own, name their file with --layers"


@dataclass(frozen=True)
class Scaling:
    """Scales the numbers of a YAML to its depth and width."""

    depth: float
    width: float
    multiple: int  # channels are rounded up to a multiple of it
    outputs: int  # anchors per level * (5 + nc); this number of channels is not scaled

    def channels(self, count: Any) -> int:
        """Return the scaled number of channels. Raises ValueError if `count` is not a valid number."""
        if not is_count(count):
            raise ValueError(f"the first argument is the number of output channels, 1 to {MAX_COUNT}, not {count!r}")
        return count if count == self.outputs else math.ceil(count * self.width / self.multiple) * self.multiple

    def repeats(self, number: int) -> int:
        """Return the scaled number of repetitions."""
        return max(round(number * self.depth), 1) if number > 1 else number


@dataclass(frozen=True)
class LayerPlacement:
    """The inputs of a layer's constructor: the row, and the channels of its input maps."""

    channels: tuple[int, ...]  # channels of each input map
    repeats: int
    args: tuple[Any, ...]
    scaling: Scaling

    @property
    def c1(self) -> int:
        """Channels of the only input map. Raises ValueError if there are several."""
        if len(self.channels) != 1:
            raise ValueError(f"it takes one input, not {len(self.channels)}: join them with Concat first")
        return self.channels[0]

    @property
    def c2(self) -> int:
        """Output channels: the first argument, scaled. Raises ValueError if there is none."""
        if not self.args:
            raise ValueError("the first argument, the number of output channels, is missing")
        return self.scaling.channels(self.args[0])


@dataclass(frozen=True)
class LayerMaker:
    """Builds the layer of a row.

    Attributes:
        layer: class of the layer, or a function that returns an instance
        make: builds the layer at its place in the network
    """

    layer: Callable[..., nn.Module]
    make: Callable[[LayerPlacement], nn.Module]

    def __call__(self, placement: LayerPlacement) -> nn.Module:
        return self.make(placement)


def convolving(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(c1, c2, *args[1:])`; repetitions are chained."""

    def make(placement: LayerPlacement) -> nn.Module:
        widths = [placement.c1] + [placement.c2] * placement.repeats
        return _chain([layer(c1, c2, *placement.args[1:]) for c1, c2 in itertools.pairwise(widths)])

    return LayerMaker(layer, make)


def repeating(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(c1, c2, repeats, *args[1:])`, which repeats its inner blocks."""
    return LayerMaker(layer, lambda p: layer(p.c1, p.c2, p.repeats, *p.args[1:]))


def plain(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(*args)`, which takes no channels; repetitions are chained."""
    return LayerMaker(layer, lambda p: _chain([layer(*p.args) for _ in range(p.repeats)]))


def narrowing(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(c1, *args)`, which takes the input channels only."""
    return LayerMaker(layer, lambda p: layer(p.c1, *p.args))


def detecting(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(*args, channels)`, which takes the channels of all its inputs."""
    return LayerMaker(layer, lambda p: layer(*p.args, p.channels))


def _chain(parts: list[nn.Module]) -> nn.Module:
    """Chain layers. A single layer is returned as it is, so that its state-dict keys stay the same."""
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def _segment(placement: LayerPlacement) -> nn.Module:
    """Build `Segment` with scaled prototype channels."""
    nc, anchors, masks, prototypes = placement.args
    return Segment(nc, anchors, masks, placement.scaling.channels(prototypes), placement.channels)


def _aggregating(layer: Callable[..., nn.Module]) -> Callable[[LayerPlacement], nn.Module]:
    """Adapt `layer(c1, c2, part, process, repeats)`, with all channels scaled; `process` may be absent."""

    def make(placement: LayerPlacement) -> nn.Module:
        widths = [placement.scaling.channels(count) for count in placement.args[1:3]]
        return layer(placement.c1, placement.c2, *widths, *placement.args[3:], repeats=placement.repeats)

    return make


LAYERS: dict[str, LayerMaker] = {
    "Conv": convolving(layers.Conv),
    "DWConv": convolving(layers.DWConv),
    "DWConvTranspose2d": convolving(layers.DWConvTranspose2d),
    "GhostConv": convolving(layers.GhostConv),
    "CrossConv": convolving(layers.CrossConv),
    "MixConv2d": convolving(layers.MixConv2d),
    "Focus": convolving(layers.Focus),
    "Bottleneck": convolving(layers.Bottleneck),
    "GhostBottleneck": convolving(layers.GhostBottleneck),
    "BottleneckCSP": repeating(layers.BottleneckCSP),
    "C3": repeating(layers.C3),
    "C3x": repeating(layers.C3x),
    "C3TR": repeating(layers.C3TR),
    "C3Ghost": repeating(layers.C3Ghost),
    "C3SPP": convolving(layers.C3SPP),
    "SPP": convolving(layers.SPP),
    "SPPF": convolving(layers.SPPF),
    "Contract": plain(layers.Contract),
    "Expand": plain(layers.Expand),
    "RepConv": convolving(layers.RepConv),
    "ELAN": LayerMaker(layers.ELAN, _aggregating(layers.ELAN)),
    "RepNCSPELAN": LayerMaker(layers.RepNCSPELAN, _aggregating(layers.RepNCSPELAN)),
    "AConv": convolving(layers.AConv),
    "ADown": convolving(layers.ADown),
    "SPPELAN": LayerMaker(layers.SPPELAN, lambda p: layers.SPPELAN(p.c1, p.c2, *map(p.scaling.channels, p.args[1:]))),
    "CBLinear": LayerMaker(layers.CBLinear, lambda p: layers.CBLinear(p.c1, [*map(p.scaling.channels, p.args[0])])),
    "CBFuse": plain(layers.CBFuse),
    "Concat": plain(layers.Concat),
    "Proto": narrowing(layers.Proto),
    "Detect": detecting(Detect),
    "DetectDFL": LayerMaker(DetectDFL, lambda p: DetectDFL(p.args[0], p.channels, *p.args[1:])),
    "Segment": LayerMaker(Segment, _segment),
    "Classify": narrowing(layers.Classify),
}
# Layers of torch.nn that need the input channels; all others are called with the arguments of the row.
TORCH_LAYERS_WITH_CHANNELS: dict[str, LayerMaker] = {
    "BatchNorm2d": LayerMaker(
        nn.BatchNorm2d, lambda p: nn.BatchNorm2d(p.c1, *p.args) if p.args else layers.batch_norm(p.c1)
    ),
    "Conv2d": convolving(nn.Conv2d),
    "ConvTranspose2d": convolving(nn.ConvTranspose2d),
}


def layer_maker(name: Any) -> LayerMaker:
    """Return the maker of the layer that a row names. Raises ValueError, with part of a sentence, if it is unknown."""
    if isinstance(name, str) and name in LAYERS:
        return LAYERS[name]
    prefix, _, word = str(name).rpartition(".")
    if prefix not in ("nn", "torch.nn"):
        hint = nearest(str(name), LAYERS)
        raise ValueError(f"unknown module '{name}'{hint}; known are {', '.join(LAYERS)}, {OTHER_LAYERS}")
    classes = {name: kind for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    if word not in classes:
        raise ValueError(f"unknown module 'nn.{word}', which torch.nn does not have{nearest(word, classes)}")
    layer = classes[word]
    if layer.__module__.startswith(NOT_LAYERS) or issubclass(layer, nn.modules.lazy.LazyModuleMixin):
        raise ValueError(
            f"nn.{word} is a loss, a container or a lazy layer and cannot be a row; name a layer such as nn.MaxPool2d"
        )
    return TORCH_LAYERS_WITH_CHANNELS.get(word, plain(layer))


def add_layers(file: str | Path, is_named: bool = True) -> list[str]:
    """Register the layers that a user's Python file defines, and return their names. The file is run once.

    A layer is a class in the file that extends nn.Module. The names of its parameters decide how it is called:
    (c1, c2, *args[1:]), with c2 scaled, and with repeats after c2 if the third parameter is `n` or `repeats`;
    (c1, *args); (channels, *args) or (*args, channels=...), with the channels of all input maps; else (*args).
    Raises `UserError` if the file does not load, defines no layer, or defines one whose name is taken.

    Args:
        file: path of the Python file
        is_named: whether the user names the file now; otherwise it comes from the folder of a resumed run, which may be
            somebody else's, and is run only if this user has named the same file with the same content before
    """
    if not os.path.isfile(file):
        where = looked_for(Path(file))
        raise UserError(f"--layers {file} is not a file; give the path of a Python file that defines layers{where}")
    path = Path(file).resolve()
    name = f"layers of {path}"
    if name in sys.modules:
        return list(_layers_of(sys.modules[name]))
    trust(path, f"--layers {file}", is_named, "the run's settings.yaml")
    module = _load(path, name)
    classes = _layers_of(module)
    if not classes:
        raise UserError(f"{path} defines no layer; write a class that extends torch.nn.Module")
    for word in classes:
        if word in LAYERS:
            raise UserError(f"{path} defines a layer '{word}', but that name is taken; give it another name")
    sys.modules[name] = module
    LAYERS.update({word: _maker_by_parameters(layer) for word, layer in classes.items()})
    return list(classes)


def _load(path: Path, name: str) -> ModuleType:
    """Run a Python file as a module, which may import files beside it. Writes no bytecode into its folder."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; --layers takes a file whose name ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses look up the module of their class there
    try:
        with running(path):
            spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
        with suppress(ValueError):  # the file may have removed it
            sys.path.remove(str(path.parent))
    return module


def _layers_of(module: ModuleType) -> dict[str, type[nn.Module]]:
    """Return the layers that a module defines itself, without imported ones."""
    classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, nn.Module)]
    return {layer.__name__: layer for layer in classes if layer.__module__ == module.__name__}


def _maker_by_parameters(layer: type[nn.Module]) -> LayerMaker:
    """Choose the adapter of a user's layer by the names of its parameters."""
    names = list(inspect.signature(layer).parameters)
    if names[:2] == ["c1", "c2"]:
        return repeating(layer) if names[2:3] in (["n"], ["repeats"]) else convolving(layer)
    if names[:1] == ["c1"]:
        return narrowing(layer)
    if names[:1] == ["channels"]:
        return LayerMaker(layer, lambda p: layer(list(p.channels), *p.args))
    if "channels" in names:
        return LayerMaker(layer, lambda p: layer(*p.args, channels=list(p.channels)))
    return plain(layer)


def is_count(value: Any) -> bool:
    """Return whether `value` is a whole number from 1 to `MAX_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT
