"""The flags of train.py, val.py, detect.py and export.py: a frozen dataclass per script, a field per flag.

The scripts and utils/config/ use them; other modules get slices (utils/config/select.py). The flags of train.py that a
resumed run must not change are in utils/config/resumed.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from utils.config.values import BELOW_ONE, FINITE, IMGSZ, NOT_NEGATIVE, OPSETS, PYTHON_FILE, SHARE, Range

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

NEWEST = "newest"  # --resume without a value: the newest run of --project
AUTO = "auto"  # --resume auto: the newest run of --name if there is one, else a new run
NO_SYNONYMS: Mapping[str, str] = {}
PRECISIONS = ("no", "fp16", "bf16")
WEIGHT_PRECISIONS = ("auto", "fp32", "fp16")
# Of --log-with, named like the packages to install; all that Accelerate knows.
TRACKERS = ("wandb", "tensorboard", "mlflow", "comet_ml", "clearml", "aim", "dvclive", "swanlab", "trackio")
LOG_WITH = ("none", "all", *TRACKERS, PYTHON_FILE)
# Headings of --help, in this order, the trackers' last; a script shows only the headings of its flags.
GROUPS = (
    *("model", "data", "images", "training", "format", "predictions", "NMS", "drawing"),
    *("processes", "saving", "console", "logging"),
)
# Features that only some models have and that flags may be about, as messages name them. A task declares its features
# in `Task.concerns`; flags about any other are refused.
CONCERNS: Mapping[str, str] = {
    "anchors": "heads with anchors",
    "label smoothing": "losses with label smoothing",
    "class weights": "losses with class weights",
    "mixing": "training images that are mixed from several",
    "augmentation": "training images that functions of yours may change",
    "padding": "images that are padded to the shape of their batch",
    "masks": "masks",
    "detections": "objects that are detected",
    "suppression": "detections that suppress each other (NMS)",
    "boxes": "results that are upright boxes",
    "copies": "predictions that are joined from scaled or mirrored copies of an image",
    "examples": "examples that trackers show with their predictions",
}


def flag(
    default: object,
    text: str,
    group: str,
    within: Range = FINITE,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    synonyms: Mapping[str, str] = NO_SYNONYMS,
    const: str | None = None,
    comma_separated: bool = False,
    form: str = "",
    concerns: str = "",
) -> Any:
    """Return a dataclass field that is a flag of the command line.

    Args:
        text: the flag's help
        group: one of `GROUPS`
        within: allowed range of a number
        synonyms: other words for some of `choices`
        const: value of the flag if it is given without an argument
        comma_separated: whether commas separate the words of a tuple, as spaces do, or the choices of a text
        form: form of a text, such as owner/name; words in capitals are numbers
        concerns: one of `CONCERNS`; '' if the flag applies to every model
    """
    assert not concerns or concerns in CONCERNS
    metadata = {"help": text, "group": group, "within": within, "aliases": aliases, "choices": choices}
    metadata |= {"synonyms": synonyms, "const": const, "comma_separated": comma_separated, "form": form}
    metadata["concerns"] = concerns
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(kind: type[DataclassInstance]) -> list[dataclasses.Field[Any]]:
    """Return the fields of an options class that are flags: all but `overrides`."""
    return [field for field in dataclasses.fields(kind) if "help" in field.metadata]


@dataclass(frozen=True)
class TrainOptions:
    """The flags of train.py."""

    examples: ClassVar[tuple[str, ...]] = (
        "python train.py               # the built-in job, in minutes without a GPU",
        "python train.py --data my.yaml --weights yolov5n.pt",
        "python train.py --resume      # continues the newest run",
    )
    weights: str = flag(
        "yolov5s.pt", "weights to start from: a .pt, a .safetensors or hf:owner/name; '' trains from scratch", "model"
    )
    cfg: str = flag("", "model YAML; '' takes the one inside --weights", "model")
    allow_licence: tuple[str, ...] = flag(
        (), "licences that --weights may have, such as mit,apache-2.0,bsd-3-clause", "model", comma_separated=True
    )
    layers: str = flag(
        "", "Python file with your own layers, which the model YAML may name; the file is executed", "model"
    )
    task_file: str = flag(
        "", "Python file or package with a task of your own; it is executed", "model", aliases=("task",)
    )
    data: str = flag("data/coco128.yaml", "data set YAML", "data")
    hyp: str = flag(
        "auto", "hyperparameter YAML; auto chooses by weights and number of images, low is YOLOv5's", "training"
    )
    epochs: int = flag(100, "passes over the training images", "training", Range(1))
    batch_size: int = flag(
        16,
        "images per batch, in total over all processes; -1 measures how many the GPU memory holds",
        "training",
        Range(-1),
        aliases=("batch",),
    )
    imgsz: int = flag(
        640, "side of the square that images are fitted into, in pixels", "data", IMGSZ, aliases=("img", "img-size")
    )
    rect: bool = flag(
        False,
        "batches of similar aspect ratio with little padding; no shuffling, no mosaic",
        "data",
        concerns="padding",
    )
    image_padding: bool = flag(
        False,
        "validation: pad each image by its own shape, not its batch's as YOLOv5 does; mAP is then the same at any "
        "batch size",
        "data",
        concerns="padding",
    )
    multi_scale: bool = flag(
        False, "a random image size for each batch, 0.5 to 1.5 times --imgsz, the same on every process", "training"
    )
    image_weights: bool = flag(
        False, "sample images in proportion to the rarity of their classes, instead of each once per epoch", "data"
    )
    repeat_factor: float = flag(
        0.0,
        "repeat images of classes that occur in a smaller share of the images than this, such as 0.001; 0 is off",
        "data",
        BELOW_ONE,
    )
    close_mosaic: int = flag(
        0, "number of final epochs that train without mosaic and mixup", "data", NOT_NEGATIVE, concerns="mixing"
    )
    partners: str = flag(
        "window",
        "images that mosaic and mixup combine: any, or of a window of 1000 in the epoch's order",
        "data",
        choices=("window", "any"),
        concerns="mixing",
    )
    augmentations: str = flag(
        "",
        "augmentations of your own: a Python file with a list AUGMENTATIONS, or a YAML; Python is executed",
        "data",
        concerns="augmentation",
    )
    mask_ratio: int = flag(
        4,
        "segmentation: pixels of the image per pixel of the masks to learn from, along a side",
        "data",
        Range(1, 32),
        concerns="masks",
    )
    no_overlap: bool = flag(
        False,
        "segmentation: objects that cover each other keep their whole masks; otherwise the smaller one is in front",
        "data",
        concerns="masks",
    )
    strict: bool = flag(False, "problems in single images and label rows are errors instead of warnings", "data")
    resume: str = flag(
        "",
        "resume the newest run of --project, or the run of a folder; auto: the newest of --name, or a new run",
        "training",
        const=NEWEST,
    )
    nosave: bool = flag(False, "write weights only at the end", "saving")
    noval: bool = flag(False, "validate only after the last epoch", "training")
    noautoanchor: bool = flag(
        False, "keep the model's anchors without checking that they suit the data", "model", concerns="anchors"
    )
    noplots: bool = flag(False, "write no pictures into the run folder", "saving")
    cache: str = flag(
        "",
        "cache decoded images in memory or on disk; val: only the validation images, in memory",
        "data",
        choices=("ram", "disk", "val"),
        const="ram",
    )
    device: str = flag(
        "", "cpu, mps or CUDA devices such as 0 or 0,1 (one process each); '' takes the best available", "processes"
    )
    processes: int = flag(
        0, "number of processes to start on this machine if there is no launcher", "processes", Range(1)
    )
    logical_processes: int = flag(
        0,
        "compute what this many processes compute, a power of two, with the same bytes on any number of processes that "
        "divides it; 0: on as many as there are",
        "processes",
        Range(1, 1024),
    )
    dist_timeout: float = flag(1800.0, "seconds that processes wait for each other", "processes", Range(1, 1e6))
    sync_bn: bool = flag(
        False, "BatchNorm over the batch of all processes: the curve of one process, up to rounding", "processes"
    )
    no_oom_retry: bool = flag(
        False,
        "end the run when the memory is too small for a batch, instead of computing it in parts",
        "processes",
    )
    scale_lr: bool = flag(False, "multiply the learning rate by the number of processes", "training")
    comm_hook: str = flag("", "compress the gradients that processes exchange", "processes", choices=("fp16", "bf16"))
    single_cls: bool = flag(False, "treat all classes as one", "model")
    optimizer: str = flag("SGD", "optimizer", "training", choices=("SGD", "Adam", "AdamW"))
    workers: int = flag(8, "loader processes per training process, at most one per CPU core", "data", NOT_NEGATIVE)
    project: str = flag("runs/train", "folder in which run folders are made", "saving")
    name: str = flag("exp", "name of the run folder; a number is added if it is taken", "saving")
    exist_ok: bool = flag(False, "write into project/name even if it exists", "saving")
    cos_lr: bool = flag(False, "cosine learning rate instead of linear", "training")
    label_smoothing: float = flag(
        0.0, "label smoothing epsilon of the class term", "training", BELOW_ONE, concerns="label smoothing"
    )
    class_weights: str = flag(
        "none",
        "weights of the classes in the loss; auto: by inverse frequency in the training labels, at most 10; "
        "class_weights of --hyp has weights of your own",
        "training",
        choices=("none", "auto"),
        concerns="class weights",
    )
    patience: int = flag(
        100, "stop after this many epochs without a better fitness; 0 never stops", "training", NOT_NEGATIVE
    )
    fitness: str = flag(
        "",
        "metrics that choose the best epoch, by weight, such as mAP_0.5=0.2,recall=0.8 or AP(cat)=1; '' is the task's",
        "training",
    )
    freeze: tuple[int | str, ...] = flag(
        (0,),
        "N freezes the first N layers (backbone 10), -1 all but the last (the head); several numbers just those, "
        "and so do backbone, head, or patterns of names of layers and parameters such as *.bn",
        "model",
    )
    lr_factor: str = flag(
        "",
        "factors of the learning rate by part, such as backbone=0.1,head=1; parts are named as for --freeze",
        "training",
    )
    save_period: int = flag(-1, "epochs between two additional files weights/epochN.pt; -1 writes none", "saving")
    save_steps: int = flag(
        0, "optimizer steps between two saves for --resume; 0 saves only after each epoch", "saving", NOT_NEGATIVE
    )
    keep_state: bool = flag(
        False,
        "keep the whole state of a finished run, so that --resume with more --epochs can continue it",
        "saving",
    )
    weights_precision: str = flag(
        "auto",
        "precision of the numbers in weight files; auto is fp16 after training in bf16 or fp16, else fp32",
        "saving",
        choices=WEIGHT_PRECISIONS,
    )
    time_limit: float = flag(
        0.0,
        "hours after which training stops at the next step, saved and validated; 0 never stops",
        "training",
        NOT_NEGATIVE,
    )
    max_skips: int = flag(
        20, "stop after this many consecutive optimizer steps whose gradients are not finite", "training", Range(1)
    )
    seed: int = flag(0, "seed of every random choice", "training", Range(0, 2**32 - 1))
    no_deterministic: bool = flag(
        False, "CUDA kernels that may round differently each time: faster for some models, no equal runs", "training"
    )
    no_cuda_graph: bool = flag(
        False,
        "launch the network's kernels one by one on a GPU, instead of recording them: the same bytes, but slower",
        "training",
    )
    mixed_precision: str = flag(
        "",
        "autocast precision; '' is what the launch file names, else bf16 or fp16 on CUDA",
        "training",
        choices=PRECISIONS,
    )
    log_with: str = flag(
        "",
        "trackers besides results.csv: none, all, or several with commas, such as wandb,mlflow or my_tracker.py; '' is "
        "wandb if it is installed",
        "logging",
        choices=LOG_WITH,
        comma_separated=True,
    )
    no_wandb: bool = flag(False, "do not log to Weights & Biases", "logging")
    log_interval: int = flag(
        0,
        "optimizer steps between two points of the step curves; 0: about 20 points per epoch",
        "logging",
        NOT_NEGATIVE,
    )
    wandb_project: str = flag(
        "", "W&B project; '' is the last folder of --project, or lockstep for runs/train", "logging"
    )
    wandb_entity: str = flag("", "W&B team or user; '' is your default one", "logging", aliases=("entity",))
    wandb_group: str = flag("", "W&B group of runs", "logging")
    wandb_tags: tuple[str, ...] = flag((), "W&B tags", "logging", comma_separated=True)
    wandb_name: str = flag("", "W&B name of the run; '' is the name of the run folder", "logging")
    wandb_notes: str = flag("", "W&B notes about the run", "logging")
    wandb_job_type: str = flag("", "W&B job type; '' is train", "logging")
    wandb_alerts: bool = flag(False, "W&B alerts you if the run ends by an error, a stall or NaN", "logging")
    wandb_id: str = flag(
        "", "W&B id of the run to continue; '' is a new one, or with --resume the resumed run's", "logging"
    )
    bbox_interval: int = flag(
        -1,
        "epochs between two W&B pictures of validation boxes; -1: ten pictures per run, 0: none",
        "logging",
        Range(-1),
        concerns="examples",
    )
    max_images: int = flag(
        16,
        "number of validation images in W&B, the same ones every time",
        "logging",
        Range(0, 1000),
        concerns="examples",
    )
    upload_model: bool = flag(
        False, "upload weights to W&B: each --save-period, and last.pt and best.pt at the end", "logging"
    )
    wandb_registry: str = flag(
        "",
        "with --upload-model: the collection of a W&B registry that best.pt is linked to, as REGISTRY/COLLECTION",
        "logging",
    )
    push_to_hub: str = flag(
        "",
        "repository of the Hugging Face Hub, owner/name, that gets best.pt, results and a model card at the end",
        "logging",
        form="owner/name",
    )
    upload_dataset: bool = flag(False, "make the data set a W&B artifact of references to its files", "logging")
    profile: str = flag(
        "",
        "profile the optimizer steps START:STOP, both included, such as 10:15: traces and the ten largest operators",
        "training",
        form="START:STOP",
    )
    verbose: bool = flag(
        False, "also print the device of every process, and all classes after every validation", "console"
    )
    quiet: bool = flag(False, "print only warnings and the final table", "console")
    doctor: bool = flag(
        False, "do not train: check all processes and hosts, and report what would go wrong", "processes"
    )
    # The values of flags such as --hyp.lr0, as text by key; the model's task knows which keys there are.
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class ValOptions:
    """The flags of val.py."""

    examples: ClassVar[tuple[str, ...]] = (
        "python val.py --weights runs/train/exp/weights/best.pt --data my.yaml",
        "python val.py --weights best.pt --data my.yaml --task test --save-json",
        "python val.py --weights best.pt --data my.yaml --task speed --batch-size 1",
    )
    data: str = flag("data/coco128.yaml", "data set YAML", "data")
    weights: tuple[str, ...] = flag(
        ("yolov5s.pt",),
        "weights to validate: a file, a run folder (its best.pt) or hf:owner/name; several are an ensemble",
        "model",
    )
    layers: str = flag("", "Python file with your own layers, which the model contains; the file is executed", "model")
    task_file: str = flag(
        "",
        "Python file or package with the model's task; '' takes the one that the weights name; it is executed",
        "model",
    )
    batch_size: int = flag(32, "images per batch", "data", Range(1), aliases=("batch",))
    imgsz: int = flag(
        0,
        "side of the square that images are fitted into, in pixels; 0: as in training or export if the weights "
        "record it, else as in the data YAML's `defaults`, or 640",
        "data",
        Range(0, IMGSZ.maximum),
        aliases=("img", "img-size"),
    )
    conf_thres: float = flag(
        0.001, "lowest confidence of a detection", "predictions", SHARE, aliases=("conf",), concerns="detections"
    )
    iou_thres: float = flag(
        0.6,
        "overlap above which NMS drops the weaker of two boxes",
        "predictions",
        SHARE,
        aliases=("iou",),
        concerns="suppression",
    )
    max_det: int = flag(300, "maximum detections per image", "predictions", Range(1), concerns="detections")
    task: str = flag(
        "val",
        "split to evaluate; speed: measure the time per image, at the thresholds of detect.py; a task of your own is "
        "named by --task-file",
        "data",
        choices=("train", "val", "test", "speed"),
    )
    augment: bool = flag(
        False,
        "test-time augmentation: merge the predictions at several sizes and mirrored; slower, better",
        "predictions",
        concerns="copies",
    )
    device: str = flag(
        "", "cpu, mps or CUDA devices such as 0 or 0,1 (one process each); '' takes the best available", "processes"
    )
    processes: int = flag(
        0, "number of processes to start on this machine if there is no launcher", "processes", Range(1)
    )
    dist_timeout: float = flag(1800.0, "seconds that processes wait for each other", "processes", Range(1, 1e6))
    workers: int = flag(8, "loader processes, at most one per CPU core", "data", NOT_NEGATIVE)
    single_cls: bool = flag(False, "treat all classes as one", "data")
    square: bool = flag(
        False,
        "square batches, instead of rectangular ones of similar aspect ratio with less padding",
        "data",
        concerns="padding",
    )
    image_padding: bool = flag(
        False,
        "pad each image by its own shape, not its batch's as YOLOv5 does; mAP is then the same at any --batch-size",
        "data",
        concerns="padding",
    )
    strict: bool = flag(False, "problems in single images and label rows are errors instead of warnings", "data")
    log_with: str = flag(
        "none",
        "trackers: none, all, or several with commas, such as wandb,mlflow or my_tracker.py",
        "logging",
        choices=LOG_WITH,
        comma_separated=True,
    )
    verbose: bool = flag(False, "one row per class and per object size, even if there are many classes", "console")
    quiet: bool = flag(False, "print only warnings and the row of all classes", "console")
    noplots: bool = flag(False, "write no pictures into the run folder", "saving")
    save_txt: bool = flag(False, "write detections as labels/*.txt into the run folder", "saving")
    save_conf: bool = flag(False, "with --save-txt: add each detection's confidence", "saving")
    save_hybrid: bool = flag(
        False, "with --save-txt: write the labels and those detections that match no label", "saving", concerns="boxes"
    )
    save_json: bool = flag(
        False,
        "write the predictions as COCO results, and compute COCO's metrics if there are annotations",
        "saving",
        concerns="boxes",
    )
    annotations: str = flag(
        "",
        "COCO annotations for --save-json; '' searches the data set for annotations/*.json",
        "saving",
        concerns="boxes",
    )
    half: bool = flag(False, "weights and images in half precision on CUDA; other devices use full precision", "model")
    project: str = flag("runs/val", "folder in which run folders are made", "saving")
    name: str = flag("exp", "name of the run folder; a number is added if it is taken", "saving")
    exist_ok: bool = flag(False, "write into project/name even if it exists", "saving")
    mixed_precision: str = flag(
        "",
        "autocast precision; '' is what the launch file names, else bf16 or fp16 on CUDA",
        "model",
        choices=PRECISIONS,
    )


@dataclass(frozen=True)
class DetectOptions:
    """The flags of detect.py."""

    examples: ClassVar[tuple[str, ...]] = (
        "python detect.py --weights best.pt --source photos",
        "python detect.py --weights best.pt --source film.mp4 --conf-thres 0.5",
        "python detect.py --weights best.pt --source 0 --view-img     # a camera",
    )
    weights: tuple[str, ...] = flag(
        ("yolov5s.pt",),
        "weights: a .pt, a run folder (its best.pt), an exported file or hf:owner/name; several are an ensemble",
        "model",
    )
    source: tuple[str, ...] = flag(
        (),
        "files, folders, globs, .txt lists, URLs, videos, camera numbers, rtsp://..., .streams lists, or screen",
        "images",
    )
    data: str = flag("", "data set YAML with the class names; '' takes those inside --weights", "model")
    imgsz: tuple[int, ...] = flag(
        (),
        "size that images are fitted into, in pixels: one number, or height and width; none: as in training or "
        "export if the weights record it, or 640",
        "images",
        IMGSZ,
        aliases=("img", "img-size"),
    )
    conf_thres: float = flag(
        0.25, "lowest confidence of a detection", "predictions", SHARE, aliases=("conf",), concerns="detections"
    )
    iou_thres: float = flag(
        0.45,
        "overlap above which NMS drops the weaker of two boxes",
        "predictions",
        SHARE,
        aliases=("iou",),
        concerns="suppression",
    )
    max_det: int = flag(1000, "maximum detections per image", "predictions", Range(1), concerns="detections")
    batch_size: int = flag(
        1,
        "images per batch; only consecutive images of the same shape are batched",
        "images",
        Range(1),
        aliases=("batch",),
    )
    device: str = flag("", "cpu, mps or the number of a CUDA device; '' takes the best available", "model")
    layers: str = flag("", "Python file with your own layers, which the model contains; the file is executed", "model")
    task_file: str = flag(
        "",
        "Python file or package with the model's task; '' takes the one that the weights name; it is executed",
        "model",
        aliases=("task",),
    )
    view_img: bool = flag(False, "show the results in a window, if OpenCV and a display are available", "drawing")
    save_txt: bool = flag(False, "write detections as labels/*.txt into the run folder", "saving")
    save_format: int = flag(
        0, "with --save-txt: 0 is normalised x y w h, 1 is pixels x1 y1 x2 y2", "saving", Range(0, 1), concerns="boxes"
    )
    save_csv: bool = flag(False, "write detections into predictions.csv", "saving")
    save_conf: bool = flag(False, "with --save-txt: add the confidence", "saving")
    save_crop: bool = flag(False, "write the content of each box as crops/CLASS/*.jpg", "saving")
    retina_masks: bool = flag(
        False,
        "segmentation: masks computed at the size of the file instead of the network's; slower",
        "predictions",
        concerns="masks",
    )
    nosave: bool = flag(False, "write no pictures or videos", "saving")
    classes: tuple[str, ...] = flag(
        (), "classes to detect, by name or number; none: all", "predictions", concerns="detections"
    )
    agnostic_nms: bool = flag(
        False, "boxes of different classes suppress each other too", "predictions", concerns="suppression"
    )
    augment: bool = flag(
        False,
        "test-time augmentation: merge the predictions at several sizes and mirrored; slower, better",
        "predictions",
        concerns="copies",
    )
    project: str = flag("runs/detect", "folder in which run folders are made", "saving")
    name: str = flag("exp", "name of the run folder; a number is added if it is taken", "saving")
    exist_ok: bool = flag(False, "write into project/name even if it exists", "saving")
    line_thickness: int = flag(
        3, "line width of boxes, in pixels; text follows it and the image", "drawing", Range(1, 100)
    )
    hide_labels: bool = flag(False, "draw boxes without names", "drawing")
    hide_conf: bool = flag(False, "draw names without confidences", "drawing")
    half: bool = flag(False, "weights and images in half precision on CUDA; other devices use full precision", "model")
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
    weights: tuple[str, ...] = flag(
        ("yolov5s.pt",),
        "weights to export: a .pt, a run folder (its best.pt), a .safetensors or hf:owner/name",
        "model",
    )
    data: str = flag("", "data set YAML with the class names; '' takes those inside --weights", "model")
    layers: str = flag("", "Python file with your own layers, which the model contains; the file is executed", "model")
    task_file: str = flag(
        "",
        "Python file or package with the model's task; '' takes the one that the weights name; it is executed",
        "model",
        aliases=("task",),
    )
    imgsz: tuple[int, ...] = flag(
        (),
        "size of the images, in pixels: one number, or height and width; none: as in training if the weights "
        "record it, or 640",
        "format",
        IMGSZ,
        aliases=("img", "img-size"),
    )
    batch_size: int = flag(
        1, "images per batch that the exported file takes", "format", Range(1, 4096), aliases=("batch",)
    )
    device: str = flag("cpu", "cpu or the number of the CUDA device on which .torchscript and .pt2 will run", "model")
    include: tuple[str, ...] = flag(
        ("torchscript",),
        "file formats; exported is torch.export's .pt2; safetensors holds weights, which every script reads; engine "
        "writes the ONNX, and prints TensorRT's command for it",
        "format",
        choices=("torchscript", "onnx", "openvino", "exported", "safetensors", "engine"),
        synonyms={"tensorrt": "engine", "trt": "engine", "pt2": "exported"},
    )
    dynamic: bool = flag(
        False, "ONNX, OpenVINO, .pt2: any number of images, of any height and width in whole strides", "format"
    )
    half: bool = flag(False, "half precision, on CUDA only", "format")
    opset: int = flag(18, "ONNX operator set", "format", OPSETS)
    nms: bool = flag(
        False,
        "include non-maximum suppression in the file, which then outputs detections instead of all boxes",
        "NMS",
        concerns="suppression",
    )
    agnostic_nms: bool = flag(
        False, "with --nms: boxes of different classes suppress each other too", "NMS", concerns="suppression"
    )
    topk_per_class: int = flag(
        100, "with --nms: maximum detections per class and image", "NMS", Range(1), concerns="suppression"
    )
    topk_all: int = flag(
        100, "with --nms: maximum detections per image", "NMS", Range(1, 10_000), concerns="suppression"
    )
    iou_thres: float = flag(
        0.45, "with --nms: overlap above which the weaker of two boxes is dropped", "NMS", SHARE, concerns="suppression"
    )
    conf_thres: float = flag(0.25, "with --nms: lowest confidence of a detection", "NMS", SHARE, concerns="suppression")
    simplify: bool = flag(False, "has no effect: ONNX files are always simplified", "format")
    inplace: bool = flag(False, "has no effect: boxes are never decoded in place", "format")
    verbose: bool = flag(False, "show the messages of the exporters", "console")


OPTIONS_OF_SCRIPT = {"train": TrainOptions, "val": ValOptions, "detect": DetectOptions, "export": ExportOptions}
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
