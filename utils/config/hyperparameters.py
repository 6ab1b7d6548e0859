"""Hyperparameter YAML files, and the flags `--hyp.KEY` that override them. A task's recipe extends `Recipe`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from utils.config.flags import BELOW_ONE, NOT_NEGATIVE, POSITIVE, SHARE, Range, TrainOptions, flags_of, typed_values
from utils.console import log
from utils.errors import UserError, plural
from utils.files import ROOT, find_file, read_yaml

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")
R = TypeVar("R", bound="Recipe")

OVERRIDE_PREFIX = "--hyp."  # prefix of the flag of a single hyperparameter
DEFAULTS = "defaults"  # key of a hyperparameter YAML, and of a data YAML: defaults of flags
NO_OVERRIDES: Mapping[str, str] = {}
HYPS_FOLDER = "data/hyps"
FEW_IMAGES = 5000  # a run from scratch on fewer images takes another file
SMALL, MOST, LONG_RUN = 0.1, 0.75, 150  # side of a small box, share of the boxes, and batches, for `small_lr`
# Hyperparameter files of this repository, by YOLOv5's names.
YOLOV5_HYPS = {"hyp.scratch.yaml": "low.yaml", "hyp.finetune.yaml": "VOC.yaml", "hyp.no-augmentation.yaml": "none.yaml"}
YOLOV5_HYPS |= {f"hyp.scratch-{size}.yaml": f"{size}.yaml" for size in ("low", "med", "high")}
YOLOV5_HYPS |= {f"hyp.{name}.yaml": f"{name}.yaml" for name in ("VOC", "Objects365")}


def number(default: float, within: Range) -> Any:
    """Return a dataclass field that is a hyperparameter, with its default and its range."""
    return dataclasses.field(default=default, metadata={"within": within})


def keys_of(kind: type[DataclassInstance]) -> frozenset[str]:
    """Return the names of the hyperparameters that a class declares."""
    return frozenset(kind.__dataclass_fields__)


@dataclass(frozen=True)
class Recipe:
    """The keys of a hyperparameter YAML that every task has, by YOLOv5's names."""

    lr0: float = number(0.01, POSITIVE)  # learning rate of the first epoch after the warm-up
    lrf: float = number(0.01, NOT_NEGATIVE)  # learning rate of the last epoch, as a share of lr0
    momentum: float = number(0.937, BELOW_ONE)  # SGD's momentum; beta1 of Adam and AdamW
    weight_decay: float = number(0.0005, NOT_NEGATIVE)
    # Images per optimizer step, reached by accumulating batches; 0: every batch is a step.
    nbs: int = number(64, NOT_NEGATIVE)
    warmup_epochs: float = number(3.0, NOT_NEGATIVE)
    warmup_momentum: float = number(0.8, BELOW_ONE)
    warmup_bias_lr: float = number(0.1, NOT_NEGATIVE)
    clip_norm: float = number(10.0, POSITIVE)  # largest L2 norm of the gradients of an optimizer step
    # Longest warm-up as a share of the run's batches; 0 sets no limit.
    warmup_share: float = number(0.0, SHARE)
    # Largest rise of the rate from one batch of the warm-up to the next, which may lower lr0; 0 sets no limit.
    warmup_rise: float = number(0.0, NOT_NEGATIVE)
    # Share of the run's optimizer steps that the EMA averages at its end; 0 keeps YOLOv5's ramp of 2000 steps.
    ema_share: float = number(0.0, SHARE)
    # 1: BatchNorm normalises by the statistics of the weight file, and does not change them.
    keep_norms: int = number(0, Range(0, 1))
    # Factor of the learning rates if the weights know all classes of the data; for a share s of them, known_lr ** s.
    known_lr: float = number(1.0, POSITIVE)
    # Factor of lr0 for small objects of new classes, unless the run is short: see `Recipe.for_boxes`.
    small_lr: float = number(1.0, POSITIVE)
    # Factors of the learning rate by part of the model, such as {backbone: 0.1, head: 1}; parts are named as for
    # --freeze, and the last one that names a parameter counts.
    lr_factor: Mapping[str, float] = dataclasses.field(default_factory=dict, metadata={"within": NOT_NEGATIVE})
    # Further arguments of the optimizer's class, such as {eps: 1e-6}; a class that is not ours reads no `momentum`.
    optimizer_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def flags(self, epochs: int) -> dict[str, Any]:
        """Return defaults of flags that follow from the hyperparameters and the number of epochs."""
        return {}

    def weights_factor(self, share: float | None) -> float:
        """Return the factor of all learning rates for weights that know a share of the classes; None: no weights."""
        return 1.0 if share is None else self.known_lr**share

    def for_boxes(self, sides: np.ndarray, batches: int) -> Recipe:
        """Return the recipe for a run of `batches`, with a higher rate if most boxes are small; log it. `sides` (n, 2)
        are their widths and heights, as shares of the image's longer side."""
        small = (sides.prod(1) < SMALL**2).mean() if len(sides) else 0.0
        if self.small_lr == 1 or batches < LONG_RUN or small < MOST:
            return self
        log(f"learning rate times {self.small_lr:g}: {small:.0%} of the boxes are smaller than {SMALL} of the image")
        return replace(self, lr0=self.lr0 * self.small_lr)

    def freezes_batchnorm(self, share: float | None) -> bool:
        """Return whether BatchNorm keeps the statistics of the weights that a run starts from."""
        return bool(self.keep_norms) and share is not None

    def log_weights_rules(self, share: float | None) -> None:
        """Log each rule that follows from the weights."""
        if self.keep_norms:
            log(f"BatchNorm running statistics {'learned' if share is None else 'frozen at the pretrained values'}")
        if (factor := self.weights_factor(share)) != 1:
            log(f"learning rate times {factor:.2g}: the pretrained model has {share:.0%} of the classes and outputs")

    def accumulation(self, batch_size: int) -> int:
        """Return the number of batches per optimizer step that comes nearest to `nbs` images."""
        return max(round(self.nbs / batch_size), 1)

    def decay(self, images: int) -> float:
        """Return the weight decay in proportion to the images per optimizer step, YOLOv5's rule."""
        return self.weight_decay * images / self.nbs if self.nbs else self.weight_decay


