"""Transfer the usable rows of a file's `DetectDFL` head into one for other classes. Called by `DetectDFL.keep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.weights.transfer import same_names
from utils.errors import plural

if TYPE_CHECKING:
    from models.heads.dfl.head import DetectDFL


@torch.no_grad()
def keep_head(
    head: DetectDFL, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]
) -> str:
    """Copy the class rows of a file's head into the model's, and return in words which were copied, or why none were.

    `transfer` has already loaded the box branches and, if they are as wide, the first layers of the class branches.
    Each row of the last layer is copied from the class of the same name, whatever its number; other classes are left
    unchanged.

    Args:
        prefix: prefix of the head's tensors in `state`
        state: the file's tensors, by name
        names: the file's class names, by number
        new: the model's class names, by number
    """
    same, taken = same_names(names, new), 0
    for number, branches in enumerate(head.heads):
        targets = [branches.get_parameter(f"class_conv.2.{part}") for part in ("weight", "bias")]
        sources = [state.get(f"{prefix}.heads.{number}.class_conv.2.{part}") for part in ("weight", "bias")]
        pairs = [
            (target, source)
            for target, source in zip(targets, sources, strict=True)
            if source is not None and source.shape[1:] == target.shape[1:] and len(source) >= len(names)
        ]
        if len(pairs) == len(targets):
            taken += 1
            for target, source in pairs:
                for row, of_file in same.items():
                    target[row] = source[of_file]
    if not taken:
        return "from its head the boxes, not the classes: the layers before them differ"
    return f"from its head the boxes and {len(same) or 'none'} of {plural(len(new), 'class')}"
