"""Build a network, `YoloModel`, from a model YAML: `build_model`, called by the tasks.

A YAML has `backbone` and `head`, lists of rows `[from, number, module, args]` that are numbered from 0. `from` is the
input: the number of a row (-1 for the row before, `image` for the image), or a list of them; `module` is a name in
`LAYERS`, a layer of torch.nn, or a layer in a user's file (`add_layers`). `auxiliary` may follow: rows that run in
training only, the last of which is a second head.

A new layer is a class in models/layers.py and a line in `LAYERS`, with the adapter that says which arguments its
constructor takes.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import layers
from models.heads.anchors import Detect, Segment
from models.heads.contract import DetectionHead
from models.heads.dfl import DetectDFL
from models.layers import Conv, Head, RepConv, skip_norms
from models.tasks import head_name, task_of
from models.tasks.contract import Model
from models.weights import MODEL_KEYS
from utils.config.flags import is_number
from utils.errors import UserError, first_line, nearest, shortened
from utils.files import find_file, read_yaml
from utils.user_code import imported

MAX_COUNT = 4096  # largest number of classes, channels or repetitions; a larger one is a typing error
MAX_MULTIPLE = 16  # largest depth or width multiple
MAX_LAYER_PARAMETERS = 1e9
MAX_MAP_VALUES = 1e8  # numbers in a layer's output for an image of PROBE_PIXELS
# Side in pixels of the image that a model is tried with while it is built; also the largest stride that it may have.
PROBE_PIXELS = 128
CHANNELS = 3  # channels of an image: RGB
PYTHON_WORDS = {"None": None, "True": True, "False": False}  # arguments that mean null, true and false


def whole_strides(side: int, stride: int) -> int:
    """Return `side` in pixels, rounded up to whole strides: at least two strides if the stride is above 1."""
    return max(math.ceil(side / stride), 2 if stride > 1 else 1) * stride


def is_count(value: Any) -> bool:
    """Return whether `value` is a whole number from 1 to `MAX_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


# The layers that rows may name


@dataclass(frozen=True)
class LayerPlacement:
    """The inputs of a layer's constructor: the row, the channels of its input maps, and the scale of the network."""

    channels: tuple[int, ...]  # channels of each input map
    repeats: int
    args: tuple[Any, ...]
    width: float  # factor of numbers of channels
    multiple: int  # channels are rounded up to a multiple of it
    outputs: int  # anchors per level * (5 + nc); this number of channels is not scaled

    def scaled(self, count: Any) -> int:
        """Return the scaled number of channels. Raises ValueError if `count` is not a valid number."""
        if not is_count(count):
            raise ValueError(f"the first argument is the number of output channels, 1 to {MAX_COUNT}, not {count!r}")
        return count if count == self.outputs else math.ceil(count * self.width / self.multiple) * self.multiple

    @property
    def c1(self) -> int:
        """Channels of the only input map. Raises ValueError if there are several."""
        if len(self.channels) != 1:
            raise ValueError(f"it takes one input, not {len(self.channels)}: join them with Concat first")
        return self.channels[0]

    @property
    def c2(self) -> int:
        """Output channels: the first argument, scaled. Raises ValueError if there is none."""
        return self.scaled(self.args[0] if self.args else None)


@dataclass(frozen=True)
class LayerMaker:
    """A layer's class, or a function that returns an instance, and the function that makes the layer of a row."""

    layer: Callable[..., nn.Module]
    make: Callable[[LayerPlacement], nn.Module]


def convolving(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(c1, c2, *args[1:])`; repetitions are chained."""

    def make(placement: LayerPlacement) -> nn.Module:
        widths = [placement.c1] + [placement.c2] * placement.repeats
        return _chain([layer(c1, c2, *placement.args[1:]) for c1, c2 in itertools.pairwise(widths)])

    return LayerMaker(layer, make)


def repeating(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(c1, c2, repeats, *args[1:])`, which repeats its inner blocks."""
    return LayerMaker(layer, lambda p: layer(p.c1, p.c2, p.repeats, *p.args[1:]))


