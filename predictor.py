"""`Predictor`: a model for images from Python. Used by detect.py and hubconf.py; `from detect import Predictor`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.dataset import DataSet, Item, data_source
from data.media import Frame, MediaItem, as_pixels, find_files, read_files
from data.tiles import Tiles, in_file
from models.ensemble import Inference, for_inference, join_windows, read_members
from models.loading import ImageSize, format_sides, image_sides, log_rounding
from models.tasks.contract import Prediction, Thresholds
from models.tasks.predictions import tracking_class
from models.tasks.results import Results
from utils.batch import Batch
from utils.config.flags import OBJECT_TRACKERS, DetectOptions, flags_of, select
from utils.config.parser import given_flags
from utils.console import log
from utils.distributed.launch import devices_named
from utils.errors import UserError, nearest, plural, public
from utils.files import format_paths
from utils.plots.drawing import display_pixels
from utils.python_api import command_words
from utils.summary import POSTPROCESSING, StageTimer
from utils.user_code import class_named

# The flags of detect.py that are arguments of `Predictor`; `SETTINGS` can be changed later.
THRESHOLDS = ("conf_thres", "iou_thres", "max_det", "classes", "agnostic_nms", "retina_masks")
SETTINGS = (*THRESHOLDS, "imgsz", "tile")
ARGUMENTS = (*SETTINGS, "weights", "augment", "half", "device", "data", "layers", "task_file", "quiet")
ALIASES = {alias.replace("-", "_"): flag.name for flag in flags_of(DetectOptions) for alias in flag.metadata["aliases"]}
ALIASES["agnostic"] = "agnostic_nms"  # YOLOv5's attribute
# What to do in place of methods and attributes of YOLOv5's models from torch.hub.
INSTEAD = dict.fromkeys(("to", "cuda", "cpu"), "; give device= when you load the model")
INSTEAD |= {"half": "; give half=True when you load the model", "model": "; its PyTorch modules are in `models`"}
MIN_WINDOWS_AT_ONCE = 8  # windows that the models run on at a time, or the batch size if it is larger
NO_PIXELS = np.zeros((0, 0, 3), np.uint8)


class Predictor:
    """A model, or an ensemble of several, for images of any size.

    The arguments are flags of detect.py (`ARGUMENTS`), with their defaults: `weights` is one name or several, for an
    ensemble, `imgsz` one number or (height, width). `bgr` is whether arrays and tensors are BGR, as OpenCV reads them.
    `bgr`, `as_list` and `SETTINGS` are attributes that can be set. `flags` are all flags of detect.py, checked, in
    place of other arguments; then it prints where the files are. Prints how the image size was chosen. Raises
    `UserError`.
    """

    bgr: bool = False
    as_list: bool = False  # whether the result for one image is a list too, as in YOLOv5

    def __init__(
        self,
        weights: str | Path | Sequence[str | Path] = "yolov5s.pt",
        *,
        bgr: bool = False,
        flags: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        given = flags or given_flags(DetectOptions, command_words({**arguments, "weights": weights}), ARGUMENTS)
        options = DetectOptions(**given)
        self.device = devices_named("0" if options.device == "cuda" else options.device)[0]
        half = options.half and self.device.type == "cuda"
        with ExitStack() as closing:
            closing.callback(setattr, log, "quiet", log.quiet)
            log.quiet = log.quiet or options.quiet
            members = read_members(options.weights, options.layers, options.task_file, options.augment)
            source = data_source(options.data, members.entry.data) if options.data else None
            if flags:
                log(format_paths({"weights": members.files.values(), "data": [source.spec.file] if source else []}))
            task_class = members.entry.load()
            members.refuse_flags(options, given)
            names = source.names() if source else members.first.class_names
            self.task = task_class(names, task_class.recipe())
            self.data: type[DataSet[Any]] = class_named(members.entry.data)
            size = members.image_size(options.imgsz)
            self.pixels = members.pixel_format()
            models = members.build(self.task, max(size.sides), options.data or "the names")
            self.models = [for_inference(model, self.device, half, fold=True) for model in models]
            self.stride = math.lcm(*(model.stride for model in models))
            log_rounding(size.sides, size.rounded(self.stride).sides, self.stride)
            members.log_notes(options.half, half)
        self.half, self.bgr, self.numbers = half, bgr, count()  # of images that are cut into windows
        self.batch_size = max(options.batch_size, MIN_WINDOWS_AT_ONCE)
        self.size = size.rounded(self.stride)
        self._apply(options)  # the last: from here on `__setattr__` checks

    def _apply(self, options: DetectOptions) -> None:
        """Make the thresholds, and what depends on them, from flags of detect.py. Raises `UserError`."""
        classes = class_numbers(options.classes, self.task.names)
        thresholds = select(Thresholds, options, classes=classes, one_class=True)
        postprocess = self.task.postprocess(self.models[0], thresholds)
        inference = Inference(self.task, postprocess, self.device, options.augment, self.half)
        vars(self).update(thresholds=thresholds, inference=inference, tile=options.tile, options=options)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set `bgr`, `as_list` or one of `SETTINGS` (None: its default; imgsz: the present one). Raises `UserError`."""
        if name in ("bgr", "as_list") or "options" not in vars(self):
            vars(self)[name] = value
            return
        name = ALIASES.get(name, name)
        unchanged = {"multi_label": False, "amp": False, "verbose": False, "augment": self.options.augment}  # habits
        if name in unchanged and value == unchanged[name]:
            return
        if name in ARGUMENTS and name not in SETTINGS:
            raise UserError(f"{name} cannot be changed; load the model with {name}={value!r}")
        flags = given_flags(DetectOptions, command_words({name: value}), SETTINGS)
        value = flags.get(name, getattr(DetectOptions(), name))
        if name == "imgsz":
            sides = image_sides(value) or self.size.sides
            size = ImageSize((sides[0], sides[-1])).rounded(self.stride)
            if self.size.is_fixed and size.sides != self.size.sides:
                fixed = format_sides(self.size.sides)
                raise UserError(f"imgsz={value}: the model was exported only for --imgsz {fixed}")
            vars(self)["size"] = self.size._replace(sides=size.sides)
            return
        refused = self.task.prediction.refused() if self.task.prediction else {}
        if value and name in refused:  # `tile`
            raise UserError(refused[name])
        self._apply(replace(self.options, **{name: value}))

    def __getattr__(self, name: str) -> Any:
        name = ALIASES.get(name, name)
        if name in THRESHOLDS:
            return getattr(self.thresholds, name)
        if name == "imgsz":
            return self.size.sides
        raise AttributeError(f"Predictor has no attribute {name}{INSTEAD.get(name, '')}")

    @property
    def names(self) -> dict[int, str]:
        """Class names by class number."""
        return dict(self.task.names)

    def __call__(self, source: Any = None, size: int | Sequence[int] | None = None, **settings: Any) -> Any:
        """Return the `Prediction` for an image, or `Results`, a list of predictions, for several or if `as_list`.

        An image is a path or address, a PIL image, an array (h, w, 3) or (h, w) of uint8, or a tensor (3, h, w) of
        uint8, or of floats in 0 to 1. Several images are a list, a folder, a glob, a `.txt` list, a video (a prediction
        for each frame) or a tensor (b, 3, h, w). Boxes are in pixels of the image. Raises `UserError`.

        For this call only, `size` is the image size, and `settings` are `SETTINGS`, `bgr` and `as_list`. `ims` and
        `imgs` are other names of `source`.
        """
        source = settings.pop("ims", settings.pop("imgs", source))
        if size is not None or settings:
            predictor = copy(self)
            for name, value in {"imgsz": size, **settings}.items():
                if value is not None:
                    setattr(predictor, name, value)
            return predictor(source)
        if isinstance(source, (list, tuple)) or (isinstance(source, Tensor) and source.ndim == 4):
            results = [self(image) for image in source]
            lists = (result if isinstance(result, list) else [result] for result in results)
            return Results(chain.from_iterable(lists))
        if isinstance(source, str | Path):
            items = find_files(str(source))
            single = items == [MediaItem("picture", str(source))]
            predictions = Results()
            for frame in read_files(items, self.pixels):
                read = frame._replace(image=NO_PIXELS).read
                predictions.append(self._predict_image(frame.title, frame.image, read))
        else:
            pixels, name = as_pixels(source, self.bgr, self.pixels), str(getattr(source, "filename", "") or "image")
            single, predictions = True, Results([self._predict_image(name, pixels, lambda: pixels)])
        return predictions[0] if single and not self.as_list else predictions

    predict = __call__  # the name in ultralytics

    def track(self, frames: Any, tracker: str = "bytetrack") -> Iterator[Prediction]:
        """Yield the prediction for each frame, with the tracks of its objects as `ids`. Raises `UserError`.

        `frames` is a path, as of a video, or an iterable of images in memory; `tracker` is a value of --track.
        """
        tracking = FrameTracker(**given_flags(DetectOptions, command_words({"track": tracker}), ("track",)))
        if isinstance(frames, str | Path):
            source = read_files(find_files(str(frames)))
        else:
            source = (Frame(MediaItem("picture", "image"), as_pixels(image, self.bgr, self.pixels)) for image in frames)
        for frame in source:
            yield tracking.update(frame, self._predict_image(frame.title, frame.image, frame.image.copy))

    def eval(self) -> Predictor:
        """Return the predictor, whose models are always in evaluation mode."""
        return self

    def _predict_image(self, name: str, pixels: np.ndarray, read: Callable[[], np.ndarray]) -> Prediction:
        """Return the prediction for pixels, as `read_pixels` returns them, which `read` returns again."""
        (prediction,) = self.predict_batch(self.data.collate(self.items(pixels, name)))
        return replace(prediction, pixels=lambda: display_pixels(read()))

    def items(self, image: np.ndarray, name: str) -> list[Item]:
        """Return an image, as `read_pixels` does, as an item of a batch, or as one for each window, of one shape."""
        height, width = image.shape[:2]
        bounds = Tiles(self.tile or max(width, height)).bounds(width, height, with_whole=True).tolist()
        form = self.size.sides, self.stride, self.size.is_fixed or len(bounds) > 1
        items = [self.data.item(image[top:bottom, left:right], name, *form) for left, top, right, bottom in bounds]
        if not self.tile:
            return items
        places, number = zip(items, bounds, strict=True), next(self.numbers)
        return [(*item[:2], in_file(item[2], number, (width, height), window)) for item, window in places]

    @torch.inference_mode()
    def predict_batch(self, batch: Batch, timer: StageTimer | None = None) -> Sequence[Prediction]:
        """Return the prediction for each image of a batch."""
        timer = timer or StageTimer()
        predictions: list[Prediction] = []
        for part in batch.parts(self.batch_size):
            part, views = self.inference.views(self.models, part, timer)
            predictions += self.inference.postprocess(views, part)
            timer.end_stage(POSTPROCESSING)
        return join_windows(predictions, batch, self.thresholds)[0]


