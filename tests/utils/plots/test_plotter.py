"""Pictures are drawn in the background and never stop a run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np

from utils.plots.plotter import Plotter

RESULTS = "epoch,train/loss,val/loss\n0,1.5,1.25\n1,1,0.75\n"


def make_plotter(folder: Path) -> tuple[Plotter, list[str], dict[str, Path]]:
    warnings: list[str] = []
    drawn: dict[str, Path] = {}
    return Plotter(folder, warnings.append, drawn.update), warnings, drawn


def test_pictures_of_arrays(tmp_path: Path) -> None:
    plots, warnings, drawn = make_plotter(tmp_path)
    picture = np.full((20, 30, 3), 200, np.uint8)
    plots.draw(lambda: {"a.png": picture, "b.jpg": picture})
    assert plots.finish(10)
    assert (cv2.imread(str(tmp_path / "a.png")) == 200).all()
    assert cv2.imread(str(tmp_path / "b.jpg")).shape == (20, 30, 3)
    assert drawn == {name: tmp_path / name for name in ("a.png", "b.jpg")}
    assert warnings == []


def test_charts_of_the_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(RESULTS)
    (tmp_path / "old.png").write_bytes(b"")
    plots, warnings, drawn = make_plotter(tmp_path)
    time.sleep(0.01)
    plots.draw_charts()
    assert plots.finish(60)
    assert set(drawn) == {"results.png"}
    assert cv2.imread(str(tmp_path / "results.png")) is not None
    assert warnings == []


def test_failures_are_one_warning(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("epoch,train/loss\n0,\x00,,,\n")
    plots, warnings, _ = make_plotter(tmp_path)
    plots.draw(lambda: {"a.png": np.zeros((0, 0, 3), np.uint8)})
    plots.draw_charts()
    assert plots.finish(60)
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: a picture cannot be drawn (")


def test_drawing_does_not_block(tmp_path: Path) -> None:
    def slow() -> Mapping[str, np.ndarray]:
        time.sleep(5)
        return {}

    plots, _, _ = make_plotter(tmp_path)
    before = time.monotonic()
    plots.draw(slow)
    assert not plots.finish(0.1)
    assert time.monotonic() - before < 4
