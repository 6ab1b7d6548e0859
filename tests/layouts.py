"""Draw a small data set in the layouts that users have: the same images and objects in each, as the exports lie.

Called by tests/test_layouts.py, which reads each layout and trains on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.making import plain, write_image, write_yaml

NAMES = ("cat", "cow", "dog")
COUNTS = {"train": 20, "val": 6, "test": 3}  # images
WIDTH, HEIGHT = 64, 48
COLOURS = ((230, 60, 60), (60, 230, 60), (60, 60, 230))  # of the classes


class DrawnObject(NamedTuple):
    """A rectangle in the colour of its class. box: left, top, width and height in pixels."""

    label: int
    box: tuple[int, int, int, int]


class DrawnImage(NamedTuple):
    """An image without its file. Every third one has no object."""

    stem: str
    objects: list[DrawnObject]

    def write(self, folder: Path, suffix: str = ".jpg") -> Path:
        """Write the image file."""
        pixels = plain(WIDTH, HEIGHT)
        for label, (x, y, width, height) in self.objects:
            pixels[y : y + height, x : x + width] = COLOURS[label]
        return write_image(folder / f"{self.stem}{suffix}", pixels)

    def label_rows(self) -> list[str]:
        """Return the rows of the image's label file."""
        shares = (
            (label, (x + width / 2) / WIDTH, (y + height / 2) / HEIGHT, width / WIDTH, height / HEIGHT)
            for label, (x, y, width, height) in self.objects
        )
        return [" ".join(f"{number:.6g}" for number in row) for row in shares]

    def xml(self, suffix: str = ".jpg") -> str:
        """Return the image's annotation in VOC's form, with edges counted from 0."""
        objects = "".join(
            f"<object><name>{NAMES[label]}</name><bndbox><xmin>{x}</xmin><ymin>{y}</ymin>"
            f"<xmax>{x + width}</xmax><ymax>{y + height}</ymax></bndbox></object>"
            for label, (x, y, width, height) in self.objects
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        return f"<annotation><filename>{self.stem}{suffix}</filename>{size}{objects}</annotation>"


def drawn(split: str) -> list[DrawnImage]:
    """Return the images of a split."""
    rng = np.random.default_rng(list(split.encode()))

    def objects(number: int) -> Iterator[DrawnObject]:
        for k in range(number % 3):
            width, height = (int(side) for side in rng.integers(12, 24, 2))
            box = (int(rng.integers(0, WIDTH - width)), int(rng.integers(0, HEIGHT - height)), width, height)
            yield DrawnObject((number // 3 + k) % len(NAMES), box)

    return [DrawnImage(f"{split}_{number}", list(objects(number))) for number in range(COUNTS[split])]


def write_text(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


# Layouts


def coco_text(images: Sequence[DrawnImage], first_id: int = 1, group: str = "") -> str:
    """Return a COCO annotation file. group: a category without objects, the supercategory of the others, with id 0."""
    categories = [{"id": 0, "name": group, "supercategory": "none"}] if group else []
    categories += [{"id": first_id + k, "name": name, "supercategory": group} for k, name in enumerate(NAMES)]
    annotations = [
        {"image_id": number, "category_id": first_id + label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        for number, image in enumerate(images)
        for label, box in image.objects
    ]
    described = [
        {"id": number, "file_name": f"{image.stem}.jpg", "width": WIDTH, "height": HEIGHT}
        for number, image in enumerate(images)
    ]
    numbered = [{"id": number, **annotation} for number, annotation in enumerate(annotations)]
    return json.dumps({"categories": categories, "images": described, "annotations": numbered})


def roboflow_coco(folder: Path) -> Path:
    """Roboflow's COCO export: annotations with the images of each split, and an empty supercategory."""
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        for image in drawn(split):
            image.write(folder / name)
        write_text(folder / name / "_annotations.coco.json", coco_text(drawn(split), group="animals"))
    return folder


def coco(folder: Path, images: str = "images/{}2017") -> Path:
    """COCO's own layout. images: the folder of the images of a split."""
    for split in ("train", "val"):
        for image in drawn(split):
            image.write(folder / images.format(split))
        write_text(folder / f"annotations/instances_{split}2017.json", coco_text(drawn(split)))
    return folder


def coco_flat(folder: Path) -> Path:
    """COCO's annotations, with the images of both splits in one folder."""
    return coco(folder, "images")


def coco_file(folder: Path) -> Path:
    """A COCO file alone, with its images in the folder `images` beside it."""
    for image in drawn("train"):
        image.write(folder / "images")
    write_text(folder / "export.json", coco_text(drawn("train")))
    return folder / "export.json"


def voc(folder: Path, images: str = "JPEGImages") -> Path:
    """VOC's layout with its lists."""
    for split in ("train", "val"):
        for image in drawn(split):
            image.write(folder / images)
            write_text(folder / f"Annotations/{image.stem}.xml", image.xml())
        stems = [image.stem for image in drawn(split)]
        write_text(folder / f"ImageSets/Main/{split}.txt", "\n".join(stems))
    return folder


def voc_without_jpegimages(folder: Path) -> Path:
    """VOC's layout, with the images in another folder."""
    return voc(folder, "images")


def voc_beside(folder: Path) -> Path:
    """VOC's layout, with the images beside the folders of annotations and lists."""
    return voc(folder, "")


def voc_without_lists(folder: Path) -> Path:
    """VOC's folders of images and annotations, without a split."""
    for image in drawn("train"):
        image.write(folder / "JPEGImages")
        write_text(folder / f"Annotations/{image.stem}.xml", image.xml())
    return folder


def kaggle(folder: Path) -> Path:
    """Kaggle's `images` and `annotations`, without a split; PNG files."""
    for image in drawn("train"):
        image.write(folder / "images", ".png")
        write_text(folder / f"annotations/{image.stem}.xml", image.xml(".png"))
    return folder


def labelimg(folder: Path) -> Path:
    """What labelImg writes: each XML file beside its image."""
    for image in drawn("train"):
        image.write(folder)
        write_text(folder / f"{image.stem}.xml", image.xml())
    return folder


def roboflow_voc(folder: Path) -> Path:
    """Roboflow's Pascal VOC export: images and XML files in the folder of each split."""
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        for image in drawn(split):
            image.write(folder / name)
            write_text(folder / name / f"{image.stem}.xml", image.xml())
    write_text(folder / "README.roboflow.txt", "an export\n")
    return folder


def roboflow_yolo(folder: Path) -> Path:
    """Roboflow's YOLO export: a data.yaml whose paths lead out of its folder."""
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        for image in drawn(split):
            image.write(folder / name / "images")
            write_text(folder / name / f"labels/{image.stem}.txt", "\n".join(image.label_rows()))
    content = {"train": "../train/images", "val": "../valid/images", "test": "../test/images", "nc": 3}
    origin = {"workspace": "me", "project": "animals", "version": 1, "license": "CC BY 4.0", "url": "https://x.org/1"}
    write_yaml(folder / "data.yaml", {**content, "names": list(NAMES), "roboflow": origin})
    return folder


def class_folders(folder: Path) -> Path:
    """A folder of images per class."""
    for image in drawn("train"):
        image.write(folder / NAMES[int(image.stem.split("_")[1]) % len(NAMES)])
    return folder


def class_folders_by_split(folder: Path) -> Path:
    """A folder of images per class in the folder of each split, as Roboflow exports it."""
    for split, name in (("train", "train"), ("val", "valid"), ("test", "test")):
        for image in drawn(split):
            image.write(folder / name / NAMES[int(image.stem.split("_")[1]) % len(NAMES)])
    return folder


Layout = Callable[[Path], Path]  # draws a data set into a folder; returns what --data names

# By whether they have images for validation; those that have none hold a share out.
BOX_LAYOUTS: dict[Layout, bool] = {
    roboflow_coco: True, coco: True, coco_flat: True, coco_file: False, voc: True, voc_without_jpegimages: True,
    voc_beside: True, voc_without_lists: False, kaggle: False, labelimg: False, roboflow_voc: True, roboflow_yolo: True,
}  # fmt: skip
CLASS_LAYOUTS: dict[Layout, bool] = {class_folders: False, class_folders_by_split: True}
