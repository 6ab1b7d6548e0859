"""Exported files on the device: their outputs against the model's, and their time."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

import torch

from benchmarks.gpu_parts.measuring import machine, rounded, row, script, seconds_each, training_flags
from models.export import read_exported

FORMATS = {"torchscript": ".torchscript", "onnx": ".onnx"}


def main() -> None:
    """Export the official or own weights in all formats whose packages are here."""
    here = machine()
    imgsz, batch = (64, 1) if here.quick else (640, 8)
    folder = here.scratch / "exported"
    folder.mkdir()
    if here.weights:
        shutil.copyfile(here.weights, folder / "model.pt")
    else:
        script("train.py", *training_flags(here, "yolov5n", imgsz, 8, "--epochs", "1", "--noval", "--name", "own"))
        shutil.copyfile(here.scratch / "runs" / "own" / "weights" / "last.pt", folder / "model.pt")
    formats = [name for name in FORMATS if name != "onnx" or (find_spec("onnx") and find_spec("onnxscript"))]
    images, expected = torch.rand(batch, 3, imgsz, imgsz), None
    for half in (False, True) if here.on_gpu else (False,):
        for name in formats:
            flags = ["--include", name, "--imgsz", str(imgsz), "--batch", str(batch), "--device", here.device]
            about = {"format": name, "precision": "half" if half else "fp32"}
            try:
                script("export.py", "--weights", str(folder / "model.pt"), *flags, *["--half"] * half)
                exported = read_exported(folder / f"model{FORMATS[name]}")
                given = images.to(here.torch_device)
                boxes = exported(given).float().cpu()
                expected = boxes if expected is None else expected
                seconds = seconds_each(lambda exported=exported, given=given: exported(given), here.torch_device, 1, 5)
                outcome = {
                    "ms per image": rounded(seconds / batch * 1000),
                    "largest difference of a box, pixels": rounded(float((boxes - expected)[..., :4].abs().max()), 2),
                }
            except (RuntimeError, ImportError) as error:
                outcome = {"note": str(error)[-200:]}
            row(f"Exported yolov5n, batch {batch} at {imgsz} px; the first row is the reference", **about, **outcome)
    if find_spec("onnxruntime"):
        import onnxruntime

        row("onnxruntime", version=onnxruntime.__version__, providers=", ".join(onnxruntime.get_available_providers()))


if __name__ == "__main__":
    main()
