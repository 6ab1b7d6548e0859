"""The process that talks to Weights & Biases: `main` serves a run, `fetch` downloads an artifact.

utils/tracking/wandb.py starts it with `main`, models/weights/releases.py with `fetch`. It reads a JSON object per line,
calls the method of `Session` that the object names, and replies with JSON lines. The training process never waits for
it and never imports wandb, so this process can be killed if it hangs. If its input ends without `finish`, the training
process has died, and the run is closed.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from utils.background import kill_children
from utils.errors import first_line
from utils.tracking.log_position import LogPosition

WANDB_POSITION_FILE = ".wandb.json"  # in the run folder
WANDB_LOCK_FILE = ".wandb.lock"  # in the run folder
WANDB_CONNECT_SECONDS = 30.0  # to reach the server, unless the variable WANDB_INIT_TIMEOUT gives another number
WANDB_REACH_SECONDS = 5.0  # for a connection to the server to be accepted, before that
REACH_RETRY_SECONDS = 0.5  # between two such connections
ORPHAN_SECONDS = 60.0  # to send the rest if the training process has died
CLEANUP_SECONDS = 5.0  # for wandb to remove its temporary files on exit
EXAMPLE_PIXELS = 640  # longer side of an example image
EXAMPLE_KINDS = (("ground_truth", "label"), ("predictions", "prediction"))  # W&B's title, and our name


class Session:
    """A W&B run; its methods are the messages that `WandbTracker` sends. replies: where replies are written."""

    def __init__(self, replies: TextIO) -> None:
        self.replies = replies
        self.warned = False

    def reply(self, text: str, **more: Any) -> None:
        """Make the training process print `text`. more: `stop=True` ends the training."""
        with suppress(OSError, ValueError):
            print(json.dumps({"print": text, **more}), file=self.replies, flush=True)

    def warn(self, error: BaseException) -> None:
        """Report the first failure; later ones are silent."""
        if not self.warned:
            self.warned = True
            self.reply(f"warning: W&B: {first_line(error, 1000)}; training continues, results.csv has its numbers")

    def start(
        self,
        folder: str,
        run: Mapping[str, Any],
        config: Mapping[str, Any],
        axes: Sequence[Sequence[str]],
        pid: int,
        timeout: float,
    ) -> None:
        """Start the run, or continue the one with this id.

        run: arguments of `wandb.init`. axes: pairs of a pattern of keys and the key of their x axis, '' for an axis
        itself. pid: of the training process. timeout: seconds to send the rest at the end of the run.
        """
        import wandb

        self.wandb, self.folder, self.timeout = wandb, Path(folder) / "wandb", timeout
        # The W&B process of a training that was killed a moment ago may still be sending.
        self.lock = FileLock(Path(folder) / WANDB_LOCK_FILE, timeout=ORPHAN_SECONDS)
        with suppress(Timeout, OSError, NotImplementedError):
            self.lock.acquire()
        settings = wandb.setup().settings
        mode = os.environ.get("WANDB_MODE") or settings.mode
        if mode == "disabled":
            raise SystemExit(0)
        wandb_settings = self._settings(pid, timeout)
        common = {**run, "dir": folder, "config": dict(config), "resume": "allow", "settings": wandb_settings}
        offline_reason = "offline" if mode in ("offline", "dryrun") else ""
        if not offline_reason and not has_key(settings):
            offline_reason = "not logged in (wandb login), so the run is stored on this machine"
        if not offline_reason and not self._start_online(common):
            offline_reason = "the run is stored on this machine"
        if offline_reason:
            self.run = wandb.init(mode="offline", **common)
            self.reply(f"W&B: {offline_reason}; upload it with: wandb sync {Path(self.run.dir).parent}")
        else:
            self.reply(f"W&B: {self.run.url}")
        for pattern, axis in axes:
            self.run.define_metric(pattern, step_metric=axis or None)
        self.position = LogPosition(Path(folder) / WANDB_POSITION_FILE, run["id"])

    def _settings(self, pid: int, timeout: float) -> Any:
        """Return wandb's settings, without those that an older version does not have."""
        known = getattr(self.wandb.Settings, "model_fields", {})
        newer: dict[str, Any] = {"x_stats_pid": pid, "finish_timeout": timeout}
        # Called for the button "stop" of the run's page. It is a lambda because wandb copies its settings: a bound
        # method would be copied with the whole session.
        newer["stop_fn"] = lambda: self.reply("W&B: the run is stopped from its page", stop=True)
        return self.wandb.Settings(
            silent=True,
            init_timeout=connect_timeout(),
            **{name: value for name, value in newer.items() if name in known},
        )

    def _start_online(self, arguments: Mapping[str, Any]) -> bool:
        """Start the run on the server. Return False, after a warning, if that fails."""
        if reason := unreachable(self.wandb.setup().settings.base_url):
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
        if not self.position.logged_before(axis, values[axis]):
            self._log(values, step)
            self.position.advance(axis, values[axis])

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

    def log_artifact(
        self,
        name: str,
        kind: str,
        aliases: Sequence[str],
        files: Sequence[str],
        references: Sequence[Sequence[str]],
        metadata: Mapping[str, Any] | None,
    ) -> None:
        """Log a version of an artifact; see `Tracker.log_artifact`."""
        artifact = self.wandb.Artifact(name, type=kind, metadata=dict(metadata or {}))
        for file in files:
            artifact.add_file(file)
        for path, title in references:
            artifact.add_reference(Path(path).absolute().as_uri(), name=title, checksum=False, max_objects=10_000_000)
        self.run.log_artifact(artifact, aliases=list(aliases))

    def log_line(self, text: str) -> None:
        """Log a line of the training's console output: wandb records what this process prints."""
        print(text, flush=True)

    def finish(self, code: int = 0) -> None:
        """Send the rest and close the run; data that is not sent in time stays on disk. code: exit code of the run."""
        started = time.monotonic()
        self.run.finish(exit_code=code)
        if time.monotonic() - started >= self.timeout:
            self.reply(
                f"warning: W&B has not received everything within {self.timeout:.0f} s; upload the rest with: "
                f"wandb sync --include-online {Path(self.run.dir).parent}"
            )


