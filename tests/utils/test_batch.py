"""Memory formats of devices and of files."""

from __future__ import annotations

import torch

from utils.batch import layout
from utils.checkpoint import serialise


def test_layout() -> None:
    assert layout(torch.device("cpu")) == layout(torch.device("cuda", 1)) == torch.channels_last
    assert layout(torch.device("mps")) == torch.contiguous_format


def test_a_file_does_not_depend_on_the_memory_format() -> None:
    plain, last = (
        serialise({"a": [torch.arange(54.0).view(2, 3, 3, 3).to(memory_format=memory_format), 3], 4: {"b": None}})
        for memory_format in (torch.contiguous_format, torch.channels_last)
    )
    assert plain == last
