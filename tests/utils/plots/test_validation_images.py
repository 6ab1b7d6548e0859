"""Validation images with their labels and predictions, in grids."""

from __future__ import annotations

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tests.utils.plots.run_folder import VAL_BOXES_HEAD, write_image, write_table
from utils.files import csv_text
from utils.plots.documents import MalformedFile, Table
from utils.plots.drawing import CAPTION_LINE_PIXELS, COLOURS, GAP_PIXELS
from utils.plots.validation_images import ValidationImage, draw_validation_images, read_validation_images


def read_rows(folder: Path, *rows: str) -> list[ValidationImage]:
    """The first grid of a val_boxes.csv with these rows."""
    return read_validation_images(write_table(folder / "b.csv", VAL_BOXES_HEAD, *rows), 0)


@pytest.mark.parametrize(
    ("size", "shown"),
    [((960, 480), (480, 240)), ((480, 300), (480, 300)), ((320, 100), (320, 100)), ((40, 80), (160, 320))],
)
def test_photos_are_resized(size: tuple[int, int], shown: tuple[int, int], tmp_path: Path) -> None:
    """To at most 480 and at least 320 pixels, with their boxes."""
    row = f"{write_image(tmp_path / 'a.png', *size)},label,x,,{size[0] / 4},0,{size[0]},{size[1] / 2}"
    (photo,) = read_rows(tmp_path, row)
    assert photo.image is not None
    assert photo.image.shape == (*shown[::-1], 3)
    assert photo.boxes["label"].boxes == pytest.approx(np.array([[shown[0] / 4, 0, shown[0], shown[1] / 2]]))
    assert draw_validation_images([photo], "label").shape == (
        shown[1] + CAPTION_LINE_PIXELS + GAP_PIXELS,
        max(shown[0], 320) + GAP_PIXELS,
        3,
    )


def test_photos_are_rotated_by_their_exif_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (400, 200)).save(tmp_path / "a.jpg", exif=exif)
    (photo,) = read_validation_images(
        write_table(tmp_path / "b.csv", VAL_BOXES_HEAD, f"{tmp_path}/a.jpg,image,,,,,,"), 0
    )
    assert photo.image is not None
    assert photo.image.shape == (400, 200, 3)


def test_boxes_by_image_and_kind(tmp_path: Path) -> None:
    """The most confident prediction is last, on top; a class has the same number in all images."""
    one, two = (write_image(tmp_path / name, 400, 400) for name in ("1.png", "2.png"))
    rows = (
        f"{two},prediction,disc,0.875,1,2,3,4",
        f"{one},label,bar,,5,6,7,8",
        f"{two},prediction,bar,0.25,9,10,11,12",
        f"{two},label,disc,,13,14,15,16",
    )
    first, second = read_rows(tmp_path, *rows)
    assert (first.path, second.path) == (two, one)  # in the order of the file
    assert first.boxes["prediction"].texts == ["bar 0.25", "disc 0.88"]
    assert first.boxes["prediction"].classes == [1, 0]
    assert first.boxes["prediction"].boxes.tolist() == [[9, 10, 11, 12], [1, 2, 3, 4]]
    assert first.boxes["label"].boxes.tolist() == [[13, 14, 15, 16]]
    assert (first.boxes["label"].classes, first.boxes["label"].texts) == ([0], ["disc"])
    assert (second.boxes["label"].classes, second.boxes["label"].texts) == ([1], ["bar"])
    assert second.boxes["prediction"].texts == []


