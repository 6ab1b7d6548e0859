"""Exported files: what they say of themselves, and running them as a model.

What is read is found by the file's name. ONNX and OpenVINO files hold arithmetic. A `.torchscript` and a `.pt2` hold
programs of torch's operators; no pickle of classes is loaded from them, nor an expression that torch would hand to
Python's `eval`.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
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
from torch import Tensor, nn

from models.weights.reader import EXPORTED, Weights, read_weights
from utils.errors import UserError

FORMAT = "lockstep-export-1"
KEY = "lockstep"  # where the metadata are in an ONNX file; beside it are YOLOv5's `stride` and `names`
TORCHSCRIPT_FILE, PROGRAM_FILE, FOLDER_FILE = "config.txt", "lockstep.json", "metadata.yaml"
SUFFIXES = dict(zip(("onnx", "torchscript", "exported", "openvino"), EXPORTED, strict=True))
# What the sizes in a .pt2 may be made of: sympy evaluates their text.
FUNCTIONS = (
    *("Symbol", "Integer", "Rational", "Float", "Add", "Mul", "Pow", "Abs", "Max", "Min", "Mod", "PythonMod"),
    *("FloorDiv", "CleanDiv", "CeilDiv", "IntTrueDiv", "Identity", "floor", "ceiling", "Where", "And", "Or", "Not"),
    *("Equality", "Unequality", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan", "Eq", "Ne"),
)
SIZE = re.compile(r"[a-z]{1,3}\d+")  # a size that is not known
PROPERTIES = ("positive", "integer", "nonnegative", "real", "evaluate")

Runner = Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class Metadata:
    """What an exported file says of itself. `model` is the YAML of its network."""

    task: str
    names: dict[int, str]
    stride: int
    model: dict[str, Any]
    imgsz: tuple[int, int]  # height and width, pixels
    batch: int
    dynamic: bool  # any number of images, of any whole strides
    half: bool  # takes images in fp16
    device: str  # on which torch's own formats run: cpu or cuda
    suppression: dict[str, Any] | None  # of the suppression inside, its settings
    settings: dict[str, Any]  # of the run that trained it

    def text(self) -> str:
        """As JSON, in which YOLOv5's programs find `shape`, `stride` and `names`; the same for the same content."""
        content = {"format": FORMAT, **asdict(self), "shape": [self.batch, 3, *self.imgsz]}
        return json.dumps(content, sort_keys=True)


def read_metadata(text: str) -> Metadata:
    """The metadata in a file's JSON. ValueError and others where it is none of ours."""
    content = json.loads(text)
    known = content.pop("format", None)
    if known != FORMAT:
        raise ValueError(f"its format is {known}")
    content.pop("shape", None)
    content["names"] = {int(number): str(name) for number, name in content["names"].items()}
    height, width = content["imgsz"]
    return Metadata(**{**content, "imgsz": (int(height), int(width))})


def is_exported(path: Path) -> bool:
    """Does the name say that this is an exported file, or a folder of OpenVINO's?"""
    return path.name.endswith(EXPORTED)


def read_model(path: Path) -> Weights:
    """`read_weights` for all that can be run: an exported file has no tensors, but a `program`. Raises `UserError`."""
    if not is_exported(path):
        return read_weights(path)
    exported = read_exported(path)
    told = exported.metadata
    return Weights({}, told.model, told.names, told.task, told.settings, "exported", exported)


