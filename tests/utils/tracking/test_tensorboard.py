"""The tracker of TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.tracking.tensorboard import TensorBoardTracker


def test_a_failure_of_tensorboard_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warnings: list[str] = []
    tracker = TensorBoardTracker(tmp_path / "file", "x", warnings.append)
    tracker.store_init_configuration({"a": 1})
    tracker.log({"step": 1, "step/loss": 0.5}, step=1)
    tracker.finish()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: TensorBoard has failed (")
    assert tracker.tracker is None


def test_the_writer_is_there_once_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a user who asks for it at once."""
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    class SlowWriter(tensorboard.SummaryWriter):  # type: ignore[misc, name-defined]
        def __init__(self, folder: str) -> None:
            time.sleep(0.2)
            super().__init__(folder)

    monkeypatch.setattr(tensorboard, "SummaryWriter", SlowWriter)
    tracker = TensorBoardTracker(tmp_path, "x", print)
    tracker.store_init_configuration({"a": 1})
    assert isinstance(tracker.tracker, SlowWriter)
    tracker.finish()


def log_steps(folder: Path, steps: range) -> None:
    warnings: list[str] = []
    tracker = TensorBoardTracker(folder, "x", warnings.append)
    tracker.store_init_configuration({"a": 1})
    for step in steps:
        tracker.log({"step": step, "step/loss": 0.5}, step=step)
    tracker.finish()
    assert warnings == []


def test_a_step_whose_position_was_not_stored_is_logged_once(tmp_path: Path) -> None:
    """The process is killed after it has written a step to the event file and before it has stored the position."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    position = tmp_path / ".tensorboard.json"
    log_steps(tmp_path, range(1, 3))
    log_steps(tmp_path, range(2, 4))
    stored = position.read_text()
    (events,) = [file for file in tmp_path.glob("events*") if file.name in stored]
    length = events.stat().st_size
    log_steps(tmp_path, range(3, 5))
    (last,) = [file for file in tmp_path.glob("events*") if file.name in position.read_text()]
    with events.open("ab") as file:  # as if this process had logged step 4, and stored step 3
        file.write(last.read_bytes()[-60:])
    last.unlink()
    position.write_text(stored)
    log_steps(tmp_path, range(3, 6))
    assert events.stat().st_size == length
    scalars = accumulator.EventAccumulator(str(tmp_path), {"scalars": 0}).Reload().Scalars("step/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5]


def test_epochs_that_a_killed_process_did_not_log(tmp_path: Path) -> None:
    """results.csv has them; a new run has none."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, range(1, 3))
    (tmp_path / "results.csv").write_text("epoch,val/box_loss\n0,0.5\n")
    log_steps(tmp_path, range(3, 4))
    log_steps(tmp_path, range(4, 5))
    scalars = accumulator.EventAccumulator(str(tmp_path), {"scalars": 0}).Reload().Scalars
    assert [(event.step, event.value) for event in scalars("val/box_loss")] == [(2, 0.5)]
    assert [event.value for event in scalars("epoch")] == [1]


def test_pictures_are_the_files(tmp_path: Path) -> None:
    """They are not encoded again, which would cost the training process more than the training of many a batch."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    files = {"pictures/a": tmp_path / "a.jpg", "pictures/b": tmp_path / "b.png"}
    for file in files.values():
        cv2.imwrite(str(file), np.full((20, 30, 3), 200, np.uint8))
    warnings: list[str] = []
    tracker = TensorBoardTracker(tmp_path, "x", warnings.append)
    tracker.store_init_configuration({"a": 1})
    tracker.log_pictures(files, 7)
    tracker.finish()
    assert warnings == []
    events = accumulator.EventAccumulator(str(tmp_path), {"images": 0}).Reload()
    assert {*events.Tags()["images"]} == {*files}
    for key, file in files.items():
        (image,) = events.Images(key)
        assert (image.step, image.width, image.height) == (7, 30, 20)
        assert image.encoded_image_string == file.read_bytes()
