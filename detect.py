"""Detect objects in images, videos and streams: `python detect.py --weights best.pt --source photos`.

From Python:

    from detect import Predictor
    predictor = Predictor("best.pt")
    print(predictor("photo.jpg"))    # a Prediction; of a folder or a list of images, a list

or `detect.run(weights="best.pt", source="photos")`, which writes the files of the command.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from data.batches import Item
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
from utils.stage_times import (
    INFERENCE,
    POSTPROCESSING,
    PREPARING,
    StageTimer,
    format_times,
    milliseconds_per_image,
)


def detect(given: Mapping[str, Any]) -> dict[str, Any]:
    """Detect with flags by name; return what `run` does. Raises `UserError` if nothing could be read."""
    options = over_defaults(DetectOptions, given)
    items = dict.fromkeys(item for source in options.source or ("",) for item in find_media(source))
    media = Media(list(items), options.vid_stride)
    predictor = Predictor.from_flags(given)
    synchronise = torch.accelerator.synchronize if predictor.device.type != "cpu" else lambda: None
    timer, file_names = StageTimer(synchronise), FileNames(media.items)
    frames_done = warnings_shown = 0
    with run_folder(options) as folder, ExitStack() as opened:
        outputs = [opened.enter_context(output) for output in requested_outputs(options, folder, file_names)]
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
            warnings_shown = show_warnings(media.problems, warnings_shown)
        times = milliseconds_per_image(timer.batches)
    if not frames_done:
        raise UserError("; ".join(media.problems))
    show_warnings(media.problems, warnings_shown)
    results = f"; results in {folder}" if folder.is_dir() else ""
    show(*format_times(times), f"{plural(frames_done, 'image')}{results}")
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
    """Detect from Python: `detect.run(weights="best.pt", source="photos")`.

    Returns the run's `folder`, None if nothing was written, the number of `images`, and `problems`: a message for each
    source that could not be read completely. Raises `UserError` if the command would end with another error.

    Args:
        flags: flags of the command, by name with underscores
    """
    return call(detect, Path(__file__).stem, flags)  # the stem, because the names of scripts are not tasks


def batches(media: Media, predictor: Predictor, batch_size: int) -> Iterator[list[tuple[Frame, Item]]]:
    """Iterate over the frames of all media with their items, in batches, with a progress bar."""
    frames = ((frame, predictor.item(frame.image, without_secrets(frame.item.name))) for frame in media)
    live = any(item.kind == "live" for item in media.items)
    bar = Bar("detecting", media.count(), shown=True)
    return bar.over(groups(frames if live else prefetched(frames), batch_size), len)


def show_warnings(problems: Sequence[str], shown: int) -> int:
    """Print all problems except the first `shown` ones; return the number of all problems."""
    for problem in problems[shown:]:
        show(f"warning: {problem}")
    return len(problems)


def frame_name(frame: Frame) -> str:
    """Return the name of a frame for the console."""
    name = without_secrets(frame.item.name)
    if frame.item.kind == "picture":
        return name
    return f"{name} ({frame.number + 1}{f'/{frame.frames}' if frame.frames else ''})"


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
    """The file stems of the items; each item keeps its own name, with a number if an earlier item has the same name."""

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self.stems = dict(zip(items, unique_stems([item.name for item in items]), strict=True))

    def of(self, frame: Frame) -> str:
        """Return the stem of a frame's files; for videos it ends with the frame number."""
        stem = self.stems[frame.item]
        return stem if frame.item.kind == "picture" else f"{stem}_{frame.number}"


class Output(ABC):
    """A writer for every frame: a context manager over all frames, called with each."""

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
            write_rows(self.folder / f"{self.file_names.of(frame)}.txt", rows)


class PredictionTable(Output):
    """predictions.csv: a row for every prediction; there is no file if there was no frame."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[tuple[str, str, str]] = []
        self.frames = 0

    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        self.frames += 1
        name = frame_name(frame) if frame.item.kind != "picture" else Path(frame_name(frame)).name
        self.rows += [(name, label, f"{confidence:.4f}") for label, confidence in prediction.items]

    def __exit__(self, *_: object) -> None:
        if not self.frames:
            return
        with replacing(self.path) as file:
            file.write(csv_text(("Image Name", "Prediction", "Confidence"), self.rows).encode(errors="surrogateescape"))


class Crops(Output):
    """The part of the image that each prediction covers, in a folder for each class."""

    def __init__(self, folder: Path, file_names: FileNames) -> None:
        self.folder, self.file_names = folder, file_names

    def __call__(self, frame: Frame, prediction: Prediction) -> None:
        for number, (label, crop) in enumerate(prediction.crops(frame.image), 1):
            safe = label.replace("/", "_").replace("\0", "_")
            safe = "_" if safe in ("", ".", "..") else safe
            suffix = "" if number == 1 else f"-{number}"
            write_picture(self.folder / safe / f"{self.file_names.of(frame)}{suffix}.jpg", crop)


if __name__ == "__main__":
    run_main(main)
