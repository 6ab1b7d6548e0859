"""A stand-in for what torch.cuda says about devices, for machines without a GPU: names, memory, counts, events."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

GIB = 2**30


class Event:
    """An event on a stream that has nothing to do."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.recorded = self.waited_for = False

    def record(self, stream: Any = None) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.waited_for = True


@dataclass
class CudaQueries:
    """CUDA devices that answer questions and compute nothing. Memory in bytes; `allocated` is that of tensors."""

    devices: int = 1
    name: str = "Stand-in GPU"
    total: int = 8 * GIB
    free: int = 6 * GIB
    allocated: int = 0
    peak: int = 0
    bf16: bool = True
    nccl: tuple[int, int, int] = (2, 29, 3)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> CudaQueries:
        """Replace the functions of torch.cuda; return self."""
        for name, answer in self._answers().items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: self.nccl)
        return self

    def allocate(self, size: int) -> None:
        """Allocate and free `size` bytes, as a step does: only the peak remains."""
        if size > self.free:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.peak = max(self.peak, self.allocated + size)

    def _reset_peak(self, device: Any = None) -> None:
        self.peak = self.allocated

    def _answers(self) -> dict[str, Any]:
        return {
            "is_available": lambda: self.devices > 0,
            "device_count": lambda: self.devices,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "synchronize": lambda device=None: None,
            "is_bf16_supported": lambda including_emulation=True: self.bf16,
            "get_device_name": lambda device=None: self.name,
            "get_device_properties": lambda device=None: SimpleNamespace(total_memory=self.total, name=self.name),
            "get_device_capability": lambda device=None: (9, 0),
            "mem_get_info": lambda device=None: (self.free, self.total),
            "memory_allocated": lambda device=None: self.allocated,
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": self._reset_peak,
            "empty_cache": lambda: None,
            "is_current_stream_capturing": lambda: False,
            "Event": Event,
        }
