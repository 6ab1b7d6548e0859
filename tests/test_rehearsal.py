"""What needs a GPU, without one: fp16 with a loss scaler on the CPU, and whole steps on a fake `cuda:0`.

tests/utils has the queries of devices (`CudaQueries`); docs/gpu.md lists what only a real GPU can show.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor

import train
from tests.conftest import ROOT, OnProcesses, not_here
from tests.making import tiny_detector, write_yaml
from tests.whole_runs import Parts, within
from utils.distributed.launch import Precision, start
from utils.distributed.ranks import ranks

# fp16 with a loss scaler


INIT_SCALE, GROWTH_INTERVAL = 2.0**21, 2  # gradients in fp16 overflow at this scale
BAD_BATCH, SAVED_BATCH, BATCHES = 2, 6, 8  # the first of them overflows on the last process alone


def with_a_scaler(*given: Any) -> Any:
    """Make the Accelerator of fp16 on CUDA, but for the device."""
    accelerator, _ = start(*given)
    AcceleratorState._shared_state["_mixed_precision"] = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL)
    return accelerator, Precision("fp16", "the rehearsal")


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


# A fake GPU


TASKS = ("detection", "segmentation", "classification")
MIXED = ("two devices", "two different devices")  # what torch says of operands


@pytest.fixture(scope="session")
def rehearsed(
    drawn: Path, drawn_outlines: Path, drawn_classes: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    """What happened on the fake GPU, by task: see tests/rehearsal/__main__.py."""
    if not shutil.which("g++"):
        not_here("g++, which builds the fake device")
    folder = tmp_path_factory.mktemp("rehearsal")
    for task, hyp in zip(TASKS, ({"nbs": 8}, {"nbs": 8}, {"lr0": 0.01}), strict=True):
        write_yaml(folder / f"{task}.yaml", hyp)
    files = [str(file) for file in (folder, drawn, drawn_outlines, drawn_classes)]
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.rehearsal", *files],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_steps_on_a_fake_gpu(rehearsed: Mapping[str, Any], task: str) -> None:
    """No tensor stays on the host, no shape follows from values, and nothing waits but the stated reads: the verdict on
    each step and the point of its curves, both one step later."""
    outcome = rehearsed[task]
    assert outcome["device"] == "cuda:0"
    assert outcome["counted"] == outcome["steps"] - 1 > 0
    assert outcome["reads"][::2] == ["()"] * outcome["counted"]
    assert len(outcome["reads"]) == 2 * outcome["counted"]


@pytest.mark.parametrize(
    ("task", "until"),
    [("detection", "aten.nonzero.default"), ("segmentation", "aten.nonzero.default"), ("classification", "all")],
)
@pytest.mark.long
def test_validation_on_a_fake_gpu(rehearsed: Mapping[str, Any], task: str, until: str) -> None:
    """In full and in half precision; a detector's ends where confident boxes are selected, as many as there are."""
    assert rehearsed[task]["validation"] == [until] * 2


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("mistake", "messages"),
    [
        ("targets_left_on_the_host", (*MIXED, "from cuda:0 to cpu that waits")),
        ("constant_on_the_host", MIXED),
        ("constant_copied_in_each_step", ("from cpu to cuda:0 that waits",)),
        ("value_read", ("_local_scalar_dense",)),
    ],
)
@pytest.mark.long
def test_planted_mistakes_are_noticed(
    rehearsed: Mapping[str, Any], task: str, mistake: str, messages: tuple[str, ...]
) -> None:
    error = rehearsed[task]["mistakes"][mistake]
    assert any(message in error for message in messages), error
