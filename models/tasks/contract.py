"""The abstract classes that a task implements, and the types that it exchanges with the scripts.

train.py, val.py, detect.py and export.py call these methods and do not contain a task's name. A task is a module beside
this one (or a file of the user's), a data set in data/, and one entry in `TASKS` (models/tasks/__init__.py). It may
import utils, but not data/.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from models.tasks.results import Result
from utils.batch import Batch, CocoImage, ImageInfo, Split
from utils.errors import UserError, nearest, quoted

if TYPE_CHECKING:
    from utils.config.hyperparameters import Recipe, Recipes
    from utils.plots.drawing import Style
    from utils.review import ImageReview
    from utils.summary import Example, Summary

Image = np.ndarray  # uint8 (h, w, 3), BGR
Function = Callable[..., Any]
Term = tuple[Tensor, Tensor, Tensor]  # sums, counts and weights of a loss term's parts, (parts,) each, see `LossTerms`


class Model(nn.Module):
    """A network with the attributes that its users need."""

    yaml: dict[str, Any]  # model YAML that the network can be rebuilt from
    names: dict[int, str]  # class names, by number
    stride: int  # pixels; height and width of the images must be multiples of it
    imgsz: int  # image size in pixels, rounded up to whole strides
    gflops: float = 0.0  # billions of operations of a forward pass for one image of `imgsz`; 0 if unknown

    @property
    def head(self) -> nn.Module | None:
        """The last layer, if its class decides the meaning of the outputs; None for an exported file."""
        return None


# The loss


@dataclass(frozen=True)
class LossTerms:
    """The sums and counts of a loss: every term is a weighted sum of parts, every part a sum divided by a count.

    The counts of all processes are added before the division, so that the loss is the global batch's.
    """

    sums: Tensor  # differentiable, (terms, parts)
    counts: Tensor  # number of values in each sum, or the sum of their weights, (terms, parts)
    weights: Tensor  # of the parts in their terms, (terms, parts)
    min_divisor: float = 1.0  # of a sum; below 1 if counts are sums of weights, which may be below 1

    @classmethod
    def stacked(cls, terms: Mapping[str, Term], names: Sequence[str], min_divisor: float) -> LossTerms:
        """Return the terms in the order of `names`."""
        sums, counts, weights = (torch.stack(parts) for parts in zip(*(terms[name] for name in names), strict=True))
        return cls(sums, counts, weights, min_divisor)

    def share_of_mean(self, global_counts: Tensor) -> Tensor:
        """Return this process's share of each mean over the global batch, (terms,); the shares add up to the mean.

        `global_counts` are the `counts` of all processes, added.
        """
        return (self.weights * self.sums / global_counts.clamp(min=self.min_divisor)).sum(1)

    def local_means(self) -> Tensor:
        """Return the means over this process's images alone, (terms,)."""
        return self.share_of_mean(self.counts)


@cache
def device_constant(values: Any, device: torch.device) -> Tensor:
    """Return a float32 tensor of plain values, copied to the device only once, as every copy waits for the device."""
    with torch.inference_mode(False):  # a tensor that a validation makes must be usable in training too
        return torch.tensor(values, dtype=torch.float32, device=device)


def upcast_half(values: Tensor) -> Tensor:
    """Return half-precision values as float32, other values unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def weights_by_class(names: Mapping[int, str], weights: Mapping[str, float]) -> tuple[float, ...]:
    """Return the weight of each class, by number: `weights` by name, else 1; () if all are 1. Raises `UserError`."""
    known = set(names.values())
    if unknown := [name for name in weights if name not in known]:
        hint = nearest(unknown[0], known)
        raise UserError(f"class_weights: the data set has no class '{unknown[0]}'{hint}; correct the name")
    by_number = tuple(float(weights.get(names[k], 1.0)) for k in sorted(names))
    return by_number if set(by_number) - {1.0} else ()


class Criterion(ABC):
    """The training loss of one model."""

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return extra model inputs that save work if only the loss is needed; none by default."""
        return ()

    @abstractmethod
    def __call__(self, outputs: Any, batch: Batch) -> LossTerms:
        """Return the loss terms of the model's outputs for `batch`, computed with or without hints."""

    def for_gpu(self, captured: Callable[[Function], Function]) -> Criterion:
        """Return the criterion to train with on a GPU; by default this one. `captured` takes a function of tensors, and
        returns one that replays its kernels if the shapes are known."""
        return self

    @abstractmethod
    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the scalar to differentiate, from a share of one batch's mean terms (`LossTerms.share_of_mean`).

        It must be linear in them, because the gradients of all shares are added. `images` is the number of images of an
        optimizer step.
        """

    @abstractmethod
    def weight(self, batch: Batch) -> float:
        """Return the weight of this batch's loss in the mean over a validation."""


