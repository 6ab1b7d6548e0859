"""Shared memory; that processes share it is tested with the cache, in tests/data/test_cache.py."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from utils.distributed import shared_memory as module
from utils.distributed.shared_memory import shared_memory


def test_memory_is_not_promised_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_promised", [])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    asked: list[int] = []
    for _ in range(2):
        shared_memory(lambda free: asked.append(free) or 600)  # type: ignore[func-returns-value]
    assert asked == [1000, 400]


def test_forked_processes_write_into_it() -> None:
    memory = shared_memory(lambda free: 4)
    assert memory.tolist() == [0, 0, 0, 0]
    if not (child := os.fork()):
        memory[2] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.tolist() == [0, 0, 7, 0]
