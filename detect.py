"""Detect objects in images, videos and streams: `python detect.py --weights best.pt --source photos`.

From Python:

    from detect import Predictor
    predictor = Predictor("best.pt")
    print(predictor("photo.jpg"))    # a Prediction; of a folder or a list of images, a list

or `detect.run(weights="best.pt", source="photos")`, which writes the files of the command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from data.dataset import Item
from data.media import Frame, Media, MediaItem, find_media, prefetched
from models.tasks.contract import Prediction
from predictor import Predictor
from utils.config.flags import DetectOptions
from utils.config.parser import given_flags, over_defaults
from utils.console import Bar, show
from utils.distributed.failure import run_main
from utils.errors import Stopped, UserError, plural, without_secrets
from utils.files import csv_text, lock_folder, numbered_folder, remove_if_empty, replacing, unique_stems, write_rows
from utils.plots.drawing import Style, write_picture
from utils.python_api import call
from utils.summary import INFERENCE, POSTPROCESSING, PREPARING, StageTimer, format_times


def detect(given: Mapping[str, Any]) -> dict[str, Any]:
    """Detect with flags by name; return what `run` does. Raises `UserError` if nothing could be read."""
    options = over_defaults(DetectOptions, given)
    items = dict.fromkeys(item for source in options.source or ("",) for item in find_media(source))
    media = Media(list(items), options.vid_stride)
    predictor = Predictor.from_flags(given)
    synchronise = torch.accelerator.synchronize if predictor.device.type != "cpu" else lambda: None
    timer, file_names = StageTimer(synchronise), FileNames(media.items)
    frames_done = 0
    with run_folder(options) as folder, ExitStack() as closing:
        outputs = requested_outputs(options, folder, file_names, closing)
        for group in batches(media, predictor, options.batch_size):
            batch = predictor.data.collate([item for _, item in group])
            if not timer.batches:
                predictor.predict_batch(batch)  # a warm-up: the first pass allocates memory and selects kernels
            predictions = predictor.predict_batch(batch, timer)
            seconds = sum(timer.batches[-1].seconds[stage] for stage in (PREPARING, INFERENCE, POSTPROCESSING))
            for (frame, _), prediction in zip(group, predictions, strict=True):
                for output in outputs:
                    output(frame, prediction)
                if not options.quiet:
                    show(f"{frame_name(frame)}: {prediction.describe()}, {1000 * seconds / len(group):.1f} ms")
            frames_done += len(group)
    if not frames_done:
        raise UserError("; ".join(media.problems))
    show(*(f"warning: {problem}" for problem in media.problems))
    results = f"; results in {folder}" if folder.is_dir() else ""
    show(*format_times(timer.batches), f"{plural(frames_done, 'image')}{results}")
    if media.problems:
        bad, count = len(media.problems), len(media.items)
        show(f"warning: {bad} of the {count} sources could not be read completely; see above")
    return {"folder": str(folder) if results else None, "images": frames_done, "problems": media.problems}


@contextmanager
def run_folder(options: DetectOptions) -> Iterator[Path]:
    """Make and lock the run folder. It is removed if nothing is written into it."""
    folder = numbered_folder(Path(options.project), options.name, options.exist_ok)
    lock = lock_folder(folder)
    try:
        yield folder
    finally:
        lock.release()
        remove_if_empty(folder)


def main() -> None:
    """Detect from the command line."""
    if detect(given_flags(DetectOptions, sys.argv[1:]))["problems"]:
        raise Stopped(1)


def run(**flags: Any) -> dict[str, Any]:
    """Detect from Python, with flags of the command: `detect.run(weights="best.pt", source="photos")`.

    Returns the run's `folder`, None if nothing was written, the number of `images`, and `problems`: a message for each
    source that could not be read completely. Raises `UserError` if the command would end with another error.
    """
    return call(detect, Path(__file__).stem, flags)  # the stem, because the names of scripts are not tasks


def batches(media: Media, predictor: Predictor, batch_size: int) -> Iterator[list[tuple[Frame, Item]]]:
    """Iterate over the frames of all media with their items, in batches, with a progress bar."""
    frames = ((frame, predictor.item(frame.image, without_secrets(frame.item.name))) for frame in media)
    kinds = {item.kind for item in media.items}
    bar = Bar("detecting", len(media.items) if kinds == {"picture"} else 0, shown=True)
    return bar.over(groups(frames if "live" in kinds else prefetched(frames), batch_size), len)


def frame_name(frame: Frame) -> str:
    """Return the name of a frame for the console."""
    name = without_secrets(frame.item.name)
    return name if frame.item.kind == "picture" else f"{name} ({frame.number + 1})"


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
    """The file stems of the items, with numbers if several have one name."""

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self.stems = dict(zip(items, unique_stems([item.name for item in items]), strict=True))

    def of(self, frame: Frame) -> str:
        """Return the stem of a frame's files; for videos it ends with the frame number."""
        stem = self.stems[frame.item]
        return stem if frame.item.kind == "picture" else f"{stem}_{frame.number}"


