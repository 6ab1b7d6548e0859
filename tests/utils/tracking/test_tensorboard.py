"""The tracker of TensorBoard."""

from __future__ import annotations

from pathlib import Path

from utils.tracking.tensorboard import TensorBoardTracker


def test_tensorboard_that_fails_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warnings: list[str] = []
    tracker = TensorBoardTracker(tmp_path / "file", "x", warnings.append)
    tracker.store_init_configuration({"a": 1})
    tracker.log({"step": 1, "step/loss": 0.5}, step=1)
    tracker.finish()
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: TensorBoard has failed (")
