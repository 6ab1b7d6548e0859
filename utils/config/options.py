"""Settings: defaults, YAML and command line become frozen dataclasses. One field is one flag."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from utils.distributed.ranks import speaks_for_machine
from utils.errors import UserError, nearest
from utils.files import find_file, read_yaml

T = TypeVar("T")


NEWEST, AUTO = "newest", "auto"  # --resume without a value, and where there is something to resume
OVERRIDE = "--hyp."  # begins the flag of a single hyperparameter
NO_OVERRIDES: Mapping[str, str] = types.MappingProxyType({})
# YOLOv5's flags that are not taken over, with underscores, and values of flags that are: what to do instead. In a
# script that has the flag, it is none of these.
SWEEPS = (
    "is not built in: W&B sweeps tune hyperparameters, each trial on as many devices as you like; see sweep.yaml and "
    "docs/tracking.md#sweeps"
)
SEGMENTS = "is for segmentation, which is not built in; a detector learns from polygon labels by the boxes around them"
REFUSED = {
    **dict.fromkeys(("evolve", "evolve_population", "resume_evolve"), SWEEPS),
    "bucket": "is not built in: copy the run folder with your cloud's own command, such as gsutil rsync or aws s3 sync",
    "quad": "is not built in: train at a larger --imgsz, or with --multi-scale",
    "update": "is not needed: official weights are read as they are",
    "visualize": "is not built in: a forward hook of torch on a layer gives its maps",
    "dnn": "is not built in: OpenCV's DNN module runs ONNX files without the scripts",
    # of export.py
    "optimize": "is not built in, for torch has given up its mobile interpreter: ExecuTorch takes the .pt2 of "
    "--include exported",
    "int8": "is not built in: quantise the ONNX file, as with onnxruntime.quantization or trtexec --int8",
    **dict.fromkeys(("keras", "per_tensor"), "is not built in: onnx2tf makes TensorFlow's files of best.onnx"),
    "workspace": "is not built in: trtexec --memPoolSize=workspace:4096 --onnx=best.onnx takes it",
    "mlmodel": "is not built in: coremltools makes Core ML's files of best.torchscript",
    "cache": "is for train.py; TensorRT's is trtexec --timingCacheFile=FILE --onnx=best.onnx",
    "include engine": "is made of ONNX: --include onnx, then trtexec --onnx=best.onnx --saveEngine=best.engine",
    "include coreml": "is made by coremltools, on macOS: ct.convert of best.torchscript, from --include torchscript",
    **dict.fromkeys(
        ("include saved_model", "include pb", "include tflite"),
        "is made of ONNX: --include onnx, then onnx2tf -i best.onnx, which writes a SavedModel and .tflite files",
    ),
    "include edgetpu": "is made of ONNX: --include onnx, onnx2tf -i best.onnx -oiqt, then edgetpu_compiler best.tflite",
    "include tfjs": "is made of ONNX: --include onnx, onnx2tf -i best.onnx, then tensorflowjs_converter; or run "
    "best.onnx in the browser with onnxruntime-web",
    "include paddle": "is made of ONNX: --include onnx, then x2paddle --framework=onnx --model=best.onnx",
    "task study": "is not built in: call val.py once for each --imgsz, and compare their tables",
    **dict.fromkeys(("mask_ratio", "no_overlap"), SEGMENTS),
    # of classify/train.py
    "model": "is --weights here, or --cfg for a model from scratch, such as --cfg yolov5s-cls.yaml",
    "pretrained": "is not needed: --weights names what to start from, and --weights '' starts from scratch",
    "lr0": "is a hyperparameter: give --hyp.lr0",
    "decay": "is a hyperparameter: give --hyp.weight_decay",
    "cutoff": "is not built in: the layers of a model are those of its YAML; give another one with --cfg",
    "dropout": "is the second argument of the row Classify of the model's YAML; give it with --cfg",
    # of older versions
    "adam": "is --optimizer Adam here",
    "linear_lr": "is what the learning rate does without --cos-lr",
    "cache_images": "is --cache here",
    "notest": "is --noval here",
    "log_imgs": "is --max-images here",
    "log_artifacts": "is --upload-model here",
    "artifact_alias": "is part of the name of an artifact here: --weights wandb:entity/project/name:alias",
}


def is_number(value: Any) -> bool:
    """Is this a finite number, such as a float can hold? True and False are none."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have. `above`, `below`: the ends themselves are no such numbers."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        low = self.least < value if self.above else self.least <= value
        high = value < self.most if self.below else value <= self.most
        return low and high and is_number(value)

    def __str__(self) -> str:
        least, most = f"{self.least:.10g}", f"{self.most:.10g}"
        low = f"more than {least}" if self.above else f"{least} or more"
        if self.most == math.inf:
            return low
        return f"{low} and less than {most}" if self.below else f"{least} to {most}"


