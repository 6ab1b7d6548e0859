"""Weight files, read without running anything that they contain.

A pickle is a program: it names functions and calls them. Our own files hold nothing but tensors and plain values. An
official YOLOv5 file is a pickled network; its classes become inert stubs here, from which the tensors are taken, and a
name outside the short lists below is refused.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import warnings
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from models.yolo import KEYS
from utils.checkpoint.weight_files import FORMAT
from utils.errors import UserError
from utils.files import ROOT, read_yaml

# Modules and classes of which a file may hold objects. None is imported: whatever has such a name becomes a stub.
STUB_MODULES = (
    *("models", "utils", "ultralytics", "yolov5", "torch.nn.modules", "torch.nn.parallel", "pathlib", "datetime"),
)
STUBS = {
    *("argparse.Namespace", "numpy.dtype", "numpy.ndarray", "_codecs.encode"),  # encode: numpy's scalars are made of it
    "builtins.getattr",  # a method, which YOLOv5's fused layers hold
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
}
# Real things. Built-in classes and values alone: a pickle's BUILD could change the attributes of anything else.
PLAIN = (set, frozenset, list, dict, tuple, int, float, bool, str, complex)
REAL: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    **{f"builtins.{kind.__name__}": kind for kind in PLAIN},
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
SIZES = {16: "n", 32: "s", 48: "m", 64: "l", 80: "x"}  # YOLOv5's, by the channels of the first convolution
RENAMED = (
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)"), r"\1\2"),
    (re.compile(r"\.mlp\.linear_1\."), ".mlp.0."),
    (re.compile(r"\.mlp\.linear_2\."), ".mlp.3."),
)
TASKS_BY_CLASS = {"SegmentationModel": "segment", "ClassificationModel": "classify"}
# What stands around a network, by its class, and where in it the network is.
WRAPPERS = {
    **dict.fromkeys(("DistributedDataParallel", "DataParallel"), "module"),
    **dict.fromkeys(("AutoShape", "autoShape", "DetectMultiBackend"), "model"),
    "ModelEMA": "ema",
}
CONVOLUTIONS = ("Conv", "DWConv")  # YOLOv5's layers that have the model's activation, and may be fused
EPSILON = 1e-3  # of their BatchNorm
EXPORTED = (".onnx", ".torchscript", ".pt2", "_openvino_model")  # how the names of export.py's files end
DEEPEST = 10  # wrappers around wrappers; a hostile file may have one that contains itself


@dataclass(frozen=True)
class Weights:
    """What a weight file holds. `source`: ours, a network pickled by YOLOv5, a bare dict of tensors, or export.py's."""

    state: dict[str, Tensor]  # on the CPU; float32 where it is a floating type
    model: dict[str, Any] | None  # the model YAML's content
    names: dict[int, str]
    task: str  # '' where nothing tells
    settings: dict[str, Any]
    source: Literal["lockstep", "yolov5", "tensors", "exported"]
    program: Any = None  # `models.export.runtime.Exported`, which runs what was exported; it has no tensors of its own

    @property
    def class_names(self) -> dict[int, str]:
        """Those of the file, or where it has none the numbers of its model's classes."""
        return self.names or {number: str(number) for number in range(int((self.model or {}).get("nc", 0)))}