def aggregating(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(c1, c2, part, process, repeats)`, with all channels scaled; `process` may be absent."""
    return LayerMaker(layer, lambda p: layer(p.c1, p.c2, *map(p.scaled, p.args[1:3]), *p.args[3:], repeats=p.repeats))


def plain(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(*args)`, which takes no channels; repetitions are chained."""
    return LayerMaker(layer, lambda p: _chain([layer(*p.args) for _ in range(p.repeats)]))


def narrowing(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(c1, *args)`, which takes the input channels only."""
    return LayerMaker(layer, lambda p: layer(p.c1, *p.args))


def detecting(layer: Callable[..., nn.Module]) -> LayerMaker:
    """Adapt `layer(*args, channels)`, which takes the channels of all its inputs."""
    return LayerMaker(layer, lambda p: layer(*p.args, p.channels))


def _chain(chain: list[nn.Module]) -> nn.Module:
    """Chain layers. A single layer is returned as it is, so that its state-dict keys stay the same."""
    return chain[0] if len(chain) == 1 else nn.Sequential(*chain)


def _segment(placement: LayerPlacement) -> nn.Module:
    """Make `Segment` with scaled prototype channels."""
    nc, anchors, masks, prototypes = placement.args
    return Segment(nc, anchors, masks, placement.scaled(prototypes), placement.channels)


_ADAPTED: dict[Callable[[Callable[..., nn.Module]], LayerMaker], tuple[type[nn.Module], ...]] = {
    convolving: (
        *(layers.Conv, layers.DWConv, layers.DWConvTranspose2d, layers.GhostConv, layers.CrossConv, layers.MixConv2d),
        *(layers.Focus, layers.RepConv, layers.AConv, layers.ADown, layers.Bottleneck, layers.GhostBottleneck),
        *(layers.C3SPP, layers.SPP, layers.SPPF),
    ),
    repeating: (layers.BottleneckCSP, layers.C3, layers.C3x, layers.C3TR, layers.C3Ghost),
    aggregating: (layers.ELAN, layers.RepNCSPELAN),
    plain: (layers.CBFuse, layers.Concat, layers.Contract, layers.Expand),
    narrowing: (layers.Proto, layers.Classify),
    detecting: (Detect,),
}
LAYERS = {layer.__name__: adapt(layer) for adapt, classes in _ADAPTED.items() for layer in classes} | {
    "SPPELAN": LayerMaker(layers.SPPELAN, lambda p: layers.SPPELAN(p.c1, p.c2, *map(p.scaled, p.args[1:]))),
    "CBLinear": LayerMaker(layers.CBLinear, lambda p: layers.CBLinear(p.c1, [*map(p.scaled, p.args[0])])),
    "DetectDFL": LayerMaker(DetectDFL, lambda p: DetectDFL(p.args[0], p.channels, *p.args[1:])),
    "Segment": LayerMaker(Segment, _segment),
}
# Layers of torch.nn that need the input channels; all others are called with the arguments of the row.
TORCH_LAYERS = {
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
        raise ValueError(
            f"unknown module '{name}'{nearest(str(name), LAYERS)}; known are {', '.join(LAYERS)}, and torch.nn's "
            "layers, such as nn.MaxPool2d; to use your own, name their file with --layers"
        )
    layer: Any = getattr(nn, word, None)
    is_layer = inspect.isclass(layer) and issubclass(layer, nn.Module)
    if not is_layer or issubclass(layer, nn.modules.lazy.LazyModuleMixin):
        raise ValueError(f"unknown module 'nn.{word}'{nearest(word, vars(nn))}; name a layer such as nn.MaxPool2d")
    return TORCH_LAYERS.get(word, plain(layer))


def add_layers(file: str | Path, is_named: bool = True) -> list[str]:
    """Register the layers that a user's Python file defines, and return their names. The file is run once.

    A layer is a class in the file that extends nn.Module. The names of its parameters decide how it is called:
    (c1, c2, *args[1:]), with c2 scaled, and with repeats after c2 if the third parameter is `n` or `repeats`;
    (c1, *args); (channels, *args) or (*args, channels=...), with the channels of all input maps; else (*args).
    Raises `UserError` if the file does not load, defines no layer, or defines one whose name is taken, or if it is not
    to be trusted: the settings of a run name it, not the user (`is_named`).
    """
    with imported(file, "--layers", is_named) as module:
        classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, nn.Module)]
        makers = {layer.__name__: _user_maker(layer) for layer in classes if layer.__module__ == module.__name__}
        if not makers:
            raise UserError(f"{file} defines no layer; write a class that extends torch.nn.Module")
        for word, maker in makers.items():
            if word in LAYERS and LAYERS[word].layer is not maker.layer:
                raise UserError(f"{file} defines a layer '{word}', but that name is taken; give it another name")
    LAYERS.update(makers)
    return list(makers)


