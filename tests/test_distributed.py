"""One curve on any number of processes: whole runs, and parts of a run on several processes."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import GradientState
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import ProfilerActivity, profile

from models.tasks.detect import DetectionTask
from models.tasks.metrics import DetectionMetrics
from tests.conftest import OnProcesses, RunScript, free_port
from tests.curves import same_curve
from tests.machines import TORCHRUN
from tests.making import write_yaml
from tests.whole_runs import Parts, within
from utils.distributed.ranks import ranks
from utils.training.steps import OptimizerSteps

SHARP = {"nbs": 16, "warmup_epochs": 0.0, "weight_decay": 0.01}


# One curve. Required: 1e-3 for losses and weights; measured: 4e-7 and 1e-7, and equal scores.


@pytest.mark.long
def test_compiled(single: Path, fine_tune: Callable[..., str], tmp_path: Path) -> None:
    """Compiled by torch.compile, as `accelerate launch --dynamo_backend` and an Accelerate config request it."""
    printed = fine_tune(tmp_path, ACCELERATE_DYNAMO_BACKEND="INDUCTOR")
    assert ", compiled by inductor" in printed
    same_curve(tmp_path / "exp", single)
    quiet_except_for_the_main_process(printed)


def test_two_processes_by_a_flag(single: Path, fine_tune: Callable[..., str], learned: Path, tmp_path: Path) -> None:
    """The weights say what they began from; that was trained from scratch."""
    printed = fine_tune(tmp_path, "--sync-bn", "--processes", "2")
    same_curve(tmp_path / "exp", single)
    quiet_except_for_the_main_process(printed)
    content = torch.load(tmp_path / "exp" / "weights" / "best.pt", weights_only=True)
    assert content["licence"] == "yours"
    assert content["origin"] == [{"file": learned.name, "sha256": hashlib.sha256(learned.read_bytes()).hexdigest()}]


def quiet_except_for_the_main_process(printed: str) -> None:
    assert printed.count("epoch 2/2") == printed.count("results in") == printed.count("mixed precision") == 1
    assert "warn" not in printed.lower()


@pytest.mark.long
@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"])
def test_a_wrong_flag_is_named_in_every_start(module: str, run_script: RunScript) -> None:
    processes = ["--cpu", "--num_processes=2"] if "accelerate" in module else ["--nproc_per_node=2"]
    launcher = (sys.executable, "-m", module, *processes, *["--use-env"] * module.endswith("distributed.launch"))
    for _ in range(20):
        printed = run_script("train.py", "--nonsense", launcher=launcher, fails=True)
        assert printed.count("error: '--nonsense' is not a flag") == 1


@pytest.mark.long
def test_nodes_of_unequal_size_by_torchrun(fine_tune: Callable[..., str], tmp_path: Path) -> None:
    """1 + 2 processes, batch 12: shares of 4."""
    fine_tune(tmp_path, "--batch-size", "12", "--name", "one")
    nodes = (*TORCHRUN, "--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", free_port())

    def node(rank: str, processes: str) -> str:
        launcher = (*nodes, "--node_rank", rank, "--nproc_per_node", processes)
        return fine_tune(tmp_path, "--sync-bn", "--batch-size", "12", "--name", "three", launcher=launcher)

    with ThreadPoolExecutor() as pool:
        list(pool.map(node, "01", "12"))
    same_curve(tmp_path / "three", tmp_path / "one")


# Inside a run: the functions below are called on each process


@pytest.fixture
def flags(drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run from scratch, with a learning rate and a decay that matter from the first step on."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hyp = write_yaml(tmp_path / "sharp.yaml", SHARP)
    what = ["--data", str(drawn), "--weights", "", "--cfg", "yolov5n.yaml", "--hyp", str(hyp), "--imgsz", "64"]
    how = ["--batch-size", "8", "--workers", "0", "--device", "cpu", "--sync-bn", "--epochs", "2"]
    return [*what, *how, "--project", str(tmp_path)]


def epoch_in_float64(flags: Sequence[str], folder: str) -> dict[str, Tensor]:
    """Return the model after one step, which comes after five batches, an epoch, for fewer than `nbs` images."""
    hyp = write_yaml(Path(folder) / f"one{ranks().rank}.yaml", {**SHARP, "nbs": 64})
    build_model = DetectionTask.build_model

    def work(parts: Parts) -> dict[str, Tensor]:
        parts.train_one_epoch()
        assert parts.steps.ema.updates == 1
        return dict(parts.model.model.state_dict())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DetectionTask, "build_model", lambda self, *described: build_model(self, *described).double())
        patch.setattr(DetectionTask, "inputs", lambda self, batch: batch.images.double() / 255)
        return within([*flags, "--hyp", str(hyp)], work)


def reduced(flags: Sequence[str]) -> tuple[int, int, int, int]:
    """Return the gradient elements that DDP reduces in an epoch, the model's parameters, optimizer steps, batches."""
    sent = []

    def count(group, bucket):  # without types: torch reads them, and not as text
        sent.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    def work(parts: Parts) -> tuple[int, int, int, int]:
        parts.model.wrapped.register_comm_hook(None, count)  # type: ignore[operator]
        parts.train_one_epoch()
        parameters = sum(parameter.numel() for parameter in parts.model.parameters)
        return sum(sent), parameters, parts.steps.ema.updates, len(parts.loader)

    return within(flags, work)


