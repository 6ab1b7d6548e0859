"""Pictures are drawn beside the training, and none of them can harm it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
import pytest

from utils.plots import plotter as painter
from utils.plots.plotter import Painter

RESULTS = "epoch,train/loss,val/loss\n0,1.5,1.25\n1,1,0.75\n"


def paint(folder: Path) -> tuple[Painter, list[str], dict[str, Path]]:
    said: list[str] = []
    drawn: dict[str, Path] = {}
    return Painter(folder, said.append, drawn.update), said, drawn


def test_photos(tmp_path: Path) -> None:
    mine, said, drawn = paint(tmp_path)
    picture = np.full((20, 30, 3), 200, np.uint8)
    mine.photos(lambda: {"a.png": picture, "b.jpg": picture})
    assert mine.finish(10)
    assert (cv2.imread(str(tmp_path / "a.png")) == 200).all()
    assert cv2.imread(str(tmp_path / "b.jpg")).shape == (20, 30, 3)
    assert drawn == {name: tmp_path / name for name in ("a.png", "b.jpg")}
    assert said == []


def test_charts_of_the_files_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(RESULTS)
    (tmp_path / "old.png").write_bytes(b"")
    mine, said, drawn = paint(tmp_path)
    time.sleep(0.01)
    mine.charts()
    assert mine.finish(60)
    assert set(drawn) == {"results.png"}
    assert cv2.imread(str(tmp_path / "results.png")) is not None
    assert said == []


def test_what_cannot_be_drawn_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("epoch,train/loss\n0,\x00,,,\n")
    mine, said, _ = paint(tmp_path)
    mine.photos(lambda: {"a.png": np.zeros((0, 0, 3), np.uint8)})
    mine.charts()
    assert mine.finish(60)
    assert len(said) == 1
    assert said[0].startswith("warning: a picture cannot be drawn (")


def test_results_are_drawn_once_a_minute_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = [0.0], []
    monkeypatch.setattr("utils.plots.plotter.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Painter, "charts", lambda self, *names: asked.append((now[0], names)))
    mine, _, _ = paint(tmp_path)
    for second in range(0, 200, 7):
        now[0] = second
        mine.results()
    assert [names for _, names in asked] == [("results.png",)] * 3
    assert all(later - sooner >= painter.OFTEN for (sooner, _), (later, _) in pairwise(asked))


def test_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Painter, draw: Mapping[str, np.ndarray]) -> None:
        time.sleep(5)

    monkeypatch.setattr(Painter, "_photos", slow)
    mine, _, _ = paint(tmp_path)
    before = time.monotonic()
    mine.photos(dict)
    assert not mine.finish(0.1)
    assert time.monotonic() - before < 4
