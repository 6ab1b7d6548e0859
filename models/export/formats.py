"""Write a model to files that other programs run. Called by export.py."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.export.runtime import (
    FOLDER_FILE,
    ONNX_METADATA_KEY,
    SUFFIX_OF_FORMAT,
    TORCHSCRIPT_FILE,
)
from models.weights.content import ExportMetadata
from utils.checkpoint.weight_files import FORMAT, as_safetensors
from utils.errors import UserError, first_line
from utils.files import replacing

ONNX_OPSET = 18  # lowest opset of torch.export's exporter; the tracing exporter writes lower ones
# Names of tensors in ONNX files; a model uses one per output. Without suppression they are YOLOv5's names.
INPUT_NAME = "images"
OUTPUT_NAMES, SUPPRESSED_NAMES = ("output0", "output1"), ("output0", "count", "masks")
# Axes whose sizes vary with --dynamic: the input's, and each output's by its number of axes (other outputs: axis 0).
DYNAMIC_AXES = {0: "batch", 2: "height", 3: "width"}
DYNAMIC_OUTPUT_AXES = {3: {0: "batch", 1: "anchors"}, 4: {0: "batch", 2: "mask_height", 3: "mask_width"}}
MAX_EXPORT_SIDE_PIXELS = 2**14  # longest image side with --dynamic
MAX_EXPORT_BATCH = 2**14  # images in a batch with --dynamic


@dataclass(frozen=True)
class ExportJob:
    """A model to export, in evaluation mode on its device, and the metadata of its files."""

    model: nn.Module
    metadata: ExportMetadata
    opset: int = ONNX_OPSET
    verbose: bool = False
    state: Mapping[str, Tensor] = field(default_factory=dict)  # the weight file's, for formats that store weights

    @cached_property
    def example(self) -> Tensor:
        """Images of the requested size. At least two if dynamic: torch.export makes sizes of 1 static."""
        metadata = self.metadata
        count = max(metadata.batch, 2) if metadata.dynamic else metadata.batch
        dtype = torch.half if metadata.half else torch.float
        return torch.zeros(count, 3, *metadata.imgsz, device=metadata.device, dtype=dtype)

    @cached_property
    def program(self) -> torch.export.ExportedProgram:
        """The model as a graph of torch's operators."""
        shapes = None
        if self.metadata.dynamic:
            stride = self.metadata.stride
            shapes = {0: torch.export.Dim("batch", min=1, max=MAX_EXPORT_BATCH)}
            for axis, name in ((2, "height"), (3, "width")):
                # At least two strides: torch.export makes sizes of 1 static.
                strides = torch.export.Dim(f"{name}_in_strides", min=2, max=MAX_EXPORT_SIDE_PIXELS // stride)
                shapes[axis] = stride * strides if stride > 1 else strides
        program = torch.export.export(
            self.model, (self.example,), dynamic_shapes=(shapes,) if shapes else None, strict=False
        )
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names folders of this machine
        return program

    @cached_property
    def outputs(self) -> list[Tensor]:
        """The model's outputs for `example`."""
        with torch.no_grad():
            outputs = self.model(self.example)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    @cached_property
    def onnx(self) -> bytes:
        """The bytes of an ONNX file: the same for the same model."""
        import onnx
        import onnxscript  # noqa: F401  # imported here so that the error names the missing package

        metadata = self.metadata
        names = SUPPRESSED_NAMES if metadata.suppression else OUTPUT_NAMES
        settings: dict[str, Any] = {
            "input_names": [INPUT_NAME],
            "output_names": list(names[: len(self.outputs)]),
            "opset_version": self.opset,
            "verbose": self.verbose,
        }
        if self.opset < ONNX_OPSET:
            content, axes = io.BytesIO(), {INPUT_NAME: DYNAMIC_AXES} if metadata.dynamic else None
            settings |= {"dynamo": False, "dynamic_axes": axes}
            torch.onnx.export(self.model, (self.example,), content, **settings)  # type: ignore[arg-type]
            model = onnx.load_from_string(content.getvalue())
        else:
            program = torch.onnx.export(self.program, (), dynamo=True, external_data=False, **settings)
            assert program is not None
            model = program.model_proto
        if (written := model.opset_import[0].version) != self.opset:
            raise UserError(f"--opset {self.opset} is not possible for this model; leave it out, or give {written}")
        _tidy(model, metadata, self.outputs)
        classes, stride = str(metadata.names), str(metadata.stride)
        for key, value in ((ONNX_METADATA_KEY, metadata.text()), ("names", classes), ("stride", stride)):
            model.metadata_props.add(key=key, value=value)
        return model.SerializeToString(deterministic=True)


def write(job: ExportJob, name: str, stem: Path) -> Path:
    """Write one format to `stem` with its suffix, completely or not at all, and return the path.

    Raises `UserError` if the format does not support the model.

    Args:
        name: name of the format, a key of `WRITERS`
    """
    path = stem.parent / (stem.name + SUFFIX_OF_FORMAT[name])
    try:
        with _suppressed_output(job.verbose):
            WRITERS[name](job, path)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(
            f"--include {name} needs {error.name}, which is not installed; pip install -r requirements-export.txt"
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; check the folder and the disk") from None
    except Exception as error:  # each exporter raises its own classes
        hint = "leave out --dynamic, or " if job.metadata.dynamic else ""
        hint += f"give --opset {ONNX_OPSET}, or " if name == "onnx" and job.opset < ONNX_OPSET else ""
        raise UserError(
            f"{name} does not support this model ({first_line(error, 200)}); {hint}choose another format"
        ) from error
    return path


def _torchscript(job: ExportJob, path: Path) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(job.model, job.example, check_trace=False)
    metadata = replace(job.metadata, dynamic=_takes_any_size(traced, job))
    with replacing(path) as file:
        content = io.BytesIO()
        torch.jit.save(traced, content, _extra_files={TORCHSCRIPT_FILE: metadata.text()})
        file.write(content.getbuffer())


@torch.no_grad()
def _takes_any_size(traced: torch.jit.ScriptModule, job: ExportJob) -> bool:
    """Return whether a trace supports other image sizes and batch sizes: tracing may turn sizes into constants."""
    generator = torch.Generator(job.example.device).manual_seed(0)
    (count, channels, height, width), stride = job.example.shape, job.metadata.stride
    shape = (count + 1, channels, height + stride, width + 2 * stride)
    images = torch.rand(shape, generator=generator, device=job.example.device).to(job.example.dtype)
    try:
        outputs, expected = traced(images), job.model(images)
        if isinstance(outputs, Tensor):
            return torch.equal(outputs, expected)
        return all(map(torch.equal, outputs, expected))
    except Exception:  # any layer may fail at a size that it was not traced with
        return False


def _onnx(job: ExportJob, path: Path) -> None:
    with replacing(path) as file:
        file.write(job.onnx)


def _tidy(model: Any, metadata: ExportMetadata, outputs: Sequence[Tensor]) -> None:
    """Remove metadata that depends on this machine, name the dynamic sizes, and fill in the static ones.

    Args:
        outputs: the model's outputs, whose shapes give the static sizes
    """
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.initializer, *model.functions):
        del part.metadata_props[:]
    del graph.value_info[:]
    if metadata.dynamic:
        for axis, name in DYNAMIC_AXES.items():
            graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    for output, value in zip(graph.output, outputs, strict=True):
        axes = DYNAMIC_OUTPUT_AXES.get(value.ndim, {0: "batch"}) if metadata.dynamic else {}
        for axis, (dim, size) in enumerate(zip(output.type.tensor_type.shape.dim, value.shape, strict=True)):
            if axis in axes and not (axis == 1 and metadata.suppression):
                dim.dim_param = axes[axis]
            else:
                dim.dim_value = size


def _openvino(job: ExportJob, path: Path) -> None:
    import openvino

    with _replacing_folder(path) as folder:
        (folder / "model.onnx").write_bytes(job.onnx)
        model = openvino.convert_model(str(folder / "model.onnx"))
        (folder / "model.onnx").unlink()
        name = path.name.removesuffix(SUFFIX_OF_FORMAT["openvino"])
        openvino.save_model(model, str(folder / f"{name}.xml"), compress_to_fp16=job.metadata.half)
        (folder / FOLDER_FILE).write_text(job.metadata.text(), encoding="utf-8")


def _safetensors(job: ExportJob, path: Path) -> None:
    metadata = job.metadata
    content = {
        "format": FORMAT,
        "task": metadata.task,
        "model": metadata.model,
        "names": metadata.names,
        "state": job.state,
        "settings": metadata.settings,
        "licence": metadata.licence,
        "origin": metadata.origin,
    }
    with replacing(path) as file:
        file.write(as_safetensors(content))


WRITERS: dict[str, Callable[[ExportJob, Path], None]] = {
    "torchscript": _torchscript,
    "onnx": _onnx,
    "openvino": _openvino,
    "safetensors": _safetensors,
}


@contextmanager
def _replacing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `path` on success and is removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as name:
        fresh = Path(name) / "new"
        fresh.mkdir()
        yield fresh
        if path.exists():
            path.rename(Path(name) / "old")
        fresh.rename(path)


@contextmanager
def _suppressed_output(verbose: bool) -> Iterator[None]:
    """Suppress the exporters' output, unless `verbose`."""
    if verbose:
        yield
        return
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
