"""Exported files: their metadata, and running them as a model. Called by models/ensemble.py.

ONNX and OpenVINO files hold arithmetic. A `.torchscript` and a `.pt2` hold programs of torch's operators. A `.pt2` can
also hold Python, which torch.export.load would run: `_refuse_code` refuses such files.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.image_size import sides_of, whole_strides
from models.tasks.contract import Model
from models.weights.reader import EXPORTED_SUFFIXES, Weights, read_weights
from utils.checkpoint.weight_files import SAFETENSORS_SUFFIX
from utils.errors import UserError, first_line

EXPORT_FORMAT = "lockstep-export-1"
ONNX_METADATA_KEY = "lockstep"  # beside it are YOLOv5's `stride` and `names`
TORCHSCRIPT_FILE, PROGRAM_FILE, FOLDER_FILE = "config.txt", "lockstep.json", "metadata.yaml"
SUFFIX_OF_FORMAT = {
    **dict(zip(("onnx", "torchscript", "exported", "openvino"), EXPORTED_SUFFIXES, strict=True)),
    "safetensors": SAFETENSORS_SUFFIX,  # read like weights, not run
}
# torch.export.load evaluates the sizes in a .pt2 with sympy and generates code from its names. The strings in its JSON
# must match the pattern of their key, or `NAME_PATTERN` if the key has none.
SIZE_WORDS = (
    *("Symbol", "Integer", "Rational", "Float", "Add", "Mul", "Pow", "Abs", "Max", "Min", "Mod", "PythonMod"),
    *("FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "Identity", "floor", "ceiling", "Where", "And", "Or", "Not"),
    *("Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan", "Eq", "Ne"),
    *("positive", "integer", "nonnegative", "real", "evaluate", "True", "False"),
)
NAME_PATTERN = r"[\w.+-]*"
OPERATOR_PATTERN = r"(?!.*__)(torch\.ops\.\w+(\.\w+)+|(_operator|math)\.\w+|torch\.sym_\w+)"
TEXT_PATTERNS = {
    "expr_str": rf"(\b({'|'.join(SIZE_WORDS)}|[a-z]{{1,3}}\d+|\d+)\b|[ ()+\-*/%<>=!&|~,.'])*",
    "target": OPERATOR_PATTERN,
    "as_operator": OPERATOR_PATTERN,
    "path_name": r"(weight|tensor)_\d+",  # torch unpickles files of other names
}
NOT_EVALUATED = ("metadata", "as_string", "as_strings", "in_spec", "out_spec", "guards_code")

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
    dynamic: bool  # any number of images, with sides of any whole strides
    half: bool  # takes images in fp16
    device: str  # of torch's own formats: cpu or cuda
    suppression: dict[str, Any] | None  # thresholds and limits, if the file suppresses overlapping boxes
    settings: dict[str, Any]  # of the run that trained it

    def overrides(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that count instead of those of flags, by the flags' names.

        flags: given ones, by name.
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
        """Return JSON with sorted keys; `shape`, `stride` and `names` are for YOLOv5's programs."""
        content = {"format": EXPORT_FORMAT, **asdict(self), "shape": [self.batch, 3, *self.imgsz]}
        return json.dumps(content, sort_keys=True)


def read_metadata(text: str) -> ExportMetadata:
    """Parse JSON. Raises ValueError, TypeError, KeyError or AttributeError if export.py did not write it."""
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
    return Weights({}, metadata.model, metadata.names, metadata.task, metadata.settings, "exported", exported)


class Exported(Model):
    """A file of export.py as a model, which maps images to one or more tensors.

    It has no parameters: precision and device are those of the file and do not follow `half` and `to`.
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
        """Map (b, 3, h, w) to the outputs, on the device of the images. Raises `UserError` for a wrong size.

        A file for one batch size runs once per such batch; the last one is padded with zeros.
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
    """Read an exported file. Raises `UserError` if it is damaged, not from export.py, or its runtime is missing."""
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
            f"{path} has no metadata of export.py, such as class names; export it again from its .pt with export.py"
        )
    try:
        metadata = read_metadata(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} has metadata of another program or version ({error}); export it again with export.py"
        ) from None
    return Exported(metadata, start(metadata), path.name)


# A reader per format returns the text of the metadata, '' if there is none, and a function that makes the runner.


