"""The newest rows of a W&B run: none is lost, and none is logged twice, if all processes are killed at once."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest

from tests import wandb_server
from tests.wandb_files import read, runs
from utils.background import kill_children
from utils.tracking.wandb import WandbTracker
from utils.tracking.wandb_rows import KEPT_ROWS, LOG_BLOCK_BYTES, RecentRows, Row, history

RUN = {"project": "p", "id": "abc"}


def row(step: int) -> Row:
    return Row({"step": step, "step/loss": 0.5}, step, "step")


def test_rows_outlive_the_process(tmp_path: Path) -> None:
    """Those of another run, and what was partly written, are ignored."""
    file = tmp_path / "rows"
    RecentRows(file, "other").add(row(9))
    rows = RecentRows(file, "abc")
    rows.add(row(1))
    file.write_text(file.read_text() + '\n["abc", {"step": 2')
    rows = RecentRows(file, "abc")
    rows.add(row(3))
    assert RecentRows(file, "abc").rows == [row(1), row(3)]
    rows.clear()
    assert RecentRows(file, "abc").rows == []


def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    rows = RecentRows(tmp_path / "rows", "abc")
    for step in range(3 * KEPT_ROWS):
        rows.add(row(step))
    kept = RecentRows(tmp_path / "rows", "abc").rows
    assert kept[-1] == row(3 * KEPT_ROWS - 1)
    assert KEPT_ROWS <= len(kept) <= 2 * KEPT_ROWS
    assert kept == [row(step) for step in range(3 * KEPT_ROWS - len(kept), 3 * KEPT_ROWS)]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    rows = RecentRows(tmp_path / "nowhere" / "rows", "abc")
    rows.add(row(1))
    rows.clear()


def start(folder: Path) -> WandbTracker:
    tracker = WandbTracker(folder, RUN, print)
    tracker.store_init_configuration({})
    return tracker


def kill(tracker: WandbTracker, folder: Path, rows: int) -> None:
    """Kill the tracker's processes once they have taken this many rows."""
    end = time.monotonic() + 60
    while len(RecentRows(folder / ".wandb_rows.jsonl", "abc").rows) < rows:
        assert time.monotonic() < end
        time.sleep(0.05)
    process = tracker.process
    assert process
    psutil.Process(process.pid).suspend()  # else it would close the run once its children are gone
    kill_children(process.pid)
    process.kill()
    process.wait()


@pytest.mark.parametrize("online", [False, True])
def test_everything_is_killed_at_once(online: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows are in W&B's file, in blocks of 32 KiB, others are not."""
    pytest.importorskip("wandb")
    count = 300
    with wandb_server.serve() if online else nullcontext() as server:
        monkeypatch.setenv("WANDB_MODE", "online" if online else "offline")
        if server:
            monkeypatch.setenv("WANDB_BASE_URL", server.address)
            monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        killed = start(tmp_path)
        for step in range(1, count + 1):
            killed.log(row(step).values, step=step)
        killed.log({"epoch": 1, "val/obj_loss": 0.25}, step=count)
        kill(killed, tmp_path, count + 1)
        (file,) = runs(tmp_path)
        assert file.stat().st_size % LOG_BLOCK_BYTES == 0
        before = [values for values in history(file) if "step" in values]
        assert 0 < len(before) < count
        continued = start(tmp_path)
        continued.log(row(count).values, step=count)  # by the resumed training; it was logged before
        continued.log(row(count + 1).values, step=count + 1)
        continued.finish()
        sent = server.rows if server else [values for file in runs(tmp_path) for values in read(file).rows]
    assert [values["step"] for values in sent if "step" in values] == list(range(1, count + 2))
    assert [values["epoch"] for values in sent if "epoch" in values] == [1]
    assert not (tmp_path / ".wandb_rows.jsonl").exists()
    assert json.loads((tmp_path / ".wandb.json").read_text())["last"] == {"step": count + 1, "epoch": 1}
