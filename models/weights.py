"""Weight files of every program: found or downloaded, read without running anything in them, and their licence.

`find_weights` returns the file that --weights names, and `read_weights` its content. Reads the files of train.py,
YOLOv5 (models/yolov5_pickle.py) and YOLOv9 (MIT), `.safetensors`, and bare tensors. docs/models.md lists known files.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from models.tasks import DEFAULT_TASK, TASKS
from models.tasks.contract import Model
from models.yolov5_pickle import (
    MAX_PICKLE_BYTES,
    NEEDLESS,
    Stub,
    UnusableFile,
    is_module,
    plain_values,
    refuse_old_release,
    state_dict,
    unpickle,
    unwrap,
)
from utils.checkpoint import FORMAT, SAFETENSORS_SUFFIX, is_safetensors, read_safetensors
from utils.config.flags import IMGSZ, is_number
from utils.console import log
from utils.errors import UserError, first_line, nearest, plural, quoted
from utils.files import HUB_PREFIX, ROOT, cache_folder, download, fetch_from_hub, one_at_a_time, read_regular, read_yaml

if TYPE_CHECKING:
    from models.export import ExportMetadata

# The keys of a model YAML.
MODEL_KEYS = (
    *("task", "nc", "ch", "depth_multiple", "width_multiple", "channel_multiple", "anchors"),
    *("range", "folders", "activation", "inplace", "backbone", "head", "auxiliary"),
)
# The keys of train.py's files, besides `format`, with their types.
CONTENT_TYPES: dict[str, Any] = {"task": str, "model": dict, "names": dict | list, "state": dict, "settings": dict}
# Suffixes of the files that export.py writes and the scripts run, and of others.
EXPORTED_SUFFIXES = (".onnx", ".torchscript", "_openvino_model", "_ncnn_model", ".tflite")
OTHER_EXPORTS = (".engine", ".mlmodel", ".mlpackage", ".pb")

# Identifiers from https://spdx.org/licenses, in lower case, by the program that wrote a file.
LICENCES = {"yolov5": "agpl-3.0", "yolov9": "mit", "torchvision": "bsd-3-clause"}
UNKNOWN = "unknown"
YOURS = "yours"  # the licence of weights that were trained from scratch


@dataclass(frozen=True)
class Origin:
    """The licence of weights, and the name and SHA-256 of each file that they were made from, oldest first.

    Every file that is made from the weights records both.
    """

    licence: str = UNKNOWN
    files: Sequence[Mapping[str, str]] = field(default_factory=list)

    @classmethod
    def recorded(cls, content: Mapping[str, Any]) -> Origin:
        """Return the origin recorded in a weight file or settings."""
        files = [{key: str(file.get(key, "")) for key in ("file", "sha256")} for file in content.get("origin") or ()]
        return cls(str(content.get("licence") or UNKNOWN), files)

    def content(self) -> dict[str, Any]:
        """Return the entries that record the origin in a weight file, metadata and settings."""
        return {"licence": self.licence, "origin": [dict(file) for file in self.files]}

    def __str__(self) -> str:
        began = [f" (began as {first['file']}, SHA-256 {first['sha256'][:8]}...)" for first in self.files[:1]]
        return "".join([self.licence, *began])

    def require(self, allowed: Sequence[str]) -> None:
        """Raise `UserError` if --allow-licence lists licences, but not this one. Weights from scratch are allowed."""
        if allowed and self.licence not in (YOURS, *map(str.lower, allowed)):
            raise UserError(
                f"the licence of the weights is {self}, which --allow-licence {','.join(allowed)} does not list; give "
                "other weights, or --weights '' to train from scratch"
            )


# Content


@dataclass(frozen=True)
class Weights:
    """The content of a weight file."""

    state: dict[str, Tensor]  # on the CPU; floating-point tensors are float32
    model: dict[str, Any] | None  # the model YAML
    names: dict[int, str]
    task: str  # '' if unknown
    settings: dict[str, Any]
    # The program that wrote the file; "tensors" for a bare state dict.
    source: Literal["lockstep", "yolov5", "yolov9", "tensors", "exported"]
    program: Model | None = None  # the model in an exported file, which has no tensors
    metadata: ExportMetadata | None = None  # metadata of an exported file
    origin: Origin = field(default_factory=Origin)  # passed on to derived files; ends with this file

    @property
    def image_sides(self) -> tuple[int, int] | None:
        """The height and width in pixels of the images that the model was trained or exported for; None if unknown."""
        if self.metadata:
            return self.metadata.imgsz
        size = self.settings.get("imgsz")
        return (int(size), int(size)) if is_number(size) and size in IMGSZ else None

    @property
    def class_names(self) -> dict[int, str]:
        """The class names; the classes' numbers if the file has no names."""
        return self.names or {number: str(number) for number in range(int((self.model or {}).get("nc", 0)))}

    def compare_names(self, names: Mapping[int, str], file: str) -> None:
        """Log a warning if a data set has as many classes, but other names; the `item` of --single-cls is any class."""
        differing = [number for number in names if self.names.get(number, "").casefold() != names[number].casefold()]
        if differing and len(names) == len(self.names) and {0: "item"} not in (names, self.names):
            first, count = differing[0], f"{len(differing)} of {plural(len(names), 'class')}"
            log(
                f"warning: the names of {count} differ in {file} and in the data set, such as class {first}, "
                f"{quoted(self.names.get(first, ''))} and here {quoted(names[first])}; check the classes"
            )


