"""Images per second around the training steps: the loader, validation, and exported files."""

from __future__ import annotations

import itertools
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import val
from benchmarks.gpu_parts.measuring import Machine, rounded, row, run, script
from data.data_yaml import read_spec
from data.dataset import DataOptions
from data.detection import DetectionData
from models.export import read_exported
from utils.config.hyperparameters import Hyperparameters
from utils.distributed.launch import reset_accelerate

FORMATS = {"torchscript": ".torchscript", "onnx": ".onnx"}


def loader_rate(here: Machine, workers: int, cache: str) -> float:
    """Return images per second of an epoch, after its first batch and, with a cache, after a whole epoch."""
    batch, imgsz = here.size(64)
    options = DataOptions(cache=cache, workers=workers)
    data = DetectionData(read_spec(here.photos(times=16)), imgsz=imgsz, stride=32, options=options)
    loader = data.train_loader(data.split("train"), batch_size=batch, hyp=Hyperparameters(), seed=0)
    images, begun = 0, 0.0
    for _ in range(2 if cache else 1):
        for number, items in enumerate(loader):
            begun, images = (begun, images + len(items.images)) if number else (time.perf_counter(), 0)
    return images / (time.perf_counter() - begun)


def loader(here: Machine) -> None:
    """Measure growing numbers of loader processes, without a cache and with --cache ram."""
    cores = len(os.sched_getaffinity(0))
    for workers in [0, 1] if here.quick else [count for count in (1, 2, 4, 8, 12, 16) if count <= cores]:
        rates = {name or "no cache": rounded(loader_rate(here, workers, name)) for name in ("", "ram")}
        row(f"Images per second of the loader, mosaic, of {cores} cores", **{"loader processes": workers}, **rates)


def trained(here: Machine, imgsz: int) -> Path:
    """Return the official yolov5n.pt, or weights of our own if it is not carried."""
    if here.weights:
        return here.weights
    script("train.py", *here.flags("yolov5n", imgsz, 8, "--epochs", "1", "--noval", "--name", "own"))
    return here.scratch / "runs" / "own" / "weights" / "last.pt"


def validation(here: Machine) -> None:
    """Validate with the thresholds of mAP and of use; the host waits for the device at the end of each stage."""
    _, imgsz = here.size(1)
    weights = trained(here, imgsz)
    precisions = {"no": {"mixed_precision": "no"}, **({"half": {"half": True}} if here.on_gpu else {})}
    cases = ((4, 0.001),) if here.quick else ((1, 0.001), (32, 0.001), (32, 0.25))
    for (batch, confidence), (precision, how) in itertools.product(cases, precisions.items()):
        given = {"weights": (str(weights),), "data": str(here.photos()), "imgsz": imgsz, "task": "speed"}
        given |= {"batch_size": batch, "conf_thres": confidence, "device": here.device, "quiet": True, **how}
        given |= {"workers": 2, "noplots": True, "project": str(here.scratch / "val")}
        here.free_memory()
        timer = val.validate(given).timer
        columns = {stage: rounded(1000 * seconds / timer.images) for stage, seconds in timer.seconds.items()}
        about = {"batch": batch, "conf": confidence, "precision": precision}
        row("Milliseconds per image of yolov5n", **about, **columns, **{"peak GiB": here.peak_gib()})
        reset_accelerate()


def exports(here: Machine) -> None:
    """Compare the boxes and times of exported files, in all formats whose packages are installed."""
    imgsz, batch = (64, 1) if here.quick else (640, 8)
    model = here.scratch / "model.pt"
    shutil.copyfile(trained(here, imgsz), model)
    formats = [name for name in FORMATS if name != "onnx" or (find_spec("onnx") and find_spec("onnxscript"))]
    images, expected = torch.rand(batch, 3, imgsz, imgsz, device=here.torch_device), None
    for half, name in itertools.product((False, True) if here.on_gpu else (False,), formats):
        flags = ["--imgsz", str(imgsz), "--batch", str(batch), "--device", here.device, *["--half"] * half]
        try:
            script("export.py", "--weights", str(model), "--include", name, *flags)
            exported = read_exported(model.with_suffix(FORMATS[name]))
            boxes = exported(images)[..., :4].float().cpu()
            expected = boxes if expected is None else expected
            seconds = here.seconds(lambda exported=exported: exported(images), 1, 5)
            columns = {"ms per image": rounded(seconds / batch * 1000)}
            columns["largest difference of a box, pixels"] = rounded(float((boxes - expected).abs().max()), 2)
        except (RuntimeError, ImportError) as error:
            columns = {"note": str(error)[-200:]}
        about = {"format": name, "precision": "half" if half else "fp32"}
        row(f"Exported yolov5n, batch {batch} at {imgsz} px; the first row is the reference", **about, **columns)
    if find_spec("onnxruntime"):
        import onnxruntime

        row("onnxruntime", version=onnxruntime.__version__, providers=", ".join(onnxruntime.get_available_providers()))


if __name__ == "__main__":
    run(loader, validation, exports)
