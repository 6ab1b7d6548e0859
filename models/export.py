"""Exported files: `write` makes them for export.py, `read_model` runs them as a model for models/ensemble.py.

ONNX, OpenVINO, ncnn, TFLite and Core ML files hold arithmetic, and a `.torchscript` holds a program of torch's
operators. Each has the metadata that val.py and detect.py need.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from models.tasks.contract import Model
from models.weights import EXPORTED_SUFFIXES, UNKNOWN, Origin, Weights, read_weights
from models.yolo import whole_strides
from utils.checkpoint import FORMAT, SAFETENSORS_SUFFIX, as_safetensors
from utils.errors import UserError, first_line
from utils.files import read_regular, write_bytes

EXPORT_FORMAT = "lockstep-export-1"
FORMATS_OF_FLAG = {
    "int8": ("onnx", "openvino", "tflite"),
    **dict.fromkeys(("dynamic", "nms"), ("torchscript", "onnx", "openvino", "safetensors")),
}
# Where the files have the metadata. An ONNX file also has YOLOv5's keys, `stride` and `names`.
ONNX_METADATA_KEY, TORCHSCRIPT_FILE, FOLDER_FILE = "lockstep", "config.txt", "metadata.yaml"
COREML_FILE = "Data/com.apple.CoreML/model.mlmodel"
ONNX_OPSET = 18  # lowest opset of torch.export's exporter; the tracing exporter writes lower ones
# Names of tensors in ONNX files; a model uses one per output. Without suppression they are YOLOv5's names.
INPUT_NAME = "images"
OUTPUT_NAMES, SUPPRESSED_NAMES = ("output0", "output1"), ("output0", "count", "masks")
# Axes whose sizes vary with --dynamic: the input's, and each output's by its number of axes (other outputs: axis 0).
DYNAMIC_AXES = {0: "batch", 2: "height", 3: "width"}
DYNAMIC_OUTPUT_AXES = {3: {0: "batch", 1: "anchors"}, 4: {0: "batch", 2: "mask_height", 3: "mask_width"}}
MAX_EXPORT_SIDE_PIXELS = 2**14  # longest image side with --dynamic
MAX_EXPORT_BATCH = 2**14  # images in a batch with --dynamic
CALIBRATION_IMAGES = 128  # of the training split, with --int8

Runner = Callable[[Tensor], Sequence[Tensor]]


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

    @property
    def channels(self) -> int:
        return int(self.model.get("ch", 3))

    def text(self) -> str:
        """Return the metadata as JSON with sorted keys; `shape`, `stride` and `names` are for YOLOv5's programs."""
        content = {"format": EXPORT_FORMAT, **asdict(self), "shape": [self.batch, self.channels, *self.imgsz]}
        return json.dumps(content, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> ExportMetadata:
        """Parse `text`'s result. Raises ValueError, TypeError, KeyError or AttributeError for any other text."""
        content = json.loads(text)
        if content.pop("format", None) != EXPORT_FORMAT:
            raise ValueError("another format")
        content.pop("shape", None)
        names, (height, width) = content["names"], content["imgsz"]
        values = {"names": {int(k): str(name) for k, name in names.items()}, "imgsz": (int(height), int(width))}
        return cls(**{**content, **values})


# Running


def read_model(path: Path) -> Weights:
    """Read a weight file, or an exported file into a `program` without tensors. Raises `UserError`."""
    if not path.name.endswith(EXPORTED_SUFFIXES):
        return read_weights(path)
    program = read_exported(path)
    file = program.metadata
    origin = Origin(file.licence, file.origin)
    return Weights({}, file.model, file.names, file.task, file.settings, "exported", program, file, origin)


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
        file, (height, width) = self.metadata, images.shape[2:]
        batch, inputs = len(images), images.half() if file.half else images.float()
        if not file.dynamic:
            if (height, width) != file.imgsz:
                sides = " ".join(map(str, file.imgsz))
                raise UserError(
                    f"{self.name} takes images of {sides} (height, width), not {height} {width}; export it with "
                    f"--dynamic, or for val.py with a square --imgsz; detect.py takes --imgsz {sides}"
                )
            batch = file.batch
            inputs = torch.cat((inputs, inputs.new_zeros(-len(images) % batch, *images.shape[1:])))
        with torch.autocast(images.device.type, enabled=False):
            results = [self._run(chunk.contiguous()) for chunk in inputs.split(batch)]
        outputs = tuple(torch.cat(chunks)[: len(images)].to(images.device) for chunks in zip(*results, strict=True))
        return outputs[0] if len(outputs) == 1 else outputs


def read_exported(path: Path) -> Exported:
    """Read an exported file. Raises `UserError` if it is damaged or not export.py's, or if its runtime is missing."""
    (read,) = (form.read for form in FORMATS.values() if form.read and path.name.endswith(form.suffix))
    try:
        text, run = read(path)
    except ImportError as error:
        raise UserError(
            f"{path.name} needs {error.name}, which is not installed; pip install -r requirements-export.txt"
        ) from None
    except Exception as error:  # each runtime has its own
        raise UserError(f"{path} cannot be read ({first_line(error)}); export it again with export.py") from error
    try:
        return Exported(ExportMetadata.parse(text), run, path.name)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} lacks export.py's metadata, or has that of another version ({error}); export it again from its .pt"
        ) from None


