"""What a task is: the abstract classes that a new task implements, and what passes between it and the scripts.

train.py, val.py, detect.py and export.py call these methods and know no task by name. A task is a package beside this
module, a data set in data/, and one line in `TASKS` (models/tasks/__init__.py). May import utils; nothing of data/.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor, nn

if TYPE_CHECKING:
    from utils.coco import CocoImage
    from utils.config.hyperparameters import Recipe
    from utils.plots.drawing import Style
    from utils.summary import Example, Summary

Image = np.ndarray  # uint8 (h, w, 3), BGR


class Batch(Protocol):
    """A batch of images, as the data set's loader delivers it.

    images: uint8 (b, 3, h, w), RGB. targets: float32, in the form of the task's data set; a detector's are (m, 6):
    image in the batch, class, xywh as shares of width and height. infos: b of them, what the data set returns for each
    image beside its pixels; every task's have `image`, the index in the split, and `path`.
    """

    @property
    def images(self) -> Tensor: ...
    @property
    def targets(self) -> Tensor: ...
    @property
    def infos(self) -> Sequence[Any]: ...
    def to(self, device: Any, non_blocking: bool = False) -> Batch: ...


class Split(Protocol):
    """A split of the data set, as far as every task may use it; a task's `adapt` may use more of its data set's."""

    def shown(self, index: int, side: int) -> Image:
        """Return an image of the split with its longer side at most `side` pixels."""
        ...


class Model(nn.Module):
    """A network with everything that is needed to use it."""

    yaml: dict[str, Any]  # builds the same network again
    names: dict[int, str]  # of the classes
    stride: int  # height and width of the images must be multiples of it, pixels
    imgsz: int  # pixels; what was asked for, rounded up to whole strides


@dataclass(frozen=True)
class LossTerms:
    """A loss before its means are taken: every term is a weighted sum of parts, every part a sum over a count.

    sums: (terms, parts), differentiable. counts: (terms, parts), the number of values in each sum. weights: (terms,
    parts). Counts of all processes are added before the division, so that the loss is that of the global batch.
    """

    sums: Tensor
    counts: Tensor
    weights: Tensor

    def means(self, counts: Tensor) -> Tensor:
        """Return this process's share of each term, (terms,); `counts` are those of all processes. Shares add up."""
        return (self.weights * self.sums / counts.clamp(min=1)).sum(1)


class Criterion(ABC):
    """The training loss of one model."""

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return what the model is given beside the images if only its loss is wanted, to save work; often nothing."""
        return ()

    @abstractmethod
    def __call__(self, outputs: Any, batch: Batch) -> LossTerms:
        """Return the loss terms of what the model returned for `batch`, with or without hints."""

    @abstractmethod
    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the scalar to differentiate. means: (terms,). images: of an optimizer step, over all processes."""

    @abstractmethod
    def weight(self, batch: Batch) -> float:
        """Return the weight of this batch's loss in the mean over a validation."""


class View(Protocol):
    """What a model returned for one view of a batch: the images as they are, or scaled or mirrored (`augment`)."""

    @property
    def outputs(self) -> Any:
        """What the criterion takes; None if the model is an exported file that returns no such thing."""
        ...


class Prediction(ABC):
    """The result for one image, in the coordinates of its file: what val.py, detect.py and Python users get.

    image: the index in the split. path: of the file.
    """

    image: int
    path: str

    @property
    @abstractmethod
    def array(self) -> np.ndarray:
        """Return the result as numbers: what `Predictor` returns."""

    @property
    @abstractmethod
    def items(self) -> list[tuple[str, float]]:
        """Return class name and confidence of everything predicted, the most confident first."""

    @abstractmethod
    def describe(self) -> str:
        """Return the result in words, for the console: `2 persons, 1 dog`."""

    @abstractmethod
    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with the result drawn on it."""

    @abstractmethod
    def crops(self, image: Image) -> list[tuple[str, Image]]:
        """Return the part of `image` that each object covers, with its class name; none is empty."""

    @abstractmethod
    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return lines of a label file. corners: xyxy in pixels instead of normalised xywh, if there are boxes."""

    @abstractmethod
    def with_labels(self) -> Prediction:
        """Return the labels of the image, and behind them the predictions that match none (--save-hybrid)."""

    @abstractmethod
    def coco_rows(self) -> CocoImage:
        """Return what COCO's results need of this image."""


@dataclass(frozen=True)
class Thresholds:
    """Which predictions are kept. A task uses what applies to it. The fields are named like the flags."""

    conf_thres: float = 0.001  # least confidence
    iou_thres: float = 0.6  # overlap above which suppression drops the less confident of two
    max_det: int = 300  # per image
    classes: tuple[int, ...] = ()  # only these; empty: all
    agnostic_nms: bool = False  # predictions of different classes suppress each other too
    one_class: bool = False  # a box counts for its most probable class only


