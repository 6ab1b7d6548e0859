"""The pictures of a run folder, and their drawing beside a training."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.making import plain
from tests.making import write_image as write_pixels
from utils.files import csv_text
from utils.plots import charts
from utils.plots.drawing import CAPTION_LINE_PIXELS, COLOURS, GAP_PIXELS
from utils.plots.pictures import DRAWINGS, Plotter, main

VAL_BOXES_HEAD = "image,kind,class,confidence,x1,y1,x2,y2"
CAPTION_PIXELS = CAPTION_LINE_PIXELS + GAP_PIXELS
# The pictures of a detector's folder with 16 validation images or fewer, in the order in which they are drawn.
DRAWN_PICTURES = [
    *("results.png", "confusion_matrix.png"),
    *("P_curve.png", "R_curve.png", "F1_curve.png", "PR_curve.png"),
    *("labels.jpg", "val_batch0_labels.jpg", "val_batch0_pred.jpg"),
]


def write_image(path: Path, width: int, height: int, value: int = 90) -> str:
    return str(write_pixels(path, plain(width, height, value)))


def make_run_folder(folder: Path, classes: int = 3) -> Path:
    """Make a detector's run folder."""
    folder.mkdir()
    names = ["disc", "$x_$", "a long name of a class that goes on and on", *map("class {}".format, range(classes))]
    names, positions = names[:classes], [0, 0.25, 0.5, 0.75, 1]
    known = [*names, "background"]
    image = write_image(folder.parent / f"{folder.name} photo.png", 320, 150)
    columns = ("epoch", "train/loss", "metrics/mAP_0.5", "metrics/recall", "val/loss", "x/lr0")
    documents: dict[str, tuple[Any, Any]] = {
        "results.csv": (columns, [(k, 1 / (k + 1), k / 4, 1 / (k + 2), "", 0.1) for k in range(3)]),
        "confusion_matrix.csv": (
            ("true \\ predicted", *known),
            [(name, *(9 * (k == j) + (j == 0) for j in range(len(known)))) for k, name in enumerate(known)],
        ),
        "curves.csv": (
            ("class", "confidence", "precision", "recall"),
            [(name, x, x, 1 - x) for name in names for x in positions],
        ),
        "PR_curve.csv": (("class", "recall", "precision"), [(name, x, 1 - x) for name in names for x in positions]),
        "classes.csv": (("class", "AP50"), [(name, 0.5 if k else "") for k, name in enumerate(names)]),
        "labels.csv": (
            ("split", "class", "images", "instances"),
            [(split, name, 3, 5) for split in ("train", "val") for name in names],
        ),
        "boxes.csv": (("class", "x", "y", "width", "height"), [(name, 0.5, 0.5, 0.1, 0.2) for name in names]),
        "val_boxes.csv": (VAL_BOXES_HEAD.split(","), [(image, "label", names[0], "", 1, 2, 60, 70)]),
    }
    for name, (head, rows) in documents.items():
        (folder / name).write_text(csv_text(head, rows))
    return folder


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cv2, "setNumThreads", lambda count: None)