FINITE, NOT_NEGATIVE, POSITIVE = Range(), Range(0), Range(0, above=True)
IMGSZ = Range(1, 2**14)
SHARE, BELOW_ONE = Range(0, 1), Range(0, 1, below=True)


def flag(
    default: Any,
    text: str,
    *aliases: str,
    choices: tuple[str, ...] | None = None,
    const: Any = None,
    within: Range = FINITE,
    fixed: bool = False,
    parted: bool = False,
) -> Any:
    """A field that is a flag: its default, help text, other names, allowed values, its value when given bare, and the
    range of a number. `fixed`: the curve depends on it, so that a run cannot be resumed with another value. `parted`:
    commas part its words."""
    return dataclasses.field(
        default=default,
        metadata={
            "help": text,
            "aliases": aliases,
            "choices": choices,
            "const": const,
            "within": within,
            "fixed": fixed,
            "parted": parted,
        },
    )


def flags_of(kind: type) -> list[dataclasses.Field[Any]]:
    """The fields that are flags: all but those that keep what flags of another form say."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]


def number(default: Any, within: Range) -> Any:
    """A hyperparameter: its default and its range."""
    return dataclasses.field(default=default, metadata={"within": within})


@dataclass(frozen=True)
class TrainOptions:
    """The flags of train.py."""

    weights: str = flag(
        "yolov5s.pt", "weights to start from, ours or an official YOLOv5 .pt; '' starts from scratch", fixed=True
    )
    cfg: str = flag("", "model YAML; '' takes the one inside --weights", fixed=True)
    layers: str = flag("", "Python file with layers of your own, which a model's rows may name; it is run")
    data: str = flag("data/coco128.yaml", "data set YAML")
    hyp: str = flag("data/hyps/low.yaml", "hyperparameter YAML")
    epochs: int = flag(100, "passes over the training images", within=Range(1))
    batch_size: int = flag(
        16,
        "images per batch, in total over all processes; -1 finds what the GPU holds",
        "batch",
        within=Range(-1),
        fixed=True,
    )
    imgsz: int = flag(
        640, "side of the square that images are fitted into, in pixels", "img", "img-size", within=IMGSZ, fixed=True
    )
    rect: bool = flag(False, "batches of like aspect ratio with little padding; no shuffling, no mosaic", fixed=True)
    multi_scale: bool = flag(
        False,
        "each batch at a size of its own, half to one and a half times --imgsz, the same on every process",
        fixed=True,
    )
    image_weights: bool = flag(
        False, "draw images in proportion to how rare their classes are, instead of each once an epoch", fixed=True
    )
    repeat_factor: float = flag(
        0.0,
        "repeat images of classes that are in a smaller share of the images than this, such as 0.001; 0 is off",
        within=BELOW_ONE,
        fixed=True,
    )
    close_mosaic: int = flag(
        0,
        "the last so many epochs without images that are mixed of several: mosaic, mixup",
        within=NOT_NEGATIVE,
        fixed=True,
    )
    partners: str = flag(
        "any",
        "images mixed with one (mosaic, a classifier's mixup): any, or those next to it in the epoch's order: faster",
        choices=("any", "near"),
        fixed=True,
    )
    strict: bool = flag(False, "what is wrong in single images and label rows is an error, not a warning")
    resume: str = flag(
        "", "go on with a run: the newest of --project, or a run folder; auto: where there is one", const=NEWEST
    )
    nosave: bool = flag(False, "write weights at the end only")
    noval: bool = flag(False, "validate after the last epoch only")
    noautoanchor: bool = flag(False, "keep the model's anchors without checking that they suit the data", fixed=True)
    noplots: bool = flag(False, "draw no pictures into the run folder")
    cache: str = flag(
        "",
        "keep decoded images in memory or on disk; val: those of the validation alone, in memory",
        choices=("ram", "disk", "val"),
        const="ram",
    )
    device: str = flag("", "cpu, mps or CUDA devices such as 0 or 0,1 (a process for each); '' takes the best there is")
    processes: int = flag(0, "how many processes to start on this machine without a launcher", within=Range(1))
    dist_timeout: float = flag(1800.0, "seconds that processes wait for each other", within=Range(1, 1e6))
    sync_bn: bool = flag(False, "BatchNorm over the whole batch of all processes: the curve of one process")
    scale_lr: bool = flag(False, "multiply the learning rate by the number of processes", fixed=True)
    comm_hook: str = flag("", "send smaller gradients between processes", choices=("fp16", "bf16", "powersgd"))
    single_cls: bool = flag(False, "treat every class as one", fixed=True)
    optimizer: str = flag("SGD", "which optimizer", choices=("SGD", "Adam", "AdamW"), fixed=True)
    workers: int = flag(8, "loader processes per training process, at most one per CPU core", within=NOT_NEGATIVE)
    project: str = flag("runs/train", "folder of the run folders")
    name: str = flag("exp", "name of the run folder; a number is added where it is taken")
    exist_ok: bool = flag(False, "write into project/name although it exists")
    cos_lr: bool = flag(False, "cosine learning rate instead of linear", fixed=True)
    label_smoothing: float = flag(0.0, "label smoothing epsilon of the class term", within=BELOW_ONE, fixed=True)
    patience: int = flag(100, "stop after so many epochs without a better fitness; 0 never stops", within=NOT_NEGATIVE)
    freeze: tuple[int, ...] = flag(
        (0,),
        "N freezes the first N layers (backbone 10), -1 all but the last (the head); several numbers just those",
        fixed=True,
    )
    save_period: int = flag(-1, "also keep weights/epochN.pt every so many epochs; -1 never")
    save_steps: int = flag(
        0, "also save what --resume needs every so many optimizer steps; 0 at each epoch", within=NOT_NEGATIVE
    )
    time_limit: float = flag(
        0.0, "hours after which to stop at the next step, saved and validated; 0 never", within=NOT_NEGATIVE
    )
    max_skips: int = flag(
        20, "stop after so many optimizer steps in a row whose gradients are not finite", within=Range(1)
    )
    seed: int = flag(0, "seed of every random choice", within=Range(0, 2**32 - 1), fixed=True)
    mixed_precision: str = flag(
        "", "autocast; '' takes the launcher's, else bf16 or fp16 on CUDA", choices=("no", "fp16", "bf16")
    )
    log_with: str = flag(
        "",
        "where to log beside results.csv; '' is wandb where installed",
        choices=("none", "wandb", "tensorboard", "all"),
    )
    no_wandb: bool = flag(False, "do not log to Weights & Biases")
    log_interval: int = flag(
        0, "optimizer steps between two points of the step curves; 0: about 20 an epoch", within=NOT_NEGATIVE
    )
    wandb_project: str = flag("", "W&B project; '' is the last folder of --project, YOLOv5's runs/train being lockstep")
    wandb_entity: str = flag("", "W&B team or user; '' is your default one", "entity")
    wandb_group: str = flag("", "W&B group of runs")
    wandb_tags: tuple[str, ...] = flag((), "W&B tags", parted=True)
    wandb_name: str = flag("", "W&B name of the run; '' is the name of the run folder")
    wandb_id: str = flag("", "W&B id of the run to go on with; '' is a new one, or with --resume the run's own")
    bbox_interval: int = flag(
        -1, "epochs between two W&B pictures of validation boxes; -1: ten times a run, 0 never", within=Range(-1)
    )
    max_images: int = flag(16, "validation images in W&B, the same every time", within=Range(0, 1000))
    upload_model: bool = flag(False, "upload weights to W&B: each --save-period, and last.pt and best.pt at the end")
    upload_dataset: bool = flag(False, "make the data set a W&B artifact, by references to its files")
    verbose: bool = flag(False, "say more: the device of every process, and all classes after every validation")
    quiet: bool = flag(False, "say no more than warnings and the final table")
    show_processes: bool = flag(False, "list every process: host, rank, device and its part of the first batches")
    doctor: bool = flag(False, "train nothing: look at all processes and hosts, and say what would go wrong")
    local_rank: int = flag(-1, "what old launchers give; the environment says the same")
    # What flags such as --hyp.lr0 say, as text by key: which keys there are, the model's task knows.
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ValOptions:
    """The flags of val.py."""

    data: str = flag("data/coco128.yaml", "data set YAML")
    weights: tuple[str, ...] = flag(
        ("yolov5s.pt",), "weights to validate, ours or an official YOLOv5 .pt; several are an ensemble"
    )
    layers: str = flag("", "Python file with layers of your own, which the model has; it is run")
    batch_size: int = flag(32, "images per batch", "batch", within=Range(1))
    imgsz: int = flag(640, "side of the square that images are fitted into, in pixels", "img", "img-size", within=IMGSZ)
    conf_thres: float = flag(0.001, "least confidence of a detection", within=SHARE)
    iou_thres: float = flag(0.6, "overlap above which NMS drops the weaker of two boxes", within=SHARE)
    max_det: int = flag(300, "most detections per image", within=Range(1))
    task: str = flag(
        "val",
        "which split; speed: how long an image takes, at the thresholds of detect.py",
        choices=("train", "val", "test", "speed"),
    )
    augment: bool = flag(
        False, "look at each image at several sizes and mirrored, and join what is found: slower, better"
    )
    device: str = flag("", "cpu, mps or CUDA devices such as 0 or 0,1 (a process for each); '' takes the best there is")
    processes: int = flag(0, "how many processes to start on this machine without a launcher", within=Range(1))
    dist_timeout: float = flag(1800.0, "seconds that processes wait for each other", within=Range(1, 1e6))
    workers: int = flag(8, "loader processes, at most one per CPU core", within=NOT_NEGATIVE)
    single_cls: bool = flag(False, "treat every class as one")
    square: bool = flag(False, "square batches; default are rectangular ones of like aspect ratio, with less padding")
    strict: bool = flag(False, "what is wrong in single images and label rows is an error, not a warning")
    verbose: bool = flag(False, "one row per class and per object size, also where there are many classes")
    quiet: bool = flag(False, "say no more than warnings and the row of all classes")
    noplots: bool = flag(False, "draw no pictures into the run folder")
    save_txt: bool = flag(False, "write detections as labels/*.txt into the run folder")
    save_conf: bool = flag(False, "with --save-txt: add each detection's confidence")
    save_hybrid: bool = flag(False, "with --save-txt: the labels, and of what was found that which no label has")
    save_json: bool = flag(
        False, "write what was found as COCO results, and COCO's numbers where there are annotations"
    )
    annotations: str = flag("", "COCO annotations for --save-json; '' looks for annotations/*.json of the data set")
    half: bool = flag(False, "weights and images in half precision on CUDA; elsewhere in full")
    project: str = flag("runs/val", "folder of the run folders")
    name: str = flag("exp", "name of the run folder; a number is added where it is taken")
    exist_ok: bool = flag(False, "write into project/name although it exists")
    mixed_precision: str = flag(
        "", "autocast; '' takes the launcher's, else bf16 or fp16 on CUDA", choices=("no", "fp16", "bf16")
    )
    show_processes: bool = flag(False, "list every process: host, rank, device and its part of the first batches")
    local_rank: int = flag(-1, "what old launchers give; the environment says the same")


@dataclass(frozen=True)
class DetectOptions:
    """The flags of detect.py."""

    weights: tuple[str, ...] = flag(
        ("yolov5s.pt",), "weights to look with, ours, exported or an official YOLOv5 .pt; several are an ensemble"
    )
    source: str = flag(
        "", "file, folder, glob, .txt list, address, video, camera's number, rtsp://..., .streams list, or screen"
    )
    data: str = flag("", "data set YAML whose names the classes have; '' takes those inside --weights")
    imgsz: tuple[int, ...] = flag(
        (640,),
        "sides that images are fitted into, in pixels: one number, or height and width",
        "img",
        "img-size",
        within=IMGSZ,
    )
    conf_thres: float = flag(0.25, "least confidence of a detection", within=SHARE)
    iou_thres: float = flag(0.45, "overlap above which NMS drops the weaker of two boxes", within=SHARE)
    max_det: int = flag(1000, "most detections per image", within=Range(1))
    batch_size: int = flag(
        1, "images looked at together, where they follow each other and are of one shape", "batch", within=Range(1)
    )
    device: str = flag("", "cpu, mps or the number of a CUDA device; '' takes the best there is")
    layers: str = flag("", "Python file with layers of your own, which the model has; it is run")
    view_img: bool = flag(False, "show the results in a window, where OpenCV and a display can")
    save_txt: bool = flag(False, "write what was found as labels/*.txt into the run folder")
    save_format: int = flag(0, "of --save-txt: 0 is normalised x y w h, 1 is pixels x1 y1 x2 y2", within=Range(0, 1))
    save_csv: bool = flag(False, "write what was found into predictions.csv")
    save_conf: bool = flag(False, "with --save-txt: add the confidence")
    save_crop: bool = flag(False, "write what is in each box as crops/CLASS/*.jpg")
    nosave: bool = flag(False, "write no pictures and videos")
    classes: tuple[int, ...] = flag((), "the numbers of the classes to look for; none: all", within=NOT_NEGATIVE)
    agnostic_nms: bool = flag(False, "boxes of different classes suppress each other too")
    augment: bool = flag(
        False, "look at each image at several sizes and mirrored, and join what is found: slower, better"
    )
    project: str = flag("runs/detect", "folder of the run folders")
    name: str = flag("exp", "name of the run folder; a number is added where it is taken")
    exist_ok: bool = flag(False, "write into project/name although it exists")
    line_thickness: int = flag(3, "of boxes, in pixels", within=Range(1, 100))
    hide_labels: bool = flag(False, "draw boxes without names")
    hide_conf: bool = flag(False, "draw names without confidences")
    half: bool = flag(False, "weights and images in half precision on CUDA; elsewhere in full")
    vid_stride: int = flag(1, "of a video or stream, look at one frame in so many", within=Range(1))
    quiet: bool = flag(False, "say no more than warnings and the last line")


@dataclass(frozen=True)
class ExportOptions:
    """The flags of export.py."""

    weights: tuple[str, ...] = flag(("yolov5s.pt",), "weights to export, ours or an official YOLOv5 .pt")
    data: str = flag("", "data set YAML whose names the classes have; '' takes those inside --weights")
    layers: str = flag("", "Python file with layers of your own, which the model has; it is run")
    imgsz: tuple[int, ...] = flag(
        (640, 640),
        "size of the images, in pixels: one number, or height and width",
        "img",
        "img-size",
        within=IMGSZ,
    )
    batch_size: int = flag(1, "images that the file takes at a time", "batch", within=Range(1, 4096))
    device: str = flag("cpu", "cpu or the number of a CUDA device: where .torchscript and .pt2 will run")
    include: tuple[str, ...] = flag(
        ("torchscript",),
        "formats; exported is torch.export's .pt2",
        choices=("torchscript", "onnx", "openvino", "exported"),
    )
    dynamic: bool = flag(False, "ONNX, OpenVINO, .pt2: any number of images, of any whole strides high and wide")
    half: bool = flag(False, "half precision; on CUDA")
    opset: int = flag(18, "of ONNX", within=Range(1, 100))
    nms: bool = flag(False, "suppress inside the file, which then gives detections instead of all boxes")
    agnostic_nms: bool = flag(False, "with --nms: boxes of different classes suppress each other too")
    topk_per_class: int = flag(100, "with --nms: most detections of a class in an image", within=Range(1))
    topk_all: int = flag(100, "with --nms: most detections of an image", within=Range(1, 10_000))
    iou_thres: float = flag(0.45, "with --nms: overlap above which the weaker of two boxes is dropped", within=SHARE)
    conf_thres: float = flag(0.25, "with --nms: least confidence of a detection", within=SHARE)
    simplify: bool = flag(False, "changes nothing: ONNX files are simplified as they are written")
    inplace: bool = flag(False, "changes nothing: boxes are decoded without writing in place")
    verbose: bool = flag(False, "let the exporters speak")


# What `python train.py` does when none of --data, --cfg, --weights and --hyp is given.
BUILT_IN_JOB: Mapping[str, Any] = types.MappingProxyType(
    {
        "weights": "",
        "cfg": "models/yolov5n.yaml",
        "data": "data/shapes.yaml",
        "hyp": "data/hyps/shapes.yaml",
        "epochs": 13,
        "batch_size": 8,
        "imgsz": 160,
        "optimizer": "AdamW",
    }
)


@dataclass(frozen=True)
class Recipe:
    """The keys of a hyperparameter YAML that every task has, by YOLOv5's names."""

    lr0: float = number(0.01, POSITIVE)  # learning rate of the first epoch after the warm-up
    lrf: float = number(0.01, NOT_NEGATIVE)  # last epoch's learning rate as a share of lr0
    momentum: float = number(0.937, BELOW_ONE)  # of SGD; beta1 of Adam and AdamW
    weight_decay: float = number(0.0005, NOT_NEGATIVE)
    # Images per optimizer step, reached by accumulating batches; 0: every batch is a step.
    nbs: int = number(64, NOT_NEGATIVE)
    warmup_epochs: float = number(3.0, NOT_NEGATIVE)
    warmup_momentum: float = number(0.8, BELOW_ONE)
    warmup_bias_lr: float = number(0.1, NOT_NEGATIVE)

    def accumulation(self, batch_size: int) -> int:
        """Batches per optimizer step: as many as come nearest to `nbs` images."""
        return max(round(self.nbs / batch_size), 1)

    def decay(self, batch_size: int) -> float:
        """The weight decay, in proportion to the images of a step: YOLOv5's rule."""
        images = batch_size * self.accumulation(batch_size)
        return self.weight_decay * images / self.nbs if self.nbs else self.weight_decay


