"""Detect objects in images, videos and streams: `python detect.py --weights best.pt --source photos`.

From Python:

    from detect import Predictor
    predictor = Predictor("best.pt")
    print(predictor("photo.jpg"))    # a Prediction; of a folder or a list of images, a list

or `detect.run(weights="best.pt", source="photos")`, which writes the files of the command.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from hashlib import sha256
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml
from accelerate import PartialState
from filelock import FileLock

from data.dataset import Item
from data.labels import label_name
from data.media import Frame, Media, MediaItem, find_media, prefetch
from models.tasks.contract import Prediction
from predictor import FrameTracker, Predictor
from utils.batch import CocoImage
from utils.config.flags import DetectOptions
from utils.config.parser import given_flags
from utils.config.resume import PROGRESS, resumed_detection
from utils.console import Bar, log
from utils.distributed.failure import run_main
from utils.distributed.launch import connect, spawn
from utils.distributed.ranks import Collectives, broadcast_from_main, world_size
from utils.errors import Stopped, UserError, plural, public
from utils.files import LOCK_FILE, SETTINGS_FILE, csv_text, lock_folder, numbered_folder, unique_stems, write_text
from utils.plots.drawing import Style, display_pixels, write_picture
from utils.python_api import call
from utils.summary import RESULT, StageTimer, log_times

Pair = tuple[Frame, list[Item]]  # a picture or frame, and its items for the model: itself, or windows of it


def detect(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Detect as one of the processes; return what `run` does. Raises `UserError` if nothing could be read."""
    options, device = DetectOptions(**flags), {}
    if world_size() > 1:
        is_cpu = connect(options.device, 1e6) == "cpu"  # seconds by which one may work longer than another
        device = {"device": "cpu" if is_cpu else str(PartialState().device)}
    items = broadcast_from_main(lambda: find_items(options))
    kinds = {item.kind for item in items}
    predictor = Predictor(flags={**flags, **device})
    wait = partial(torch.accelerator.synchronize, predictor.device)
    timer = StageTimer(wait if predictor.device.type != "cpu" else lambda: None)
    tracking = FrameTracker(options.track, options.vid_stride, options.quiet)
    with closing(Output(items, flags, predictor)) as output, closing(tracking):
        pending = [output.blocks[number] for number in reversed(output.pending)]
        pairs = ((frame, predictor.items(frame.image, public(frame.item.name))) for media in pending for frame in media)
        grouped = groups(pairs if "live" in kinds else prefetch(pairs), options.batch_size, output.block_of)
        bar = Bar("detecting", len(items) if kinds == {"picture"} else 0, log.is_main, output.done_images)
        for group in bar.iterate(grouped, lambda group: len(group) * world_size()):
            output.finish_before(output.block_of(group[0][0]))
            batch = predictor.data.collate([item for _, items in group for item in items])
            if not timer.batches:
                predictor.predict_batch(batch, timer)  # a warm-up, which the timer does not count
            started_at = time.perf_counter()
            predictions = predictor.predict_batch(batch, timer)
            milliseconds = 1000 * (time.perf_counter() - started_at) / len(group)
            for (frame, _), prediction in zip(group, predictions, strict=True):
                output.write(frame, tracking.update(frame, prediction))
                if not options.quiet and world_size() == 1:  # of several processes only one prints
                    log(f"{frame.title}: {prediction.describe()}, {milliseconds:.1f} ms")
        output.finish_before(len(output.blocks))
        result = broadcast_from_main(partial(output.complete, Collectives().gather([output.journal])))
    folder, problems = result["folder"], result["problems"]
    log(*(f"warning: {problem}" for problem in problems))
    log_times([(timer.images, timer.seconds)], always=not options.quiet)
    ending = f"; {plural(len(problems), 'problem')}, see the warnings" if problems else ""
    log(f"{plural(result['images'], 'image')}{f'; results in {folder}' if folder else ''}{ending}")
    return result


