"""From a model YAML to a network.

A YAML has `backbone` and `head`, lists of rows `[from, number, module, args]`, counted through from 0. `from` is the
row whose output goes in (-1: the one before), or a list of them. A new kind of layer is a class and a line in `LAYERS`,
or a class in a file of the user's (`add_layers`).
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import itertools
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from models.layers import (
    C3,
    C3SPP,
    C3TR,
    SPP,
    SPPF,
    Bottleneck,
    BottleneckCSP,
    C3Ghost,
    C3x,
    Classify,
    Concat,
    Contract,
    Conv,
    CrossConv,
    Detect,
    DWConv,
    DWConvTranspose2d,
    Expand,
    Focus,
    GhostBottleneck,
    GhostConv,
    MixConv2d,
    Proto,
    Segment,
    batch_norm,
)
from models.tasks import contract
from utils.config.options import is_number
from utils.errors import UserError, nearest
from utils.files import ROOT, find_file, read_yaml

KEYS = (
    *("task", "nc", "ch", "depth_multiple", "width_multiple", "channel_multiple", "anchors"),
    *("activation", "inplace", "backbone", "head"),
)
# Side of the image that is sent through each layer while building, in pixels: the largest stride that a model may have.
PROBE = 128
MOST_PARAMETERS, MOST_NUMBERS = 1e9, 1e8  # of a layer; in a map of a `PROBE`-pixel image
MOST, MOST_TIMES = 4096, 16  # classes, channels, repetitions; multiples of them: what is more is a slip of the pen


@dataclass(frozen=True)
class Scaling:
    """How a YAML's numbers become those of its size."""

    depth: float
    width: float
    multiple: int  # channels come in multiples of this
    outputs: int  # anchors per level * (5 + nc): a channel count of just this is not scaled

    def channels(self, count: Any) -> int:
        """Output channels for a row that asks for `count`. ValueError where that is no number of channels."""
        if not _is_count(count):
            raise ValueError(f"the first argument is the number of output channels, 1 to {MOST}, not {count!r}")
        return count if count == self.outputs else math.ceil(count * self.width / self.multiple) * self.multiple

    def repeats(self, number: int) -> int:
        """Repetitions for a row that asks for `number`."""
        return max(round(number * self.depth), 1) if number > 1 else number


@dataclass(frozen=True)
class Row:
    """One row of backbone or head.

    `source` is the row whose output goes in, counted from 0 (-1: the image), or several for a list of maps.
    """

    index: int
    source: int | tuple[int, ...]
    number: int
    module: str
    args: tuple[Any, ...]

    @property
    def sources(self) -> tuple[int, ...]:
        """The rows whose outputs go in."""
        return self.source if isinstance(self.source, tuple) else (self.source,)


@dataclass(frozen=True)
class Place:
    """What a layer learns about the place where it will stand."""

    channels: tuple[int, ...]  # of each input map
    repeats: int
    args: tuple[Any, ...]
    scaling: Scaling

    @property
    def c1(self) -> int:
        """Channels of the only input. ValueError where there are several."""
        if len(self.channels) != 1:
            raise ValueError(f"it takes one input, not {len(self.channels)}: join them with Concat first")
        return self.channels[0]

    @property
    def c2(self) -> int:
        """Output channels: the first argument, scaled."""
        if not self.args:
            raise ValueError("the first argument, the number of output channels, is missing")
        return self.scaling.channels(self.args[0])


Maker = Callable[[Place], nn.Module]


def convolving(layer: Callable[..., nn.Module]) -> Maker:
    """For `layer(c1, c2, *args[1:])`; a number above 1 puts several in a row."""

    def make(place: Place) -> nn.Module:
        widths = [place.c1] + [place.c2] * place.repeats
        return _chain([layer(c1, c2, *place.args[1:]) for c1, c2 in itertools.pairwise(widths)])

    return make