@dataclass(frozen=True)
class Hyperparameters(Recipe):
    """The keys of a hyperparameter YAML for a detector. Defaults are the recipe `low`."""

    box: float = number(0.05, NOT_NEGATIVE)  # gains of the loss terms
    cls: float = number(0.5, NOT_NEGATIVE)
    cls_pw: float = number(1.0, POSITIVE)  # weight of positives in the class term
    obj: float = number(1.0, NOT_NEGATIVE)
    obj_pw: float = number(1.0, POSITIVE)
    iou_t: float = number(0.2, SHARE)  # in every YOLOv5 file, used by nothing
    # A target fits an anchor when width and height differ by less than this factor.
    anchor_t: float = number(4.0, Range(1, above=True))
    # Anchors per level when the model's are to be found anew; 0 keeps the model's.
    anchors: float = number(0.0, NOT_NEGATIVE)
    fl_gamma: float = number(0.0, NOT_NEGATIVE)  # focal loss; 0 is off
    hsv_h: float = number(0.015, SHARE)
    hsv_s: float = number(0.7, SHARE)
    hsv_v: float = number(0.4, SHARE)
    degrees: float = number(0.0, Range(0, 180))
    translate: float = number(0.1, SHARE)
    scale: float = number(0.5, BELOW_ONE)
    shear: float = number(0.0, Range(0, 90, below=True))
    perspective: float = number(0.0, Range(0, 0.001))
    flipud: float = number(0.0, SHARE)
    fliplr: float = number(0.5, SHARE)
    mosaic: float = number(1.0, SHARE)
    mixup: float = number(0.0, SHARE)
    copy_paste: float = number(0.0, SHARE)