def _torchscript(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    import torchvision.ops  # noqa: F401  # registers its operators: suppression is one

    extra: dict[str, Any] = {TORCHSCRIPT_FILE: ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.export is to be preferred
        module = torch.jit.load(io.BytesIO(path.read_bytes()), map_location="cpu", _extra_files=extra)
    text = extra[TORCHSCRIPT_FILE]  # bytes if the file has it

    def start(metadata: ExportMetadata) -> Runner:
        device = _device(metadata, path)
        return _torch_runner(module.to(device), device)

    return text.decode("utf-8") if text else "", start


def _program(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    import torchvision.ops  # noqa: F401

    extra = {PROGRAM_FILE: ""}
    content = path.read_bytes()
    _refuse_code(content, path)
    with _no_pickled_classes():
        program = torch.export.load(io.BytesIO(content), extra_files=extra)

    def start(metadata: ExportMetadata) -> Runner:
        # The guards on inputs would be Python from the file; `Exported.forward` has checked the sizes.
        unchecked = {"check_guards": False} if "check_guards" in inspect.signature(program.module).parameters else {}
        return _torch_runner(program.module(**unchecked), _device(metadata, path))

    return extra[PROGRAM_FILE], start


def _onnx(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    runtime = _import_runtime("onnxruntime", path)
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3  # errors
    available = runtime.get_available_providers()
    providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in available]
    session = runtime.InferenceSession(path.read_bytes(), settings, providers=providers)
    (source,) = session.get_inputs()

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {source.name: images.cpu().numpy()})]

    return session.get_modelmeta().custom_metadata_map.get(ONNX_METADATA_KEY, ""), lambda metadata: run


def _openvino(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
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
    SUFFIX_OF_FORMAT["torchscript"]: _torchscript,
    SUFFIX_OF_FORMAT["exported"]: _program,
    SUFFIX_OF_FORMAT["onnx"]: _onnx,
    SUFFIX_OF_FORMAT["openvino"]: _openvino,
}


def _import_runtime(name: str, path: Path) -> Any:
    """Import a runtime. Raises `UserError` if it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        raise UserError(
            f"{path.name} is run by {name}, which is not installed; pip install -r requirements-export.txt"
        ) from None


def _device(metadata: ExportMetadata, path: Path) -> torch.device:
    """Return the device of a file in a format of torch: its constants are on the device that exported it."""
    if metadata.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{path.name} was exported for CUDA, which this machine does not have; export it with --device cpu"
        )
    return torch.device(metadata.device)


def _torch_runner(module: Callable[..., Any], device: torch.device) -> Runner:
    def run(images: Tensor) -> Sequence[Tensor]:
        outputs = module(images.to(device))
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    return run


@contextmanager
def _no_pickled_classes() -> Iterator[None]:
    """Restrict torch.export.load to pickles of tensors: it would load any other pickle next."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _refuse_code(content: bytes, path: Path) -> None:
    """Raise `UserError` if a .pt2 holds text that torch would run as Python, or names a pickle of classes."""
    for record in _records(content):
        for key, text in _texts(_json(record), ""):
            if not re.fullmatch(TEXT_PATTERNS.get(key, NAME_PATTERN), text):
                raise UserError(
                    f"{path} was refused, and nothing in it was run: a model needs no {text[:80]!r}; "
                    "use a file from a source that you trust"
                )


def _records(content: bytes) -> Iterator[bytes]:
    """Yield the files in a .pt2, except for our metadata, as both readers of torch.export.load find them."""
    metadata = f"extra/{PROGRAM_FILE}"
    with suppress(RuntimeError):
        archive = torch._C.PyTorchFileReader(io.BytesIO(content))
        yield from (archive.get_record(name) for name in archive.get_all_records() if name != metadata)
    with zipfile.ZipFile(io.BytesIO(content)) as plain:  # for files of torch up to 2.7
        names = (metadata, f"extra_files/{PROGRAM_FILE}")
        yield from (plain.read(file) for file in plain.infolist() if not file.filename.endswith(names))


def _json(record: bytes) -> Any:
    """Return the JSON in a record, whatever the name of its file; None if it holds something else."""
    try:
        return json.loads(record) if re.match(rb"\s*{", record) else None
    except ValueError:
        return None


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the texts in JSON that torch may evaluate, each with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in NOT_EVALUATED:
                yield from _texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        yield key, value
