"""`make gpu` and `make gpu2`, rehearsed on the CPU on a machine without the packages that a fresh one may lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_data, gpu_report
from benchmarks.gpu_parts import steps
from benchmarks.gpu_parts.measuring import Machine
from benchmarks.gpu_parts.steps import Timed
from benchmarks.gpu_report import MARKER, PAIR_PARTS, PARTS, Part, run_part
from tests.conftest import NOT_HERE
from tests.making import write_image
from utils.files import ROOT

MINUTES, PART_MINUTES = 30, 8  # at most, of all parts and of one


def report(folder: Path, *flags: str, hide: bool = True) -> list[dict[str, Any]]:
    """Rehearse parts, and return the rows. hide: packages that a fresh machine may lack."""
    hiding = folder / "hiding"
    hiding.mkdir()
    code = f"import sys; sys.path.append({str(ROOT)!r})\nfrom tests.absent import hide\nhide()\n"
    (hiding / "sitecustomize.py").write_text(code)
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--device", "cpu", "--quick", "--carried", str(folder)]
    environment = {**os.environ, **({"PYTHONPATH": str(hiding)} if hide else {})}
    done = subprocess.run([*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "rehearsal.md").read_text().startswith(MARKER)
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("part", PARTS)
def test_the_parts_on_the_cpu(part: str, tmp_path: Path) -> None:
    rows = report(tmp_path, "--part", part)
    assert len(rows[0]) > 5
    if part == "steps":
        assert rows[1]["TFLOP"] == pytest.approx(3 * 4 * 0.0415e-3, rel=0.1)  # 4 images; backward takes twice as much
    if part == "determinism":
        assert (rows[0]["a second run"], rows[0]["killed and resumed"]) == ("identical", "identical")
    if part == "parity":
        assert rows[0]["gradients"] == rows[0]["loss"] == 0.0
    if part == "logical":
        assert rows[0]["two processes"] == rows[1]["bytes"] == rows[2]["bytes"] == "identical"


@pytest.mark.long
def test_dfine_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason=f"{NOT_HERE}examples/dfine/requirements-dfine.txt")
    equal, times = report(tmp_path, "--part", "dfine", hide=False)
    assert (equal["a second run"], equal["killed and resumed"]) == ("identical", "identical")
    assert times["deterministic, ms"] > 0


@pytest.mark.parametrize(("ratio", "fails"), [(1.2, False), (1.3, True)])
def test_logical_processes_that_cost_too_much(ratio: float, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([Timed(1.0, 1.0, 0.5), Timed(ratio, 1.0, 0.5)])
    monkeypatch.setattr(steps, "timed", lambda *given: next(times))
    with pytest.raises(SystemExit, match=r"takes 1\.30 times") if fails else nullcontext():
        steps.cost(Machine("0", True, Path(), Path()))


@pytest.mark.long
@pytest.mark.parametrize("part", PAIR_PARTS)
def test_the_parts_of_two_gpus_over_gloo(part: str, tmp_path: Path) -> None:
    rows = report(tmp_path, "--pair", "--part", part, hide=part != "zero")
    assert len(rows[0]) > 5
    if part == "algorithms":
        assert [row["ring and devices exchanged"] for row in rows] == 3 * ["identical"]
        assert rows[2]["ring and one device"] == "identical"
    if part in ("curves", "zero"):
        assert rows[0]["losses"] < 1e-4


def test_the_parts_fit_their_time() -> None:
    for parts in (PARTS, PAIR_PARTS):
        assert sum(part.seconds for part in parts.values()) <= 60 * MINUTES
        assert max(part.seconds for part in parts.values()) <= 60 * PART_MINUTES


@pytest.mark.parametrize(
    ("more", "problem"), [("", ""), ("sys.exit('broken')", "a line / broken"), ("time.sleep(60)", "limit of 3 s")]
)
def test_rows_are_kept_whatever_happens(
    more: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "benchmarks" / "gpu_parts" / "made.py"
    module.parent.mkdir(parents=True)
    module.write_text(f"import sys, time\nprint('ROW {{}}', flush=True)\nprint('a line', flush=True)\n{more}")
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    rows, actual = run_part("part", Part("made", 3, ""), [], 3, tmp_path / "log")
    assert rows == [{}]
    assert problem in actual
    assert bool(problem) == bool(actual)


def test_data_are_gathered(tmp_path: Path) -> None:
    shared, folder, peer = tmp_path / "shared", tmp_path / "carried", tmp_path / "yolov5"
    write_image(shared / "data" / "coco128" / "images" / "train" / "a.jpg", None, "0 0.5 0.5 0.2 0.2")
    for file in (shared / "weights" / "yolov5n.pt", peer / "models" / "yolo.py", peer / "picture.jpg"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    flags = ["--folder", str(folder), "--shared", str(shared), "--yolov5", str(peer)]
    for _ in range(2):
        gpu_data.main([*flags, "--ultralytics", str(tmp_path / "none")])
    files = ["photos/images/train/a.jpg", "photos/labels/train/a.txt", "weights/yolov5n.pt", "yolov5/models/yolo.py"]
    assert sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()) == files