@dataclass(frozen=True)
class Augmentation(Recipe):
    """The keys of a task whose images are augmented like a detector's, whose files serve it too."""

    hsv_h: float = number(0.015, SHARE)
    hsv_s: float = number(0.7, SHARE)
    hsv_v: float = number(0.4, SHARE)
    degrees: float = number(0.0, Range(0, 180))
    translate: float = number(0.1, SHARE)
    scale: float = number(0.5, BELOW_ONE)
    shear: float = number(0.0, Range(0, 90, exclusive_maximum=True))
    perspective: float = number(0.0, Range(0, 0.001))
    flipud: float = number(0.0, SHARE)
    fliplr: float = number(0.5, SHARE)
    mosaic: float = number(1.0, SHARE)
    mosaic_epochs: float = number(1.0, SHARE)  # share of the epochs, the first ones, that mix images
    mixup: float = number(0.0, SHARE)
    copy_paste: float = number(0.0, SHARE)

    def flags(self, epochs: int) -> dict[str, Any]:
        """Derive --close-mosaic, the number of final epochs that mix no images, from `mosaic_epochs`."""
        unmixed = round(epochs * (1 - self.mosaic_epochs))
        return {"close_mosaic": unmixed} if unmixed else {}


@dataclass(frozen=True)
class Transforms(Recipe):
    """The keys of a task whose images are cropped and changed by torchvision's transforms."""

    crop_scale: float = number(0.08, Range(0, 1, exclusive_minimum=True))  # smallest area of a random crop, as a share
    fliplr: float = number(0.5, SHARE)
    flipud: float = number(0.0, SHARE)
    brightness: float = number(0.4, NOT_NEGATIVE)
    contrast: float = number(0.4, NOT_NEGATIVE)
    saturation: float = number(0.4, NOT_NEGATIVE)
    hue: float = number(0.0, Range(0, 0.5))
    randaugment: int = number(0, Range(0, 16))  # number of operations
    randaugment_magnitude: int = number(9, Range(0, 30))
    erasing: float = number(0.0, SHARE)
    mixup: float = number(0.0, SHARE)
    cutmix: float = number(0.0, SHARE)
    mixup_alpha: float = number(0.2, POSITIVE)
    cutmix_alpha: float = number(1.0, POSITIVE)


