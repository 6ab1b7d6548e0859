"""Detect objects in images, videos and streams: `python detect.py --weights best.pt --source photos`.

From Python:

    from detect import Predictor
    predictor = Predictor("best.pt")
    predictions = predictor("photo.jpg")    # an array; of a list of images, a list of arrays
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from data.dataset import Item, data_source, dataset_class
from data.images import read_whole_image
from data.media import Frame, Media, MediaItem, find_media, local_file, prefetched
from models.ensemble import Inference, for_inference, read_members
from models.image_size import sides_of
from models.tasks.contract import Batch, Prediction, Thresholds
from utils.config.options import DetectOptions
from utils.config.parser import given_flags, parse_options
from utils.config.select import select
from utils.console import Bar, show
from utils.distributed.devices import one_device
from utils.distributed.exit import Stopped, run_main
from utils.errors import UserError
from utils.files import csv_text, lock_folder, numbered_folder, replacing
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
    """A model, or an ensemble of several, for images of any size.

    The arguments are the flags of detect.py, with their defaults: `weights` is one name or several, `imgsz` one number,
    (height, width), or 0 for the default. Prints how the image size was chosen, and warnings; `quiet`: these only.
    Raises `UserError`, whose message says what to do.
    """

    def __init__(
        self,
        weights: str | Path | Sequence[str | Path] = "yolov5s.pt",
        *,
        imgsz: int | Sequence[int] = 0,
        conf_thres: float | None = None,
        iou_thres: float | None = None,
        max_det: int | None = None,
        classes: Sequence[int] = (),
        agnostic_nms: bool = False,
        augment: bool = False,
        retina_masks: bool = False,
        half: bool = False,
        device: str = "",
        data: str = "",
        layers: str = "",
        quiet: bool = False,
    ) -> None:
        values = {"conf_thres": conf_thres, "iou_thres": iou_thres, "max_det": max_det}
        given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        given |= {"imgsz": sides_of(imgsz), **({"agnostic_nms": True} if agnostic_nms else {})}
        self.device = one_device(device)
        files = [weights] if isinstance(weights, str | Path) else weights
        members = read_members([str(name) for name in files], layers, augment)
        source = data_source(data, members.entry.data) if data else None
        kind = members.entry.load()
        members.refuse({"augment": augment, "retina_masks": retina_masks})
        self.task = kind(source.names() if source else members.class_names, kind.recipe())
        self.data = dataset_class(members.entry.data)
        self.half = half and self.device.type == "cuda"
        size = members.image_size(imgsz)
        models = members.build(self.task, max(size.sides), data or "the names")
        self.models = [for_inference(model, self.device, self.half, fold=True) for model in models]
        thresholds = select(
            Thresholds, DetectOptions(**given), classes=tuple(classes), one_class=True, retina_masks=retina_masks
        )
        postprocess = self.task.postprocess(models[0], thresholds)
        self.inference = Inference(self.task, postprocess, self.device, augment, self.half)
        self.stride = math.lcm(*(model.stride for model in models))
        self.size = size.rounded(self.stride)
        lines = [*self.size.messages, *members.overridden({**given, "half": self.half})]
        if half and not self.half:
            lines.append("warning: --half is for CUDA; taking full precision")
        show(*(line for line in lines if not quiet or line.startswith("warning: ")))

    @property
    def names(self) -> dict[int, str]:
        """Class names by class number."""
        return dict(self.task.names)

    def __call__(self, images: Any) -> Any:
        """Return the prediction for an image, or for each of a list of images.

        An image: a path or address, a PIL image, an array (h, w, 3) or (h, w) of uint8 in RGB, or a tensor (3, h, w) of
        uint8, or of floats in 0 to 1. A tensor (b, 3, h, w) is a list.

        Boxes are float32 (k, 6): xyxy in pixels of the image, confidence, class, the most confident first. A model for
        whole images returns the probability of each class, float32 (classes,).
        """
        if isinstance(images, (list, tuple)) or (isinstance(images, Tensor) and images.ndim == 4):
            return [self(image) for image in images]
        item = self.item(as_pixels(images), "image")
        return self.predict(self.data.collate([item]))[0].array

    def item(self, image: np.ndarray, name: str) -> Item:
        """Return an image, uint8 (h, w, 3) BGR, as an item of a batch."""
        return self.data.item(image, name, self.size.sides, self.stride, self.size.is_fixed)

    @torch.inference_mode()
    def predict(self, batch: Batch, timer: StageTimer | None = None) -> Sequence[Prediction]:
        """Return the prediction for each image of a batch."""
        timer = timer or StageTimer()
        batch, views = self.inference.views(self.models, batch, timer)
        predictions = self.inference.postprocess(views, batch)
        timer.end_stage(POSTPROCESSING)
        return predictions


def as_pixels(image: Any) -> np.ndarray:
    """Convert an image in any form that `Predictor` takes to uint8 (h, w, 3) BGR. Raises `UserError`."""
    if isinstance(image, str | Path):
        return read_whole_image(local_file(MediaItem("picture", str(image))))
    if isinstance(image, Image.Image):
        try:
            image = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception as error:  # the file that Pillow reads only now is damaged, for which it has many kinds
            name = getattr(image, "filename", "") or "the PIL image"
            raise UserError(f"{name} cannot be read as an image ({error}); fix or remove it") from None
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
    """Detect from the command line."""
    argv = sys.argv[1:]
    options = parse_options(DetectOptions, argv)
    media = Media(find_media(options.source), options.vid_stride)
    given, known = given_flags(DetectOptions, argv), Predictor.__init__.__annotations__
    predictor = Predictor(**{name: value for name, value in given.items() if name in known})
    folder = numbered_folder(Path(options.project), options.name, options.exist_ok)
    lock = lock_folder(folder)
    synchronise = torch.accelerator.synchronize if predictor.device.type != "cpu" else lambda: None
    timer, file_names = StageTimer(synchronise), FileNames(media.items)
    frames_done = warnings_shown = 0
    with ExitStack() as opened:
        outputs = [opened.enter_context(output) for output in requested_outputs(options, folder, file_names)]
        for group in batches(media, predictor, options.batch_size):
            predictions = predictor.predict(predictor.data.collate([item for _, item in group]), timer)
            seconds = sum(timer.batches[-1].seconds[stage] for stage in (PREPARING, INFERENCE, POSTPROCESSING))
            for (frame, _), prediction in zip(group, predictions, strict=True):
                for output in outputs:
                    output(frame, prediction)
                if not options.quiet:
                    show(f"{frame_name(frame)}: {prediction.describe()}, {1000 * seconds / len(group):.1f} ms")
            frames_done += len(group)
            warnings_shown = show_warnings(media.problems, warnings_shown)
    show_warnings(media.problems, warnings_shown)
    lock.release()
    times = milliseconds_per_image(without_warmup(timer.batches))
    show(f"{frames_done} images{f'; {format_times(times)}' if frames_done else ''}; results in {folder}")
    if media.problems:
        bad, count = len(media.problems), len(media.items)
        show(f"warning: {bad} of the {count} sources could not be read, or not to the end; see above")
        raise Stopped(1)


def batches(media: Media, predictor: Predictor, batch_size: int) -> Iterator[list[tuple[Frame, Item]]]:
    """Iterate over the frames of all media with their items, in batches, with a progress bar."""
    frames = ((frame, predictor.item(frame.image, frame.item.name)) for frame in media)
    live = any(item.kind == "live" for item in media.items)
    bar = Bar("detecting", media.count(), shown=True)
    return bar.over(groups(frames if live else prefetched(frames), batch_size), len)


def show_warnings(problems: Sequence[str], shown: int) -> int:
    """Print the problems after the first `shown` ones; return the number of all."""
    for problem in problems[shown:]:
        show(f"warning: {problem}")
    return len(problems)


def frame_name(frame: Frame) -> str:
    """Return the name of a frame for the console."""
    if frame.item.kind == "picture":
        return frame.item.name
    return f"{frame.item.name} ({frame.number + 1}{f'/{frame.frames}' if frame.frames else ''})"


def groups(frames: Iterable[tuple[Frame, Item]], most: int) -> Iterator[list[tuple[Frame, Item]]]:
    """Iterate over groups of at most `most` successive frames whose items have one shape."""
    group: list[tuple[Frame, Item]] = []
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


# Outputs


class FileNames:
    """File stems of the items: each item's own name, with a number if an earlier item has the same."""

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self.stems: dict[MediaItem, str] = {}
        taken: set[str] = set()
        for item in items:
            stem = Path(item.name.split("?")[0]).stem
            stem = "".join(c if c.isalnum() or c in "-_. ()" else "_" for c in stem) or "_"
            numbered = (f"{stem}-{number}" for number in range(2, len(items) + 2))
            free = next(name for name in chain([stem], numbered) if name not in taken)
            taken.add(free)
            self.stems.setdefault(item, free)

    def of(self, frame: Frame) -> str:
        """Return the stem of a frame's files; for videos it ends with the frame number."""
        stem = self.stems[frame.item]
        return stem if frame.item.kind == "picture" else f"{stem}_{frame.number}"