def find_items(options: DetectOptions) -> list[MediaItem]:
    """Return the pictures, videos and streams of --source, each once. Raises `UserError`."""
    if not any(options.source):
        raise UserError("--source is missing; name a picture, a video, a folder, an address or a camera's number")
    items = list(dict.fromkeys(item for source in options.source for item in find_media(source)))
    sequential = [item.name for item in items if item.kind != "picture"] or ["--track"] * bool(options.track)
    if world_size() > 1 and (in_order := sequential or ["--view-img"] * options.view_img):
        raise UserError(f"{in_order[0]}: only on one process; leave it out")
    if options.save_json and sequential:
        raise UserError(f"{sequential[0]}: only without --save-json; leave it out")
    return items


def groups(frames: Iterable[Pair], size: int, block_of: Callable[[Frame], int] = lambda _: 0) -> Iterator[list[Pair]]:
    """Iterate over groups of at most `size` successive frames of a block, whose items have one shape."""
    for _, same_shape in groupby(frames, key=lambda pair: (block_of(pair[0]), pair[1][0][0].shape)):
        while group := list(islice(same_shape, size)):  # a full one at once: a camera's next frame comes later
            yield group


class Output:
    """The run folder with the files that the flags request, and the window of --view-img."""

    def __init__(self, items: Sequence[MediaItem], flags: Mapping[str, Any], predictor: Predictor) -> None:
        options = self.options = DetectOptions(**flags)
        self.names, self.window = predictor.names, options.view_img
        self.numbers = {item: number for number, item in enumerate(items)}
        self.stems = dict(zip(items, unique_stems(public(item.name) for item in items), strict=True))
        self.taken_stems = {*self.stems.values()}
        # A result's last bits depend on its batch, so none has images of two blocks, and blocks are dealt out whole.
        is_sequence = bool(options.track) or any(item.kind != "picture" for item in items)
        self.block_size = len(items) if is_sequence else options.batch_size
        self.block_of: Callable[[Frame], int] = lambda frame: self.numbers[frame.item] // self.block_size
        starts, reading = range(0, len(items), self.block_size), (options.vid_stride, predictor.pixels)
        self.blocks = [Media([*items[start : start + self.block_size]], *reading) for start in starts]
        has_boxes = "save_json" not in (predictor.task.prediction or Prediction).refused()
        self.lists_images = has_boxes and not options.track and (options.save_txt or options.save_json)
        self.lock: FileLock | None = None  # of the main process
        self.folder, finished = broadcast_from_main(lambda: self._open(flags))
        self.pending = Collectives().shard([k for k in range(len(self.blocks)) if k not in finished])[::-1]
        self.done_images = min(len(finished) * self.block_size, len(items))
        self.journal = self.folder / PROGRESS / f"{os.getpid()}-{time.time_ns()}.jsonl"
        self.style = Style(options.line_thickness, not options.hide_labels, not options.hide_conf)
        self.failed: dict[MediaItem | None, str] = {}  # the first problem of writing for each source of a block
        self.item: MediaItem | None = None  # the video that is being written
        self.video, self.video_file = cv2.VideoWriter(), Path()  # closed
        # The block's frames: number of the item, height and width, rows of predictions.csv, boxes and masks for COCO.
        self.frames: list[tuple[int, Any, list[Any], list[Any], list[Any]]] = []
        self.unlisted_frames = 0  # of videos and streams

    def _open(self, flags: Mapping[str, Any]) -> tuple[Path, set[int]]:
        """Create the run folder, or open that of --resume, and lock it; return its path and the finished blocks."""
        options, names = self.options, [item.name for item in self.stems]
        digest = sha256(json.dumps(names).encode()).hexdigest()
        if self.lists_images:
            from utils.coco import annotated_ids, default_ids  # most runs do not need it

            paths, file = [*map(Path, map(os.path.abspath, names))], options.annotations
            by_stem = [Path(f"{stem}.jpg") for stem in self.stems.values()]
            self.ids = annotated_ids(Path(file), self.names, paths) if file else default_ids(self.names, by_stem)
            if missing := self.ids.images.count(None):
                log(f"warning: {file} lacks {missing} of the images; predictions.json and images.json exclude them")
        self.is_new = not (options.exist_ok and (options.resume or os.path.exists(Path(options.project, options.name))))
        inputs = chain(options.source, names, map(label_name, names))
        folder = Path(options.resume or numbered_folder(Path(options.project), options.name, options.exist_ok, inputs))
        self.lock, start = lock_folder(folder), folder / PROGRESS / SETTINGS_FILE
        if not options.resume:
            shutil.rmtree(start.parent, ignore_errors=True)  # of an unfinished run
            write_text(start, public(yaml.safe_dump({**flags, "items": digest}), sys.maxsize))
        elif not start.is_file() or digest not in start.read_text():
            raise UserError(f"{folder} is finished now, or --source has other files than at its start; start a new run")
        for part in folder.rglob(".*-????????.part"):  # was being written by a process that was killed
            part.unlink()
        if not (folder / SETTINGS_FILE).exists():  # by which a data set and --exist-ok know a run folder
            settings = yaml.safe_dump(vars(options), sort_keys=False)
            write_text(folder / SETTINGS_FILE, public(settings, sys.maxsize))
        self.records = read_journals(start.parent.glob("*.jsonl"))
        return folder, {*self.records}

    def write(self, frame: Frame, prediction: Prediction) -> None:
        """Write and show the predictions of a frame; files of a video's frame end with its number, from 1."""
        options, is_picture = self.options, frame.item.kind == "picture"
        stem = self.stems[frame.item] if is_picture else f"{self.stems[frame.item]}_{frame.number + 1}"
        frame = frame._replace(image=display_pixels(frame.image))
        if not options.nosave or self.window:
            self._draw(frame, prediction.draw(frame.image, self.style))
        if options.save_txt:
            text = "".join(f"{row}\n" for row in prediction.label_rows(options.save_conf, options.save_format == 1))
            self._write(frame.item, write_text, self.folder / "labels" / f"{stem}.txt", text)
        name = Path(public(frame.title)).name if is_picture else public(frame.title)
        tracks = [] if prediction.ids is None else [prediction.ids.tolist()]
        objects = zip(prediction.items, *tracks, strict=True) if options.save_csv else ()
        cells = [(name, label, f"{score:.4f}", *track) for (label, score), *track in objects]
        found = prediction.coco_rows() if options.save_json else CocoImage(0, "", np.zeros(0))
        if is_picture or options.save_csv:
            size, rows = frame.image.shape[:2], found.rows.tolist()
            self.frames.append((self.numbers[frame.item], size, cells, rows, [*found.masks]))
        else:
            self.unlisted_frames += 1  # a stream may have any number
        for number, (label, crop) in enumerate(prediction.crops(frame.image) if options.save_crop else (), 1):
            safe = label.replace("/", "_").replace("\0", "_")
            safe = "_" if safe in ("", ".", "..") else safe
            suffix = "" if number == 1 else f"-{number}"
            suffix += "_" * (f"{stem}{suffix}" in self.taken_stems and number > 1)  # as of a second photo.jpg
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

    def finish_before(self, end: int) -> None:
        """Add a line for each of this process's blocks before number `end` to its journal. Raises `UserError`."""
        while self.pending and self.pending[-1] < end:
            self._end_video()
            number, failed = self.pending.pop(), {self.numbers[item] for item in self.failed if item}
            problems = [*self.blocks[number].problems, *dict.fromkeys(self.failed.values())]
            frames = [(k, [] if k in failed else size, *rest) for k, size, *rest in self.frames]  # [] for no data set
            self.frames, self.failed, self.item = [], {}, None
            write_text(self.journal, f"\n{json.dumps([number, frames, problems])}", append=True)  # after a cut line

    def complete(self, journals: Sequence[Path]) -> dict[str, Any]:
        """Write the tables from all journals and close the folder; return what `run` does. Raises `UserError`."""
        self.records |= read_journals(journals)
        if missing := len(self.blocks) - len(self.records):
            raise UserError(f"{self.folder} lacks {plural(missing, 'batch')}: its machines do not share --project")
        images, problems = self._write_tables()
        shutil.rmtree(self.folder / PROGRESS, ignore_errors=True)
        self.close()
        if not images:
            raise UserError("; ".join(problems))
        return {"folder": str(self.folder) if self.folder.is_dir() else None, "images": images, "problems": problems}

    def _write_tables(self) -> tuple[int, list[str]]:
        """Write predictions.csv, predictions.json and images.json; return the number of images, and all problems."""
        options, records, files = self.options, [self.records[number] for number in sorted(self.records)], {}
        frames = [frame for frames, _ in records for frame in frames] + self.frames
        if options.save_csv and frames:
            listed = chain.from_iterable(frame[2] for frame in frames)
            columns = ("Image Name", "Prediction", "Confidence", *["Track"] * bool(options.track))
            files["predictions.csv"] = csv_text(columns, listed)
        if self.lists_images and frames:
            from utils.coco import results

            found = [CocoImage(number, "", np.array(boxes), masks) for number, _, _, boxes, masks in frames if boxes]
            files |= {"predictions.json": json.dumps(results(found, self.ids))} if options.save_json else {}
            items, ids = [*self.stems], self.ids
            classes = [{"id": k, "name": name} for k, name in zip(ids.categories, self.names.values(), strict=True)]
            images = [
                {"id": ids.images[k], "file_name": os.path.abspath(items[k].name), "height": size[0], "width": size[1]}
                | {"label_file": f"labels/{self.stems[items[k]]}.txt"}
                for k, size, *_ in frames
                if size and ids.images[k] is not None and items[k].kind == "picture" and os.path.isfile(items[k].name)
            ]
            files["images.json"] = json.dumps({"categories": classes, "images": images, "annotations": []}, indent=1)
        for name, text in files.items():
            self._write(None, write_text, self.folder / name, text)
        problems = [*chain.from_iterable(problems for _, problems in records), *dict.fromkeys(self.failed.values())]
        return len(frames) + self.unlisted_frames, problems

    def close(self) -> None:
        """End the last video; the main process writes the tables of an unfinished run, and unlocks the folder."""
        self._end_video()
        if self.lock is None:
            return
        if (progress := self.folder / PROGRESS).is_dir():
            self.records |= read_journals(progress.glob("*.jsonl"))
            self._write_tables()
        if any(item.kind == "live" for item in self.stems):
            shutil.rmtree(progress, ignore_errors=True)
        self.lock.release()
        self.lock = None
        files = (path.name for path in self.folder.rglob("*") if path.is_file())
        if self.is_new and {LOCK_FILE, SETTINGS_FILE}.issuperset(files):
            shutil.rmtree(self.folder, ignore_errors=True)


