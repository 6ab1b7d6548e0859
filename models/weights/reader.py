"""Read weight files without running anything in them: files from train.py, YOLOv5 and YOLOv9 (MIT), `.safetensors`,
and bare tensors.

Called by export.py, models/initial_weights.py and models/export/runtime.py, which reads exported files.
"""

from __future__ import annotations

import hashlib
import io
import math
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.tasks import DEFAULT_TASK, TASKS
from models.weights.content import EXPORTED_SUFFIXES, Weights
from models.weights.licence import Origin
from models.weights.yolov5_pickle import (
    UnusableFile,
    check_pickle_size,
    class_name,
    is_module,
    model_yaml,
    plain_values,
    state_dict,
    training_settings,
    unpickle,
    unwrap,
)
from utils.checkpoint.weight_files import FORMAT, SAFETENSORS_SUFFIX, is_safetensors, read_safetensors
from utils.errors import UserError, first_line
from utils.files import read_regular

CONTENT_KEYS = ("task", "model", "names", "state", "settings")  # keys of train.py's files, besides `format`


def read_weights(path: str | Path) -> Weights:
    """Read a file from train.py, a YOLOv5 `.pt`, a `.safetensors` file or a saved state dict.

    Raises `UserError` for any other file, before calling anything that it names.
    """
    path = Path(path)
    if path.name.endswith(EXPORTED_SUFFIXES):
        raise UserError(f"{path} is an exported file, which has no weights to load; give the .pt that it was made from")
    data = _read_bytes(path)
    try:
        if path.suffix == SAFETENSORS_SUFFIX or is_safetensors(data):
            weights = _interpret(_safetensors_content(data))
        else:
            if is_archive := data.startswith(b"PK\x03\x04"):
                _check_archive(data)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user cannot change how the file was written
                weights = _interpret(unpickle(data, is_archive))
        sha256 = hashlib.sha256(data).hexdigest()
        origin = weights.origin if weights.source == "lockstep" else Origin.of_program(weights.source, sha256)
        return replace(weights, state=_as_float32(weights.state), origin=origin.followed_by(path.name, sha256))
    except UnusableFile as error:
        raise UserError(f"{path} {error}") from None
    except Exception as error:  # a damaged or hostile file can fail anywhere
        raise UserError(f"{path} {_damage(data, error)}") from error


def _read_bytes(path: Path) -> bytes:
    """Return the bytes of a file. Raises `UserError` if it is missing or empty."""
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise UserError(f"weights {path} do not exist; check the path (nothing is downloaded)") from None
    except OSError as error:
        raise UserError(f"weights {path} cannot be read: {error.strerror}") from None
    if not data:
        raise UserError(f"{path} is empty; copy or download it again")
    return data


def _damage(data: bytes, error: Exception) -> str:
    """Return the likely reason why torch could not read `data`."""
    try:
        data[:1000].decode("utf-8")
    except UnicodeDecodeError:
        return f"is not a complete PyTorch weight file ({first_line(error).split('. ')[0]}); copy or download it again"
    return "is text, not a weight file (a web page or a Git LFS pointer?); download it again"


def _safetensors_content(data: bytes) -> dict[str, Any]:
    """Return the content of a `.safetensors` file in the form of a `.pt`'s. Raises `UnusableFile`."""
    try:
        state, rest = read_safetensors(data)
    except ValueError as error:
        raise UnusableFile(f"is not a complete .safetensors file ({error}); copy or download it again") from None
    return {**rest, "state": state} if rest else state