# One reader per format: each returns the metadata's text ('' if there is none) and the runner.


def _numpy_runner(run: Callable[[Any], Iterable[Any]]) -> Runner:
    return lambda images: [torch.from_numpy(output) for output in run(images.cpu().numpy())]


def _read_torchscript(path: Path) -> tuple[str, Runner]:
    import torchvision.ops  # noqa: F401  # registers torchvision's operators, such as suppression

    extra: dict[str, Any] = {TORCHSCRIPT_FILE: b""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore the advice to use torch.export instead
        module = torch.jit.load(io.BytesIO(read_regular(path)), map_location="cpu", _extra_files=extra)
    text = bytes(extra[TORCHSCRIPT_FILE]).decode()
    device = json.loads(text or "{}").get("device", "cpu")  # constants stay on the device that exported the file
    module.to(torch.empty(0, device=device).device)  # raises without such a device
    return text, lambda images: tree_leaves(module(images.to(device)))


def _read_onnx(path: Path) -> tuple[str, Runner]:
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3  # errors
    available = onnxruntime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in available]
    session = onnxruntime.InferenceSession(read_regular(path), settings, providers=providers)
    (source,) = session.get_inputs()
    text = session.get_modelmeta().custom_metadata_map.get(ONNX_METADATA_KEY, "")
    return text, _numpy_runner(lambda images: session.run(None, {source.name: images}))


def _read_openvino(path: Path) -> tuple[str, Runner]:
    import openvino

    (file,) = path.glob("*.xml")
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    model = openvino.Core().compile_model(str(file), "CPU", settings)
    run = _numpy_runner(lambda images: (output.copy() for output in model(images).values()))
    return (path / FOLDER_FILE).read_text(encoding="utf-8"), run


def _read_ncnn(path: Path) -> tuple[str, Runner]:
    import ncnn
    import numpy as np

    network = ncnn.Net()
    network.opt.num_threads = torch.get_num_threads()
    network.opt.use_fp16_packed = network.opt.use_fp16_storage = network.opt.use_fp16_arithmetic = False
    if network.load_param(str(path / "model.ncnn.param")) or network.load_model(str(path / "model.ncnn.bin")):
        raise ValueError("incomplete")

    def run(images: Any) -> list[Any]:
        with network.create_extractor() as extractor:
            extractor.input("in0", ncnn.Mat(images[0]).clone())
            return [np.array(extractor.extract(name)[1])[None] for name in sorted(network.output_names())]

    return (path / FOLDER_FILE).read_text(encoding="utf-8"), _numpy_runner(run)


def _read_tflite(path: Path) -> tuple[str, Runner]:
    from ai_edge_litert.interpreter import Interpreter

    content = read_regular(path)
    text = zipfile.ZipFile(io.BytesIO(content)).read(FOLDER_FILE).decode()
    interpreter = Interpreter(model_content=content, num_threads=torch.get_num_threads())
    signature = interpreter.get_signature_runner()
    (source,) = signature.get_input_details()
    return text, _numpy_runner(lambda images: (output for _, output in sorted(signature(**{source: images}).items())))


# Writing