def read_weights(path: str | Path) -> Weights:
    """The weights in a file of ours, an official YOLOv5 `.pt`, or a saved dict of tensors.

    Raises `UserError` for anything else, before anything that it names is called.
    """
    path = Path(path)
    if path.name.endswith(EXPORTED):
        raise UserError(f"{path} is an exported file, which has no weights to take; give the .pt that it was made from")
    data = _read_bytes(path)
    try:
        _refuse_torchscript(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on how the file was made: nothing that the user can mend
            return _interpret(_unpickle(data))
    except _Unusable as error:
        raise UserError(f"{path} {error}") from None
    except Exception as error:  # a damaged or hostile file can fail anywhere: in torch's C++, while walking it, ...
        raise UserError(f"{path} {_damage(data, error)}") from error


def _renamed(name: str) -> str:
    """A tensor's name of today, for one of torchvision's older DenseNet and ViT files."""
    for old, new in RENAMED:
        name = old.sub(new, name)
    return name


class Transfer(NamedTuple):
    """How many tensors were loaded, how many the model has, and those that are there in another shape: name and both
    shapes, the file's first."""

    loaded: int
    total: int
    misfits: list[tuple[str, tuple[int, ...], tuple[int, ...]]]


def transfer(model: nn.Module, state: Mapping[str, Tensor], exclude: tuple[str, ...] = ()) -> Transfer:
    """Load every tensor that fits by name and shape and has none of `exclude` in its name."""
    own = model.state_dict()
    state = {name if name in own else _renamed(name): tensor for name, tensor in state.items()}
    shared = [name for name in state if name in own and not any(part in name for part in exclude)]
    fitting = type(own)((name, state[name]) for name in shared if own[name].shape == state[name].shape)
    fitting._metadata = own._metadata  # type: ignore[attr-defined]  # versions of layers, which some ask for
    misfits = [(name, tuple(state[name].shape), tuple(own[name].shape)) for name in shared if name not in fitting]
    model.load_state_dict(fitting, strict=False)
    return Transfer(len(fitting), len(own), misfits)


class _Unusable(Exception):
    """Why a file is not used: the rest of a sentence that begins with its name."""


def _refused(name: str) -> _Unusable:
    return _Unusable(
        f"was refused, and nothing in it was run: it names '{name}', which has no business in a weight file; "
        "use a file from a source that you trust"
    )


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"weights {path} do not exist; check the path (nothing is downloaded), or give '' to start from scratch"
        ) from None
    except OSError as error:
        raise UserError(f"weights {path} cannot be read: {error.strerror}") from None
    if not data:
        raise UserError(f"{path} is empty; copy or download it again")
    return data


def _damage(data: bytes, error: Exception) -> str:
    """The likely reason why torch could not read `data`."""
    try:
        data[:1000].decode("utf-8")
    except UnicodeDecodeError:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0].split(". ")[0][:160]
        return f"is not a whole PyTorch weight file ({reason}); copy or download it again"
    return "is text, not a weight file (a web page or a Git LFS pointer?); download it again"


def _refuse_torchscript(data: bytes) -> None:
    """torch.load would hand such an archive to torch.jit.load, which runs it."""
    if data[:4] != b"PK\x03\x04":
        return
    # The reader that torch.load uses: another one might see other records in a file made to deceive.
    if "constants.pkl" in torch._C.PyTorchFileReader(io.BytesIO(data)).get_all_records():
        raise _Unusable("is a TorchScript export, which cannot be trained; give the .pt that training wrote")


def _unpickle(data: bytes) -> Any:
    """The file's content, by torch's own safe loader, or with stubs for classes where that refuses."""
    # From memory, for torch unpacks a tar archive wherever it wants to be unpacked, but only from a real file.
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_RESTRICTED)


class Stub:
    """Stands where a pickle has an object of some class: holds its state, and does nothing."""

    __slots__ = ("state",)
    stands_for: ClassVar[str] = ""
    state: dict[str, Any]

    def __new__(cls, *_: object, **__: object) -> Stub:
        stub = super().__new__(cls)
        stub.state = {}
        return stub

    def __init__(self, *_: object, **__: object) -> None:
        pass

    # pickle would otherwise set attributes. On the class itself, which a file can also name, this call fails: good.
    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    # What pickle calls to fill subclasses of list and dict.
    def append(self, _: object) -> None:
        pass

    def extend(self, _: object) -> None:
        pass

    def __setitem__(self, _: object, __: object) -> None:
        pass

    def __call__(self, *_: object) -> None:
        """Objects in a weight file are kept, not called."""
        raise _refused(self.stands_for)


@lru_cache(maxsize=1000)
def _stub_class(name: str) -> type[Stub]:
    return type(name.rpartition(".")[2], (Stub,), {"__slots__": (), "stands_for": name})


class _Unpickler(pickle.Unpickler):
    """Resolves names from the lists above only. torch adds the storages, by way of `persistent_load`."""

    def load(self) -> Any:
        """The next object of the file."""
        given = getattr(self, "persistent_load", None)
        if given is not None:
            self.persistent_load = lambda identity: _persistent(identity, given)  # type: ignore[method-assign]
        return super().load()

    def find_class(self, module: str, name: str) -> Any:
        """What the pickle means by a name. `_Unusable` where it has no business in a weight file."""
        module = IMPORT_MAPPING.get(module, module)  # protocols 0 to 2 write __builtin__ for builtins, and so on
        full = f"{module}.{name}"
        if "." not in name:  # a dotted name is a path through attributes, from a harmless module to any other
            if full in REAL:
                return REAL[full]
            if full in _REBUILD:
                rebuild = _REBUILD[full]
                return lambda *args: rebuild(*args)  # one to throw away: BUILD can change a function's attributes
            if full in STUBS or any(f"{module}.".startswith(f"{allowed}.") for allowed in STUB_MODULES):
                return _stub_class(full)
        raise _refused(full)


