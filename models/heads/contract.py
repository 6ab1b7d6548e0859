"""`DetectionHead`, what the detection task asks of the last layer of a model, and the types that it exchanges with it.

A kind of head is a package beside this module, and its layer's line in models/layer_registry.py: layer, criterion,
decoding, and what it takes over from weights for other classes. Called by models/tasks/detection and segmentation.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from torch import Tensor

from models.layers import Head
from models.tasks.contract import Criterion, Model
from utils.batch import BoxSplit

V = TypeVar("V", bound="HeadView")


class Candidates(NamedTuple):
    """The boxes of an image that may exceed the confidence threshold."""

    scores: Tensor  # float32 (k, 5 + classes): xywh in pixels of the batch, objectness, class scores
    more: Tensor  # float32 (k, more): other outputs of the boxes


class BoxView(Protocol):
    """The boxes that a model returns for a batch, before their suppression."""

    @property
    def outputs(self) -> Any:
        """The input of the criterion; None for an exported file."""
        ...

    @property
    def more(self) -> int:
        """The number of a box's outputs after its class scores."""
        ...

    def candidates(self, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the boxes of each image whose confidence, objectness x score, may exceed `conf_thres`."""
        ...


class HeadView(BoxView, Protocol):
    """The raw outputs of a head for images that may be scaled and mirrored."""

    @property
    def strides(self) -> Tensor:
        """(levels,) pixels per cell."""
        ...

    def augmented(self: V, scale: tuple[float, float], mirrored_width: int) -> V:
        """Return the view of scaled or mirrored images.

        scale: width and height of the model's images, as shares of the batch's. mirrored_width: width of the batch in
        pixels if the images are mirrored, else 0.
        """
        ...

    def without_level(self: V, level: int) -> V:
        """Return the view without the boxes of a level."""
        ...


class DetectionHead(Head):
    """The last layer of a detector, on one map per level.

    Its forward maps the list of maps, and the criterion's hints if there are any, to raw outputs of any type.
    """

    loss_names: ClassVar[tuple[str, ...]]  # the criterion's terms: columns of results.csv after train/ and val/
    # The keys of a hyperparameter YAML that `criterion` and `adapt` read; others are refused as flags.
    hyperparameters: ClassVar[frozenset[str]] = frozenset()
    concerns: ClassVar[frozenset[str]] = frozenset()  # more of the task's `concerns`
    takes_anchors: ClassVar[bool]  # whether model YAMLs with it need `anchors`
    nc: int  # classes
    stride: Tensor  # buffer (levels,), pixels per cell

    @abstractmethod
    def placed(self, strides: Sequence[float]) -> None:
        """Set the strides of the levels in pixels, and by them the biases from which a training from scratch starts."""

    @abstractmethod
    def criterion(self, hyp: Any, label_smoothing: float, imgsz: int, class_weights: Sequence[float] = ()) -> Criterion:
        """Return the loss of the head's raw outputs.

        hyp: the task's, with the keys of `hyperparameters`. imgsz: the model's image size in pixels. class_weights: of
        an object, by class number; empty: all count the same.
        """

    @abstractmethod
    def view(self, outputs: Any, more: int = 0) -> HeadView:
        """Return the plain view of raw outputs in evaluation. more: outputs of a box after its class scores."""

    @abstractmethod
    def decode(self, outputs: Any, more: int = 0) -> Tensor:
        """Return all boxes of raw outputs, float32 (b, n, outputs of a box), as exported files do.

        xywh in pixels, objectness if the head has it, class scores, other outputs; by level, then row and column.
        """

    @staticmethod
    def scored(decoded: Tensor) -> Tensor:
        """Return boxes of `decode` as suppression needs them, (b, n, 5 + classes + more): with objectness."""
        return decoded

    @abstractmethod
    def keep(self, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]) -> str:
        """Copy what fits from the head of a weight file for other classes; return in words what was taken.

        prefix: of the head in `state`, the file's tensors. names, new: class names of the file and of the model.
        """

    def adapt(self, model: Model, split: BoxSplit, hyp: Any) -> list[str]:
        """Fit the head, and the model's YAML, to the training boxes before the first step; return messages."""
        return []


def head_of(model: Model) -> DetectionHead:
    """Return the head of a detector. Raises TypeError if the model has none, as an exported file."""
    if not isinstance(model.head, DetectionHead):
        raise TypeError(f"{type(model).__name__} has no detection head")
    return model.head