@dataclass(frozen=True)
class ExportJob:
    """A model to export, in evaluation mode on its device, and the metadata of its files."""

    model: nn.Module
    metadata: ExportMetadata
    opset: int = ONNX_OPSET
    verbose: bool = False
    state: Mapping[str, Tensor] = field(default_factory=dict)  # the weight file's, for formats that store weights
    calibration: Callable[[], Iterable[Tensor]] | None = None  # returns batches of images, for files in int8

    @cached_property
    def example(self) -> Tensor:
        """Images of the requested size. At least two if dynamic: torch.export makes sizes of 1 static."""
        metadata = self.metadata
        count = max(metadata.batch, 2) if metadata.dynamic else metadata.batch
        dtype = torch.half if metadata.half else torch.float
        return torch.zeros(count, metadata.channels, *metadata.imgsz, device=metadata.device, dtype=dtype)

    @cached_property
    def onnx(self) -> bytes:
        """The bytes of an ONNX file: the same for the same model."""
        import onnx
        import onnxscript  # noqa: F401  # imported here so that the error names the missing package

        metadata = self.metadata
        with torch.no_grad():
            outputs = tree_leaves(self.model(self.example))
        names = list((SUPPRESSED_NAMES if metadata.suppression else OUTPUT_NAMES)[: len(outputs)])
        settings: dict[str, Any] = {"input_names": [INPUT_NAME], "output_names": names}
        settings |= {"opset_version": self.opset, "verbose": self.verbose}
        if self.opset < ONNX_OPSET:
            content, axes = io.BytesIO(), {INPUT_NAME: DYNAMIC_AXES} if metadata.dynamic else None
            settings |= {"dynamo": False, "dynamic_axes": axes}
            torch.onnx.export(self.model, (self.example,), content, **settings)  # type: ignore[arg-type]
            model = onnx.load_from_string(content.getvalue())
        else:
            program = torch.onnx.export(self.program(), (), dynamo=True, external_data=False, **settings)
            assert program is not None
            model = program.model_proto
        if (written := model.opset_import[0].version) != self.opset:
            raise UserError(f"--opset {self.opset} is not possible for this model; leave it out, or give {written}")
        _tidy(model, metadata, outputs)
        properties = {ONNX_METADATA_KEY: metadata.text(), "names": str(metadata.names), "stride": str(metadata.stride)}
        onnx.helper.set_model_props(model, properties)
        return model.SerializeToString(deterministic=True)

    def program(self) -> torch.export.ExportedProgram:
        """Return the model as a graph of torch's operators."""
        shapes, stride = None, self.metadata.stride
        if self.metadata.dynamic:
            # At least two strides: torch.export makes sizes of 1 static, and refuses named ones if a map shrinks to 1.
            dim, most = torch.export.Dim, MAX_EXPORT_SIDE_PIXELS // stride
            sides = [dim(f"{name}_in_strides", min=2, max=most) for name in ("height", "width")]
            height, width = (stride * side if stride > 1 else dim.DYNAMIC(min=2, max=most) for side in sides)
            shapes = ({0: dim("batch", min=1, max=MAX_EXPORT_BATCH), 2: height, 3: width},)
        program = torch.export.export(self.model, (self.example,), dynamic_shapes=shapes, strict=False)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # it names folders of this machine
        return program


def _tidy(model: Any, metadata: ExportMetadata, outputs: Sequence[Tensor]) -> None:
    """Remove metadata that depends on this machine, name the dynamic sizes, and fill in the outputs' static ones."""
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


def export_path(name: str, stem: Path) -> Path:
    """Return the path of a format, a key of `FORMATS`. Raises `UserError` if it exists and is not an export of ours."""
    path = stem.parent / (stem.name + FORMATS[name].suffix)
    marked = path / (COREML_FILE if name == "coreml" else FOLDER_FILE) if path.is_dir() else path
    if os.path.lexists(path) and not (marked.is_file() and b"lockstep-" in marked.read_bytes()):
        raise UserError(f"{path} exists, and export.py has not written it; rename it, or remove it")
    return path


def write(job: ExportJob, name: str, stem: Path) -> Path:
    """Write a format to its `export_path`, completely or not at all, and return the path. Raises `UserError`."""
    path = export_path(name, stem)
    try:
        with nullcontext() if job.verbose else _suppressed_output():
            FORMATS[name].write(job, path)
    except UserError:
        raise
    except ImportError as error:
        fault = f"--include {name} needs {error.name}, which is not installed"
        mobile = "--no-deps -r requirements-mobile.txt, and " * (name == "tflite")
        raise UserError(f"{fault}; pip install {mobile}-r requirements-export.txt") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; check the folder and the disk") from None
    except Exception as error:  # each exporter raises its own classes
        reason = f"{name} does not support this model ({first_line(error, 200)})"
        raise UserError(f"{reason}; leave out --dynamic and --opset, or choose another format") from error
    return path


