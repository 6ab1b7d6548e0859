"""Shared memory; sharing it between started processes is tested in tests/data/test_cache.py."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import psutil
import pytest
from torch import distributed

from tests.making import launched
from utils.distributed import ranks as module
from utils.distributed.ranks import RunStore, SharedMemory, available_bytes, shared_memory


def test_memory_of_an_earlier_run_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it is part of a reference cycle; its file is closed."""
    monkeypatch.setattr(module, "in_use", WeakSet())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    loader = SimpleNamespace(memory=shared_memory(lambda free: 600))
    loader.itself, file = loader, loader.memory.file
    del loader
    assert len(shared_memory(lambda free: free).bytes) == 1000
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_forked_processes_write_into_it() -> None:
    memory = shared_memory(lambda free: 4).bytes
    assert memory.tolist() == [0, 0, 0, 0]
    if not (child := os.fork()):
        memory[2] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert memory.tolist() == [0, 0, 7, 0]


def write_seven(memory: SharedMemory) -> None:
    memory.bytes[2] = 7


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "forkserver"])
def test_it_can_be_sent_to_a_started_process(method: str) -> None:
    memory = shared_memory(lambda free: 4)
    process = multiprocessing.get_context(method).Process(target=write_seven, args=(memory,))
    process.start()
    process.join(60)
    assert memory.bytes.tolist() == [0, 0, 7, 0]


def test_a_handle_from_the_store_is_never_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody on the network may have written it."""
    store = RunStore(distributed.HashStore())
    monkeypatch.setattr(module, "run_store", lambda: store)
    launched(monkeypatch, 2, 2)
    precious = tmp_path / "precious"
    precious.write_bytes(bytes(range(99)))
    theirs = os.memfd_create("other", 0)
    with precious.open("r+b") as file:
        handles = [[os.getpid(), file.fileno()], [os.getpid(), theirs], str(precious), f"/proc/self/fd/{file.fileno()}",
                   [os.getpid(), 10**9], [2**40, 3], {"a": 1}, None, ["x", "../.."]]  # fmt: skip
        for number, handle in enumerate(handles):
            monkeypatch.setattr(module, "_memory_calls", iter([number]))
            monkeypatch.setenv("LOCAL_RANK", "1")
            store.write_once(f"memory/{socket.gethostname()}/{number}", handle)
            memory = shared_memory(lambda free: 60)
            memory.bytes[:] = 7
            assert len(memory.bytes) == 60
    assert precious.read_bytes() == bytes(range(99))
    assert os.fstat(theirs).st_size == 0


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("1000", 1000 - 700 + 300), ("max", 5000), ("9000", 5000), ("", 5000)],
    ids=["a container's limit", "no limit", "a limit above the machine's memory", "no container"],
)
def test_the_limit_of_a_container_counts(
    limit: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached files, 300 bytes here, can be dropped."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5000))
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    if limit:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 400\ninactive_file 300\n")
    assert available_bytes() == expected
