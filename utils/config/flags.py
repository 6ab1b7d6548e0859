"""The flags of train.py, val.py, detect.py and export.py: a frozen dataclass per script, a field per flag.

A flag is one declaration, with its type, range, default and help, and what follows from it: whether the training curve
depends on it, and what a model must have for it. `typed` is the one check of a value of a flag, a hyperparameter or a
YAML key. `REFUSED` names flags of YOLOv5 and of earlier versions.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, TypeGuard, TypeVar

import yaml

from utils.errors import UserError, nearest, quoted
from utils.files import YamlLoader

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a finite int or float that fits into a float; bools are not numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


@dataclass(frozen=True)
class Range:
    """The finite numbers from `minimum` to `maximum`; an exclusive bound is not in the range."""

    minimum: float = -math.inf
    maximum: float = math.inf
    exclusive_minimum: bool = False
    exclusive_maximum: bool = False

    def __contains__(self, value: float) -> bool:
        above = self.minimum < value if self.exclusive_minimum else self.minimum <= value
        below = value < self.maximum if self.exclusive_maximum else value <= self.maximum
        return above and below and is_number(value)

    def __str__(self) -> str:
        minimum, maximum = f"{self.minimum:.10g}", f"{self.maximum:.10g}"
        low = f"more than {minimum}" if self.exclusive_minimum else f"{minimum} or more"
        if self.maximum == math.inf:
            return low
        return f"{low} and less than {maximum}" if self.exclusive_maximum else f"{minimum} to {maximum}"


FINITE, NOT_NEGATIVE, POSITIVE = Range(), Range(0), Range(0, exclusive_minimum=True)
SHARE, BELOW_ONE = Range(0, 1), Range(0, 1, exclusive_maximum=True)
IMGSZ = Range(1, 2**14)  # the side of an image, in pixels
NUMBER_OR_NAME = int | str
PYTHON_SUFFIX = ".py"
PYTHON_FILE = f"FILE{PYTHON_SUFFIX}"  # among the choices of a flag: any Python file
IMPORT_PATH = "package.module:Class"  # among the choices of a flag: any class of an installed package
WRONG_VALUE = (ValueError, TypeError, OverflowError, yaml.YAMLError)
OPSETS = Range(12, 21)  # ONNX operator sets that torch's exporters write and ONNX Runtime 1.20 runs


def typed(hint: Any, metadata: Mapping[str, Any], value: Any) -> Any:
    """Return a value of a command line or a YAML as a field's type.

    Text may stand for a number, and one value for a tuple. Raises one of `WRONG_VALUE` for any other value.
    """
    origin = typing.get_origin(hint)
    if origin is Mapping:
        mapping = yaml.load(value, YamlLoader) if isinstance(value, str) else value
        is_plain = typing.get_args(hint)[1] is Any
        return {str(key): x if is_plain else typed(float, metadata, x) for key, x in dict(mapping).items()}
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        if metadata.get("comma_separated"):
            items = [word for item in items for word in separated(str(item))]
        return tuple(typed(typing.get_args(hint)[0], {**metadata, "comma_separated": False}, item) for item in items)
    if hint == NUMBER_OR_NAME:
        return int(value) if isinstance(value, int) or re.fullmatch(r"-?\d+", value) else value
    if hint in (int, float):
        number = float(value) if isinstance(value, str) else value
        if number not in metadata.get("within", FINITE) or hint(number) != number:
            raise ValueError
        return hint(number)
    if hint is str and type(value) is int:
        value = str(value)
    if not isinstance(value, hint):
        raise ValueError
    return value if hint is bool else _text(value, metadata)


def _text(text: str, metadata: Mapping[str, Any]) -> str:
    """Return a text whose words are choices; `PYTHON_FILE` is any Python file, `IMPORT_PATH` any import path."""
    choices, synonyms = metadata.get("choices") or (), metadata.get("synonyms") or {}
    words = separated(text) if metadata.get("comma_separated") else [text]
    words = [synonyms.get(word.lower(), word) for word in words]
    for word in words if choices and text else ():
        is_file = PYTHON_FILE in choices and PurePath(word).suffix == PYTHON_SUFFIX
        is_path = IMPORT_PATH in choices and re.fullmatch(r"[\w.]+:\w+", word)
        if not (word in choices or is_file or is_path) or (len(words) > 1 and word in ("none", "all")):
            raise ValueError
    return ",".join(words)


def separated(text: str) -> list[str]:
    """Return the words of a comma-separated text."""
    return [word.strip() for word in text.split(",") if word.strip()]


def expected(hint: Any, metadata: Mapping[str, Any]) -> str:
    """Describe the values that `typed` takes: `a whole number, 1 or more`."""
    within = metadata.get("within", FINITE)
    if typing.get_origin(hint) is Mapping:
        if typing.get_args(hint)[1] is Any:
            return "names with values, such as {eps: 1e-6, foreach: false}"
        return f"names with numbers, {within}, such as {{cat: 2, dog: 1.5}}"
    if typing.get_origin(hint) is tuple:
        return f"{expected(typing.get_args(hint)[0], metadata)}, or a list of such"
    if choices := metadata.get("choices"):
        return f"one of {', '.join(map(repr, choices))}"
    nouns = {bool: "True or False", str: "a text or path", int: "a whole number", float: "a number"}
    noun = nouns.get(hint, "a whole number or a name")
    return noun if within == FINITE or hint not in (int, float) else f"{noun}, {within}"


def profile_window(text: str) -> tuple[int, int]:
    """Return the first and the last step of --profile START:STOP; (0, 0) for any other text, which is refused."""
    first, last = map(int, text.split(":")) if re.fullmatch(r"\d+:\d+", text) else (0, 0)
    return (first, last) if 1 <= first <= last else (0, 0)


def typed_values(
    kind: type[DataclassInstance], values: Mapping[str, Any], named: Callable[[str], str], known: Collection[str] = ()
) -> dict[str, Any]:
    """Return values by field name as the types of the fields of `kind`, or of those that are `known`.

    Raises `UserError`, in which `named` names a field, also for an unknown name and for a value in `REFUSED`.
    """
    hints, all_fields, result = typing.get_type_hints(kind), kind.__dataclass_fields__, {}
    known = known or all_fields
    for key, value in values.items():
        for word in value if isinstance(value, (list, tuple)) else [value]:
            if instead := REFUSED.get(f"{key} {word}"):
                raise UserError(f"{named(key)} {word} {instead}")
        if key not in known:
            raise UserError(f"{named(key)} is unknown{nearest(str(key), known)}; correct or remove it")
        metadata = all_fields[key].metadata
        try:
            result[key] = typed(hints[key], metadata, value)
        except WRONG_VALUE:
            wanted, hint = expected(hints[key], metadata), nearest(str(value), metadata.get("choices") or ())
            raise UserError(f"{named(key)} must be {wanted}, not {quoted(value, 80)}{hint}") from None
    return result


def select(kind: type[T], source: DataclassInstance, **more: Any) -> T:
    """Return a `kind` with the fields of `source` that have the same names, overridden by `more`."""
    names = {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(source)}
    return kind(**{**{name: getattr(source, name) for name in names}, **more})


NEWEST = "newest"  # --resume without a value: the newest run of --project
AUTO = "auto"  # --resume auto: the newest run of --name, else a new run; --hyp auto: see `Recipes.choose`
PRECISIONS, CACHES = ("no", "fp16", "bf16"), ("ram", "disk", "val")
RECIPE_OPTIMIZERS = ("SGD", "Adam", "AdamW")  # for which the recipes' learning rates are meant
# Others that work alike on any part of a parameter, as ZeRO needs it
SHARDABLE_OPTIMIZERS = (*RECIPE_OPTIMIZERS, "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")
OPTIMIZERS = (*SHARDABLE_OPTIMIZERS, "Adafactor", "Adagrad", "ASGD", "Rprop", IMPORT_PATH)
# Of --log-with: all that Accelerate knows, named like the packages to install.
TRACKERS = ("wandb", "tensorboard", "mlflow", "comet_ml", "clearml", "aim", "dvclive", "swanlab", "trackio")
LOG_WITH = ("none", "all", *TRACKERS, PYTHON_FILE)
# Of --track: classes of `trackers`, without their ending Tracker. Its McByte needs models of masks.
OBJECT_TRACKERS = {"bytetrack": "ByteTrack", "ocsort": "OCSORT", "sort": "SORT", "botsort": "BoTSORT", "cbiou": "CBIoU"}
# Headings of --help, in this order, the trackers' last; a script shows only the headings of its flags.
GROUPS = (
    *("model", "data", "images", "training", "format", "predictions", "NMS", "drawing"),
    *("processes", "saving", "console", "logging"),
)


def flag(  # noqa: PLR0913 - a flag is one declaration
    default: object,
    text: str,
    group: str,
    within: Range = FINITE,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    synonyms: Mapping[str, str] | None = None,
    const: str | None = None,
    comma_separated: bool = False,
    needs: str = "",
    curve: bool = False,
    suggested: tuple[str, ...] = (),
) -> Any:
    """Return a dataclass field that is a flag of the command line, with these arguments as its metadata.

    Args:
        within: allowed range of a number
        synonyms: other words for some of `choices`
        const: value of the flag if it is given without an argument
        comma_separated: whether commas separate the words of a tuple, as spaces do, or the choices of a text
        needs: feature that a model must have, see `Task.features`; '' if the flag applies to every model
        curve: whether the training curve depends on the flag, so that a run cannot be resumed with another value
        suggested: kinds of YAML that may set a default of the flag under `defaults:`, of "data" and "hyp"
    """
    return dataclasses.field(default=default, metadata={**locals(), "help": text})


def as_flag(name: str) -> str:
    """Return the name of a field as the flag of the command line."""
    return f"--{name.replace('_', '-')}"


def flags_of(kind: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    """Return the fields of an options class that are flags: all but `overrides`."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]


