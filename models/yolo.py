"""Build a network, `YoloModel`, from a model YAML: `build_model`, called by the tasks.

A YAML has `backbone` and `head`, lists of rows `[from, number, module, args]` that are numbered from 0. `from` is the
input: the number of a row (-1 for the row before, `image` for the image), or a list of them; `module` is a name in
`LAYERS`, a layer of torch.nn, or a layer in a user's file (`add_layers`). `auxiliary` may follow: rows that run in
training only, the last of which is a second head.

A new layer is a class in models/layers.py and its name in `LAYERS`; `add_layers` says how layers are called.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from models import layers
from models.heads.anchors import Detect, Segment
from models.heads.contract import DetectionHead
from models.heads.dfl import DetectDFL
from models.layers import Conv, Head, RepConv, without_batchnorm
from models.tasks import head_name, task_name
from models.tasks.contract import Model
from models.weights import MODEL_KEYS
from utils.batch import MAX_CHANNELS
from utils.config.flags import is_number
from utils.errors import UserError, first_line, nearest, quoted
from utils.files import find_file, read_yaml
from utils.user_code import imported

MAX_COUNT = 4096  # largest number of classes, channels or repetitions; a larger one is a typing error
MAX_MULTIPLE = 16  # largest depth or width multiple
# Side in pixels of the image that a model is tried with while it is built; also the largest stride that it may have.
PROBE_PIXELS = 128
MODEL_FOLDERS = ("models", "models/hub", "models/segment")  # of model YAMLs; the last one only in YOLOv5
PYTHON_WORDS = {"None": None, "True": True, "False": False}  # arguments that mean null, true and false


def whole_strides(side: int, stride: int) -> int:
    """Return `side` in pixels, rounded up to whole strides: at least two strides if the stride is above 1."""
    return max(math.ceil(side / stride), 2 if stride > 1 else 1) * stride


def is_count(value: Any) -> bool:
    """Return whether `value` is a whole number from 1 to `MAX_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT


# The layers that rows may name

LAYERS: dict[str, Callable[..., nn.Module]] = {
    layer.__name__: layer
    for layer in (
        *(layers.Conv, layers.DWConv, layers.GhostConv, layers.Focus, layers.RepConv, layers.AConv, layers.ADown),
        *(layers.Bottleneck, layers.BottleneckCSP, layers.C3, layers.C3TR, layers.C3Ghost),
        *(layers.ELAN, layers.RepNCSPELAN, layers.SPP, layers.SPPF, layers.SPPELAN, layers.CBLinear, layers.CBFuse),
        *(layers.Concat, layers.Proto, layers.Classify, Detect, DetectDFL, Segment),
    )
}
# Positions, in a row's arguments, of numbers of channels besides c2.
CHANNEL_ARGUMENTS = {"ELAN": (1, 2), "RepNCSPELAN": (1, 2), "SPPELAN": (1,), "CBLinear": (0,), "Segment": (3,)}
# The layers of torch.nn that get the input channels, and their first parameters.
TORCH_PARAMETERS: Any = {nn.BatchNorm2d: ["c1"], nn.Conv2d: ["c1", "c2"], nn.ConvTranspose2d: ["c1", "c2"]}


def layer_named(name: Any) -> Callable[..., nn.Module]:
    """Return the layer that a row names. Raises ValueError, with part of a sentence, if it is unknown."""
    if isinstance(name, str) and name in LAYERS:
        return LAYERS[name]
    prefix, _, word = str(name).rpartition(".")
    layer: Any = getattr(nn, word, None) if prefix in ("nn", "torch.nn") else None
    is_layer = inspect.isclass(layer) and issubclass(layer, nn.Module)
    if not is_layer or issubclass(layer, nn.modules.lazy.LazyModuleMixin):
        near = nearest(str(name), [*LAYERS, *(f"nn.{known}" for known in vars(nn))])
        raise ValueError(f"unknown module{near}; docs/models.md lists the layers; --layers names a file with your own")
    return layer


def make_layer(row: Row, channels: list[int], repeats: int, scaled: Callable[[Any], int]) -> nn.Module:
    """Return the layer of a row, called as the names of its parameters decide: see `add_layers`.

    `channels` are those of each input map; `scaled` returns a scaled number of them. Raises ValueError, with part of a
    sentence, for a wrong number of inputs or output channels.
    """
    layer, args = layer_named(row.module), list(row.args)
    for position in CHANNEL_ARGUMENTS.get(row.module, ()):
        if position < len(args):
            count = args[position]
            args[position] = [*map(scaled, count)] if isinstance(count, list) else scaled(count)
    names = TORCH_PARAMETERS.get(layer) or list(inspect.signature(layer).parameters)
    if names[:1] == ["c1"]:
        if len(channels) != 1:
            raise ValueError(f"it takes one input, not {len(channels)}: join them with Concat first")
        if names[1:2] != ["c2"]:
            return layer(*channels, *(args or layers.BATCH_NORM if layer is nn.BatchNorm2d else args))
        c2 = scaled(args[0] if args else None)
        if names[2:3] in (["n"], ["repeats"]):
            return layer(*channels, c2, repeats, *args[1:])
        return chain([layer(c1, c2, *args[1:]) for c1 in [*channels, *[c2] * (repeats - 1)]])
    if names[:1] == ["channels"]:
        return layer(channels, *args)
    if "channels" in names:
        return layer(*args, channels=channels)
    return chain([layer(*args) for _ in range(repeats)])


def chain(modules: list[nn.Module]) -> nn.Module:
    """Chain layers. A single layer is returned as it is, so that its state-dict keys stay the same."""
    return modules[0] if len(modules) == 1 else nn.Sequential(*modules)


def add_layers(file: str | Path, named_by_user: bool = True) -> list[str]:
    """Register the layers that a user's Python file defines, and return their names. The file is run once.

    A layer is a class in the file that extends nn.Module. The names of its parameters decide how it is called, as for
    ours: (c1, c2, *args[1:]), with c2 scaled, and with repeats after c2 if the third parameter is `n` or `repeats`;
    (c1, *args); (channels, *args) or (*args, channels=...), with the channels of all input maps; else (*args).
    Raises `UserError` if the file does not load, defines no layer, or defines one whose name is taken, or if it is not
    to be trusted: the settings of a run name it, not the user (`named_by_user`).
    """
    with imported(file, "--layers", named_by_user) as module:
        classes = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, nn.Module)]
        defined = {layer.__name__: layer for layer in classes if layer.__module__ == module.__name__}
        if not defined:
            raise UserError(f"{file} defines no layer; write a class that extends torch.nn.Module")
        for word, layer in defined.items():
            if LAYERS.get(word, layer) is not layer:
                raise UserError(f"{file} defines a layer '{word}', but that name is taken; give it another name")
    LAYERS.update(defined)
    return list(defined)


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

    Its stride in pixels is at least the largest of the head's input maps, or 1 if it takes images of any size.
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
        self.capturer: Callable[..., dict[int, Any]] | None = None  # replays the kernels of `run_rows` on a GPU
        self._kept = self._results | {j for row in rows for j in row.sources if j != row.index - 1}

    @property
    def head(self) -> nn.Module:
        return self.model[self._head_row]

    def check_rows(self, source: str) -> None:
        """Raise `UserError` for rows that do not lead to the head, so that no gradient reaches them; not if frozen."""
        reached = {*self._results}
        for row in reversed(self.rows):
            reached |= {*row.sources} if row.index in reached else set()
        unused = [row.index for row in self.rows if row.index not in reached]
        trained = [weight.requires_grad for k in unused for weight in self.model[k].parameters()]
        if unused and (any(trained) or not trained):
            raise UserError(
                f"{source}: no row that leads to the head reads row {', '.join(map(str, unused))} (they count from 0), "
                "so it cannot learn; remove it, or name it in the `from` of such a row"
            )

    def forward(self, images: Tensor, *hints: Tensor) -> Any:
        """Run the rows on images (b, channels, h, w) in [0, 1], RGB if three; `hints` are arguments of the head.

        A detector returns a raw map (b, anchors, h / stride, w / stride, 5 + nc) per level; h and w must be multiples
        of `stride`. A classifier returns logits (b, nc), a segmenter maps and prototypes. In training, a model with an
        auxiliary branch returns a pair: the head's outputs and the auxiliary head's.
        """
        until = len(self.rows) if self.training else self._head_row + 1
        before_head = self._head_row if hints else until
        run_rows = self.capturer or self.run_rows
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
        nc: number of classes in place of the YAML's
        head: required class of the last layer, or several, one of which it must have; the first is the usual
        imgsz: image size in pixels, which is rounded up
    """
    if not isinstance(yaml, dict):
        path = find_file(str(yaml), "model YAML", MODEL_FOLDERS)
        source, yaml = str(path), read_yaml(path)
    yaml = _with_defaults(source, copy.deepcopy(yaml), nc)
    values = {"nc": yaml["nc"], "anchors": yaml.get("anchors"), **PYTHON_WORDS}
    auxiliary = yaml.get("auxiliary") or []
    contents = [*yaml["backbone"], *yaml["head"], *auxiliary]
    rows = [_parse_row(source, index, row, values) for index, row in enumerate(contents)]
    built, stride = _build_layers(source, rows, yaml, imgsz)
    heads = (head,) if isinstance(head, type) else tuple(head)
    last = built[len(built) - len(auxiliary) - 1]
    # A subclass with its own `description` is a head of another kind.
    if heads and not any(isinstance(last, kind) and last.description == kind.description for kind in heads):
        raise UserError(
            f"{source}: the last row of `head` is not a {heads[0].description}; end it with one, such as "
            f"{heads[0].example}"
        )
    if auxiliary and not (isinstance(built[-1], DetectDFL) and isinstance(last, DetectDFL)):
        raise UserError(
            f"{source}: `auxiliary` is for training with a second DetectDFL head; end both `head` and `auxiliary` with "
            f"one, such as {DetectDFL.example}, or leave `auxiliary` out"
        )
    return YoloModel(built, rows, yaml, stride, whole_strides(imgsz, stride))


def detection_head(yaml: Mapping[str, Any]) -> type[DetectionHead] | None:
    """Return the class that the last row of `head` names; None if it is not a detection head."""
    layer = LAYERS.get(str(head_name(yaml)))
    return layer if isinstance(layer, type) and issubclass(layer, DetectionHead) else None


def _with_defaults(source: str, yaml: dict[str, Any], nc: int | None) -> dict[str, Any]:
    """Return the YAML with all keys that `build_model` needs. Raises `UserError` for an unknown key or wrong value."""
    if unknown := [str(key) for key in yaml if key not in MODEL_KEYS]:
        hint, known = nearest(unknown[0], MODEL_KEYS), ", ".join(MODEL_KEYS)
        raise UserError(f"{source}: unknown key '{unknown[0]}'{hint}; known are {known}")
    task = {"task": task_name(yaml, source)}
    sizes = {"ch": 3, "depth_multiple": 1.0, "width_multiple": 1.0, "channel_multiple": 8}
    yaml = {**task, **sizes, **yaml, **task, **({} if nc is None else {"nc": nc})}
    whole = is_count, f"a whole number from 1 to {MAX_COUNT}"
    multiple = lambda value: is_number(value) and 0 < value <= MAX_MULTIPLE, f"a number above 0, at most {MAX_MULTIPLE}"
    rows = _is_list, "a list of rows [from, number, module, args]"
    checks: dict[str, tuple[Callable[[Any], bool], str]] = {
        "ch": (lambda value: is_count(value) and value <= MAX_CHANNELS, f"1 to {MAX_CHANNELS} channels of an image"),
        **dict.fromkeys(("nc", "channel_multiple"), whole),
        **dict.fromkeys(("depth_multiple", "width_multiple"), multiple),
        **dict.fromkeys(("backbone", "head"), rows),
    }
    if yaml.get("auxiliary"):
        checks["auxiliary"] = rows
    if (head := detection_head(yaml)) and head.takes_anchors:
        checks["anchors"] = (
            lambda value: is_count(value) or (_is_list(value) and all(map(_is_list, value))),
            "a list of width, height pairs for each level, or their number per level",
        )
    for key, (is_valid, what) in checks.items():
        if not is_valid(yaml.get(key)):
            problem = f"is {quoted(yaml[key])}" if key in yaml else "is missing"
            raise UserError(f"{source}: `{key}` {problem}; give {what}")
    return yaml


def _is_list(value: Any) -> bool:
    """Return whether `value` is a list that is not empty."""
    return isinstance(value, list) and bool(value)


def _parse_row(source: str, index: int, row: Any, values: dict[str, Any]) -> Row:
    """Check row `index` and return it, with names among its arguments replaced by `values`."""
    try:
        origin, number, module, args = row
        numbers = range(-1, index)  # of the rows before it, and -1 for the image
        origins = origin if isinstance(origin, list) else [origin]
        sources = [-1 if name == "image" else numbers[name if name < 0 else name + 1] for name in origins]
        if not (sources and is_count(number) and isinstance(args, list)):
            raise ValueError
    except (ValueError, TypeError, IndexError):
        raise UserError(
            f"{source}, row {index}: {quoted(row)} is not a row; write [from, number, module, args]; from is "
            f"a row before it, -1 for the last, image, or a list; number 1 to {MAX_COUNT}; args a list"
        ) from None
    resolved = tuple(values.get(a, a) if isinstance(a, str) else a for a in args)
    return Row(index, tuple(sources), isinstance(origin, list), number, module, resolved)


def _build_layers(source: str, rows: list[Row], yaml: dict[str, Any], imgsz: int) -> tuple[list[nn.Module], int]:
    """Return the layers of the rows, and the stride: the head's largest, doubled until an odd number of it runs.

    A draft of each layer runs on the "meta" device, without memory, to measure channels and strides and to find rows
    that do not fit.
    """
    head = detection_head(yaml)
    anchors = yaml["anchors"] if head and head.takes_anchors else 0
    outputs = (anchors if isinstance(anchors, int) else len(anchors[0]) // 2) * (yaml["nc"] + 5)
    activation = _parse_activation(source, yaml.get("activation"))
    built: list[nn.Module] = []
    drafts: list[nn.Module] = []
    maps: dict[int, Any] = {-1: torch.zeros(1, yaml["ch"], PROBE_PIXELS, PROBE_PIXELS, device="meta")}
    largest = 1.0

    def scaled(count: Any) -> int:
        """Return the scaled number of channels. Raises ValueError if `count` is not a valid number."""
        if not is_count(count):
            raise ValueError(f"the first argument is the number of output channels, 1 to {MAX_COUNT}, not {count!r}")
        multiple = yaml["channel_multiple"]
        return count if count == outputs else math.ceil(count * yaml["width_multiple"] / multiple) * multiple

    def make(row: Row) -> nn.Module:
        channels = [sum(x.shape[1] for x in tree_leaves(maps[j])) for j in row.sources]
        repeats = max(round(row.number * yaml["depth_multiple"]), 1) if row.number > 1 else 1
        layer = make_layer(row, channels, repeats, scaled)
        for module in layer.modules():
            if activation and isinstance(module, (Conv, RepConv)) and not isinstance(module.act, nn.Identity):
                module.act = activation()
        return layer

    for row in rows:
        with _naming(source, row):
            with torch.device("meta"), torch.no_grad():
                draft = without_batchnorm(make(row).eval())  # BatchNorm must accept single values
                maps[row.index] = draft(row.inputs(maps))
            for shape in (x.shape for x in tree_leaves(maps[row.index]) if x.ndim == 4):
                if len({*shape[2:]}) > 1 or shape[0] != 1:
                    raise ValueError(f"its map {list(shape)} is not one square map for a square image")
            drafts.append(draft)
            built.append(layer := make(row))
            if isinstance(layer, Head):
                layer.set_strides(strides := [_stride(maps[j], PROBE_PIXELS) for j in row.sources])
                largest = largest if layer.any_size else max(largest, *strides)
    stride = 2 ** math.ceil(math.log2(largest))
    for multiple in (stride << doublings for doublings in range(8)):
        with suppress(UserError):
            _try_size(source, rows, drafts, maps, ((imgsz // multiple | 1) + 2) * multiple)
            return built, multiple
    _try_size(source, rows, drafts, maps, whole_strides(imgsz, stride))  # perhaps it takes this size only
    return built, stride


def _try_size(source: str, rows: list[Row], drafts: list[nn.Module], probed: Mapping[int, Any], side: int) -> None:
    """Run the drafts for an image of `side` pixels; `probed` are the outputs for PROBE_PIXELS. Raises `UserError`."""
    maps: dict[int, Any] = {-1: probed[-1].new_zeros(1, probed[-1].shape[1], side, side)}
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
            f"{source}, row {row.index}: {row.module} with the arguments {quoted(list(row.args))} "
            f"on rows {list(row.sources)} does not work ({first_line(error)}); fix that row"
        ) from error


def _stride(output: Any, side: int) -> float:
    """Return the stride in pixels of a layer's output for an image of `side` pixels; 1 if it is not a map."""
    return side / output.shape[2] if isinstance(output, Tensor) and output.ndim == 4 else 1.0


def _parse_activation(source: str, text: Any) -> Callable[[], nn.Module] | None:
    """Return a constructor of activations from text such as `nn.LeakyReLU(0.1)`; None for None. Evaluates no code."""
    if text is None:
        return None
    try:
        tree = ast.parse(str(text).strip(), mode="eval").body
        call = tree if isinstance(tree, ast.Call) else ast.Call(tree, [], [])
        layer = layer_named(ast.unparse(call.func))
        if layer.__module__ != nn.modules.activation.__name__:
            raise ValueError("no activation of torch.nn")
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        make = partial(layer, *map(ast.literal_eval, call.args), **options)
        make()
    except Exception as error:  # everything that ast and the activation raise
        reason = first_line(error)
        raise UserError(f"{source}: `activation` is {text!r} ({reason}); write it like nn.LeakyReLU(0.1)") from None
    return make
