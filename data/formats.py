"""Annotations that are read in place: COCO's JSON, VOC's XML and VisDrone's text; and layouts of folders (`recognise`).

Called by data/data_yaml.py; data/labels.py reads the objects of an `AnnotatedImages`.
"""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.images import is_image
from data.labels import ImageRows, label_name
from data.polygons import joined, mask_outline
from utils.errors import UserError, nearest, plural, shortened
from utils.files import file_name, file_stamps, read_lines, read_regular

MAX_MASK_PIXELS = 2**28
VOC_LISTS = Path("ImageSets", "Main")
ANNOTATION_FOLDERS = ("annotations", "annotation", "xmls", "xml", "labels")  # names of XML folders, in any case
IMAGE_FOLDERS = ("JPEGImages", "images", "Images")  # folders of images beside them
CHALLENGE_MARK = b"<database>The VOC20"  # in the XML files of the challenge itself, whose coordinates start at 1
VISDRONE_CLASSES = 10  # categories 1 to 10; 0 is for regions to ignore, 11 for other objects
EXPORTED_ANNOTATIONS = "_annotations.coco.json"  # file in each folder of Roboflow's COCO export
SPLIT_FOLDERS = {"train": ("train",), "val": ("val", "valid", "test"), "test": ("test",)}

VocObject = tuple[str, tuple[float, float, float, float], bool]  # name, box (left, top, width, height), is it difficult
# The annotations that are left out, by kind, such as `boxes without an area`.
Problems = defaultdict[str, list[Any]]


def box_row(label: int, box: Sequence[float], size: tuple[int, int], problems: Problems, which: Any) -> str:
    """Return a label row, `class x y width height` as shares of the image, cut at its edge; '' if nothing remains.

    Numbers have 6 significant digits, as in the published labels of COCO. The box is left, top, width, height in pixels
    of an image of `size` (width, height); `which` names the annotation.
    """
    x, y, width, height = box if len(box) == 4 and all(map(math.isfinite, box)) else (0, 0, 0, 0)
    if x < 0 or y < 0 or x + width > size[0] or y + height > size[1]:
        right, bottom = min(x + width, size[0]), min(y + height, size[1])
        x, y = max(x, 0.0), max(y, 0.0)
        width, height = right - x, bottom - y
    if width <= 0 or height <= 0:
        problems["boxes without an area inside of their image"].append(which)
        return ""
    shares = ((x + width / 2) / size[0], (y + height / 2) / size[1], width / size[0], height / size[1])
    return f"{label} {' '.join(f'{share:.6g}' for share in shares)}\n"


def image_rows(
    objects: Iterable[tuple[int, int | None, Sequence[float]]], size: tuple[int, int], origin: str, problems: Problems
) -> ImageRows:
    """Return the rows of objects, each a number, a class (None if it is unknown), and a box as in `box_row`."""
    rows = {}
    for number, label, box in objects:
        if label is None:
            problems["boxes of classes that are not in `names`"].append(f"{origin} {number}")
        elif row := box_row(label, box, size, problems, f"{origin} {number}"):
            rows[number] = row
    return ImageRows("".join(rows.values()), size, origin, list(rows))


@dataclass(frozen=True)
class AnnotatedImages:
    """The images of a split that have no label files, because annotations describe them.

    Attributes:
        file: annotation file, or the list or folder that the annotation files belong to
        files: files that the objects are read from
        names: class names by number
        images: name in the annotation file, or own annotation file, by image path
        read: returns the objects of each image by path, as outlines if requested and if there are any
        problems: sentences about images that are left out
    """

    file: Path
    files: Sequence[Path]
    names: tuple[str, ...]
    images: Mapping[str, str]
    read: Callable[[AnnotatedImages, bool, Problems], dict[str, ImageRows]]
    problems: Sequence[str] = ()

    def stamp(self) -> bytes:
        """Return bytes that change with everything that the rows depend on, for the key of a cache."""
        names = "\0".join([self.read.__name__, *self.names]).encode(errors="surrogateescape")
        return names + file_stamps(map(str, self.files))

    def rows(self, outlines: bool) -> tuple[dict[str, ImageRows], list[str]]:
        """Return the objects of each image by path, and sentences about those left out. Raises `UserError`."""
        problems = Problems(list)
        try:
            rows = self.read(self, outlines, problems)
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
        kinds = problems.items()
        return rows, [f"{self.file}: {len(ids)} {kind}, such as {ids[0]}; left out" for kind, ids in kinds]


