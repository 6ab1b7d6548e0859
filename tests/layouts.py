"""Draw a small data set in the layouts that users have: the same images and objects in each, as the exports lie.

Called by tests/test_layouts.py, which reads each layout and trains on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.making import plain, write_image, write_yaml

NAMES = ("cat", "cow", "dog")
COUNTS = {"train": 20, "val": 6, "test": 3}  # images
WIDTH, HEIGHT = 64, 48
COLOURS = ((230, 60, 60), (60, 230, 60), (60, 60, 230))  # of the classes


class DrawnImage(NamedTuple):
    """An image without its file: a rectangle per object, in the colour of its class. Every third has none.

    objects: class and box of each: left, top, width and height in pixels.
    """

    stem: str
    objects: list[tuple[int, tuple[int, int, int, int]]]

    def label_rows(self) -> list[str]:
        """Return the rows of the image's label file."""
        shares = (
            (label, (x + width / 2) / WIDTH, (y + height / 2) / HEIGHT, width / WIDTH, height / HEIGHT)
            for label, (x, y, width, height) in self.objects
        )
        return [" ".join(f"{number:.6g}" for number in row) for row in shares]

    def xml(self, suffix: str) -> str:
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

    def objects(number: int) -> Iterator[tuple[int, tuple[int, int, int, int]]]:
        for k in range(number % 3):
            width, height = (int(side) for side in rng.integers(12, 24, 2))
            box = (int(rng.integers(0, WIDTH - width)), int(rng.integers(0, HEIGHT - height)), width, height)
            yield (number // 3 + k) % len(NAMES), box

    return [DrawnImage(f"{split}_{number}", list(objects(number))) for number in range(COUNTS[split])]


def write_split(split: str, images: Path, annotations: Path | None = None, suffix: str = ".jpg") -> list[DrawnImage]:
    """Write the images of a split into a folder, and VOC's annotations into another; return the images."""
    for image in drawn(split):
        pixels = plain(WIDTH, HEIGHT)
        for label, (x, y, width, height) in image.objects:
            pixels[y : y + height, x : x + width] = COLOURS[label]
        write_image(images / f"{image.stem}{suffix}", pixels)
        if annotations:
            write_text(annotations / f"{image.stem}.xml", image.xml(suffix))
    return drawn(split)


def write_text(file: Path, text: str, encoding: str = "utf-8") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding)


# Layouts

SPLITS = {"train": "train", "val": "valid", "test": "test"}  # folders of Roboflow's exports


