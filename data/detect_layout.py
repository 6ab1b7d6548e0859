"""Data sets without a YAML that --data may name: a folder with COCO or VOC annotations or classes, or a COCO file.

A folder with a data.yaml is read by that file. Called by data/dataset.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from data.data_yaml import DataSpec, checked_spec, images_below, read_spec
from data.voc import ANNOTATION_FOLDERS, LISTS, has_annotations, is_voc_list
from utils.errors import UserError

YAML_NAMES = ("data.yaml", "data.yml")
EXPORTED_ANNOTATIONS = "_annotations.coco.json"  # file in each folder of Roboflow's COCO export
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "test"), "test": ("test",)}
HELD_OUT_SHARE = 0.2  # share of the images, or of each class, to hold out if there are no validation images


def read_folder(folder: Path) -> DataSpec:
    """Return the data set in a folder, with a line that says what was found. Raises `UserError`."""
    for name in YAML_NAMES:
        if (folder / name).is_file():
            return read_spec(folder / name)
    if recognised := _recognise(folder):
        title, content = recognised
        return _described(folder, folder, f"{folder} has {title}", content)
    below = [path for path in _folders(folder) if (path / YAML_NAMES[0]).is_file() or _recognise(path)]
    inner = f" (did you mean {below[0]}?)" if len(below) == 1 else ""
    lists = sorted(path.name for path in (folder / LISTS).glob("*.txt"))
    if lists:
        raise UserError(
            f"{folder} has VOC's lists {', '.join(lists[:4])}{' and more' * (len(lists) > 4)}, but no train.txt in "
            f"{LISTS}, so it is not known which images are for training: write it, with one image "
            "name per line, without suffix"
        )
    raise UserError(
        f"{folder} is not recognised as a data set{inner}: it has no {YAML_NAMES[0]}, no COCO annotations "
        f"(train/{EXPORTED_ANNOTATIONS}, annotations/instances_train*.json), no VOC annotations ({LISTS}/train.txt, or "
        ".xml files in train, annotations, or beside the images), no folder of images per class, also not in train; "
        "write a data YAML (docs/data.md), or make label files by `python -m data.convert voc`"
    )


def read_annotation_file(file: Path) -> DataSpec:
    """Return the data set of a COCO annotation file alone, of which a share is held out. Raises `UserError`."""
    return _described(file, file.parent, f"{file} is a data set of one file", {"train": file.name})


def _described(file: Path, folder: Path, title: str, content: dict[str, Any]) -> DataSpec:
    """Return the data set in a folder for which `content` is the YAML. Without `val:` a share is held out."""
    if "val" not in content:
        content["split"] = HELD_OUT_SHARE
    entries = ", ".join(f"{key}: {_text(value)}" for key, value in content.items() if key != "images")
    return checked_spec(file, {**content, "path": os.path.abspath(folder)}, [f"{title} ({entries})"])


def _text(value: Any) -> str:
    return " and ".join(value) if isinstance(value, list) else str(value)


def _recognise(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the title of a folder's layout and the folder's splits; None if no layout is recognised."""
    found = ((title, recognise(folder)) for title, recognise in RECOGNISED.items())
    return next(((title, content) for title, content in found if content is not None), None)


def _folders(folder: Path) -> list[Path]:
    """Return the subfolders that are not hidden, sorted by name; [] if the folder does not exist."""
    if not folder.is_dir():
        return []
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _exported(folder: Path) -> dict[str, Any] | None:
    """Return the splits of an export that has a folder with images and annotations for each."""
    return _splits(lambda name: f"{name}/{EXPORTED_ANNOTATIONS}", lambda path: (folder / path).is_file())


def _coco(folder: Path) -> dict[str, Any] | None:
    """Return the splits of a folder laid out like COCO's own downloads."""
    content: dict[str, Any] = {}
    for split in SPLIT_FOLDERS:
        files = sorted((folder / "annotations").glob(f"instances_{split}*.json"))
        if len(files) == 1:
            content[split] = f"annotations/{files[0].name}"
    return content if "train" in content else None


def _voc(folder: Path) -> dict[str, Any] | None:
    """Return the lists of each split in VOC's layout, of the folder or of the years in it, such as VOC2012."""

    def lists_of(name: str) -> list[str]:
        lists = [year / LISTS / f"{name}.txt" for year in (folder, *sorted(folder.glob("VOC*")))]
        return [str(file.relative_to(folder)) for file in lists if file.is_file() and is_voc_list(file)]

    content: dict[str, Any] = {split: lists_of(split) for split in SPLIT_FOLDERS}
    content["train"] = content["train"] or ([] if content["val"] else lists_of("trainval"))
    content["val"] = content["val"] or content["test"]
    return {split: lists for split, lists in content.items() if lists} if content["train"] else None


def _xml_by_split(folder: Path) -> dict[str, Any] | None:
    """Return the splits if each has a folder of VOC's XML files, with the images or apart."""
    paths = ("{}", "annotations/{}", "Annotations/{}", "{}/annotations", "{}/Annotations")
    contents = (_splits(path.format, lambda path: has_annotations(folder / path)) for path in paths)
    return next(filter(None, contents), None)


def _xml(folder: Path) -> dict[str, Any] | None:
    """Return the folder of VOC's XML files, unless lists say which split each file belongs to."""
    names = [path.name for path in _folders(folder) if path.name.lower() in ANNOTATION_FOLDERS]
    name = next((name for name in (*names, ".") if has_annotations(folder / name)), None)
    return {"train": name} if name and not any((folder / LISTS / f"{n}.txt").is_file() for n in SPLIT_FOLDERS) else None


def _classes_by_split(folder: Path) -> dict[str, Any] | None:
    """Return the splits if each has a folder of images per class."""
    return _splits(lambda name: name, lambda name: _has_class_folders(folder / name))


def _classes(folder: Path) -> dict[str, Any] | None:
    """Return no entries, so that the folder itself is split, if it has a folder of images per class."""
    return {} if _has_class_folders(folder, 2) else None


def _splits(path_of: Callable[[str], str], fits: Callable[[str], bool]) -> dict[str, Any] | None:
    """Return the path of each split that fits, by split; None if no path for training fits."""
    content = {}
    for split, names in SPLIT_FOLDERS.items():
        path = next((path_of(name) for name in names if fits(path_of(name))), None)
        if path:
            content[split] = path
    return content if "train" in content else None


def _has_class_folders(folder: Path, least: int = 1) -> bool:
    """Return whether a folder has at least `least` folders with images, apart from folders of splits, YOLO or VOC."""
    folders = _folders(folder)
    names = {entry.name for entry in folders}
    if names & {"images", "labels", "JPEGImages"} or names <= {
        name for each in SPLIT_FOLDERS.values() for name in each
    }:
        return False
    classes = (entry for entry in folders if next(images_below(entry, []), None))
    return len(list(islice(classes, least))) == least


RECOGNISED: dict[str, Callable[[Path], dict[str, Any] | None]] = {
    "COCO annotations in the folder of each split": _exported,
    "COCO's layout": _coco,
    "VOC's layout": _voc,
    "VOC's .xml files for each split": _xml_by_split,
    "VOC's .xml files": _xml,
    "a folder of images per class in the folder of each split": _classes_by_split,
    "a folder of images per class": _classes,
}
