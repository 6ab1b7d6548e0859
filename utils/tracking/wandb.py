"""The tracker for Weights & Biases, imported when a run starts: Accelerate's, with pictures and artifacts."""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import WandBTracker
from PIL import Image, ImageDraw

from utils.console import log
from utils.errors import UserError, first_line
from utils.files import write_bytes
from utils.summary import Box, Example
from utils.tracking.trackers import EPOCH, FINISH_SECONDS, STEP, WANDB, Tracker

UPLOAD_SECONDS = 900.0  # time to send the rest at the end of a run that uploads artifacts
CONNECT_SECONDS = 30.0  # time to reach the server, unless the variable WANDB_INIT_TIMEOUT gives another number
FLUSH_SECONDS = 0.01  # interval of the writes of W&B's file, so the most that a killed run loses
POSITION_FILE = ".wandb.json"  # in the run folder: the last step and epoch in W&B's files
BEST = {"metrics/": "max", "val/": "min"}  # which value of a key the table of runs shows, else the last
EXAMPLE_PIXELS = 640  # longer side of an example image
ImageReader = Callable[[int, int], np.ndarray]  # returns an image by its index and longest side, uint8 (h, w, 3) BGR


class WandbTracker(Tracker):
    """A W&B run: online if there is a key and a server, else in the run folder. It names itself by W&B's variables.

    A resumed run logs nothing twice. W&B writes the row of a step once a later step is logged, so the position counts
    all rows but those of the last step.
    """

    def __init__(self, folder: Path, project: str, run_id: str, job: str, uploads: bool = False) -> None:
        os.environ["WANDB_SILENT"] = "true"
        name = folder.name if job == "train" or job in folder.name else f"{job}-{folder.name}"
        self.arguments = {
            "dir": os.environ.get("WANDB_DIR") or str(folder.absolute()),
            "name": os.environ.get("WANDB_NAME") or name,
            "job_type": os.environ.get("WANDB_JOB_TYPE") or job,
            "id": run_id,
            "resume": "allow",
        }
        seconds = UPLOAD_SECONDS if uploads else FINISH_SECONDS
        super().__init__(WANDB, os.environ.get("WANDB_PROJECT") or project, folder, seconds)
        self.unsent = f"upload it with: wandb sync --include-online {self.arguments['dir']}/wandb/*run-*-{run_id}"
        self._last: dict[str, float] = {}  # last position on each axis
        self._repeats = False  # whether the run repeats what an earlier process has logged
        self._defined: set[str] = set()

    def log_media(self, make: Callable[[], Mapping[str, Any]], step: int) -> None:
        self.submit(lambda: None if self._repeats else self._write(make(), step))

    def with_wandb(self, job: Callable[[Any], object]) -> None:
        self.submit(lambda: job(self.inner.run))

    # In the thread

    def _start(self, config: Mapping[str, Any]) -> None:
        import wandb

        # What `log` prints is written by `with_wandb`, not captured.
        timeouts = {"init_timeout": connect_timeout(), "finish_timeout": self.finish_seconds}
        settings: dict[str, Any] = {"console": "off", **timeouts}
        if "x_transaction_log_flush_interval" in wandb.Settings.model_fields:  # wandb 0.28.2 lacks it
            settings["x_transaction_log_flush_interval"] = FLUSH_SECONDS
        arguments = {**self.arguments, "config": dict(config), "settings": wandb.Settings(**settings)}

        def started(mode: str) -> Any:
            tracker = WandBTracker(self.project, mode=mode, **arguments)
            tracker.start()
            return tracker

        mode, tracker, reason = wandb.setup().settings.mode, None, "the run is stored on this machine"
        if mode == "disabled":
            return
        if mode in ("offline", "dryrun"):
            reason = "offline"
        elif not has_key():
            reason = f"not logged in (wandb login), so {reason}"
        else:
            folder, pattern = Path(self.arguments["dir"]) / "wandb", f"run-*-{self.arguments['id']}"
            earlier = set(folder.glob(pattern))
            try:
                tracker = started("online")
            except Exception as error:
                log(f"warning: W&B: {first_line(error, 1000)}; training continues")
                wandb.teardown(1)
                for run_folder in set(folder.glob(pattern)) - earlier:
                    shutil.rmtree(run_folder, ignore_errors=True)
        if tracker:
            log(f"W&B: {tracker.run.url}")
            if tracker.run.resumed:  # what an earlier process could not send is not here
                self._last = {axis: tracker.run.summary.get(axis, 0) for axis in (STEP, EPOCH)}
        else:
            tracker = started("offline")
            log(f"W&B: {reason}; upload it with: wandb sync {Path(tracker.run.dir).parent}")
            with suppress(OSError, ValueError):
                self._last = dict(json.loads((self.folder / POSITION_FILE).read_text()))
        self._repeats = bool(self._last)
        self.inner = tracker

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        axis = EPOCH if EPOCH in values else STEP
        self._repeats = values[axis] <= self._last.get(axis, -math.inf)
        if self._repeats:
            return
        for key in {*values} - self._defined - {axis}:  # by pattern W&B would not find the keys with dots
            self._defined.add(key)
            name, best = key.replace(".", r"\."), BEST.get(key[: key.find("/") + 1])  # a dot would nest the value
            self.inner.run.define_metric(name, step_metric=axis, summary=best, hidden=key.startswith("class/") or None)
        self._write(values, step)
        self._last[axis] = values[axis]

    def _write(self, values: Mapping[str, Any], step: int) -> None:
        run = self.inner.run
        is_later = step > run.step
        run.log(dict(values), step=max(step, run.step))  # W&B drops values of steps before its last
        if is_later:
            self._store_position()

    def _store_position(self) -> None:
        write_bytes(self.folder / POSITION_FILE, json.dumps(self._last).encode())

    def _end(self, exit_code: int) -> None:
        self.inner.run.finish(exit_code=exit_code)
        self._store_position()