# Flags of several scripts; some give another default.
BY_DATA, BY_FILES = ("data",), ("data", "hyp")
BATCH, SIZES, TASK, CONF, IOU = ("batch",), ("img", "img-size"), ("task",), ("conf",), ("iou",)
DEVICE = partial(flag, "", "cpu, mps or CUDA devices such as 0,1 (a process each); '' takes the best", "processes")
LAYERS = partial(flag, "", "Python file with your own layers, which the model may contain; it is executed", "model")
TASK_FILE = partial(flag, "", "Python file or package with the model's task; it is executed", "model")
SIDES = partial(
    flag, (), "pixels: one number, or height and width; none: the checkpoint's or 640", within=IMGSZ, aliases=SIZES
)
CONF_THRES = partial(flag, text="confidence threshold", within=SHARE)
IOU_THRES = partial(flag, text="IoU threshold of NMS", within=SHARE, needs="suppression")
MAX_DET = partial(flag, text="maximum detections per image", group="predictions", within=Range(1), needs="detections")
PRECISION = partial(flag, "", "autocast; '' is the launch file's, else bf16 or fp16 on CUDA", choices=PRECISIONS)


@dataclass(frozen=True)
class TrainOptions:
    """The flags of train.py."""

    examples: ClassVar[tuple[str, ...]] = (
        "python train.py               # the built-in job, in minutes without a GPU",
        "python train.py --data my.yaml --weights yolov5n.pt",
        "python train.py --resume      # continues the newest run",
    )
    weights: str = flag(
        "yolov5s.pt", "initial weights, a file or hf:owner/name; '' is none", "model", curve=True, suggested=BY_DATA
    )
    cfg: str = flag("", "model YAML; '' takes the one inside --weights", "model", curve=True)
    allow_licence: tuple[str, ...] = flag((), "licences that --weights may have", "model", comma_separated=True)
    layers: str = LAYERS()
    task_file: str = flag("", "Python file or package with your own task; it is executed", "model", aliases=TASK)
    data: str = flag("data/coco128.yaml", "data set: a YAML, a folder, or a file of annotations or images", "data")
    hyp: str = flag("auto", "recipe, a YAML of data/hyps; auto chooses, low is YOLOv5's", "training", suggested=BY_DATA)
    epochs: int = flag(100, "passes over the training images", "training", Range(1), suggested=BY_FILES)
    batch_size: int = flag(
        16, "total batch size; -1: what fits", "training", Range(-1), aliases=BATCH, curve=True, suggested=BY_FILES
    )
    imgsz: int = flag(640, "image size in pixels", "data", IMGSZ, aliases=SIZES, suggested=BY_FILES)
    rect: bool = flag(False, "rectangular batches; no shuffling or mosaic", "data", needs="padding", curve=True)
    multi_scale: bool = flag(False, "vary the image size, 0.5 to 1.5 times --imgsz", "training", curve=True)
    image_weights: bool = flag(False, "sample images of rare classes more often", "data", curve=True)
    close_mosaic: int = flag(
        0, "final epochs without mosaic and mixup", "data", NOT_NEGATIVE, needs="mixing", curve=True, suggested=("hyp",)
    )
    augmentations: str = flag(
        "", "your augmentations: a Python file, which is executed", "data", needs="augmentation", curve=True
    )
    mask_ratio: int = flag(4, "masks at 1/N of the image size", "data", Range(1, 32), needs="masks", curve=True)
    no_overlap: bool = flag(
        False, "do not merge overlapping masks (overlap_mask=False in ultralytics)", "data", needs="masks", curve=True
    )
    strict: bool = flag(False, "bad images and label rows are errors, not warnings", "data")
    resume: str = flag(
        "", "the newest run of --project, or a run folder; auto: of --name, if there is one", "training", const=NEWEST
    )
    nosave: bool = flag(False, "write weights only at the end", "saving")
    noval: bool = flag(False, "validate only after the last epoch", "training")
    noautoanchor: bool = flag(False, "disable AutoAnchor", "model", needs="anchors", curve=True)
    noplots: bool = flag(False, "write no pictures into the run folder", "saving")
    cache: str = flag(
        "", "decoded images in memory or on disk; val: the validation images only", "data", choices=CACHES, const="ram"
    )
    device: str = DEVICE()
    processes: int = flag(0, "processes to start on this machine without a launcher", "processes", Range(1))
    logical_processes: int = flag(
        0,
        "emulate N processes (a power of two): bitwise equal results on 1 to N real ones",
        "processes",
        Range(1, 1024),
        curve=True,
    )
    dist_timeout: float = flag(1800.0, "seconds that processes wait for each other", "processes", Range(1, 1e6))
    sync_bn: bool = flag(False, "SyncBatchNorm over all processes, on CPU too", "processes")
    single_cls: bool = flag(False, "treat all classes as one", "model", curve=True)
    optimizer: str = flag(
        "SGD",
        "class of torch.optim, or package.module:Class",
        "training",
        choices=OPTIMIZERS,
        curve=True,
        suggested=BY_FILES,
    )
    workers: int = flag(8, "loader processes per training process, at most one per CPU core", "data", NOT_NEGATIVE)
    project: str = flag("runs/train", "folder in which run folders are made", "saving")
    name: str = flag("exp", "name of the run folder; a number is added if it is taken", "saving")
    exist_ok: bool = flag(False, "write into project/name if it is an earlier run's", "saving")
    cos_lr: bool = flag(False, "cosine learning rate, not linear", "training", curve=True, suggested=BY_FILES)
    label_smoothing: float = flag(
        0.0, "label smoothing epsilon", "training", BELOW_ONE, needs="label smoothing", curve=True, suggested=BY_FILES
    )
    patience: int = flag(100, "early stopping: epochs without a better fitness; 0: never", "training", NOT_NEGATIVE)
    fitness: str = flag("", "metrics of the best epoch, such as mAP_0.5=0.2,recall=0.8", "training", curve=True)
    freeze: tuple[int | str, ...] = flag(
        (0,), "first N layers; -N: all but the last N; or layer numbers, backbone, head, *.bn", "model", curve=True
    )
    save_period: int = flag(-1, "save weights/epochN.pt every N epochs; -1: never", "saving")
    save_steps: int = flag(0, "save for --resume every N steps, not only every epoch", "saving", NOT_NEGATIVE)
    time_limit: float = flag(0.0, "hours after which a run stops and validates; 0: never", "training", NOT_NEGATIVE)
    seed: int = flag(0, "seed of every random choice", "training", Range(0, 2**32 - 1), curve=True)
    no_deterministic: bool = flag(False, "allow nondeterministic CUDA kernels: often faster", "training")
    no_cuda_graph: bool = flag(False, "disable CUDA graphs: same bytes, but slower", "training")
    mixed_precision: str = PRECISION(group="training")
    log_with: str = flag(
        "", "none, all or trackers; '' is wandb if installed", "logging", choices=LOG_WITH, comma_separated=True
    )
    no_wandb: bool = flag(False, "do not log to Weights & Biases", "logging")
    bbox_interval: int = flag(
        -1, "epochs between W&B pictures of boxes; -1: ten per run, 0: none", "logging", Range(-1), needs="examples"
    )
    upload_model: bool = flag(False, "upload weights to W&B: each --save-period, and last.pt and best.pt", "logging")
    upload_dataset: bool = flag(False, "make the data set a W&B artifact of references to its files", "logging")
    profile: str = flag("", "profile the optimizer steps START:STOP, such as 10:15", "training")
    hooks: str = flag("", "Python file with your on_epoch and on_end; it is executed", "training")
    hashes: bool = flag(False, "write hashes.csv: hashes of what each step reads and changes", "saving")
    doctor: bool = flag(False, "do not train: check all processes and hosts for what would go wrong", "processes")
    # The values of flags such as --hyp.lr0, as text by key; the model's task knows which keys there are.
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class InferenceOptions:
    """The flags that val.py and detect.py share."""

    weights: tuple[str, ...] = flag(
        ("yolov5s.pt",), "files, run folders, hf:owner/name; several are an ensemble", "model"
    )
    layers: str = LAYERS()
    augment: bool = flag(False, "test-time augmentation: several sizes, mirrored", "predictions", needs="copies")
    device: str = DEVICE()
    processes: int = flag(0, "processes to start on this machine without a launcher", "processes", Range(1))
    save_txt: bool = flag(False, "write detections as labels/*.txt into the run folder", "saving")
    save_conf: bool = flag(False, "with --save-txt: add each detection's confidence", "saving")
    half: bool = flag(False, "FP16 inference, on CUDA only", "model")
    name: str = flag("exp", "name of the run folder; a number is added if it is taken", "saving")
    exist_ok: bool = flag(False, "write into project/name if it is an earlier run's", "saving")