Output = Callable[[Frame, Prediction], None]  # writes one frame


def requested_outputs(options: DetectOptions, folder: Path, names: FileNames, closing: ExitStack) -> list[Output]:
    """Return the outputs that the flags request; `closing` closes their files."""
    outputs: list[Output] = []
    if not options.nosave or options.view_img:
        drawn = DrawnFrames(folder, names, options)
        closing.callback(drawn.close)
        outputs.append(drawn)
    if options.save_txt:
        outputs.append(label_writer(folder / "labels", names, options))
    if options.save_csv:
        outputs.append(table_writer(folder / "predictions.csv", closing))
    if options.save_crop:
        outputs.append(crop_writer(folder / "crops", names))
    return outputs


class DrawnFrames:
    """Images and videos with the predictions drawn on them, in files and, if asked for, a window."""

    def __init__(self, folder: Path, names: FileNames, options: DetectOptions) -> None:
        self.folder, self.names = folder, names
        self.style = Style(options.line_thickness, not options.hide_labels, not options.hide_conf)
        self.writes_files, self.window, self.stride = not options.nosave, options.view_img, options.vid_stride
        self.item: MediaItem | None = None  # the video that is being written
        self.video: Any = None

    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        picture = prediction.draw(frame.image, self.style)
        if self.window:
            self._show(frame, picture)
        if self.writes_files and frame.item.kind == "picture":
            suffix = Path(frame.item.name.split("?")[0]).suffix.lower()
            suffix = suffix if suffix in (".png", ".bmp") else ".jpg"
            write_picture(self.folder / f"{self.names.of(frame)}{suffix}", picture)
        elif self.writes_files:
            if frame.item != self.item:
                self.close()
                path, size = self.folder / f"{self.names.stems[frame.item]}.mp4", picture.shape[1::-1]
                rate = frame.fps / self.stride
                self.video = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), rate, size)
                self.item = frame.item
            self.video.write(picture)

    def _show(self, frame: Frame, picture: np.ndarray) -> None:
        try:
            cv2.imshow(frame.item.name, picture)
            cv2.waitKey(0 if frame.item.kind == "picture" else 1)
        except cv2.error:
            show("warning: --view-img needs a display, and opencv-python in place of opencv-python-headless; not shown")
            self.window = False

    def close(self) -> None:
        """Close the last video."""
        if self.video is not None:
            self.video.release()


def label_writer(folder: Path, names: FileNames, options: DetectOptions) -> Output:
    """Return a function that writes a label file for an image with predictions."""
    folder.mkdir(parents=True, exist_ok=True)

    def write(frame: Frame, prediction: Prediction) -> None:
        if rows := prediction.label_rows(options.save_conf, options.save_format == 1):
            write_rows(folder / f"{names.of(frame)}.txt", rows)

    return write


def table_writer(path: Path, closing: ExitStack) -> Output:
    """Return a function that collects a row for each prediction; `closing` writes the file, if there were frames."""
    frames: list[list[tuple[str, str, str]]] = []  # the rows of each frame

    def collect(frame: Frame, prediction: Prediction) -> None:
        name = frame_name(frame) if frame.item.kind != "picture" else Path(frame_name(frame)).name
        frames.append([(name, label, f"{score:.4f}") for label, score in prediction.items])

    def write() -> None:
        if frames:
            text = csv_text(("Image Name", "Prediction", "Confidence"), [row for rows in frames for row in rows])
            with replacing(path) as file:
                file.write(text.encode(errors="surrogateescape"))

    closing.callback(write)
    return collect


def crop_writer(folder: Path, names: FileNames) -> Output:
    """Return a function that writes the part of the image that each prediction covers, in a folder for each class."""

    def write(frame: Frame, prediction: Prediction) -> None:
        for number, (label, crop) in enumerate(prediction.crops(frame.image), 1):
            safe = label.replace("/", "_").replace("\0", "_")
            safe = "_" if safe in ("", ".", "..") else safe
            suffix = "" if number == 1 else f"-{number}"
            write_picture(folder / safe / f"{names.of(frame)}{suffix}.jpg", crop)

    return write


if __name__ == "__main__":
    run_main(main)