def check_contract(holds: bool, part: object, what: str) -> None:
    """Raise `UserError` unless a task's part `holds` its contract, with its class and what is wrong with it."""
    if not holds:
        raise UserError(f"{type(part).__module__}.{type(part).__qualname__} {what}; fix that class")


def compute_terms(criterion: Criterion, outputs: Any, batch: Batch, names: Sequence[str], reads: bool) -> LossTerms:
    """Return the loss terms of outputs. Raises `UserError` for wrong shapes or, if it `reads` them, wrong counts."""
    terms = criterion(outputs, batch)
    check_contract(isinstance(terms, LossTerms), criterion, f"returned {type(terms).__name__} instead of LossTerms")
    shapes = [tuple(values.shape) for values in (terms.sums, terms.counts, terms.weights)]
    fits = len({*shapes}) == 1 and len(shapes[0]) == 2 and shapes[0][0] == len(names)
    what = f"returned sums, counts and weights of shapes {shapes} for the terms {', '.join(names)}"
    check_contract(fits, criterion, what)
    if reads:
        check_contract(bool((terms.counts >= 0).all()), criterion, "returned a count that is negative or NaN")
        is_scalar = criterion.objective(terms.local_means(), len(batch.infos)).numel() == 1
        check_contract(is_scalar, criterion, "returned an objective that is not one number")
    return terms


# The result for one image

# The methods that a `Prediction` may leave out, with the flag that needs each and the reason why it is refused.
OPTIONAL_METHODS = {
    "crops": ("save_crop", "its results cover no part of an image"),
    "with_labels": ("save_hybrid", "its results are not joined with labels"),
    "coco_rows": ("save_json", "COCO has no format for its results"),
    "review": ("review", "its results are not compared with labels"),
    "to_supervision": ("track", "its results are not boxes"),
    "joined": ("tile", "windows of large images, as by `tiles` of a data YAML, are for detectors"),
}


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Result, ABC):
    """The result for one image, in pixels of its file. val.py and detect.py write it, and Python users get it.

    A subclass is a dataclass with more fields; it may leave out `OPTIONAL_METHODS`.
    """

    image: int  # index in its split
    path: str  # of the file, or another name of the image
    names: Mapping[int, str]  # of classes, by number
    # Returns the image, uint8 (h, w, 3) BGR, for `plot`; None in val.py.
    pixels: Callable[[], Image] | None = field(default=None, kw_only=True)
    ids: np.ndarray | None = field(default=None, kw_only=True)  # tracks, int64 (k,), -1 without one; None if untracked

    @property
    @abstractmethod
    def array(self) -> np.ndarray:
        """Return the whole result as one array."""

    @property
    @abstractmethod
    def scores(self) -> np.ndarray:
        """Return the confidence of each object, or of the most probable classes, float32 (k,), highest first."""

    @property
    @abstractmethod
    def classes(self) -> np.ndarray:
        """Return the class number that belongs to each of `scores`, int64 (k,)."""

    @abstractmethod
    def describe(self) -> str:
        """Format the result for the console: `2 persons, 1 dog`."""

    @abstractmethod
    def draw(self, image: Image, style: Style) -> Image:
        """Return a copy of `image` with the result drawn on it."""

    @abstractmethod
    def label_rows(self, with_confidence: bool, corners: bool = False) -> list[str]:
        """Return lines of a label file, with confidences or without; `corners`: boxes are xyxy in pixels instead of
        normalised xywh."""

    def crops(self, image: Image) -> list[tuple[str, Image]]:
        """Return the part of `image` that each object covers, with the class name (--save-crop); no part is empty."""
        raise UserError(Prediction.refused()["save_crop"])

    def with_labels(self) -> Prediction:
        """Return the image's labels followed by the predictions that match no label (--save-hybrid)."""
        raise UserError(Prediction.refused()["save_hybrid"])

    def coco_rows(self) -> CocoImage:
        """Return the detections in COCO's results format (--save-json)."""
        raise UserError(Prediction.refused()["save_json"])

    def review(self, info: Any) -> ImageReview:
        """Return how the predictions contradict the labels in the image's `info` of the batch (--review)."""
        raise UserError(Prediction.refused()["review"])

    def to_supervision(self, with_masks: bool = True) -> Any:
        """Return the objects as supervision.Detections (--track)."""
        raise UserError(Prediction.refused()["track"])

    def joined(self, others: Sequence[Any], infos: Sequence[ImageInfo], thresholds: Thresholds) -> Prediction:
        """Return the result for the image of which this and `others` are the windows that `infos` describe (--tile)."""
        raise UserError(Prediction.refused()["tile"])

    @classmethod
    def refused(cls) -> dict[str, str]:
        """Return the flags that need a method that this class leaves out, each with the message of their refusal."""
        return {
            flag: f"--{flag.replace('_', '-')} is not for this model: {reason}; leave it out"
            for name, (flag, reason) in OPTIONAL_METHODS.items()
            if getattr(cls, name) is getattr(Prediction, name)
        }


