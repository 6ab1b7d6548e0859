"""Export a model into files that other programs run: `python export.py --weights best.pt --include onnx`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from data.dataset import DataOptions, DataSource, data_source
from models.ensemble import Members, common_task, export_base, halve, load_model, weight_files
from models.export import CALIBRATION_IMAGES, FORMATS_OF_FLAG, INPUT_NAME, ExportJob, ExportMetadata, export_path, write
from models.loading import ImageSize, add_user_code, log_rounding
from models.tasks import TASKS
from models.tasks.contract import Thresholds
from models.weights import read_weights
from utils.compare_runs import RECEIPT
from utils.config.flags import ExportOptions, select
from utils.config.parser import given_flags
from utils.console import log
from utils.distributed.failure import run_main
from utils.distributed.launch import select_device_type
from utils.errors import UserError, plural
from utils.files import format_paths, write_text
from utils.python_api import call
from utils.receipt import Receipt, environment, files_hash


def export(flags: Mapping[str, Any]) -> list[str]:
    """Export the weight files to all formats that the flags name; return the paths of the exported files."""
    options = ExportOptions(**flags)
    formats = dict.fromkeys("onnx" if name == "engine" else name for name in options.include)
    if options.int8 and not options.data:
        raise UserError("--int8 needs images to calibrate on; give their data set, as in --data my.yaml")
    for flag, supported in FORMATS_OF_FLAG.items():
        if getattr(options, flag) and (others := {*formats}.difference(supported)):
            raise UserError(f"--{flag} is not possible with {min(others)}, only with {', '.join(supported)}")
    if options.batch_size > 1 and "ncnn" in formats:
        raise UserError(f"--batch-size {options.batch_size}: ncnn takes one image at a time; leave it out")
    if options.device == "mps":
        raise UserError("--device mps: models are not exported on Apple GPUs; give cpu")
    device = torch.device(select_device_type(options.device))
    add_user_code(options.layers, options.task_file, flags)
    files: list[Path] = []
    for name, path in weight_files(options.weights).items():
        weights = read_weights(path)
        stem = export_base(name, path).with_suffix("")
        members = Members({name: path}, {name: weights}, TASKS[common_task({name: weights})])
        members.refuse_flags(options, flags)
        source = data_source(options.data, members.entry.data) if options.data else None
        members.pixel_format(source.spec.pixels if source else None, options.data)
        log(format_paths({"weights": [path], "data": [source.spec.file] if source else []}))
        size = members.image_size(options.imgsz)
        if "safetensors" in options.include and path == stem.with_suffix(".safetensors"):
            raise UserError(f"--include safetensors would overwrite {path}; copy or rename it first")
        for format_name in formats:
            export_path(format_name, stem)  # raises before anything is written
        job = prepare(members, options, size, device, source.names() if source else weights.class_names)
        if source and options.int8:
            job = replace(job, calibration=calibration(source, members, job.metadata))
        results = {}
        for format_name in formats:
            started_at = time.perf_counter()
            file = write(job, format_name, stem)
            files.append(file)
            written = [member for member in sorted(file.rglob("*")) or [file] if member.is_file()]
            results[file.name] = files_hash(written)
            megabytes = sum(member.stat().st_size for member in written) / 1e6
            log(f"{format_name}: {file}, {megabytes:.1f} MB, {time.perf_counter() - started_at:.1f} s")
        receipt = Receipt({"weights": weights.origin.files[-1:]}, environment(device), results)
        write_text(stem.with_name(f"{stem.name}.{RECEIPT}"), receipt.begin(stem.parent, vars(options))[RECEIPT])
        if "engine" in options.include:
            log(f"engine: on the target machine, run {trtexec(options, job.metadata, stem)}")
    return list(map(str, files))


def trtexec(options: ExportOptions, metadata: ExportMetadata, stem: Path) -> str:
    """Return the command of TensorRT that makes an engine from an ONNX file."""
    command = ["trtexec", f"--onnx={stem}.onnx", f"--saveEngine={stem}.engine"]
    command += ["--fp16"] * options.half + ["--int8"] * options.int8
    if metadata.dynamic:
        height, width = metadata.imgsz
        for name, count in (("min", 1), ("opt", metadata.batch), ("max", metadata.batch)):
            command.append(f"--{name}Shapes={INPUT_NAME}:{count}x{metadata.channels}x{height}x{width}")
    return shlex.join(command)


def calibration(source: DataSource, members: Members, metadata: ExportMetadata) -> Callable[[], Iterable[torch.Tensor]]:
    """Return a function that loads --int8's images, each as a whole batch, as a validation does. Raises `UserError`."""
    dataset, task_class = source.open(max(metadata.imgsz), metadata.stride, DataOptions()), members.entry.load()
    split, task = dataset.split("train"), task_class(metadata.names, task_class.recipe())
    batches = dataset.evaluation_batches(split, 1, square=True)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0))[:CALIBRATION_IMAGES].tolist()
    samples = [batches[k][0]._replace(shape=metadata.imgsz) for k in order]
    loader = dataset.evaluation_loader(split, [[sample] * metadata.batch for sample in samples])
    log(f"int8: calibrated on {plural(len(order), 'image')} of the training split")
    return lambda: map(task.inputs, loader)


def prepare(
    members: Members, options: ExportOptions, size: ImageSize, device: torch.device, names: dict[int, str]
) -> ExportJob:
    """Build the model of a weight file for its export, with class names by number. Raises `UserError`."""
    ((name, weights),) = members.weights.items()
    task_class = members.entry.load()
    task = task_class(names, task_class.recipe())
    model = load_model(task, weights, max(size.sides), name, options.data or "its list of names")
    per_class = min(options.topk_per_class, options.topk_all)
    limits = select(Thresholds, options, max_det=options.topk_all, max_det_per_class=per_class)
    limit_flags = ("conf_thres", "iou_thres", "topk_all", "topk_per_class", "agnostic_nms")
    suppression = {name: getattr(options, name) for name in limit_flags}
    module = task.export_module(model, limits if options.nms else None)
    half = options.half and device.type == "cuda"
    (halve(module) if half else module).to(device).requires_grad_(False)
    metadata = ExportMetadata(
        task=weights.task,
        names=names,
        stride=model.stride,
        model=dict(weights.model or {}),
        imgsz=size.rounded(model.stride).sides,
        batch=options.batch_size,
        dynamic=options.dynamic,
        half=half,
        device=device.type,
        suppression=suppression if options.nms else None,
        settings=dict(weights.settings),
        **weights.origin.content(),
    )
    log_rounding(size.sides, metadata.imgsz, model.stride)
    if options.half and not half:
        log("warning: --half needs CUDA, as in --device 0; exporting in full precision")
    shape = "x".join(map(str, (metadata.batch, metadata.channels, *metadata.imgsz)))
    if options.dynamic:
        shape = f"Nx{metadata.channels}xHxW, H and W multiples of {model.stride}"
    log(f"task {weights.task}, {plural(len(names), 'class')}, input shape {shape}")
    log(f"licence: {weights.origin}")
    return ExportJob(module, metadata, options.opset, options.verbose, weights.state)


def main() -> None:
    export(given_flags(ExportOptions, sys.argv[1:]))


def run(**flags: Any) -> list[str]:
    """Export from Python, with flags of the command: `export.run(weights="best.pt", include=["onnx"])`.

    Returns the paths of the files, in the order of the weights and of `include`. Raises `UserError` if the command
    would end with an error.
    """
    files: list[str] = call(lambda words: {"files": export(given_flags(ExportOptions, words))}, flags)["files"]
    return files


if __name__ == "__main__":
    run_main(main)
