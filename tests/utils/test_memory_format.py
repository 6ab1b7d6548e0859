"""Memory layouts: which are used, and that no file tells of them."""

from __future__ import annotations

import torch

from utils.memory_format import layout, plain


def test_layout() -> None:
    assert layout(torch.device("cpu")) == layout(torch.device("cuda", 1)) == torch.channels_last
    assert layout(torch.device("mps")) == torch.contiguous_format


def test_plain() -> None:
    weight = torch.arange(54.0).view(2, 3, 3, 3)
    last = weight.contiguous(memory_format=torch.channels_last)
    found = plain({"a": [last, 3], 4: {"b": last}, "c": "text", "d": None, "e": (last,)})
    assert torch.equal(found["a"][0], weight)
    assert found["a"][0].is_contiguous()
    assert found["a"][1] == 3
    assert found[4]["b"].is_contiguous()
    assert (found["c"], found["d"]) == ("text", None)
