"""Writing a model into files that other programs run. Nothing in them depends on when they were made."""

from __future__ import annotations

import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.export.runtime import FOLDER_FILE, KEY, PROGRAM_FILE, SUFFIXES, TORCHSCRIPT_FILE, Metadata
from utils.errors import UserError
from utils.files import replacing

OPSET = 18  # of ONNX, the least that torch's exporter writes without converting what it has written
INPUT, OUTPUT, COUNT = "images", "output0", "count"  # the first two are YOLOv5's
MOST_SIDE = 2**14  # pixels, of a file for any size


@dataclass(frozen=True)
class Job:
    """A model to be written, in evaluation mode on the device that it is for, and what its files are to say."""

    model: nn.Module
    metadata: Metadata
    opset: int = OPSET
    verbose: bool = False

    @cached_property
    def example(self) -> Tensor:
        """Images of the size that is asked for. A single one would make torch.export take their number as fixed."""
        told = self.metadata
        count = max(told.batch, 2) if told.dynamic else told.batch
        return torch.zeros(count, 3, *told.imgsz, device=told.device, dtype=torch.half if told.half else torch.float)

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The model as a graph of torch's operators."""
        shapes = None
        if self.metadata.dynamic:
            stride = self.metadata.stride
            shapes = {0: torch.export.Dim("batch", min=1, max=2**14)}
            for axis, name in ((2, "height"), (3, "width")):
                # Two strides at least: torch takes sizes of 1 for fixed.
                strides = torch.export.Dim(f"{name}_in_strides", min=2, max=MOST_SIDE // stride)
                shapes[axis] = stride * strides if stride > 1 else strides
        program = torch.export.export(
            self.model, (self.example,), dynamic_shapes=(shapes,) if shapes else None, strict=False
        )
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names folders of this machine
        return program

    @cached_property
    def onnx(self) -> bytes:
        """The model as ONNX."""
        return _onnx_content(self)


def write(job: Job, name: str, stem: Path) -> Path:
    """Write one format beside `stem`, whole or not at all; its path. Raises `UserError` where a model does not suit."""
    path = stem.parent / (stem.name + SUFFIXES[name])
    try:
        with _silence(job.verbose):
            WRITERS[name](job, path)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"--include {name} needs {error.name}, which is not installed; pip install -r requirements-export.txt"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; check the folder and the disk") from None
    except Exception as error:  # torch's exporters fail each in its own way
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
        hint = "leave out --dynamic, or " if job.metadata.dynamic else ""
        raise UserError(f"{name} does not take this model ({reason}); {hint}choose another format") from error
    return path


def _torchscript(job: Job, path: Path) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(job.model, job.example, check_trace=False)
    metadata = replace(job.metadata, dynamic=_is_free(traced, job))
    with replacing(path) as file:
        content = io.BytesIO()
        torch.jit.save(traced, content, _extra_files={TORCHSCRIPT_FILE: metadata.text()})
        file.write(content.getbuffer())


@torch.no_grad()
def _is_free(traced: Any, job: Job) -> bool:
    """Does a trace take images of another number and size too? A layer may have made a size of the example a number."""
    generator = torch.Generator(job.example.device).manual_seed(0)
    (count, channels, height, width), stride = job.example.shape, job.metadata.stride
    shape = (count + 1, channels, height + stride, width + 2 * stride)
    images = torch.rand(shape, generator=generator, device=job.example.device).to(job.example.dtype)
    try:
        return all(map(torch.equal, _flat(traced(images)), _flat(job.model(images))))
    except Exception:  # whatever a layer does with a size that it was not made for
        return False


def _flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _program(job: Job, path: Path) -> None:
    program = copy.copy(job.program)
    program.example_inputs = None  # they would be written too: images without content
    with replacing(path) as file:
        content = io.BytesIO()
        torch.export.save(program, content, extra_files={PROGRAM_FILE: job.metadata.text()})
        file.write(content.getbuffer())


def _onnx(job: Job, path: Path) -> None:
    with replacing(path) as file:
        file.write(job.onnx)


def _onnx_content(job: Job) -> bytes:
    import onnx  # noqa: F401  # here, so that what is not installed is told by its name
    import onnxscript  # noqa: F401

    made = torch.onnx.export(
        job.program,
        (),
        dynamo=True,
        input_names=[INPUT],
        output_names=[OUTPUT, COUNT] if job.metadata.suppression else [OUTPUT],
        opset_version=job.opset,
        external_data=False,
        verbose=job.verbose,
    )
    assert made is not None
    model = made.model_proto
    if (written := model.opset_import[0].version) != job.opset:
        raise UserError(f"ONNX's --opset {job.opset} cannot be had of this model, only {written}; give that or none")
    _tidy(model, job.metadata)
    told = {"stride": str(job.metadata.stride), "names": str(job.metadata.names), KEY: job.metadata.text()}
    del model.metadata_props[:]
    for key, value in sorted(told.items()):
        model.metadata_props.add(key=key, value=value)
    return model.SerializeToString(deterministic=True)


def _tidy(model: Any, metadata: Metadata) -> None:
    """Leave out what tells of this machine, and give free sizes readable names."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer, *model.functions):
        del part.metadata_props[:]
    del graph.value_info[:]
    if metadata.dynamic:
        names = {0: "batch", 2: "height", 3: "width"}
        for axis, name in names.items():
            graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
        for output in graph.output:
            for axis, dim in enumerate(output.type.tensor_type.shape.dim):
                if dim.dim_param:
                    dim.dim_param = "batch" if axis == 0 else "anchors"


def _openvino(job: Job, path: Path) -> None:
    import openvino

    with _replacing_folder(path) as folder:
        source = folder / "model.onnx"
        source.write_bytes(job.onnx)
        model = openvino.convert_model(str(source))
        source.unlink()
        name = path.name.removesuffix(SUFFIXES["openvino"])
        openvino.save_model(model, str(folder / f"{name}.xml"), compress_to_fp16=job.metadata.half)
        (folder / FOLDER_FILE).write_text(job.metadata.text(), encoding="utf-8")


WRITERS: dict[str, Callable[[Job, Path], None]] = {
    "torchscript": _torchscript,
    "onnx": _onnx,
    "openvino": _openvino,
    "exported": _program,
}


@contextmanager
def _replacing_folder(path: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `path` on success, and is removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as name:
        fresh = Path(name) / "new"
        fresh.mkdir()
        yield fresh
        if path.exists():
            path.rename(Path(name) / "old")
        fresh.rename(path)


@contextmanager
def _silence(verbose: bool) -> Iterator[None]:
    """Without what the exporters say to their own authors."""
    with ExitStack() as held:
        if not verbose:
            held.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for stream in (redirect_stdout, redirect_stderr):
                held.enter_context(stream(io.StringIO()))
            held.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.ERROR)
        yield
