"""The process that talks to Weights & Biases; utils/tracking/tracker.py starts it.

It reads a JSON object per line, calls the method of `Session` that the object names, and answers with JSON lines. The
training process never waits for it and never imports wandb; whatever hangs or breaks here can be ended. When its input
ends without a word, the training process is gone, and the run is closed with what had come.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from filelock import FileLock, Timeout

from utils.background import kill_children
from utils.tracking.log_position import Kept

KEPT = ".wandb.json"  # in a run folder
START = 30.0  # seconds to reach the server in; the variable WANDB_INIT_TIMEOUT says otherwise
END = 60.0  # seconds to send the rest in when the training process is gone
LEAVE = 5.0  # seconds that wandb has to leave
SIDE = 640  # pixels of the longer side of a photo


class Session:
    """A W&B run. replies: takes what the training process is to say."""

    def __init__(self, replies: TextIO) -> None:
        self.replies = replies
        self.warned = False

    def say(self, text: str, **more: Any) -> None:
        """One line for the person who watches the training."""
        with suppress(OSError, ValueError):
            print(json.dumps({"say": text, **more}), file=self.replies, flush=True)

    def stop(self) -> None:
        """Somebody has pressed "stop" on the run's page."""
        self.say("W&B: the run is stopped from its page", stop=True)

    def warn(self, error: BaseException) -> None:
        """The first failure is said, the others are not."""
        if not self.warned:
            self.warned = True
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            self.say(f"warning: W&B: {reason}; training goes on, results.csv has its numbers")

    def begin(
        self,
        folder: str,
        run: Mapping[str, Any],
        config: Mapping[str, Any],
        axes: Sequence[Sequence[str]],
        pid: int,
        patience: float,
    ) -> None:
        """Start the run, or go on with the one of this id. `run`: what `wandb.init` takes; `axes`: pairs of a pattern
        of keys and what their x axis is, '' for an axis itself; `pid`: of the training process; `patience`: seconds to
        send the rest in, at the end."""
        import wandb

        self.wandb, self.folder, self.patience = wandb, Path(folder) / "wandb", patience
        # A process like this one, whose training was killed a moment ago, may still be sending.
        self.alone = FileLock(Path(folder) / ".wandb.lock", timeout=END)
        with suppress(Timeout, OSError, NotImplementedError):
            self.alone.acquire()
        settings = wandb.setup().settings
        mode = os.environ.get("WANDB_MODE") or settings.mode
        mode = "offline" if mode in ("offline", "dryrun") else "disabled" if mode == "disabled" else "online"
        if mode == "disabled":
            raise SystemExit(0)
        known = getattr(wandb.Settings, "model_fields", {})
        own: dict[str, Any] = {"silent": True, "init_timeout": reach()}
        # Settings that older versions do not know. They are copied: a method would be with all that it belongs to.
        newer = {"x_stats_pid": pid, "finish_timeout": patience, "stop_fn": lambda: self.stop()}
        own |= {name: value for name, value in newer.items() if name in known}
        common = {**run, "dir": folder, "config": dict(config), "resume": "allow", "settings": wandb.Settings(**own)}
        why = "offline"
        if mode == "online" and not has_key(settings):
            mode, why = "offline", "no key (wandb login), so the run is kept on this machine"
        if mode == "online":
            before = set(self.folder.glob("run-*"))
            try:
                self.run = wandb.init(mode="online", **common)
            except Exception as error:
                self.warn(error)
                mode, why = "offline", "the run is kept on this machine"
                wandb.teardown(1)
                for left in set(self.folder.glob("run-*")) - before:  # of a run that has not begun
                    shutil.rmtree(left, ignore_errors=True)
        if mode == "online":
            self.say(f"W&B: {self.run.url}")
        else:
            self.run = wandb.init(mode="offline", **common)
            self.say(f"W&B: {why}; upload it with: wandb sync {Path(self.run.dir).parent}")
        for pattern, axis in axes:
            self.run.define_metric(pattern, step_metric=axis or None)
        self.kept = Kept(Path(folder) / KEPT, run["id"])

    def log(self, values: Mapping[str, Any], step: int, axis: str) -> None:
        """Numbers by key, at the optimizer step `step`. `axis`: the key among them that is their x."""
        if not self.kept.has(axis, values[axis]):
            self._log(values, step)
            self.kept.note(axis, values[axis])

    def _log(self, values: Mapping[str, Any], step: int) -> None:
        self.run.log(dict(values), step=max(step, self.run.step))  # what is behind would be dropped

    def pictures(self, files: Mapping[str, str], step: int) -> None:
        """Picture files by key."""
        self._log({key: self.wandb.Image(file) for key, file in files.items()}, step)

    def examples(
        self, key: str, images: Sequence[Mapping[str, Any]], names: Sequence[str], step: int, epoch: int
    ) -> None:
        """Photos with their true and their found boxes, that can be switched on and off."""
        if self.kept.has(key, epoch):
            return
        classes = dict(enumerate(names))
        shown = []
        for image in images:
            boxes = {
                what: {"box_data": [_box(box, names) for box in image[kind]], "class_labels": classes}
                for what, kind in (("ground_truth", "truth"), ("predictions", "found"))
            }
            photo = _photo(image["file"])
            shown.append(self.wandb.Image(photo, boxes=boxes, caption=image["name"], file_type="jpg"))
        self._log({key: shown}, step)
        self.kept.note(key, epoch)

    def artifact(
        self,
        name: str,
        kind: str,
        aliases: Sequence[str],
        files: Sequence[str] = (),
        references: Sequence[Sequence[str]] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """A version of an artifact: `files` are uploaded, of `references`, pairs of a path and a name, only the
        addresses are kept."""
        artifact = self.wandb.Artifact(name, type=kind, metadata=dict(metadata or {}))
        for file in files:
            artifact.add_file(file)
        for path, where in references:
            artifact.add_reference(Path(path).absolute().as_uri(), name=where, checksum=False, max_objects=10_000_000)
        self.run.log_artifact(artifact, aliases=list(aliases))

    def line(self, text: str) -> None:
        """What the training process has printed, for the run's log."""
        print(text, flush=True)

    def finish(self, code: int = 0) -> None:
        """Send the rest, and close the run: what could not be sent in time is on disk. `code`: 0 where training went
        well."""
        before = time.monotonic()
        self.run.finish(exit_code=code)
        if time.monotonic() - before >= self.patience:
            self.say(
                f"warning: W&B has not got all within {self.patience:.0f} s; what it lacks is kept: "
                f"wandb sync --include-online {Path(self.run.dir).parent}"
            )


def reach() -> float:
    """Seconds to reach the server in."""
    return float(os.environ.get("WANDB_INIT_TIMEOUT") or START)


def has_key(settings: Any) -> bool:
    """Is there a key for the server? From where wandb itself takes one: variables, ~/.netrc, its own settings."""
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
    """A box as W&B wants it: corners as shares of the image's sides."""
    left, top, right, bottom = box["xyxy"]
    found = {
        "position": {"minX": left, "minY": top, "maxX": right, "maxY": bottom},
        "class_id": box["label"],
        "box_caption": names[box["label"]],
    }
    if box["confidence"] is not None:
        found["scores"] = {"confidence": box["confidence"]}
        found["box_caption"] += f" {box['confidence']:.2f}"
    return found


def _photo(file: str) -> Any:
    """An image file, upright, in RGB, and not large."""
    from PIL import Image, ImageOps

    with Image.open(os.fsencode(file)) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    image.thumbnail((SIDE, SIDE))
    return image


def end(code: int) -> None:
    """End at once, with the processes that wandb has started."""
    kill_children(os.getpid())
    os._exit(code)


def _replies() -> TextIO:
    """Where answers go; what wandb prints goes nowhere."""
    replies = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    return replies


def main() -> None:
    """Do what stdin says, line by line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the training, which says when it ends
    replies = _replies()
    sys.argv = sys.argv[1:]  # W&B shows the command of the training
    session, finished = Session(replies), False
    for line in sys.stdin:
        if not line.endswith("\n"):  # who was writing it has died
            break
        call = json.loads(line)
        verb = call.pop("do")
        try:
            getattr(session, verb)(**call)
        except Exception as error:
            session.warn(error)
            if verb == "begin":
                end(1)
        finished = finished or verb == "finish"
        if finished:
            break
    if not finished and hasattr(session, "run"):
        _end_in(END)
        with suppress(Exception):
            session.finish(code=1)
    _end_in(LEAVE)  # on the way out wandb removes its temporary files


def _end_in(seconds: float) -> None:
    timer = threading.Timer(seconds, end, (1,))
    timer.daemon = True
    timer.start()


def fetch() -> None:
    """Download an artifact, and answer with its files: `argv` is its name (entity/project/name:alias) and a folder."""
    name, folder = sys.argv[1:]
    replies = _replies()

    def answer(**found: Any) -> None:
        print(json.dumps(found), file=replies, flush=True)
        end(0)

    waiting = threading.Timer(reach(), lambda: answer(error=f"no answer within {reach():g} s"))
    waiting.start()
    try:
        import wandb

        if not has_key(wandb.setup().settings):
            answer(error="there is no key for W&B: wandb login")
        artifact = wandb.Api(timeout=math.ceil(reach())).artifact(name)
        waiting.cancel()
        artifact.download(root=folder)
        answer(files=[str(Path(folder) / file.name) for file in artifact.files()])
    except Exception as error:
        answer(error=str(error).strip().partition("\n")[0])