def given_flags(kind: type, argv: Sequence[str]) -> dict[str, Any]:
    """The flags in `argv` and their values, and no others."""
    parser, words = _parser(kind), _joined(argv)
    if _has_overrides(kind):
        for name in dict.fromkeys(word.split("=")[0] for word in words if word.startswith(OVERRIDE)):
            parser.add_argument(name, dest="overrides", action=_Override)
    return vars(parser.parse_args(words))


def _has_overrides(kind: type) -> bool:
    return any(field.name == "overrides" for field in dataclasses.fields(kind))


def _joined(argv: Sequence[str]) -> list[str]:
    """`--hyp.shear -1e-1` as one word: argparse would take -1e-1 for a flag."""
    words: list[str] = []
    for word in argv:
        if words and words[-1].startswith(OVERRIDE) and "=" not in words[-1] and re.match(r"-[\d.in]", word):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def parse_options(kind: type[T], argv: Sequence[str], job: Mapping[str, Any] | None = None) -> T:
    """The flags in `argv` as a `kind`. `job` gives other defaults, where no flag names data, model, weights or hyp."""
    given = given_flags(kind, argv)
    chooses_files = any(name in given for name in ("data", "cfg", "weights", "hyp"))
    return kind(**{**({} if chooses_files or job is None else job), **given})


