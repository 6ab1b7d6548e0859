"""Read YOLOv5's weight files, which are pickled networks, without running them. Called by models/weights.py.

A pickle can call any function. Here inert stubs (`Stub`) replace its classes, and the tensors and the YAML are read
from the stubs; names that are not in the lists below are refused.
"""

from __future__ import annotations

import collections
import io
import pickle
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor

# Modules and classes whose objects a file may hold. None of them is imported: a stub replaces each.
STUB_MODULES = (
    *("models", "utils", "ultralytics", "yolov5", "torch.nn.modules", "torch.nn.parallel", "pathlib", "datetime"),
    *("lightning", "lightning_fabric", "pytorch_lightning", "omegaconf", "yolo"),  # Lightning's checkpoints
)
STUBS = {
    *("argparse.Namespace", "numpy.dtype", "numpy.ndarray", "_codecs.encode"),  # `encode` occurs in numpy's scalars
    "builtins.getattr",  # occurs in pickled methods, which YOLOv5's fused layers hold
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
}
# Classes and values that are not replaced. They are built in: the opcode BUILD could change others' attributes.
BUILTIN_CLASSES = (set, frozenset, list, dict, tuple, int, float, bool, str, complex)
REAL_OBJECTS: dict[str, Any] = {
    "collections.OrderedDict": collections.OrderedDict,
    "torch.Size": torch.Size,
    "torch.device": torch.device,
    **{f"builtins.{kind.__name__}": kind for kind in BUILTIN_CLASSES},
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
# Classes that wrap a network, and the attribute or child that holds it.
WRAPPERS = {
    **dict.fromkeys(("DistributedDataParallel", "DataParallel"), "module"),
    **dict.fromkeys(("AutoShape", "autoShape", "DetectMultiBackend"), "model"),
    "ModelEMA": "ema",
    "Ensemble": "0",
}
MAX_PICKLE_BYTES = 2**22  # largest pickle in a file; yolov5x has a pickle of 0.4 MB
NEEDLESS = "which no file of YOLOv5 needs; give a file that you trust, or its state_dict() saved alone"
SUPPORTED_RELEASES = "give a file of YOLOv5 v5.0 or later, or bare tensors (a state dict)"
CONVOLUTIONS = ("Conv", "DWConv")  # YOLOv5's layers that have the model's activation and may be fused
BATCH_NORM_EPSILON = 1e-3  # eps of the BatchNorms in CONVOLUTIONS


class UnusableFile(Exception):
    """A weight file cannot be used. The message continues a sentence that begins with the file's path."""


class Stub:
    """An inert replacement of an object in a pickle, with the object's state and the name of its class."""

    __slots__ = ("state",)
    class_path: ClassVar[str] = ""  # module and name of the class
    state: dict[str, Any]

    def __new__(cls, *_: object, **__: object) -> Stub:
        stub = super().__new__(cls)
        stub.state = {}
        return stub

    def __init__(self, *_: object, **__: object) -> None:
        pass

    # Without this method pickle would set attributes. If a file names the class itself, this call fails, as it should.
    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, dict) else {}

    append = extend = __setitem__ = __init__  # pickle calls these to fill subclasses of list and dict

    def __call__(self, *_: object) -> None:
        """Raise `UnusableFile`: objects in a weight file are not called."""
        raise _refused(self.class_path)


def unpickle(data: bytes, is_archive: bool) -> Any:
    """Return the content of a file from torch's safe loader or, if that refuses the file, with stubs for classes.

    Raises `UnusableFile` if a file that is no zip archive, the format since torch 1.6, holds classes.
    """
    # Read from memory: torch would extract a tar archive on disk to the paths that it names.
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not is_archive and data.startswith(b"\x80"):
            raise UnusableFile(
                f"holds classes as torch before 1.6 wrote them, which are not read; {SUPPORTED_RELEASES}"
            ) from None
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_RESTRICTED_PICKLE)


def _refused(name: str) -> UnusableFile:
    return UnusableFile(f"was refused, and nothing in it was run: it names '{name}', {NEEDLESS}")