@dataclass(frozen=True)
class ClassWeightKeys:
    """The key of a loss that weights objects by their class. An object of weight 2 counts like two equal objects."""

    # By class name; other classes have weight 1.
    class_weights: Mapping[str, float] = dataclasses.field(default_factory=dict, metadata={"within": Range(0.01, 100)})


@dataclass(frozen=True)
class AnchorKeys(ClassWeightKeys):
    """The keys that a head with anchors reads: its loss, and AutoAnchor."""

    box: float = number(0.05, NOT_NEGATIVE)  # gains of the loss terms
    cls: float = number(0.5, NOT_NEGATIVE)
    cls_pw: float = number(1.0, POSITIVE)  # weight of positives in the class term
    obj: float = number(1.0, NOT_NEGATIVE)
    obj_pw: float = number(1.0, POSITIVE)
    # A target matches an anchor if width and height differ by less than this factor.
    anchor_t: float = number(4.0, Range(1, exclusive_minimum=True))
    # Anchors per level if they are to be computed from the data; 0 keeps the model's.
    anchors: float = number(0.0, NOT_NEGATIVE)
    # AutoAnchor replaces anchors that match at most this share of the training boxes.
    anchor_recall: float = number(0.98, SHARE)
    # 1: the outputs of classes that the weights do not know are fitted to the training photos before the first step.
    fit_classes: int = number(0, Range(0, 1))
    fl_gamma: float = number(0.0, NOT_NEGATIVE)  # focal loss; 0 is off


@dataclass(frozen=True)
class AlignmentKeys(ClassWeightKeys):
    """The keys that a head with task-aligned assignment (DetectDFL) reads: gains, and the auxiliary branch's weight."""

    tal_box: float = number(7.5, NOT_NEGATIVE)
    tal_cls: float = number(0.5, NOT_NEGATIVE)
    tal_dfl: float = number(1.5, NOT_NEGATIVE)
    tal_aux: float = number(0.25, NOT_NEGATIVE)


@dataclass(frozen=True)
class Hyperparameters(Augmentation, AlignmentKeys, AnchorKeys, Recipe):
    """The keys of a hyperparameter YAML for a detector with any head. The defaults equal data/hyps/low.yaml."""

    iou_t: float = number(0.2, SHARE)  # not used, but in every YOLOv5 file
    # 1: a head for other classes takes what it can from the weight file: boxes, objectness, classes of the same name.
    keep_head: int = number(0, Range(0, 1))


class Recipes(NamedTuple):
    """The hyperparameter files of a task, among which --hyp auto chooses: names or paths, as for --hyp."""

    trained: str  # for a run that starts from trained weights
    few: str = ""  # for a run from scratch on fewer than `FEW_IMAGES` images; '' means `trained`
    many: str = ""  # for any other run from scratch; '' means `few`
    yolov5: str = ""  # with YOLOv5's own values; '' if the task has none

    def choose(self, trained: bool, images: Callable[[], int]) -> str:
        """Return the hyperparameter file for a run, and log the reason; count `images` if it matters."""
        name = self.trained if trained else self.few or self.trained
        reason = "the run starts from trained weights" if trained else "no trained weights are given or fit"
        if not trained and self.many not in ("", name):
            count = images()
            name, bound = (name, "fewer than") if count < FEW_IMAGES else (self.many, "at least")
            reason += f", and there are {plural(count, 'training image')}, {bound} {FEW_IMAGES}"
        other = f"; --hyp {self.yolov5} has YOLOv5's values" if self.yolov5 not in ("", name) else ""
        log(f"hyperparameters: --hyp {name}, because {reason}{other}")
        return name


