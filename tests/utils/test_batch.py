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
    content = contiguous({"a": [last, 3], 4: {"b": last}, "c": "text", "d": None, "e": (last,)})
    assert torch.equal(content["a"][0], weight)
    assert content["a"][0].is_contiguous()
    assert content["a"][1] == 3
    assert content[4]["b"].is_contiguous()
    assert (content["c"], content["d"]) == ("text", None)
