"""Detect objects in images, videos and streams: `python detect.py --weights best.pt --source photos`.

From Python:

    from detect import Predictor
    predictor = Predictor("best.pt")
    print(predictor("photo.jpg"))    # a Prediction; of a folder or a list of images, a list

or `detect.run(weights="best.pt", source="photos")`, which writes the files of the command.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml

from data.dataset import Item
from data.labels import label_name
from data.media import Frame, Media, MediaItem, find_media, prefetch
from models.tasks.contract import Prediction
from predictor import Predictor
from utils.config.flags import DetectOptions
from utils.config.parser import given_flags
from utils.console import Bar, log
from utils.distributed.failure import run_main
from utils.errors import Stopped, UserError, plural, public
from utils.files import LOCK_FILE, SETTINGS_FILE, csv_text, lock_folder, numbered_folder, unique_stems, write_text
from utils.plots.drawing import Style, write_picture
from utils.python_api import call
from utils.summary import StageTimer, log_times


def detect(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Detect with flags by name; return what `run` does. Raises `UserError` if nothing could be read."""
    options = DetectOptions(**flags)
    if not any(options.source):
        raise UserError("--source is missing; name a picture, a video, a folder, an address or a camera's number")
    items = dict.fromkeys(item for source in options.source for item in find_media(source))
    media = Media(list(items), options.vid_stride)
    predictor = Predictor(flags=flags)
    frames = ((frame, predictor.items(frame.image, public(frame.item.name))) for frame in media)
    kinds = {item.kind for item in media.items}
    grouped = groups(frames if "live" in kinds else prefetch(frames), options.batch_size)
    bar = Bar("detecting", len(media.items) if kinds == {"picture"} else 0, visible=True)
    wait = partial(torch.accelerator.synchronize, predictor.device)
    timer = StageTimer(wait if predictor.device.type != "cpu" else lambda: None)
    frames_done = 0
    with closing(Output(media, options)) as output:
        for group in bar.iterate(grouped, len):
            batch = predictor.data.collate([item for _, items in group for item in items])
            if not timer.batches:
                predictor.predict_batch(batch, timer)  # a warm-up, which the timer does not count
            started_at = time.perf_counter()
            predictions = predictor.predict_batch(batch, timer)
            milliseconds = 1000 * (time.perf_counter() - started_at) / len(group)
            for (frame, _), prediction in zip(group, predictions, strict=True):
                output.write(frame, prediction)
                if not options.quiet:
                    log(f"{frame.title}: {prediction.describe()}, {milliseconds:.1f} ms")
            frames_done += len(group)
    if not frames_done:
        raise UserError("; ".join(media.problems))
    log(*(f"warning: {problem}" for problem in media.problems))
    log_times([(timer.images, timer.seconds)], always=not options.quiet)
    folder = str(output.folder) if output.folder.is_dir() else None
    problems = f"; {plural(len(media.problems), 'problem')}, see the warnings" if media.problems else ""
    log(f"{plural(frames_done, 'image')}{f'; results in {folder}' if folder else ''}{problems}")
    return {"folder": folder, "images": frames_done, "problems": media.problems}


def groups(frames: Iterable[tuple[Frame, list[Item]]], max_frames: int) -> Iterator[list[tuple[Frame, list[Item]]]]:
    """Iterate over groups of at most `most` successive frames whose items have one shape."""
    for _, same_shape in groupby(frames, key=lambda pair: pair[1][0][0].shape):
        while group := list(islice(same_shape, max_frames)):  # a full one at once: a camera's next frame comes later
            yield group