def read_hyperparameters(name: str, kind: type[R], overrides: Mapping[str, str] = NO_OVERRIDES) -> R:
    """Read and check a hyperparameter YAML as a `kind`; absent keys keep its defaults.

    `defaults:` is left to `defaults_of_hyp`, and an `Augmentation` ignores a detector's other keys. Raises `UserError`.
    """
    path = find_hyperparameters(name)
    left_out = {DEFAULTS, *(keys_of(Hyperparameters) - keys_of(kind) if issubclass(kind, Augmentation) else ())}
    values = {key: value for key, value in read_yaml(path).items() if key not in left_out}
    for other, whose in ((Hyperparameters, "a detector's"), (Transforms, "a classifier's")):
        if (unknown := values.keys() - keys_of(kind)) and unknown <= keys_of(other):
            raise UserError(f"{path} is {whose} recipe: this task has no {min(unknown)}; give another --hyp, or auto")
    return dataclasses.replace(from_mapping(kind, values, path), **parse_overrides(kind, overrides))


def defaults_of_hyp(name: str) -> dict[str, Any]:
    """Return the `defaults:` of the hyperparameter file that --hyp names, {} if it has none. Raises `UserError`."""
    path = find_hyperparameters(name)
    return suggested_defaults(read_yaml(path).get(DEFAULTS, {}), path, "hyp")


def suggested_defaults(values: object, source: Path, kind: str = "data") -> dict[str, Any]:
    """Return the `defaults:` of a YAML of a kind, "data" or "hyp", by field name. Raises `UserError`."""
    if not isinstance(values, dict):
        raise UserError(f"{source}: `defaults` must be lines such as `imgsz: 64`, not {values!r}")
    known = [field.name for field in flags_of(TrainOptions) if kind in field.metadata["suggested"]]
    if ":" in str(code := values.get("optimizer", "")):
        raise UserError(f"{source}: `optimizer: {code}` under `defaults` would import code; give --optimizer {code}")
    return typed_values(TrainOptions, values, f"{source}: `{{}}` under `defaults`".format, known)


def find_hyperparameters(name: str) -> Path:
    """Return the file that --hyp names. Raises `UserError`."""
    folder, file = os.path.split(name)
    if os.path.normpath(folder) in (".", "data", HYPS_FOLDER) and not os.path.isfile(name):
        name = YOLOV5_HYPS.get(file, name)
    return find_file(name, "hyperparameter file", [HYPS_FOLDER])


def is_shipped(name: str) -> bool:
    """Return whether --hyp names a file of this repository instead of a user's."""
    return not os.path.isfile(name) or Path(name).resolve().parent == ROOT / HYPS_FOLDER


def parse_overrides(kind: type[Recipe], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Return the numbers of flags such as --hyp.lr0, by key. Raises `UserError` for a wrong flag."""
    return typed_values(kind, overrides, (OVERRIDE_PREFIX + "{}").format)


def log_unused(hyp: Recipe, unused_keys: Collection[str], model: str) -> None:
    """Log the keys that have no effect although the hyperparameter file changes their defaults."""
    if changed := [key for key in unused_keys if getattr(hyp, key) != getattr(type(hyp)(), key)]:
        log(f"hyperparameters without effect on {model}: {', '.join(changed)}")


def from_mapping(kind: type[T], values: Mapping[str, Any], source: Path | str) -> T:
    """Return a `kind` with the values of a YAML. Raises `UserError` for an unknown key or a wrong value."""
    return kind(**typed_values(kind, values, f"{source}: {{}}".format))