def _user_maker(layer: type[nn.Module]) -> LayerMaker:
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


# The network


@dataclass(frozen=True)
class Row:
    """One row of a model YAML."""

    index: int
    sources: tuple[int, ...]  # rows whose outputs are the inputs; -1 is the image
    is_list: bool  # whether the layer takes a list of maps
    number: int  # repetitions before scaling
    module: str
    args: tuple[Any, ...]  # arguments of the layer, with names replaced by values

    def inputs(self, maps: Mapping[int, Any]) -> Any:
        """Return the layer's argument, given the outputs by row: one map, or a list of them."""
        return [maps[j] for j in self.sources] if self.is_list else maps[self.sources[0]]


class YoloModel(Model):
    """The network of a YAML's rows.

    Args:
        stride: the network's stride in pixels, at least the largest of the head's input maps; 1 if it takes any size
        imgsz: image size in pixels, in whole strides
    """

    def __init__(
        self, layers: Sequence[nn.Module], rows: Sequence[Row], yaml: dict[str, Any], stride: int, imgsz: int
    ) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)  # the attribute's name is part of every state-dict key
        self.rows = tuple(rows)
        self.yaml = yaml
        self.names = {number: str(number) for number in range(yaml["nc"])}
        self.stride, self.imgsz = stride, imgsz
        self._head_row = len(yaml["backbone"]) + len(yaml["head"]) - 1
        self._results = {self._head_row, len(rows) - 1}  # an auxiliary branch ends with the last row
        self.recorder: Callable[..., dict[int, Any]] | None = None  # replays the kernels of `run_rows` on a GPU
        self._kept = self._results | {j for row in rows for j in row.sources if j != row.index - 1}

    @property
    def head(self) -> nn.Module:
        """The last layer of `head`, whose class decides the task."""
        return self.model[self._head_row]

    def forward(self, images: Tensor, *hints: Tensor) -> Any:
        """Run the rows on RGB images (b, 3, h, w) in [0, 1]; `hints` are further arguments of the head.

        A detector returns a raw map (b, anchors, h / stride, w / stride, 5 + nc) per level; h and w must be multiples
        of `stride`. A classifier returns logits (b, nc), a segmenter maps and prototypes. In training, a model with an
        auxiliary branch returns a pair: the head's outputs and the auxiliary head's.
        """
        until = len(self.rows) if self.training else self._head_row + 1
        before_head = self._head_row if hints else until
        run_rows = self.recorder or self.run_rows
        maps = run_rows({-1: images}, 0, before_head)
        if hints:
            maps = run_rows(maps, self._head_row, until, hints)
        outputs = maps[self._head_row]
        return outputs if until == self._head_row + 1 else (outputs, maps[until - 1])

    def run_rows(self, maps: Mapping[int, Any], first: int, until: int, hints: Sequence[Tensor] = ()) -> dict[int, Any]:
        """Run the rows from `first` to before `until`, which read `maps`, the outputs by row; row -1 is the images.

        Returns the outputs that later rows read, and the heads'.
        """
        maps = dict(maps)
        for row, layer in zip(self.rows[first:until], self.model[first:until], strict=True):
            maps[row.index] = layer(row.inputs(maps), *(hints if row.index == self._head_row else ()))
            if row.index - 1 not in self._kept:
                maps.pop(row.index - 1, None)  # frees its memory
        read = {j for row in self.rows[until:] for j in row.sources} | self._results
        return {index: output for index, output in maps.items() if index in read}