# From outputs to predictions and metrics


class View(Protocol):
    """A model's outputs for one view of a batch: the images themselves, or scaled or mirrored copies (`augment`)."""

    @property
    def outputs(self) -> Any:
        """The input of the criterion; None for an exported file, which returns no such outputs."""


@dataclass(frozen=True)
class Thresholds:
    """Limits on predictions, named like the flags. A task uses those that apply to it."""

    conf_thres: float = 0.001  # lowest confidence of a prediction
    iou_thres: float = 0.6  # overlap of two boxes above which suppression drops the less confident one
    max_det: int = 300  # predictions per image
    classes: tuple[int, ...] = ()  # classes to predict, which the model has; empty for all
    agnostic_nms: bool = False  # whether predictions of different classes suppress each other too
    one_class: bool = False  # whether a box counts for its most probable class only
    retina_masks: bool = False  # whether masks are scaled to the file before the threshold, not after it
    max_det_per_class: int = 300  # predictions per image and class, in an exported file


class Postprocess(ABC):
    """Convert a model's outputs to predictions; stateless."""

    @abstractmethod
    def views(self, model: Model, inputs: Tensor, augment: bool) -> Sequence[View]:
        """Run `model` on `inputs` and, if `augment`, on scaled or mirrored copies; the plain view is first."""

    @abstractmethod
    def __call__(self, views: Sequence[View], batch: Batch) -> Sequence[Prediction]:
        """Return a prediction for each image, from the views of all models of an ensemble, model by model."""


class Metrics(ABC):
    """Compute the metrics of a validation from predictions. Processes exchange only records."""

    @abstractmethod
    def update(self, predictions: Sequence[Prediction], batch: Batch) -> list[Any]:
        """Return a record, of plain values or arrays, for each image."""

    @abstractmethod
    def summarise(self, records: Sequence[Any]) -> Summary:
        """Return the metrics of a split from all its records, in any order."""

    @abstractmethod
    def documents(self, summary: Summary) -> dict[str, str]:
        """Return text files for the run folder, by name, such as confusion_matrix.csv. Charts are drawn from them."""

    def check_thresholds(self, thresholds: Thresholds) -> None:  # noqa: B027  # most metrics are always comparable
        """Log a warning if the metrics at `thresholds` are not comparable with other runs'."""

    def examples(self, summary: Summary) -> list[Example]:
        """Return images with labels and predictions, for trackers; none by default."""
        return []

    def pictures(self, summary: Summary, split: Split, side: int) -> dict[str, Image]:
        """Return pictures for the run folder, by name, whose longer side is `side` pixels; none by default."""
        return {}


# The task


