"""fp16 with a loss scaler, on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

import train
from tests.conftest import OnProcesses
from tests.making import tiny_detector, write_yaml
from tests.whole_runs import Parts, within
from utils.distributed.launch import Precision, start
from utils.distributed.ranks import ranks

INIT_SCALE, GROWTH_INTERVAL = 2.0**21, 2  # gradients in fp16 overflow at this scale
BAD_BATCH, SAVED_BATCH, BATCHES = 2, 6, 8  # the first of them overflows on the last process alone


def with_a_scaler(*given: Any) -> Any:
    """Make the Accelerator of fp16 on CUDA, but for the device."""
    accelerator, _ = start(*given)
    AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    return accelerator, Precision("fp16", "of the test")


def steps_in_fp16(flags: list[str], first: int, last: int, saved: int = -1) -> dict[str, Any]:
    """Take the steps first..last of an epoch and save the state before batch `saved`; return what all must agree on."""

    def batches(parts: Parts) -> Generator[Any, None, dict[str, Any]]:
        model, steps, scaler = parts.model.model, parts.steps, parts.run.accelerator.scaler
        criterion: Any = parts.criterion
        objective, history = criterion.objective, []
        for number, batch in enumerate(itertools.islice(parts.loader, last - first), first):
            bad = number == BAD_BATCH and ranks().rank == ranks().world_size - 1
            criterion.objective = lambda *given, bad=bad: objective(*given) * (1e38 if bad else 1)
            if number == saved:
                steps.save()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            yield batch
            moved = not same(before, list(model.parameters()))
            history.append((moved, steps.progress.skipped, scaler.get_scale(), scaler._get_growth_tracker()))
        parts.run.files.finish_writing()
        tensors = [value.clone() for value in model.state_dict().values()]
        return {"history": history, "tensors": tensors, "path": str(parts.run.path)}

    train.start = with_a_scaler
    return within(flags, lambda parts: parts.take_steps(batches(parts)))


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.long
def test_fp16_with_a_scaler(
    on_processes: OnProcesses, drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overflow on one process is skipped on all, the scale halves and grows, and a resumed run continues with it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hyp = write_yaml(tmp_path / "hyp.yaml", {"nbs": 4, "warmup_epochs": 0.0})
    model = write_yaml(tmp_path / "tiny.yaml", tiny_detector())
    what = ["--data", str(drawn), "--weights", "", "--cfg", str(model), "--hyp", str(hyp), "--imgsz", "64"]
    how = ["--batch-size", "4", "--workers", "0", "--device", "cpu", "--sync-bn", "--noautoanchor", "--noplots"]
    flags = [*what, *how, "--no-wandb", "--epochs", "2", "--project", str(tmp_path)]
    one, other = on_processes(2, steps_in_fp16, flags, 0, BATCHES, SAVED_BATCH)
    assert other["history"] == one["history"]
    assert same(one["tensors"], other["tensors"])
    assert all(value.isfinite().all() for value in one["tensors"])
    moved, skipped, scales, growth = zip(*one["history"], strict=True)
    assert not moved[0]
    assert moved[1]
    assert not moved[BAD_BATCH]
    assert [now >= before for before, now in itertools.pairwise((INIT_SCALE, *scales))] == [*moved]
    assert skipped[-1] == moved.count(False)
    assert max(scales[BAD_BATCH:]) > scales[BAD_BATCH]
    assert growth[SAVED_BATCH - 1] > 0
    resumed = on_processes(2, steps_in_fp16, ["--resume", one["path"]], SAVED_BATCH, BATCHES)
    for begun, continued in zip((one, other), resumed, strict=True):
        assert continued["history"] == begun["history"][SAVED_BATCH:]
        assert same(continued["tensors"], begun["tensors"])
