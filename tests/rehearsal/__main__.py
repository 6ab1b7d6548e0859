"""Train and validate on a fake `cuda:0`, task by task, then with planted mistakes; print what happened as JSON.

    python -m tests.rehearsal FOLDER DETECTION.yaml OUTLINES.yaml CLASSES

A process of its own, because torch must not be loaded before the library of `fake_cuda`. Called by test_rehearsal.py.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from tests.rehearsal import fake_cuda

    library = fake_cuda.load(fake_cuda.build(Path(sys.argv[1])))

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, unset_fake_temporarily

import train
import val
from models.tasks.segmentation.loss import SegmentationCriterion
from models.tasks.shared.losses import device_constant
from tests.rehearsal.cuda_queries import CudaQueries
from utils.distributed.accelerator import reset_accelerate
from utils.training.nonfinite_steps import DeviceValue

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


def assemble(mode: Any, flags: Sequence[str]) -> train.Training:
    """Make the parts of a training: all that reads files is real, and from the move to the device on it is fake."""
    prepare = train.prepare_training

    def on_the_device(*parts: Any) -> Any:
        with mode:
            return prepare(*parts)

    with replaced(train, "prepare_training", on_the_device):
        training = train.assemble(train.settings_of(flags))
    training.loader.device = None  # type: ignore[attr-defined]  # batches are moved below, to the fake device
    training.steps.step_log.enabled = True  # as with a tracker
    training.steps.model.prepared.train()
    return training


def steps(training: train.Training, mode: Any, reads: list[str]) -> int:
    """Take training steps, of which all but the first must not wait; return how many were counted."""

    def read(value: DeviceValue) -> Any:
        reads.append(f"{tuple(value.on_host.shape)}")
        assert value.copied is not None, "not copied to the host in time"
        value.copied.synchronize()
        return [0.0] * len(value.on_host) if value.on_host.ndim else True

    batches = itertools.islice(training.loader, STEPS)
    for number, batch in enumerate(batches):
        with mode, replaced(DeviceValue, "read", read):
            mode.strict = number > 0
            training.train_on([share.to(training.run.accelerator.device, non_blocking=True) for share in batch], number)
    mode.strict = False
    return training.steps.progress.taken


def validate(training: train.Training, mode: Any, half: bool) -> str:
    """Run the evaluation of a batch up to the first operation whose result has a shape that depends on values."""
    evaluate = training.evaluate
    batch, model = next(iter(evaluate.loader)), training.steps.ema.model
    with mode, torch.no_grad():  # FakeTensorMode does not decompose `to` in inference mode
        model.eval()
        inference = replace(evaluate.inference, half=half)
        models = [val.for_inference(model, training.run.accelerator.device, half)] if half else [model]
        with training.run.accelerator.autocast():
            batch, views = inference.views(models, batch, evaluate.timer)
        terms = training.criterion(views[0].outputs, batch)
        assert terms.means(terms.counts).device.type == "cuda"
        try:
            evaluate.inference.postprocess(views, batch)
        except DynamicOutputShapeException as error:
            return str(error)
        return "all"


def targets_left_on_the_host(training: train.Training, batch: Any) -> dict[str, Any]:
    return {"batch": replace(batch.to("cuda"), targets=batch.targets)}


def constant_on_the_host(training: train.Training, batch: Any) -> dict[str, Any]:
    inputs = training.task.inputs
    return {"inputs": lambda given: inputs(given) * torch.ones(3, 1, 1)}


def constant_copied_in_each_step(training: train.Training, batch: Any) -> dict[str, Any]:
    inputs = training.task.inputs
    return {"inputs": lambda given: inputs(given) * torch.ones(3, 1, 1).to(given.images.device)}


def value_read(training: train.Training, batch: Any) -> dict[str, Any]:
    inputs = training.task.inputs
    return {"inputs": lambda given: inputs(given) * (1 if given.targets.sum().item() else 0)}


MISTAKES: tuple[Callable[[train.Training, Any], dict[str, Any]], ...] = (
    targets_left_on_the_host,
    constant_on_the_host,
    constant_copied_in_each_step,
    value_read,
)


def mistakes(training: train.Training, mode: Any) -> dict[str, str]:
    """Take a step with each mistake; return the errors, '' if it was not noticed."""
    errors, (host_batch,) = {}, next(iter(training.loader))
    for plant in MISTAKES:
        with mode:
            changed = plant(training, host_batch)
            batch = changed.get("batch") or host_batch.to("cuda")
            mode.strict = True
            try:
                with replaced(training.task, "inputs", changed.get("inputs", training.task.inputs)):
                    training.train_on([batch], 0)
                errors[plant.__name__] = ""
            except Exception as error:
                errors[plant.__name__] = f"{type(error).__name__}: {error}"
            mode.strict = False
    return errors


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
        reads: list[str] = []
        training = assemble(mode, [*common, *how, "--quiet"])
        results[task] = {
            "device": str(next(training.steps.model.bare.parameters()).device),
            "steps": STEPS,
            "counted": steps(training, mode, reads),
            "reads": reads,
            "validation": [validate(training, mode, half) for half in (False, True)],
            "mistakes": mistakes(training, mode),
        }
        reset_accelerate()
        device_constant.cache_clear()  # a mistake has left constants of the wrong device
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