def _check_archive(data: bytes) -> None:
    """Raise `UnusableFile` for an archive that is damaged, has too large a pickle, or is a TorchScript program."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if damaged := archive.testzip():  # torch.load does not compare the checksums
            raise UnusableFile(f"is damaged (the checksum of {damaged} does not match); copy or download it again")
    # torch.load's own reader: another reader may see other records in a hostile file.
    reader = torch._C.PyTorchFileReader(io.BytesIO(data))
    if "constants.pkl" in reader.get_all_records():
        raise UnusableFile("is a TorchScript export, which cannot be trained; give the .pt that it was made from")
    check_pickle_size(len(reader.get_record("data.pkl")))


def _interpret(content: Any) -> Weights:
    """Return the weights in an unpickled file. Raises `UnusableFile`."""
    settings = training_settings(content)
    if isinstance(content, dict):
        if str(content.get("format", "")).startswith("lockstep-"):
            return _read_lockstep(content)
        if not _is_state_dict(content):
            # The EMA's weights, which YOLOv5 moves to `model` at the end of training.
            content = next(
                (content[key] for key in ("ema", "model", "state_dict") if content.get(key) is not None), None
            )
        if isinstance(content, dict) and _is_state_dict(content):
            if all(str(name).startswith("module.") for name in content):  # added by DistributedDataParallel
                content = {name.removeprefix("module."): tensor for name, tensor in content.items()}
            from models.weights.yolov9 import yolov9_weights  # only here, because few files are of that form

            return yolov9_weights(content) or Weights(content, None, {}, "", {}, "tensors")
    network = unwrap(content)
    if not is_module(network):
        raise UnusableFile("contains no model; give weights that train.py or YOLOv5 wrote")
    state, names = state_dict(network), _numbered(network.state.get("names") or {})
    yaml = model_yaml(network, state, len(names))
    return Weights(state, yaml, names, _yolov5_task(class_name(network)), settings, "yolov5")


def _is_state_dict(content: Mapping[Any, Any]) -> bool:
    """Return whether `content` holds tensors and nothing else."""
    return bool(content) and all(isinstance(value, Tensor) for value in content.values())


def _read_lockstep(content: dict[str, Any]) -> Weights:
    """Return the weights in a file from train.py."""
    if content["format"] != FORMAT:
        raise UnusableFile(f"has the unknown format {content['format']}; update this program")
    missing = [key for key in CONTENT_KEYS if key not in content]
    if missing:
        raise UnusableFile(f"lacks {', '.join(missing)} and is incomplete; give another file")
    kinds: dict[str, Any] = {"state": dict, "model": dict, "names": (dict, list), "task": str, "settings": dict}
    wrong = [key for key, kind in kinds.items() if not isinstance(content[key], kind)]
    mappings = {key: content[key] for key in ("state", "model", "settings") if key not in wrong}
    wrong += [key for key, mapping in mappings.items() if not all(isinstance(name, str) for name in mapping)]
    if wrong or not all(isinstance(tensor, Tensor) for tensor in content["state"].values()):
        raise UnusableFile(f"has a malformed `{wrong[0] if wrong else 'state'}`; copy or download it again")
    return Weights(
        content["state"],
        plain_values(content["model"]),
        _numbered(content["names"]),
        content["task"],
        content["settings"],
        "lockstep",
        origin=Origin.recorded(content),
    )


def _yolov5_task(kind: str) -> str:
    """Return the task of a network by its class's name, or that name if no registered task has such networks."""
    for task, entry in TASKS.items():
        if entry.yolov5_class == kind:
            return task
    # Older detectors are of class `Model`, other programs' detectors of any class.
    return kind if kind.endswith("Model") and kind != "Model" else DEFAULT_TASK


def _as_float32(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without gradients, and floating-point ones as float32: official files hold half precision.

    Raises `UnusableFile` if they are not finite.
    """
    for name, x in state.items():
        # Masks may be -inf.
        if x.is_floating_point() and not ((x < math.inf) if "mask" in name else x.isfinite()).all():
            raise UnusableFile(f"has values in {name} that are not finite, so it cannot be used; give older weights")
    return {name: (x.float() if x.is_floating_point() else x).detach() for name, x in state.items()}


def _numbered(names: Any) -> dict[int, str]:
    """Return class names by number, from a dict or, in an older file, a list."""
    pairs = names.items() if isinstance(names, dict) else enumerate(names)
    return {int(number): str(name) for number, name in pairs}