def read_journals(files: Iterable[Path]) -> dict[int, tuple[list[Any], list[str]]]:
    """Return the frames and problems of finished blocks by number, without a line that a kill has cut."""
    records = {}
    for line in chain.from_iterable(file.read_text().split("\n") for file in files if file.is_file()):
        with suppress(ValueError):
            number, *records[number] = json.loads(line)
    return records


def detect_in_process(flags: Mapping[str, Any]) -> None:
    """Detect as one of the processes; return the result to a call from Python, or exit with 1 for problems."""
    result = detect(flags)
    if file := os.environ.get(RESULT):
        Path(file).write_text(json.dumps(result))
    elif result["problems"]:
        raise Stopped(1)


def main(argv: Sequence[str] | None = None) -> None:
    """Detect from the command line, on as many processes as it says."""
    flags = resumed_detection(given_flags(DetectOptions, sys.argv[1:] if argv is None else argv))
    if not spawn(partial(detect_in_process, flags), flags.get("processes", 0), flags.get("device", "")):
        detect_in_process(flags)


def run(**flags: Any) -> dict[str, Any]:
    """Detect from Python, with flags of the command: `detect.run(weights="best.pt", source="photos")`.

    Returns the run's `folder`, None if nothing was written, the number of `images`, and `problems`: a message for each
    source that could not be read completely. Raises `UserError` if the command would end with another error.
    """
    return call(main, flags)


if __name__ == "__main__":
    run_main(main)
