"""Weight files: for people. Tensors and plain values only, so that they load without running code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from utils.files import replacing

FORMAT = "lockstep-1"


def write_weights(
    path: Path, model: nn.Module, yaml: Mapping[str, Any], names: Mapping[int, str], settings: Mapping[str, Any]
) -> None:
    """Write a model (its EMA, fp32) with all that is needed to use it: YAML with the task, class names, settings."""
    content = {
        "format": FORMAT,
        "task": yaml["task"],
        "model": dict(yaml),
        "names": dict(names),
        "state": {key: value.detach().cpu() for key, value in model.state_dict().items()},
        "settings": dict(settings),
    }
    with replacing(path) as file:
        torch.save(content, file)