# Flags whose defaults a data YAML may bring, under `defaults:`.
SUGGESTED = ("hyp", "epochs", "batch_size", "imgsz", "optimizer", "cos_lr", "label_smoothing")


def suggestions(values: Any, source: Path) -> dict[str, Any]:
    """What a data YAML suggests for flags of train.py. Raises `UserError` that names the key which is none or wrong."""
    if not isinstance(values, dict):
        raise UserError(f"{source}: `defaults` must be lines such as `imgsz: 64`, not {values!r}")
    hints = typing.get_type_hints(TrainOptions)
    fields = {field.name: field.metadata for field in dataclasses.fields(TrainOptions) if field.name in SUGGESTED}
    found = {}
    for key, value in values.items():
        if key not in fields:
            raise UserError(
                f"{source}: unknown key '{key}' under `defaults`{nearest(str(key), fields)}; known are "
                f"{', '.join(SUGGESTED)}"
            )
        metadata, kind = fields[key], hints[key]
        fits = isinstance(value, kind) if kind in (bool, str) else is_number(value) and kind(value) == value
        if fits and kind in (int, float):
            fits = value in metadata["within"]
        if not fits or (metadata["choices"] and value not in metadata["choices"]):
            raise UserError(f"{source}: `{key}` under `defaults` is {value!r}, which --{key.replace('_', '-')} refuses")
        found[key] = kind(value)
    return found


