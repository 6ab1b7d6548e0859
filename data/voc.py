"""Splits of Pascal VOC's layout, read as they lie: ImageSets/Main/train.txt names images, Annotations has their boxes.

Called by data/data_yaml.py and data/detect_layout.py; data/convert.py writes label files instead.
"""

from __future__ import annotations

import hashlib
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data import storage
from data.coco_json import AnnotatedImages, AnnotatedRows, CocoBox, ImageRows, Tally, box_row, cached_json
from data.images import IMAGE_SUFFIXES
from utils.errors import UserError, nearest, plural
from utils.files import read_lines, read_regular

LISTS = Path("ImageSets", "Main")
# In the XML files of the challenge itself, whose coordinates start at 1.
CHALLENGE_MARK = b"<database>The VOC20"


class VocObject(NamedTuple):
    """An object of an XML file."""

    name: str
    box: CocoBox
    difficult: bool


def read_voc(file: Path, one_based: bool = False) -> tuple[tuple[int, int], list[VocObject]]:
    """Read an XML file: the image's size, (width, height), and its objects. Raises `UserError`.

    one_based: coordinates start at 1 and the last pixel belongs to the box, as in the VOC challenge's own files; most
    programs count from 0.
    """
    try:
        root = ET.fromstring(read_regular(file))
        size = int(float(_text(root, "size/width"))), int(float(_text(root, "size/height")))
        if min(size) < 1:
            raise ValueError("its <size> is not positive")
        objects = []
        for item in root.findall("object"):
            left, top, right, bottom = (float(_text(item, f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax"))
            left, top = left - one_based, top - one_based
            box = (left, top, right - left, bottom - top)
            objects.append(VocObject(_text(item, "name"), box, (item.findtext("difficult") or "0").strip() == "1"))
    except (ET.ParseError, ValueError, OverflowError, LookupError) as error:
        raise UserError(f"{file} is not a VOC annotation ({error}); fix it, or move it away") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    return size, objects


def _text(item: ET.Element, path: str) -> str:
    text = (item.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"<{item.tag}> has no <{path}>")
    return text


@dataclass(frozen=True)
class VocImages(AnnotatedImages):
    """The images that a list of VOC names. file: the list; images: XML files by the images' paths."""

    def stamp(self) -> bytes:
        """Return what the rows depend on, for the key of a cache."""
        names = "\0".join(self.names).encode(errors="surrogateescape")
        return names + storage.stamps([str(self.file), *self.images.values()])

    def rows(self, polygons: bool) -> AnnotatedRows:
        """Return the objects of each image; difficult ones are left out, as by the converter."""
        tally, numbers, images = Tally(), {name: number for number, name in enumerate(self.names)}, {}
        for path, file in self.images.items():
            size, objects = read_voc(Path(file), one_based=CHALLENGE_MARK in storage.read_bytes(file))
            tally["boxes of classes that are not in `names`"] += sum(item.name not in numbers for item in objects)
            rows = {
                number: row
                for number, item in enumerate(objects, 1)
                if item.name in numbers and not item.difficult
                if (row := box_row(numbers[item.name], item.box, size, tally))
            }
            images[path] = ImageRows("".join(rows.values()), size, f"{file}: object", list(rows))
        return AnnotatedRows(images, [f"{self.file}: left out: {tally.omitted}"] if tally.omitted else [])


def is_voc_list(location: Path) -> bool:
    """Return whether a path is that of a list of VOC's layout."""
    return location.parts[-3:-1] == LISTS.parts and location.suffix == ".txt" and _annotations(location).is_dir()


def _annotations(file: Path) -> Path:
    return file.parents[2] / "Annotations"


def class_names(file: Path) -> list[str]:
    """Return the classes of all objects in the folder of a list, in alphabetical order. Raises `UserError`."""
    files = sorted(_annotations(file).glob("*.xml"))
    key = hashlib.sha256(os.fsencode("\0".join(map(str, files))) + storage.stamps(map(str, files))).hexdigest()
    return cached_json(key, lambda: sorted({item.name for each in files for item in read_voc(each)[1]}))


def find_images(file: Path, names: Sequence[str]) -> tuple[VocImages, list[str]]:
    """Find the images and annotations of a list. Return them, and problems.

    names: the classes of the data set. Raises `UserError` if the list cannot be read, or none of the classes occurs.
    """
    known = class_names(file)
    if not set(names) & set(known):
        raise UserError(
            f"{_annotations(file)} has no objects of the class '{names[0]}'{nearest(names[0], known)}, nor of any "
            "other of the data set's `names`; correct `names:`, or leave it out to use VOC's"
        )
    try:
        lines = read_lines(file)
        folder = file.parents[2] / "JPEGImages"
        images = {path.stem: str(path) for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES}
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    annotations = {path.stem: str(path) for path in _annotations(file).glob("*.xml")}
    stems = [line.split()[0] for line in lines if line.strip()]
    found = {images[stem]: annotations[stem] for stem in stems if stem in images and stem in annotations}
    problems = [
        f"{file}: {plural(len(missing), 'name')} without {what}, such as {missing[0]}; left out"
        for what, files in (("an image", images), ("an annotation", annotations))
        if (missing := [stem for stem in stems if stem not in files])
    ]
    return VocImages(file, tuple(names), found), problems