def find_annotated(location: Path, folders: Sequence[Path], names: Sequence[str], split: str) -> AnnotatedImages | None:
    """Return the images that annotations describe, None if the location has no annotations.

    Raises `UserError` if the annotations cannot be read, or have no images or none of the classes.

    Images are searched for in `folders` first.
    """
    if is_coco(location):
        return _coco_images(location, [*folders, *_coco_folders(location, split)], names)
    if is_voc(location):
        return _voc_images(location, folders, names)
    return _visdrone_images(location, names) if is_visdrone(location) else None


def annotated_names(locations: Sequence[Path]) -> dict[int, str]:
    """Return the classes of a data set whose YAML has no `names:`, from the annotations of its splits.

    They are a COCO file's categories by rising id, without supercategories that have no objects, as in Roboflow's
    exports, or the classes of VOC's files alphabetically. Raises `UserError`.
    """
    if location := next(filter(is_coco, locations), None):
        content = _contents(location, file_stamps([str(location)]))
        used = {item.category_id for item in content.annotations}
        categories = sorted(content.categories, key=lambda category: category.id)
        parents = {str(category.supercategory) for category in categories}
        return dict(enumerate(each.name for each in categories if each.id in used or each.name not in parents))
    files = [file for location in locations if is_voc(location) for file in _voc_files(location).values()]
    return dict(enumerate(sorted({item[0] for file in files for item in read_voc(Path(file))[1]})))


# COCO


def is_coco(location: Path) -> bool:
    """Return whether a path is a COCO annotation file."""
    return location.suffix.lower() == ".json" and os.path.isfile(location)


@lru_cache(4)
def _contents(file: Path, stamp: bytes) -> Any:
    """Return `read_coco` of a file without its objects, read once as long as its stamp stays. Raises `UserError`."""
    from utils.coco import read_coco  # only for COCO's files

    content = read_coco(file)
    if not content.categories:
        raise UserError(f"{file} has no categories, so there is nothing to learn from it; name another file")
    return content


def _coco_folders(file: Path, split: str) -> list[Path]:
    """Return the folders where a file's images usually are, beside the file or beside its folder `annotations`."""
    part = file.stem.removeprefix("instances_")  # such as train2017
    bases = [file.parent, *([file.parent.parent] if file.parent.name.lower().startswith("annotation") else [])]
    names = (part, f"images/{part}", f"images/{split}2017", f"images/{split}", split, "images", "")
    return [base / name for base in bases for name in names if (base / name).is_dir()]


def _coco_images(file: Path, folders: Sequence[Path], names: Sequence[str]) -> AnnotatedImages:
    content = _contents(file, file_stamps([str(file)]))
    categories = {category.name for category in content.categories}
    unknown = [name for name in names if name.strip() not in categories]
    problems = [f"{file}: no category '{name}'{nearest(name, categories)}" for name in unknown]
    if len(unknown) == len(names):
        raise UserError(f"{problems[0]}, nor another of `names`; correct `names:`, or leave it out to use the file's")
    parents = [os.path.join(os.path.normpath(folder), "") for folder in dict.fromkeys((file.parent, *folders))]
    images: dict[str, str] = {}  # names by path
    missing = []
    for name in (file_name(image.file_name) for image in content.images):
        paths = filter(os.path.isfile, (os.path.join(parent, name) for parent in parents))
        path = os.path.normpath(next(paths, ""))
        if not any(map(path.startswith, parents)):  # absent, or outside of the data set
            missing.append(name)
        elif images.setdefault(path, name) != name:
            raise UserError(f"{file}: {path} is both '{images[path]}' and '{name}'; give each image a file of its own")
    if missing:
        searched = ", ".join(os.path.normpath(parent) for parent in parents if os.path.isdir(parent))
        example = f"such as {shortened(missing[0])}, in {searched}"
        if not images:
            raise UserError(
                f"{file}: none of its {plural(len(missing), 'image')} exists, {example}; give their folder as "
                "`images:` of a data YAML"
            )
        problems.append(f"{file}: {len(missing)} of its images do not exist, {example}; left out")
    return AnnotatedImages(file, [file], tuple(names), images, _read_coco, problems)


