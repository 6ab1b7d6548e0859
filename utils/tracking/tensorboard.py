"""The tracker for TensorBoard: event files in the run folder, written by a thread. Made by `RunLog`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.background import Background
from utils.tracking.log_position import LogPosition, earlier_epochs
from utils.tracking.tracker import FINISH_SECONDS, TENSORBOARD, Print, Tracker, axis_of

EVENT_FILES = "events.out.tfevents*"  # as TensorBoard names them
TENSORBOARD_POSITION_FILE = ".tensorboard.json"  # file in the run folder


class TensorBoardTracker(Tracker):
    """Writes event files into `folder` for the run with id `run`.

    Args:
        print_line: prints a warning
    """

    name = TENSORBOARD

    def __init__(self, folder: Path, run: str, print_line: Print) -> None:
        super().__init__()
        self.folder, self._position = folder, LogPosition(folder / TENSORBOARD_POSITION_FILE, run)
        self._background = Background("TensorBoard has failed", print_line)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self._writer

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Open the event file and log the settings as a text."""
        with suppress(Exception):  # import it here: loader processes must not be forked during an import
            importlib.import_module("torch.utils.tensorboard")
            importlib.import_module("PIL.Image").preinit()  # imports Pillow's formats
        earlier = earlier_epochs(self.folder)
        self._background.do(lambda: self._open(earlier))
        text = "".join(f"    {line}\n" for line in json.dumps(values, indent=1, default=str).splitlines())
        self._background.do(lambda: self._writer.add_text("settings", text))

    def _open(self, epochs: Sequence[Mapping[str, float]]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._position.cut_log_file()
        earlier = {*self.folder.glob(EVENT_FILES)}
        self._writer = SummaryWriter(str(self.folder))
        self._position.log_file = next(iter({*self.folder.glob(EVENT_FILES)} - earlier), None)
        self._writer.flush()
        self._position.store()
        for lost, step in self._position.missed(epochs):
            self._write_scalars(lost, step)

    def log(self, values: Mapping[str, Any], step: int | None = None, **_: Any) -> None:
        self._background.do(lambda: self._write_scalars(dict(values), step))

    def _write_scalars(self, values: Mapping[str, Any], step: int | None) -> None:
        axis = axis_of(values)
        if not self._position.logged_before(axis, values[axis]):
            for key, value in values.items():
                self._writer.add_scalar(key, value, step)
            self._writer.flush()
            self._position.advance(axis, values[axis])

    def log_pictures(self, files: Mapping[str, Path], step: int) -> None:
        self._background.do(lambda: self._write_pictures(dict(files), step))

    def _write_pictures(self, files: Mapping[str, Path], step: int) -> None:
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary

        for key, file in files.items():
            with Image.open(file) as opened:  # reads the size only
                width, height = opened.size
            # The file is logged unchanged: `add_image` would encode it again, as PNG, in the training process.
            picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.read_bytes())
            summary = Summary(value=[Summary.Value(tag=key, image=picture)])
            writer: Any = self._writer.file_writer
            writer.add_summary(summary, step)
        self._writer.flush()
        self._position.store()

    def finish(self, timeout: float = FINISH_SECONDS) -> None:
        self._background.do(lambda: self._writer.close())
        self._background.finish(min(timeout, FINISH_SECONDS))
