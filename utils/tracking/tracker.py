"""Where a run is logged beside its folder: W&B and TensorBoard, as trackers of Accelerate's that wait for nothing.

All of this is for the main process; the others have no trackers.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import cv2
from accelerate.tracking import GeneralTracker

from utils.background import Background, kill_children, own_python
from utils.files import ROOT
from utils.tracking.log_position import Kept

STEP, EPOCH = "step", "epoch"  # the two axes: optimizer steps since the start of the run, and its epochs
AXES = (
    (STEP, ""),
    (EPOCH, ""),
    ("step/*", STEP),
    *((f"{kind}/*", EPOCH) for kind in ("train", "val", "metrics", "x", "epoch", "class", "best")),
)
WANDB, TENSORBOARD = "wandb", "tensorboard"
FINISH, UPLOAD = 60.0, 900.0  # seconds that a tracker has, at the end, to send what is left; with artifacts
GRACE = 10.0  # seconds until one that does not end by itself is ended
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
Say = Callable[[str], None]


def axis_of(values: Mapping[str, Any]) -> str:
    """The key that is the x of the others."""
    return EPOCH if EPOCH in values else STEP


class Tracker(GeneralTracker):
    """What every tracker of ours can do; none of it waits, or raises."""

    main_process_only = True
    requires_logging_directory = False

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        """Numbers by key at an optimizer step; one of the keys is "step" or "epoch", their x."""

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Picture files by key."""

    def examples(self, key: str, images: Sequence[Any], names: Sequence[str], step: int, epoch: int) -> None:
        """Photos with boxes: `utils.summary.Example`, with the file of each."""

    def artifact(self, name: str, kind: str, aliases: Sequence[str], **content: Any) -> None:
        """A version of an artifact: `files`, or `references`."""

    def line(self, text: str) -> None:
        """What was printed."""

    def finish(self, patience: float = FINISH) -> None:
        """Send what is left, for so many seconds at most."""


