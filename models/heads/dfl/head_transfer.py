"""Take what a `DetectDFL` head can use of a weight file's, although the classes differ. Called by `DetectDFL.keep`."""

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
    """Copy the class rows of a file's head into the model's, and return in words what was taken, or why nothing was.

    The branches of the boxes and, if they are as wide, the first layers of the classes have been loaded by their names.
    The last layer's rows are those of the class of the same name, whatever its number; other classes stay as they are.
    prefix: of the head in `state`. state, names: tensors and class names of the file. new: class names of the model.
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
        return "of its head the boxes, not the classes: the layers before them differ"
    return f"of its head the boxes and {len(same) or 'none'} of {plural(len(new), 'class')}"