@dataclass(frozen=True)
class ValOptions(InferenceOptions):
    """The flags of val.py."""

    examples: ClassVar[tuple[str, ...]] = (
        "python val.py --weights runs/train/exp/weights/best.pt --data my.yaml",
        "python val.py --weights best.pt --data my.yaml --task test --save-json",
        "python val.py --weights best.pt --data my.yaml --task speed --batch-size 1",
    )
    data: str = flag("data/coco128.yaml", "data set: a YAML, a folder, or a file of annotations or images", "data")
    task_file: str = TASK_FILE()
    batch_size: int = flag(32, "images per batch", "data", Range(1), aliases=BATCH)
    imgsz: int = flag(
        0, "image size in pixels; 0: the checkpoint's, the data's or 640", "data", Range(0, 2**14), aliases=SIZES
    )
    conf_thres: float = CONF_THRES(0.001, group="predictions", aliases=CONF, needs="detections")
    iou_thres: float = IOU_THRES(0.6, group="predictions", aliases=IOU)
    max_det: int = MAX_DET(300)
    task: str = flag("val", "split; speed: the time per image", "data", choices=("train", "val", "test", "speed"))
    dist_timeout: float = flag(1800.0, "seconds that processes wait for each other", "processes", Range(1, 1e6))
    workers: int = flag(8, "loader processes, at most one per CPU core", "data", NOT_NEGATIVE)
    single_cls: bool = flag(False, "treat all classes as one", "data")
    square: bool = flag(False, "square batches (rect=False in ultralytics)", "data", needs="padding")
    strict: bool = flag(False, "bad images and label rows are errors, not warnings", "data")
    log_with: str = flag(
        "none", "trackers: none, all, or several with commas", "logging", choices=LOG_WITH, comma_separated=True
    )
    verbose: bool = flag(False, "a row per class, even if there are many", "console")
    quiet: bool = flag(False, "print only warnings and the row of all classes", "console")
    noplots: bool = flag(False, "write no pictures into the run folder", "saving")
    save_hybrid: bool = flag(False, "with --save-txt: labels, and detections without one", "saving", needs="boxes")
    save_json: bool = flag(False, "write COCO results, and compute COCO's metrics", "saving", needs="boxes")
    review: int = flag(0, "rank contradictions of labels and predictions; draw the first N", "saving", NOT_NEGATIVE)
    annotations: str = flag("", "COCO annotations; '' is the data set's annotations/*.json", "saving", needs="boxes")
    project: str = flag("runs/val", "folder in which run folders are made", "saving")
    mixed_precision: str = PRECISION(group="model")


