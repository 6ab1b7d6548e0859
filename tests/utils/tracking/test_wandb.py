"""The tracker of W&B: artifacts, the key, and lost epochs; tests/test_tracking.py has whole runs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.wandb_files import read, runs
from tests.wandb_server import serve
from utils.files import ROOT
from utils.summary import Box, Example
from utils.tracking import accelerate_tracker
from utils.tracking.wandb import CONNECT_SECONDS, WandbTracker, connect_timeout

wandb = pytest.importorskip("wandb")
RUN = {"project": "p", "id": "abc", "notes": "why"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Make wandb read its settings anew."""
    wandb.teardown()
    yield
    wandb.teardown()


def test_a_failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate_tracker, "FAIL_SECONDS", 60.0)  # on a busy machine W&B may take more than 3 s
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(tmp_path, RUN, print)
    tracker.store_init_configuration({"data": "\udcc3\udcbc\udcff"})  # wandb refuses such text
    tracker.log({"step": 1, "metrics/a.b": 0.5}, step=1)
    assert isinstance(tracker.tracker, wandb.Run)
    tracker.fail("20 steps were not finite")
    wandb.teardown()  # its service may write the end of the file a moment later
    (file,) = runs(tmp_path)
    run = read(file)
    assert (run.code, run.notes) == (1, "why")
    assert run.rows[0]["metrics/a.b"] == 0.5


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_prints_no_traceback_of_wandbs_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The lines of its debug.log are lost without a word."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = WandbTracker(tmp_path, RUN, print)
    tracker.store_init_configuration({})
    assert isinstance(tracker.tracker, wandb.Run)  # waits for the start
    logger = logging.getLogger("wandb")
    files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    full = Path("/dev/full").open("w")  # noqa: SIM115  # closing it would raise an error for what it did not take
    before = [file.setStream(full) for file in files]
    logger.info("a line of wandb's")
    assert before
    assert "Traceback" not in capfd.readouterr().err
    for file, stream in zip(files, before, strict=True):
        with suppress(OSError):  # of the line that the full disk did not take
            file.setStream(stream)
        file.stream = stream
    tracker.finish()


def test_epochs_that_a_killed_process_lost_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """results.csv has them; what W&B has is not logged again."""
    monkeypatch.setenv("WANDB_MODE", "offline")

    def logged(first: int, last: int) -> None:
        tracker = WandbTracker(tmp_path, RUN, print)
        tracker.store_init_configuration({})
        for epoch in range(first, last):
            tracker.log({"epoch": epoch + 1, "val/box_loss": epoch / 10}, step=10 * epoch)
        tracker.finish()
        wandb.teardown()

    logged(0, 2)
    (tmp_path / "results.csv").write_text("epoch,val/box_loss,extra\n" + "".join(f"{k},{k / 10},\n" for k in range(4)))
    time.sleep(1.1)  # W&B names folders by the second
    logged(3, 6)
    rows = [row for file in runs(tmp_path) for row in read(file).rows]
    assert [(row["epoch"], row["val/box_loss"]) for row in rows] == [(k + 1, k / 10) for k in range(6)]


def test_pictures_and_tables_are_logged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the epochs that a resumed run repeats."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    confusion = "true,cat,background\ncat,1,0\nbackground,0,0\n"
    documents = {"classes.csv": "class,AP\ncat,0.5\n", "confusion_matrix.csv": confusion}
    for first, last in ((0, 2), (1, 3)):
        tracker = WandbTracker(tmp_path, RUN, print)
        tracker.store_init_configuration({})
        for epoch in range(first, last):
            tracker.log({"epoch": epoch + 1, "val/box_loss": 0.1}, step=10 * epoch)
            tracker.log_documents(documents, 10 * epoch, epoch)
            example = Example("a.jpg", 0, (8, 8), [Box(0, None, (0, 0, 1, 1))], [])
            shown = lambda image, side: np.zeros((side, side, 3), np.uint8)  # noqa: E731
            tracker.log_examples("examples/validation", [example], shown, ["cat"], 10 * epoch, epoch)
        tracker.finish()
        wandb.teardown()
        time.sleep(1.1)  # W&B names folders by the second
    rows = [row for file in runs(tmp_path) for row in read(file).rows]
    for key in ("tables/classes/path", "examples/validation/captions", "charts/confusion_matrix_table/path"):
        assert sum(key in row for row in rows) == 3, key