def _read_coco(annotated: AnnotatedImages, outlines: bool, problems: Problems) -> dict[str, ImageRows]:
    """Read the objects of a COCO file; crowds are left out, as in the published labels of COCO."""
    from utils.coco import read_coco

    content = read_coco(annotated.file, objects=True)
    paths = {name: path for path, name in annotated.images.items()}
    numbers = {name.strip(): number for number, name in enumerate(annotated.names)}
    labels = {category.id: numbers.get(category.name) for category in content.categories}
    by_image: dict[Any, list[Any]] = {image.id: [] for image in content.images}
    for item in content.annotations:
        if item.image_id not in by_image:
            problems["boxes of images that the file lacks"].append(f"annotation {item.id}")
        elif not item.iscrowd:
            by_image[item.image_id].append(item)
    del content.annotations  # frees the objects of each image once its rows are made
    rows = {}
    for image in content.images:
        items, size = by_image.pop(image.id), (int(image.width or 0), int(image.height or 0))
        made = [(_coco_row(item, labels.get(item.category_id), size, outlines, problems), item.id) for item in items]
        if path := paths.get(file_name(image.file_name)):
            ids = [number for row, number in made if row]
            rows[path] = ImageRows("".join(row for row, _ in made), size, f"{annotated.file}: annotation", ids)
    return rows


def _coco_row(item: Any, label: int | None, size: tuple[int, int], outlines: bool, problems: Problems) -> str:
    which = f"annotation {item.id}"
    if label is None or min(size) < 1:
        kind = "categories that are not in `names`" if label is None else "images without a width and height"
        problems[f"boxes of {kind}"].append(which)
        return ""
    box: tuple[float, ...] = ()
    with suppress(TypeError, ValueError):
        box = tuple(map(float, item.bbox))
    row = box_row(label, box, size, problems, which)
    if not outlines or not row:
        return row
    outline = np.zeros((0, 2))
    with suppress(LookupError, TypeError, ValueError, ArithmeticError, RuntimeError):
        outline = _outline(item.segmentation, size)
    if not len(outline):
        problems["outlines that are absent or damaged, so that the box is used"].append(which)
        return row
    shares = (outline / size).clip(0.0, 1.0).ravel().tolist()
    return f"{label}{' %.6g' * len(shares)}\n" % tuple(shares)


def _outline(raw: Any, image: tuple[int, int]) -> np.ndarray:
    """Return one outline for a segmentation, a list of polygons or a run-length mask as JSON, (p, 2), maybe empty."""
    from faster_coco_eval import mask
    from msgspec.json import decode  # faster than json.loads

    segmentation = decode(raw) if bytes(raw) else None
    if isinstance(segmentation, dict):
        # A mask takes a byte per pixel, whatever the length of its JSON.
        if tuple(segmentation["size"]) != image[::-1] or image[0] * image[1] > MAX_MASK_PIXELS:
            return np.zeros((0, 2))
        is_text = isinstance(segmentation["counts"], str)
        return np.array(
            mask_outline(mask.decode(segmentation if is_text else mask.frPyObjects(segmentation, *image[::-1])))
        )
    parts = [np.array(part, float).reshape(-1, 2) for part in segmentation or () if len(part) > 4]
    if len(parts) < 2:
        return parts[0] if parts else np.zeros((0, 2))
    return np.array(joined([list(map(tuple, part.tolist())) for part in parts]))


# VOC


def read_voc(file: Path) -> tuple[tuple[int, int], list[VocObject]]:
    """Return the image's size (width, height) and the objects of an XML file. Raises `UserError`."""
    try:
        text = read_regular(file)
        # The challenge counts pixels from 1, and the last one belongs to the box; most programs count from 0.
        first, root = int(CHALLENGE_MARK in text), ET.fromstring(text)
        size = int(float(_text(root, "size/width"))), int(float(_text(root, "size/height")))
        if min(size) < 1:
            raise ValueError("its <size> is not positive")
        objects = []
        for item in root.findall("object"):
            left, top, right, bottom = (float(_text(item, f"bndbox/{n}")) for n in ("xmin", "ymin", "xmax", "ymax"))
            box = (left - first, top - first, right - left + first, bottom - top + first)
            objects.append((_text(item, "name"), box, (item.findtext("difficult") or "0").strip() == "1"))
    except (OSError, ET.ParseError, ValueError, OverflowError, LookupError) as error:
        raise UserError(f"{file} cannot be read as a VOC annotation ({error}); fix it, or move it away") from None
    return size, objects


def _text(item: ET.Element, path: str) -> str:
    text = (item.findtext(path) or "").strip()
    if not text:
        raise ValueError(f"<{item.tag}> has no <{path}>")
    return text


