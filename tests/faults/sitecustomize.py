"""Plants a fault into every Python process of a run, whoever starts it, for PYTHONPATH leads here.

FAULT=what:module:function:call[:rank] lets that call of that function (counted from 1, in one process) go wrong. It
does so once: not when a launcher starts the processes anew. Without FAULT nothing happens.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HEARD = 1.0  # seconds in which a signal is heard, by a thread that may have to wait for its turn


def go_wrong(what: str) -> None:
    """Raise an error, sleep for ever, or get a signal: SIGKILL, SIGTERM ..."""
    if what == "raise":
        raise ValueError("a planted fault")
    if what == "memory":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if what == "stall":
        time.sleep(1e6)
    os.kill(os.getpid(), getattr(signal, what))
    time.sleep(HEARD)


def plant(what: str, module: str, function: str, call: str, rank: str = "") -> None:
    owner: Any = importlib.import_module(module)
    *path, name = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        mine = not rank or os.environ.get("RANK", "0") == rank
        if calls == int(call) and mine and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
            go_wrong(what)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


if os.environ.get("FAULT"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    plant(*os.environ["FAULT"].split(":"))
