"""Exported files: written by export.py, and run as a model by models/ensemble.py."""

from __future__ import annotations

import io
import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.loading import sides_of
from models.tasks.contract import Model
from models.weights import EXPORTED_SUFFIXES, UNKNOWN, Origin, Weights, read_weights
from models.yolo import whole_strides
from utils.checkpoint.weight_files import FORMAT, SAFETENSORS_SUFFIX, as_safetensors
from utils.errors import UserError, first_line
from utils.files import read_regular, replacing

EXPORT_FORMAT = "lockstep-export-1"


@dataclass(frozen=True)
class ExportMetadata:
    """The metadata of an exported file."""

    task: str
    names: dict[int, str]
    stride: int
    model: dict[str, Any]  # the model YAML
    imgsz: tuple[int, int]  # height and width, pixels
    batch: int
    dynamic: bool  # whether it takes any number of images, of any size in whole strides
    half: bool  # whether it takes images in fp16
    device: str  # device of a file in one of torch's formats: cpu or cuda
    suppression: dict[str, Any] | None  # thresholds and limits, if the file suppresses overlapping boxes
    settings: dict[str, Any]  # settings of the run that trained the model
    licence: str = UNKNOWN
    origin: list[dict[str, str]] = field(default_factory=list)  # see `Origin`

    def overrides(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that apply instead of the given flags' values, by flag name.

        Args:
            flags: values of the given flags, by name
        """
        values: dict[str, Any] = {}
        sides = () if self.dynamic else sides_of(flags.get("imgsz", 0))
        if sides and (sides[0], sides[-1]) != self.imgsz:
            values["imgsz"] = self.imgsz
        if flags.get("half") and not self.half:
            values["half"] = False
        if own := self.suppression:
            values |= {"iou_thres": own["iou_thres"], "agnostic_nms": own["agnostic"]}
            values["conf_thres"] = max(flags.get("conf_thres", 0.0), own["conf_thres"])  # applied to its detections too
            values["max_det"] = min(flags.get("max_det", own["most"]), own["most"])
        return {name: value for name, value in values.items() if name in flags and flags[name] != value}

    @property
    def suppression_flags(self) -> str:
        """The flags of export.py that describe the suppression in the file, '' if there is none."""
        if not (own := self.suppression):
            return ""
        numbers = f"--conf-thres {own['conf_thres']:g} --iou-thres {own['iou_thres']:g} --topk-all {own['most']}"
        agnostic = " --agnostic-nms" if own["agnostic"] else ""
        return f"--nms {numbers} --topk-per-class {own['most_per_class']}{agnostic}"

    def text(self) -> str:
        """Return the metadata as JSON with sorted keys; `shape`, `stride` and `names` are for YOLOv5's programs."""
        content = {"format": EXPORT_FORMAT, **asdict(self), "shape": [self.batch, 3, *self.imgsz]}
        return json.dumps(content, sort_keys=True)


ONNX_METADATA_KEY = "lockstep"  # the files also have YOLOv5's keys, `stride` and `names`
TORCHSCRIPT_FILE, FOLDER_FILE = "config.txt", "metadata.yaml"
SUFFIX_OF_FORMAT = {
    **dict(zip(("onnx", "torchscript", "openvino"), EXPORTED_SUFFIXES, strict=True)),
    "safetensors": SAFETENSORS_SUFFIX,  # read like weights, not run
}
Runner = Callable[[Tensor], Sequence[Tensor]]


def read_metadata(text: str) -> ExportMetadata:
    """Parse JSON. Raises ValueError, TypeError, KeyError or AttributeError for text that export.py did not write."""
    content = json.loads(text)
    version = content.pop("format", None)
    if version != EXPORT_FORMAT:
        raise ValueError(f"its format is {version}")
    content.pop("shape", None)
    content["names"] = {int(number): str(name) for number, name in content["names"].items()}
    height, width = content["imgsz"]
    return ExportMetadata(**{**content, "imgsz": (int(height), int(width))})


def read_model(path: Path) -> Weights:
    """Read a weight file, or an exported file into a `program` without tensors. Raises `UserError`."""
    if not path.name.endswith(EXPORTED_SUFFIXES):
        return read_weights(path)
    exported = read_exported(path)
    metadata = exported.metadata
    origin = Origin(metadata.licence, metadata.origin)
    return Weights(
        {}, metadata.model, metadata.names, metadata.task, metadata.settings, "exported", exported, metadata, origin
    )


class Exported(Model):
    """An exported file as a model, which maps images to one or more tensors.

    It has no parameters: the file fixes precision and device, and `half` and `to` do not change them.
    """

    def __init__(self, metadata: ExportMetadata, run: Runner, name: str) -> None:
        super().__init__()
        self.metadata, self.name, self._run = metadata, name, run
        self.yaml, self.names, self.stride = metadata.model, metadata.names, metadata.stride
        self.imgsz = max(metadata.imgsz)

    def resize(self, imgsz: int) -> None:
        """Set `imgsz`, rounded up to whole strides, unless the file is for one size."""
        if self.metadata.dynamic:
            self.imgsz = whole_strides(imgsz, self.stride)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Map images (b, 3, h, w) to the outputs, on the images' device. Raises `UserError` for a wrong size.

        A file with a fixed batch size runs once per batch of that size; the last batch is padded with zeros.
        """
        metadata, size = self.metadata, tuple(images.shape[2:])
        if not metadata.dynamic and size != metadata.imgsz:
            height, width = metadata.imgsz
            raise UserError(
                f"{self.name} takes images of {height}x{width} (height x width), not {size[0]}x"
                f"{size[1]}; give --imgsz {height} {width}, or export it with --dynamic"
            )
        inputs = images.half() if metadata.half else images.float()
        with torch.autocast(images.device.type, enabled=False):
            chunks = [inputs] if metadata.dynamic else inputs.split(metadata.batch)
            parts = [self._run_batch(chunk.contiguous()) for chunk in chunks]
        outputs = tuple(torch.cat(each).to(images.device) for each in zip(*parts, strict=True))
        return outputs[0] if len(outputs) == 1 else outputs

    def _run_batch(self, images: Tensor) -> list[Tensor]:
        count, metadata = len(images), self.metadata
        if not metadata.dynamic and count < metadata.batch:
            images = torch.cat((images, images.new_zeros(metadata.batch - count, *images.shape[1:])))
        return [output[:count] for output in self._run(images)]


def read_exported(path: Path) -> Exported:
    """Read an exported file. Raises `UserError` if it is damaged or not export.py's, or if its runtime is missing."""
    read = next(reader for ending, reader in READERS.items() if path.name.endswith(ending))
    if not path.exists():
        raise UserError(f"weights {path} do not exist; check the path")
    try:
        text, start = read(path)
    except UserError:
        raise
    except Exception as error:  # each runtime has its own
        raise UserError(
            f"{path} cannot be read ({first_line(error)}); copy it again, or export it again with export.py"
        ) from error
    if not text:
        raise UserError(
            f"{path} lacks export.py's metadata, such as class names; export it again from its .pt with export.py"
        )
    try:
        metadata = read_metadata(text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} has metadata from another program or version ({error}); export it again with export.py"
        ) from None
    return Exported(metadata, start(metadata), path.name)