@pytest.fixture
def blank(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Draw no charts, and return what they would be drawn from."""
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(charts, "render", lambda *what: drawn.append(what) or np.zeros((4, 4, 3), np.uint8))
    return drawn


def draw(*arguments: str | Path) -> int:
    """Run the command and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return 1 if isinstance(ended.value.code, str) else int(ended.value.code or 0)


def test_all_pictures_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = make_run_folder(tmp_path / "exp", 80)
    assert draw(exp) == 0
    assert capfd.readouterr() == ("\n".join(DRAWN_PICTURES) + "\n", "")
    assert {file.name for file in exp.iterdir() if file.suffix != ".csv"} == set(DRAWN_PICTURES)
    for name in DRAWN_PICTURES:
        picture = cv2.imread(str(exp / name))
        assert picture.std() > 1, name
        assert not name.startswith("val_batch") or picture.shape[:2] == (150 + CAPTION_PIXELS, 320 + GAP_PIXELS)


def test_pictures_of_a_segmenter(tmp_path: Path, capfd: pytest.CaptureFixture[str], blank: object) -> None:
    """Also curves of masks; the label picture has the mask of its label."""
    exp = make_run_folder(tmp_path / "exp")
    for name in ("curves.csv", "PR_curve.csv"):
        (exp / f"mask_{name}").write_text((exp / name).read_text())
    row = (exp / "val_boxes.csv").read_text().splitlines()[1].split(",")
    head = ("image", "kind", "class", "confidence", "outline")
    (exp / "val_masks.csv").write_text(csv_text(head, [(*row[:4], "1 2 60 2 60 70")]))
    assert draw(exp) == 0
    of_masks = {f"mask_{name}_curve.png" for name in ("P", "R", "F1", "PR")}
    assert {*capfd.readouterr().out.split()} == {*DRAWN_PICTURES, *of_masks}
    masked = cv2.imread(str(exp / "val_batch0_labels.jpg")).astype(int)
    (exp / "val_masks.csv").unlink()
    assert draw(exp, "--only", "val_boxes.csv") == 0
    change = abs(cv2.imread(str(exp / "val_batch0_labels.jpg")) - masked).max(2)
    assert change[20:40, 50:55].min() > 20  # in the triangle
    assert change[60:, :30].max() < 20  # in the box, but not in the triangle


def test_what_charts_are_drawn_from(tmp_path: Path, blank: list[tuple[Any, ...]]) -> None:
    """Two classes of one name are separated by the recall, which starts again; epochs count from 1."""
    rows = ["a,0,1", "a,1,0", "b,0,.5", "b,1,nan", "b,0,.5", "b,1,.25"]
    (tmp_path / "PR_curve.csv").write_text("\n".join(["class,recall,precision", *rows]))
    (tmp_path / "classes.csv").write_text("class,AP50\na,0.75\nb,\n")
    (tmp_path / "curves.csv").write_text("class,confidence,precision,recall\na,0,0,1\na,0.5,0.5,0.5\na,1,1,0.25\n")
    (tmp_path / "results.csv").write_text("epoch,train/loss\n0,2\n1,\n")
    (tmp_path / "labels.csv").write_text("split,class,instances\ntrain,a,3\ntrain,b,4\nval,b,5\nval,b,1\n")
    (tmp_path / "boxes.csv").write_text("class,x,y,width,height\nb,0.5,0.25,0.1,0.2\n")
    assert draw(tmp_path) == 0
    results, precision, recall, f1, (_, curves, ap50), (_, names, counts, classes, boxes) = blank
    assert results[1]["epoch"].tolist() == [1, 2]
    assert results[1]["train/loss"] == pytest.approx([2, np.nan], nan_ok=True)
    assert [(metric, point) for _, metric, _, point in (precision, recall, f1)] == [
        ("precision", 1), ("recall", 1), ("F1", 1)
    ]  # fmt: skip
    assert (curves.names, curves.x.tolist()) == (["a", "b", "b"], [0, 1])
    assert curves.values == pytest.approx(np.array([[1, 0], [0.5, np.nan], [0.5, 0.25]]), nan_ok=True)
    assert ap50 == pytest.approx([0.75, np.nan, np.nan], nan_ok=True)
    assert (names, {split: labels.tolist() for split, labels in counts.items()}) == (
        ["a", "b"], {"train": [3, 4], "val": [0, 6]}
    )  # fmt: skip
    assert (classes.tolist(), boxes.tolist()) == ([1], [[0.5, 0.25, 0.1, 0.2]])


@pytest.mark.parametrize("name", [name for name in DRAWINGS if not name.startswith("mask_")])
def test_a_file_without_rows_draws_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], blank: object
) -> None:
    """As before the first epoch is over; a malformed file is a warning, and the others are drawn."""
    exp = make_run_folder(tmp_path / "exp")
    head = (exp / name).read_text().splitlines()[0]
    (exp / name).write_text(head.split(",")[0] + "\n" if "confusion" in name else head)
    assert draw(exp) == 0
    drawn, warnings = capfd.readouterr()
    assert not warnings
    assert 5 < len(drawn.split()) < len(DRAWN_PICTURES)
    (exp / name).write_text("epoch,a\n1\n")
    assert draw(exp) == 1
    again, warnings = capfd.readouterr()
    assert again == drawn
    assert (warnings.count("\n"), name in warnings) == (1, True)
    assert draw(tmp_path / "nowhere") == draw(tmp_path) == draw(tmp_path, "--only", "labels.csv") == 1


