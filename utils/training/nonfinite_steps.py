"""Optimizer steps whose gradients are not finite: undone, counted, and explained when they do not end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NAMED = 5  # images that a sentence names, at most
HUGE = 1e4  # no weight of a sound network is larger
Window = list[tuple[Tensor, list[str]]]  # of each batch: its loss terms and its images


class Later:
    """What the device finds out, a small tensor, read later: by then, mostly, nothing has to be waited for."""

    def __init__(self, found: Tensor) -> None:
        self.here, self.copied = found, None
        if found.is_cuda:
            self.here = torch.empty(found.shape, dtype=found.dtype, pin_memory=True).copy_(found, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> Any:
        """It as numbers, when the device has found it out."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.here.tolist() if self.here.ndim else self.here.item()


class Guard:
    """Keeps what a window of batches changes beside the weights, to take it back where the window's step is skipped.

    tensors: changed in place; statistics of BatchNorm, sums of losses.
    """

    def __init__(self, tensors: Sequence[Tensor], limit: int) -> None:
        self.live = [tensor.detach() for tensor in tensors]
        self.limit, self.row = limit, 0
        self.window: Window = []  # the batches since the last step
        self.keep()

    def saw(self, losses: Tensor, images: Iterable[str]) -> None:
        """Note a batch: its loss terms (k,) and where its images came from."""
        self.window.append((losses, list(images)))

    def keep(self) -> None:
        """What is there now is to be kept."""
        self.kept = torch.cat([tensor.flatten() for tensor in self.live])

    @torch.no_grad()
    def close(self, taken: Tensor) -> Window:
        """End the window with its step, which was `taken` or not: (), bool, on the device, and nothing waits for it.

        Returns the window's batches.
        """
        kept = self.kept
        self.keep()
        self.kept = torch.where(taken, self.kept, kept)
        parts = self.kept.split([tensor.numel() for tensor in self.live])
        torch._foreach_copy_(self.live, [part.view_as(own) for part, own in zip(parts, self.live, strict=True)])
        window, self.window = self.window, []
        return window

    def count(self, taken: bool) -> bool:
        """Count the steps that were skipped in a row; true where they are too many."""
        self.row = 0 if taken else self.row + 1
        return self.row >= self.limit

    @staticmethod
    def suspects(window: Window, names: Sequence[str]) -> list[tuple[str, str]]:
        """The images of a window's batches whose loss is not finite, with the term that is not: here, not elsewhere.

        names: of the loss terms.
        """
        found = []
        for losses, images in window:
            terms = [name for name, value in zip(names, losses.tolist(), strict=True) if not math.isfinite(value)]
            found += [(image, ", ".join(terms)) for image in images if terms]
        return found


def explain(
    step: int, row: int, suspects: Sequence[tuple[str, str]], images: int, model: nn.Module, precision: str, lr: float
) -> str:
    """What is known of `row` skipped steps in a row: the last step, its images, and what is probably the cause.

    suspects: of all processes; images: of the window. precision: of the autocast.
    """
    sizes = [float(parameter.detach().abs().max()) for parameter in model.parameters() if parameter.numel()]
    largest = float("nan") if any(map(math.isnan, sizes)) else max(sizes, default=0.0)  # max may pass over it
    if suspects:
        terms = ", ".join(dict.fromkeys(terms for _, terms in suspects))
        found = [image for image, _ in suspects]
        where = f"{terms} of the images {', '.join(found[:NAMED])}" + (
            f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        )
        what = f"not finite: {where}"
    else:
        what = f"the loss of its {images} images is finite, and its gradient is not"
    if not largest < HUGE:
        cause = f"the weights have grown to {largest:.3g}, so the learning rate (lr0 {lr:g}) is probably too high"
    elif precision == "fp16":
        cause = "fp16 probably overflows: try --mixed-precision bf16 or no"
    else:
        cause = f"look at these images and their labels, and try a lower lr0 than {lr:g}"
    skipped = f"{row} optimizer steps in a row were skipped" if row > 1 else "an optimizer step was skipped"
    return f"{skipped}, for the gradients were not finite; the last is step {step} ({what}); {cause}"


def statistics(model: Any) -> dict[str, Tensor]:
    """The floating buffers of a model by name: running statistics, which training changes beside the weights."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
