"""The tracker of Weights & Biases: it sends messages to a process (wandb_process.py) and never waits for it.

Made by utils/tracking/requested.py. Nothing here imports the package wandb.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utils.tracking.process_tracker import ProcessTracker
from utils.tracking.tracker import AXES, FINISH_SECONDS, WANDB, Print

UPLOAD_SECONDS = 900.0  # time limit of the W&B process to send the rest at the end of a run that uploads artifacts


class WandbTracker(ProcessTracker):
    """A W&B run in another process.

    folder: of the run. run: arguments of `wandb.init` (project, entity, group, tags, name, id, dir, ...). print_line:
    prints a line on the console. timeout: seconds to send the rest at the end of the run. alerts: whether W&B sends an
    alert if the run ends by an error. inputs: names of artifacts that the run uses, if they exist.
    """

    name, title = WANDB, "W&B"
    module = "utils.tracking.wandb_process"

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        print_line: Print,
        timeout: float = FINISH_SECONDS,
        alerts: bool = False,
        inputs: Sequence[str] = (),
    ) -> None:
        arguments = {"run": run, "axes": AXES, "pid": os.getpid(), "alerts": alerts, "inputs": inputs}
        super().__init__(folder, arguments, print_line, timeout)

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
        is_input: bool = False,
        link: str = "",
    ) -> None:
        paths = [str(file.absolute()) for file in files]
        named = {"name": name, "kind": kind, "aliases": aliases, "is_input": is_input, "link": link}
        self._send("log_artifact", files=paths, references=references, metadata=metadata, **named)

    def log_documents(self, documents: Mapping[str, str], step: int, epoch: int) -> None:
        self._send("log_documents", documents=documents, step=step, epoch=epoch)

    def log_line(self, text: str) -> None:
        self._send("log_line", text=text)

    def where_the_rest_is(self) -> str:
        return f"its data is in {Path(self.arguments['run'].get('dir') or self.folder) / 'wandb'}"