def test_a_process_that_was_killed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B has a folder of it with an empty file, so it has none of the epochs."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    part = tmp_path / "wandb" / "offline-run-20260101_000000-abc"
    part.mkdir(parents=True)
    (part / "run-abc.wandb").write_bytes(b":W&B\xfe\xe1\0")
    (tmp_path / "results.csv").write_text("epoch,val/box_loss\n0,0.5\n")
    tracker = WandbTracker(tmp_path, RUN, print)
    tracker.store_init_configuration({})
    tracker.finish()
    wandb.teardown()
    (own,) = (file for file in runs(tmp_path) if file.parent != part)
    assert [(row["epoch"], row["val/box_loss"]) for row in read(own).rows] == [(1, 0.5)]


def test_lineage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data set is an input of the run, the weights are its output."""
    pytest.importorskip("wandb")
    printed: list[str] = []
    for name in ("a.jpg", "best.pt"):
        (tmp_path / name).write_text(name)
    with serve() as server:
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        run = {"project": "p", "id": "abc", "job_type": "train"}
        tracker = WandbTracker(tmp_path, run, printed.append, inputs=["run_xyz_model:best"])
        tracker.store_init_configuration({})
        references = [(str(tmp_path / "a.jpg"), "train/a.jpg")]
        tracker.log_artifact("cats", "dataset", ["latest"], references=references, is_input=True)
        files, content = [tmp_path / "best.pt"], {"metrics": {"mAP_0.5": 0.5}}
        tracker.log_artifact("run_abc_model", "model", ["best"], files=files, metadata=content)
        tracker.finish()
    assert printed == [f"W&B: {server.address}/me/p/runs/abc"]
    types = [artifact["artifactTypeName"] for artifact in server.artifacts]
    assert sorted(types) == ["dataset", "model"]
    assert server.inputs == [f"a{types.index('dataset') + 1}"]
    model = server.artifacts[types.index("model")]
    assert {alias["alias"] for alias in model["aliases"]} >= {"best"}
    assert json.loads(model["metadata"]) == content
    assert server.files["artifacts/best.pt"] == b"best.pt"


# The key and the server


HAS_KEY = """
import json, os, sys
from utils.tracking.wandb import has_key
from wandb.sdk.lib import wbauth
for netrc in json.loads(sys.argv[1]):
    open(os.environ["NETRC"], "w").write(netrc)
    os.chmod(os.environ["NETRC"], 0o600)
    print(has_key(), flush=True)
    getattr(wbauth, "unauthenticate_session", lambda: None)()
"""


def keys_found(folder: Path, *netrc: str, **variables: str) -> list[str]:
    """Return whether wandb finds a key, for each content of ~/.netrc; nobody answers at the server."""
    pytest.importorskip("wandb")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    ended = subprocess.run(
        [sys.executable, "-c", HAS_KEY, json.dumps(netrc)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        env={**kept, "HOME": str(folder), "NETRC": str(folder / "netrc"), "WANDB_BASE_URL": SERVER, **variables},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


SERVER = "http://127.0.0.1:9"


def test_the_key_is_found(tmp_path: Path) -> None:
    """It is wandb that looks for it, without asking anybody."""
    key = "password " + "0123456789" * 4
    damaged, elsewhere = "machine", f"machine elsewhere.org login user {key}"
    known = f"machine 127.0.0.1:9 login user {key}"
    began = time.monotonic()
    assert keys_found(tmp_path, "", damaged, elsewhere, known) == ["False", "False", "False", "True"]
    assert keys_found(tmp_path, "", WANDB_API_KEY=key.split()[1]) == ["True"]
    assert time.monotonic() - began < 30


def test_the_time_to_reach_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert connect_timeout() == CONNECT_SECONDS
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "7")
    assert connect_timeout() == 7