@contextmanager
def _suppressed_output() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _write_torchscript(job: ExportJob, path: Path) -> None:
    with torch.no_grad():
        traced = torch.jit.trace(job.model, job.example, check_trace=False)
    metadata, content = replace(job.metadata, dynamic=_takes_any_size(traced, job)), io.BytesIO()
    torch.jit.save(traced, content, _extra_files={TORCHSCRIPT_FILE: metadata.text()})
    write_bytes(path, content.getvalue())


@torch.no_grad()
def _takes_any_size(traced: torch.jit.ScriptModule, job: ExportJob) -> bool:
    """Return whether a trace supports other image sizes and batch sizes: tracing may turn sizes into constants."""
    generator = torch.Generator(job.example.device).manual_seed(0)
    (count, channels, height, width), stride = job.example.shape, job.metadata.stride
    shape = (count + 1, channels, height + stride, width + 2 * stride)
    images = torch.rand(shape, generator=generator, device=job.example.device).to(job.example.dtype)
    try:
        return all(map(torch.equal, tree_leaves(traced(images)), tree_leaves(job.model(images))))
    except Exception:  # any layer may fail at a size that it was not traced with
        return False


def _float_nodes(nodes: Sequence[Any]) -> list[str]:
    """Return the names of the nodes, of all in ONNX's form, that ONNX and TFLite files have in float: the last
    convolutions, and all that follows them, because one scale does not suit pixels and confidences: mAP would be 0."""
    names, convolved = [], set[Any]()  # tensors that a convolution depends on
    for node in reversed(nodes):
        if is_last := convolved.isdisjoint(node.output):
            names.append(node.name)
        if node.op_type == "Conv" or not is_last:
            convolved.update(node.input)
    return names


def _write_onnx(job: ExportJob, path: Path) -> None:
    content = job.onnx
    if job.calibration:
        import onnx
        from onnxruntime.quantization import quantize_static

        feeds = ({INPUT_NAME: batch.numpy()} for batch in job.calibration())
        reader, model = SimpleNamespace(get_next=lambda: next(feeds, None)), onnx.load_from_string(content)
        with TemporaryDirectory() as folder:
            # The mean of the images' ranges, as NNCF's, is robust against outliers; TensorRT reads symmetric ones only.
            extra = {"CalibMovingAverage": True, "ActivationSymmetric": True}
            settings = {"nodes_to_exclude": _float_nodes(model.graph.node), "per_channel": True, "extra_options": extra}
            quantize_static(model, f"{folder}/model.onnx", reader, **settings)
            content = onnx.load(f"{folder}/model.onnx").SerializeToString(deterministic=True)
    write_bytes(path, content)


def _write_openvino(job: ExportJob, path: Path) -> None:
    import openvino

    model = openvino.convert_model(io.BytesIO(job.onnx))
    if job.calibration:
        import nncf

        images = nncf.Dataset([batch.numpy() for batch in job.calibration()])
        model = nncf.quantize(model, images, subset_size=CALIBRATION_IMAGES)
    with TemporaryDirectory() as folder:
        file = Path(folder, f"{path.name.removesuffix(FORMATS['openvino'].suffix)}.xml")
        openvino.save_model(model, str(file), compress_to_fp16=job.metadata.half)
        _write_folder(path, [file, file.with_suffix(".bin")], job.metadata)


def _write_folder(path: Path, files: Iterable[Path], metadata: ExportMetadata) -> None:
    """Write copies of files, and the metadata, into a folder: a new one, or an earlier export's, maybe with others."""
    for file in files:
        write_bytes(path / file.name, file.read_bytes())
    write_bytes(path / FOLDER_FILE, metadata.text().encode())


def _write_ncnn(job: ExportJob, path: Path) -> None:
    import pnnx

    job = replace(job, metadata=replace(job.metadata, batch=1))  # ncnn has no batches
    shape = ",".join(map(str, job.example.shape))
    with TemporaryDirectory() as folder:
        torch.jit.save(torch.jit.trace(job.program().module(), job.example, check_trace=False), f"{folder}/model.pt")
        command = [pnnx.EXEC_PATH, "model.pt", f"inputshape=[{shape}]f32", "fp16=0"]
        subprocess.run(command, cwd=folder, check=True, capture_output=not job.verbose)
        _write_folder(path, [Path(folder, f"model.ncnn.{part}") for part in ("param", "bin")], job.metadata)


