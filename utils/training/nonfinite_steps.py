"""Optimizer steps whose gradients are not finite: undone, counted, and explained if there are too many.

Called by optimizer_steps.py; step_log.py uses `DeviceValue`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MAX_NAMED_IMAGES = 5  # images that a message names
LARGEST_SOUND_WEIGHT = 1e4  # absolute value; a larger one means that training has diverged
Window = list[tuple[Tensor, list[str]]]  # loss terms and image paths of each batch between two optimizer steps


class DeviceValue:
    """A small tensor that is copied to the host asynchronously, to be read later."""

    def __init__(self, value: Tensor) -> None:
        self.on_host, self.copied = value, None
        if value.is_cuda:
            self.on_host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def read(self) -> Any:
        """Return the value as a number or a list of numbers once the device has computed it."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host.tolist() if self.on_host.ndim else self.on_host.item()


class NonFiniteGuard:
    """Restores the tensors beside the weights that the batches of a skipped optimizer step have changed.

    Args:
        tensors: tensors that batches change in place, such as BatchNorm's statistics and loss sums
        limit: largest number of skipped steps in a row
    """

    def __init__(self, tensors: Sequence[Tensor], limit: int) -> None:
        self.live = [tensor.detach() for tensor in tensors]
        self.limit, self.skipped_in_a_row = limit, 0
        self.window: Window = []  # the batches since the last step
        self.saved = torch.cat([tensor.flatten() for tensor in self.live])
        parts = self.saved.split([tensor.numel() for tensor in self.live])
        self._parts = [part.view_as(live) for part, live in zip(parts, self.live, strict=True)]

    def add_batch(self, losses: Tensor, images: Iterable[str]) -> None:
        """Record a batch for the messages: its loss terms (k,) and the paths of its images."""
        self.window.append((losses, list(images)))

    def snapshot(self) -> None:
        """Save the current values of the tensors, to restore them later."""
        torch.cat([tensor.flatten() for tensor in self.live], out=self.saved)

    @torch.no_grad()
    def keep_if(self, taken: Tensor) -> None:
        """Save the values after an optimizer step that was taken, or restore them; nothing waits for the device.

        Args:
            taken: whether the step was taken, bool () on the device
        """
        now = torch.cat([tensor.flatten() for tensor in self.live])
        self.saved.copy_(torch.where(taken, now, self.saved))
        torch._foreach_copy_(self.live, self._parts)

    def end_window(self) -> Window:
        """Return the batches since the last optimizer step, and begin anew."""
        window, self.window = self.window, []
        return window

    def count(self, taken: bool) -> bool:
        """Count skipped steps in a row and return whether the limit is reached."""
        self.skipped_in_a_row = 0 if taken else self.skipped_in_a_row + 1
        return self.skipped_in_a_row >= self.limit

    @staticmethod
    def suspects(window: Window, loss_names: Sequence[str]) -> list[tuple[str, str]]:
        """Return the images of this process's batches whose loss is not finite, each with the loss terms concerned."""
        images_and_terms = []
        for losses, images in window:
            terms = [name for name, value in zip(loss_names, losses.tolist(), strict=True) if not math.isfinite(value)]
            images_and_terms += [(image, ", ".join(terms)) for image in images if terms]
        return images_and_terms


def explain_skipped_steps(
    step: int,
    skipped: int,
    suspects: Sequence[tuple[str, str]],
    images: int,
    model: nn.Module,
    precision: str,
    lr0: float,
) -> str:
    """Return a message about `skipped` skipped steps in a row: the last step, its images and the probable cause.

    Args:
        suspects: suspects of all processes, see `NonFiniteGuard.suspects`
        images: number of images of the last step, on all processes
        precision: precision of autocast
    """
    sizes = [float(parameter.detach().abs().max()) for parameter in model.parameters() if parameter.numel()]
    largest = float("nan") if any(map(math.isnan, sizes)) else max(sizes, default=0.0)  # max may skip a NaN
    if suspects:
        terms = ", ".join(dict.fromkeys(terms for _, terms in suspects))
        names = ", ".join(image for image, _ in suspects[:MAX_NAMED_IMAGES])
        more = f" and {len(suspects) - MAX_NAMED_IMAGES} more" if len(suspects) > MAX_NAMED_IMAGES else ""
        details = f"not finite: {terms} of the images {names}{more}"
    else:
        details = f"the loss of its {images} images is finite, and its gradient is not"
    if not largest < LARGEST_SOUND_WEIGHT:
        cause = f"the weights have grown to {largest:.3g}, so the learning rate (lr0 {lr0:g}) is probably too high"
    elif precision == "fp16":
        cause = "fp16 probably overflows: try --mixed-precision bf16 or no"
    else:
        cause = f"check these images and their labels, and try a lower lr0 than {lr0:g}"
    steps = f"{skipped} optimizer steps in a row were skipped" if skipped > 1 else "an optimizer step was skipped"
    return f"{steps}, because the gradients were not finite; the last is step {step} ({details}); {cause}"