def test_a_class_has_one_colour(tmp_path: Path) -> None:
    """Labels and predictions of a class have the same colour, as have their texts' backgrounds."""
    path = write_image(tmp_path / "a.png", 400, 300)
    rows = (
        f"{path},label,bar,,20,20,40,40",
        f"{path},label,disc,,100,80,300,280",
        f"{path},prediction,disc,.5,100,80,300,280",
    )
    (photo,) = read_rows(tmp_path, *rows)
    labels, predictions = (draw_validation_images([photo], kind) for kind in ("label", "prediction"))
    for picture in (labels, predictions):
        for x, y in ((100, 200), (300, 200), (200, 80), (200, 280), (100, 70)):  # edges, and the text's corner
            assert picture[y, x].tolist() == pytest.approx(COLOURS[1], abs=3)
        assert (picture[150, 200] == 90).all()
    assert (labels[30, 20] != 90).any()
    assert (predictions[30, 20] == 90).all()
    assert (predictions[66:80, 104:400] != labels[66:80, 104:400]).any()  # with the confidence


@pytest.mark.parametrize("name", ["intermediate hinged traffic-sign " * 9, "猫 $x$ \udcff\n", ""])
def test_text_stays_within_the_photo(name: str, tmp_path: Path) -> None:
    """The name of a box in a corner is inside of the image, on a background."""
    path = write_image(tmp_path / "a.png", 400, 200)
    (tmp_path / "b.csv").write_text(
        csv_text(
            VAL_BOXES_HEAD.split(","),
            [(path, "label", name, "", 390, 0, 400, 10), (path, "label", "x", "", -9e9, 0, 9e9, 190)],
        ),
        errors="surrogateescape",
    )
    (photo,) = read_validation_images(Table(tmp_path / "b.csv"), 0)
    picture = draw_validation_images([photo], "label")
    assert picture.shape == (200 + CAPTION_LINE_PIXELS + GAP_PIXELS, 400 + GAP_PIXELS, 3)
    assert (picture[:200, 400:] == 255).all()
    if name:
        assert (picture[:14, 325:385] == COLOURS[0]).all(2).sum() > 100  # to the left of the box


def test_a_long_name_keeps_its_confidence(tmp_path: Path) -> None:
    """The middle of a long name is cut."""
    path, name = write_image(tmp_path / "a.png", 400, 200), "intermediate hinged traffic-sign " * 9
    pictures = []
    for confidence in (0.5, 0.75):
        row = f"{path},prediction,{name},{confidence},100,100,200,150"
        pictures.append(draw_validation_images(read_rows(tmp_path, row), "prediction"))
    rows, columns, _ = np.nonzero(pictures[0] != pictures[1])
    assert rows.max() < 100
    assert columns.min() > 260  # at the end


def test_unreadable_photos(tmp_path: Path) -> None:
    """They are grey, without boxes, and named."""
    (tmp_path / "no image.jpg").write_text("text")
    (tmp_path / "empty.jpg").touch()
    paths = [str(tmp_path / name) for name in ("missing.jpg", "no image.jpg", "empty.jpg", ".")]
    rows = [(path, "label", "x", "", 1, 1, 50, 50) for path in paths]
    (tmp_path / "b.csv").write_text(csv_text(VAL_BOXES_HEAD.split(","), rows))
    photo = read_validation_images(Table(tmp_path / "b.csv"), 0)
    assert [one.image for one in photo] == [None] * 4
    picture = draw_validation_images(photo, "label")
    assert picture.shape == (2 * (160 + CAPTION_LINE_PIXELS + GAP_PIXELS), 2 * (320 + GAP_PIXELS), 3)
    assert (picture[:160, :320] == 160).all()
    assert (picture[160 : 160 + CAPTION_LINE_PIXELS, :320] < 100).any()