@dataclass(frozen=True)
class DetectOptions(InferenceOptions):
    """The flags of detect.py."""

    examples: ClassVar[tuple[str, ...]] = (
        "python detect.py --weights best.pt --source photos",
        "python detect.py --weights best.pt --source film.mp4 --conf-thres 0.5",
        "python detect.py --weights best.pt --source 0 --view-img     # a camera",
    )
    source: tuple[str, ...] = flag((), "files, folders, globs, lists, URLs, cameras, or rtsp://...", "images")
    data: str = flag("", "data set YAML with the class names; '' takes those inside --weights", "model")
    imgsz: tuple[int, ...] = SIDES(group="images")
    conf_thres: float = CONF_THRES(0.25, group="predictions", aliases=CONF, needs="detections")
    iou_thres: float = IOU_THRES(0.45, group="predictions", aliases=IOU)
    max_det: int = MAX_DET(1000)
    batch_size: int = flag(1, "batch size, of consecutive images of one shape", "images", Range(1), aliases=BATCH)
    tile: int = flag(0, "size in pixels of windows to cut images into; 0: whole images", "images", Range(32, 2**14))
    task_file: str = TASK_FILE(aliases=TASK)
    view_img: bool = flag(False, "show the results in a window, if OpenCV and a display are available", "drawing")
    save_format: int = flag(0, "in labels: 0 is x y w h, 1 is pixels x y x y", "saving", Range(0, 1), needs="boxes")
    save_csv: bool = flag(False, "write detections into predictions.csv", "saving")
    save_json: bool = flag(False, "write detections as COCO's results into predictions.json", "saving", needs="boxes")
    annotations: str = flag("", "with --save-json: COCO file with the ids of images and classes", "saving")
    save_crop: bool = flag(False, "save each box's crop as crops/CLASS/*.jpg", "saving")
    retina_masks: bool = flag(False, "masks at the original image size; slower", "predictions", needs="masks")
    nosave: bool = flag(False, "write no pictures or videos", "saving")
    classes: tuple[str, ...] = flag((), "names or numbers of classes; none: all", "predictions", needs="detections")
    agnostic_nms: bool = flag(False, "class-agnostic NMS", "predictions", needs="suppression")
    track: str = flag("", "track objects", "predictions", choices=(*OBJECT_TRACKERS,), const="bytetrack", needs="boxes")
    project: str = flag("runs/detect", "folder in which run folders are made", "saving")
    line_thickness: int = flag(3, "line width of boxes in pixels; text follows it", "drawing", Range(1, 100))
    hide_labels: bool = flag(False, "draw boxes without names", "drawing")
    hide_conf: bool = flag(False, "draw names without confidences", "drawing")
    resume: str = flag("", "the newest unfinished run of --project, or a run folder", "saving", const=NEWEST)
    vid_stride: int = flag(1, "use every n-th frame of a video or stream", "images", Range(1))
    quiet: bool = flag(False, "print only warnings and the last line", "console")


