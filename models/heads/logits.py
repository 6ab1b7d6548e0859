"""Sigmoids of any head's logits, and a bound for the logits whose sigmoids exceed a threshold."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

VECTOR_NUMBERS = 64  # at least as many as any CPU's vector register holds
SPAN_NUMBERS = 2**14  # a multiple of VECTOR_NUMBERS below torch's threshold for several threads


def least_logit(probability: float) -> float:
    """Return a nearly exact lower bound of the logits whose sigmoid in fp32 exceeds `probability`.

    It may be applied to objectness, which no confidence exceeds, and to class scores that are confidences.
    """
    least = min(probability, 1.0) * (1 - 1e-5)
    return math.log(least / (1 - least)) if least > 0 else -math.inf


def row_sigmoids(parts: Sequence[Tensor]) -> Tensor:
    """Return the sigmoids of parts (k, outputs), concatenated, in fp32.

    A CPU computes slightly different sigmoids for the last numbers of a thread's share, which do not fill a vector
    register. To make a sigmoid independent of its position, one thread computes each span, with spare rows at the end.
    """
    size = parts[0].shape[1]
    spare = parts[0].new_zeros(math.ceil(VECTOR_NUMBERS / size), size)
    rows = torch.cat((*parts, spare)).float()
    for span in torch.split(rows.view(-1), SPAN_NUMBERS if rows.device.type == "cpu" else rows.numel()):
        span.sigmoid_()
    return rows[: -len(spare)]
