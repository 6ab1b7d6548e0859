"""The flags of the scripts, as frozen dataclasses. One field is one flag."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from utils.config.ranges import BELOW_ONE, FINITE, IMGSZ, NOT_NEGATIVE, SHARE, Range

NEWEST, AUTO = "newest", "auto"  # --resume without a value, and where there is something to resume


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