def _persistent(identity: Any, load: Callable[[Any], Any]) -> Any:
    """What `identity` stands for: a storage, by `load`, or in files of torch < 1.6 a class beside its source."""
    # torch compares that source with the class's, and writes the difference into a file that the pickle can name.
    if isinstance(identity, tuple) and identity[0] in ("module", b"module"):
        return identity[1]
    return load(identity)


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    """A tensor, without the hooks and metadata that the pickle may give it."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise TypeError(f"a tensor without a storage, but with a {type(storage).__name__}")
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _parameter(data: Tensor, *_: object) -> Tensor:
    return data


_REBUILD: dict[str, Callable[..., Tensor]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
# torch.load takes `pickle` itself or something like it.
_RESTRICTED = SimpleNamespace(
    __name__="restricted pickle", Unpickler=_Unpickler, load=lambda file, **options: _Unpickler(file, **options).load()
)


def _interpret(content: Any) -> Weights:
    """What an unpickled file means."""
    if isinstance(content, dict):
        if str(content.get("format", "")).startswith("lockstep-"):
            return _own(content)
        if not _is_state(content):
            # The smoothed weights are the ones to use, but YOLOv5 moves them to `model` when a training ends.
            content = next(
                (content[key] for key in ("ema", "model", "state_dict") if content.get(key) is not None), None
            )
        if isinstance(content, dict) and _is_state(content):
            return Weights(_floats(_without_wrapper(content)), None, {}, "", {}, "tensors")
    content = _unwrapped(content)
    if _is_module(content):
        return _official(content)
    raise _Unusable("contains no model; give weights that this program or YOLOv5 has written")


def _is_state(content: Mapping[Any, Any]) -> bool:
    """Whether this is a state dict: named tensors and nothing else."""
    return bool(content) and all(isinstance(value, Tensor) for value in content.values())


def _without_wrapper(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The names without the first part that DistributedDataParallel gives to all."""
    wrapped = all(str(name).startswith("module.") for name in state)
    return {str(name).removeprefix("module.") if wrapped else name: tensor for name, tensor in state.items()}


def _unwrapped(content: Any) -> Any:
    """The network in what YOLOv5 and torch put around one."""
    for _ in range(DEEPEST):
        if not isinstance(content, Stub):
            break
        kind, children = _kind(content), content.state.get("_modules") or {}
        if kind == "Ensemble":
            if len(children) != 1:
                raise _Unusable(f"holds {len(children)} networks, an ensemble; give the weights of one")
            content = next(iter(children.values()))
        elif kind in WRAPPERS:
            content = children.get(WRAPPERS[kind], content.state.get(WRAPPERS[kind]))
        else:
            break
    return content


def _own(content: dict[str, Any]) -> Weights:
    if content["format"] != FORMAT:
        raise _Unusable(f"has the format {content['format']}, which this version does not know; update this program")
    missing = [key for key in ("task", "model", "names", "state", "settings") if key not in content]
    if missing:
        raise _Unusable(f"lacks {', '.join(missing)}; it was not written whole, so take another file")
    return Weights(
        _floats(content["state"]),
        _plain(content["model"]),
        _numbered(content["names"]),
        content["task"],
        content["settings"],
        "lockstep",
    )


def _official(network: Stub) -> Weights:
    state, names = _floats(dict(_tensors(network, ""))), _numbered(network.state.get("names") or {})
    task = TASKS_BY_CLASS.get(_kind(network), "detect")
    yaml = network.state.get("yaml")
    plain = None
    if isinstance(yaml, dict):
        known = _plain({key: yaml[key] for key in KEYS if key in yaml})  # other programs add keys of their own
        plain = _plain(_with_activations(known, network))
    if task == "classify" and plain is None:
        plain = _classifier(state, len(names))
    return Weights(state, plain, names, task, {}, "yolov5")


def _classifier(state: Mapping[str, Tensor], classes: int) -> dict[str, Any] | None:
    """The YAML of an official classifier, whose file has none: its first convolution tells which. None for another."""
    first = state.get("model.0.conv.weight")
    size = SIZES.get(len(first)) if first is not None else None
    return {**read_yaml(ROOT / "models" / f"yolov5{size}-cls.yaml"), "nc": classes} if size else None