def with_defaults(options: T, argv: Sequence[str], *better: Mapping[str, Any]) -> T:
    """`options` with other defaults for what `argv` does not say; later ones in `better` are stronger."""
    given = given_flags(type(options), argv)
    found = {key: value for values in better for key, value in values.items() if key not in given}
    return dataclasses.replace(options, **found)  # type: ignore[type-var]


def _parser(kind: type) -> argparse.ArgumentParser:
    text = f"{OVERRIDE}KEY VALUE gives one hyperparameter another value than --hyp does, such as {OVERRIDE}lr0 0.005"
    more = text if _has_overrides(kind) else None
    parser = _Parser(description=kind.__doc__, epilog=more, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    hints = typing.get_type_hints(kind)
    for option in flags_of(kind):
        names = [option.name, *option.metadata["aliases"]]
        flags = list(
            dict.fromkeys(f"--{word}" for name in names for word in (name.replace("_", "-"), name.replace("-", "_")))
        )
        default = " ".join(map(str, option.default)) if isinstance(option.default, tuple) else repr(option.default)
        text = f"{option.metadata['help']} (default {default or 'none'})"
        parser.add_argument(*flags, dest=option.name, help=text, **_action(hints[option.name], option.metadata))
    return parser


def _action(hint: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What argparse needs to know of a field of this type."""
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is tuple:
        kind = typing.get_args(hint)[0]
        action: dict[str, Any] = {} if kind is str else {"type": _within(kind, metadata["within"])}
        if metadata["choices"]:
            action["choices"] = metadata["choices"]
        return {**action, "nargs": "+", "action": _Words if metadata["parted"] else _Tuple}
    action = {"type": hint if hint is str else _within(hint, metadata["within"])}
    if metadata["choices"]:
        action["choices"] = metadata["choices"]
    if metadata["const"] is not None:
        action |= {"nargs": "?", "const": metadata["const"]}
    return action


def _within(kind: Callable[[str], Any], allowed: Range) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value = kind(text)
        if value not in allowed:
            raise argparse.ArgumentTypeError(f"{text} is out of range; give {allowed}")
        return value

    convert.__name__ = getattr(kind, "__name__", "value")  # argparse names it where the text is no number
    return convert


class _Tuple(argparse.Action):
    """Keeps several values as a tuple, so that the dataclass stays immutable."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, tuple(values))


class _Words(argparse.Action):
    """Keeps several words as a tuple; commas part them too."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        words = (word.strip() for value in values for word in value.split(","))
        setattr(namespace, self.dest, tuple(filter(None, words)))


class _Override(argparse.Action):
    """Keeps the text of a single hyperparameter beside those of others."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        key = str(option_string).removeprefix(OVERRIDE).replace("-", "_")
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), key: values})


