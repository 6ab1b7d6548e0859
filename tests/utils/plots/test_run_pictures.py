"""Grids of images, what is read from a run folder's text files, and the command that draws them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from utils.files import ROOT, csv_text
from utils.plots import charts
from utils.plots import run_pictures as plots
from utils.plots.drawing import CAPTION_WIDTH, COLOURS, GAP, LINE, MOST_IMAGES, draw_captioned, draw_targets
from utils.plots.run_pictures import (
    PICTURES,
    Documents,
    Malformed,
    Table,
    best_epochs,
    draw_photos,
    main,
    read_confusion,
    read_curves,
    read_labels,
    read_photos,
    run,
    run_names,
)

NONE = np.zeros((0, 6), np.float32)


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Photos are enlarged to half of what they are else: sizes that are easy to reckon with."""
    monkeypatch.setattr(plots, "SMALLEST", 160)


@pytest.mark.parametrize(("images", "shape"), [(1, (32, 48)), (2, (32, 96)), (3, (64, 96)), (5, (64, 144))])
def test_size_of_the_grid(images: int, shape: tuple[int, int]) -> None:
    picture = draw_targets(np.zeros((images, 3, 32, 48), np.uint8), NONE, {})
    assert picture.shape == (*shape, 3)
    assert picture.dtype == np.uint8


def test_at_most_sixteen_images() -> None:
    assert draw_targets(np.zeros((MOST_IMAGES + 9, 3, 8, 8), np.uint8), NONE, {}).shape == (32, 32, 3)


def test_places_and_colours() -> None:
    images = np.zeros((3, 3, 8, 8), np.uint8)
    images[0, 0] = 200  # red, and blue comes first in the picture
    images[1] = 50
    picture = draw_targets(images, NONE, {})
    assert picture[4, 4].tolist() == [0, 0, 200]
    assert picture[4, 12].tolist() == [50, 50, 50]
    assert picture[12, 4].tolist() == [0, 0, 0]
    assert picture[12, 12].tolist() == [255, 255, 255]  # no image


def test_a_box_is_drawn_on_its_own_image_alone() -> None:
    images = np.zeros((2, 3, 64, 64), np.uint8)
    target = np.array([[1, 3, 0.5, 0.5, 0.5, 0.25]], np.float32)  # 16, 24, 48, 40
    picture = draw_targets(images, target, {3: "x"})
    assert not picture[:, :64].any()
    own = picture[:, 64:]
    for row, column in ((30, 16), (30, 48), (24, 30), (40, 30)):
        assert own[row, column].any()
    assert not own[27:38, 19:46].any()  # lines are soft at their edges
    assert not images.any()  # what was given is not drawn on