class Output(ABC):
    """Writes something about every frame: a context manager over all frames, called with each."""

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        """Close open files."""
        return

    @abstractmethod
    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        """Write one frame."""


def requested_outputs(options: DetectOptions, folder: Path, file_names: FileNames) -> list[Output]:
    """Return the outputs that the flags request."""
    outputs: list[Output] = []
    if not options.nosave or options.view_img:
        outputs.append(DrawnFrames(folder, file_names, options))
    if options.save_txt:
        outputs.append(LabelFiles(folder / "labels", file_names, options))
    if options.save_csv:
        outputs.append(PredictionTable(folder / "predictions.csv"))
    if options.save_crop:
        outputs.append(Crops(folder / "crops", file_names))
    return outputs


class DrawnFrames(Output):
    """Images and videos with the predictions drawn on them, in files and, if asked for, a window."""

    def __init__(self, folder: Path, file_names: FileNames, options: DetectOptions) -> None:
        self.folder, self.file_names = folder, file_names
        self.style = Style(options.line_thickness, not options.hide_labels, not options.hide_conf)
        self.writes_files, self.window, self.stride = not options.nosave, options.view_img, options.vid_stride
        self.videos: dict[MediaItem, cv2.VideoWriter] = {}

    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        picture = prediction.draw(frame.image, self.style)
        if self.window:
            self._show(frame, picture)
        if not self.writes_files:
            return
        if frame.item.kind == "picture":
            suffix = Path(frame.item.name.split("?")[0]).suffix.lower()
            suffix = suffix if suffix in (".png", ".bmp") else ".jpg"
            write_picture(self.folder / f"{self.file_names.of(frame)}{suffix}", picture)
        else:
            self._video(frame, picture).write(picture)

    def _video(self, frame: Frame, picture: np.ndarray) -> cv2.VideoWriter:
        """Return the writer of the frame's video. A new video closes the one before; streams stay open side by side."""
        if frame.item not in self.videos:
            if frame.item.kind == "video":
                self._close()
            path = self.folder / f"{self.file_names.stems[frame.item]}.mp4"
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


