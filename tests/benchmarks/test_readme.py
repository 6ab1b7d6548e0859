"""`make readme`: picture, caption and table of the README from one run."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

import cv2
import pytest

from benchmarks.readme import CURVES_HEIGHT, PICTURE, Outcome, main, with_outcome
from tests.curves import rows
from utils.files import ROOT

OUTCOME = Outcome(epochs=13, images=640, imgsz=160, minutes=2.68, cores=2, map50=0.83549, map50_95=0.52841)


def test_only_the_caption_and_the_row_change() -> None:
    before = (ROOT / "README.md").read_text(encoding="utf-8")
    after = with_outcome(before, OUTCOME)
    marks = [line[0] for line in difflib.ndiff(before.splitlines(), after.splitlines())]
    assert 0 < marks.count("+") <= 3  # two lines of the caption and the row
    assert with_outcome(after, OUTCOME) == after
    assert with_outcome(after, OUTCOME._replace(map50=0.5)).count("0.500") == 2


@pytest.mark.long
def test_one_run_makes_all_three(tmp_path: Path) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    main(["--root", str(tmp_path), "--epochs", "1", "--imgsz", "64", "--device", "cpu"])
    (row,) = rows(tmp_path / "runs" / "readme" / "exp")
    scores = [f"{row[f'metrics/{name}']:.3f}" for name in ("mAP_0.5", "mAP_0.5:0.95")]
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"| {', '.join(scores)}; " in readme
    assert f"mAP50 {scores[0]}, mAP50-95 {scores[1]}." in " ".join(readme.split())
    assert cv2.imread(str(tmp_path / PICTURE)).shape[0] > CURVES_HEIGHT