@pytest.mark.parametrize(
    ("images", "size", "shape"),
    [(4, (1200, 1000), (1920, 1600)), (1, (500, 3840), (250, 1920)), (1, (1920, 900), (1920, 900))],
)
def test_no_side_of_the_grid_is_too_long(images: int, size: tuple[int, int], shape: tuple[int, int]) -> None:
    """Boxes are drawn when the images have been shrunk."""
    target = np.array([[0, 0, 0.5, 0.5, 0.5, 0.5]], np.float32)
    picture = draw_targets(np.zeros((images, 3, *size), np.uint8), target, {0: ""})
    assert picture.shape == (*shape, 3)
    across = 2 if images > 1 else 1
    height, width = shape[0] // across, shape[1] // across
    assert picture[height // 2, width // 4].tolist() == pytest.approx(COLOURS[0], abs=3)
    assert picture[height // 4, width // 2].tolist() == pytest.approx(COLOURS[0], abs=3)
    assert not picture[height // 2, width // 2].any()


def test_names_have_a_ground() -> None:
    """Dark letters on a light colour and light ones on a dark one."""
    for label, ink in ((8, 0), (7, 255)):
        target = np.array([[0, label, 0.5, 0.5, 0.5, 0.5]], np.float32)
        picture = draw_targets(np.full((1, 3, 200, 200), 128, np.uint8), target, {label: "mmmm"})
        tag = picture[36:49, 52:80].reshape(-1, 3)
        assert (tag == COLOURS[label]).all(1).sum() > 100
        assert abs(tag.mean(1) - ink).min() < 60


# Captions: two lines of 16 pixels below each image


def grey(*values: int, height: int = 40, width: int = 200) -> list[np.ndarray]:
    return [np.full((height, width, 3), value, np.uint8) for value in values]


@pytest.mark.parametrize(("images", "shape"), [(1, (72, 200)), (2, (72, 400)), (5, (144, 600)), (20, (288, 800))])
def test_size_of_the_captioned_grid(images: int, shape: tuple[int, int]) -> None:
    picture = draw_captioned(grey(*range(images)), ["x"] * images)
    assert picture.shape == (*shape, 3)
    assert picture.dtype == np.uint8


def test_each_image_is_above_its_caption() -> None:
    images = grey(10, 20, 30)
    images[0][:, :, 2] = 200
    picture = draw_captioned(images, ["one line", "two\nlines", ""])
    assert (picture[:40, :200] == (10, 10, 200)).all()
    assert (picture[:40, 200:] == 20).all()
    assert (picture[72:112, :200] == 30).all()
    dark = picture < 128
    assert dark[40:56, :200].any()
    assert not dark[56:72, :200].any()
    assert dark[40:56, 200:].any()
    assert dark[56:72, 200:].any()
    assert (picture[112:, :200] == 255).all()
    assert (picture[72:, 200:] == 255).all()  # no image


def test_a_small_image_stands_in_the_middle_of_its_caption() -> None:
    picture = draw_captioned(grey(0, height=10, width=50), ["", "of no image"])
    assert picture.shape == (42, CAPTION_WIDTH, 3)
    assert (picture[:10, 50:100] == 0).all()
    assert (picture[:10, :50] == 255).all()
    assert (picture[:10, 100:] == 255).all()


def test_more_lines_than_there_is_room_for() -> None:
    images = grey(0)
    assert np.array_equal(draw_captioned(images, ["a\nb\nc"]), draw_captioned(images, ["a\nb"]))
    assert not np.array_equal(draw_captioned(images, ["a\nb"]), draw_captioned(images, ["a\nc"]))
    assert draw_captioned(images, ["long " * 50]).shape == (72, 200, 3)
    assert not images[0].any()  # what was given is not drawn on


# Text files


def written(path: Path, head: str, *rows: str) -> Table:
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8", errors="surrogateescape")
    return Table(path)


def test_numbers_of_a_table(tmp_path: Path) -> None:
    """YOLOv5 pads its columns with spaces."""
    table = written(tmp_path / "a.csv", "   epoch,    train/loss,x", "  0, 1.5,inf", "", "1,  ,nan")
    assert table.columns == ["epoch", "train/loss", "x"]
    assert table.numbers("train/loss") == pytest.approx([1.5, math.nan], nan_ok=True)
    assert table.numbers("x") == pytest.approx([math.inf, math.nan], nan_ok=True)
    assert table.coordinates(["epoch", "train/loss"], [0]).tolist() == [[0, 1.5]]
    with pytest.raises(Malformed, match=r"a\.csv has a cell in its column x that is no finite number"):
        table.coordinates(["x"])


def test_texts_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfname,b\r\n"a, b\n", \xff \r\n')
    table = Table(tmp_path / "a.csv")
    assert (table.texts("name"), table.texts("b")) == (["a, b\n"], [" \udcff "])


def test_a_folder_in_place_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(Malformed, match=r"a\.csv cannot be read: "):
        Table(tmp_path / "a.csv")


def test_confusion_is_read(tmp_path: Path) -> None:
    table = written(tmp_path / "c.csv", "true \\ predicted,a,a,background", "a,1,0,2", "a,0,3,0", "background,4,5,0")
    counts, names = read_confusion(table)
    assert counts.tolist() == [[1, 0, 2], [0, 3, 0], [4, 5, 0]]
    assert names == ["a", "a", "background"]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (("a,1,0",), "other names in its first column"),
        (("b,1,0", "a,0,1"), "other names in its first column"),
        (("a,1,0.5", "b,0,1"), "no whole number"),
        (("a,1,", "b,0,1"), "no whole number"),
        (("a,1,99999999999999999999", "b,0,1"), "no whole number"),
        (("a,1,-1", "b,0,1"), "below 0"),
    ],
)
def test_no_confusion_matrix(rows: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    with pytest.raises(Malformed, match=problem):
        read_confusion(written(tmp_path / "c.csv", "true,a,b", *rows))


def test_curves_are_told_apart(tmp_path: Path) -> None:
    """By the class; and two classes of one name by the places, which begin anew."""
    rows = ("a,0,.5,1", "a,1,1,0", "b,0,.25,", "b,1,nan,.5", "b,0,.125,.5", "b,1,1,.25")
    table = written(tmp_path / "c.csv", "class,confidence,precision,recall", *rows)
    recall, precision = read_curves(table, "confidence", ["recall", "precision"])
    assert recall.names == precision.names == ["a", "b", "b"]
    assert recall.places.tolist() == [0, 1]
    assert recall.values == pytest.approx(np.array([[1, 0], [math.nan, 0.5], [0.5, 0.25]]), nan_ok=True)
    assert precision.values == pytest.approx(np.array([[0.5, 1], [0.25, math.nan], [0.125, 1]]), nan_ok=True)


@pytest.mark.parametrize("rows", [("a,0,1", "a,1,1", "b,0,1"), ("a,0,1", "a,1,1", "b,0,1", "b,.5,1"), ("a,,1",)])
def test_no_curves(rows: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(Malformed, match="recall"):
        read_curves(written(tmp_path / "c.csv", "class,recall,precision", *rows), "recall", ["precision"])


def test_labels_are_read(tmp_path: Path) -> None:
    rows = ("train,a,9,20", "train,b,1,2", "val,b,1,3")
    labels = read_labels(written(tmp_path / "l.csv", "split,class,images,instances", *rows))
    assert (labels.splits, labels.names) == (["train", "val"], ["a", "b"])
    assert labels.counts.tolist() == [[20, 2], [0, 3]]


# Photos of the validation

BOXES = "image,kind,class,confidence,x1,y1,x2,y2"


def photo(path: Path, width: int, height: int, value: int = 90) -> str:
    cv2.imwrite(str(path), np.full((height, width, 3), value, np.uint8))
    return str(path)


@pytest.mark.parametrize(
    ("size", "shown"),
    [((960, 480), (480, 240)), ((480, 300), (480, 300)), ((200, 100), (200, 100)), ((40, 80), (80, 160))],
)
def test_photos_are_fitted(size: tuple[int, int], shown: tuple[int, int], tmp_path: Path) -> None:
    """Shrunk to 480 pixels, enlarged to 160, and their boxes with them."""
    row = f"{photo(tmp_path / 'a.png', *size)},label,x,,{size[0] / 4},0,{size[0]},{size[1] / 2}"
    (found,) = read_photos(written(tmp_path / "b.csv", BOXES, row), 0)
    assert found.image is not None
    assert found.image.shape == (*shown[::-1], 3)
    assert found.marks["label"].boxes == pytest.approx(np.array([[shown[0] / 4, 0, shown[0], shown[1] / 2]]))
    assert draw_photos([found], "label").shape == (shown[1] + LINE + GAP, max(shown[0], 160) + GAP, 3)


def test_a_photo_is_as_it_is_displayed(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.new("RGB", (300, 200)).save(tmp_path / "a.jpg", exif=exif)
    (found,) = read_photos(written(tmp_path / "b.csv", BOXES, f"{tmp_path}/a.jpg,image,,,,,,"), 0)
    assert found.image is not None
    assert found.image.shape == (300, 200, 3)


def test_marks_are_told_apart(tmp_path: Path) -> None:
    """Labels and predictions; the surest comes last and so lies on top; a class has one number in all."""
    one, two = (photo(tmp_path / name, 200, 200) for name in ("1.png", "2.png"))
    rows = (
        f"{two},prediction,disc,0.875,1,2,3,4",
        f"{one},label,bar,,5,6,7,8",
        f"{two},prediction,bar,0.25,9,10,11,12",
        f"{two},label,disc,,13,14,15,16",
    )
    first, second = read_photos(written(tmp_path / "b.csv", BOXES, *rows), 0)
    assert (first.path, second.path) == (two, one)  # in the order in which they come
    assert first.marks["prediction"].texts == ["bar 0.25", "disc 0.88"]
    assert first.marks["prediction"].classes == [1, 0]
    assert first.marks["prediction"].boxes.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert first.marks["label"].boxes.tolist() == [[13, 14, 15, 16]]
    assert (first.marks["label"].classes, first.marks["label"].texts) == ([0], ["disc"])
    assert (second.marks["label"].classes, second.marks["label"].texts) == ([1], ["bar"])
    assert second.marks["prediction"].texts == []


def test_a_class_has_one_colour(tmp_path: Path) -> None:
    """Boxes of the labels and of the predictions are in the same place and colour; the ground of the text is, too."""
    path = photo(tmp_path / "a.png", 400, 300)
    rows = (
        f"{path},label,bar,,20,20,40,40",
        f"{path},label,disc,,100,80,300,280",
        f"{path},prediction,disc,.5,100,80,300,280",
    )
    (found,) = read_photos(written(tmp_path / "b.csv", BOXES, *rows), 0)
    labels, predictions = (draw_photos([found], kind) for kind in ("label", "prediction"))
    for picture in (labels, predictions):
        for x, y in ((100, 200), (300, 200), (200, 80), (200, 280), (100, 70)):  # edges, and the text's corner
            assert picture[y, x].tolist() == pytest.approx(COLOURS[1], abs=3)
        assert (picture[150, 200] == 90).all()
    assert (labels[30, 20] != 90).any()
    assert (predictions[30, 20] == 90).all()
    assert (predictions[66:80, 104:400] != labels[66:80, 104:400]).any()  # with the confidence


@pytest.mark.parametrize("name", ["intermediate hinged traffic-sign " * 9, "猫 $x$ \udcff\n", ""])
def test_text_stays_within_the_photo(name: str, tmp_path: Path) -> None:
    """A box in a corner: nothing of its name is outside, and the name has its ground."""
    path = photo(tmp_path / "a.png", 300, 200)
    (tmp_path / "b.csv").write_text(
        csv_text(
            BOXES.split(","), [(path, "label", name, "", 290, 0, 300, 10), (path, "label", "x", "", -9e9, 0, 9e9, 190)]
        ),
        errors="surrogateescape",
    )
    (found,) = read_photos(Table(tmp_path / "b.csv"), 0)
    picture = draw_photos([found], "label")
    assert picture.shape == (200 + LINE + GAP, 300 + GAP, 3)
    assert (picture[:200, 300:] == 255).all()
    if name:
        assert (picture[:14, 225:285] == COLOURS[0]).all(2).sum() > 100  # to the left of the box


def test_a_long_name_keeps_its_confidence(tmp_path: Path) -> None:
    """What does not fit is cut from its middle."""
    path, name = photo(tmp_path / "a.png", 300, 200), "intermediate hinged traffic-sign " * 9
    pictures = []
    for confidence in (0.5, 0.75):
        row = f"{path},prediction,{name},{confidence},100,100,200,150"
        pictures.append(draw_photos(read_photos(written(tmp_path / "b.csv", BOXES, row), 0), "prediction"))
    rows, columns, _ = np.nonzero(pictures[0] != pictures[1])
    assert rows.max() < 100
    assert columns.min() > 260  # at its end


def test_photos_that_cannot_be_read(tmp_path: Path) -> None:
    """Grey, without boxes, and named."""
    (tmp_path / "no image.jpg").write_text("text")
    (tmp_path / "empty.jpg").touch()
    paths = [str(tmp_path / name) for name in ("missing.jpg", "no image.jpg", "empty.jpg", ".")]
    rows = [(path, "label", "x", "", 1, 1, 50, 50) for path in paths]
    (tmp_path / "b.csv").write_text(csv_text(BOXES.split(","), rows))
    found = read_photos(Table(tmp_path / "b.csv"), 0)
    assert [one.image for one in found] == [None] * 4
    picture = draw_photos(found, "label")
    assert picture.shape == (2 * (80 + LINE + GAP), 2 * (160 + GAP), 3)
    assert (picture[:80, :160] == 160).all()
    assert (picture[80 : 80 + LINE, :160] < 100).any()


def test_a_file_of_any_name(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff \xc3\xbc, $")
    os.mkdir(folder)
    os.replace(photo(tmp_path / "a.png", 200, 200), f"{folder}/\udcfe.png")
    (tmp_path / "b.csv").write_bytes(
        csv_text(BOXES.split(","), [(f"{folder}/\udcfe.png", "image", *[""] * 6)]).encode(errors="surrogateescape")
    )
    (found,) = read_photos(Table(tmp_path / "b.csv"), 0)
    assert found.image is not None
    assert (draw_photos([found], "label")[:200, :200] == 90).all()


def test_grids_of_sixteen_and_no_more_than_three(tmp_path: Path) -> None:
    rows = [f"{tmp_path}/{number}.jpg,image,,,,,," for number in range(60)]
    table = written(tmp_path / "b.csv", BOXES, *rows)
    numbers = [[int(Path(one.path).stem) for one in read_photos(table, batch)] for batch in range(4)]
    assert numbers == [[*range(16)], [*range(16, 32)], [*range(32, 48)], []]


def test_a_row_of_the_grid_is_as_high_as_its_highest_photo(tmp_path: Path) -> None:
    paths = [photo(tmp_path / f"{k}.png", 200, height) for k, height in enumerate((50, 120, 80, 60))]
    found = read_photos(written(tmp_path / "b.csv", BOXES, *(f"{path},image,,,,,," for path in paths)), 0)
    picture = draw_photos(found, "label")
    below = 120 + LINE + GAP
    assert picture.shape == (below + 80 + LINE + GAP, 2 * (200 + GAP), 3)
    assert (picture[below : below + 80, :200] == 90).all()
    assert (picture[50 + LINE : below, :200] == 255).all()


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("prediction,x,,1,2,3,4", "confidence"),
        ("label,x,,1,2,3,", "y2"),
        ("label,x,,1,2,inf,4", "x2"),
        ("label,x,,a,2,3,4", "x1"),
    ],
)
def test_no_photos(row: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(Malformed, match=f"column {problem}"):
        read_photos(written(tmp_path / "b.csv", BOXES, f"a.jpg,{row}"), 0)


# The command

NAMES = ["disc", "$x_$", "a long name of a class that goes on and on"]


def folder_of(folder: Path, classes: int = 3, epochs: int = 3) -> Path:
    """A detector's run folder."""
    folder.mkdir()
    names = [NAMES[k] if k < len(NAMES) else f"class {k}" for k in range(classes)]
    known, places = [*names, "background"], [0, 0.25, 0.5, 0.75, 1]
    image = photo(folder.parent / f"{folder.name} photo.png", 200, 150)
    columns = ("epoch", "train/loss", "metrics/mAP_0.5", "metrics/recall", "val/loss", "x/lr0")
    documents: dict[str, tuple[Any, Any]] = {
        "results.csv": (columns, [(k, 1 / (k + 1), k / 4, 1 / (k + 2), "", 0.1) for k in range(epochs)]),
        "confusion_matrix.csv": (
            ("true \\ predicted", *known),
            [(name, *(9 * (k == j) + (j == 0) for j in range(len(known)))) for k, name in enumerate(known)],
        ),
        "curves.csv": (
            ("class", "confidence", "precision", "recall"),
            [(name, place, place, 1 - place) for name in names for place in places],
        ),
        "PR_curve.csv": (("class", "recall", "precision"), [(name, p, 1 - p) for name in names for p in places]),
        "classes.csv": (
            ("class", "images", "instances", "precision", "recall", "AP50", "AP50-95"),
            [(name, 1, 1, 1, 1, 0.5 if k else "", 1) for k, name in enumerate(names)],
        ),
        "labels.csv": (
            ("split", "class", "images", "instances"),
            [(split, name, 3, 5) for split in ("train", "val") for name in names],
        ),
        "boxes.csv": (("class", "x", "y", "width", "height"), [(name, 0.5, 0.5, 0.1, 0.2) for name in names]),
        "val_boxes.csv": (BOXES.split(","), [(image, "label", names[0], "", 1, 2, 60, 70)]),
    }
    for name, (head, rows) in documents.items():
        (folder / name).write_text(csv_text(head, rows))
    return folder


# What there is of 16 photos or fewer.
DRAWN = [name for name in PICTURES if not name.startswith(("val_batch1", "val_batch2"))]
SIZES = {
    "results.png": (500, 960),  # 2 rows of 3 panels
    "F1_curve.png": (600, 1000),
    "PR_curve.png": (600, 1000),
    "val_batch0_pred.jpg": (150 + LINE + GAP, 200 + GAP),
}


@pytest.mark.parametrize("classes", [1, 80])
def test_all_pictures_of_a_run(classes: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = folder_of(tmp_path / "exp", classes)
    before = {file.name for file in exp.iterdir()}
    assert run([str(exp)]) == 0
    assert capfd.readouterr() == ("\n".join(DRAWN) + "\n", "")
    assert {file.name for file in exp.iterdir()} - before == set(DRAWN)
    for name in DRAWN:
        picture = cv2.imread(str(exp / name))
        assert picture.std() > 1, name
        assert picture.shape[:2] == SIZES.get(name, picture.shape[:2])


def test_only_what_is_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = folder_of(tmp_path / "exp")
    assert run([str(exp), "--only", "val_batch0_pred.jpg", "results.png"]) == 0
    assert capfd.readouterr().out == "val_batch0_pred.jpg\nresults.png\n"
    assert {file.name for file in exp.iterdir() if file.suffix in (".png", ".jpg")} == {
        "val_batch0_pred.jpg",
        "results.png",
    }


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
    exp = folder_of(tmp_path / "exp")
    (exp / missing).unlink()
    monkeypatch.setattr(plots, "drawn", lambda *_: np.zeros((4, 4, 3), np.uint8))
    assert run([str(exp)]) == 0
    assert capfd.readouterr() == ("".join(f"{name}\n" for name in DRAWN if name not in lost), "")


@pytest.mark.parametrize(
    "name", ["results.csv", "curves.csv", "PR_curve.csv", "labels.csv", "boxes.csv", "val_boxes.csv"]
)
def test_a_head_alone_draws_nothing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run without labels, or before its first epoch is over."""
    exp = folder_of(tmp_path / "exp")
    path = exp / name
    path.write_text(path.read_text().splitlines()[0] + "\n")
    monkeypatch.setattr(plots, "drawn", lambda *_: np.zeros((4, 4, 3), np.uint8))
    assert run([str(exp)]) == 0
    out, warnings = capfd.readouterr()
    assert not warnings
    lost = [picture for picture in DRAWN if name in PICTURES[picture].files]
    assert out.split() == [picture for picture in DRAWN if picture not in lost]


MALFORMED = {
    "results.csv": [
        ("", "is empty"),
        ("a,b\n1,2\n", "epoch"),
        ("epoch,a\n1\n", "1 cells in row 2"),
        ("epoch\nx\n", "x"),
    ],
    "confusion_matrix.csv": [("t,a\nb,1\n", "names")],
    "curves.csv": [("class,confidence,precision\na,0,1\n", "no column recall"), ('"\na,0,1,1' + "x" * 200_000, "CSV")],
    "PR_curve.csv": [("class,recall,precision\na,zero,1\n", "zero")],
    "classes.csv": [("class,AP50\ndisc,high\n", "high")],
    "labels.csv": [("split,class,instances\ntrain,a,\n", "instances")],
    "boxes.csv": [("class,x,y,width,height\nnobody,1,1,1,1\n", "nobody")],
    "val_boxes.csv": [(f"{BOXES}\na.jpg,label,a,,1,2,3,\n", "y2")],
}


@pytest.mark.parametrize(
    ("name", "content", "problem"), [(k, *one) for k, several in MALFORMED.items() for one in several]
)
def test_a_malformed_file_is_one_warning(
    name: str,
    content: str,
    problem: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is named, the other pictures are drawn, and the exit code says that not all is well."""
    exp = folder_of(tmp_path / "exp")
    (exp / name).write_text(content)
    monkeypatch.setattr(plots, "drawn", lambda *_: np.zeros((4, 4, 3), np.uint8))
    assert run([str(exp), "--background"]) == 1
    out, warning = capfd.readouterr()
    assert not out
    assert warning.startswith(f"warning: {exp / name} ")
    assert warning.count("\n") == 1
    assert problem in warning
    needs = {"classes.csv": {"PR_curve.png"}, "boxes.csv": {"labels.jpg"}}
    lost = needs.get(name) or {picture for picture in DRAWN if name in PICTURES[picture].files}
    assert {file.name for file in exp.iterdir() if file.suffix in (".png", ".jpg")} == set(DRAWN) - lost


@pytest.fixture(autouse=True)
def not_nicer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tests themselves do not give way; how far they were to."""
    asked: list[int] = []
    monkeypatch.setattr(os, "nice", asked.append)
    monkeypatch.setattr(cv2, "setNumThreads", lambda count: None)
    return asked


def test_the_background_gives_way_and_is_silent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], not_nicer: list[int]
) -> None:
    exp = folder_of(tmp_path / "exp")
    assert run([str(exp), "--only", "results.png", "--background"]) == 0
    assert capfd.readouterr() == ("", "")
    assert not_nicer == [10]
    assert (exp / "results.png").is_file()


def test_a_picture_that_cannot_be_drawn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = folder_of(tmp_path / "exp")

    def fails(documents: Documents) -> np.ndarray:
        raise MemoryError("no room")

    monkeypatch.setitem(PICTURES, "results.png", PICTURES["results.png"]._replace(draw=fails))
    assert run([str(exp), "--only", "results.png", "val_batch0_pred.jpg"]) == 1
    expected = f"warning: {exp / 'results.png'} cannot be drawn (MemoryError: no room)\n"
    assert capfd.readouterr() == ("val_batch0_pred.jpg\n", expected)


def test_nobody_reads_half_a_picture(tmp_path: Path) -> None:
    """The file is replaced, not written over: who has opened the old one reads it to its end."""
    exp = folder_of(tmp_path / "exp")
    path = exp / "val_batch0_pred.jpg"
    path.write_text("old")
    with path.open() as old:
        assert run([str(exp), "--only", path.name]) == 0
        assert old.read() == "old"
    assert cv2.imread(str(path)) is not None
    assert not list(exp.glob(".*"))


def test_a_picture_that_cannot_be_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = folder_of(tmp_path / "exp")
    (exp / "val_batch0_pred.jpg").mkdir()
    assert run([str(exp), "--only", "val_batch0_pred.jpg"]) == 1
    assert capfd.readouterr().err.startswith(f"warning: {exp / 'val_batch0_pred.jpg'} cannot be written: ")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nowhere"], "nowhere is not a folder"),
        (["empty"], "empty holds nothing to draw from"),
        (["exp", "--only", "labels.png"], "there is no picture labels.png (did you mean 'labels.jpg'?)"),
        (["exp", "--out", "a.png"], "--out is for the chart of several runs"),
        (["exp", "exp", "--only", "results.png"], "--only is for the pictures of one run"),
        (["exp", "nowhere"], "nowhere is not a folder"),
        (["exp", "exp", "--out", "a.nothing"], "a.nothing cannot be written: no such format"),
        (["exp", "exp", "--out", "exp/results.csv/a.png"], "exp/results.csv/a.png cannot be written: "),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder_of(tmp_path / "exp")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 1
    out, error = capfd.readouterr()
    assert not out
    assert error.startswith(f"error: {problem}")
    assert error.count("\n") == 1


def test_only_a_picture_without_its_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    exp = folder_of(tmp_path / "exp")
    (exp / "labels.csv").unlink()
    assert run([str(exp), "--only", "labels.jpg"]) == 1
    assert capfd.readouterr().err == f"error: {exp} holds nothing to draw from; there must be labels.csv\n"


def test_main_ends_with_the_exit_code(tmp_path: Path) -> None:
    """Training calls it without `sys.exit`."""
    exp = folder_of(tmp_path / "exp")
    for arguments, code in (([str(exp), "--only", "results.png"], 0), ([str(tmp_path / "nowhere")], 1)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code


def test_areas_of_the_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AP50 is that of classes.csv; where there is none, the mean of the precision."""
    exp = folder_of(tmp_path / "exp")
    asked: list[Any] = []
    monkeypatch.setattr(plots, "drawn", lambda *given: asked.append(given))
    PICTURES["PR_curve.png"].draw(Documents(exp))
    (exp / "classes.csv").write_text("class,images,precision,recall\na,1,1,1\n")  # a classifier's
    PICTURES["PR_curve.png"].draw(Documents(exp))
    (_, curves, areas), (_, _, others) = asked
    assert curves.names == NAMES
    assert areas == pytest.approx([0.5, 0.5, 0.5])
    assert others == pytest.approx([0.5, 0.5, 0.5])  # of 1, 0.75, 0.5, 0.25, 0
    (exp / "classes.csv").write_text("class,AP50\ndisc,0.125\n$x_$,\n")
    PICTURES["PR_curve.png"].draw(Documents(exp))
    assert asked[-1][2] == pytest.approx([0.125, 0.5, 0.5])


def test_all_classes_are_marked_where_f1_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the pictures of precision and recall as well."""
    exp = folder_of(tmp_path / "exp")
    asked: list[Any] = []
    monkeypatch.setattr(plots, "drawn", lambda *given: asked.append(given))
    for name in ("P_curve.png", "R_curve.png", "F1_curve.png"):
        PICTURES[name].draw(Documents(exp))
    places = np.array([0, 0.25, 0.5, 0.75, 1])
    for (make, title, curves, operating), (expected, values) in zip(
        asked,
        [("precision", places), ("recall", 1 - places), ("F1", 2 * places * (1 - places))],
        strict=True,
    ):
        assert make is charts.confidence_figure
        assert (title, operating) == (expected, 2)
        assert curves.values == pytest.approx(np.array([values] * 3))


# Several runs


def test_runs_are_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = folder_of(tmp_path / "exp"), folder_of(tmp_path / "exp2", epochs=5)
    before = sorted(first.iterdir())
    assert run([str(first), str(second)]) == 0
    assert capfd.readouterr().out.splitlines() == [
        " run  epochs      mAP_0.5       recall",
        " exp       3  0.5000 in 2  0.5000 in 0",
        "exp2       5  1.0000 in 4  0.5000 in 0",
        "comparison.png",
    ]
    assert cv2.imread("comparison.png").shape == (535, 960, 3)  # with a line of names
    assert sorted(first.iterdir()) == before
    assert run([str(first), str(second), "--out", "charts/a.jpg", "--background"]) == 0
    assert not capfd.readouterr().out
    assert cv2.imread("charts/a.jpg").shape == (535, 960, 3)


def test_a_run_that_cannot_be_compared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others are."""
    first, second = folder_of(tmp_path / "exp"), folder_of(tmp_path / "exp2")
    (first / "results.csv").unlink()
    out = tmp_path / "a.png"
    assert run([str(first), str(second), "--out", str(out)]) == 1
    told, warning = capfd.readouterr()
    assert told.splitlines()[1].split()[0] == "exp2"
    assert warning == f"warning: {first / 'results.csv'} cannot be read: No such file or directory\n"
    (second / "results.csv").write_text("epoch,train/loss\n")
    assert run([str(first), str(second), "--out", str(out)]) == 1
    assert "error: there is no results.csv with an epoch in " in capfd.readouterr().err


def test_names_of_runs() -> None:
    assert run_names([Path("a/exp"), Path("b/exp2/")]) == ["exp", "exp2"]
    assert run_names([Path("a/exp"), Path("b/exp")]) == ["a/exp", "b/exp"]
    assert run_names([Path(), Path("/b/exp")]) == [Path.cwd().name, "exp"]


def test_the_table_of_runs_that_differ() -> None:
    one = {"epoch": np.array([0.0, 1]), "metrics/a": np.array([0.25, 0.5]), "train/x": np.zeros(2)}
    two = {"epoch": np.array([0.0]), "metrics/b": np.array([math.nan])}
    assert best_epochs({"one": one, "two": two}) == [
        "run  epochs            a  b",
        "one       2  0.5000 in 1  -",
        "two       1            -  -",
    ]


# The process


def test_training_can_start_it_cheaply(tmp_path: Path) -> None:
    """Neither torch nor pyplot is imported, and matplotlib not before a chart is drawn."""
    exp = folder_of(tmp_path / "exp")
    code = (
        "import sys; sys.path[0] = sys.argv[2]; from utils.plots.run_pictures import run;"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules);"
        "run([sys.argv[1], '--background', '--only', 'results.png', 'labels.jpg']);"
        "print('torch' in sys.modules, 'matplotlib' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    environment = {**os.environ, "MPLBACKEND": "TkAgg", "DISPLAY": ""}
    told = subprocess.run(
        [sys.executable, "-c", code, str(exp), str(ROOT)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (told.stdout, told.stderr) == ("False False\nFalse True False\n", "")


def test_the_command(tmp_path: Path) -> None:
    """A notebook's back end in the environment is no harm."""
    exp = folder_of(tmp_path / "exp")
    command = [sys.executable, "-m", "utils.plots", str(exp), "--only", "results.png", "labels.jpg"]
    environment = {**os.environ, "MPLBACKEND": "no such back end"}
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (told.returncode, told.stdout, told.stderr) == (0, "results.png\nlabels.jpg\n", "")


def test_a_class_has_the_colour_that_it_has_in_training(tmp_path: Path) -> None:
    """By its number among all classes, whichever comes first in the file of boxes."""
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((320, 320, 3), np.uint8))
    table = written(tmp_path / "b.csv", BOXES, f"{tmp_path}/a.png,label,ring,,10,50,100,100")
    (found,) = read_photos(table, 0, ["disc", "square", "ring"])
    assert found.marks["label"].classes == [2]
    assert (draw_photos([found], "label") == COLOURS[2]).all(2).any()
