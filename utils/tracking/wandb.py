"""The tracker of Weights & Biases: it sends messages to a process (wandb_process.py) and never waits for it.

Made by `RunLog`. Nothing here imports the package wandb.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from utils.background import kill_children, own_python
from utils.tracking.tracker import AXES, FINISH_SECONDS, WANDB, Print, Tracker, axis_of

UPLOAD_SECONDS = 900.0  # time limit of the W&B process to send the rest at the end of a run that uploads artifacts
EXIT_SECONDS = 10.0  # additional time limit for its exit; then it is killed


def _as_text(value: Any) -> Any:
    """Return a value without the bytes of a file's name that are not UTF-8, which wandb refuses."""
    return value.encode(errors="surrogateescape").decode(errors="replace") if isinstance(value, str) else value


class WandbTracker(Tracker):
    """A W&B run in another process. A message is a line of JSON: a method of `wandb_process.Session` and its arguments.

    folder: of the run. run: arguments of `wandb.init` (project, entity, group, tags, name, id). print_line: prints a
    line on the console. timeout: seconds to send the rest at the end of the run.
    """

    name = WANDB

    def __init__(
        self, folder: Path, run: Mapping[str, Any], print_line: Print, timeout: float = FINISH_SECONDS
    ) -> None:
        super().__init__()
        self.folder, self.run, self.print_line, self.timeout = folder, run, print_line, timeout
        self.process: subprocess.Popen[str] | None = None
        self.messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self.closed = False  # once it is True, nobody reads messages

    @property
    def tracker(self) -> WandbTracker:
        """This tracker, because the W&B run is in the other process."""
        return self

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Start the process, and the run in it with its settings."""
        try:
            self.process = subprocess.Popen(
                [*own_python("utils.tracking.wandb_process"), *(_as_text(word).encode() for word in sys.argv)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONUTF8": "1"},  # whatever the locale, files are named and written in UTF-8
                start_new_session=True,  # without a terminal wandb asks no questions and gets no Ctrl-C
            )
        except OSError as error:
            self.closed = True
            self.print_line(f"warning: W&B cannot be started ({error.strerror}); training continues")
            return
        self._threads = [
            threading.Thread(target=work, args=(self.process,), daemon=True) for work in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()
        folder, pid = str(self.folder.absolute()), os.getpid()
        config = {key: _as_text(value) for key, value in values.items()}
        self._send("start", folder=folder, run=self.run, config=config, axes=AXES, pid=pid, timeout=self.timeout)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self._send("log", values=values, step=step, axis=axis_of(values))

    def log_pictures(self, files: Mapping[str, Path], step: int) -> None:
        self._send("log_pictures", files={key: str(file.absolute()) for key, file in files.items()}, step=step)

    def log_examples(
        self, key: str, examples: Sequence[Mapping[str, Any]], names: Sequence[str], step: int, epoch: int
    ) -> None:
        self._send("log_examples", key=key, examples=examples, names=names, step=step, epoch=epoch)

    def log_artifact(
        self,
        name: str,
        kind: str,
        aliases: Sequence[str],
        files: Sequence[Path] = (),
        references: Sequence[tuple[str, str]] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        content = {"name": name, "kind": kind, "aliases": aliases, "references": references, "metadata": metadata}
        self._send("log_artifact", files=[str(file.absolute()) for file in files], **content)

    def log_line(self, text: str) -> None:
        self._send("log_line", text=text)

    def finish(self, timeout: float = FINISH_SECONDS) -> None:
        """Close the run; data that is not sent in time stays on disk, for `wandb sync`."""
        if self.process is None:
            return
        self._send("finish")
        self.messages.put(None)
        timeout = min(timeout, self.timeout) + EXIT_SECONDS
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.print_line(f"warning: W&B has not ended after {timeout:.0f} s; its data is in {self.folder / 'wandb'}")
            kill_children(self.process.pid)
            self.process.kill()
        for thread in self._threads:
            thread.join(1)
        self.process = None

    def _send(self, method: str, **arguments: Any) -> None:
        if not self.closed:
            self.messages.put({"method": method, **arguments})

    def _write(self, process: subprocess.Popen[str]) -> None:
        """Write messages to the process until it is closed or has ended; later messages are dropped."""
        assert process.stdin is not None
        with suppress(OSError, ValueError):  # the process has ended and printed the reason
            while message := self.messages.get():
                process.stdin.write(json.dumps(message, default=str) + "\n")
                process.stdin.flush()
            process.stdin.close()
        self.closed = True

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Print the replies of the process; stop the training if one requests that."""
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError, TypeError, KeyError):  # not a reply of `Session`
                reply = json.loads(line)
                self.print_line(reply["print"])
                if reply.get("stop"):
                    os.kill(os.getpid(), signal.SIGTERM)