class WandB(Tracker):
    """A W&B run in a process of its own: see utils/tracking/wandb_process.py.

    folder: of the run. arguments: of `wandb.init`: project, entity, group, tags, name, id. say: prints a line.
    patience: seconds to send the rest in, at the end.
    """

    name = WANDB

    def __init__(self, folder: Path, arguments: Mapping[str, Any], say: Say, patience: float = FINISH) -> None:
        super().__init__()
        self.folder, self.arguments, self.say = folder, arguments, say
        self.process: subprocess.Popen[str] | None = None
        self.calls: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.patience, self.deaf = patience, False

    @property
    def tracker(self) -> WandB:
        """This one: the W&B run itself lives in the other process."""
        return self

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Start the process, and in it the run, with its settings."""
        try:
            self.process = subprocess.Popen(
                [*own_python("utils.tracking.wandb_process"), *sys.argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # without a terminal nothing can be asked, and Ctrl-C is for the training
            )
        except OSError as error:
            self.deaf = True
            return self.say(f"warning: W&B cannot be started ({error.strerror}); training goes on")
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._listen)]
        for thread in self.threads:
            thread.start()
        where = {"folder": str(self.folder.absolute()), "pid": os.getpid()}
        self._call("begin", **where, run=self.arguments, config=values, axes=AXES, patience=self.patience)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self._call("log", values=values, step=step, axis=axis_of(values))

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        self._call("pictures", files={key: str(file.absolute()) for key, file in files.items()}, step=step)

    def examples(self, key: str, images: Sequence[Any], names: Sequence[str], step: int, epoch: int) -> None:
        self._call("examples", key=key, images=images, names=names, step=step, epoch=epoch)

    def artifact(self, name: str, kind: str, aliases: Sequence[str], **content: Any) -> None:
        files = [str(Path(file).absolute()) for file in content.pop("files", ())]
        self._call("artifact", name=name, kind=kind, aliases=aliases, files=files, **content)

    def line(self, text: str) -> None:
        self._call("line", text=text)

    def finish(self, patience: float = FINISH) -> None:
        """Close the run; what has not been sent in time can be sent by hand."""
        if self.process is None:
            return
        self._call("finish")
        self.calls.put(None)
        patience = min(patience, self.patience) + GRACE
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.say(f"warning: W&B has not ended after {patience:.0f} s; what it got is in {self.folder / 'wandb'}")
            kill_children(self.process.pid)
            self.process.kill()
        for thread in self.threads:
            thread.join(1)
        self.process = None

    def _call(self, verb: str, **arguments: Any) -> None:
        if not self.deaf:
            self.calls.put({"do": verb, **arguments})

    def _send(self) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        stream = self.process.stdin
        with suppress(OSError, ValueError):  # the process has ended: it has said why
            while call := self.calls.get():
                stream.write(json.dumps(call, default=str) + "\n")
                stream.flush()
            stream.close()
        self.deaf = True

    def _listen(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError, TypeError, KeyError):  # what is no answer of ours
                answer = json.loads(line)
                self.say(answer["say"])
                if answer.get("stop"):
                    os.kill(os.getpid(), signal.SIGTERM)


class TensorBoard(Tracker):
    """Event files in the run folder, of the run of that name. say: takes a warning."""

    name = TENSORBOARD

    def __init__(self, folder: Path, name: str, say: Say) -> None:
        super().__init__()
        self.folder, self.kept = folder, Kept(folder / ".tensorboard.json", name)
        self.background = Background("TensorBoard has failed", say)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Open the event file, with the settings as a text."""
        with suppress(Exception):  # here, not in the thread: loader processes must not be forked within an import
            importlib.import_module("torch.utils.tensorboard")
        self.background.do(self._open)
        text = "".join(f"    {line}\n" for line in json.dumps(values, indent=1, default=str).splitlines())
        self.background.do(lambda: self.writer.add_text("settings", text))

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(self.folder))

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self.background.do(lambda: self._scalars(dict(values), step))

    def _scalars(self, values: Mapping[str, Any], step: int | None) -> None:
        axis = axis_of(values)
        if not self.kept.has(axis, values[axis]):
            for key, value in values.items():
                self.writer.add_scalar(key, value, step)
            self.writer.flush()
            self.kept.note(axis, values[axis])

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        self.background.do(lambda: self._images(dict(files), step))

    def _images(self, files: Mapping[str, Path], step: int) -> None:
        for key, file in files.items():
            picture = cv2.imread(str(file))
            if picture is not None:
                self.writer.add_image(key, picture[..., ::-1], step, dataformats="HWC")

    def finish(self, patience: float = FINISH) -> None:
        self.background.do(lambda: self.writer.close())
        self.background.finish(min(patience, FINISH))


def wanted(log_with: str, no_wandb: bool) -> tuple[list[str], list[str]]:
    """The names of the trackers that flags and environment ask for, and warnings about those that are not installed."""
    off = no_wandb or os.environ.get("WANDB_MODE") == "disabled" or _true(os.environ.get("WANDB_DISABLED", ""))
    names = {"": [WANDB], "none": [], "all": [WANDB, TENSORBOARD]}.get(log_with, [log_with])
    names = [name for name in names if not (name == WANDB and off)]
    missing = [name for name in names if not _installed(name)]
    said = [f"warning: {name} is not installed, so nothing is logged there: pip install {name}" for name in missing]
    return [name for name in names if name not in missing], said if log_with else []


def _installed(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None  # not a folder of that name that happens to lie here


def _true(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


def new_id() -> str:
    """A name for a W&B run that no other has. A sweep, or whoever started this process, may have chosen one."""
    chosen = os.environ.get("WANDB_RUN_ID")
    return chosen or "".join(random.SystemRandom().choices(LETTERS, k=8))


def git_commit() -> str:
    """The commit of this code, with "+" where files have changed since; '' where it is no checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        told = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--match=", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
        return told.stdout.strip()
    return ""
