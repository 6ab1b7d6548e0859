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
from utils.plots.documents import Table
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


def test_masks_are_in_the_order_of_the_boxes(tmp_path: Path) -> None:
    (photo,) = read_masked(tmp_path, "", "1 2 3 4 5 6")
    first, last = photo.boxes["prediction"].masks
    assert (len(first), last.tolist()) == (0, [[1, 2], [3, 4], [5, 6]])
    assert photo.boxes["label"].masks == []


# Outlines


def test_outlines_are_drawn_instead_of_boxes(tmp_path: Path) -> None:
    """The most confident on top; a row without an outline is a box."""
    cv2.imwrite(str(tmp_path / "a.png"), np.zeros((320, 320, 3), np.uint8))
    tilted = "100 50 150 100 100 150 50 100"
    rows = [
        "label,ring,,200,200,300,300,",
        f"prediction,ring,0.9,50,50,150,150,{tilted}",
        "prediction,disc,0.5,0,0,9,9,",
    ]
    table = write_table(tmp_path / "b.csv", f"{VAL_BOXES_HEAD},outline", *(f"{tmp_path}/a.png,{row}" for row in rows))
    (photo,) = read_validation_images(table, 0, ["disc", "ring"])
    disc, ring = photo.boxes["prediction"].outlines
    assert (len(disc), ring.tolist()) == (0, [[100, 50], [150, 100], [100, 150], [50, 100]])
    labels, predicted = (draw_validation_images([photo], kind) == COLOURS[1] for kind in ("label", "prediction"))
    assert labels.all(2)[250, 200]
    ring_pixels = predicted.all(2)
    assert ring_pixels[100, 50]
    assert ring_pixels[125, 125]  # on the lower right edge
    assert not ring_pixels[140:150, 50:60].any()  # the lower left corner of the box around it
