"""Memory formats of devices and of files."""

from __future__ import annotations

import copy

import torch
from torch import nn

from utils.batch import layout, use_onednn
from utils.checkpoint import serialise


def test_layout() -> None:
    assert layout(torch.device("cpu")) == layout(torch.device("cuda", 1)) == torch.channels_last
    assert layout(torch.device("mps")) == torch.contiguous_format


def test_convolutions_do_not_depend_on_the_number_of_threads() -> None:
    """Of one image; torch's own choice differs in rounding, and is slower."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.SiLU(), nn.Conv2d(64, 64, 1, stride=2), nn.Conv2d(64, 8, 1)).eval()
    chosen, image = copy.deepcopy(model), torch.rand(1, 3, 65, 65)
    use_onednn(chosen, torch.device("cuda"))
    assert chosen[2].dilation == (1, 1)
    use_onednn(chosen, torch.device("cpu"))
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(chosen(image))
    torch.set_num_threads(threads)
    torch.testing.assert_close(results[0], model(image))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_a_file_does_not_depend_on_the_memory_format() -> None:
    plain, last = (
        serialise({"a": [torch.arange(54.0).view(2, 3, 3, 3).to(memory_format=memory_format), 3], 4: {"b": None}})
        for memory_format in (torch.contiguous_format, torch.channels_last)
    )
    assert plain == last
