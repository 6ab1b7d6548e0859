"""The pictures of a run folder, and the table that compares runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.utils.plots.run_folder import (
    CLASS_NAMES,
    DRAWN_PICTURES,
    SEGMENTER_PICTURES,
    make_run_folder,
    make_segmenter_folder,
)
from utils.plots import run_pictures
from utils.plots.__main__ import run
from utils.plots.documents import Documents
from utils.plots.drawing import CAPTION_LINE_PIXELS, GAP_PIXELS
from utils.plots.run_pictures import PICTURES
from utils.summary import confusion_text

GRID_SHAPE = (150 + CAPTION_LINE_PIXELS + GAP_PIXELS, 320 + GAP_PIXELS)  # of an image of 320 x 150


@pytest.mark.parametrize("classes", [1, 80])
def test_all_pictures_of_a_run(classes: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = make_run_folder(tmp_path / "exp", classes)
    before = {file.name for file in exp.iterdir()}
    assert run([str(exp)]) == 0
    assert capfd.readouterr() == ("\n".join(DRAWN_PICTURES) + "\n", "")
    assert {file.name for file in exp.iterdir()} - before == set(DRAWN_PICTURES)
    for name in DRAWN_PICTURES:
        picture = cv2.imread(str(exp / name))
        assert picture.std() > 1, name
        assert not name.startswith("val_batch") or picture.shape[:2] == GRID_SHAPE


@pytest.mark.parametrize(("names", "by_share"), [(["dog", "background"], False), (["cat", "dog"], True)])
def test_the_confusion_matrix_of_one_class_has_counts(
    names: list[str], by_share: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A classifier's of two classes has shares."""
    exp = make_run_folder(tmp_path / "exp", 1)
    (exp / "confusion_matrix.csv").write_text(confusion_text(np.array([[8, 2], [3, 0]]), names))
    drawn: list[Any] = []
    monkeypatch.setattr(run_pictures, "render", lambda _, *what: drawn.append(what) or np.zeros((4, 4, 3), np.uint8))
    assert run([str(exp), "--only", "confusion_matrix.png"]) == 0
    ((counts, drawn_names, share),) = drawn
    assert (counts.tolist(), list(drawn_names), share) == ([[8, 2], [3, 0]], names, by_share)