def test_a_file_of_any_name(tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff \xc3\xbc, $")
    os.mkdir(folder)
    os.replace(write_image(tmp_path / "a.png", 400, 400), f"{folder}/\udcfe.png")
    (tmp_path / "b.csv").write_bytes(
        csv_text(VAL_BOXES_HEAD.split(","), [(f"{folder}/\udcfe.png", "image", *[""] * 6)]).encode(
            errors="surrogateescape"
        )
    )
    (photo,) = read_validation_images(Table(tmp_path / "b.csv"), 0)
    assert photo.image is not None
    assert (draw_validation_images([photo], "label")[:200, :200] == 90).all()


def test_grids_of_sixteen_and_no_more_than_three(tmp_path: Path) -> None:
    rows = [f"{tmp_path}/{number}.jpg,image,,,,,," for number in range(60)]
    table = write_table(tmp_path / "b.csv", VAL_BOXES_HEAD, *rows)
    numbers = [[int(Path(one.path).stem) for one in read_validation_images(table, batch)] for batch in range(4)]
    assert numbers == [[*range(16)], [*range(16, 32)], [*range(32, 48)], []]


def test_a_row_of_the_grid_is_as_high_as_its_highest_photo(tmp_path: Path) -> None:
    paths = [write_image(tmp_path / f"{k}.png", 320, height) for k, height in enumerate((50, 120, 80, 60))]
    photo = read_validation_images(
        write_table(tmp_path / "b.csv", VAL_BOXES_HEAD, *(f"{path},image,,,,,," for path in paths)), 0
    )
    picture = draw_validation_images(photo, "label")
    below = 120 + CAPTION_LINE_PIXELS + GAP_PIXELS
    assert picture.shape == (below + 80 + CAPTION_LINE_PIXELS + GAP_PIXELS, 2 * (320 + GAP_PIXELS), 3)
    assert (picture[below : below + 80, :320] == 90).all()
    assert (picture[50 + CAPTION_LINE_PIXELS + GAP_PIXELS : below, :320] == 255).all()  # a p may reach into the gap


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("prediction,x,,1,2,3,4", "confidence"),
        ("label,x,,1,2,3,", "y2"),
        ("label,x,,1,2,inf,4", "x2"),
        ("label,x,,a,2,3,4", "x1"),
    ],
)
def test_malformed_boxes(row: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=f"column {problem}"):
        read_rows(tmp_path, f"a.jpg,{row}")


def test_a_class_has_the_colour_that_it_has_in_training(tmp_path: Path) -> None:
    """The colour depends on the number among all classes, not on the order of the file."""
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((320, 320, 3), np.uint8))
    table = write_table(tmp_path / "b.csv", VAL_BOXES_HEAD, f"{tmp_path}/a.png,label,ring,,10,50,100,100")
    (photo,) = read_validation_images(table, 0, ["disc", "square", "ring"])
    assert photo.boxes["label"].classes == [2]
    assert (draw_validation_images([photo], "label") == COLOURS[2]).all(2).any()


# Masks


def read_masked(folder: Path, *outlines: str) -> list[ValidationImage]:
    """Two predictions on an image of 400 x 400 pixels, the second the most confident, with these outlines."""
    path = write_image(folder / "a.png", 400, 400)
    boxes = write_table(folder / "b.csv", VAL_BOXES_HEAD, *(f"{path},prediction,disc,{c},1,2,3,4" for c in (0.5, 0.9)))
    rows = [f"{path},prediction,disc,,{outline}" for outline in outlines]
    return read_validation_images(
        boxes, 0, (), write_table(folder / "m.csv", "image,kind,class,confidence,outline", *rows)
    )


def test_outlines_are_in_the_order_of_the_boxes(tmp_path: Path) -> None:
    (photo,) = read_masked(tmp_path, "", "1 2 3 4 5 6")
    first, last = photo.boxes["prediction"].outlines
    assert (len(first), last.tolist()) == (0, [[1, 2], [3, 4], [5, 6]])
    assert photo.boxes["label"].outlines == []


@pytest.mark.parametrize(
    ("outlines", "problem"),
    [
        (("1 2 3 4",), "has 1 rows for .*a.png, and .* 2"),
        (("1 2 3", ""), "no list of x and y"),
        (("a b", ""), "no list"),
    ],
)
def test_malformed_outlines(outlines: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    with pytest.raises(MalformedFile, match=f"m.csv has .*{problem.removeprefix('has ')}"):
        read_masked(tmp_path, *outlines)