def connect_timeout() -> float:
    """Return the seconds that wandb has to reach the server."""
    return float(os.environ.get("WANDB_INIT_TIMEOUT") or WANDB_CONNECT_SECONDS)


def unreachable(url: str) -> str:
    """Return why a server cannot be reached, '' if it can, or if a proxy is set, through which only wandb connects.

    wandb itself would try for `connect_timeout` even without a network.
    """
    if urllib.request.getproxies():
        return ""
    server, end = urlsplit(url), time.monotonic() + min(WANDB_REACH_SECONDS, connect_timeout())
    while True:
        try:
            address = server.hostname or "", server.port or (80 if server.scheme == "http" else 443)
            socket.create_connection(address, max(end - time.monotonic(), 0.1)).close()
        except OSError as error:
            if time.monotonic() > end - REACH_RETRY_SECONDS:
                return f"{url} cannot be reached ({error.strerror or error})"
            time.sleep(REACH_RETRY_SECONDS)
        else:
            return ""


def has_key(settings: Any) -> bool:
    """Return whether wandb has a key for the server, in the environment, its settings or ~/.netrc."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    if getattr(settings, "api_key", None):
        return True
    host = urlsplit(settings.base_url).netloc
    candidates = [os.environ.get("NETRC"), *map(os.path.expanduser, ("~/.netrc", "~/_netrc"))]
    for file in filter(None, candidates):
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(file).authenticators(host):
                return True
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


def exit_now(code: int) -> None:
    """Exit without cleaning up, and kill the processes that wandb has started."""
    kill_children(os.getpid())
    os._exit(code)


def _open_replies() -> TextIO:
    """Return standard output for replies, and send what wandb prints to the null device."""
    replies = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    return replies


def main() -> None:
    """Serve a run: call the methods that the lines of standard input name."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the training process, which sends `finish` before it ends
    replies = _open_replies()
    sys.argv = sys.argv[1:]  # the command of the training, which W&B shows
    session, method = Session(replies), ""
    for line in sys.stdin:
        if not line.endswith("\n"):  # the training process died while it wrote
            break
        message = json.loads(line)
        method = message.pop("method")
        try:
            getattr(session, method)(**message)
        except Exception as error:
            session.warn(error)
            if method == "start":
                exit_now(1)
        if method == "finish":
            break
    if method != "finish" and hasattr(session, "run"):
        _exit_after(ORPHAN_SECONDS)
        with suppress(Exception):
            session.finish(code=1)
    _exit_after(CLEANUP_SECONDS)


def _exit_after(seconds: float) -> None:
    timer = threading.Timer(seconds, exit_now, (1,))
    timer.daemon = True
    timer.start()


def fetch() -> None:
    """Download an artifact and reply with its files, or with an `error`.

    sys.argv: the artifact's name (entity/project/name:alias) and the folder to download into.
    """
    name, folder = sys.argv[1:]
    replies = _open_replies()

    def answer(**reply: Any) -> None:
        print(json.dumps(reply), file=replies, flush=True)
        exit_now(0)

    timer = threading.Timer(connect_timeout(), lambda: answer(error=f"no answer within {connect_timeout():g} s"))
    timer.start()
    try:
        import wandb

        if not has_key(wandb.setup().settings):
            answer(error="there is no key for W&B: wandb login")
        artifact = wandb.Api(timeout=math.ceil(connect_timeout())).artifact(name)
        timer.cancel()
        artifact.download(root=folder)
        answer(files=[str(Path(folder) / file.name) for file in artifact.files()])
    except Exception as error:
        answer(error=first_line(error, 1000))