class Output:
    """The run folder with the files that the flags request, and the window of --view-img."""

    def __init__(self, media: Media, options: DetectOptions) -> None:
        self.options, self.window, self.problems = options, options.view_img, media.problems
        names = [item.name for item in media.items]
        self.is_new = not (options.exist_ok and os.path.exists(Path(options.project, options.name)))
        inputs = chain(options.source, names, map(label_name, names))
        self.folder = numbered_folder(Path(options.project), options.name, options.exist_ok, inputs)
        self.lock = lock_folder(self.folder)
        if not (self.folder / SETTINGS_FILE).exists():  # by which a data set and --exist-ok know a run folder
            settings = yaml.safe_dump(vars(options), sort_keys=False)
            write_text(self.folder / SETTINGS_FILE, public(settings, sys.maxsize))
        self.stems = dict(zip(media.items, unique_stems(map(public, names)), strict=True))
        self.style = Style(options.line_thickness, not options.hide_labels, not options.hide_conf)
        self.failed: dict[MediaItem | None, str] = {}  # the first problem of writing for each source
        self.item: MediaItem | None = None  # the video that is being written
        self.video, self.video_file = cv2.VideoWriter(), Path()  # closed
        self.rows: list[tuple[str, str, str]] | None = None  # of predictions.csv; None before the first frame

    def write(self, frame: Frame, prediction: Prediction) -> None:
        """Write and show the predictions of a frame; files of a video's frame end with its number, from 1."""
        options, is_picture = self.options, frame.item.kind == "picture"
        stem = self.stems[frame.item] if is_picture else f"{self.stems[frame.item]}_{frame.number + 1}"
        if not options.nosave or self.window:
            self._draw(frame, prediction.draw(frame.image, self.style))
        if options.save_txt and (rows := prediction.label_rows(options.save_conf, options.save_format == 1)):
            text = "".join(f"{row}\n" for row in rows)
            self._write(frame.item, write_text, self.folder / "labels" / f"{stem}.txt", text)
        if options.save_csv:
            name = Path(public(frame.title)).name if is_picture else public(frame.title)
            self.rows = self.rows or []
            self.rows += [(name, label, f"{score:.4f}") for label, score in prediction.items]
        for number, (label, crop) in enumerate(prediction.crops(frame.image) if options.save_crop else (), 1):
            safe = label.replace("/", "_").replace("\0", "_")
            safe = "_" if safe in ("", ".", "..") else safe
            suffix = "" if number == 1 else f"-{number}"
            self._write(frame.item, write_picture, self.folder / "crops" / safe / f"{stem}{suffix}.jpg", crop)

    def _write(self, item: MediaItem | None, write: Callable[..., object], *arguments: Any) -> None:
        """Call `write`; its error is a problem, at most one for each source. Raises `UserError` for a full disk."""
        try:
            write(*arguments)
        except UserError as error:
            if getattr(error.__context__, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
                raise
            self.failed.setdefault(item, str(error))

    def _draw(self, frame: Frame, picture: np.ndarray) -> None:
        """Show a picture with its predictions, and write it into a file or a video."""
        is_picture, stem = frame.item.kind == "picture", self.stems[frame.item]
        if self.window:
            try:
                cv2.imshow(public(frame.item.name), picture)
                cv2.waitKey(0 if is_picture else 1)
            except cv2.error:
                log("warning: --view-img needs a display, and opencv-python without -headless; nothing is shown")
                self.window = False
        if self.options.nosave:
            return
        if is_picture:
            suffix = Path(frame.item.name.split("?")[0]).suffix.lower()
            path = self.folder / f"{stem}{suffix if suffix in ('.png', '.bmp') else '.jpg'}"
            self._write(frame.item, write_picture, path, picture)
            return
        if frame.item != self.item:
            self._end_video()
            self.item, self.video_file = frame.item, self.folder / f"{stem}.mp4"
            self._write(self.item, write_text, self.video_file, "")  # OpenCV writes through links, and gives no reasons
            code, rate = cv2.VideoWriter.fourcc(*"mp4v"), frame.fps / self.options.vid_stride
            self.video = cv2.VideoWriter(str(self.video_file), code, rate, picture.shape[1::-1])
        self.video.write(picture)

    def _end_video(self) -> None:
        self.video.release()
        if self.item and not cv2.VideoCapture(str(self.video_file)).isOpened():  # its index is written last
            self.failed.setdefault(self.item, f"{self.video_file} cannot be written; check the disk and OpenCV's mp4v")

    def close(self) -> None:
        """Close the last video, and write predictions.csv if there were frames; remove a new folder without files."""
        self._end_video()
        if self.rows is not None:
            text = csv_text(("Image Name", "Prediction", "Confidence"), self.rows)
            self._write(None, write_text, self.folder / "predictions.csv", text)
        self.problems += dict.fromkeys(self.failed.values())
        self.lock.release()
        files = (path.name for path in self.folder.rglob("*") if path.is_file())
        if self.is_new and {LOCK_FILE, SETTINGS_FILE}.issuperset(files):
            shutil.rmtree(self.folder, ignore_errors=True)


def main() -> None:
    """Detect from the command line."""
    if detect(given_flags(DetectOptions, sys.argv[1:]))["problems"]:
        raise Stopped(1)


def run(**flags: Any) -> dict[str, Any]:
    """Detect from Python, with flags of the command: `detect.run(weights="best.pt", source="photos")`.

    Returns the run's `folder`, None if nothing was written, the number of `images`, and `problems`: a message for each
    source that could not be read completely. Raises `UserError` if the command would end with another error.
    """
    return call(lambda words: detect(given_flags(DetectOptions, words)), flags)


if __name__ == "__main__":
    run_main(main)