class Task(ABC):
    """The factory of a task's parts, built once from class names and hyperparameters, then immutable."""

    loss_names: ClassVar[tuple[str, ...]]  # columns of results.csv after train/ and val/, see `loss_names_of`
    metric_names: ClassVar[tuple[str, ...]]  # columns of results.csv after metrics/
    recipe: ClassVar[type[Recipe]]  # class with the keys of its hyperparameter YAML
    recipes: ClassVar[Recipes]  # its hyperparameter files
    defaults: ClassVar[Mapping[str, Any]] = {}  # values of flags that are not on the command line
    # Features of its models, which flags may need (`needs=` in utils/config/flags.py); other flags are refused.
    features: ClassVar[frozenset[str]] = frozenset()
    # The class of its predictions: flags for methods that it leaves out are refused at the start (if None, later).
    prediction: ClassVar[type[Prediction] | None] = None
    # Whether a run without --weights starts from the weights that torchvision recommends for the model, if available.
    prefers_trained: ClassVar[bool] = False
    official_weights: ClassVar[str] = r"(?!)"  # regular expression for the names of release files

    def __init__(self, names: Mapping[int, str], hyp: Recipe, label_smoothing: float = 0.0) -> None:
        """Store the class names, by number, the smoothing, and the key `class_weights` of hyperparameters that have it.

        Raises `UserError` if names or hyperparameters do not suit the task.
        """
        self.names, self.label_smoothing = dict(names), label_smoothing
        self.class_weights = weights_by_class(names, getattr(hyp, "class_weights", {}))
        for name in names.values():
            if re.search(r"[\ud800-\udc7f\udd00-\udfff]", name):  # the others stand for bytes of a folder's name
                raise UserError(f"the class name {quoted(name)} is not valid Unicode; correct it where it stands")

    @abstractmethod
    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> Model:
        """Build the model of a YAML for this task's classes and images of about `imgsz` pixels.

        Raises `UserError`, which names `source`, if the YAML does not describe a model of this task.
        """

    @classmethod
    def renamed(cls, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tensors of a weight file, which another program may have written, by the names that this task's
        models have; unchanged by default."""
        return state

    @classmethod
    def described(cls, folder: Path) -> tuple[dict[str, Any], dict[int, str], str] | None:
        """Return the model YAML, class names and licence ('' if unknown) of another program's tensors, from the files
        beside them in `folder`; None, the default, if these describe no model of this task."""
        return None

    @abstractmethod
    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`, after `adapt`."""

    @abstractmethod
    def postprocess(self, model: Model, thresholds: Thresholds) -> Postprocess:
        """Return the conversion of outputs to predictions, for `model` or an ensemble whose first model it is."""

    @abstractmethod
    def metrics(self, drawn: frozenset[int] = frozenset()) -> Metrics:
        """Return the metrics; `drawn` are the indices of the images to draw, whose predictions are stored."""

    @abstractmethod
    def inputs(self, batch: Batch) -> Tensor:
        """Return the model's input, float (b, 3, h, w)."""

    @abstractmethod
    def export_module(self, model: Model, suppression: Thresholds | None) -> nn.Module:
        """Return the module to export, with BatchNorm folded into convolutions, for images as `inputs` makes them.

        Raises `UserError` if it cannot have a suppression of predictions, whose limits are `suppression`, in it.
        """

    @abstractmethod
    def draw_batch(self, batch: Batch) -> Image:
        """Draw a training batch as the model gets it, with its targets."""

    @classmethod
    def features_of(cls, yaml: Mapping[str, Any]) -> frozenset[str]:
        """Return the `features` of the model of a YAML, which may depend on the model."""
        return cls.features

    def loss_names_of(self, model: Model) -> tuple[str, ...]:
        """Return the names of the terms of `model`'s loss: `loss_names`, unless they depend on the model."""
        return self.loss_names

    def model_yaml(self, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's YAML with the changes that hyperparameters make. Not called for a resumed run."""
        return dict(yaml)

    def unused_keys(self, yaml: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the keys of `recipe` that are not used when the model of a YAML is trained; none by default."""
        return ()

    def fresh_tensors(self, from_yaml: bool) -> tuple[str, ...]:
        """Return parts of the names of tensors not to load from a weight file; `from_yaml`: whether --cfg is given."""
        return ()

    def keep_head(self, model: Model, state: Mapping[str, Tensor], names: Mapping[int, str]) -> str:
        """Load the usable parts of the last layer from the tensors of a weight file with other class `names`; return in
        words which, '' if none."""
        return ""

    def adapt(self, model: Model, split: Any) -> None:  # noqa: B027  # most tasks adapt nothing
        """Adapt `model` to the training split before the first step, for example by AutoAnchor, and log how."""

    def fit_classes(self, model: Model, batches: Iterable[Any], new: Sequence[int]) -> None:  # noqa: B027
        """Fit the head's outputs of `new` classes to batches of the training split, not augmented; log how."""