class Exported(nn.Module):
    """A file of export.py as a model: images to what it makes of them, a tensor, or several.

    Its weights are no parameters: precision and device are the file's, whatever is asked of this module.
    """

    def __init__(self, metadata: Metadata, run: Runner, name: str) -> None:
        super().__init__()
        self.metadata, self.name, self._run = metadata, name, run

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """(b, 3, h, w) to the file's outputs, on the device of the images. Raises `UserError` for a wrong size.

        A file for batches of one size is given so many at a time, the last filled up.
        """
        told, size = self.metadata, tuple(images.shape[2:])
        if not told.dynamic and size != told.imgsz:
            raise UserError(
                f"{self.name} takes images of {told.imgsz[0]}x{told.imgsz[1]} (height x width), not {size[0]}x"
                f"{size[1]}; give --imgsz {told.imgsz[0]} {told.imgsz[1]}, or export it with --dynamic"
            )
        inputs = images.half() if told.half else images.float()
        with torch.autocast(images.device.type, enabled=False):
            chunks = [inputs] if told.dynamic else inputs.split(told.batch)
            parts = [self._once(chunk.contiguous()) for chunk in chunks]
        outputs = tuple(torch.cat(each).to(images.device) for each in zip(*parts, strict=True))
        return outputs[0] if len(outputs) == 1 else outputs

    def _once(self, images: Tensor) -> list[Tensor]:
        count, told = len(images), self.metadata
        if not told.dynamic and count < told.batch:
            images = torch.cat((images, images.new_zeros(told.batch - count, *images.shape[1:])))
        return [output[:count] for output in self._run(images)]


def read_exported(path: Path) -> Exported:
    """The model in an exported file. Raises `UserError` for a damaged one, one of another program, and where what runs
    it is not installed."""
    read = next(reader for ending, reader in READERS.items() if path.name.endswith(ending))
    if not path.exists():
        raise UserError(f"weights {path} do not exist; check the path")
    try:
        text, start = read(path)
    except UserError:
        raise
    except Exception as error:  # each runtime has its own
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:160]
        raise UserError(
            f"{path} cannot be read ({reason}); copy it again, or export it again with export.py"
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


# One reader per format: a file to the text of its metadata, '' where it has none, and what makes a runner.


def _torchscript(path: Path) -> tuple[str, Callable[[Metadata], Runner]]:
    import torchvision.ops  # noqa: F401  # its operators are known from then on: suppression is one

    extra = {TORCHSCRIPT_FILE: ""}
    content = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.export is to be preferred
        module = torch.jit.load(io.BytesIO(content), map_location="cpu", _extra_files=extra)
    found: Any = extra[TORCHSCRIPT_FILE]
    text = found.decode("utf-8") if isinstance(found, bytes) else found

    def start(metadata: Metadata) -> Runner:
        device = _device(metadata, path)
        return _of_torch(module.to(device), device)

    return text, start


def _program(path: Path) -> tuple[str, Callable[[Metadata], Runner]]:
    import torchvision.ops  # noqa: F401

    extra = {PROGRAM_FILE: ""}
    content = path.read_bytes()
    _refuse_code(content, path)
    with _no_pickled_classes():
        program = torch.export.load(io.BytesIO(content), extra_files=extra)

    def start(metadata: Metadata) -> Runner:
        # What it checks of its inputs is Python that torch makes of the file; here the sizes are checked before.
        unchecked = {"check_guards": False} if "check_guards" in inspect.signature(program.module).parameters else {}
        return _of_torch(program.module(**unchecked), _device(metadata, path))

    return extra[PROGRAM_FILE], start


def _onnx(path: Path) -> tuple[str, Callable[[Metadata], Runner]]:
    runtime = _imported("onnxruntime", path)
    settings = runtime.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    settings.log_severity_level = 3  # errors
    usable = runtime.get_available_providers()
    wanted = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in usable]
    session = runtime.InferenceSession(path.read_bytes(), settings, providers=wanted)
    (source,) = session.get_inputs()

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(output) for output in session.run(None, {source.name: images.cpu().numpy()})]

    return session.get_modelmeta().custom_metadata_map.get(KEY, ""), lambda metadata: run


