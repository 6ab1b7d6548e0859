"""The start of an Accelerator on several processes."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import distributed

from tests.conftest import OnProcesses
from utils.distributed.accelerator import plan, start
from utils.distributed.ranks import ranks


def meet_again() -> int:
    """As if the launcher had started the processes anew and kept the store, the second one late."""
    start("cpu", "no", 60.0)
    distributed.destroy_process_group()
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    if ranks().rank == 1:
        time.sleep(1)
    accelerator = start("cpu", "no", 10.0)
    return int(accelerator.reduce(torch.tensor([ranks().rank + 1]))[0])


def test_addresses_of_the_last_attempt_are_not_taken(on_processes: OnProcesses) -> None:
    assert on_processes(2, meet_again) == [3, 3]


@pytest.mark.parametrize(
    ("processes", "accumulation", "first", "second"),
    [
        (1, 2, "8 images (1 process) x 2 accumulated: an optimizer step for every 16 images", "5 batches and 3 steps"),
        (
            2,
            1,
            "8 images (2 processes x 4) x 1 accumulated: an optimizer step for every 8 images",
            "5 batches and 5 steps",
        ),
    ],
)
def test_plan(processes: int, accumulation: int, first: str, second: str) -> None:
    accelerator: Any = SimpleNamespace(num_processes=processes, gradient_accumulation_steps=accumulation)
    lines = plan(accelerator, batch_size=8, batches=5, epochs=4)
    assert lines == [f"batches of {first}", f"{second} an epoch, 4 epochs"]
