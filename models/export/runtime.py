"""Exported files: their metadata, and running them as a model. Called by models/ensemble.py.

The reader is chosen by the file's name. ONNX and OpenVINO files hold arithmetic. A `.torchscript` and a `.pt2` hold
programs of torch's operators; no pickle of classes is loaded from them, nor an expression that torch would pass to
Python's `eval`.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.tasks.contract import Model
from models.weights.reader import EXPORTED_SUFFIXES, Weights, read_weights
from utils.errors import UserError, first_line

EXPORT_FORMAT = "lockstep-export-1"
ONNX_METADATA_KEY = "lockstep"  # beside it are YOLOv5's `stride` and `names`
TORCHSCRIPT_FILE, PROGRAM_FILE, FOLDER_FILE = "config.txt", "lockstep.json", "metadata.yaml"
SUFFIX_OF_FORMAT = dict(zip(("onnx", "torchscript", "exported", "openvino"), EXPORTED_SUFFIXES, strict=True))
# What sizes in a .pt2 may consist of: sympy evaluates their text.
SIZE_FUNCTIONS = (
    *("Symbol", "Integer", "Rational", "Float", "Add", "Mul", "Pow", "Abs", "Max", "Min", "Mod", "PythonMod"),
    *("FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "Identity", "floor", "ceiling", "Where", "And", "Or", "Not"),
    *("Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan", "Eq", "Ne"),
)
SIZE_SYMBOL = re.compile(r"[a-z]{1,3}\d+")  # an unknown size
SIZE_SYMBOL_PROPERTIES = ("positive", "integer", "nonnegative", "real", "evaluate")

Runner = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class ExportMetadata:
    """The metadata of an exported file. model: the YAML of its network."""

    task: str
    names: dict[int, str]
    stride: int
    model: dict[str, Any]
    imgsz: tuple[int, int]  # height and width, pixels
    batch: int
    dynamic: bool  # any number of images, with sides of any whole strides
    half: bool  # takes images in fp16
    device: str  # that torch's own formats run on: cpu or cuda
    suppression: dict[str, Any] | None  # settings of the suppression inside
    settings: dict[str, Any]  # of the run that trained it

    def text(self) -> str:
        """Return JSON, the same for the same content; `shape`, `stride` and `names` are for YOLOv5's programs."""
        content = {"format": EXPORT_FORMAT, **asdict(self), "shape": [self.batch, 3, *self.imgsz]}
        return json.dumps(content, sort_keys=True)


def read_metadata(text: str) -> ExportMetadata:
    """Read a file's JSON. Raises ValueError, TypeError, KeyError or AttributeError if export.py did not write it."""
    content = json.loads(text)
    version = content.pop("format", None)
    if version != EXPORT_FORMAT:
        raise ValueError(f"its format is {version}")
    content.pop("shape", None)
    content["names"] = {int(number): str(name) for number, name in content["names"].items()}
    height, width = content["imgsz"]
    return ExportMetadata(**{**content, "imgsz": (int(height), int(width))})


def is_exported(path: Path) -> bool:
    """Return whether the name is that of an exported file, or of a folder of OpenVINO's."""
    return path.name.endswith(EXPORTED_SUFFIXES)


def read_model(path: Path) -> Weights:
    """Read a weight file or an exported one, which has no tensors but a `program`. Raises `UserError`."""
    if not is_exported(path):
        return read_weights(path)
    exported = read_exported(path)
    metadata = exported.metadata
    return Weights({}, metadata.model, metadata.names, metadata.task, metadata.settings, "exported", exported)


def whole_strides(side: int, stride: int) -> int:
    """Return `side` in pixels, rounded up to whole strides: at least two, unless the stride is 1."""
    return max(math.ceil(side / stride), 2 if stride > 1 else 1) * stride


class Exported(Model):
    """A file of export.py as a model: maps images to a tensor, or several.

    Its weights are no parameters: precision and device are the file's, whatever `half` and `to` ask for.
    """

    def __init__(self, metadata: ExportMetadata, run: Runner, name: str) -> None:
        super().__init__()
        self.metadata, self.name, self._run = metadata, name, run
        self.yaml, self.names, self.stride = metadata.model, metadata.names, metadata.stride
        self.imgsz = max(metadata.imgsz)

    def resize(self, imgsz: int) -> None:
        """Set `imgsz` to a size in whole strides; a file for one size keeps its own."""
        if self.metadata.dynamic:
            self.imgsz = whole_strides(imgsz, self.stride)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Map (b, 3, h, w) to the file's outputs, on the device of the images. Raises `UserError` for a wrong size.

        A file for batches of one size runs once for each such batch, the last one filled up.
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
    """Read the model in an exported file. Raises `UserError` if it is damaged, another program's, or its runtime is not
    installed."""
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
            f"{path} has no metadata of export.py; export it again from its .pt: it says what classes it has"
        )
    try:
        metadata = read_metadata(text)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{path} has metadata of another program or version ({error}); export it again with export.py"
        ) from None
    return Exported(metadata, start(metadata), path.name)