class _RestrictedUnpickler(pickle.Unpickler):
    """Resolves only names in the lists above. torch loads storages through `persistent_load`."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object or stub for a name. Raises `UnusableFile` if the name is not in the lists above."""
        module = IMPORT_MAPPING.get(module, module)  # protocols 0 to 2 use Python 2's module names, such as __builtin__
        path = f"{module}.{name}"
        if "." not in name:  # a dotted name is a chain of attributes, which may lead to any module
            if path in REAL_OBJECTS:
                return REAL_OBJECTS[path]
            if path in _REBUILD:
                rebuild = _REBUILD[path]
                return lambda *args: rebuild(*args)  # a new function, because BUILD can change its attributes
            if path in STUBS or any(f"{module}.".startswith(f"{allowed}.") for allowed in STUB_MODULES):
                return type(name, (Stub,), {"__slots__": (), "class_path": path})
        raise _refused(path)


def rebuild_tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Tensor:
    """Return a tensor without the pickle's hooks and metadata."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise TypeError(f"a tensor's storage is a {type(storage).__name__}")
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


_REBUILD: dict[str, Callable[..., Tensor]] = {
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
}
# For torch.load, in place of the module `pickle`.
_RESTRICTED_PICKLE = SimpleNamespace(
    __name__="restricted pickle",
    Unpickler=_RestrictedUnpickler,
    load=lambda file, **options: _RestrictedUnpickler(file, **options).load(),
)


# The content of an unpickled network


def is_module(value: object) -> TypeGuard[Stub]:
    """Return whether `value` is the stub of a torch module."""
    return isinstance(value, Stub) and isinstance(value.state.get("_modules"), dict)


def unwrap(content: Any) -> Any:
    """Return the network inside wrappers of YOLOv5 and torch. Raises `UnusableFile` for an ensemble of several."""
    if not isinstance(content, Stub):
        return content
    kind, children = type(content).__name__, content.state.get("_modules") or {}
    if kind == "Ensemble" and len(children) != 1:
        raise UnusableFile(f"is an ensemble of {len(children)} networks; give the weights of one")
    if kind in WRAPPERS:
        return unwrap(children.get(WRAPPERS[kind], content.state.get(WRAPPERS[kind])))
    return content


def refuse_old_release(yaml: Mapping[str, Any], network: Stub) -> None:
    """Raise `UnusableFile` for a network whose activations were fixed in the code of YOLOv5 before v5.0."""
    for child in network.state["_modules"].values():
        if is_module(child):
            refuse_old_release(yaml, child)
    kind, act = type(network).__name__, network.state["_modules"].get("act")
    is_named = bool(yaml.get("activation")) and kind in CONVOLUTIONS
    if kind not in (*CONVOLUTIONS, "BottleneckCSP") or not isinstance(act, Stub) or is_named:
        return
    if (name := type(act).__name__) not in ("SiLU", "Identity"):
        reason = f"is from a YOLOv5 release before v5.0: its {kind} has {name}, and its YAML does not say so"
        raise UnusableFile(f"{reason}; {SUPPORTED_RELEASES}")


def state_dict(module: Stub, prefix: str = "") -> dict[str, Tensor]:
    """Return the state dict of a network, with the BatchNorms of fused layers restored, which add a bias only."""
    fields = module.state
    # Older files have a buffer anchor_grid, which is computed from the anchors.
    not_saved = {"anchor_grid", *fields.get("_non_persistent_buffers_set", ())}
    fields_by_name = {**fields["_parameters"], **fields["_buffers"]}
    state = {prefix + name: x for name, x in fields_by_name.items() if isinstance(x, Tensor) and name not in not_saved}
    convolution = fields["_modules"].get("conv")
    if type(module).__name__ in CONVOLUTIONS and "bn" not in fields["_modules"] and is_module(convolution):
        bias = convolution.state["_parameters"].get("bias")
        if isinstance(bias, Tensor):
            ones = torch.ones(bias.shape)
            state |= {f"{prefix}bn.weight": ones, f"{prefix}bn.bias": bias}
            state |= {f"{prefix}bn.running_mean": 0 * ones, f"{prefix}bn.running_var": ones - BATCH_NORM_EPSILON}
            state[f"{prefix}bn.num_batches_tracked"] = torch.tensor(0)
    for name, child in fields["_modules"].items():
        if is_module(child):
            state |= state_dict(child, f"{prefix}{name}.")
    return state


def plain_values(value: Any) -> Any:
    """Copy `value` as dicts, lists and plain values. Raises TypeError for any other value, such as a stub."""
    if isinstance(value, dict):
        return {str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"its model description holds a {type(value).__name__}")