class _Parser(argparse.ArgumentParser):
    """One sentence and exit code 2 for a wrong flag, naming the nearest known one, instead of the whole usage."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if speaks_for_machine():
            super()._print_message(message, file)

    def error(self, message: str) -> typing.NoReturn:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if message.startswith("unrecognized arguments: "):
            wrong = message.split(": ", 1)[1].split()[0]
            name = wrong.split("=")[0]
            if instead := REFUSED.get(name.removeprefix("--").replace("-", "_")):
                self.exit(2, f"error: {name} {instead}\n")
            message = f"unknown flag {wrong}{nearest(name, known)}"
        choice = re.match(r"argument (?:--\S+/)*--(\S+): invalid choice: '(\w+)'", message)
        if choice and (instead := REFUSED.get(f"{choice[1].replace('-', '_')} {choice[2]}")):
            self.exit(2, f"error: --{choice[1]} {choice[2]} {instead}\n")
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


R = TypeVar("R", bound=Recipe)


def read_hyperparameters(name: str, kind: type[R], overrides: Mapping[str, str] = NO_OVERRIDES) -> R:
    """The hyperparameter YAML of that name as a task's kind of recipe, checked. Keys left out have its defaults.

    overrides: what goes before the YAML, as flags such as --hyp.lr0 give it.
    """
    known = name if os.path.isfile(name) else YOLOV5_HYPS.get(Path(name).name, name)
    path = find_file(known, "hyperparameter file", ["data/hyps"])
    return dataclasses.replace(from_mapping(kind, read_yaml(path), path), **overriding(kind, overrides))


def overriding(kind: type[Recipe], overrides: Mapping[str, str]) -> dict[str, Any]:
    """The numbers that flags such as --hyp.lr0 give, by key. Raises `UserError` that names the flag."""
    hints, ranges = _known(kind)
    for key in overrides:
        if key not in hints:  # most of a flag is what all have: likeness begins later
            likely = nearest(OVERRIDE + key, [OVERRIDE + name for name in hints], likeness=0.82)
            raise UserError(f"unknown flag {OVERRIDE}{key}{likely}")
    return {key: _checked(text, hints[key], ranges[key], OVERRIDE + key) for key, text in overrides.items()}


# YOLOv5's file names for the recipes that come with us under shorter ones.
YOLOV5_HYPS = {
    "hyp.scratch-low.yaml": "low.yaml",
    "hyp.scratch-med.yaml": "med.yaml",
    "hyp.scratch-high.yaml": "high.yaml",
    "hyp.no-augmentation.yaml": "none.yaml",
    "hyp.VOC.yaml": "VOC.yaml",
    "hyp.Objects365.yaml": "Objects365.yaml",
}


def from_mapping(kind: type[T], values: Mapping[str, Any], source: Path) -> T:
    """A `kind` from a YAML's keys. Raises `UserError` that names an unknown key (and the nearest) or a wrong type."""
    hints, ranges = _known(kind)
    for key in values:
        if key not in hints:
            raise UserError(f"{source}: unknown key '{key}'{nearest(str(key), hints)}")
    return kind(**{key: _checked(value, hints[key], ranges[key], f"{source}: {key}") for key, value in values.items()})


def _known(kind: type) -> tuple[dict[str, Any], dict[str, Range]]:
    """Types and ranges of a dataclass's fields, by name."""
    ranges = {field.name: field.metadata.get("within", FINITE) for field in dataclasses.fields(kind)}
    return typing.get_type_hints(kind), ranges


def _checked(value: Any, kind: Any, allowed: Range, name: str) -> Any:
    """A value as a field's type. `name`: what an error is to call it."""
    if isinstance(value, str) and kind in (int, float):  # YAML 1.1 reads 1e-3 as text
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"{name} must be a number, not '{value}'") from None
    if not is_number(value) or (kind is int and value != int(value)):
        raise UserError(f"{name} must be {'a whole number' if kind is int else 'a number'}, not {value!r}")
    if value not in allowed:
        raise UserError(f"{name} is {value}; give {allowed}")
    return kind(value)


def select(kind: type[T], source: Any, **more: Any) -> T:
    """A component's own settings: the fields of the same names of a larger dataclass, and `more`."""
    names = {field.name for field in dataclasses.fields(kind)} & {field.name for field in dataclasses.fields(source)}  # type: ignore[arg-type]
    return kind(**{name: getattr(source, name) for name in names}, **more)