def connect_timeout() -> float:
    """Return the seconds that wandb has to reach the server."""
    return float(os.environ.get("WANDB_INIT_TIMEOUT") or CONNECT_SECONDS)


def has_key() -> bool:
    """Return whether wandb finds a key for its server in any of its places, without asking the user or connecting."""
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    newer: dict[str, Any] = {"prompt": False} if "prompt" in inspect.signature(wandb.login).parameters else {}
    try:
        return bool(wandb.login(verify=False, **newer))
    except (AuthenticationError, UsageError):  # the key has a wrong form, or there is neither a key nor a terminal
        return False


# Artifacts


def log_artifact(
    run: Any,
    name: str,
    kind: str,
    aliases: Sequence[str],
    files: Sequence[Path],
    metadata: Mapping[str, Any],
    references: Sequence[tuple[Path, str]] = (),
) -> None:
    """Log an artifact: an output of the run, or its input if a "dataset"; `references` are files that stay here."""
    import wandb

    artifact = wandb.Artifact(name, type=kind, metadata=dict(metadata))
    for file in files:
        artifact.add_file(str(file.absolute()))
    for path, title in references:
        artifact.add_reference(path.absolute().as_uri(), name=title, checksum=False, max_objects=10_000_000)
    if kind == "dataset":  # `use_artifact` refuses to work offline, and online it waits for the upload
        run._log_artifact(artifact, aliases=list(aliases), is_user_created=True, use_after_commit=True)
    else:
        run.log_artifact(artifact, aliases=list(aliases))


def download_artifact(name: str, folder: Path) -> list[Path]:
    """Download an artifact, entity/project/name:alias, and return its files. Raises `UserError`."""
    os.environ["WANDB_SILENT"] = "true"
    try:
        import wandb

        if not has_key():
            raise UserError("there is no API key for W&B: wandb login")
        artifact = wandb.Api(timeout=math.ceil(connect_timeout())).artifact(name)
        artifact.download(root=str(folder))
        return [folder / file.name for file in artifact.files()]
    except ImportError:
        raise UserError("wandb is not installed: pip install wandb") from None
    except Exception as error:
        raise UserError(first_line(error, 1000)) from None


# Media


def pictures(files: Mapping[str, Path]) -> dict[str, Any]:
    """Return picture files as W&B's images, by key."""
    import wandb

    return {f"pictures/{Path(name).stem}": wandb.Image(str(path)) for name, path in files.items()}


def picture_table(head: Sequence[str], rows: Sequence[Sequence[Any]], files: Sequence[Path]) -> Any:
    """Return W&B's table of rows, each with its picture file, if there are any, in the last column."""
    import wandb

    data = [[*row, file and wandb.Image(str(file))] for row, file in zip_longest(rows, files)]
    return wandb.Table(columns=[*head, "picture"], data=data)


def example_images(examples: Sequence[Example], read_image: ImageReader, names: Sequence[str]) -> list[Any]:
    """Return W&B's images of one size, whose boxes and masks of labels and predictions can be switched on and off.

    W&B's boxes are upright: other outlines become masks, and the boxes around them carry the captions.
    """
    import wandb

    photos = [read_image(example.image, EXAMPLE_PIXELS) for example in examples]
    height, width = np.max([photo.shape[:2] for photo in photos], axis=0)  # W&B warns of several sizes
    images = []
    for example, photo in zip(examples, photos, strict=True):
        sides, padding = np.array(photo.shape[1::-1]), [(0, height - photo.shape[0]), (0, width - photo.shape[1])]
        canvas = np.pad(photo[..., ::-1], [*padding, (0, 0)])
        boxes, masks = {}, {}
        for kind, objects in (("ground_truth", example.labels), ("predictions", example.predictions)):
            data = [_box_data(box, names, sides / (width, height)) for box in objects]
            boxes[kind] = {"box_data": data, "class_labels": dict(enumerate(names))}
            if any(box.outline for box in objects):
                mask = np.pad(_mask_data(objects, sides), padding)
                masks[kind] = {"mask_data": mask, "class_labels": dict(enumerate(names, 1))}
        images.append(wandb.Image(canvas, boxes=boxes, masks=masks or None, caption=example.name, file_type="jpg"))
    return images


def _box_data(box: Box, names: Sequence[str], scale: np.ndarray) -> dict[str, Any]:
    """Return a box in W&B's form; `scale` maps its fractions to those of the padded image."""
    left, top, right, bottom = np.multiply(box.xyxy, np.tile(scale, 2)).tolist()
    position = {"minX": left, "minY": top, "maxX": right, "maxY": bottom}
    data = {"position": position, "class_id": box.label, "box_caption": names[box.label]}
    if box.confidence is not None:
        data |= {"scores": {"confidence": box.confidence}, "box_caption": f"{names[box.label]} {box.confidence:.2f}"}
    return data


def _mask_data(boxes: Sequence[Box], sides: np.ndarray) -> np.ndarray:
    """Return the class of each pixel plus one, 0 for none, int (h, w); the first box's outline is in front."""
    image = Image.new("I", sides.tolist())
    pen = ImageDraw.Draw(image)
    for box in reversed(boxes):
        points = [tuple(point) for point in (np.reshape(box.outline, (-1, 2)) * sides).tolist()]
        if len(points) > 1:  # Pillow cannot draw a polygon of one point
            pen.polygon(points, fill=box.label + 1)
    return np.asarray(image)
