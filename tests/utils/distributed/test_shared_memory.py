"""Shared memory; sharing it between started processes is tested in tests/data/test_cache.py."""

from __future__ import annotations

import os
from types import SimpleNamespace

import psutil
import pytest

from utils.distributed import shared_memory as module
from utils.distributed.shared_memory import shared_memory


def test_memory_is_reserved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "reserved_bytes", [])
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    free_bytes: list[int] = []
    for _ in range(2):
        shared_memory(lambda free: free_bytes.append(free) or 600)  # type: ignore[func-returns-value]
    assert free_bytes == [1000, 400]


def test_forked_processes_write_into_it() -> None:
    memory = shared_memory(lambda free: 4)
    assert memory.tolist() == [0, 0, 0, 0]
    if not (child := os.fork()):
        memory[2] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.tolist() == [0, 0, 7, 0]
