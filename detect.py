"""Look for what a model knows in pictures, videos and streams: `python detect.py --weights best.pt --source photos`.

From Python:

    from detect import Predictor
    predictor = Predictor("best.pt")
    found = predictor("photo.jpg")      # an array; of a list of images, a list of arrays
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from data import DATASETS
from data.images import read_image
from data.media import Frame, Item, Media, ahead, find_media, local
from data.sources import read_spec
from models.ensemble import check_programs, common_task, fixed_size, halve, load_models, weight_files
from models.export.runtime import Exported, read_model
from models.fuse import fuse
from models.layer_registry import add_layers
from models.tasks import TASKS
from utils.config.options import DetectOptions
from utils.config.parser import parse_options
from utils.config.ranges import IMGSZ
from utils.console import Bar, show
from utils.distributed.accelerator import one_device
from utils.distributed.exit import Stopped, run_main
from utils.distributed.ranks import speaks
from utils.errors import UserError
from utils.files import csv_text, find_file, lock_folder, numbered_folder, replacing
from utils.memory_format import layout
from utils.plots.drawing import Style, write_picture
from utils.stage_times import (
    INFERENCE,
    POSTPROCESSING,
    PREPARING,
    StageTimer,
    format_times,
    milliseconds_per_image,
    without_warmup,
)


class Predictor:
    """A model, or several that look together, for images of any size.

    The arguments are the flags of detect.py: `weights` a name or several, `imgsz` a number or (height, width). Raises
    `UserError`, whose text says what to do.
    """

    def __init__(
        self,
        weights: str | Path | Sequence[str | Path] = "yolov5s.pt",
        *,
        imgsz: int | Sequence[int] = 640,
        conf_thres: float = 0.25,
        iou_thres: float = 0.45,
        max_det: int = 1000,
        classes: Sequence[int] = (),
        agnostic_nms: bool = False,
        augment: bool = False,
        half: bool = False,
        device: str = "",
        data: str = "",
        layers: str = "",
    ) -> None:
        sides = [imgsz] if isinstance(imgsz, int) else list(imgsz)
        if len(sides) not in (1, 2) or not all(side in IMGSZ for side in sides):
            raise UserError(f"--imgsz {' '.join(map(str, sides))}: give one number of pixels, or height and width")
        if layers:
            add_layers(layers)
        self.device = one_device(device)
        files = weight_files([str(name) for name in ([weights] if isinstance(weights, str | Path) else weights)])
        content = {name: read_model(file) for name, file in files.items()}
        kind = common_task(content)
        check_programs(content, augment)
        self.kind = DATASETS[kind]
        names = next(iter(content.values())).class_names
        if data:
            names = self.kind.class_names(read_spec(find_file(data, "data set", ["data"])), False)
        tasks = [TASKS[kind](names, TASKS[kind].recipe()) for _ in content]
        self.members = load_models(tasks, content, max(sides), data or "the names")
        self.half = half and self.device.type == "cuda"
        for number, (task, trained) in enumerate(self.members):
            task.augment = augment
            model: Any = trained if isinstance(trained, Exported) else fuse(trained)
            model = (halve(model) if self.half else model).to(self.device, memory_format=layout(self.device))
            self.members[number] = task, model.eval()
        self.task = tasks[0]
        self.task.set_thresholds(conf_thres, iou_thres, max_det, classes, agnostic_nms, one_class=True)
        self.stride = math.lcm(*(task.stride for task in tasks))
        whole = [math.ceil(side / self.stride) * self.stride for side in sides]
        fixed = fixed_size(content)
        self.sides, self.full = fixed or (whole[0], whole[-1]), fixed is not None

    @property
    def names(self) -> dict[int, str]:
        """The classes by their numbers."""
        return dict(self.task.names)

    def __call__(self, images: Any) -> Any:
        """What is in an image, or of a list of images in each.

        An image: a path or address, a PIL image, an array (h, w, 3) or (h, w) of uint8 in RGB, or a tensor (3, h, w) of
        uint8, or of floats in 0 to 1. A tensor (b, 3, h, w) is a list.

        Of boxes float32 (k, 6): x1, y1, x2, y2 in pixels of the image, confidence, class; the surest first. Of models
        for whole images the probability of each class, float32 (classes,).
        """
        if isinstance(images, (list, tuple)) or (isinstance(images, Tensor) and images.ndim == 4):
            return [self(image) for image in images]
        item = self.item(as_pixels(images), "image")
        return self.task.plain(self.look(self.kind.collate([item]))[0])

    def item(self, image: np.ndarray, name: str) -> Any:
        """An image, uint8 (h, w, 3) BGR, as an item of a batch."""
        return self.kind.item(image, name, self.sides, self.stride, self.full)

    @torch.inference_mode()
    def look(self, batch: Any, stages: StageTimer | None = None) -> Any:
        """What is found in each image of a batch, as the task has it."""
        stages = stages or StageTimer()
        stages.start_batch(len(batch.infos))
        batch = batch.to(self.device)
        inputs = self.task.inputs(batch)
        inputs = inputs.half() if self.half else inputs
        stages.end_stage(PREPARING)
        looks = [look for task, model in self.members for look in task.looks(model, inputs)]
        stages.end_stage(INFERENCE)
        predictions = self.task.predict(looks, batch)
        stages.end_stage(POSTPROCESSING)
        return predictions


def as_pixels(image: Any) -> np.ndarray:
    """An image in any of the forms that `Predictor` takes, as uint8 (h, w, 3) BGR. Raises `UserError`."""
    if isinstance(image, str | Path):
        return read_image(local(Item("picture", str(image))))
    if isinstance(image, Image.Image):
        image = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    if isinstance(image, Tensor):
        image = image.detach().cpu()
        if image.is_floating_point():
            image = (image * 255).round().clamp(0, 255)
        image = image.to(torch.uint8).permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    if not isinstance(image, np.ndarray) or image.ndim not in (2, 3) or image.dtype != np.uint8 or not image.size:
        what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise UserError(
            f"an image must be a path, a PIL image, a uint8 array (h, w, 3) or a tensor (3, h, w), not {what}"
        )
    if image.ndim == 2:
        return np.ascontiguousarray(np.repeat(image[..., None], 3, 2))
    if image.shape[2] != 3:
        raise UserError(f"an image must have 3 channels, RGB, not {image.shape[2]}")
    return np.ascontiguousarray(image[..., ::-1])


def main() -> None:
    """Look as the flags say."""
    options = parse_options(DetectOptions, sys.argv[1:], prints=speaks())
    media = Media(find_media(options.source), options.vid_stride)
    names = {field.name for field in fields(DetectOptions)} & set(Predictor.__init__.__annotations__)
    predictor = Predictor(**{name: getattr(options, name) for name in names})
    task = predictor.task
    folder = numbered_folder(Path(options.project), options.name, options.exist_ok)
    held = lock_folder(folder)
    if options.half and not predictor.half:
        show("warning: --half is for CUDA; taking full precision")
    live = any(item.kind == "live" for item in media.items)
    stages, labels = StageTimer(synchronised(predictor.device)), Labels(media.items)
    looked, told = 0, 0  # frames, problems
    with ExitStack() as opened:
        keepers = [opened.enter_context(keeper) for keeper in wanted(options, folder, task, labels)]
        frames = ((frame, predictor.item(frame.image, frame.item.name)) for frame in media)
        bar = Bar("looking", media.count(), shown=True)
        for group in bar.over(groups(frames if live else ahead(frames), options.batch_size), len):
            batch = predictor.kind.collate([item for _, item in group])
            predictions = predictor.look(batch, stages)
            milliseconds = 1000 * sum(
                stages.batches[-1].seconds[stage] for stage in (PREPARING, INFERENCE, POSTPROCESSING)
            )
            rows = task.text_rows(predictions, batch, options.save_conf, corners=options.save_format == 1)
            for (frame, _), prediction, lines in zip(group, predictions, rows, strict=True):
                for keep in keepers:
                    keep(Seen(frame, prediction, lines))
                if not options.quiet:
                    show(f"{called(frame)}: {task.told(prediction)}, {milliseconds / len(group):.1f} ms")
            looked += len(group)
            told = tell(media.problems, told)
    tell(media.problems, told)
    held.release()
    rate = f"; {format_times(milliseconds_per_image(without_warmup(stages.batches)))}" if looked else ""
    show(f"{looked} images looked at{rate}; results in {folder}")
    if media.problems:
        show(f"warning: not all could be read, or to its end: {len(media.problems)} of the sources, see above")
        raise Stopped(1)


def synchronised(device: torch.device) -> Callable[[], object]:
    """What waits for a device, so that its work can be timed."""
    return torch.accelerator.synchronize if device.type != "cpu" else lambda: None


def tell(problems: Sequence[str], told: int) -> int:
    """Say the problems that are new; how many there are."""
    for problem in problems[told:]:
        show(f"warning: {problem}")
    return len(problems)


def called(frame: Frame) -> str:
    """A frame's name for people."""
    if frame.item.kind == "picture":
        return frame.item.name
    return f"{frame.item.name} ({frame.number + 1}{f'/{frame.frames}' if frame.frames else ''})"