def same_names(names: Mapping[int, str], new: Mapping[int, str]) -> dict[int, int]:
    """Map the numbers of classes in `new` to the numbers of equally named classes in `names`, ignoring case."""
    numbers = {name.strip().casefold(): number for number, name in reversed([*names.items()])}
    keys = {number: name.strip().casefold() for number, name in new.items()}
    return {number: numbers[key] for number, key in keys.items() if key in numbers}


# Reading


def read_weights(path: str | Path, licence: str = "") -> Weights:
    """Read a file from train.py, a YOLOv5 or YOLOv9 `.pt`, a `.safetensors` file or a saved state dict.

    `licence` is that of a file that records none and whose program does not imply one. Raises `UserError` for any other
    file, before calling anything that it names.
    """
    path = Path(path)
    if path.name.endswith((*EXPORTED_SUFFIXES, *OTHER_EXPORTS)):
        raise UserError(f"{path} is an exported file, which has no weights to load; give the .pt that it was made from")
    try:
        data = read_regular(path)
    except OSError as error:
        raise UserError(f"weights {path} cannot be read ({error.strerror}); check the path") from None
    try:
        weights = _interpret(_loaded(data, path.suffix))
        for task, entry in TASKS.items() if weights.source == "tensors" else ():
            if described := entry.load().described(path.parent):
                model, names, named_licence = described
                weights, licence = replace(weights, model=model, names=names, task=task), named_licence or licence
        if {*weights.names} != {*range(len(weights.names))}:
            raise UnusableFile(f"has the classes {[*weights.names][:9]}; number them from 0, in `names` or `id2label`")
        origin = weights.origin
        if weights.source != "lockstep":
            origin = Origin(LICENCES.get(weights.source, licence or UNKNOWN))
        file = {"file": path.name, "sha256": hashlib.sha256(data).hexdigest()}
        origin = replace(origin, files=[*origin.files, file])
        return replace(weights, state=_as_float32(weights.state), origin=origin)
    except UnusableFile as error:
        raise UserError(f"{path} {error}") from None
    except Exception as error:  # a damaged or hostile file can fail anywhere
        reason = f"is not a complete weight file ({first_line(error).split('. ')[0]})"
        if data.isascii() and b"\0" not in data:
            reason = "is text or empty, not a weight file (a web page or a Git LFS pointer?)"
        raise UserError(f"{path} {reason}; copy or download it again") from error