@dataclass(frozen=True)
class ExportOptions:
    """The flags of export.py."""

    examples: ClassVar[tuple[str, ...]] = (
        "python export.py --weights best.pt --include onnx",
        "python export.py --weights best.pt --include onnx openvino --dynamic",
        "python export.py --weights best.pt --include torchscript --nms --imgsz 640",
    )
    weights: tuple[str, ...] = flag(("yolov5s.pt",), "a .pt, a run folder, a .safetensors or hf:owner/name", "model")
    data: str = flag("", "data set with the class names, and --int8's images; '' takes names inside --weights", "model")
    layers: str = LAYERS()
    task_file: str = TASK_FILE(aliases=TASK)
    imgsz: tuple[int, ...] = SIDES(group="format")
    batch_size: int = flag(1, "images per batch in the exported file", "format", Range(1, 4096), aliases=BATCH)
    device: str = flag("cpu", "cpu or the number of the CUDA device on which a .torchscript will run", "model")
    include: tuple[str, ...] = flag(
        ("torchscript",),
        "formats; engine: an ONNX file, and the trtexec command for TensorRT",
        "format",
        choices=("torchscript", "onnx", "openvino", "ncnn", "tflite", "coreml", "safetensors", "engine"),
        synonyms={"tensorrt": "engine", "trt": "engine"},
    )
    dynamic: bool = flag(False, "dynamic batch and image size (ONNX, OpenVINO)", "format")
    half: bool = flag(False, "half precision, on CUDA only", "format")
    int8: bool = flag(False, "8-bit integers (ONNX, OpenVINO, TFLite), calibrated on --data's training split", "format")
    opset: int = flag(18, "ONNX operator set", "format", OPSETS)
    nms: bool = flag(False, "include NMS: the file outputs detections", "NMS", needs="suppression")
    agnostic_nms: bool = flag(False, "with --nms: class-agnostic", "NMS", needs="suppression")
    topk_per_class: int = flag(100, "with --nms: detections per class and image", "NMS", Range(1), needs="suppression")
    topk_all: int = flag(100, "with --nms: maximum detections per image", "NMS", Range(1, 10_000), needs="suppression")
    iou_thres: float = IOU_THRES(0.45, group="NMS")
    conf_thres: float = CONF_THRES(0.25, group="NMS", needs="suppression")
    simplify: bool = flag(False, "has no effect: ONNX files are always simplified", "format")
    inplace: bool = flag(False, "has no effect: boxes are never decoded in place", "format")
    verbose: bool = flag(False, "show the exporters' messages", "console")


