"""A run: its folder, log, files and shared work. Only here is it decided what the main process does alone."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cv2
import numpy as np
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from torch import nn

from utils.checkpoint import write_weights
from utils.console import Bar
from utils.files import numbered_folder, replacing

T = TypeVar("T")
BATCHES = 2  # how many of its first batches a process is listed with


class Run:
    """One training or validation run. Every process calls the same; the main process alone writes and speaks."""

    def __init__(self, accelerator: Accelerator, project: str, name: str, exist_ok: bool) -> None:
        self.accelerator = accelerator
        self.main = accelerator.is_main_process
        # The name is agreed, not the path: another machine may keep its runs elsewhere.
        self.folder = Path(project) / self.agree(
            numbered_folder(Path(project), name, exist_ok).name if self.main else ""
        )

    def say(self, *lines: str) -> None:
        """Print lines, once."""
        if self.main:
            print(*lines, sep="\n", flush=True)

    def bar(self, title: str, images: int) -> Bar:
        """A progress bar that only the main process draws."""
        return Bar(title, images, self.main)

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """settings.yaml: every resolved setting."""
        if self.main:
            with replacing(self.folder / "settings.yaml") as file:
                file.write(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True).encode())

    def log(self, row: Mapping[str, float | int | None]) -> None:
        """Append a row to results.csv: 9 significant digits, empty where nothing was measured."""
        if not self.main:
            return
        file = self.folder / "results.csv"
        first = row["epoch"] == 0 or not file.exists()
        with file.open("w" if first else "a", encoding="utf-8") as out:
            if first:
                out.write(",".join(row) + "\n")
            out.write(",".join("" if value is None else f"{value:.9g}" for value in row.values()) + "\n")

    def save(self, name: str, model: nn.Module, **described: Mapping[Any, Any]) -> None:
        """weights/`name`: the model and its description, as `write_weights` takes it."""
        if self.main:
            write_weights(self.folder / "weights" / name, model, **described)

    def plot(self, name: str, picture: np.ndarray) -> None:
        """Write a picture, uint8 (h, w, 3) BGR, into the run folder."""
        if self.main:
            encoded = cv2.imencode(Path(name).suffix, picture)[1]
            with replacing(self.folder / name) as file:
                file.write(encoded.tobytes())

    def agree(self, value: T) -> T:
        """The main process's value, on every process, so that all decide alike."""
        return broadcast_object_list([value])[0]

    def align(self, model: nn.Module) -> None:
        """Give every process the main process's parameters and buffers."""
        broadcast(model.state_dict())

    def processes(self, batches: Any) -> list[str]:
        """A line for every process: host, rank, device, and the images of its first batches, by number.

        batches: an iterable of lists of draws.
        """
        own = self.accelerator
        images = "; ".join(" ".join(str(draw.image) for draw in batch) for batch in itertools.islice(batches, BATCHES))
        host = socket.gethostname()
        return self.gather(
            [f"process {own.process_index} of {own.num_processes} on {host}, {own.device}: images {images}"]
        )

    def share(self, items: Sequence[T]) -> list[T]:
        """This process's part of `items`: dealt out one by one, each to one process."""
        return list(items[self.accelerator.process_index :: self.accelerator.num_processes])

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, on every process."""
        return gather_object(items)