class Postprocess(ABC):
    """From a model's outputs to predictions; stateless."""

    @abstractmethod
    def views(self, model: Model, inputs: Tensor, augment: bool) -> Sequence[View]:
        """Run `model` on `inputs` and, if `augment`, on scaled or mirrored copies; the plain view is first."""

    @abstractmethod
    def __call__(self, views: Sequence[View], batch: Batch) -> Sequence[Prediction]:
        """Return a prediction for each image. views: those of all models of an ensemble, one after another."""


class Metrics(ABC):
    """From predictions to the numbers of a validation. Records travel between processes, the rest does not."""

    @abstractmethod
    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[Any]:
        """Return a record for each image: plain values or arrays, which travel between processes."""

    @abstractmethod
    def summarise(self, records: Sequence[Any]) -> Summary:
        """Return the metrics of a whole split from all its records, in whatever order they come."""

    @abstractmethod
    def documents(self, summary: Summary) -> dict[str, str]:
        """Return text files for the run folder by name, such as confusion_matrix.csv; charts are drawn from them."""

    def examples(self, summary: Summary) -> list[Example]:
        """Return images with labels and predictions for trackers; none by default."""
        return []

    def pictures(self, summary: Summary, split: Split, side: int) -> dict[str, Image]:
        """Return pictures for the run folder by name; none by default. side: pixels of an image's longer side."""
        return {}


@dataclass(frozen=True)
class ExportSettings:
    """What export.py's flags say about suppression inside an exported file."""

    nms: bool = False
    agnostic_nms: bool = False
    topk_per_class: int = 100
    topk_all: int = 100
    iou_thres: float = 0.45
    conf_thres: float = 0.25


class ExportModule(NamedTuple):
    """What is exported: a module of images (b, 3, h, w), as `Task.inputs` makes them, and the settings of the
    suppression in it, None if there is none."""

    module: nn.Module
    suppression: dict[str, Any] | None


class Task(ABC):
    """A task: the factory of its parts, built once from class names and hyperparameters, and immutable from then on."""

    loss_names: ClassVar[tuple[str, ...]]  # columns of results.csv after train/ and val/
    metric_names: ClassVar[tuple[str, ...]]  # columns of results.csv after metrics/; the last is shown beside the bar
    recipe: ClassVar[type[Recipe]]  # the keys of its hyperparameter YAML
    defaults: ClassVar[Mapping[str, Any]] = {}  # of flags that the command line does not give
    refused: ClassVar[Mapping[str, str]] = {}  # flags that do not apply to it, each with the reason
    official_weights: ClassVar[str] = r"(?!)"  # a regular expression for the names of YOLOv5's release files

    def __init__(self, names: Mapping[int, str], hyp: Recipe, label_smoothing: float = 0.0) -> None:
        """names: of the classes, by number. Raises `UserError` if they or the hyperparameters do not suit the task."""
        self.names = dict(names)

    @abstractmethod
    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> Model:
        """Build the model of a YAML for this task's classes and images of about `imgsz` pixels.

        source: what errors call the YAML. Raises `UserError` if it describes no model of this task.
        """

    @abstractmethod
    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`, after `adapt`."""

    @abstractmethod
    def postprocess(self, model: Model, thresholds: Thresholds) -> Postprocess:
        """Return what makes predictions of the outputs of `model`, or of an ensemble that it is the first of.

        Raises `UserError` if `thresholds` name a class that the model does not have.
        """

    @abstractmethod
    def metrics(self, shown: frozenset[int] = frozenset()) -> Metrics:
        """Return the metrics. shown: indices of images of the split whose predictions are kept to be drawn."""

    @abstractmethod
    def inputs(self, batch: Batch) -> Tensor:
        """Return what the model is called with: float (b, 3, h, w)."""

    @abstractmethod
    def export_module(self, model: Model, settings: ExportSettings) -> ExportModule:
        """Return the module that exported files compute, with fewer layers than `model`."""

    @abstractmethod
    def draw_batch(self, batch: Batch) -> Image:
        """Draw a training batch with its targets, as the model sees it."""

    def model_yaml(self, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's YAML with what the hyperparameters change in it. Not called when a run is resumed."""
        return dict(yaml)

    def fresh_tensors(self, from_yaml: bool) -> tuple[str, ...]:
        """Return parts of the names of tensors that are not taken from a weight file. from_yaml: is --cfg given?"""
        return ()

    def adapt(self, model: Model, split: Any) -> list[str]:
        """Fit `model` to the training split before the first step, such as by AutoAnchor; return messages about it."""
        return []