def build_model(
    yaml: dict[str, Any] | str | Path,
    nc: int | None = None,
    source: str = "the model YAML",
    head: type[Head] | Sequence[type[Head]] = (),
    imgsz: int = 640,
) -> YoloModel:
    """Build the network that a YAML describes, in train mode, with random weights, on torch's default device.

    Raises `UserError` if the YAML does not describe such a network, or if the network does not take the image size.

    Args:
        yaml: path of the YAML, name of a shipped file, or the content
        nc: number of classes, which overrides the YAML's; None to keep that number
        source: name of the content in errors
        head: required class of the last layer, or several classes, one of which it must have; the first is the usual
        imgsz: image size in pixels, rounded up to whole strides, at least 2
    """
    if not isinstance(yaml, dict):
        path = find_file(str(yaml), "model YAML", ["models", "models/hub"])
        source, yaml = str(path), read_yaml(path)
    yaml = _with_defaults(source, copy.deepcopy(yaml), nc)
    values = {"nc": yaml["nc"], "anchors": yaml.get("anchors"), **PYTHON_WORDS}
    auxiliary = yaml.get("auxiliary", [])
    contents = [*yaml["backbone"], *yaml["head"], *auxiliary]
    rows = [_parse_row(source, index, row, values) for index, row in enumerate(contents)]
    built, stride = _build_layers(source, rows, yaml, imgsz)
    heads = (head,) if isinstance(head, type) else tuple(head)
    last = built[len(built) - len(auxiliary) - 1] if built else None
    # A subclass with its own `description` is a head of another kind.
    is_wanted = any(isinstance(last, kind) and last.description == kind.description for kind in heads)
    if last is None or (heads and not is_wanted):
        kind = heads[0] if heads else Detect
        raise UserError(
            f"{source}: the last row of `head` is not a {kind.description}; end it with one, such as {kind.example}"
        )
    if auxiliary and not (isinstance(built[-1], DetectDFL) and isinstance(last, DetectDFL)):
        raise UserError(
            f"{source}: `auxiliary` is for training with a second DetectDFL head; end both `head` and `auxiliary` with "
            f"one, such as {DetectDFL.example}, or leave `auxiliary` out"
        )
    return YoloModel(built, rows, yaml, stride, whole_strides(imgsz, stride))


def head_class(yaml: Mapping[str, Any]) -> type[nn.Module] | None:
    """Return the class of the layer that the last row of `head` names; None if it does not name a class."""
    try:
        layer = layer_maker(head_name(yaml)).layer
    except ValueError:  # `_parse_row` reports it
        return None
    return layer if isinstance(layer, type) else None


def _takes_anchors(yaml: Mapping[str, Any]) -> bool:
    head = head_class(yaml)
    return head is not None and issubclass(head, DetectionHead) and head.takes_anchors