# One reader per format: each returns the metadata's text ('' if there is none) and a function that makes the runner.


def _read_torchscript(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    import torchvision.ops  # noqa: F401  # registers torchvision's operators, such as suppression

    extra: dict[str, Any] = {TORCHSCRIPT_FILE: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore the advice to use torch.export instead
        module = torch.jit.load(io.BytesIO(read_regular(path)), map_location="cpu", _extra_files=extra)
    text = extra[TORCHSCRIPT_FILE]  # bytes if the file has it

    def start(metadata: ExportMetadata) -> Runner:
        device = torch.device(metadata.device)  # constants stay on the device that exported the file
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError(
                f"{path.name} was exported for CUDA, which this machine does not have; export it with --device cpu"
            )
        module.to(device)

        def run(images: Tensor) -> Sequence[Tensor]:
            outputs = module(images.to(device))
            return (outputs,) if isinstance(outputs, Tensor) else outputs

        return run

    return text.decode("utf-8") if text else "", start


def _read_onnx(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    runtime = _import_runtime("onnxruntime", path)
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3  # errors
    available = runtime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in available]
    session = runtime.InferenceSession(read_regular(path), settings, providers=providers)
    (source,) = session.get_inputs()

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {source.name: images.cpu().numpy()})]

    return session.get_modelmeta().custom_metadata_map.get(ONNX_METADATA_KEY, ""), lambda metadata: run


def _read_openvino(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    runtime = _import_runtime("openvino", path)
    files = sorted(path.glob("*.xml"))
    if len(files) != 1:
        raise UserError(f"{path} holds {len(files)} .xml files instead of one; export it again with export.py")
    metadata_file = path / FOLDER_FILE
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    model = runtime.Core().compile_model(str(files[0]), "CPU", settings)

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(output.copy()) for output in model(images.cpu().numpy()).values()]

    return metadata_file.read_text(encoding="utf-8") if metadata_file.is_file() else "", lambda metadata: run


READERS: dict[str, Callable[[Path], tuple[str, Callable[[ExportMetadata], Runner]]]] = {
    SUFFIX_OF_FORMAT["torchscript"]: _read_torchscript,
    SUFFIX_OF_FORMAT["onnx"]: _read_onnx,
    SUFFIX_OF_FORMAT["openvino"]: _read_openvino,
}


def _import_runtime(name: str, path: Path) -> Any:
    """Import a runtime. Raises `UserError` if it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        raise UserError(
            f"{path.name} is run by {name}, which is not installed; pip install -r requirements-export.txt"
        ) from None


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


def _write_torchscript(job: ExportJob, path: Path) -> None:
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


def _write_onnx(job: ExportJob, path: Path) -> None:
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


def _write_openvino(job: ExportJob, path: Path) -> None:
    import openvino

    with _replacing_folder(path) as folder:
        (folder / "model.onnx").write_bytes(job.onnx)
        model = openvino.convert_model(str(folder / "model.onnx"))
        (folder / "model.onnx").unlink()
        name = path.name.removesuffix(SUFFIX_OF_FORMAT["openvino"])
        openvino.save_model(model, str(folder / f"{name}.xml"), compress_to_fp16=job.metadata.half)
        (folder / FOLDER_FILE).write_text(job.metadata.text(), encoding="utf-8")


def _write_safetensors(job: ExportJob, path: Path) -> None:
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
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "openvino": _write_openvino,
    "safetensors": _write_safetensors,
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
