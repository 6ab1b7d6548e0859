"""Exported files: their metadata, and running them as a model. Called by models/ensemble.py.

ONNX and OpenVINO files hold arithmetic, and a `.torchscript` holds a program of torch's operators.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.image_size import whole_strides
from models.tasks.contract import Model
from models.weights.content import EXPORT_FORMAT, EXPORTED_SUFFIXES, ExportMetadata, Weights
from models.weights.licence import Origin
from models.weights.reader import read_weights
from utils.checkpoint.weight_files import SAFETENSORS_SUFFIX
from utils.errors import UserError, first_line
from utils.files import read_regular

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


def _torchscript(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
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


def _onnx(path: Path) -> tuple[str, Callable[[ExportMetadata], Runner]]:
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