def repeating(layer: Callable[..., nn.Module]) -> Maker:
    """For `layer(c1, c2, repeats, *args[1:])`, which repeats something inside."""
    return lambda place: layer(place.c1, place.c2, place.repeats, *place.args[1:])


def plain(layer: Callable[..., nn.Module]) -> Maker:
    """For `layer(*args)`, which does not ask for channels; a number above 1 puts several in a row."""
    return lambda place: _chain([layer(*place.args) for _ in range(place.repeats)])


def narrowing(layer: Callable[..., nn.Module]) -> Maker:
    """For `layer(c1, *args)`, which learns of its channels what goes in."""
    return lambda place: layer(place.c1, *place.args)


def detecting(layer: Callable[..., nn.Module]) -> Maker:
    """For `layer(*args, channels)`, which takes all its inputs' channels."""
    return lambda place: layer(*place.args, place.channels)


def _chain(layers: list[nn.Module]) -> nn.Module:
    """The layers one after the other; a single one stays itself, so that its state-dict keys do."""
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _segmenting(place: Place) -> nn.Module:
    """`Segment`: the channels of its prototypes are scaled."""
    nc, anchors, masks, prototypes = place.args
    return Segment(nc, anchors, masks, place.scaling.channels(prototypes), place.channels)


LAYERS: dict[str, Maker] = {
    "Conv": convolving(Conv),
    "DWConv": convolving(DWConv),
    "DWConvTranspose2d": convolving(DWConvTranspose2d),
    "GhostConv": convolving(GhostConv),
    "CrossConv": convolving(CrossConv),
    "MixConv2d": convolving(MixConv2d),
    "Focus": convolving(Focus),
    "Bottleneck": convolving(Bottleneck),
    "GhostBottleneck": convolving(GhostBottleneck),
    "BottleneckCSP": repeating(BottleneckCSP),
    "C3": repeating(C3),
    "C3x": repeating(C3x),
    "C3TR": repeating(C3TR),
    "C3Ghost": repeating(C3Ghost),
    "C3SPP": convolving(C3SPP),
    "SPP": convolving(SPP),
    "SPPF": convolving(SPPF),
    "Contract": plain(Contract),
    "Expand": plain(Expand),
    "Concat": plain(Concat),
    "Proto": narrowing(Proto),
    "Detect": detecting(Detect),
    "Segment": _segmenting,
    "Classify": narrowing(Classify),
}
# Those of torch.nn are called as they are written, except where a row gives no channels that go in.
CHANNELLED: dict[str, Maker] = {
    "BatchNorm2d": lambda place: nn.BatchNorm2d(place.c1, *place.args) if place.args else batch_norm(place.c1),
    "Conv2d": convolving(nn.Conv2d),
    "ConvTranspose2d": convolving(nn.ConvTranspose2d),
}
# What torch.nn has beside layers, by the modules that define it.
NO_LAYERS = ("torch.nn.modules.loss", "torch.nn.modules.container", "torch.nn.modules.module", "torch.nn.parallel")
KNOWN_LAYERS = "and those of torch.nn, such as nn.MaxPool2d; a file with layers of your own goes to --layers"
# What the last row must be, by the YAML's `task:`, and how it is written.
HEADS: dict[str, tuple[type[nn.Module], str, str]] = {
    "detect": (Detect, "detection head", "[[17, 20, 23], 1, Detect, [nc, anchors]]"),
    "classify": (Classify, "classification head", "[-1, 1, Classify, [nc]]"),
    "segment": (Segment, "segmentation head", "[[17, 20, 23], 1, Segment, [nc, anchors, 32, 256]]"),
}


def maker(name: Any) -> Maker:
    """What makes the layer that a row names. ValueError, a part of a sentence, where there is none of that name."""
    if isinstance(name, str) and name in LAYERS:
        return LAYERS[name]
    prefix, _, word = str(name).rpartition(".")
    if prefix in ("nn", "torch.nn"):
        return _of_torch(word)
    hint = nearest(str(name), LAYERS)
    raise ValueError(f"unknown module '{name}'{hint}; known are {', '.join(LAYERS)}, {KNOWN_LAYERS}")


