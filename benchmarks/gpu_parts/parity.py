"""Loss, gradients and mAP of yolov5n on the GPU against float32 on the CPU, by precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import val
from benchmarks.gpu_parts.measuring import Machine, machine, rounded, row
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData
from models.loading import transfer
from models.tasks.detect import DetectionTask
from models.weights import read_weights
from models.yolo import YoloModel
from utils.batch import layout
from utils.config.hyperparameters import Hyperparameters
from utils.distributed.batchnorm import exact_batchnorm

IMAGES, LOSS_SCALE = 4, 1024.0


class Mode(NamedTuple):
    """A precision: of autocast, or None; whether TF32 is allowed; flags of val.py."""

    autocast: torch.dtype | None
    tf32: bool
    flags: dict[str, Any]


MODES = {
    "fp32": Mode(None, False, {"mixed_precision": "no"}),
    "fp32, TF32": Mode(None, True, {"mixed_precision": "no"}),
    "bf16": Mode(torch.bfloat16, True, {"mixed_precision": "bf16"}),
    "fp16": Mode(torch.float16, True, {"mixed_precision": "fp16"}),
    "--half": Mode(None, True, {"half": True}),
}


@contextmanager
def tensor_floats(allowed: bool) -> Iterator[None]:
    """Allow TF32 in convolutions and matrix products, or not."""
    places = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = allowed
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


def prepared(here: Machine) -> tuple[DetectionTask, YoloModel, Any, int]:
    """Return the task, the model with official or random weights, and a batch of images on the host."""
    spec, imgsz = read_spec(here.photos()), 64 if here.quick else 640
    task = DetectionTask(spec.names, Hyperparameters())
    if here.weights and here.has_photos:
        weights = read_weights(here.weights)
        assert weights.model is not None
        model = task.build_model(weights.model, imgsz)
        transfer(model, weights.state)
    else:
        torch.manual_seed(0)
        model = task.build_model({"task": "detect", **yaml_of("yolov5n")}, imgsz)
    data = DetectionData(spec, imgsz=imgsz, stride=32, options=DataOptions())
    split = data.split("val")
    loader = data.evaluation_loader(split, data.evaluation_batches(split, IMAGES, True)[:1])
    return task, model, next(iter(loader)), imgsz


def yaml_of(name: str) -> dict[str, Any]:
    """Return the content of a shipped model YAML."""
    from utils.files import ROOT, read_yaml

    return read_yaml(ROOT / "models" / f"{name}.yaml")


def loss_and_gradients(
    task: DetectionTask, model: YoloModel, batch: Any, device: torch.device, mode: Mode
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a batch, in train mode, and its gradients in float64 on the host."""
    model = model.to(device, memory_format=layout(device)).train()
    exact_batchnorm(model, None)
    model.zero_grad(set_to_none=True)
    batch, criterion = batch.to(device), task.criterion(model)
    scale = LOSS_SCALE if mode.autocast is torch.float16 else 1.0
    with torch.autocast(device.type, mode.autocast) if mode.autocast else nullcontext():
        outputs = model(task.inputs(batch), *criterion.hints(batch))
    terms = criterion(outputs, batch)
    loss = criterion.objective(terms.local_means(), IMAGES)
    (loss * scale).backward()
    gradients = {
        name: one.grad.double().cpu() / scale for name, one in model.named_parameters() if one.grad is not None
    }
    return float(loss), gradients


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> tuple[float, float]:
    """Return the relative difference of all gradients together, and the largest of one parameter."""
    ratios = {name: (second[name] - value).norm() / value.norm().clamp(min=1e-12) for name, value in first.items()}
    whole = torch.cat([(second[name] - value).flatten() for name, value in first.items()]).norm()
    return float(whole / torch.cat([value.flatten() for value in first.values()]).norm()), float(max(ratios.values()))


def compare_losses(here: Machine) -> None:
    """Print a row for each precision."""
    task, model, batch, _ = prepared(here)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    reference, expected = loss_and_gradients(task, model, batch, torch.device("cpu"), MODES["fp32"])
    for name, mode in MODES.items():
        if "half" in mode.flags:
            continue  # of val.py alone
        with tensor_floats(mode.tf32):
            _, fresh, _, _ = prepared(here)
            fresh.load_state_dict(state)
            loss, gradients = loss_and_gradients(task, fresh, batch, here.torch_device, mode)
        whole, largest = distance(expected, gradients)
        row(
            f"Loss and gradients of yolov5n on {IMAGES} images, relative differences from float32 on the CPU",
            precision=name,
            loss=rounded(abs(loss / reference - 1), 2),
            gradients=rounded(whole, 2),
            **{"largest of a parameter": rounded(largest, 2)},
        )


def compare_scores(here: Machine) -> None:
    """Print a row for each precision, with the CPU's first."""
    if not (here.weights and here.has_photos):
        row("mAP of the official yolov5n.pt", note="not measured: no photos and weights carried (make gpu-data)")
        return
    given = {"weights": str(here.weights), "data": str(here.photos()), "imgsz": 640, "noplots": True, "workers": 4}
    given |= {"project": str(here.scratch / "val"), "quiet": True}
    runs = {"CPU, fp32": ("cpu", MODES["fp32"]), **{name: (here.device, mode) for name, mode in MODES.items()}}
    for name, (device, mode) in runs.items():
        if device == "cpu" and mode.autocast is torch.float16:
            continue  # is refused there
        with tensor_floats(mode.tf32):
            scores = val.run(**given, device=device, **mode.flags)
        row(
            "mAP of the official yolov5n.pt on 128 photos of COCO at 640 px",
            precision=name,
            mAP50=round(scores["metrics/mAP_0.5"], 5),
            **{"mAP50-95": round(scores["metrics/mAP_0.5:0.95"], 5)},
        )


def main() -> None:
    """Compare losses and scores."""
    here = machine()
    compare_losses(here)
    compare_scores(here)


if __name__ == "__main__":
    main()
