"""`make gpu` and `make gpu2`, rehearsed on the CPU on a machine without the packages that a fresh one may lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_data import LIMIT_MIB, MIB, gather, size
from benchmarks.gpu_report import MARKER, PAIR_PARTS, PARTS, Part, append, cell, run_part, section
from tests.making import write_image
from utils.files import ROOT

MINUTES, PART_MINUTES = 26, 8  # at most, of all parts and of one


def report(folder: Path, *flags: str, hide: bool = True) -> tuple[str, list[dict[str, Any]]]:
    """Rehearse parts; return the page and the rows. hide: packages that a fresh machine may lack."""
    hiding = folder / "hiding"
    hiding.mkdir(exist_ok=True)
    code = f"import sys; sys.path.append({str(ROOT)!r})\nfrom tests.absent import hide\nhide()\n"
    (hiding / "sitecustomize.py").write_text(code)
    command = [sys.executable, "-m", "benchmarks.gpu_report", "--device", "cpu", "--quick", "--carried", str(folder)]
    environment = {**os.environ, **({"PYTHONPATH": str(hiding)} if hide else {})}
    done = subprocess.run([*command, *flags], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    return (folder / "rehearsal.md").read_text(), rows


@pytest.mark.long
def test_a_cheap_part_on_the_cpu(tmp_path: Path) -> None:
    page, rows = report(tmp_path, "--part", "steps")
    assert page.startswith(MARKER)
    assert ": steps, " in page
    assert "no GPU (" in page
    assert {row["part"] for row in rows} == {"steps"}
    (peaks, *steps), costs = rows[:3], rows[3:]
    assert 0 < peaks["TFLOP/s, bf16"] < 100
    assert [row["settings"] for row in steps] == ["as it is", "contiguous"]
    assert all(row["ms"] > 0 for row in steps)
    assert 0 < steps[0]["share of peak FLOP/s"] < 1
    assert steps[0]["TFLOP"] == pytest.approx(3 * 4 * 0.0415e-3, rel=0.1)  # 4 images; backward takes twice as much
    assert [row["--logical-processes"] for row in costs] == ["not given", 1, 4]


@pytest.mark.long
@pytest.mark.parametrize("part", [name for name in PARTS if name != "steps"])
def test_other_parts_on_the_cpu(part: str, tmp_path: Path) -> None:
    _, rows = report(tmp_path, "--part", part)
    assert len(rows[0]) > 5
    if part == "determinism":
        assert (rows[0]["a second run"], rows[0]["killed and resumed"]) == ("identical", "identical")
    if part == "parity":
        assert rows[0]["gradients"] == rows[0]["loss"] == 0.0
    if part == "logical":
        assert rows[0]["two processes"] == "identical"


@pytest.mark.long
@pytest.mark.parametrize("part", PAIR_PARTS)
def test_the_parts_of_two_gpus_over_gloo(part: str, tmp_path: Path) -> None:
    _, rows = report(tmp_path, "--pair", "--part", part, hide=part != "zero")
    assert len(rows[0]) > 5
    if part in ("curves", "zero"):
        assert rows[0]["losses"] < 1e-4


def test_the_parts_fit_their_time() -> None:
    for parts in (PARTS, PAIR_PARTS):
        assert sum(part.seconds for part in parts.values()) <= 60 * MINUTES
        assert max(part.seconds for part in parts.values()) <= 60 * PART_MINUTES
        assert all((ROOT / "benchmarks" / "gpu_parts" / f"{part.module}.py").is_file() for part in parts.values())


PROGRAM = """
import sys, time
print('ROW {"table": "A", "x": 1}', flush=True)
print("a line", flush=True)
"""


@pytest.mark.parametrize(
    ("more", "problem"),
    [("", ""), ("sys.exit('broken')", "failed: a line / broken"), ("time.sleep(60)", "stopped at its limit of 3 s")],
)
def test_rows_are_kept_whatever_happens(
    more: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "benchmarks" / "gpu_parts" / "made.py"
    module.parent.mkdir(parents=True)
    module.write_text(PROGRAM + more)
    monkeypatch.setattr("benchmarks.gpu_report.ROOT", tmp_path)
    assert run_part(Part("made", 3, ""), [], {}) == ([{"table": "A", "x": 1}], problem)


def test_a_section_of_the_page(tmp_path: Path) -> None:
    rows = [{"table": "T", "a": 1.23456789, "b": "x|y"}, {"table": "T", "a": None, "c": 2}, {"table": "U", "d": 3}]
    text = section("steps", Part("steps", 1, "speed"), "2026-11-23 08:00", "a GPU", rows, "failed: no memory")
    assert "### 2026-11-23 08:00: steps, speed" in text
    assert "| a | b | c |\n|---|---|---|\n| 1.23457 | x/y | - |\n| - | - | 2 |" in text
    assert "U:\n\n| d |" in text
    assert "This part failed: no memory" in text
    page = tmp_path / "page.md"
    append(page, text)
    append(page, text)
    assert page.read_text().count("### 2026") == 2
    page.write_text("no marker")
    with pytest.raises(SystemExit, match="has no line"):
        append(page, text)
    assert cell(float("nan")) == "nan"


def test_the_page_has_the_marker_at_its_end_or_results_below() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text().count(MARKER) == 1


def test_data_are_gathered(tmp_path: Path) -> None:
    shared, folder = tmp_path / "shared", tmp_path / "carried"
    write_image(shared / "data" / "coco128" / "images" / "train" / "a.jpg", None, "0 0.5 0.5 0.2 0.2")
    (shared / "weights").mkdir()
    (shared / "weights" / "yolov5n.pt").write_bytes(b"weights")
    peer = tmp_path / "yolov5"
    (peer / "models").mkdir(parents=True)
    (peer / "models" / "yolo.py").write_text("")
    (peer / "picture.jpg").write_bytes(b"large")
    for _ in range(2):
        lines = gather(folder, shared, {"yolov5": peer, "ultralytics": tmp_path / "none"})
    assert sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()) == [
        "photos/images/train/a.jpg",
        "photos/labels/train/a.txt",
        "weights/yolov5n.pt",
        "yolov5/models/yolo.py",
    ]
    assert lines[-1] == f"ultralytics: none, {tmp_path / 'none'} is not there"
    assert 0 < size(folder) < LIMIT_MIB * MIB