def _read_voc(annotated: AnnotatedImages, outlines: bool, problems: Problems) -> dict[str, ImageRows]:
    """Read the objects of XML files; difficult ones are left out, as in the challenge."""
    numbers, images = {name: number for number, name in enumerate(annotated.names)}, {}
    for path, file in annotated.images.items():
        size, found = read_voc(Path(file))
        objects = [(k, numbers.get(name), box) for k, (name, box, difficult) in enumerate(found, 1) if not difficult]
        images[path] = image_rows(objects, size, f"{file}: object", problems)
    return images


def is_voc(location: Path) -> bool:
    """Return whether a path is a list of images in VOC's layout, or a folder of XML files without label files."""
    if location.suffix == ".txt":
        return location.parts[-3:-1] == VOC_LISTS.parts and (location.parents[2] / "Annotations").is_dir()
    return _has(location, ".xml") and not _has_labels(location)


def _has(folder: Path, suffix: str) -> bool:
    with suppress(OSError), os.scandir(folder) as entries:
        return any(entry.name.endswith(suffix) for entry in entries)
    return False


def _has_labels(folder: Path) -> bool:
    return _has(Path(label_name(str(folder / "image.jpg"))).parent, ".txt")


def _voc_files(location: Path) -> dict[str, str]:
    """Return the XML files of a folder, or of the folder that belongs to a list, by their stems."""
    folder = location.parents[2] / "Annotations" if location.suffix == ".txt" else location
    return {path.stem: str(path) for path in sorted(folder.glob("*.xml"))}


def _voc_images(location: Path, folders: Sequence[Path], names: Sequence[str]) -> AnnotatedImages:
    annotations, is_list = _voc_files(location), location.suffix == ".txt"
    annotated = location.parents[2] / "Annotations" if is_list else location
    searched = [folder for folder in (*folders, *_voc_folders(annotated)) if folder.is_dir()]
    try:
        stems = [line.split()[0] for line in read_lines(location) if line.strip()] if is_list else list(annotations)
        beside = [{p.stem: str(p) for p in folder.iterdir() if is_image(p.name)} for folder in searched]
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}") from None
    images = {stem: path for each in reversed(beside) for stem, path in each.items()}  # the first folder counts
    described = {images[stem]: annotations[stem] for stem in stems if stem in images and stem in annotations}
    if not described:
        raise UserError(
            f"{location}: none of its {plural(len(stems), 'annotation')} has an image of the same name in "
            f"{', '.join(map(str, searched))}; put the images there, or give their folder as `images:` of a data YAML"
        )
    missing, problems = [stem for stem in stems if stem not in images or stem not in annotations], []
    if missing:
        pair = "an image and an annotation of one name"
        problems.append(f"{location}: {len(missing)} without {pair}, such as {missing[0]}; left out")
    sources = [*([location] if is_list else []), *map(Path, described.values())]
    return AnnotatedImages(location, sources, tuple(names), described, _read_voc, problems)


def _voc_folders(annotations: Path) -> list[Path]:
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


# VisDrone


def _read_visdrone(annotated: AnnotatedImages, outlines: bool, problems: Problems) -> dict[str, ImageRows]:
    """Read rows of left, top, width, height, score, category, ...; without ignored regions and the category others."""
    images, last = {}, min(VISDRONE_CLASSES, len(annotated.names))
    for path, file in annotated.images.items():
        objects, size = [], (1, 1)
        with suppress(Exception), Image.open(path) as opened:  # a damaged image is reported by the scan
            size = opened.size
        for number, line in enumerate(map(str.strip, read_lines(file)), 1):
            try:
                *box, score, category = map(int, line.split(",")[:6]) if line else (0, 0, 0, 0, 0, 0)
                if score and 1 <= category <= last:
                    objects.append((number, category - 1, box))
            except ValueError:
                problems["rows that are not VisDrone's"].append(f"{file}, line {number}")
        images[path] = image_rows(objects, size, f"{file}, line", problems)._replace(size=None)
    return images


def is_visdrone(location: Path) -> bool:
    """Return whether a path is a folder `images` with VisDrone's text files in `annotations` beside, and no labels."""
    beside = location.parent / "annotations"
    return location.name == "images" and location.is_dir() and _has(beside, ".txt") and not _has_labels(location)


