"""Export a model into files that other programs run: `python export.py --weights best.pt --include onnx`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from data.dataset import data_source
from models.ensemble import common_task, halve, load_model, refuse_flags, weight_files
from models.export.formats import ExportJob, write
from models.export.runtime import ExportMetadata
from models.layer_registry import add_layers
from models.tasks import TASKS
from models.tasks.contract import ExportSettings
from models.weights.reader import Weights, read_weights
from utils.config.options import ExportOptions
from utils.config.parser import parse_options, with_defaults
from utils.config.select import select
from utils.console import show
from utils.distributed.devices import device_kind
from utils.distributed.exit import run_main
from utils.errors import UserError

NEEDLESS_FLAGS = {
    "simplify": "ONNX files are simplified as they are written",
    "inplace": "boxes are decoded without writing in place",
}


def main() -> None:
    """Export as the flags say."""
    argv = sys.argv[1:]
    options = parse_options(ExportOptions, argv)
    if options.device == "mps":
        raise UserError("--device mps: Apple GPUs export nothing; give cpu")
    device = torch.device(device_kind(options.device))
    if options.layers:
        add_layers(options.layers)
    for name, file in weight_files(options.weights).items():
        content = read_weights(file)
        kind = TASKS[common_task({name: content})].load()
        refuse_flags(options, kind.refused)
        size = kind.defaults.get("imgsz")
        job = prepare(name, content, with_defaults(options, argv, {"imgsz": (size,)} if size else {}), device)
        show(*messages(options, job))
        for format_name in dict.fromkeys(options.include):
            began = time.perf_counter()
            path = write(job, format_name, file.with_suffix(""))
            show(f"{format_name}: {path}, {megabytes(path):.1f} MB, {time.perf_counter() - began:.1f} s")


def prepare(name: str, content: Weights, options: ExportOptions, device: torch.device) -> ExportJob:
    """Return what is to be exported of a weight file. Raises `UserError`."""
    task_name = common_task({name: content})
    assert content.model is not None
    entry, names = TASKS[task_name], content.class_names
    if options.data:
        names = data_source(options.data, entry.data).names()
    kind = entry.load()
    task = kind(names, kind.recipe())
    model = load_model(task, content, max(options.imgsz), name, options.data or "its list of names")
    module, suppression = task.export_module(model, select(ExportSettings, options))
    half = options.half and device.type == "cuda"
    (halve(module) if half else module).to(device).requires_grad_(False)
    metadata = ExportMetadata(
        task=task_name,
        names=names,
        stride=model.stride,
        model=dict(content.model),
        imgsz=whole_strides(options.imgsz, model.stride),
        batch=options.batch_size,
        dynamic=options.dynamic,
        half=half,
        device=device.type,
        suppression=suppression,
        settings=dict(content.settings),
    )
    return ExportJob(module, metadata, options.opset, options.verbose)


def whole_strides(sides: Sequence[int], stride: int) -> tuple[int, int]:
    """Return height and width of images, from one number or both, rounded up to whole strides: at least two of more
    than a pixel. Raises `UserError` for more numbers.
    """
    if len(sides) > 2:
        raise UserError(f"--imgsz {' '.join(map(str, sides))} has {len(sides)} numbers; give one, or height and width")
    least = 2 if stride > 1 else 1
    height, width = (max(math.ceil(side / stride), least) * stride for side in (sides[0], sides[-1]))
    return height, width


def messages(options: ExportOptions, job: ExportJob) -> list[str]:
    """Return lines for the console about what is going to be exported."""
    lines, metadata = [], job.metadata
    height, width = metadata.imgsz
    requested = (options.imgsz[0], options.imgsz[-1])
    if requested != metadata.imgsz:
        lines.append(
            f"--imgsz {' '.join(map(str, options.imgsz))} is no multiple of the stride {metadata.stride}; "
            f"taking {height} {width}"
        )
    if options.half and not metadata.half:
        lines.append("warning: --half is for CUDA, named by --device; taking full precision")
    for flag, reason in NEEDLESS_FLAGS.items():
        if getattr(options, flag):
            lines.append(f"--{flag} changes nothing: {reason}")
    count = "any number" if metadata.dynamic else metadata.batch
    sizes = ", or other whole strides" if metadata.dynamic else ""
    return [
        *lines,
        f"{metadata.task}, {len(metadata.names)} classes; images of {height}x{width}{sizes}, {count} at a time",
    ]


def megabytes(path: Path) -> float:
    """Return the size of a file, or of the files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


if __name__ == "__main__":
    run_main(main)
