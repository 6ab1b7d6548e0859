"""Loss, gradients and mAP of yolov5n on the GPU against float32 on the CPU, by precision."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import val
from benchmarks.gpu_parts.measuring import Machine, rounded, row, run
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData
from models.loading import transfer
from models.tasks.detect import DetectionTask
from models.weights import read_weights
from utils.batch import layout
from utils.config.hyperparameters import Hyperparameters
from utils.distributed.batchnorm import exact_batchnorm
from utils.files import ROOT, read_yaml

IMAGES, LOSS_SCALE = 4, 1024.0


class Mode(NamedTuple):
    """A precision: of autocast, or None; whether TF32 is allowed; flags of val.py."""

    autocast: torch.dtype | None
    tf32: bool
    flags: dict[str, Any]

    def allow_tf32(self) -> None:
        """Allow TF32 in convolutions and matrix products, or not."""
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.tf32


MODES = {
    "fp32": Mode(None, False, {"mixed_precision": "no"}),
    "fp32, TF32": Mode(None, True, {"mixed_precision": "no"}),
    "bf16": Mode(torch.bfloat16, True, {"mixed_precision": "bf16"}),
    "fp16": Mode(torch.float16, True, {"mixed_precision": "fp16"}),
    "--half": Mode(None, True, {"half": True}),  # of val.py alone
}


def loss_and_gradients(here: Machine, device: torch.device, mode: Mode) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of official or random weights on a batch, and its gradients in float64 on the host."""
    spec, imgsz = read_spec(here.photos()), 64 if here.quick else 640
    task = DetectionTask(spec.names, Hyperparameters())
    torch.manual_seed(0)
    model = task.build_model({"task": "detect", **read_yaml(ROOT / "models" / "yolov5n.yaml")}, imgsz)
    if here.weights:
        transfer(model, read_weights(here.weights).state)
    data = DetectionData(spec, imgsz=imgsz, stride=32, options=DataOptions())
    split = data.split("val")
    batch: Any = next(iter(data.evaluation_loader(split, data.evaluation_batches(split, IMAGES, True)[:1])))
    model, batch = model.to(device, memory_format=layout(device)).train(), batch.to(device)
    exact_batchnorm(model, None)
    criterion, scale = task.criterion(model), LOSS_SCALE if mode.autocast is torch.float16 else 1.0
    mode.allow_tf32()
    with torch.autocast(device.type, mode.autocast) if mode.autocast else nullcontext():
        outputs = model(task.inputs(batch), *criterion.hints(batch))
    loss = criterion.objective(criterion(outputs, batch).local_means(), IMAGES)
    (loss * scale).backward()
    parameters = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return float(loss), {name: gradient.double().cpu() / scale for name, gradient in parameters.items()}


def compare_losses(here: Machine) -> None:
    """Print a row for each precision."""
    expected_loss, expected = loss_and_gradients(here, torch.device("cpu"), MODES["fp32"])
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, mode in MODES.items():
        if "half" in mode.flags:
            continue
        loss, gradients = loss_and_gradients(here, here.torch_device, mode)
        gaps = {name: gradients[name] - gradient for name, gradient in expected.items()}
        ratios = [float(gaps[name].norm() / expected[name].norm().clamp(min=1e-12)) for name in gaps]
        columns = {"loss": rounded(abs(loss / expected_loss - 1), 2)}
        columns["gradients"] = rounded(float(torch.cat([gap.flatten() for gap in gaps.values()]).norm() / norm), 2)
        columns["largest of a parameter"] = rounded(max(ratios), 2)
        title = f"Loss and gradients of yolov5n on {IMAGES} images, relative differences from float32 on the CPU"
        row(title, precision=name, **columns)


def compare_scores(here: Machine) -> None:
    """Print a row for each precision, with the CPU's first."""
    title = "mAP of the official yolov5n.pt on the carried photos at 640 px"
    if not here.weights:
        row(title, note="not measured: no photos and weights carried (make gpu-data)")
        return
    given = {"weights": str(here.weights), "data": str(here.photos()), "imgsz": 640, "noplots": True, "workers": 4}
    given |= {"project": str(here.scratch / "val"), "quiet": True}
    runs = {"CPU, fp32": ("cpu", MODES["fp32"]), **{name: (here.device, mode) for name, mode in MODES.items()}}
    for name, (device, mode) in runs.items():
        if device == "cpu" and mode.autocast is torch.float16:
            continue  # is refused there
        mode.allow_tf32()
        scores = val.run(**given, device=device, **mode.flags)
        columns = {key: round(scores[f"metrics/{key}"], 5) for key in ("mAP_0.5", "mAP_0.5:0.95")}
        row(title, precision=name, **columns)


def parity(here: Machine) -> None:
    """Compare losses and scores."""
    compare_losses(here)
    compare_scores(here)


if __name__ == "__main__":
    run(parity)