def _write_tflite(job: ExportJob, path: Path) -> None:
    import litert_torch

    with TemporaryDirectory() as folder:
        file = Path(folder, "model.tflite")
        litert_torch.convert(job.model, (job.example,)).export(str(file))
        if job.calibration:
            file.write_bytes(_quantized_tflite(file, job.calibration()))
        with zipfile.ZipFile(file, "a") as archive:  # as TFLite's own metadata: a ZIP archive after the model
            archive.writestr(zipfile.ZipInfo(FOLDER_FILE), job.metadata.text())
        write_bytes(path, file.read_bytes())


def _quantized_tflite(file: Path, batches: Iterable[Tensor]) -> bytes:
    from ai_edge_quantizer.qtyping import BuiltinOperator, TFLOperationName
    from ai_edge_quantizer.quantizer import Quantizer
    from ai_edge_quantizer.utils.tfl_flatbuffer_utils import get_op_scope, read_model

    model, quantizer, every = read_model(file), Quantizer(file), TFLOperationName.ALL_SUPPORTED
    graph, kinds = model.subgraphs[0], {BuiltinOperator.CONV_2D: "Conv", BuiltinOperator.DEPTHWISE_CONV_2D: "Conv"}
    nodes = []
    for op in graph.operators:
        kind, scope = kinds.get(model.operatorCodes[op.opcodeIndex].builtinCode), get_op_scope(op, graph.tensors)
        nodes.append(SimpleNamespace(name=scope, op_type=kind, input=op.inputs, output=op.outputs))
    quantizer.add_static_config(".*", every, 8, 8)
    floats = [(".*", TFLOperationName.INPUT), (".*", TFLOperationName.OUTPUT)]
    for scope, kind in floats + [(f"^{re.escape(name)}$", every) for name in _float_nodes(nodes)]:
        quantizer.update_quantization_recipe(scope, kind, algorithm_key="no_quantize")
    ranges = quantizer.calibrate({"serving_default": [{"args_0": batch.numpy()} for batch in batches]})
    return bytes(quantizer.quantize(ranges).quantized_model)


def _write_coreml(job: ExportJob, path: Path) -> None:
    import coremltools

    precision = coremltools.precision.FLOAT32
    program = job.program().run_decompositions({})
    names = SUPPRESSED_NAMES if job.metadata.suppression else OUTPUT_NAMES
    outputs = [*map(coremltools.TensorType, names[: len(program.graph_signature.user_outputs)])]
    model = coremltools.convert(program, outputs=outputs, compute_precision=precision, skip_model_load=True)
    model.user_defined_metadata[ONNX_METADATA_KEY] = job.metadata.text()
    with TemporaryDirectory(dir=path.parent) as folder:
        model.save(f"{folder}/{path.name}")
        shutil.rmtree(path, ignore_errors=True)
        Path(folder, path.name).rename(path)


def _write_safetensors(job: ExportJob, path: Path) -> None:
    keys = ("task", "model", "names", "settings", "licence", "origin")
    content = {"format": FORMAT, **{key: getattr(job.metadata, key) for key in keys}, "state": job.state}
    write_bytes(path, as_safetensors(content))


class Format(NamedTuple):
    """A format: what the names of its files end with, and how they are written and, unless others run them, read."""

    suffix: str
    write: Callable[[ExportJob, Path], None]
    read: Callable[[Path], tuple[str, Runner]] | None = None


FORMATS = {
    "torchscript": Format(".torchscript", _write_torchscript, _read_torchscript),
    "onnx": Format(".onnx", _write_onnx, _read_onnx),
    "openvino": Format("_openvino_model", _write_openvino, _read_openvino),
    "ncnn": Format("_ncnn_model", _write_ncnn, _read_ncnn),
    "tflite": Format(".tflite", _write_tflite, _read_tflite),
    "coreml": Format(".mlpackage", _write_coreml),  # run by a Mac only
    "safetensors": Format(SAFETENSORS_SUFFIX, _write_safetensors),  # read like weights, not run
}