def _of_torch(word: str) -> Maker:
    """The maker of a layer of torch.nn, which is looked up there and nowhere else."""
    layers = {name: kind for name, kind in vars(nn).items() if inspect.isclass(kind) and issubclass(kind, nn.Module)}
    if word not in layers:
        raise ValueError(f"unknown module 'nn.{word}', which torch.nn does not have{nearest(word, layers)}")
    layer = layers[word]
    if layer.__module__.startswith(NO_LAYERS) or issubclass(layer, nn.modules.lazy.LazyModuleMixin):
        raise ValueError(
            f"nn.{word} cannot be a row, for it is a loss, a container, or a layer that learns its size later; name a "
            "layer such as nn.MaxPool2d"
        )
    return CHANNELLED.get(word, plain(layer))


def add_layers(file: str | Path) -> list[str]:
    """Let rows name the layers that a Python file of the user's defines; their names. The file is run, once.

    A layer is a class of the file that extends nn.Module. What it is called with follows from the names of its
    parameters: (c1, c2, *args[1:]), where c2 is scaled, with repeats in between where the third is `n` or `repeats`;
    (c1, *args); (channels, *args), or *args and channels=, of all maps that go in; else (*args).
    Raises `UserError` where the file does not load, has no layer, or one with the name of another.
    """
    path = next((path for path in (Path(file), ROOT / file) if os.path.isfile(path)), None)
    if path is None:
        raise UserError(f"--layers {file} is not a file; give the path of a Python file that defines layers")
    path = path.resolve()
    name = f"layers of {path}"
    if name in sys.modules:
        return list(_layers_of(sys.modules[name]))
    module = _load(path, name)
    found = _layers_of(module)
    if not found:
        raise UserError(f"{path} defines no layer; write a class that extends torch.nn.Module")
    for taken in found:
        if taken in LAYERS:
            raise UserError(f"{path} defines a layer '{taken}', but there is one of that name; give it another name")
    sys.modules[name] = module
    LAYERS.update({word: _by_parameters(layer) for word, layer in found.items()})
    return list(found)


def _load(path: Path, name: str) -> ModuleType:
    """The module in a Python file, which may import what lies beside it. Nothing is written into its folder."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; --layers takes one whose name ends with .py")
    module = importlib.util.module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = Path(error.filename or path)
        raise UserError(f"{where}, line {error.lineno or 1}: {error.msg}; mend the Python there") from None
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where_in = f", line {lines[-1]}" if lines else ""
        reason = _shortened(str(error).strip().split("\n")[0])
        raise UserError(f"{path}{where_in}: {type(error).__name__}: {reason}; mend it, so that it loads") from error
    finally:
        del sys.modules[name]
        with suppress(ValueError):  # the file may have taken it out
            sys.path.remove(str(path.parent))
        sys.dont_write_bytecode = written
    return module


def _layers_of(module: ModuleType) -> dict[str, type[nn.Module]]:
    """The layers that a module defines, not those that it imports."""
    classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, nn.Module)]
    return {layer.__name__: layer for layer in classes if layer.__module__ == module.__name__}


def _by_parameters(layer: Callable[..., nn.Module]) -> Maker:
    """The maker for a layer of the user's, by the names of its parameters."""
    names = list(inspect.signature(layer).parameters)
    if names[:2] == ["c1", "c2"]:
        return repeating(layer) if names[2:3] in (["n"], ["repeats"]) else convolving(layer)
    if names[:1] == ["c1"]:
        return narrowing(layer)
    if names[:1] == ["channels"]:
        return lambda place: layer(list(place.channels), *place.args)
    if "channels" in names:
        return lambda place: layer(*place.args, channels=list(place.channels))
    return plain(layer)


