"""Transfer the usable rows of a file's anchor head into one for other classes. Called by `Detect.keep`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from models.weights import same_names
from utils.errors import plural

if TYPE_CHECKING:
    from models.heads.anchors.head import Detect

BOX_ROWS = 5  # number of an anchor's first rows, for box and objectness
ANCHOR_TOLERANCE = 0.01  # relative difference of equal anchors: official files hold half precision


@torch.no_grad()
def keep_head(
    head: Detect, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]
) -> str:
    """Copy rows of a file's head into the model's, and return in words which were copied, or why none were.

    Box and objectness are copied from the same anchor, a class from the class of the same name, whatever its number;
    other classes are left unchanged. A segmenter's mask rows are copied if the file has them.

    Args:
        prefix: prefix of the head's tensors in `state`
        state: the file's tensors, by name
        names: the file's class names, by number
        new: the model's class names, by number
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
    return f"from its head the boxes and {len(same) or 'none'} of {plural(len(new), 'class')}"


def _close(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first.to(second), second, rtol=ANCHOR_TOLERANCE)


def _fits(source: Tensor | None, tensor: Tensor, anchors: int, least: int) -> TypeGuard[Tensor]:
    """Return whether `source` has at least `least` rows for each of `anchors` anchors, as wide as `tensor`'s rows."""
    if source is None or source.dim() != tensor.dim() or source.shape[1:] != tensor.shape[1:]:
        return False
    return source.shape[0] % anchors == 0 and source.shape[0] // anchors >= least


def _by_anchor(tensor: Tensor, anchors: int) -> Tensor:
    """Return (anchors * rows, ...) as (anchors, rows, ...)."""
    return tensor.reshape(anchors, -1, *tensor.shape[1:])


def _copy_rows(target: Tensor, source: Tensor, new: int, old: int, same: Mapping[int, int]) -> None:
    """Copy rows of a file's weight or bias, (anchors, rows, ...), into the model's.

    Args:
        new: number of the model's classes
        old: number of the file's classes
        same: number of a class in the file, by its number in the model
    """
    target[:, :BOX_ROWS] = source[:, :BOX_ROWS]
    for number, of_file in same.items():
        target[:, BOX_ROWS + number] = source[:, BOX_ROWS + of_file]
    masks = target[:, BOX_ROWS + new :]
    if old and masks.shape == source[:, BOX_ROWS + old :].shape:
        masks.copy_(source[:, BOX_ROWS + old :])