class LabelFiles(Output):
    """A label file for every image with predictions."""

    def __init__(self, folder: Path, file_names: FileNames, options: DetectOptions) -> None:
        self.folder, self.file_names = folder, file_names
        self.with_confidence, self.corners = options.save_conf, options.save_format == 1
        folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        if rows := prediction.label_rows(self.with_confidence, self.corners):
            path = self.folder / f"{self.file_names.of(frame)}.txt"
            path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


class PredictionTable(Output):
    """predictions.csv: a row for every prediction."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[str, str, str]] = []

    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        name = frame_name(frame) if frame.item.kind != "picture" else Path(frame.item.name).name
        self.rows += [(name, label, f"{confidence:.4f}") for label, confidence in prediction.items]

    def __exit__(self, *_: object) -> None:
        with replacing(self.path) as file:
            file.write(csv_text(("Image Name", "Prediction", "Confidence"), self.rows).encode(errors="surrogateescape"))


class Crops(Output):
    """The part of the image that each prediction covers, in a folder for each class."""

    def __init__(self, folder: Path, file_names: FileNames) -> None:
        self.folder, self.file_names = folder, file_names

    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        for number, (label, crop) in enumerate(prediction.crops(frame.image), 1):
            safe = label.replace("/", "_").replace("\0", "_") or "_"
            suffix = "" if number == 1 else f"-{number}"
            write_picture(self.folder / safe / f"{self.file_names.of(frame)}{suffix}.jpg", crop)


if __name__ == "__main__":
    run_main(main)