def groups(frames: Iterable[tuple[Frame, Any]], most: int) -> Iterator[list[tuple[Frame, Any]]]:
    """Frames that follow each other and whose items are of one shape, at most so many."""
    group: list[tuple[Frame, Any]] = []
    for frame, item in frames:
        if group and (len(group) == most or group[0][1][0].shape != item[0].shape):
            yield group
            group = []
        group.append((frame, item))
        if frame.item.kind == "live" and len(group) == most:
            yield group
            group = []
    if group:
        yield group


# What is kept


class Seen(NamedTuple):
    """A frame, what was found in it, and that as rows of text."""

    frame: Frame
    prediction: Tensor
    rows: list[str]


class Labels:
    """What the files of each item are called: its own name, with a number where that is taken by another item."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.stems: dict[Item, str] = {}
        taken: set[str] = set()
        for item in items:
            stem = (
                "".join(c if c.isalnum() or c in "-_. ()" else "_" for c in Path(item.name.split("?")[0]).stem) or "_"
            )
            free = next(
                name for name in chain([stem], (f"{stem}-{k}" for k in range(2, len(items) + 2))) if name not in taken
            )
            taken.add(free)
            self.stems.setdefault(item, free)

    def of(self, frame: Frame) -> str:
        """The stem of a frame's files: of a video with the frame's number."""
        stem = self.stems[frame.item]
        return stem if frame.item.kind == "picture" else f"{stem}_{frame.number}"


def wanted(options: DetectOptions, folder: Path, task: Any, labels: Labels) -> list[Any]:
    """What keeps the results that the flags ask for: entered before, called with every frame, left after."""
    style = Style(options.line_thickness, not options.hide_labels, not options.hide_conf)
    keepers: list[Any] = []
    if not options.nosave or options.view_img:
        keepers.append(Drawn(task, style, folder, labels, options))
    if options.save_txt:
        keepers.append(Texts(folder / "labels", labels))
    if options.save_csv:
        keepers.append(Table(folder / "predictions.csv", task))
    if options.save_crop:
        keepers.append(Crops(folder / "crops", task, labels))
    return keepers


class Keeper:
    """Keeps something of every frame."""

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *_: object) -> None:
        """There are no more frames."""

    def __call__(self, seen: Seen) -> None:
        raise NotImplementedError


class Drawn(Keeper):
    """Pictures and videos with what was found drawn on, in files and, if asked for, a window."""

    def __init__(self, task: Any, style: Style, folder: Path, labels: Labels, options: DetectOptions) -> None:
        self.task, self.style, self.folder, self.labels = task, style, folder, labels
        self.files, self.window, self.stride = not options.nosave, options.view_img, options.vid_stride
        self.videos: dict[Item, Any] = {}

    def __call__(self, seen: Seen) -> None:
        frame, picture = seen.frame, self.task.drawn(seen.frame.image, seen.prediction, self.style)
        if self.window:
            self._show(frame, picture)
        if not self.files:
            return
        if frame.item.kind == "picture":
            suffix = Path(frame.item.name.split("?")[0]).suffix.lower()
            write_picture(
                self.folder / f"{self.labels.of(frame)}{suffix if suffix in ('.png', '.bmp') else '.jpg'}", picture
            )
        else:
            self._video(frame, picture).write(picture)

    def _video(self, frame: Frame, picture: np.ndarray) -> Any:
        """What writes the video that the frame is of; one ends when the next one begins, but for streams."""
        if frame.item not in self.videos:
            if frame.item.kind == "video":
                self._close()
            path = self.folder / f"{self.labels.stems[frame.item]}.mp4"
            size = picture.shape[1], picture.shape[0]
            self.videos[frame.item] = cv2.VideoWriter(
                str(path), cv2.VideoWriter.fourcc(*"mp4v"), frame.fps / self.stride, size
            )
        return self.videos[frame.item]

    def _show(self, frame: Frame, picture: np.ndarray) -> None:
        try:
            cv2.imshow(frame.item.name, picture)
            cv2.waitKey(0 if frame.item.kind == "picture" else 1)
        except cv2.error:
            show("warning: --view-img needs a display, and opencv-python in place of opencv-python-headless; not shown")
            self.window = False

    def _close(self) -> None:
        for video in self.videos.values():
            video.release()
        self.videos.clear()

    def __exit__(self, *_: object) -> None:
        self._close()


class Texts(Keeper):
    """A text file for every image in which something was found."""

    def __init__(self, folder: Path, labels: Labels) -> None:
        self.folder, self.labels = folder, labels
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, seen: Seen) -> None:
        if seen.rows:
            path = self.folder / f"{self.labels.of(seen.frame)}.txt"
            path.write_text("".join(f"{line}\n" for line in seen.rows), encoding="utf-8")


class Table(Keeper):
    """predictions.csv: a row for everything that was found."""

    def __init__(self, path: Path, task: Any) -> None:
        self.path, self.task = path, task
        self.rows: list[tuple[str, str, str]] = []

    def __call__(self, seen: Seen) -> None:
        name = called(seen.frame) if seen.frame.item.kind != "picture" else Path(seen.frame.item.name).name
        found = self.task.findings(seen.prediction)
        self.rows += [(name, label, f"{confidence:.4f}") for label, confidence in found]

    def __exit__(self, *_: object) -> None:
        with replacing(self.path) as file:
            file.write(csv_text(("Image Name", "Prediction", "Confidence"), self.rows).encode(errors="surrogateescape"))


class Crops(Keeper):
    """What each box holds, in a folder for each class."""

    def __init__(self, folder: Path, task: Any, labels: Labels) -> None:
        self.folder, self.task, self.labels = folder, task, labels

    def __call__(self, seen: Seen) -> None:
        for number, (label, crop) in enumerate(self.task.crops(seen.frame.image, seen.prediction), 1):
            safe = label.replace("/", "_").replace("\0", "_") or "_"
            more = "" if number == 1 else f"-{number}"
            write_picture(self.folder / safe / f"{self.labels.of(seen.frame)}{more}.jpg", crop)


if __name__ == "__main__":
    run_main(main)