def validation_pictures(folder: Path, *rows: tuple[object, ...], head: str = VAL_BOXES_HEAD) -> list[np.ndarray]:
    """Draw a val_boxes.csv with these rows, and return the grids: labels and predictions of each batch."""
    text = csv_text(head.split(","), rows)  # type: ignore[arg-type]
    (folder / "val_boxes.csv").write_bytes(text.encode(errors="surrogateescape"))
    assert draw(folder, "--only", "val_boxes.csv") == 0
    return [cv2.imread(str(path)) for path in sorted(folder.glob("val_batch*.jpg"))]


def test_the_most_confident_is_on_top_in_the_colour_of_its_class(tmp_path: Path) -> None:
    """The colour depends on the number among all classes, as in training; an outline replaces its box."""
    (tmp_path / "classes.csv").write_text("class\ndisc\nring\nbar\n")
    path, tilted = write_image(tmp_path / "a.png", 320, 320, 0), "100 50 150 100 100 150 50 100"
    _, predictions = validation_pictures(
        tmp_path,
        (path, "prediction", "bar", 0.9, 50, 50, 150, 150, tilted),
        (path, "prediction", "ring", 0.5, 50, 200, 150, 300, ""),
        (path, "prediction", "disc", 0.25, 50, 200, 150, 300, ""),
        head=f"{VAL_BOXES_HEAD},outline",
    )

    def is_near(row: int, column: int, k: int) -> bool:
        return bool(abs(predictions[row, column].astype(int) - COLOURS[k]).max() < 60)

    assert is_near(250, 150, 1)  # the right side of the two boxes
    assert is_near(125, 125, 2)  # the lower right edge of the outline
    assert predictions[143:149, 52:60].max() < 60  # the lower left corner of the box around it


def test_unusual_photos(tmp_path: Path) -> None:
    """Unreadable ones are grey, without boxes, and named; file names may be any bytes; EXIF orientations count."""
    (tmp_path / "no image.jpg").write_text("text")
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff, $")
    os.mkdir(folder)
    os.replace(write_image(tmp_path / "a.png", 320, 160), f"{folder}/\udcfe.png")
    paths = [f"{folder}/\udcfe.png", *(str(tmp_path / name) for name in ("missing.jpg", "no image.jpg", "."))]
    labels, _ = validation_pictures(tmp_path, *((path, "label", "x", "", 200, 1, 250, 50) for path in paths))
    assert labels.shape == (2 * (160 + CAPTION_PIXELS), 2 * (320 + GAP_PIXELS), 3)
    assert abs(labels[60:150, 20:300].astype(int) - 90).max() < 25
    assert abs(labels[20:150, 344:600].astype(int) - 160).max() < 25
    assert (labels[160 : 160 + CAPTION_LINE_PIXELS, 324:640] < 100).any()
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (400, 200)).save(tmp_path / "a.jpg", exif=exif)
    assert validation_pictures(tmp_path, (tmp_path / "a.jpg", "image", *[""] * 6))[0].shape[0] == 400 + CAPTION_PIXELS


def test_pictures_are_drawn_in_the_background(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures are one warning."""
    drawn: dict[str, Path] = {}
    plots, grey = Plotter(tmp_path, drawn.update), np.full((20, 30, 3), 200, np.uint8)
    (tmp_path / "results.csv").write_text("epoch,train/loss,val/loss\n0,1.5,1.25\n1,1,0.75\n")
    (tmp_path / "old.png").write_bytes(b"")
    time.sleep(0.01)
    plots.draw(lambda: {"a.png": grey})
    plots.draw_documents()
    assert plots.finish(60)
    assert (cv2.imread(str(tmp_path / "a.png")) == 200).all()
    assert {*drawn} == {"a.png", "results.png"}
    assert capsys.readouterr().out == ""
    (tmp_path / "results.csv").write_text("epoch,train/loss\n0,\x00,,,\n")
    plots = Plotter(tmp_path, drawn.update)
    plots.draw(lambda: {"a.png": np.zeros((0, 0, 3), np.uint8)})
    plots.draw_documents()
    assert plots.finish(60)
    assert capsys.readouterr().out.count("warning: ") == 1
