"""Memory formats of devices and of files."""

from __future__ import annotations

import torch

from utils.batch import layout
from utils.checkpoint import contiguous


def test_layout() -> None:
    assert layout(torch.device("cpu")) == layout(torch.device("cuda", 1)) == torch.channels_last
    assert layout(torch.device("mps")) == torch.contiguous_format


def test_contiguous() -> None:
    weight = torch.arange(54.0).view(2, 3, 3, 3)
    last = weight.contiguous(memory_format=torch.channels_last)
    plain = contiguous({"a": [last, 3], 4: {"b": last}, "c": "text", "d": None, "e": (last,)})
    assert torch.equal(plain["a"][0], weight)
    assert plain["a"][0].is_contiguous()
    assert plain[4]["b"].is_contiguous()
    assert (plain["a"][1], plain["c"], plain["d"]) == (3, "text", None)
