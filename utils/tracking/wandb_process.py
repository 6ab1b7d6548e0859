"""The process that talks to Weights & Biases: `main` serves a run, `fetch` downloads an artifact.

utils/tracking/wandb.py starts it with `main`, models/weights/releases.py with `fetch`. The training process never waits
for it and never imports wandb, so this process can be killed if it hangs.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from utils.errors import first_line, shortened
from utils.files import ROOT
from utils.tracking.log_position import LogPosition
from utils.tracking.message_loop import ORPHAN_SECONDS, Session, exit_now, open_replies, serve
from utils.tracking.reachable import REACH_SECONDS, unreachable
from utils.tracking.wandb_rows import RecentRows, Row
from utils.tracking.wandb_tables import charts

WANDB_POSITION_FILE = ".wandb.json"  # in the run folder
WANDB_LOCK_FILE = ".wandb.lock"  # in the run folder
WANDB_ROWS_FILE = ".wandb_rows.jsonl"  # in the run folder
WANDB_CONNECT_SECONDS = 30.0  # to reach the server, unless the variable WANDB_INIT_TIMEOUT gives another number
ALERT_CHARACTERS = 1000  # of an alert's text, at most
EXAMPLE_PIXELS = 640  # longer side of an example image
EXAMPLE_KINDS = (("ground_truth", "label"), ("predictions", "prediction"))  # W&B's title, and our name


class WandbSession(Session):
    """A W&B run; its methods are the messages that `WandbTracker` sends."""

    title = "W&B"

    def start(
        self,
        folder: str,
        run: Mapping[str, Any],
        config: Mapping[str, Any],
        axes: Sequence[Sequence[Any]],
        pid: int,
        timeout: float,
        alerts: bool = False,
        inputs: Sequence[str] = (),
    ) -> None:
        """Start the run, or continue the one with this id.

        run: arguments of `wandb.init`. axes: the fields of `utils.tracking.tracker.Axis`. pid: of the training process.
        timeout: seconds to send the rest at the end of the run. alerts: whether `fail` sends an alert. inputs: names of
        artifacts that the run uses, if they exist.
        """
        os.environ.setdefault("WANDB_PROGRAM", sys.argv[0])  # otherwise that of this process
        os.environ["WANDB_SILENT"] = "true"
        import wandb

        self.wandb, self.folder, self.timeout = wandb, Path(run.get("dir") or folder) / "wandb", timeout
        self.alerts = alerts
        # The W&B process of a training that was killed a moment ago may still be sending.
        self.lock = FileLock(Path(folder) / WANDB_LOCK_FILE, timeout=ORPHAN_SECONDS)
        with suppress(Timeout, OSError, NotImplementedError):
            self.lock.acquire()
        settings = wandb.setup().settings
        mode = os.environ.get("WANDB_MODE") or settings.mode
        if mode == "disabled":
            raise SystemExit(0)
        wandb_settings = self._settings(pid, timeout)
        common = {"dir": folder, **run, "config": dict(config), "resume": "allow", "settings": wandb_settings}
        offline_reason = "offline" if mode in ("offline", "dryrun") else ""
        if not offline_reason and not has_key():
            offline_reason = "not logged in (wandb login), so the run is stored on this machine"
        if not offline_reason and not self._start_online(common):
            offline_reason = "the run is stored on this machine"
        self.is_offline = bool(offline_reason)
        if offline_reason:
            self.run = wandb.init(mode="offline", **common)
            self.reply(f"W&B: {offline_reason}; upload it with: wandb sync {Path(self.run.dir).parent}")
        else:
            self.reply(f"W&B: {self.run.url}")
        self.started = True
        self.axes, self.defined = axes, set[str]()  # keys with dots
        for axis in axes:
            self._define(*axis)
        self.position = LogPosition(Path(folder) / WANDB_POSITION_FILE, run["id"])
        self.recent = RecentRows(Path(folder) / WANDB_ROWS_FILE, run["id"])
        with suppress(Exception):  # as long as W&B's file has this format
            self._log_lost_rows()
        for name in inputs:
            self.use_artifact(name)

    def _settings(self, pid: int, timeout: float) -> Any:
        """Return wandb's settings, without those that an older version does not have."""
        known = getattr(self.wandb.Settings, "model_fields", {})
        newer: dict[str, Any] = {"x_stats_pid": pid, "finish_timeout": timeout}
        # Called for the button "stop" of the run's page. It is a lambda because wandb copies its settings: a bound
        # method would be copied with the whole session.
        newer["stop_fn"] = lambda: self.reply("W&B: the run is stopped from its page", stop=True)
        if (ROOT / ".git").exists():  # whatever the current folder is
            newer["git_root"] = str(ROOT)
        return self.wandb.Settings(
            init_timeout=connect_timeout(),
            **{name: value for name, value in newer.items() if name in known},
        )

    def _start_online(self, arguments: Mapping[str, Any]) -> bool:
        """Start the run on the server. Return False, after a warning, if that fails."""
        if reason := unreachable(self.wandb.setup().settings.base_url, min(REACH_SECONDS, connect_timeout())):
            self.warn(ConnectionError(reason))
            return False
        folders_before = set(self.folder.glob("run-*"))
        try:
            self.run = self.wandb.init(mode="online", **arguments)
        except Exception as error:
            self.warn(error)
            self.wandb.teardown(1)
            for folder in set(self.folder.glob("run-*")) - folders_before:
                shutil.rmtree(folder, ignore_errors=True)
            return False
        return True

    def log(self, values: Mapping[str, Any], step: int, axis: str) -> None:
        """Log numbers by key at an optimizer step. axis: the key of their x axis."""
        self._define_dotted(values)
        if not self.position.logged_before(axis, values[axis]):
            self.recent.add(Row(dict(values), step, axis))
            self._log(values, step)
            self.position.advance(axis, values[axis])

    def _log_lost_rows(self) -> None:
        """Log the rows again that an earlier process has logged and W&B has lost, because all processes were killed.

        The server has the rows before `run.step`. Rows in the file of an offline run are uploaded by wandb sync.
        """
        kinds = "*run-*" if self.is_offline else "offline-run-*"
        for row in self.recent.missing(self.folder.glob(f"{kinds}-{self.run.id}/*.wandb")):
            if self.is_offline or row.step >= self.run.step:
                self._define_dotted(row.values)
                self._log(row.values, row.step)

    def _define_dotted(self, keys: Iterable[str]) -> None:
        """Define keys with dots: in patterns W&B takes a dot for the start of a nested value, and ignores the key."""
        for key in keys:
            if "." in key and key not in self.defined:
                self.defined.add(key)
                for pattern, *how in self.axes:
                    if pattern.endswith("*") and key.startswith(pattern[:-1]):
                        self._define(key.replace(".", r"\."), *how)

    def _define(self, name: str, axis: str, summary: str, is_hidden: bool) -> None:
        """Define how W&B shows a key, or keys by a pattern; see `utils.tracking.tracker.Axis`."""
        self.run.define_metric(name, step_metric=axis or None, summary=summary or None, hidden=is_hidden or None)

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self.run.log(dict(values), step=max(step, self.run.step))  # wandb drops values of steps before its last

    def log_pictures(self, files: Mapping[str, str], step: int) -> None:
        """Log picture files by key."""
        self._log({key: self.wandb.Image(file) for key, file in files.items()}, step)

    def log_examples(
        self, key: str, examples: Sequence[Mapping[str, Any]], names: Sequence[str], step: int, epoch: int
    ) -> None:
        """Log images with boxes and masks of labels and predictions; see `Tracker.log_examples`."""
        if self.position.logged_before(key, epoch):
            return
        classes = dict(enumerate(names))
        images = []
        for example in examples:
            boxes = {
                title: {"box_data": [_box(box, names) for box in example[f"{kind}s"]], "class_labels": classes}
                for title, kind in EXAMPLE_KINDS
            }
            image = _thumbnail(example["file"])
            masks = {
                title: {
                    "mask_data": _class_map(example[f"{kind}s"], example[f"{kind}_outlines"], image.size),
                    "class_labels": {k + 1: name for k, name in classes.items()},
                }
                for title, kind in EXAMPLE_KINDS
                if example[f"{kind}_outlines"]
            }
            images.append(
                self.wandb.Image(image, boxes=boxes, masks=masks or None, caption=example["name"], file_type="jpg")
            )
        self._log({key: images}, step)
        self.position.advance(key, epoch)

    def log_documents(self, documents: Mapping[str, str], step: int, epoch: int) -> None:
        """Log CSV files by name as tables and charts; see `utils.tracking.wandb_tables.charts`."""
        made = {
            key: value
            for key, value in charts(self.wandb, documents).items()
            if not self.position.logged_before(key, epoch)
        }
        if made:
            self._log(made, step)
            for key in made:
                self.position.advance(key, epoch)

    def log_artifact(
        self,
        name: str,
        kind: str,
        aliases: Sequence[str],
        files: Sequence[str],
        references: Sequence[Sequence[str]],
        metadata: Mapping[str, Any] | None,
        is_input: bool,
        link: str,
    ) -> None:
        """Log a version of an artifact; see `Tracker.log_artifact`."""
        artifact = self.wandb.Artifact(name, type=kind, metadata=dict(metadata or {}))
        for file in files:
            artifact.add_file(file)
        for path, title in references:
            artifact.add_reference(Path(path).absolute().as_uri(), name=title, checksum=False, max_objects=10_000_000)
        if is_input:
            # `use_artifact` refuses to work offline, and online it waits for the upload.
            self.run._log_artifact(artifact, aliases=list(aliases), is_user_created=True, use_after_commit=True)
        else:
            self.run.log_artifact(artifact, aliases=list(aliases))
        if link and self.is_offline:
            self.reply(f"warning: W&B: the run is offline, so {name} is not linked to {link}; link it on its page")
        elif link:
            self.run.link_artifact(artifact, link)

    def use_artifact(self, name: str) -> None:
        """Make an existing artifact an input of the run, if it exists."""
        if not self.is_offline:
            with suppress(Exception):  # the training run may not have uploaded it
                self.run.use_artifact(name)

    def log_line(self, text: str) -> None:
        """Log a line of the training's console output: wandb records what this process prints."""
        print(text, flush=True)

    def finish(self, code: int = 0) -> None:
        """Send the rest and close the run; data that is not sent in time stays on disk. code: exit code of the run."""
        if code and self.alerts:
            reason = self.reason or "the training process has ended without an error message; it may have been killed"
            self.run.alert("The run ended by an error", shortened(reason, ALERT_CHARACTERS), "ERROR")
        started = time.monotonic()
        self.run.finish(exit_code=code)
        if time.monotonic() - started < self.timeout:
            self.recent.clear()
        else:
            self.reply(
                f"warning: W&B has not received everything within {self.timeout:.0f} s; upload the rest with: "
                f"wandb sync --include-online {Path(self.run.dir).parent}"
            )


