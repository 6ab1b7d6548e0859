"""The content of weight files and exported files, whichever program wrote them.

Made by models/weights/reader.py and models/export/runtime.py; imports no reader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from models.image_size import sides_of
from models.tasks.contract import Model
from models.weights.licence import UNKNOWN, Origin
from utils.config.values import IMGSZ, is_number
from utils.errors import plural, shortened

# The keys of a model YAML.
MODEL_KEYS = (
    *("task", "nc", "ch", "depth_multiple", "width_multiple", "channel_multiple", "anchors"),
    *("activation", "inplace", "backbone", "head", "auxiliary"),
)
EXPORT_FORMAT = "lockstep-export-1"
EXPORTED_SUFFIXES = (".onnx", ".torchscript", "_openvino_model")  # suffixes of the files that export.py writes


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


@dataclass(frozen=True)
class Weights:
    """The content of a weight file.

    Attributes:
        source: program that wrote the file; "tensors" for a bare state dict
    """

    state: dict[str, Tensor]  # on the CPU; floating-point tensors are float32
    model: dict[str, Any] | None  # the model YAML
    names: dict[int, str]
    task: str  # '' if unknown
    settings: dict[str, Any]
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
    def task_yaml(self) -> dict[str, Any]:
        """The model YAML with its `task`; the file must have a model."""
        return {"task": self.task, **(self.model or {})}

    @property
    def class_names(self) -> dict[int, str]:
        """The class names; the classes' numbers if the file has no names."""
        return self.names or {number: str(number) for number in range(int((self.model or {}).get("nc", 0)))}

    def class_warnings(self, names: Mapping[int, str], name: str) -> list[str]:
        """Return a warning if a data set has as many classes but other names, so that their order may differ.

        There is no warning for a single class, which has no order.

        Args:
            names: the data set's class names, by number
            name: name of the file in the warning
        """
        if len(names) != len(self.names) or len(names) == 1:
            return []
        pairs = [(number, self.names.get(number, ""), names[number]) for number in names]
        differing = [pair for pair in pairs if pair[1].casefold() != pair[2].casefold()]
        return [
            f"warning: {len(differing)} of {plural(len(names), 'class')} have other names in {name} than in the data "
            f"set, such as class {number}, '{shortened(of_file)}' and here '{shortened(of_data)}'; check the order"
            for number, of_file, of_data in differing[:1]
        ]
