"""Hide packages from a process: `PYTHONPATH` names a folder whose sitecustomize.py calls `hide`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# What a machine with torch, torchvision, accelerate and the usual scientific packages may lack of requirements*.txt.
ABSENT = ("deepspeed", "wandb", "msgspec", "faster_coco_eval", "openvino", "debugpy", "transformers", "tensorboard")


class Finder(PathFinder):
    """Finds all packages but those."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return None if name.partition(".")[0] in ABSENT else PathFinder.find_spec(name, path, target)


def hide() -> None:
    """Hide the packages in this process."""
    sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