def _with_defaults(source: str, yaml: dict[str, Any], nc: int | None) -> dict[str, Any]:
    """Return the YAML with all keys that `build_model` needs. Raises `UserError` for an unknown key or wrong value."""
    for key in yaml:
        if key not in MODEL_KEYS:
            known = ", ".join(MODEL_KEYS)
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), MODEL_KEYS)}; known are {known}")
    task = {"task": task_of(yaml, source)}
    sizes = {"ch": CHANNELS, "depth_multiple": 1.0, "width_multiple": 1.0, "channel_multiple": 8}
    yaml = {**task, **sizes, **yaml, **task, **({} if nc is None else {"nc": nc})}
    count = f"a whole number from 1 to {MAX_COUNT}"
    rows = "a list of rows [from, number, module, args]"
    anchors = "a list of width, height pairs for each level, or the number of anchors per level"
    checks: dict[str, tuple[bool, str]] = {
        "ch": (yaml["ch"] == CHANNELS, f"{CHANNELS}, as images are read as RGB, or leave it out"),
        **{key: (is_count(yaml.get(key)), count) for key in ("nc", "channel_multiple")},
        **{
            key: (is_number(yaml[key]) and 0 < yaml[key] <= MAX_MULTIPLE, f"a number above 0, at most {MAX_MULTIPLE}")
            for key in ("depth_multiple", "width_multiple")
        },
        **{key: (isinstance(yaml.get(key), list), rows) for key in ("backbone", "head")},
        "auxiliary": (isinstance(yaml.get("auxiliary", []), list), rows),
        "anchors": (not _takes_anchors(yaml) or _are_anchors(yaml.get("anchors")), anchors),
    }
    for key, (is_valid, what) in checks.items():
        if not is_valid:
            problem = f"is {yaml[key]!r}" if key in yaml else "is missing"
            raise UserError(f"{source}: `{key}` {shortened(problem)}; give {what}")
    return yaml


def _are_anchors(value: Any) -> bool:
    """Return whether `value` is a count, or a list of flat lists of numbers; `Detect` checks their lengths."""
    if not isinstance(value, list):
        return is_count(value)
    return bool(value) and all(isinstance(level, list) and level and all(map(is_number, level)) for level in value)


def _parse_row(source: str, index: int, row: Any, values: dict[str, Any]) -> Row:
    """Check row `index` and return it, with names among its arguments replaced by `values`."""
    where = f"{source}, row {index}"
    try:
        origin, number, module, args = row
        numbers = range(-1, index)  # of the rows before it, and -1 for the image
        origins = origin if isinstance(origin, list) else [origin]
        sources = [-1 if one == "image" else numbers[one if one < 0 else one + 1] for one in origins]
        if not (sources and is_count(number) and isinstance(args, list)):
            raise ValueError
    except (ValueError, TypeError, IndexError):
        raise UserError(
            f"{where}: {shortened(repr(row))} is not a row; write [from, number, module, args], with `from` the number "
            f"of a row before it, -1 for the last of these, image, or a list; number 1 to {MAX_COUNT}; args a list"
        ) from None
    try:
        layer_maker(module)
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    resolved = tuple(values.get(a, a) if isinstance(a, str) else a for a in args)
    return Row(index, tuple(sources), isinstance(origin, list), number, module, resolved)