# One reader per format: it returns the text of the metadata, '' if there is none, and a function that makes the runner.


def _torchscript(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    import torchvision.ops  # noqa: F401  # registers its operators: suppression is one

    extra = {TORCHSCRIPT_FILE: ""}
    content = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.export is to be preferred
        module = torch.jit.load(io.BytesIO(content), map_location="cpu", _extra_files=extra)
    metadata_text: Any = extra[TORCHSCRIPT_FILE]
    text = metadata_text.decode("utf-8") if isinstance(metadata_text, bytes) else metadata_text

    def start(metadata: ExportMetadata) -> Runner:
        device = _device(metadata, path)
        return _torch_runner(module.to(device), device)

    return text, start


def _program(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
    import torchvision.ops  # noqa: F401

    extra = {PROGRAM_FILE: ""}
    content = path.read_bytes()
    _refuse_code(content, path)
    with _no_pickled_classes():
        program = torch.export.load(io.BytesIO(content), extra_files=extra)

    def start(metadata: ExportMetadata) -> Runner:
        # Its checks of inputs are Python that torch generates from the file; `Exported.forward` has checked the sizes.
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
        raise UserError(f"{path} holds {len(files)} .xml files, and must hold one; export it again with export.py")
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
    """Return the device that torch's own formats run on: their constants are on the one that exported them."""
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
    """Make torch.export.load read pickles of tensors only: it would try any other pickle next."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _refuse_code(content: bytes, path: Path) -> None:
    """Raise `UserError` if a .pt2 holds text that torch would run as Python: torch generates code from names, and sympy
    evaluates the expressions of sizes."""
    for record in _descriptions(content):
        for key, text in _texts(json.loads(record), ""):
            check = {"expr_str": _is_arithmetic, "name": _is_name, "as_name": _is_name, "target": _is_operator}.get(key)
            if check and not check(text):
                raise UserError(
                    f"{path} was refused, and nothing in it was run: {text[:80]!r} has no business in a model; "
                    "use a file from a source that you trust"
                )


def _descriptions(content: bytes) -> Iterator[bytes]:
    """Yield the JSON in a .pt2, except for files that its writer added, as both readers of torch.export.load see it: up
    to torch 2.7 it was a plain zip archive."""
    with suppress(RuntimeError):
        archive = torch._C.PyTorchFileReader(io.BytesIO(content))
        yield from (archive.get_record(name) for name in archive.get_all_records() if _is_description(name))
    with zipfile.ZipFile(io.BytesIO(content)) as plain:
        yield from (plain.read(one) for one in plain.infolist() if _is_description(one.filename))


def _is_description(name: str) -> bool:
    added = Path(name).parent.name in ("extra", "extra_files") and "models/" not in name  # there it is a model
    return name.endswith(".json") and not added


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the texts in JSON, each with its key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner, key)
    elif isinstance(value, str):
        yield key, value


def _is_name(text: str) -> bool:
    return text == "" or text.isidentifier()


def _is_operator(text: str) -> bool:
    match = re.fullmatch(r"((torch\.ops|_operator|math)(\.\w+)+|torch\.sym_\w+)", text)
    return match is not None and "__" not in text


def _is_arithmetic(text: str) -> bool:
    """Return whether this is an expression of numbers and sizes, with calls of known functions only."""
    try:
        tree = ast.parse(text, mode="eval")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return all(_is_plain(node) for node in ast.walk(tree))


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in SIZE_FUNCTIONS or SIZE_SYMBOL.fullmatch(node.id) is not None
    if isinstance(node, ast.keyword):
        return node.arg in SIZE_SYMBOL_PROPERTIES
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) or SIZE_SYMBOL.fullmatch(node.value) is not None
    allowed = (
        ast.Expression,
        ast.Call,
        ast.BinOp,
        ast.UnaryOp,
        ast.Compare,
        ast.operator,
        ast.unaryop,
        ast.cmpop,
        ast.Load,
    )
    return isinstance(node, allowed)