# The defaults of `python train.py` if none of --data, --cfg, --weights and --hyp is given.
BUILT_IN_JOB: Mapping[str, Any] = {
    "weights": "",
    "cfg": "models/yolov5n.yaml",
    "data": "data/shapes.yaml",
    "hyp": "data/hyps/shapes.yaml",
    "epochs": 13,
    "batch_size": 8,
    "imgsz": 160,
    "optimizer": "AdamW",
}

# Formats that other programs make of an exported file.
CONVERTED = ("saved_model", "pb", "edgetpu", "tfjs", "tensorflow", "paddle", "mlmodel")
# Others' flags that are accepted with these values, which ask for nothing: a rank is in the environment too.
IGNORED = {"local_rank": tuple(map(str, range(-1, 64))), "artifact_alias": ("latest",), "save": ("True",)}
# Keys: a flag with underscores, or a flag and its value. The error message is the flag and the text; a script that has
# the flag accepts it.
REFUSED = {
    **dict.fromkeys(
        ("evolve", "evolve_population", "resume_evolve"),
        "is not built in: examples/tune.py searches, and W&B sweeps do on many machines; see docs/tracking.md#sweeps",
    ),
    "bucket": "is not built in: copy the run folder with your cloud's own command, such as aws s3 sync",
    "optimizer Muon": "takes matrices only, and a network also has other parameters; give AdamW",
    "quad": "is not built in: train at a larger --imgsz, or with --multi-scale",
    "update": "is not needed: official weights are read as they are",
    "visualize": "is not built in: a PyTorch forward hook on a layer returns its feature maps",
    "dnn": "is not built in: OpenCV's DNN module runs ONNX files without the scripts",
    # YOLOv5's export.py
    **dict.fromkeys(
        ("optimize", "keras", "per_tensor", "workspace", "mlmodel", *(f"include {name}" for name in CONVERTED)),
        "is not built in: the format's own converter makes it of the .onnx file; see docs/export.md#other-formats",
    ),
    "cache": "is a flag of train.py; TensorRT's timing cache is trtexec --timingCacheFile=FILE --onnx=best.onnx",
    **dict.fromkeys(("include exported", "include pt2"), "has left: torchscript and onnx are programs too"),
    "task study": "is not built in: call val.py once for each --imgsz, and compare their tables",
    **dict.fromkeys(
        (f"{flag} {task}" for flag in ("task", "task_file") for task in ("detect", "segment", "classify")),
        "is not needed: the model decides, such as --weights yolov5n.pt, yolov5n-seg.pt or yolov5n-cls.pt",
    ),
    # YOLOv5's classify/train.py
    "model": "is --weights here, or --cfg for a model from scratch, such as --cfg yolov5s-cls.yaml",
    "pretrained": "is not needed: --weights names what to start from, and --weights '' starts from scratch",
    **dict.fromkeys(("ndjson_console", "ndjson_file"), "is not needed: results.csv has the values of every epoch"),
    "decay": "is a hyperparameter: give --hyp.weight_decay",
    "cutoff": "is not built in: a model has the layers of its YAML; give another YAML with --cfg",
    "dropout": "is the second argument of the row Classify in the model YAML; give your own YAML with --cfg",
    # ultralytics
    "format": "is --include of export.py here",
    "save": "is the default of detect.py, without --nosave; results of a Predictor have save()",
    "verbose": "is for val.py and export.py; val.py and detect.py have --quiet (from Python quiet=True)",
    "stream": "is not needed: detect.py writes results one by one, and a Predictor takes an image or frame per call",
    "local_rank": "is in the environment: start with torchrun, accelerate launch or --processes",
    **dict.fromkeys(("scale_lr", "learning_rate", "lr"), "is the hyperparameter lr0 here: give --hyp.lr0"),
    # earlier versions of this repository
    **dict.fromkeys(
        (
            *("image_padding", "repeat_factor", "partners", "no_oom_retry", "keep_state", "weights_precision"),
            *("max_skips", "log_interval", "max_images", "quiet", "push_to_hub", "comm_hook"),
            *("show_processes", "wandb_registry", "wandb_alerts", "wandb_project", "wandb_entity", "wandb_group"),
            *("wandb_tags", "wandb_name", "wandb_notes", "wandb_job_type", "wandb_id"),
        ),
        "has left: see docs/flags.md#flags-of-earlier-versions",
    ),
    # YOLOv5, some of older versions
    "entity": "has left: set W&B's variable WANDB_ENTITY",
    "adam": "is --optimizer Adam here",
    "linear_lr": "is the default here: the learning rate is linear without --cos-lr",
    "cache_images": "is --cache here",
    "notest": "is --noval here",
    "log_artifacts": "is --upload-model here",
    "artifact_alias": "is part of the artifact's name here: --weights wandb:entity/project/name:alias",
}
