"""Weight files: tensors and plain values; loading one runs no code.

Called by run_folder.py and models/export.py; models/weights.py reads them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

FORMAT = "lockstep-1"
SAFETENSORS_SUFFIX = ".safetensors"
SAFETENSORS_KEY = "lockstep"  # metadata key of everything but the tensors, as JSON


def serialised(content: Any) -> memoryview:
    """Return the bytes of a file that `torch.load` reads as `content`."""
    buffer = io.BytesIO()
    torch.save(contiguous(content), buffer)
    return buffer.getbuffer()


def as_safetensors(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a `.safetensors` file with a `weights_content`; equal content gives equal bytes."""
    import safetensors.torch

    # Copies: tensors that share memory are refused. With a second key of the metadata, the order would vary.
    state = {key: value.clone(memory_format=torch.contiguous_format) for key, value in content["state"].items()}
    rest = {key: value for key, value in content.items() if key != "state"}
    return safetensors.torch.save(state, {SAFETENSORS_KEY: json.dumps(rest)})


def is_safetensors(data: bytes) -> bool:
    """Return whether a file's bytes begin like a `.safetensors` file, with the length of a header and the header."""
    return data[8:9] == b"{" and int.from_bytes(data[:8], "little") < len(data)


def read_safetensors(data: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors in a `.safetensors` file, and the rest of its content, {} if another program wrote it.

    Raises `ValueError` if the file is incomplete.
    """
    import safetensors.torch

    try:
        state = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ValueError(str(error).removeprefix("Error while deserializing: ")) from None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return state, json.loads(header.get("__metadata__", {}).get(SAFETENSORS_KEY, "{}"))


def weights_content(
    model: nn.Module,
    yaml: Mapping[str, Any],
    names: Mapping[int, str],
    settings: Mapping[str, Any],
    half: bool = False,
    **origin: Any,
) -> dict[str, Any]:
    """Return the content of a weight file: the weights of `model` and all that is needed to use them.

    Args:
        yaml: the model YAML, with its task
        names: class names, by class number
        settings: the run's settings, for information
        half: whether to store floating-point tensors as float16, except tensors with values beyond its range
        origin: `licence` and `origin`, see models/weights.py
    """
    return {
        "format": FORMAT,
        "task": yaml["task"],
        "model": dict(yaml),
        "names": dict(names),
        "state": {key: _stored(value.detach().cpu(), half) for key, value in model.state_dict().items()},
        "settings": dict(settings),
        **origin,
    }


def _stored(tensor: Tensor, half: bool) -> Tensor:
    if not half or not tensor.is_floating_point():
        return tensor
    halved = tensor.half()
    return halved if halved.isfinite().all() else tensor


def contiguous(content: Any) -> Any:
    """Make the tensors in nested dicts and lists contiguous, so that a file does not depend on the device."""
    if isinstance(content, Tensor):
        return content.contiguous()
    if isinstance(content, dict):
        return {key: contiguous(value) for key, value in content.items()}
    return [contiguous(value) for value in content] if isinstance(content, list) else content
