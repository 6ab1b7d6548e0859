"""Pascal VOC's XML files, read in place: those named by a list, such as ImageSets/Main/train.txt, or in a folder.

Called by data/data_yaml.py and data/detect_layout.py; data/convert.py writes label files instead.
"""

from __future__ import annotations

import hashlib
import os
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data import remote, storage
from data.coco_json import AnnotatedImages, AnnotatedRows, CocoBox, ImageRows, Tally, box_row, cached_json
from data.images import IMAGE_SUFFIXES
from data.label_rows import label_name
from utils.errors import UserError, nearest, plural
from utils.files import read_lines, read_regular

LISTS = Path("ImageSets", "Main")
ANNOTATION_FOLDERS = ("annotations", "annotation", "xmls", "xml", "labels")  # names of XML folders, in any case
IMAGE_FOLDERS = ("JPEGImages", "images", "Images")  # folders of images beside them
# Part of the XML files of the challenge itself, whose coordinates start at 1.
CHALLENGE_MARK = b"<database>The VOC20"


class VocObject(NamedTuple):
    """An object of an XML file."""

    name: str
    box: CocoBox
    difficult: bool


def read_voc(file: Path, one_based: bool = False) -> tuple[tuple[int, int], list[VocObject]]:
    """Return the image's size (width, height) and the objects of an XML file. Raises `UserError`.

    Args:
        one_based: whether coordinates start at 1 and the last pixel belongs to the box, as in the VOC challenge's own
            files; most programs count from 0
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
    """The images of a list or a folder of XML files.

    Attributes:
        file: the list or the folder
        names: class names by number
        images: XML file of each image, by image path
    """

    def files(self) -> list[Path]:
        """Return the files that the objects are read from."""
        return [*([self.file] if self.file.is_file() else []), *map(Path, self.images.values())]

    def stamp(self) -> bytes:
        """Return bytes that change with everything that the rows depend on, for the key of a cache."""
        names = "\0".join(self.names).encode(errors="surrogateescape")
        return names + storage.stamps([str(self.file), *self.images.values()])

    def rows(self, polygons: bool) -> AnnotatedRows:
        """Return the objects of each image; difficult objects are left out, as data/convert.py does."""
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
    """Return whether a path is a list of images in VOC's layout."""
    return (
        location.parts[-3:-1] == LISTS.parts
        and location.suffix == ".txt"
        and (location.parents[2] / "Annotations").is_dir()
    )


def has_annotations(folder: Path) -> bool:
    """Return whether a local folder has XML files, and none of YOLO's label files for images in it."""
    if remote.is_remote(folder) or not folder.is_dir():
        return False
    labels = Path(label_name(str(folder / "image.jpg"))).parent
    return _has(folder, ".xml") and not _has(labels, ".txt")


def _has(folder: Path, suffix: str) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return any(entry.name.endswith(suffix) for entry in entries)
    return False


def _annotations(location: Path) -> Path:
    """Return the folder of XML files that belongs to a list, or the folder itself."""
    return location.parents[2] / "Annotations" if location.suffix == ".txt" else location


def class_names(location: Path) -> list[str]:
    """Return the classes of all objects in a folder, or in the folder of a list, alphabetically. Raises `UserError`."""
    files = sorted(_annotations(location).glob("*.xml"))
    key = hashlib.sha256(os.fsencode("\0".join(map(str, files))) + storage.stamps(map(str, files))).hexdigest()
    return cached_json(key, lambda: sorted({item.name for each in files for item in read_voc(each)[1]}))


def find_images(location: Path, folders: Sequence[Path], names: Sequence[str]) -> tuple[VocImages, list[str]]:
    """Find the images and annotations of a list, or of a folder of XML files. Return them, and problems.

    Raises `UserError` if the list cannot be read, if none of the classes occurs, or if there are no images.

    Args:
        folders: folders that are searched for images first
        names: class names of the data set
    """
    annotated, known = _annotations(location), class_names(location)
    if known and not set(names) & set(known):
        raise UserError(
            f"{annotated} has no objects of the class '{names[0]}'{nearest(names[0], known)}, nor of any "
            "other of the data set's `names`; correct `names:`, or leave it out to use VOC's"
        )
    searched = [folder for folder in (*folders, *_image_folders(annotated)) if folder.is_dir()]
    annotations = {path.stem: str(path) for path in sorted(annotated.glob("*.xml"))}
    is_list = location != annotated
    try:
        stems = [line.split()[0] for line in read_lines(location) if line.strip()] if is_list else list(annotations)
        beside = [_images_in(folder) for folder in searched]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    images = {stem: path for each in reversed(beside) for stem, path in each.items()}  # the first folder counts
    found = {images[stem]: annotations[stem] for stem in stems if stem in images and stem in annotations}
    if not found:
        raise UserError(
            f"{location}: none of {len(stems)} annotations has an image of the same name, such as {stems[0]}.jpg in "
            f"{', '.join(map(str, searched))}; put the images there, or give their folder as `images:` of a data YAML"
            if stems
            else f"{location} names no image; write one image name per line, without suffix"
        )
    absent = {("name" if is_list else "annotation", "an image"): images}
    absent["name" if is_list else "image", "an annotation"] = annotations
    for folder, each in zip(searched, beside, strict=True):
        alone = annotated.name == folder.name or annotated.name.lower() in ANNOTATION_FOLDERS  # not another split's
        if not is_list and alone and each.keys() & annotations.keys():
            stems += each  # an image without an annotation may have objects, so it is not background
            break
    problems = [
        f"{location}: {plural(len(missing), noun)} without {what}, such as {missing[0]}; left out"
        for (noun, what), files in absent.items()
        if (missing := [stem for stem in stems if stem not in files])
    ]
    return VocImages(location, tuple(names), found), problems


def _images_in(folder: Path) -> dict[str, str]:
    return {path.stem: str(path) for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES}


def _image_folders(annotations: Path) -> list[Path]:
    """Return the folders that may have the images of a folder of XML files, by precedence.

    For `.../annotations/train` they are `.../images/train`, `.../images`, the folder itself, `.../train`, and `...`.
    """
    parts = annotations.parts
    number = next((k for k in (-1, -2) if parts[k:] and parts[k].lower() in ANNOTATION_FOLDERS), 0) + len(parts)
    if number == len(parts):
        return [annotations, *(annotations / name for name in IMAGE_FOLDERS)]
    above, below = Path(*parts[:number]), parts[number + 1 :]
    folders = [above.joinpath(name, *below) for name in IMAGE_FOLDERS] + [above / name for name in IMAGE_FOLDERS]
    return [*folders, annotations, above.joinpath(*below), above]
