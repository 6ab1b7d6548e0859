"""Take what an anchor head can use of a weight file's, although the classes differ. Called by `Detect.keep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from models.weights.transfer import same_names
from utils.errors import plural

if TYPE_CHECKING:
    from models.heads.anchors.head import Detect

BOX_ROWS = 5  # of an anchor's rows, the first ones: box and objectness
ANCHOR_TOLERANCE = 0.01  # relative; official files hold half precision


@torch.no_grad()
def keep_head(
    head: Detect, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]
) -> str:
    """Copy rows of a file's head into the model's, and return in words what was taken, or why nothing was.

    The rows of box and objectness are those of the same anchor; those of a class are those of the class of the same
    name, whatever its number; other classes stay as they are. Masks of a segmenter are kept if the file has them.
    prefix: of the head in `state`. state, names: tensors and class names of the file. new: class names of the model.
    """
    anchors = state.get(f"{prefix}.anchors")
    if anchors is None or anchors.shape != head.anchors.shape or not _close(anchors, head.anchors):
        return "not its head: it has other anchors"
    same = same_names(names, new)
    taken = 0
    for number, convolve in enumerate(head.m):
        sources = {part: state.get(f"{prefix}.m.{number}.{part}") for part, _ in convolve.named_parameters()}
        fitting = {
            part: _by_anchor(source, head.na)
            for part, source in sources.items()
            if _fits(source, convolve.get_parameter(part), head.na, BOX_ROWS + len(names))
        }
        if len(fitting) < len(sources):
            continue
        taken += 1
        for part, source in fitting.items():
            _copy_rows(_by_anchor(convolve.get_parameter(part), head.na), source, head.nc, len(names), same)
    if not taken:
        return "not its head: its layers differ"
    return f"of its head the boxes and {len(same) or 'none'} of {plural(len(new), 'class')}"


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.to(second), second, rtol=ANCHOR_TOLERANCE)


def _fits(source: Tensor | None, tensor: Tensor, anchors: int, least: int) -> TypeGuard[Tensor]:
    """Return whether `source` has whole rows for every anchor, at least `least`, of the width of `tensor`'s."""
    if source is None or source.dim() != tensor.dim() or source.shape[1:] != tensor.shape[1:]:
        return False
    return source.shape[0] % anchors == 0 and source.shape[0] // anchors >= least


def _by_anchor(tensor: Tensor, anchors: int) -> Tensor:
    """Return (anchors * rows, ...) as (anchors, rows, ...)."""
    return tensor.reshape(anchors, -1, *tensor.shape[1:])


def _copy_rows(target: Tensor, source: Tensor, new: int, old: int, same: Mapping[int, int]) -> None:
    """Copy rows of a file's weight or bias, (anchors, rows, ...), into the model's. new, old: their classes."""
    target[:, :BOX_ROWS] = source[:, :BOX_ROWS]
    for number, of_file in same.items():
        target[:, BOX_ROWS + number] = source[:, BOX_ROWS + of_file]
    masks = target[:, BOX_ROWS + new :]
    if old and masks.shape == source[:, BOX_ROWS + old :].shape:
        masks.copy_(source[:, BOX_ROWS + old :])