def decided_and_started(flags: Sequence[str]) -> tuple[tuple[float, dict[str, float]], list[Tensor]]:
    """Start from a model of another seed on each process, and validate with a fitness that is better on every process
    but the first; return fitness, metrics, and the weights and EMA."""
    build, summarise = DetectionTask.build_model, DetectionMetrics.summarise

    def another_seed(self: DetectionTask, *described: Any) -> Any:
        torch.manual_seed(ranks().rank)
        return build(self, *described)

    def another_fitness(self: DetectionMetrics, records: Any) -> Any:
        return dataclasses.replace(summarise(self, records), fitness=float(ranks().rank))

    def work(parts: Parts) -> tuple[tuple[float, dict[str, float]], list[Tensor]]:
        models = parts.model.model, parts.steps.ema.model
        started = [value.clone() for model in models for value in model.state_dict().values()]
        summary = parts.evaluate([parts.steps.ema.model])
        return (summary.fitness, summary.metrics), started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DetectionTask, "build_model", another_seed)
        patch.setattr(DetectionMetrics, "summarise", another_fitness)
        return within(flags, work)


# Operations that read a value, or that make as many values as they find: on a GPU the loop would wait for them.
WAITING = {"aten::item", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::bincount"}


def first_six_batches(parts: Parts, watch: AbstractContextManager[Any]) -> Generator[Any, None, int]:
    """Yield six batches, the last four while `watch` is on; return the number of optimizer steps."""
    parts.steps.log.enabled = True  # as with a tracker: its points are read later too
    batches = list(parts.loader)
    yield from batches[:2]  # constants go to the device once
    with watch:
        yield from batches[:4]
    return parts.steps.progress.step


def waits(flags: Sequence[str]) -> tuple[int, int]:
    """Return the number of such operations in the loop, and of optimizer steps, if steps are counted one step later."""
    profiled = profile(activities=[ProfilerActivity.CPU])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OptimizerSteps, "lag", 1)
        steps = within([*flags, "--noplots"], lambda parts: parts.take_steps(first_six_batches(parts, profiled)))
    return sum(event.name in WAITING for event in profiled.events()), steps


def all_of_them(flags: Sequence[str], folder: str) -> list[Any]:
    """Start several runs, one after another, in this process."""
    works = [partial(epoch_in_float64, folder=folder), reduced, decided_and_started]
    results = []
    for work in works if ranks().world_size > 1 else (works[0], waits):
        results.append(work(flags))
        GradientState._reset_state()
    return results


def test_inside_a_run(on_processes: OnProcesses, flags: list[str], tmp_path: Path) -> None:
    """One start of two processes, and one of one, for several questions: to import takes longest.

    Nothing may depend on the number of processes: a rate, a decay, a gain, the clipping. Measured in float64: 6e-13.
    Gradients travel once per optimizer step. All start from the main process's weights, and decide by its fitness to
    the bit. The loop waits for nothing but the verdict on the last step, and on a CPU for the weight of the EMA: two of
    the steps are profiled; the first of them is counted inside the profile, the second later.
    """
    ((single, waited),) = on_processes(1, all_of_them, flags, str(tmp_path))
    results = on_processes(2, all_of_them, flags, str(tmp_path))
    for state, (sent, parameters, steps, batches), _ in results:
        assert list(state) == list(single)
        for name, value in single.items():
            if value.is_floating_point():
                assert value.dtype == torch.float64 or "anchors" in name
                assert (state[name] - value).norm() <= 1e-10 * value.norm(), name
        assert (steps, batches) == (3, 5)
        assert sent == steps * parameters
    (decided, started), (other_decided, other_started) = (result[2] for result in results)
    assert decided == other_decided
    assert decided[0] == 0.0
    assert all(torch.equal(own, other) for own, other in zip(started, other_started, strict=True))
    assert waited == (4, 3)


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_loop_does_not_synchronise_a_gpu(flags: list[str]) -> None:
    flags = [*flags, "--device", "0", "--noplots"]
    assert within(flags, lambda parts: parts.take_steps(first_six_batches(parts, waiting_forbidden()))) == 3


@pytest.mark.gpu2
def test_two_gpus(run_script: RunScript, flags: list[str], tmp_path: Path) -> None:
    """NCCL and torch's SyncBatchNorm, by --device 0,1."""
    for name, device in (("one", "0"), ("two", "0,1")):
        run_script("train.py", *flags, "--device", device, "--name", name, "--epochs", "2", "--mixed-precision", "no")
    same_curve(tmp_path / "two", tmp_path / "one", losses=1e-3, weights=1e-3)