def connect_timeout() -> float:
    """Return the seconds that wandb has to reach the server."""
    return float(os.environ.get("WANDB_INIT_TIMEOUT") or WANDB_CONNECT_SECONDS)


def has_key() -> bool:
    """Return whether wandb finds a key for its server, wherever it looks for one; it neither asks nor connects."""
    os.environ["WANDB_SILENT"] = "true"  # otherwise it asks the server for the name of the user
    import wandb
    from wandb.errors import AuthenticationError, UsageError

    newer: dict[str, Any] = {"prompt": False}
    known = inspect.signature(wandb.login).parameters
    try:
        return bool(wandb.login(verify=False, **{name: value for name, value in newer.items() if name in known}))
    except (AuthenticationError, UsageError):  # the key has a wrong form, or there is none and no terminal
        return False


def _box(box: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a box in the form of `wandb.Image`: corners as shares of the image's width and height."""
    left, top, right, bottom = box["xyxy"]
    wandb_box = {
        "position": {"minX": left, "minY": top, "maxX": right, "maxY": bottom},
        "class_id": box["label"],
        "box_caption": names[box["label"]],
    }
    if box["confidence"] is not None:
        wandb_box["scores"] = {"confidence": box["confidence"]}
        wandb_box["box_caption"] += f" {box['confidence']:.2f}"
    return wandb_box


def _class_map(boxes: Sequence[Mapping[str, Any]], outlines: Sequence[Sequence[float]], size: tuple[int, int]) -> Any:
    """Return masks in the form of `wandb.Image`: the class of each pixel plus one, 0 for none, int (height, width).

    outlines: x, y, x, y, ... as shares of width and height, one for each box; the first is in front. size: width and
    height.
    """
    import numpy as np
    from PIL import Image, ImageDraw

    image = Image.new("I", size)
    pen = ImageDraw.Draw(image)
    for box, outline in zip(reversed(boxes), reversed(outlines), strict=True):
        if len(outline) >= 4:  # Pillow draws no polygon of a point
            points = [(x * size[0], y * size[1]) for x, y in zip(outline[::2], outline[1::2], strict=True)]
            pen.polygon(points, fill=box["label"] + 1)
    return np.asarray(image)


def _thumbnail(file: str) -> Any:
    """Read an image file as RGB, turned upright, with its longer side at most `EXAMPLE_PIXELS`."""
    from PIL import Image, ImageOps

    with Image.open(os.fsencode(file)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    image.thumbnail((EXAMPLE_PIXELS, EXAMPLE_PIXELS))
    return image


def main() -> None:
    """Serve a run."""
    sys.argv = sys.argv[1:]  # the command of the training, which W&B shows
    serve(WandbSession)


def fetch() -> None:
    """Download an artifact and reply with its files, or with an `error`.

    sys.argv: the artifact's name (entity/project/name:alias) and the folder to download into.
    """
    name, folder = sys.argv[1:]
    replies = open_replies()

    def answer(**reply: Any) -> None:
        print(json.dumps(reply), file=replies, flush=True)
        exit_now(0)

    timer = threading.Timer(connect_timeout(), lambda: answer(error=f"no answer within {connect_timeout():g} s"))
    timer.start()
    try:
        import wandb

        if not has_key():
            answer(error="there is no key for W&B: wandb login")
        artifact = wandb.Api(timeout=math.ceil(connect_timeout())).artifact(name)
        timer.cancel()
        artifact.download(root=folder)
        answer(files=[str(Path(folder) / file.name) for file in artifact.files()])
    except Exception as error:
        answer(error=first_line(error, 1000))
