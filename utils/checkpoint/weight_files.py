"""Weight files: tensors and plain values; loading one runs no code.

Called by utils/run_folder.py; models/weights/reader.py reads them.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from utils.memory_format import contiguous

FORMAT = "lockstep-1"


def serialised(content: Any) -> memoryview:
    """Return the bytes of a file that `torch.load` reads as `content`."""
    buffer = io.BytesIO()
    torch.save(contiguous(content), buffer)
    return buffer.getbuffer()


def weights_content(
    model: nn.Module, yaml: Mapping[str, Any], names: Mapping[int, str], settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a weight file: the weights of `model` and all that is needed to use them.

    yaml: of the model, with its task. names: of the classes. settings: of the run, for information.
    """
    return {
        "format": FORMAT,
        "task": yaml["task"],
        "model": dict(yaml),
        "names": dict(names),
        "state": {key: value.detach().cpu() for key, value in model.state_dict().items()},
        "settings": dict(settings),
    }