def _with_activations(yaml: dict[str, Any], network: Stub) -> dict[str, Any]:
    """The YAML with the activations of the network's layers, where the YAML does not say them.

    Up to YOLOv5's release 4.0 only the code did: Hardswish or LeakyReLU in `Conv`, LeakyReLU in `BottleneckCSP`.
    """
    acts = [layer.state["_modules"].get("act") for layer in _modules(network) if _kind(layer) in CONVOLUTIONS]
    found = collections.Counter(text for act in acts if isinstance(act, Stub) and (text := _activation(act)))
    if found and not yaml.get("activation") and (usual := found.most_common(1)[0][0]) != "nn.SiLU()":
        yaml = {**yaml, "activation": usual}
    layers = network.state["_modules"].get("model")
    by_index = layers.state["_modules"] if _is_module(layers) else {}
    first = len(yaml["backbone"]) if isinstance(yaml.get("backbone"), list) else 0
    for part, start in (("backbone", 0), ("head", first)):
        if isinstance(yaml.get(part), list):
            yaml = {**yaml, part: [_with_slope(row, by_index.get(str(start + k))) for k, row in enumerate(yaml[part])]}
    return yaml


def _with_slope(row: Any, layer: Any) -> Any:
    """A `BottleneckCSP`'s row with the slope of the LeakyReLU that the layer has; any other row as it is."""
    if not _is_module(layer) or _kind(layer) != "BottleneckCSP" or not isinstance(row, list) or len(row) != 4:
        return row
    act = layer.state["_modules"].get("act")
    if not isinstance(act, Stub) or _kind(act) != "LeakyReLU" or not isinstance(row[3], list):
        return row
    settings = [True, 1, 0.5]  # what `BottleneckCSP` takes after its channels, where the row does not say it
    args = [*row[3][:4], *settings[len(row[3][:4]) - 1 :]]
    return [*row[:3], [*args, act.state.get("negative_slope", 0.01)]]


def _activation(act: Stub) -> str | None:
    """How a YAML writes an activation of torch's; None for another one, and for none."""
    kind = _kind(act)
    if kind not in nn.modules.activation.__all__:
        return None
    constants = getattr(getattr(nn, kind), "__constants__", ())
    settings = {name: act.state[name] for name in constants if name != "inplace" and name in act.state}
    return f"nn.{kind}({', '.join(f'{name}={value!r}' for name, value in settings.items())})"


def _kind(stub: Stub) -> str:
    """The name of the class that a stub stands for."""
    return stub.stands_for.rpartition(".")[2]


def _modules(module: Stub) -> Iterator[Stub]:
    """A module and all that are in it."""
    yield module
    for child in module.state["_modules"].values():
        if _is_module(child):
            yield from _modules(child)


def _is_module(value: object) -> bool:
    """Whether this is the stub of a torch module."""
    return isinstance(value, Stub) and isinstance(value.state.get("_modules"), dict)


def _tensors(module: Stub, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The state dict that the module would have, as names and tensors."""
    fields = module.state
    unsaved = {"anchor_grid", *fields.get("_non_persistent_buffers_set", ())}  # the grid: of old files; it is derived
    for name, tensor in {**fields["_parameters"], **fields["_buffers"]}.items():
        if isinstance(tensor, Tensor) and name not in unsaved:
            yield prefix + name, tensor
    if _kind(module) in CONVOLUTIONS and "bn" not in fields["_modules"]:
        yield from _undone(fields["_modules"].get("conv"), prefix)
    for name, child in fields["_modules"].items():
        if _is_module(child):
            yield from _tensors(child, f"{prefix}{name}.")


def _undone(convolution: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """A BatchNorm that adds the bias of a fused convolution and does nothing else."""
    bias = convolution.state["_parameters"].get("bias") if _is_module(convolution) else None
    if isinstance(bias, Tensor):
        ones = torch.ones(bias.shape)
        yield f"{prefix}bn.weight", ones
        yield f"{prefix}bn.bias", bias
        yield f"{prefix}bn.running_mean", torch.zeros(bias.shape)
        yield f"{prefix}bn.running_var", ones - EPSILON
        yield f"{prefix}bn.num_batches_tracked", torch.tensor(0)


def _floats(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without gradients, floating ones as float32: official files are saved in half precision."""
    return {name: (x.float() if x.is_floating_point() else x).detach() for name, x in state.items()}


def _numbered(names: Any) -> dict[int, str]:
    """Class names by number, from a dict or, as older files have it, a list."""
    pairs = names.items() if isinstance(names, dict) else enumerate(names)
    return {int(number): str(name) for number, name in pairs}


def _plain(value: Any) -> Any:
    """A copy made of plain dicts, lists and values. TypeError where there is anything else, such as a stub."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"its model description holds a {type(value).__name__}")