class FrameTracker:
    """The tracker that --track names, or none: new for each video, and for successive pictures of each folder."""

    def __init__(self, track: str, vid_stride: int = 1, quiet: bool = True) -> None:
        self.new_tracker = tracking_class(f"trackers:{OBJECT_TRACKERS[track]}Tracker") if track else None
        self.stride, self.quiet, self.sequence, self.num_frames, self.num_tracks = vid_stride, quiet, "", 0, 0

    def update(self, frame: Frame, prediction: Prediction) -> Prediction:
        """Return the prediction for the next frame with `ids`, which count from 0 in each sequence."""
        if not self.new_tracker:
            return prediction
        sequence = str(Path(frame.item.name).parent) if frame.item.kind == "picture" else frame.item.name
        if sequence != self.sequence:
            self.close()
            rate = {"frame_rate": frame.fps / self.stride} if frame.fps else {}  # lost tracks are kept for some seconds
            self.tracker, self.sequence, self.num_frames, self.num_tracks = self.new_tracker(**rate), sequence, 0, 0
        detections, ids = prediction.to_supervision(with_masks=False), np.full(len(prediction), -1)
        detections["row"] = np.arange(len(ids))  # trackers reorder the detections
        image = frame.image if getattr(self.tracker, "enable_cmc", False) else None  # other trackers warn of an image
        if len(tracked := self.tracker.update(detections, image)):
            ids[tracked["row"]] = tracked.tracker_id
        self.num_frames, self.num_tracks = self.num_frames + 1, max(self.num_tracks, int(ids.max(initial=-1)) + 1)
        return replace(prediction, ids=ids)

    def close(self) -> None:
        """Log how many tracks the sequence has had."""
        if self.num_frames and not self.quiet:
            log(f"{public(self.sequence)}: {plural(self.num_tracks, 'track')} in {plural(self.num_frames, 'frame')}")


def class_numbers(classes: Sequence[str | int], names: Mapping[int, str]) -> tuple[int, ...]:
    """Return the numbers of classes that are given by name or number. Raises `UserError` for an unknown class."""
    numbers: list[int] = []
    for word in map(str, classes):
        matches = [int(word)] if word.isdecimal() else [class_id for class_id, name in names.items() if name == word]
        if not matches or matches[0] not in names:
            hint = nearest(word, names.values())
            raise UserError(f"--classes {word}: the model has classes 0 to {len(names) - 1}{hint}; name one of them")
        numbers += matches
    return tuple(numbers)