def _build_layers(source: str, rows: list[Row], yaml: dict[str, Any], imgsz: int) -> tuple[list[nn.Module], int]:
    """Return the layers of the rows, and the stride: the head's largest, doubled until an odd number of it runs.

    A draft of each layer runs on the "meta" device, without memory, to measure channels and strides and to find rows
    that do not fit.
    """
    anchors = yaml["anchors"] if _takes_anchors(yaml) else 0
    outputs = (anchors if isinstance(anchors, int) else len(anchors[0]) // 2) * (yaml["nc"] + 5)
    activation = _parse_activation(source, yaml.get("activation"))
    built: list[nn.Module] = []
    drafts: list[nn.Module] = []
    maps: dict[int, Any] = {-1: torch.zeros(1, CHANNELS, PROBE_PIXELS, PROBE_PIXELS, device="meta")}
    largest = 1.0

    def make(row: Row) -> nn.Module:
        """Return a new layer for a row."""
        channels = tuple(sum(x.shape[1] for x in _tensors(maps[j])) for j in row.sources)
        repeats = max(round(row.number * yaml["depth_multiple"]), 1) if row.number > 1 else 1
        scale = yaml["width_multiple"], yaml["channel_multiple"], outputs
        layer = layer_maker(row.module).make(LayerPlacement(channels, repeats, row.args, *scale))
        for module in layer.modules():
            if activation and isinstance(module, (Conv, RepConv)) and not isinstance(module.act, nn.Identity):
                module.act = activation()
        return layer

    for row in rows:
        with _naming(source, row):
            with torch.device("meta"), torch.no_grad():
                draft = make(row).eval()  # BatchNorm must accept single values
                skip_norms(draft)
                maps[row.index] = draft(row.inputs(maps))
            tensors = _tensors(maps[row.index])
            parameters, values = (sum(map(torch.numel, numbers)) for numbers in (draft.parameters(), tensors))
            if parameters > MAX_LAYER_PARAMETERS or values > MAX_MAP_VALUES:  # a typing error
                raise ValueError(f"it has {parameters:.2g} parameters and {values:.2g} outputs, more than fits memory")
            for shape in (x.shape for x in tensors if x.ndim == 4):
                if len({*shape[2:]}) > 1 or shape[0] != 1:
                    raise ValueError(f"its map {list(shape)} is not one square map for a square image")
            drafts.append(draft)
            built.append(layer := make(row))
            if isinstance(layer, Head):
                layer.placed(strides := [_stride(maps[j], PROBE_PIXELS) for j in row.sources])
                largest = largest if layer.any_size else max(largest, *strides)
    stride = 2 ** math.ceil(math.log2(largest))
    for multiple in (stride << doublings for doublings in range(8)):
        with suppress(UserError):
            _try_size(source, rows, drafts, maps, ((imgsz // multiple | 1) + 2) * multiple)
            return built, multiple
    _try_size(source, rows, drafts, maps, whole_strides(imgsz, stride))  # perhaps it takes this size only
    return built, stride


def _try_size(source: str, rows: list[Row], drafts: list[nn.Module], probed: Mapping[int, Any], side: int) -> None:
    """Run the drafts for an image of `side` x `side` pixels; `probed` are the outputs for one of PROBE_PIXELS.

    Raises `UserError` for a row that fails, also for a head whose input is not in proportion to the image.
    """
    maps: dict[int, Any] = {-1: torch.zeros(1, CHANNELS, side, side, device="meta")}
    for row, draft in zip(rows, drafts, strict=True):
        with _naming(source, row), torch.device("meta"), torch.no_grad():
            if isinstance(draft, Head) and not draft.any_size:
                for j in row.sources:
                    if _stride(maps[j], side) != _stride(probed[j], PROBE_PIXELS):
                        raise ValueError(f"the map of row {j} does not fit an image of {side}x{side}")
            maps[row.index] = draft(row.inputs(maps))


@contextmanager
def _naming(source: str, row: Row) -> Iterator[None]:
    """Raise `UserError` that names the row in place of any error."""
    try:
        yield
    except Exception as error:  # the arguments, and perhaps the layer, are the user's
        raise UserError(
            f"{source}, row {row.index}: {row.module} with the arguments {shortened(str(list(row.args)))} "
            f"on rows {list(row.sources)} does not work ({first_line(error)}); fix that row"
        ) from error


def _stride(output: Any, side: int) -> float:
    """Return the stride in pixels of a layer's output for an image of `side` pixels; 1 if it is not a map."""
    return side / output.shape[2] if isinstance(output, Tensor) and output.ndim == 4 else 1.0


def _tensors(output: Any) -> list[Tensor]:
    """Return a tensor, or all tensors in nested lists, as a list."""
    return [x for part in output for x in _tensors(part)] if isinstance(output, (list, tuple)) else [output]


def _parse_activation(source: str, text: Any) -> Callable[[], nn.Module] | None:
    """Return a constructor of activations from text such as `nn.LeakyReLU(0.1)`; None for None. Evaluates no code."""
    if text is None:
        return None
    known = nn.modules.activation.__all__
    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        prefix, _, name = ast.unparse(call.func).rpartition(".")
        if prefix not in ("nn", "torch.nn") or name not in known:
            raise ValueError(f"no activation of torch.nn{nearest(name, known)}")
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        make = partial(getattr(nn, name), *map(ast.literal_eval, call.args), **options)
        make()
    except Exception as error:  # everything that ast and the activation raise
        reason = first_line(error)
        raise UserError(f"{source}: `activation` is {text!r} ({reason}); write it like nn.LeakyReLU(0.1)") from None
    return make
