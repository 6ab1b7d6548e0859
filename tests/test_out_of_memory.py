"""A run on a device whose memory is too small; tests/utils/training/test_memory.py has the batch that fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import train
from utils.errors import UserError


def test_the_error_names_a_batch_size(small_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train_one_epoch(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(train, "train_one_epoch", train_one_epoch)
    job = {"data": small_data, "weights": "", "cfg": "yolov5n.yaml", "imgsz": 64, "workers": 0, "device": "cpu"}
    quiet = {"noautoanchor": True, "noplots": True, "log_with": "none", "project": tmp_path}
    with pytest.raises(UserError, match="--batch-size 4"):
        train.run(**job, **quiet, batch_size=8)