def coco_text(images: Sequence[DrawnImage], group: str = "") -> str:
    """Return a COCO annotation file. group: a category without objects, the supercategory of the others, with id 0."""
    categories = [{"id": 0, "name": group, "supercategory": "none"}] if group else []
    categories += [{"id": k, "name": name, "supercategory": group} for k, name in enumerate(NAMES, 1)]
    annotations = [
        {"image_id": number, "category_id": 1 + label, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        for number, image in enumerate(images)
        for label, box in image.objects
    ]
    files = [
        {"id": number, "file_name": f"{image.stem}.jpg", "width": WIDTH, "height": HEIGHT}
        for number, image in enumerate(images)
    ]
    numbered = [{"id": number, **annotation} for number, annotation in enumerate(annotations)]
    return json.dumps({"categories": categories, "images": files, "annotations": numbered})


def roboflow_coco(folder: Path) -> Path:
    """Roboflow's COCO export: annotations with the images of each split, and an empty supercategory."""
    for split, name in SPLITS.items():
        write_text(folder / name / "_annotations.coco.json", coco_text(write_split(split, folder / name), "animals"))
    return folder


def coco(folder: Path) -> Path:
    """COCO's annotations, with the images of both splits in one folder."""
    for split in ("train", "val"):
        images = write_split(split, folder / "images")
        write_text(folder / f"annotations/instances_{split}2017.json", coco_text(images))
    return folder


def coco_file(folder: Path) -> Path:
    """A COCO file alone, with its images in the folder `images` beside it."""
    write_text(folder / "export.json", coco_text(write_split("train", folder / "images")))
    return folder / "export.json"


def voc(folder: Path) -> Path:
    """VOC's layout with its lists, as CVAT names them."""
    for split, name in (("train", "Train"), ("val", "Validation")):
        images = write_split(split, folder / "JPEGImages", folder / "Annotations")
        write_text(folder / f"ImageSets/Main/{name}.txt", "\n".join(image.stem for image in images))
    return folder


def kaggle(folder: Path) -> Path:
    """Kaggle's `images` and `annotations`, without a split; PNG files, and labelImg's list of classes."""
    write_text(folder / "annotations/predefined_classes.txt", "\n".join(NAMES))
    write_split("train", folder / "images", folder / "annotations", ".png")
    return folder


def roboflow_voc(folder: Path) -> Path:
    """Roboflow's Pascal VOC export: images and XML files in the folder of each split."""
    for split, name in SPLITS.items():
        write_split(split, folder / name, folder / name)
    write_text(folder / "README.roboflow.txt", "an export\n")
    return folder


def roboflow_yolo(folder: Path) -> Path:
    """Roboflow's YOLO export: a data.yaml whose paths lead out of its folder."""
    for split, name in SPLITS.items():
        write_labels(split, folder / name / "images", folder / name / "labels")
    content = {"train": "../train/images", "val": "../valid/images", "test": "../test/images", "nc": 3}
    write_yaml(folder / "data.yaml", {**content, "names": list(NAMES), "roboflow": {"version": 1}})
    return folder


def write_labels(split: str, images: Path, labels: Path) -> list[DrawnImage]:
    """Write the images of a split into a folder, and YOLO's label files into another; return the images."""
    for image in drawn(split):
        write_text(labels / f"{image.stem}.txt", "\n".join(image.label_rows()))
    return write_split(split, images)


def cvat_yolo(folder: Path) -> Path:
    """CVAT's YOLO 1.1, as of Darknet: a list whose paths begin with a folder `data`, and images beside their labels."""
    images = write_labels("train", folder / "obj_train_data", folder / "obj_train_data")
    write_text(folder / "train.txt", "".join(f"data/obj_train_data/{image.stem}.jpg\n" for image in images))
    write_text(folder / "obj.data", "classes = 3\nnames = data/obj.names\ntrain = data/train.txt\nbackup = backup/\n")
    write_text(folder / "obj.names", "\n".join(NAMES))
    return folder


def list_file(folder: Path) -> Path:
    """The list of the same, of another name."""
    return (cvat_yolo(folder) / "train.txt").rename(folder / "photos.txt")


def label_studio(folder: Path) -> Path:
    """Label Studio's YOLO, unpacked into a folder of its own."""
    write_labels("train", folder / "project-1/images", folder / "project-1/labels")
    write_text(folder / "project-1/classes.txt", "\n".join(NAMES) + "\x0c\n\x85\n\u2028")
    write_text(folder / "project-1/notes.json", '{"categories": [], "info": {}}')
    return folder


def labelimg(folder: Path) -> Path:
    """labelImg's label files beside the photos, here in a folder `images`."""
    folder = folder / "images"
    write_labels("train", folder, folder)
    write_text(folder / "classes.txt", "\r".join(NAMES), "utf-16")
    write_text(folder / "._train_0.jpg", "as macOS packs it")
    write_image(folder / ".ipynb_checkpoints/a-checkpoint.jpg")
    return folder


def other_yaml(folder: Path) -> Path:
    """FiftyOne's or Supervisely's YOLO: the data YAML has another name."""
    bare_yolo(folder).joinpath("classes.txt").unlink()
    content = {"path": str(folder), "train": "./images/train/", "val": "./images/val/"}
    write_yaml(folder / "dataset.yaml", {**content, "names": dict(enumerate(NAMES))})
    write_yaml(folder / "other.yaml", {"train": 3})
    return folder


def bare_yolo(folder: Path) -> Path:
    """YOLO's folders without a data YAML."""
    for split in ("train", "val"):
        write_labels(split, folder / "images" / split, folder / "labels" / split)
    write_text(folder / "classes.txt", "\n".join(NAMES))
    return folder


def cvat_coco(folder: Path) -> Path:
    """CVAT's COCO 1.0, here in UTF-16."""
    text = coco_text(write_split("train", folder / "images/default"))
    write_text(folder / "annotations/instances_default.json", text, "utf-16")
    return folder


def coco_by_name(folder: Path) -> Path:
    """COCO files named after their splits, with the images in one folder of any name."""
    for split in ("train", "val"):
        write_text(folder / f"{split}_coco.json", coco_text(write_split(split, folder / "photos")))
    return folder


def voc_of_any_name(folder: Path) -> Path:
    """VOC's annotations and their images in folders of any name."""
    write_split("train", folder / "photos", folder / "annots")
    return folder


def write_table(file: Path, header: str, images: Sequence[DrawnImage], row: str) -> None:
    """Write a CSV file: `row` for each object, with the fields below, and a row with only a name for images without."""
    lines = [header] * bool(header)
    for image in images:
        for label, (x, y, w, h) in image.objects:
            fields = {"n": image.stem, "c": NAMES[label], "x": x, "y": y, "w": w, "h": h, "r": x + w, "b": y + h}
            lines.append(row.format(**fields, sx=x / WIDTH, sr=(x + w) / WIDTH, sy=y / HEIGHT, sb=(y + h) / HEIGHT))
        lines += [] if image.objects else [re.sub("{(?!n)[^}]*}", "", row).format(n=image.stem)]
    write_text(file, "\n".join(lines))


def roboflow_csv(folder: Path) -> Path:
    """Roboflow's CSV beside the images of each split."""
    header, row = "filename,width,height,class,xmin,ymin,xmax,ymax", "{n}.jpg,64,48,{c},{x},{y},{r},{b}"
    for split, name in SPLITS.items():
        write_table(folder / name / "_annotations.csv", header, write_split(split, folder / name), row)
    return folder


def tensorflow_csv(folder: Path) -> Path:
    """TensorFlow's tutorials: tables in a folder of their own, here in Excel's form; a folder down."""
    header, row = "Filename;Class;bbox_x;bbox_y;bbox_width;bbox_height", "{n}.jpg;{c};{x};{y};{w};{h}"
    for split, name in (("train", "train"), ("val", "test")):
        images = write_split(split, folder / "set/images" / name)
        write_table(folder / f"set/data/{name}_labels.csv", header, images, row)
    write_text(folder / ".git/objects/a.json", coco_text([]))
    return folder


def open_images(folder: Path) -> Path:
    """Open Images' shares, in FiftyOne's folders."""
    images, row = write_split("train", folder / "train/data"), "{n},{c},{sx},{sr},{sy},{sb}"
    write_table(folder / "train/labels/detections.csv", "ImageID,LabelName,XMin,XMax,YMin,YMax", images, row)
    return folder


def keras_csv(folder: Path) -> Path:
    """Keras RetinaNet's table without a header, with paths of another machine, and its list of classes."""
    images, row = write_split("train", folder / "photos"), "/home/me/{n}.jpg,{x},{y},{r},{b},{c}"
    write_table(folder / "train.csv", "", images, row)
    write_text(folder / "classes.csv", "cat,0\ncow,1\ndog,2\n")
    return folder


def polygon(box: tuple[int, int, int, int]) -> list[list[int]]:
    x, y, w, h = box
    return [[x, y], [x + w, y], [x + w, y + h], [x, y + h]]


def labelme(folder: Path) -> Path:
    """LabelMe's files in folders of their own, two folders down: rectangles and polygons."""
    for image in write_split("train", folder / "a/set/photos"):
        shapes = [
            {"label": NAMES[label], "shape_type": kind, "points": polygon(box)[:: 2 if kind == "rectangle" else 1]}
            for (label, box), kind in zip(image.objects, ("rectangle", "polygon"), strict=False)
        ]
        content = {"imagePath": f"..\\photos\\{image.stem}.jpg", "shapes": shapes, "imageWidth": WIDTH}
        write_text(folder / f"a/set/json/{image.stem}.json", json.dumps({**content, "imageHeight": HEIGHT}))
    return folder


def via_regions(image: DrawnImage) -> list[dict[str, Any]]:
    """Return an image's objects as VIA's regions: polygons, rectangles and ellipses in turn."""
    regions = []
    for number, (label, (x, y, w, h)) in enumerate(image.objects):
        xs, ys = zip(*polygon((x, y, w, h)), strict=True)
        shapes: list[dict[str, Any]] = [{"name": "polygon", "all_points_x": xs, "all_points_y": ys}]
        shapes.append({"name": "rect", "x": x, "y": y, "width": w, "height": h})
        shapes.append({"name": "ellipse", "cx": x + w / 2, "cy": y + h / 2, "rx": w / 2, "ry": h / 2})
        attributes = {"id": "7", "Type": NAMES[label]}
        regions.append({"shape_attributes": shapes[(number + label) % 3], "region_attributes": attributes})
    return regions


def via(folder: Path) -> Path:
    """VIA's project of each split, three folders down."""
    for split in ("train", "val"):
        images = write_split(split, folder / "a/b/c" / split)
        files = {f"{image.stem}9": {"filename": f"{image.stem}.jpg", "regions": via_regions(image)} for image in images}
        write_text(folder / f"a/b/c/{split}/via.json", json.dumps({"_via_img_metadata": files}))
    return folder


def pets(folder: Path) -> Path:
    """Oxford Pets, a folder down: masks and lists beside VOC's annotations, and other files above."""
    write_split("train", folder / "pets/images", folder / "pets/annotations/xmls")
    write_text(folder / "pets/annotations/trainval.txt", "train_1 1 1 1\n")
    write_image(folder / "pets/annotations/trimaps/train_0.png")
    write_text(folder / "test.csv", "filename,cell\na.jpg,x\n")
    write_image(folder / "docs/a.png")
    return folder


def class_folders(folder: Path, split: str = "train") -> Path:
    """A folder of images per class."""
    for file in [folder / f"{image.stem}.jpg" for image in write_split(split, folder)]:
        (folder / (name := NAMES[int(file.stem.split("_")[1]) % len(NAMES)])).mkdir(exist_ok=True)
        file.rename(folder / name / file.name)
    return folder


def class_folders_by_split(folder: Path) -> Path:
    """A folder of images per class in the folder of each split, as Roboflow exports it, here with capitals."""
    for split, name in SPLITS.items():
        class_folders(folder / name.title(), split)
    return folder


Layout = Callable[[Path], Path]  # draws a data set into a folder; returns what --data names

# By whether they have images for validation; those that have none hold a share out.
BOX_LAYOUTS: dict[Layout, bool] = {
    **dict.fromkeys((roboflow_coco, coco, voc, roboflow_voc, roboflow_yolo), True),
    **dict.fromkeys((other_yaml, bare_yolo, coco_by_name), True),
    **dict.fromkeys((coco_file, kaggle, cvat_yolo, list_file, label_studio, labelimg), False),
    **dict.fromkeys((cvat_coco, voc_of_any_name), False),
    **dict.fromkeys((roboflow_csv, tensorflow_csv, via), True),
    **dict.fromkeys((open_images, keras_csv, labelme, pets), False),
}
CLASS_LAYOUTS: dict[Layout, bool] = {class_folders: False, class_folders_by_split: True}