def _loaded(data: bytes, suffix: str) -> Any:
    """Return the content of a file: plain values and tensors, or stubs. Raises `UnusableFile`."""
    if suffix == SAFETENSORS_SUFFIX or is_safetensors(data):
        state, rest = read_safetensors(data)
        return {**rest, "state": state} if rest else state
    if is_archive := data.startswith(b"PK\x03\x04"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if damaged := archive.testzip():  # torch.load does not compare the checksums
                raise UnusableFile(f"is damaged (the checksum of {damaged} does not match); copy or download it again")
        # torch.load's own reader: another reader may see other records in a hostile file.
        reader = torch._C.PyTorchFileReader(io.BytesIO(data))
        if "constants.pkl" in reader.get_all_records():
            raise UnusableFile("is a TorchScript export, which cannot be trained; give the .pt that it was made from")
        if len(reader.get_record("data.pkl")) > MAX_PICKLE_BYTES:  # each byte may make an object
            raise UnusableFile(f"was refused: its tensors are described in over {MAX_PICKLE_BYTES:,} bytes, {NEEDLESS}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the user cannot change how the file was written
        return unpickle(data, is_archive)


def _interpret(content: Any) -> Weights:
    """Return the weights in the content of a file. Raises `UnusableFile`."""
    settings: dict[str, Any] = {}
    if isinstance(content, dict):
        if str(content.get("format", "")).startswith("lockstep-"):
            return _read_lockstep(content)
        flags = getattr(content.get("opt"), "state", content.get("opt"))  # of YOLOv5's training
        if isinstance(flags, dict) and is_number(flags.get("imgsz")):
            settings = {"imgsz": flags["imgsz"]}
        if not _is_state_dict(content):
            # The EMA's weights, which YOLOv5 moves to `model` at the end of training.
            content = next((content[key] for key in ("ema", "model", "state_dict") if content.get(key) is not None), {})
    if isinstance(content, dict) and _is_state_dict(content):
        if all(str(name).startswith("module.") for name in content):  # added by DistributedDataParallel
            content = {name.removeprefix("module."): tensor for name, tensor in content.items()}
        return _yolov9_weights(content) or Weights(content, None, {}, "", {}, "tensors")
    network = unwrap(content)
    if not is_module(network):
        raise UnusableFile("contains no model; give weights that train.py or YOLOv5 wrote")
    if network.class_path.startswith("ultralytics."):
        raise UnusableFile("is a model of ultralytics, such as YOLOv8 or yolov5nu, which is not read; nearest: v9-t.pt")
    state, names, kind = state_dict(network), _numbered(network.state.get("names") or {}), type(network).__name__
    # Older detectors are of class `Model`, other programs' detectors of any class.
    fallback_task = kind if kind.endswith("Model") and kind != "Model" else DEFAULT_TASK
    task = next((name for name, entry in TASKS.items() if entry.yolov5_class == kind), fallback_task)
    return Weights(state, _yolov5_yaml(network, state, len(names)), names, task, settings, "yolov5")


def _is_state_dict(content: Mapping[Any, Any]) -> bool:
    """Return whether `content` holds tensors and nothing else."""
    return bool(content) and all(isinstance(value, Tensor) for value in content.values())


def _numbered(names: Any) -> dict[int, str]:
    """Return class names by number, from a dict or, in an older file, a list."""
    pairs = names.items() if isinstance(names, dict) else enumerate(names)
    return {int(number): str(name) for number, name in pairs}


def _read_lockstep(content: dict[str, Any]) -> Weights:
    """Return the weights in a file from train.py."""
    if content["format"] != FORMAT:
        raise UnusableFile(f"has the unknown format {content['format']}; update this program")
    for key, kind in CONTENT_TYPES.items():
        value = content.get(key)
        named = key == "names" or not isinstance(value, dict) or all(isinstance(name, str) for name in value)
        if not isinstance(value, kind) or not named or (key == "state" and value and not _is_state_dict(value)):
            raise UnusableFile(f"has no valid `{key}`; copy or download it again")
    names, origin = _numbered(content["names"]), Origin.recorded(content)
    yaml, task, settings = plain_values(content["model"]), content["task"], content["settings"]
    return Weights(content["state"], yaml, names, task, settings, "lockstep", origin=origin)


def _as_float32(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors without gradients, and floating-point ones as float32: official files hold half precision.

    Raises `UnusableFile` if they are not finite.
    """
    for name, x in state.items():
        # Masks may be -inf.
        if x.is_floating_point() and not ((x < math.inf) if "mask" in name else x.isfinite()).all():
            raise UnusableFile(f"has values in {name} that are not finite, so it cannot be used; give older weights")
    return {name: (x.float() if x.is_floating_point() else x).detach() for name, x in state.items()}


# YOLOv5's networks

CLASSIFIER_SIZES = {16: "n", 32: "s", 48: "m", 64: "l", 80: "x"}  # by channels of the first convolution


def _yolov5_yaml(network: Stub, state: Mapping[str, Tensor], classes: int) -> dict[str, Any] | None:
    """Return the model YAML of a network; None if the network has none and is not a YOLOv5 classifier.

    YOLOv5 saves classifiers without a YAML; the width of the first convolution identifies the size.
    """
    yaml = network.state.get("yaml")
    if isinstance(yaml, dict):
        known = plain_values({key: yaml[key] for key in MODEL_KEYS if key in yaml})  # other programs add keys
        refuse_old_release(known, network)
        return dict(known)
    layers = network.state["_modules"].get("model")
    last = next(reversed(layers.state["_modules"].values()), None) if is_module(layers) else None
    size = CLASSIFIER_SIZES.get(len(state.get("model.0.conv.weight", ())))
    if not size or not is_module(last) or type(last).__name__ != "Classify":
        return None
    return {**read_yaml(ROOT / "models" / f"yolov5{size}-cls.yaml"), "nc": classes}


# The MIT implementation of YOLOv9, MultimediaTechLab/YOLO: tensors only, named by layer and path

# Prefixes of names: the EMA's and the network's in a Lightning checkpoint (validation uses the EMA), none elsewhere.
YOLOV9_PREFIXES = ("ema.model.", "model.model.", "")
YOLOV9_NAME = re.compile(r"\d+\.")
YOLOV9_CONSTANTS = "anc2vec"  # part of the names of constants, the bins 0 to 15, which `DetectDFL` does not store
YOLOV9_CLASSES = re.compile(r"(\d+)\.heads\.0\.class_conv\.2\.weight")
# Sizes by the channels of the first convolution, and by whether layer 2 is an ELAN, whose conv2 is one convolution.
YOLOV9_SIZES = {(16, True): "t", (32, True): "s", (32, False): "m", (64, False): "c"}
COCO_CLASSES = 80


def _yolov9_weights(state: Mapping[str, Tensor]) -> Weights | None:
    """Return the weights in a state dict of that implementation, without its constants; None for any other state dict.

    The model is the shipped one with the same layers, if there is one; 80 classes are taken to be COCO's.
    """
    for prefix in YOLOV9_PREFIXES:
        names = [name for name in state if name.startswith(prefix) and YOLOV9_NAME.match(name.removeprefix(prefix))]
        tensors = {name.removeprefix(prefix): state[name] for name in names if YOLOV9_CONSTANTS not in name}
        heads = sorted((int(match[1]), name) for name in tensors if (match := YOLOV9_CLASSES.fullmatch(name)))
        if heads and (prefix or len(names) == len(state)):
            nc = len(tensors[heads[0][1]])  # the first head is the main head
            coco = read_yaml(ROOT / "data" / "coco.yaml")["names"] if nc == COCO_CLASSES else {}
            renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
            return Weights(renamed, _yolov9_yaml(tensors, nc), dict(enumerate(coco.values())), "detect", {}, "yolov9")
    return None


def _yolov9_yaml(tensors: Mapping[str, Tensor], nc: int) -> dict[str, Any] | None:
    """Return the YAML of the shipped model with the same layers; None if there is none.

    The YAML names the channels of the class branches, so that they stay the same in a model for other classes.
    """
    size = YOLOV9_SIZES.get((len(tensors.get("0.conv.weight", ())), "2.conv2.conv.weight" in tensors))
    if size is None:
        return None
    yaml = read_yaml(ROOT / "models" / f"yolov9{size}.yaml")
    last = len(yaml["backbone"]) - 1
    for rows in (yaml["head"], yaml["auxiliary"]):
        last += len(rows)
        first = tensors.get(f"{last}.heads.0.class_conv.0.conv.weight")
        if first is not None:
            *others, args = rows[-1]
            rows[-1] = [*others, [*args, len(first)]]
    return {"task": "detect", **yaml, "nc": nc}


# Finding and downloading

TORCHVISION_DEFAULT = "DEFAULT"  # the weights that torchvision recommends for an architecture
CHECKSUM_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.pth$")  # torchvision names its files by the SHA-256's first digits
WANDB_PREFIX = "wandb:"
RELEASE_ADDRESS = "https://github.com/ultralytics/yolov5/releases/download/v7.0/"
RELEASE_LICENCE = "AGPL-3.0, published by Ultralytics"
RELEASE_SHA256 = {"yolov5n.pt": "4f180cf23ba0717ada0badd6c685026d73d48f184d00fc159c2641284b2ac0a3"}  # by release file
YOLOV9_FILE = re.compile(r"v9-[tsmc]\.pt")
YOLOV9_ADDRESS = "https://github.com/MultimediaTechLab/YOLO/releases/download/v1.0-alpha/"
YOLOV9_LICENCE = "MIT, published by MultimediaTechLab"
# Starts of their files' names.
UNREAD_FAMILY = re.compile(r"yolov?(?:6|7|8|1\d|26)|yolo(?:x|[-_]?nas|[-_]?world)|r[ft]-?detr")


def _is_released(file: str) -> bool:
    return any(re.fullmatch(entry.load().official_weights, file) for entry in TASKS.values())


def refuse_unread_family(what: str, file: str, instead: str) -> None:
    """Raise `UserError` if a missing file's name is that of a family of models that are not read, as yolov8n.pt."""
    if not os.path.isfile(file) and (family := UNREAD_FAMILY.match(Path(file).name.lower())):
        instead = "--task-file examples/dfine, RT-DETRv2 and D-FINE" if family[0].startswith("rt") else instead
        raise UserError(f"{what}: {family[0]} models are not supported; nearest: {instead}")


def find_weights(
    name: str, yaml: Mapping[str, Any] | None = None, source: str = "the model YAML", training: bool = True
) -> Path:
    """Return the path of a weight file, downloaded into the cache if necessary. Raises `UserError`.

    Args:
        name: path of a file; a run folder, for its best.pt, else last.pt; the name of a release file of YOLOv5 or
            YOLOv9; DEFAULT for torchvision's recommendation for the architecture in `yaml`, which `source` names;
            wandb:entity/project/name:alias for an artifact; or hf:owner/name for a repository of the Hugging Face Hub
        training: whether train.py asks: only it knows DEFAULT and can start without weights
    """
    if name == TORCHVISION_DEFAULT and training:
        return torchvision_weights(yaml or {}, source)
    if name.startswith(WANDB_PREFIX):
        return _artifact_weights(name)
    if name.startswith(HUB_PREFIX):
        return fetch_from_hub(name.removeprefix(HUB_PREFIX))
    path, file = Path(name), Path(name).name
    if os.path.isfile(path) or (file.endswith(EXPORTED_SUFFIXES) and os.path.isdir(path)):
        return path
    run_files = [path / "weights" / best_or_last for best_or_last in ("best.pt", "last.pt")]
    if weights := next(filter(os.path.isfile, run_files), None):
        return weights
    alternative = ", or start from scratch with --weights ''" if training else ""
    if not _is_released(file) or os.path.isdir(path):
        refuse_unread_family(f"weights {name}", name, f"v9-t.pt{alternative}")
        official = f"{file.removesuffix('.pt').replace('yolov9-', 'v9-').replace('yolov9', 'v9-')}.pt"
        if official != file and _is_released(official):
            alternative = f" (did you mean '{official}'?){alternative}"
        tried = " and ".join(map(os.path.abspath, (path, *run_files)))
        raise UserError(
            f"weights {name} are neither a file nor a run's folder; check the path{alternative} (looked for {tried})"
        )
    # A release file of YOLOv5 or YOLOv9. LOCKSTEP_RELEASES may name the URL of a mirror.
    is_yolov9 = YOLOV9_FILE.fullmatch(file)
    address = os.environ.get("LOCKSTEP_RELEASES") or (YOLOV9_ADDRESS if is_yolov9 else RELEASE_ADDRESS)
    cached = cache_folder() / "weights" / file
    return download(
        f"{address.rstrip('/')}/{file}",
        cached,
        sha256=RELEASE_SHA256.get(file, ""),
        usable=zipfile.is_zipfile,  # the format that torch writes
        advice=f"download it yourself to {path.absolute()} or {cached}{alternative}",
        licence=YOLOV9_LICENCE if is_yolov9 else RELEASE_LICENCE,
    )


def architecture(yaml: Mapping[str, Any], source: str) -> str:
    """Return the `architecture` of a YAML. Raises `UserError`, which names `source`, if torchvision lacks it."""
    from torchvision import models as torchvision_models

    name, known = yaml.get("architecture"), torchvision_models.list_models(module=torchvision_models)
    if not isinstance(name, str) or name not in known:
        hint = nearest(str(name), known) or ", such as resnet34"
        raise UserError(f"{source}: `architecture` is {name!r}; give a classification model of torchvision{hint}")
    return name


def torchvision_weights(yaml: Mapping[str, Any], source: str) -> Path:
    """Return the file of the weights that torchvision recommends for a YAML's `architecture`. Raises `UserError`."""
    from torchvision.models import get_model_weights

    if "architecture" not in yaml:
        raise UserError(f"--weights {TORCHVISION_DEFAULT} needs a --cfg that names an `architecture` of torchvision")
    address = get_model_weights(architecture(yaml, source)).DEFAULT.url
    file = Path(address).name
    digits = CHECKSUM_IN_NAME.search(file)
    return download(address, Path(torch.hub.get_dir()) / "checkpoints" / file, sha256=digits[1] if digits else "")


def _artifact_weights(name: str) -> Path:
    """Download a W&B artifact, wandb:entity/project/name:alias, into the cache and return the path of its weight file.

    Raises `UserError`. The first process of a machine downloads it; the others wait.
    """
    from utils.tracking.wandb import download_artifact

    artifact = name.removeprefix(WANDB_PREFIX)
    folder, problem = cache_folder() / "wandb" / re.sub(r"[^\w.-]", "-", artifact), ""
    with one_at_a_time(folder.with_suffix(".lock")):
        try:
            files = [file for file in download_artifact(artifact, folder) if file.suffix == ".pt"]
        except UserError as error:
            files, problem = [], f": {error}"
    chosen = [file for file in files if file.name == "best.pt"] or files
    if len(chosen) != 1:
        raise UserError(
            f"--weights {name} gives {len(chosen)} .pt files{problem}; check the key and the name (entity/project/"
            "name:alias) of an artifact with one .pt file or a best.pt, or download the file and give its path"
        )
    return chosen[0]