def _visdrone_images(location: Path, names: Sequence[str]) -> AnnotatedImages:
    images = sorted(path for path in location.iterdir() if is_image(path.name))
    files = {str(path): str(location.parent / "annotations" / f"{path.stem}.txt") for path in images}
    described = {path: file for path, file in files.items() if os.path.isfile(file)}
    absent = len(files) - len(described)
    problems = [f"{location}: {plural(absent, 'image')} without an annotation; left out"] if absent else []
    sources = list(map(Path, described.values()))
    return AnnotatedImages(location, sources, tuple(names), described, _read_visdrone, problems)


# Folders as --data


def recognise(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Return the title of a folder's layout and the entries of its splits, if any; None if it is not recognised."""
    layouts = ((title, find(folder)) for title, find in LAYOUTS.items())
    return next(((title, content) for title, content in layouts if content is not None), None)


def subfolders(folder: Path) -> list[Path]:
    """Return the subfolders that are not hidden, sorted by name; [] for anything but a folder. Raises `UserError`."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be read: {error.strerror}; fix its permissions") from None
    return [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _splits(folder: Path, fits: Callable[[Path], bool], *forms: str) -> dict[str, Any] | None:
    """Return the path of each split in the first of `forms` of which the one for training fits; else None."""
    for form in forms:
        paths = {split: [form.format(name) for name in names] for split, names in SPLIT_FOLDERS.items()}
        content = {split: path for split in paths for path in paths[split][::-1] if fits(folder / path)}
        if "train" in content:
            return content
    return None


def _coco_layout(folder: Path) -> dict[str, Any] | None:
    files = {split: sorted((folder / "annotations").glob(f"instances_{split}*.json")) for split in SPLIT_FOLDERS}
    content = {split: f"annotations/{paths[0].name}" for split, paths in files.items() if len(paths) == 1}
    return content if "train" in content else None


def _voc_layout(folder: Path) -> dict[str, Any] | None:
    """Return the lists of each split in VOC's layout, of the folder or of the years in it, such as VOC2012."""

    def lists_of(name: str) -> list[str]:
        lists = [year / VOC_LISTS / f"{name}.txt" for year in (folder, *sorted(folder.glob("VOC*")))]
        return [str(file.relative_to(folder)) for file in lists if file.is_file() and is_voc(file)]

    content: dict[str, Any] = {split: lists_of(split) for split in SPLIT_FOLDERS}
    content["train"] = content["train"] or ([] if content["val"] else lists_of("trainval"))
    content["val"] = content["val"] or content["test"]
    return {split: lists for split, lists in content.items() if lists} if content["train"] else None


def _xml_folder(folder: Path) -> dict[str, Any] | None:
    """Return the folder of VOC's XML files, unless lists say which split each file belongs to."""
    names = [path.name for path in subfolders(folder) if path.name.lower() in ANNOTATION_FOLDERS]
    name = next((name for name in (*names, ".") if is_voc(folder / name)), None)
    has_lists = any((folder / VOC_LISTS / f"{split}.txt").is_file() for split in SPLIT_FOLDERS)
    return {"train": name} if name and not has_lists else None


def _has_classes(folder: Path, least: int = 1) -> bool:
    """Return whether a folder has at least `least` folders with images, apart from folders of splits, YOLO or VOC."""
    folders, splits = subfolders(folder), {name for names in SPLIT_FOLDERS.values() for name in names}
    names = {path.name for path in folders}
    if names & {"images", "labels", "JPEGImages"} or names <= splits:
        return False
    classes = (path for path in folders if any(is_image(name) for _, _, files in os.walk(path) for name in files))
    return len(list(islice(classes, least))) == least


XML_FORMS = ("{}", "annotations/{}", "Annotations/{}", "{}/annotations", "{}/Annotations")
LAYOUTS: dict[str, Callable[[Path], dict[str, Any] | None]] = {
    "COCO annotations in the folder of each split": lambda folder: _splits(
        folder, is_coco, f"{{}}/{EXPORTED_ANNOTATIONS}"
    ),
    "COCO's layout": _coco_layout,
    "VOC's layout": _voc_layout,
    "VOC's .xml files for each split": lambda folder: _splits(folder, is_voc, *XML_FORMS),
    "VOC's .xml files": _xml_folder,
    "a folder of images per class in the folder of each split": lambda folder: _splits(folder, _has_classes, "{}"),
    "a folder of images per class": lambda folder: {} if _has_classes(folder, 2) else None,
}