def _openvino(path: Path) -> tuple[str, Callable[[Metadata], Runner]]:
    runtime = _imported("openvino", path)
    files = sorted(path.glob("*.xml"))
    if len(files) != 1:
        raise UserError(f"{path} holds {len(files)} .xml files, and must hold one; export it again with export.py")
    metadata = path / FOLDER_FILE
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": str(torch.get_num_threads())}
    model = runtime.Core().compile_model(str(files[0]), "CPU", settings)

    def run(images: Tensor) -> list[Tensor]:
        return [torch.from_numpy(output.copy()) for output in model(images.cpu().numpy()).values()]

    return metadata.read_text(encoding="utf-8") if metadata.is_file() else "", lambda told: run


READERS: dict[str, Callable[[Path], tuple[str, Callable[[Metadata], Runner]]]] = {
    SUFFIXES["torchscript"]: _torchscript,
    SUFFIXES["exported"]: _program,
    SUFFIXES["onnx"]: _onnx,
    SUFFIXES["openvino"]: _openvino,
}


def _imported(name: str, path: Path) -> Any:
    """A runtime. Raises `UserError` where it is not installed."""
    try:
        return __import__(name)
    except ImportError:
        raise UserError(
            f"{path.name} is run by {name}, which is not installed; pip install -r requirements-export.txt"
        ) from None


def _device(metadata: Metadata, path: Path) -> torch.device:
    """Where torch's own formats run: their constants are of the device that they were made on."""
    if metadata.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"{path.name} was exported for CUDA, which this machine does not have; export it with --device cpu"
        )
    return torch.device(metadata.device)


def _of_torch(module: Callable[..., Any], device: torch.device) -> Runner:
    def run(images: Tensor) -> Sequence[Tensor]:
        outputs = module(images.to(device))
        return (outputs,) if isinstance(outputs, Tensor) else outputs

    return run


@contextmanager
def _no_pickled_classes() -> Iterator[None]:
    """While torch.export.load works: it tries a pickle of tensors first, and then any pickle, unless this is set."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def _refuse_code(content: bytes, path: Path) -> None:
    """Raises `UserError` where a .pt2 names what torch would turn into Python: it makes code of names, and sympy
    evaluates the sizes' expressions."""
    for record in _descriptions(content):
        for key, text in _texts(json.loads(record), ""):
            fine = {"expr_str": _is_arithmetic, "name": _is_name, "as_name": _is_name, "target": _is_operator}.get(key)
            if fine and not fine(text):
                raise UserError(
                    f"{path} was refused, and nothing in it was run: {text[:80]!r} has no business in a model; "
                    "use a file from a source that you trust"
                )


def _descriptions(content: bytes) -> Iterator[bytes]:
    """The JSON in a .pt2, but for what its writer added, as both readers see it that torch.export.load may take: up to
    torch 2.7 it was a plain zip archive."""
    with suppress(RuntimeError):
        archive = torch._C.PyTorchFileReader(io.BytesIO(content))
        yield from (archive.get_record(name) for name in archive.get_all_records() if _is_description(name))
    with zipfile.ZipFile(io.BytesIO(content)) as plain:
        yield from (plain.read(one) for one in plain.infolist() if _is_description(one.filename))


def _is_description(name: str) -> bool:
    added = Path(name).parent.name in ("extra", "extra_files") and "models/" not in name  # there it would be a model
    return name.endswith(".json") and not added


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """The texts in JSON, each with the key that it is of."""
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
    known = re.fullmatch(r"((torch\.ops|_operator|math)(\.\w+)+|torch\.sym_\w+)", text)
    return known is not None and "__" not in text


def _is_arithmetic(text: str) -> bool:
    """Is this a number's expression: calls of known functions, with numbers and names of sizes?"""
    try:
        tree = ast.parse(text, mode="eval")
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
    return all(_is_plain(node) for node in ast.walk(tree))


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in FUNCTIONS or SIZE.fullmatch(node.id) is not None
    if isinstance(node, ast.keyword):
        return node.arg in PROPERTIES
    if isinstance(node, ast.Constant):
        return not isinstance(node.value, str) or SIZE.fullmatch(node.value) is not None
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
