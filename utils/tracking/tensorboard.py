"""The tracker for TensorBoard: event files in the run folder, written by a thread. Made by `RunLog`."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from utils.tracking.accelerate_tracker import START_SECONDS, AccelerateTracker
from utils.tracking.tracker import TENSORBOARD, Print, axis_of

EVENT_FILES = "events.out.tfevents*"  # as TensorBoard names them


class TensorBoardTracker(AccelerateTracker):
    """Writes event files into `folder` for the run with id `run`.

    Args:
        print_line: prints a warning
    """

    title = "TensorBoard"

    def __init__(self, folder: Path, run: str, print_line: Print) -> None:
        super().__init__(TENSORBOARD, folder, {"id": run}, print_line)

    @property
    def tracker(self) -> Any:
        """The SummaryWriter, once the event file is open; None if it is not."""
        self._started.wait(START_SECONDS)
        return self.inner

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Open the event file and log the settings as a text."""
        with suppress(Exception):  # import it here: loader processes must not be forked during an import
            importlib.import_module("torch.utils.tensorboard")
            importlib.import_module("PIL.Image").preinit()  # imports Pillow's formats
        super().store_init_configuration(values)

    def log_pictures(self, files: Mapping[str, Path], step: int) -> None:
        self._do(lambda: self._write_pictures(dict(files), step))

    # In the thread

    def _start(self, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._position = self._earlier_position()
        self._position.cut_log_file()
        earlier = {*self.folder.glob(EVENT_FILES)}
        self.inner = SummaryWriter(str(self.folder))
        self._position.log_file = next(iter({*self.folder.glob(EVENT_FILES)} - earlier), None)
        self.inner.flush()
        self._position.store()
        for lost, step in self._position.missed(self._earlier):
            self._log(lost, step)
        text = "".join(f"    {line}\n" for line in json.dumps(config, indent=1, default=str).splitlines())
        self.inner.add_text("settings", text)

    def _log(self, values: dict[str, Any], step: int) -> None:
        axis = axis_of(values)
        if not self._position.logged_before(axis, values[axis]):
            for key, value in values.items():
                self.inner.add_scalar(key, value, step)
            self.inner.flush()
            self._position.advance(axis, values[axis])

    def _write_pictures(self, files: Mapping[str, Path], step: int) -> None:
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary

        for key, file in files.items():
            with Image.open(file) as opened:  # reads the size only
                width, height = opened.size
            # The file is logged unchanged: `add_image` would encode it again, as PNG, in the training process.
            picture = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=file.read_bytes())
            summary = Summary(value=[Summary.Value(tag=key, image=picture)])
            self.inner.file_writer.add_summary(summary, step)
        self.inner.flush()
        self._position.store()

    def _close(self) -> None:
        self.inner.close()