class Model(contract.Model):
    """A network of a YAML's rows. `yaml` builds it again; `names` are its classes."""

    def __init__(self, layers: Sequence[nn.Module], rows: Sequence[Row], yaml: dict[str, Any]) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)  # the attribute's name is part of every state-dict key
        self.rows = tuple(rows)
        self.yaml = yaml
        self.names = {number: str(number) for number in range(yaml["nc"])}
        self._later_inputs = {j for row in rows for j in row.sources if j != row.index - 1}

    @property
    def detect(self) -> Detect:
        """The detection head."""
        head = self.model[-1]
        assert isinstance(head, Detect)
        return head

    @property
    def strides(self) -> Tensor:
        """(levels,): pixels per cell of each level of a detector."""
        return self.detect.stride

    def forward(self, images: Tensor, *hints: Tensor) -> Any:
        """(b, 3, h, w), RGB in [0, 1], to what the head makes of it, which is given `hints` too.

        A detector: a raw map (b, anchors, h / stride, w / stride, 5 + nc) per level; height and width must be multiples
        of the largest stride. A classifier: logits (b, nc). A segmenter: what a detector gives, and its prototypes.
        """
        kept: dict[int, Tensor] = {}  # only what a later row asks for stays alive
        latest: Any = images
        for row, layer in zip(self.rows, self.model, strict=True):
            inputs = [latest if j == row.index - 1 else kept[j] for j in row.sources]
            latest = layer(
                inputs if isinstance(row.source, tuple) else inputs[0], *(hints if row is self.rows[-1] else ())
            )
            if row.index in self._later_inputs:
                kept[row.index] = latest
        return latest


def build_model(
    yaml: dict[str, Any] | str | Path, nc: int | None = None, channels: int = 3, source: str = "the model YAML"
) -> Model:
    """The network that a YAML describes, from its path, its shipped file's name, or its content, which is of `source`.

    `nc` overrides the YAML's number of classes, and its `ch` overrides `channels` of the images. Weights are random, in
    train mode, on torch's default device (on "meta" this takes no memory). Raises `UserError` for a YAML that describes
    no network.
    """
    source, description = _read(yaml, source)
    description = _resolve(source, description, nc, channels)
    rows = _parse_rows(source, description)
    layers, strides = _build_layers(source, rows, description)
    model = Model(layers, rows, description)
    if isinstance(head := layers[-1], Detect):
        head.set_strides(strides)
        head.initialise_biases()
    return model


def _read(yaml: dict[str, Any] | str | Path, source: str) -> tuple[str, dict[str, Any]]:
    """What to call the YAML in messages, and a copy of its content."""
    if isinstance(yaml, dict):
        return source, copy.deepcopy(yaml)
    path = find_file(str(yaml), "model YAML", ["models", "models/hub"])
    return str(path), read_yaml(path)


def _resolve(source: str, yaml: dict[str, Any], nc: int | None, channels: int) -> dict[str, Any]:
    """The YAML with every key that `build_model` needs, checked."""
    for key in yaml:
        if key not in KEYS:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), KEYS)}; known are {', '.join(KEYS)}")
    sizes = {"task": "detect", "ch": channels, "depth_multiple": 1.0, "width_multiple": 1.0, "channel_multiple": 8}
    yaml = {**sizes, **yaml, **({} if nc is None else {"nc": nc})}
    for key in ("nc", "ch", "channel_multiple"):
        _require(source, yaml, key, f"a whole number from 1 to {MOST}", _is_count(yaml.get(key)))
    for key in ("depth_multiple", "width_multiple"):
        fits = is_number(yaml[key]) and 0 < yaml[key] <= MOST_TIMES
        _require(source, yaml, key, f"a number above 0, at most {MOST_TIMES}", fits)
    for key in ("backbone", "head"):
        _require(source, yaml, key, "a list of rows [from, number, module, args]", isinstance(yaml.get(key), list))
    _require(source, yaml, "task", f"one of {', '.join(HEADS)}", str(yaml["task"]) in HEADS)
    if yaml["task"] != "classify":
        anchors = "a list of width, height pairs per level, or their number per level"
        _require(source, yaml, "anchors", anchors, _are_anchors(yaml.get("anchors")))
    return yaml


