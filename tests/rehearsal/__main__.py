"""Train and validate on a fake `cuda:0`, task by task, then with planted mistakes; print what happened as JSON.

    python -m tests.rehearsal FOLDER DETECTION.yaml OUTLINES.yaml CLASSES

A process of its own, because torch must not be loaded before the library of `fake_cuda`. Called by test_rehearsal.py.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

if __name__ == "__main__":
    from tests.rehearsal import fake_cuda

    library = fake_cuda.load(fake_cuda.build(Path(sys.argv[1])))

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, unset_fake_temporarily

import train
from models.ensemble import for_inference
from models.tasks.contract import Task, terms_of
from models.tasks.losses import device_constant
from models.tasks.segment import SegmentationCriterion
from tests.rehearsal.cuda_queries import CudaQueries
from tests.whole_runs import Parts, within
from utils.distributed.launch import reset_accelerate
from utils.distributed.logical import place_model
from utils.training import memory
from utils.training.log import DeviceValue

T = TypeVar("T")
STEPS = 2
# Of each task: the model, flags, an optimizer and a precision. Every batch is an optimizer step.
TASKS = {
    "detection": ("yolov5n.yaml", ("--imgsz", "64", "--optimizer", "SGD", "--mixed-precision", "bf16")),
    "segmentation": ("yolov5n-seg.yaml", ("--imgsz", "64", "--optimizer", "AdamW", "--mixed-precision", "no")),
    "classification": ("resnet18.yaml", ("--imgsz", "32", "--optimizer", "Adam", "--mixed-precision", "bf16")),
}


@contextmanager
def replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute for a while."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, value)
        yield


def within_fake(mode: Any, flags: Sequence[str], work: Callable[[Parts], T]) -> T:
    """Do `work` within a run: all that reads files is real, and from the move to the device on it is fake."""

    def on_the_device(*given: Any) -> None:
        mode.__enter__()
        place_model(*given)

    def leave_mode(parts: Parts) -> T:
        mode.__exit__(None, None, None)
        parts.loader.device = None  # batches are moved below, to the fake device
        parts.steps.log.enabled = True  # as with a tracker
        return work(parts)

    def unread(criterion: Any, outputs: Any, batch: Any, names: Any, reads: bool) -> Any:
        return terms_of(criterion, outputs, batch, names, False)  # the first batch's values are read

    def untried(batch_size: int, *given: Any) -> tuple[int, int]:
        return batch_size, 1  # there is no memory

    with (
        replaced(train, "place_model", on_the_device),
        replaced(train, "terms_of", unread),
        replaced(memory, "fitted_batch", untried),
    ):
        return within(flags, leave_mode)


def steps(parts: Parts, mode: Any, reads: list[str]) -> int:
    """Take training steps, of which all but the first must not wait; return how many were counted."""

    def read(value: DeviceValue) -> Any:
        reads.append(f"{tuple(value.on_host.shape)}")
        assert value.copied is not None, "not copied to the host in time"
        value.copied.synchronize()
        return [0.0] * len(value.on_host) if value.on_host.ndim else True

    def moved(batches: Iterable[Any]) -> Generator[Any, None, int]:
        for number, shares in enumerate(batches):
            mode.strict = number > 0
            yield [share.to(parts.run.accelerator.device, non_blocking=True) for share in shares]
        mode.strict = False
        return parts.steps.progress.taken

    batches = list(itertools.islice(parts.loader, STEPS))
    with mode, replaced(DeviceValue, "read", read):
        return parts.take_steps(moved(batches))


def validate(parts: Parts, mode: Any, half: bool) -> str:
    """Run the evaluation of a batch up to the first operation whose result has a shape that depends on values."""
    evaluate = parts.evaluate
    batch, model = next(iter(evaluate.loader)), parts.steps.ema.model
    with mode, torch.no_grad():  # FakeTensorMode does not decompose `to` in inference mode
        model.eval()
        inference = replace(evaluate.inference, half=half)
        models = [for_inference(model, parts.run.accelerator.device, half)] if half else [model]
        with parts.run.accelerator.autocast():
            batch, views = inference.views(models, batch, evaluate.timer)
        terms = parts.criterion(views[0].outputs, batch)
        assert terms.local_means().device.type == "cuda"
        try:
            evaluate.inference.postprocess(views, batch)
        except DynamicOutputShapeException as error:
            return str(error)
        return "all"


def targets_left_on_the_host(task: Task, batch: Any) -> dict[str, Any]:
    return {"batch": replace(batch.to("cuda"), targets=batch.targets)}


def constant_on_the_host(task: Task, batch: Any) -> dict[str, Any]:
    inputs = task.inputs
    return {"inputs": lambda given: inputs(given) * torch.ones(3, 1, 1)}


def constant_copied_in_each_step(task: Task, batch: Any) -> dict[str, Any]:
    inputs = task.inputs
    return {"inputs": lambda given: inputs(given) * torch.ones(3, 1, 1).to(given.images.device)}


def value_read(task: Task, batch: Any) -> dict[str, Any]:
    inputs = task.inputs
    return {"inputs": lambda given: inputs(given) * (1 if given.targets.sum().item() else 0)}


MISTAKES: tuple[Callable[[Task, Any], dict[str, Any]], ...] = (
    targets_left_on_the_host,
    constant_on_the_host,
    constant_copied_in_each_step,
    value_read,
)


def mistakes(parts: Parts, mode: Any) -> dict[str, str]:
    """Take a step with each mistake; return the errors, '' if it was not noticed."""
    errors, (host_batch,), task = {}, next(iter(parts.loader)), parts.job.task

    def strict(batch: Any) -> Generator[Any, None, None]:
        mode.strict = True
        yield [batch]

    for plant in MISTAKES:
        parts.steps.progress.batch = 0
        with mode:
            changed = plant(task, host_batch)
            batch = changed.get("batch") or host_batch.to("cuda")
            try:
                with replaced(task, "inputs", changed.get("inputs", task.inputs)):
                    parts.take_steps(strict(batch))
                errors[plant.__name__] = ""
            except Exception as error:
                errors[plant.__name__] = f"{type(error).__name__}: {error}"
            mode.strict = False
    return errors


def rehearse(parts: Parts, mode: Any) -> dict[str, Any]:
    """Take steps, validate and make mistakes; return what happened."""
    reads: list[str] = []
    return {
        "device": str(parts.model.parameters[0].device),
        "steps": STEPS,
        "counted": steps(parts, mode, reads),
        "reads": reads,
        "validation": [validate(parts, mode, half) for half in (False, True)],
        "mistakes": mistakes(parts, mode),
    }


def main(folder: str, detection: str, outlines: str, classes: str) -> None:
    """Rehearse all tasks."""
    CudaQueries().install(pytest.MonkeyPatch())
    match_on_host = SegmentationCriterion._mask_matches  # takes arrays, and is given the sizes of maps alone

    def really(self: SegmentationCriterion, *given: Any) -> Any:
        with unset_fake_temporarily():
            return match_on_host(self, *given)

    pytest.MonkeyPatch().setattr(SegmentationCriterion, "_mask_matches", really)
    mode, results = fake_cuda.start(library), {}
    for (task, (model, flags)), data in zip(TASKS.items(), (detection, outlines, classes), strict=True):
        common = ("--weights", "", "--cfg", model, "--data", data, "--batch-size", "8", "--device", "0", *flags)
        how = ("--workers", "0", "--noplots", "--no-wandb", "--hyp", f"{folder}/{task}.yaml", "--project", folder)
        results[task] = within_fake(mode, [*common, *how], lambda parts: rehearse(parts, mode))
        reset_accelerate()
        device_constant.cache_clear()  # a mistake has left constants of the wrong device
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
