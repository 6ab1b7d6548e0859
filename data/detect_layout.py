"""What the folder that --data names is: an export with a data.yaml, COCO or VOC annotations, or a folder per class.

Called by data/dataset.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data.data_yaml import DataSpec, checked_spec, images_below, read_spec
from data.voc import LISTS, is_voc_list
from utils.errors import UserError

YAML_NAMES = ("data.yaml", "data.yml")
EXPORTED_ANNOTATIONS = "_annotations.coco.json"  # in each folder of Roboflow's COCO export
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "test"), "test": ("test",)}
HELD_OUT_SHARE = 0.2  # of each class, without folders for the splits


def read_folder(folder: Path) -> DataSpec:
    """Return the data set in a folder, with a line that says what was found. Raises `UserError`."""
    for name in YAML_NAMES:
        if (folder / name).is_file():
            return read_spec(folder / name)
    for title, recognise in RECOGNISED.items():
        if content := recognise(folder):
            entries = ", ".join(f"{key}: {value}" for key, value in content.items() if key != "images")
            content["path"] = os.path.abspath(folder)
            return checked_spec(folder, content, [f"{folder} has {title} ({entries})"])
    if (folder / "Annotations").is_dir():
        raise UserError(
            f"{folder} has VOC's Annotations, but no {LISTS}/train.txt, so it is not known which images are for "
            "training: write such a list, and val.txt, with an image's name without suffix in each line"
        )
    raise UserError(
        f"{folder} is not recognised as a data set: it has no {YAML_NAMES[0]}, no train/{EXPORTED_ANNOTATIONS}, no "
        f"annotations/instances_train*.json, no {LISTS}/train.txt, and no folder of images per class, also not in "
        "train/; write a data YAML (docs/data.md)"
    )


def _exported(folder: Path) -> dict[str, Any]:
    """Return the splits of an export in which each has a folder with images and annotations."""
    return _splits(lambda name: f"{name}/{EXPORTED_ANNOTATIONS}", lambda path: (folder / path).is_file())


def _coco(folder: Path) -> dict[str, Any]:
    """Return the splits of the layout of COCO's own downloads; their images are in images/train2017 or train2017."""
    content: dict[str, Any] = {}
    images = {}
    for split in SPLIT_FOLDERS:
        files = sorted((folder / "annotations").glob(f"instances_{split}*.json"))
        if len(files) == 1:
            content[split] = f"annotations/{files[0].name}"
            names = (files[0].stem.removeprefix("instances_"), f"images/{split}")
            images[split] = next((name for name in names if (folder / name).is_dir()), names[0])
    return {**content, "images": images} if "train" in content else {}


def _voc(folder: Path) -> dict[str, Any]:
    """Return the lists of each split in VOC's layout, of the folder or of the years in it, such as VOC2012."""
    content: dict[str, Any] = {}
    for split in SPLIT_FOLDERS:
        lists = [year / LISTS / f"{split}.txt" for year in (folder, *sorted(folder.glob("VOC*")))]
        content[split] = [str(file.relative_to(folder)) for file in lists if file.is_file() and is_voc_list(file)]
    content["val"] = content["val"] or content["test"]
    return {split: lists for split, lists in content.items() if lists} if content["train"] else {}


def _classes_by_split(folder: Path) -> dict[str, Any]:
    """Return the splits if each has a folder of images per class."""
    return _splits(lambda name: name, lambda name: _has_class_folders(folder / name))


def _classes(folder: Path) -> dict[str, Any]:
    """Return the share to hold out if the folder has a folder of images per class."""
    return {"split": HELD_OUT_SHARE} if _has_class_folders(folder) else {}


def _splits(path_of: Callable[[str], str], fits: Callable[[str], bool]) -> dict[str, Any]:
    """Return the path of each split that fits, by split; {} without one for training."""
    content = {}
    for split, names in SPLIT_FOLDERS.items():
        path = next((path_of(name) for name in names if fits(path_of(name))), None)
        if path:
            content[split] = path
    return content if "train" in content else {}


def _has_class_folders(folder: Path) -> bool:
    """Return whether a folder has folders with images, of which none is YOLO's `images` or `labels` or VOC's."""
    if not folder.is_dir():
        return False
    folders = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    names = {entry.name for entry in folders}
    return not names & {"images", "labels", "JPEGImages"} and any(
        next(images_below(entry, []), None) for entry in folders
    )


RECOGNISED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "COCO annotations in the folder of each split": _exported,
    "COCO's layout": _coco,
    "VOC's layout": _voc,
    "a folder of images per class in the folder of each split": _classes_by_split,
    "a folder of images per class": _classes,
}