def _require(source: str, yaml: dict[str, Any], key: str, what: str, holds: bool) -> None:
    if not holds:
        found = f"is {yaml[key]!r}" if key in yaml else "is missing"
        raise UserError(f"{source}: `{key}` {_shortened(found)}; give {what}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST


def _are_anchors(value: Any) -> bool:
    """Whether this is a count, or flat lists of numbers; `Detect` checks that their lengths fit it."""
    if not isinstance(value, list):
        return _is_count(value)
    return bool(value) and all(isinstance(level, list) and level and all(map(is_number, level)) for level in value)


def _parse_rows(source: str, yaml: dict[str, Any]) -> list[Row]:
    # Python's words stand for what YAML writes as null, true and false.
    known = {"nc": yaml["nc"], "anchors": yaml.get("anchors"), "None": None, "True": True, "False": False}
    return [_parse_row(source, index, row, known) for index, row in enumerate([*yaml["backbone"], *yaml["head"]])]


def _parse_row(source: str, index: int, row: Any, known: dict[str, Any]) -> Row:
    where = f"{source}, row {index}"
    if not isinstance(row, list) or len(row) != 4:
        raise UserError(f"{where}: {_shortened(repr(row))} is no row; write [from, number, module, args]")
    origin, number, module, args = row
    if not _is_count(number):
        raise UserError(f"{where}: the number of repetitions is {number!r}; give a whole number from 1 to {MOST}")
    try:
        maker(module)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    if not isinstance(args, list):
        raise UserError(f"{where}: the arguments are {args!r}; write them as a list, such as [64, 3, 2]")
    return Row(index, _parse_source(where, index, origin), number, module, tuple(_argument(a, known) for a in args))


def _parse_source(where: str, index: int, origin: Any) -> int | tuple[int, ...]:
    """`from` with negative numbers turned into row numbers."""
    if isinstance(origin, list) and origin:
        return tuple(_parse_origin(where, index, one) for one in origin)
    return _parse_origin(where, index, origin)


def _parse_origin(where: str, index: int, origin: Any) -> int:
    if isinstance(origin, bool) or not isinstance(origin, int):
        raise UserError(f"{where}: `from` is {origin!r}; give a row's number, -1 for the row before, or a list of them")
    row = index + origin if origin < 0 else origin
    is_image = index == 0 and origin == -1
    if not (0 <= row < index or is_image):
        allowed = f"0 to {index - 1}, or -1 for the row before" if index else "-1, the image"
        raise UserError(f"{where}: `from` is {origin}, but only rows before it can be its input: {allowed}")
    return row


def _argument(value: Any, known: dict[str, Any]) -> Any:
    """The value itself, or what it is the name of."""
    return known.get(value, value) if isinstance(value, str) else value


def _build_layers(source: str, rows: list[Row], yaml: dict[str, Any]) -> tuple[list[nn.Module], list[float]]:
    """The rows' layers, and the strides of the maps that reach the last one.

    A draft of each layer, without memory, is tried on the maps that will reach it: that tells the channels and strides,
    and names the row where something does not fit.
    """
    scaling, activation = _scaling(yaml), _parse_activation(source, yaml.get("activation"))
    image = torch.zeros(1, yaml["ch"], PROBE, PROBE, device="meta")
    layers: list[nn.Module] = []
    maps: list[Any] = []
    inputs: list[Tensor] = []
    for row in rows:
        inputs = [image if j < 0 else maps[j] for j in row.sources]
        with _naming(source, row):
            with torch.device("meta"):
                draft = _build_layer(row, inputs, scaling, activation)
                maps.append(_try(draft, inputs if isinstance(row.source, tuple) else inputs[0]))
            _refuse_huge(draft, maps[-1])
            layers.append(_build_layer(row, inputs, scaling, activation))
    head, what, example = HEADS[yaml["task"]]
    # A `Segment` is a `Detect` too, but no detector's head.
    if not layers or not isinstance(layers[-1], head) or (isinstance(layers[-1], Segment) and head is not Segment):
        raise UserError(f"{source}: the last row of `head` is no {what}; end it with one, such as {example}")
    return layers, [PROBE / x.shape[2] for x in inputs] if issubclass(head, Detect) else []


def _build_layer(
    row: Row, inputs: list[Tensor], scaling: Scaling, activation: Callable[[], nn.Module] | None
) -> nn.Module:
    channels = tuple(x.shape[1] for x in inputs)
    layer = maker(row.module)(Place(channels, scaling.repeats(row.number), row.args, scaling))
    if activation is not None:
        for part in layer.modules():
            if isinstance(part, Conv):
                part.set_activation(activation)
    return layer


def _refuse_huge(layer: nn.Module, output: Any) -> None:
    """ValueError for a layer that no machine holds: one slip in a number is enough for that."""
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    numbers = _numbers(output)
    if parameters > MOST_PARAMETERS or numbers > MOST_NUMBERS:
        raise ValueError(
            f"it would have {parameters:.2g} parameters, and {numbers:.2g} numbers for a {PROBE}-pixel image"
        )


def _numbers(output: Any) -> int:
    """Of a tensor, or of those in a list."""
    return sum(map(_numbers, output)) if isinstance(output, (list, tuple)) else output.numel()


@torch.no_grad()
def _try(layer: nn.Module, inputs: Tensor | list[Tensor]) -> Any:
    """The layer's output, in eval mode: BatchNorm would not take a single value."""
    return layer.eval()(inputs)


@contextmanager
def _naming(source: str, row: Row) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `UserError` that names the row: a user's arguments can fail anywhere."""
    try:
        yield
    except Exception as error:
        reason = _shortened(str(error).strip().split("\n")[0] or type(error).__name__)
        raise UserError(
            f"{source}, row {row.index}: {row.module} with the arguments {_shortened(str(list(row.args)))} "
            f"on rows {list(row.sources)} does not work ({reason}); mend that row"
        ) from error


def _shortened(text: str, most: int = 160) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _scaling(yaml: dict[str, Any]) -> Scaling:
    anchors = 0 if yaml["task"] == "classify" else yaml["anchors"]
    per_level = anchors if isinstance(anchors, int) else len(anchors[0]) // 2
    outputs = per_level * (yaml["nc"] + 5)
    return Scaling(yaml["depth_multiple"], yaml["width_multiple"], yaml["channel_multiple"], outputs)


def _parse_activation(source: str, text: Any) -> Callable[[], nn.Module] | None:
    """What makes one activation from a text such as `nn.LeakyReLU(0.1)`; None for no text. Nothing is evaluated."""
    if text is None:
        return None
    known = nn.modules.activation.__all__
    try:
        name, args, options = _parse_call(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):  # all that ast raises
        raise UserError(f"{source}: `activation` is {text!r}; write it like nn.LeakyReLU(0.1)") from None
    if name not in known:
        hint = nearest(name, known)
        raise UserError(f"{source}: `activation` names '{name}', which is no activation of torch.nn{hint}")
    activation = getattr(nn, name)
    try:
        activation(*args, **options)
    except Exception as error:
        raise UserError(f"{source}: `activation` {text} does not work ({error}); mend its arguments") from error
    return lambda: activation(*args, **options)


def _parse_call(text: Any) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, arguments and keyword arguments of `nn.Name(...)` or `nn.Name`. ValueError and others for anything else."""
    if not isinstance(text, str):
        raise ValueError(text)
    tree = ast.parse(text.strip(), mode="eval").body
    call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
    prefix, _, name = ast.unparse(call.func).rpartition(".")
    if prefix not in ("nn", "torch.nn"):
        raise ValueError(text)
    options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return name, [ast.literal_eval(a) for a in call.args], options