def test_all_pictures_of_a_segmenter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Those of its boxes, and curves of masks; the label picture has the mask of its label."""
    exp = make_segmenter_folder(tmp_path / "exp")
    assert run([str(exp)]) == 0
    assert capfd.readouterr() == ("\n".join(SEGMENTER_PICTURES) + "\n", "")
    masked = cv2.imread(str(exp / "val_batch0_labels.jpg")).astype(int)
    (exp / "val_masks.csv").unlink()
    assert run([str(exp), "--only", "val_batch0_labels.jpg"]) == 0
    change = abs(cv2.imread(str(exp / "val_batch0_labels.jpg")) - masked).max(2)
    assert change[20:40, 50:55].min() > 20  # in the triangle
    assert change[60:, :30].max() < 20  # in the box, but not in the triangle


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        ("results.csv", {"results.png"}),
        ("curves.csv", {"P_curve.png", "R_curve.png", "F1_curve.png"}),
        ("labels.csv", {"labels.jpg"}),
        ("boxes.csv", set()),
        ("classes.csv", set()),
        ("val_boxes.csv", {"val_batch0_labels.jpg", "val_batch0_pred.jpg"}),
    ],
)
def test_what_is_not_there_is_not_drawn(
    missing: str, lost: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = make_run_folder(tmp_path / "exp")
    (exp / missing).unlink()
    monkeypatch.setattr(run_pictures, "render", lambda *_: np.zeros((4, 4, 3), np.uint8))
    assert run([str(exp)]) == 0
    assert capfd.readouterr() == ("".join(f"{name}\n" for name in DRAWN_PICTURES if name not in lost), "")


@pytest.mark.parametrize(
    "name", ["results.csv", "curves.csv", "PR_curve.csv", "labels.csv", "boxes.csv", "val_boxes.csv"]
)
def test_a_head_alone_draws_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run without labels, or before its first epoch is over."""
    exp = make_run_folder(tmp_path / "exp")
    path = exp / name
    path.write_text(path.read_text().splitlines()[0] + "\n")
    monkeypatch.setattr(run_pictures, "render", lambda *_: np.zeros((4, 4, 3), np.uint8))
    assert run([str(exp)]) == 0
    out, warnings = capfd.readouterr()
    assert not warnings
    lost = [picture for picture in DRAWN_PICTURES if name in PICTURES[picture].files]
    assert out.split() == [picture for picture in DRAWN_PICTURES if picture not in lost]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("results.csv", "", "results.csv"),
        ("results.csv", "a,b\n1,2\n", "no column epoch"),
        ("results.csv", "epoch,a\n1\n", "1 cells in row 2, but 2 in the header"),
        ("confusion_matrix.csv", "t,a\nb,1.5\n", "1.5"),
        ("curves.csv", "class,confidence,precision\na,0,1\n", "no column recall"),
        ("curves.csv", '"\na,0,1,1' + "x" * 200_000, "curves.csv"),
        ("PR_curve.csv", "class,recall,precision\na,zero,1\n", "zero"),
        ("PR_curve.csv", "class,recall,precision\na,0,1\na,1,1\nb,0,1\n", "PR_curve.csv"),
        ("boxes.csv", "class,x,y,width,height\nnobody,1,1,1,1\n", "nobody"),
    ],
)
def test_a_malformed_file_is_a_warning(
    name: str,
    content: str,
    problem: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The warnings name the pictures that cannot be drawn; the others are, and the exit code is 1."""
    exp = make_run_folder(tmp_path / "exp")
    (exp / name).write_text(content)
    monkeypatch.setattr(run_pictures, "render", lambda *_: np.zeros((4, 4, 3), np.uint8))
    assert run([str(exp), "--background"]) == 1
    out, warnings = capfd.readouterr()
    lost = [picture for picture in DRAWN_PICTURES if name in PICTURES[picture].files] or ["labels.jpg"]
    assert not out
    assert [line.split(" cannot be drawn from ")[0] for line in warnings.splitlines()] == [
        f"warning: {exp / picture}" for picture in lost
    ]
    assert problem in warnings
    assert {file.name for file in exp.iterdir() if file.suffix in (".png", ".jpg")} == {*DRAWN_PICTURES} - {*lost}


def test_a_picture_that_cannot_be_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = make_run_folder(tmp_path / "exp")

    def fails(documents: Documents) -> np.ndarray:
        raise MemoryError("no room")

    monkeypatch.setitem(PICTURES, "results.png", PICTURES["results.png"]._replace(draw=fails))
    assert run([str(exp), "--only", "results.png", "val_batch0_pred.jpg"]) == 1
    expected = f"warning: {exp / 'results.png'} cannot be drawn from results.csv (MemoryError: no room)\n"
    assert capfd.readouterr() == ("val_batch0_pred.jpg\n", expected)


def test_a_picture_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = make_run_folder(tmp_path / "exp")
    (exp / "val_batch0_pred.jpg").mkdir()
    assert run([str(exp), "--only", "val_batch0_pred.jpg"]) == 1
    assert capfd.readouterr().err.startswith(f"warning: {exp / 'val_batch0_pred.jpg'} cannot be written: ")


def test_ap50_of_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AP50 is that of classes.csv, or else the mean of the precision."""
    exp = make_run_folder(tmp_path / "exp")
    asked: list[Any] = []
    monkeypatch.setattr(run_pictures, "render", lambda *given: asked.append(given))
    PICTURES["PR_curve.png"].draw(Documents(exp))
    (exp / "classes.csv").write_text("class,images,precision,recall\na,1,1,1\n")  # a classifier's
    PICTURES["PR_curve.png"].draw(Documents(exp))
    (_, curves, areas), (_, _, others) = asked
    assert curves.names == CLASS_NAMES
    assert areas == pytest.approx([0.5, 0.5, 0.5])
    assert others == pytest.approx([0.5, 0.5, 0.5])  # of 1, 0.75, 0.5, 0.25, 0
    (exp / "classes.csv").write_text("class,AP50\ndisc,0.125\n$x_$,\n")
    PICTURES["PR_curve.png"].draw(Documents(exp))
    assert asked[-1][2] == pytest.approx([0.125, 0.5, 0.5])
