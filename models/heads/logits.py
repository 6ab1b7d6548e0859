"""Logits of any head: their sigmoids, and those that may exceed a threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

VECTOR_NUMBERS = 64  # at least the width of any CPU's vectors
SPAN_NUMBERS = 2**14  # a multiple of it, below torch's threshold for several threads


def least_logit(probability: float) -> float:
    """Return a lower bound, nearly exact, of the logits whose sigmoid in fp32 exceeds `probability`.

    For objectness, which no confidence exceeds, or class scores that are confidences.
    """
    least = min(probability, 1.0) * (1 - 1e-5)
    return math.log(least / (1 - least)) if least > 0 else -math.inf


def row_sigmoids(parts: Sequence[Tensor]) -> Tensor:
    """Return the sigmoids of parts (k, outputs), concatenated, in fp32.

    A CPU computes slightly different sigmoids for the last numbers of a thread's share, which do not fill a vector. To
    make a sigmoid independent of its position, spans are computed by one thread, with spare rows.
    """
    size = parts[0].shape[1]
    spare = parts[0].new_zeros(math.ceil(VECTOR_NUMBERS / size), size)
    rows = torch.cat((*parts, spare)).float()
    for span in torch.split(rows.view(-1), SPAN_NUMBERS if rows.device.type == "cpu" else rows.numel()):
        span.sigmoid_()
    return rows[: -len(spare)]
