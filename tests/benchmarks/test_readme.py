"""`make readme`: picture, caption and table of the README from one run."""

from __future__ import annotations

import difflib
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest

from benchmarks.readme import CURVES_HEIGHT, PICTURE, Outcome, main, picture, with_outcome
from tests.curves import rows
from utils.files import ROOT

OUTCOME = Outcome(epochs=13, images=640, imgsz=160, minutes=2.68, cores=2, map50=0.83549, map50_95=0.52841)
ROW = (
    "| built-in job, 640 drawn images, 160 px, from scratch: mAP50, mAP50-95; minutes on 2 CPU cores "
    "| 0.835, 0.528; 2.7 | - |"
)


def test_only_the_caption_and_the_row_change() -> None:
    before = (ROOT / "README.md").read_text(encoding="utf-8")
    after = with_outcome(before, OUTCOME)
    assert after.count(ROW) == 1
    caption = "13 epochs of 640 drawn images in 2.7 minutes on 2 CPU cores: mAP50 0.835, mAP50-95 0.528."
    assert " ".join(after.split()).count(caption) == 1
    marks = [line[0] for line in difflib.ndiff(before.splitlines(), after.splitlines())]
    assert marks.count("+") <= 3  # two lines of the caption and the row
    assert with_outcome(after, OUTCOME) == after
    other = with_outcome(after, OUTCOME._replace(map50=0.5, epochs=1))
    assert other.count("0.500") == 2
    assert "1 epoch of 640" in other


def test_a_readme_of_another_form_is_not_written() -> None:
    with pytest.raises(AssertionError, match=r"README\.md has another form"):
        with_outcome("# Lockstep\n", OUTCOME)


def test_the_picture_has_the_curves_above_the_images(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "results.png"), np.full((842, 1600, 3), 200, np.uint8))
    cv2.imwrite(str(tmp_path / "val_batch0_pred.jpg"), np.full((1360, 1296, 3), 50, np.uint8))
    drawn = picture(tmp_path)
    assert drawn.shape == (CURVES_HEIGHT + round(320 * 1600 / 1292), 1600, 3)
    assert drawn[:CURVES_HEIGHT].mean() == 200
    assert abs(drawn[CURVES_HEIGHT:].mean() - 50) < 1


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
