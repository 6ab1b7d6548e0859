"""Annotations that are read in place (COCO, VOC, VisDrone, data/records.py's), and layouts of folders (`recognise`)."""

from __future__ import annotations

import math
import os
import re
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.images import image_size, images_below, is_image, is_run_folder, read_image_list, resolve_paths
from data.labels import ImageRows, RowRules, file_stamps, label_name
from data.polygons import join_outlines, mask_outline
from data.records import read_records, table_columns
from utils.console import log
from utils.errors import UserError, nearest, plural, quoted
from utils.files import IMAGES_FILE, SETTINGS_FILE, read_regular, read_text, read_yaml

MAX_MASK_PIXELS = 2**28
VOC_LISTS = Path("ImageSets", "Main")
ANNOTATION_FOLDERS = ("annotations", "annotation", "xmls", "xml", "labels")  # names of XML folders, in any case
IMAGE_FOLDERS = ("JPEGImages", "images", "Images")  # folders of images beside them
CHALLENGE_MARK = b"<database>The VOC20"  # in the XML files of the challenge itself, whose coordinates start at 1
VISDRONE_CLASSES = 10  # categories 1 to 10; 0 is for regions to ignore, 11 for other objects
SPLIT_NAMES = {
    "train": ("train", "training", "train2017"),
    "val": ("val", "valid", "validation", "val2017", "test"),
    "test": ("test", "testing"),
}
# And as Train or TRAIN.
SPLIT_FOLDERS = {key: (*names, *map(str.title, names), *map(str.upper, names)) for key, names in SPLIT_NAMES.items()}
CLASS_FILES = ("classes.txt", "*.names", "_darknet.labels")  # class names, one per line
# Formats: suffix of their files, keys of a JSON file or of its first record, or its beginning; and datumaro's name.
FORMATS: dict[str, tuple[str, Any, str]] = {
    "COCO": (".json", {"images", "annotations", "categories"}, ""),
    "LabelMe": (".json", {"shapes", "imagePath"}, ""),
    "VIA": (".json", {"filename", "regions"}, ""),
    "VIA project": (".json", {"_via_img_metadata"}, ""),
    "CreateML": (".json", {"image", "annotations"}, "roboflow_create_ml"),
    "Datumaro": (".json", {"categories", "items"}, "datumaro"),
    "Label Studio": (".json", {"data", "annotations"}, ""),
    "Supervisely": (".json", {"objects", "size"}, ""),
    "VoTT": (".json", {"assets", "tags"}, "vott_json"),
    "CVAT's XML": (".xml", r"\s*(<\?xml[^>]*>)?\s*<annotations\b", "cvat"),
    "KITTI": (".txt", r"\S*[A-Za-z]\S*( -?[\d.]+){14,15}\s*\n", "kitti"),
    "Hugging Face's metadata": (".jsonl", r'(?=.*"file_name").*"objects"', ""),
}
RECORDS = ("LabelMe", "VIA", "VIA project")
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar")
OTHER_FILES = (".json", ".txt", ".data", ".csv", ".xml", *ARCHIVES)  # what --data may name besides YAMLs
EXPORT = "export the data set as COCO or YOLO"
OUTSIDE_FACTOR = 1.1  # a box that reaches beyond this share of its image's side is far outside
MIN_OUTSIDE_SHARE = 0.25  # exclusive: with more boxes far outside, all of which could be corners, they are
SAMPLED_FILES = 1000  # files that are looked at to recognise a folder, at most
SAMPLED_JSON_FILES = 20  # files of a format that are looked at in a folder, at most

Find = Callable[[Path], dict[str, Any] | None]  # returns the data YAML of a folder with a certain layout
VocObject = tuple[str, tuple[float, float, float, float], bool]  # name, box (left, top, width, height), is it difficult
# The annotations that are left out, by kind, such as `boxes without an area`.
Problems = defaultdict[str, list[Any]]


def box_row(label: int | None, box: Sequence[float], size: tuple[int, int], problems: Problems, which: Any) -> str:
    """Return a label row, `class x y width height` as shares of the image, cut at its edge; '' if nothing remains.

    Numbers have 6 significant digits, as in the published labels of COCO. The box is left, top, width, height in pixels
    of an image of `size` (width, height); `which` names the annotation, whose class, if not known, is None.
    """
    if label is None:
        problems["boxes of categories that `names` or the file lacks"].append(which)
        return ""
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


def image_rows(rows: Iterable[tuple[Any, str]], size: tuple[int, int] | None, origin: str) -> ImageRows:
    """Return the rows of an image, each after its object's id; empty ones are left out."""
    numbered = [(number, row) for number, row in rows if row]
    return ImageRows("".join(row for _, row in numbered), size, origin, [number for number, _ in numbered])


@dataclass(frozen=True)
class AnnotatedImages:
    """The images of a split that have no label files, because annotations describe them."""

    file: Path  # annotation file, or the list or folder that the annotation files belong to
    files: Sequence[Path]  # files that the objects are read from
    names: tuple[str, ...]  # class names by number
    images: Mapping[str, str]  # name in the annotation file, or own annotation file, by image path
    # Returns the objects of each image by path, with outlines if the rules request them and if there are any.
    read: Callable[[AnnotatedImages, RowRules, Problems], dict[str, ImageRows]]
    problems: Sequence[str] = ()  # sentences about images that are left out

    def stamp(self) -> bytes:
        """Return bytes that change with everything that the rows depend on, for the key of a cache."""
        names = "\0".join([self.read.__name__, *self.names]).encode(errors="surrogateescape")
        return names + file_stamps(map(str, self.files))

    def rows(self, rules: RowRules) -> tuple[dict[str, ImageRows], list[str]]:
        """Return the objects of each image by path, and sentences about those left out. Raises `UserError`."""
        problems = Problems(list)
        rows = self.read(self, rules, problems)
        kinds = ((*what.split("; "), "left out", ids) for what, ids in problems.items())
        return rows, [f"{self.file}: {len(ids)} {what}, such as {ids[0]}; {fate}" for what, fate, *_, ids in kinds]


def find_annotated(location: Path, folders: Sequence[Path], names: Sequence[str], split: str) -> AnnotatedImages | None:
    """Return the images that annotations describe, searched for in `folders` first, or None. Raises `UserError`."""
    if detected := _detected(location):
        location /= detected["train"]
    if is_coco(location) or has_records(location):
        return _coco_images(location, folders, names, split)
    if is_voc(location):
        return _voc_images(location, folders, names)
    return _visdrone_images(location, names) if is_visdrone(location) else None


def annotated_names(locations: Sequence[Path]) -> dict[int, str]:
    """Return the classes of a data set whose YAML has no `names:`, from the annotations of its splits.

    They are a COCO file's categories by rising id, without supercategories that have no objects, as in Roboflow's
    exports, or the classes of other files alphabetically. Raises `UserError`.
    """
    for location in locations:
        if is_coco(location) or has_records(location):
            content = _contents(location, file_stamps([str(location)]))
            used_ids = {item.category_id for item in content.annotations}
            rows = sorted((row.id, row.name, row.supercategory) for row in content.categories)
            parents = {str(parent) for _, name, parent in rows if parent != name}
            return dict(enumerate(name for number, name, _ in rows if number in used_ids or name not in parents))
    folders = [_voc_folder(location) for location in locations if is_voc(location)]
    objects = (item for folder in folders for file in sorted(folder.glob("*.xml")) for item in read_voc(file)[1])
    return dict(enumerate(sorted({name for name, _, _ in objects})))


def _missing_images(
    location: Path, missing: Sequence[str], images: Collection[str], folders: Iterable[str | Path]
) -> list[str]:
    """Return a sentence about the `missing` images, if there are any. Raises `UserError` if no others exist."""
    if not missing:
        return []
    searched = ", ".join(os.path.normpath(folder) for folder in folders if os.path.isdir(folder))
    count = plural(len(missing), "image")
    fault = f"{location}: {count} without a file or an annotation, such as {quoted(missing[0])}, in {searched}"
    if not images:
        raise UserError(f"{fault}; give the folder of the images as `images:` of a data YAML")
    return [f"{fault}; left out"]


def _only_filled(folders: Iterable[Path]) -> list[Path]:
    """Return the folder that has images, if there is one and no other has any; else []."""
    filled = [folder for folder in folders if folder.is_dir() and any(True for _ in images_below(folder))]
    return filled if len(filled) == 1 else []


# COCO


def is_coco(location: Path) -> bool:
    """Return whether a path is a JSON file, as of COCO."""
    return location.suffix.lower() == ".json" and os.path.isfile(location)


def has_records(location: Path) -> bool:
    """Return whether a path is a CSV file, or a folder of LabelMe's files without label files."""
    if not os.path.exists(location):  # pathlib raises an error for a name that is too long
        return False
    formats = map(file_format, islice(location.glob("*.json"), SAMPLED_JSON_FILES))
    is_labelme = "LabelMe" in formats and not (_is_labelled(location) or is_voc(location))
    return is_labelme or location.suffix.lower() == ".csv"


def _has_files(folder: Path) -> bool:
    return is_voc(folder) or has_records(folder)


def file_format(file: Path) -> str:
    """Return the name of a file's format in `FORMATS`, or '' if it is not known."""
    marks = {name: mark for name, (suffix, mark, _) in FORMATS.items() if file.suffix.lower() == suffix}
    text, keys = "", set[str]()
    with suppress(Exception):  # of any class, for a file that is not what its suffix says
        text = read_text(file) if marks else ""
        if file.suffix.lower() == ".json":
            from msgspec import Raw
            from msgspec.json import decode

            content = decode(text, type=dict[str, Raw] | list[Raw])
            records = list(content.values()) if isinstance(content, dict) else content
            keys |= set(content) if isinstance(content, dict) else set()
            keys |= set(decode(records[0], type=dict[str, Raw]))
    fits = (name for name, mark in marks.items() if (re.match(mark, text) if isinstance(mark, str) else mark <= keys))
    return next(fits, "")


def _conversion_advice(name: str, folder: Path) -> str:
    way = f"pip install datumaro; datum convert -i {folder} -if {FORMATS[name][2]} -f coco -o OUT -- --save-media"
    return f"{name} is not read; {f'convert it to COCO: {way}' if FORMATS[name][2] else EXPORT}"


@lru_cache(4)
def _contents(file: Path, stamp: bytes) -> Any:
    """Return `_read_file` without the objects, read once as long as its stamp stays. Raises `UserError`."""
    content = _read_file(file)
    if not content.categories:
        raise UserError(f"{file} has no categories, so there is nothing to learn from it; name another file")
    return content


def _read_file(file: Path, objects: bool = False) -> Any:
    from utils.coco import read_coco  # only for COCO's files

    try:
        return read_coco(file, objects)
    except UserError:
        if (name := file_format(file)) not in ("", "COCO", *RECORDS):
            raise UserError(f"{file}: {_conversion_advice(name, file.parent)}") from None
        if name not in RECORDS and not has_records(file):
            raise
    return read_records(sorted(file.glob("*.json")) if file.is_dir() else [file])


def _coco_folders(file: Path, split: str) -> list[Path]:
    """Return the folders where a file's images usually are, beside the file or beside its folder `annotations`."""
    part = file.stem.removeprefix("instances_")  # such as train2017
    bases = [file.parent, *([file.parent.parent] if file.parent.name.lower().startswith("annotation") else [])]
    names = (part, f"images/{part}", f"images/{split}2017", f"images/{split}", split, "images")
    folders = [base / name for base in bases for name in names if (base / name).is_dir()]
    return [*(folders or _only_filled(folder for base in bases for folder in subfolders(base))), *bases]


def _coco_images(file: Path, folders: Sequence[Path], names: Sequence[str], split: str) -> AnnotatedImages:
    content = _contents(file, file_stamps([str(file)]))
    is_record, beside = hasattr(content, "files"), file / "_" if file.is_dir() else file
    filled = (folder_above for folder_above in beside.parents[:3] if is_record and _only_filled([folder_above]))
    if is_run_folder(file.parent):  # a run of detect.py, whose images are anywhere
        folders = [*folders, *{Path(image.file_name).parent for image in content.images}]
    folders = [beside.parent, *folders, *_coco_folders(beside, split), *islice(filled, 1)]
    categories = {category.name for category in content.categories}
    unknown = [name for name in names if name.strip() not in categories]
    problems = [f"{file}: no category '{name}'{nearest(name, categories)}" for name in unknown]
    if problems and len(unknown) == len(names):
        raise UserError(f"{problems[0]}, nor another of `names`; correct `names:`, or leave it out to use the file's")
    parents = list(dict.fromkeys(os.path.join(os.path.normpath(folder), "") for folder in folders))
    images: dict[str, str] = {}  # names by path
    missing, by_name = [], dict[str, str]()
    searched = map(Path, filter(os.path.isdir, parents if is_record else ()))
    below = chain.from_iterable(map(images_below, searched))  # sorted: in the split's folder first
    for path in sorted(below, key=lambda path: {*SPLIT_FOLDERS[split]}.isdisjoint(path.split(os.sep))):
        by_name.setdefault(os.path.basename(path), path)
        by_name.setdefault(Path(path).stem, path)
    for name in (image.file_name for image in content.images):
        paths = filter(os.path.isfile, (os.path.join(parent, name) for parent in parents))
        path = os.path.normpath(next(paths, "") or by_name.get(os.path.basename(name), ""))
        if not any(map(path.startswith, parents)):  # absent, or outside of the data set
            missing.append(name)
        elif images.setdefault(path, name) != name:
            raise UserError(f"{file}: {path} is both '{images[path]}' and '{name}'; give each image a file of its own")
    problems += _missing_images(file, missing, images, parents)
    if file.name == IMAGES_FILE:
        label_files = {image.file_name: file.parent / image.label_file for image in content.images}
        files = {path: str(label_files[name]) for path, name in images.items()}
        return AnnotatedImages(file, [file, *map(Path, files.values())], tuple(names), files, _read_detected, problems)
    return AnnotatedImages(file, getattr(content, "files", [file]), tuple(names), images, _read_coco, problems)


def _detected(folder: Path) -> dict[str, Any] | None:
    """Return the data YAML of detect.py's label files, else predictions.json. Raises `UserError` for other runs."""
    if not is_run_folder(folder):
        return None
    if not os.path.isfile(file := folder / IMAGES_FILE):  # of train.py or val.py, which list predictions too
        raise UserError(f"{folder} is a run folder ({SETTINGS_FILE}); give data, or a run of detect.py --save-txt")
    names = [category.name for category in _contents(file, file_stamps([str(file)])).categories]  # by class, not by id
    return {"train": IMAGES_FILE if (folder / "labels").is_dir() else "predictions.json", "names": names}


def _read_detected(annotated: AnnotatedImages, rules: RowRules, problems: Problems) -> dict[str, ImageRows]:
    """Read label files of detect.py; an even count of numbers ends in the confidence, no file is background."""
    rows = {}
    for path, file in annotated.images.items():
        words = map(str.split, read_text(file).splitlines() if os.path.isfile(file) else ())
        rows[path] = ImageRows("\n".join(" ".join(row[: (len(row) - 1) | 1]) for row in words), None, file)
    return rows


def _read_coco(annotated: AnnotatedImages, rules: RowRules, problems: Problems) -> dict[str, ImageRows]:
    """Read the objects of a COCO file; crowds are left out, as in COCO's published labels, unless all are crowds."""
    content = _read_file(annotated.file, objects=True)
    is_record = hasattr(content, "files")
    paths = {name: path for path, name in annotated.images.items()}
    class_ids = {name.strip(): class_id for class_id, name in enumerate(annotated.names)}
    labels = {category.id: class_ids.get(category.name) for category in content.categories}
    by_image: dict[Any, list[Any]] = {image.id: [] for image in content.images}
    sizes = {image.id: (int(image.width or 0), int(image.height or 0)) for image in content.images}
    for file, name in annotated.images.items() if is_record else ():
        with suppress(Exception):  # a damaged image is reported by the scan
            sizes[name] = sizes[name] if min(sizes[name]) > 0 else image_size(Path(file))
    are_crowds = all(item.iscrowd for item in content.annotations)  # as CVAT writes brush masks
    for item in content.annotations:
        try:
            left, top, width, height = map(float, item.bbox)
            item.bbox = left, top, width, height
        except (TypeError, ValueError):
            item.bbox = ()
        if item.image_id not in by_image:
            problems["boxes of images that the file lacks"].append(f"annotation {item.id}")
        elif are_crowds or not item.iscrowd:
            by_image[item.image_id].append(item)
        if item.iscrowd:
            problems["crowds" + "; read as objects: there are no others" * are_crowds].append(f"annotation {item.id}")
    boxes = ((*item.bbox, *sizes[key]) for key, items in by_image.items() for item in items if item.bbox)
    if not is_record:
        _check_boxes(annotated.file, np.fromiter(boxes, np.dtype((float, 6))))
    del content.annotations  # frees the objects of each image once its rows are made
    rows = {}
    for image in content.images:
        items, size = by_image.pop(image.id), sizes[image.id]
        object_rows = [(item.id, _coco_row(item, labels, size, rules, problems)) for item in items]
        if path := paths.get(image.file_name):
            rows[path] = image_rows(object_rows, size, f"{annotated.file}: annotation")
    return rows


def _check_boxes(file: Path, rows: np.ndarray) -> None:
    """Raise a `UserError` if boxes are shares of the image, or corners. rows: box, width and height, (n, 6)."""
    corner, sides, size = rows[:, :2], rows[:, 2:4], rows[:, 4:]
    is_outside = (corner + sides > OUTSIDE_FACTOR * size).any(1)
    fit_corners = len(rows) > 0 and ((sides > corner) & (sides <= size + 1)).all()
    are_corners = fit_corners and is_outside.mean() > MIN_OUTSIDE_SHARE
    if are_corners or 0 < rows[:, :4].max(initial=0) <= 1:
        form = "corners, x1 y1 x2 y2" if are_corners else "shares of the image, or all smaller than a pixel"
        raise UserError(f"{file}: its boxes seem to be {form}; a `bbox` must be left, top, width, height in pixels")


def _coco_row(
    item: Any, labels: Mapping[Any, int | None], size: tuple[int, int], rules: RowRules, problems: Problems
) -> str:
    which, label = f"annotation {item.id}", labels.get(item.category_id)
    fault = "of images without a width and height" if min(size) < 1 else "that are not four numbers" * (not item.bbox)
    if fault:
        problems[f"boxes {fault}"].append(which)
        return ""
    row = box_row(label, item.bbox, size, problems, which)
    if not rules.outlines or not row:
        return row
    outline = np.zeros((0, 2))
    with suppress(LookupError, TypeError, ValueError, ArithmeticError, RuntimeError):
        outline = _outline(item.segmentation, size)
    if not (len(outline) and np.isfinite(outline).all()):
        if rules.by_points and item.segmentation is not None:  # None for a rectangle
            problems["outlines that are absent or damaged, so that the box is used"].append(which)
        return row
    shares = (outline / size).clip(0.0, 1.0).ravel().tolist()
    return f"{label if rules.by_points else row[:-1]}{' %.6g' * len(shares)}\n" % tuple(shares)


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
        coded = segmentation if is_text else mask.frPyObjects(segmentation, *image[::-1])
        return np.array(mask_outline(mask.decode(coded)))
    parts = [np.array(part, float).reshape(-1, 2) for part in segmentation or () if len(part) > 4]
    return join_outlines(parts) if parts else np.zeros((0, 2))


# VOC


def read_voc(file: Path) -> tuple[tuple[int, int], list[VocObject]]:
    """Return the image's size (width, height) and the objects of an XML file. Raises `UserError`."""
    try:
        text = read_regular(file)
        # The challenge counts pixels from 1, and the last one belongs to the box; most programs count from 0.
        first, root = int(CHALLENGE_MARK in text), ET.fromstring(text)
        if root.tag == "annotations":
            raise UserError(f"{file}: " + _conversion_advice("CVAT's XML", file.parent))
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


def _read_voc(annotated: AnnotatedImages, rules: RowRules, problems: Problems) -> dict[str, ImageRows]:
    """Read the objects of XML files; difficult ones are left out, as in the challenge."""
    numbers, images = {name: number for number, name in enumerate(annotated.names)}, {}
    for path, file in annotated.images.items():
        size, objects = read_voc(Path(file))
        easy = [(number, name, box) for number, (name, box, is_difficult) in enumerate(objects, 1) if not is_difficult]
        origin = f"{file}: object"
        rows = [(n, box_row(numbers.get(name), box, size, problems, f"{origin} {n}")) for n, name, box in easy]
        images[path] = image_rows(rows, size, origin)
    return images


def is_voc(location: Path) -> bool:
    """Return whether a path is a list of images in VOC's layout, or a folder of XML files without label files."""
    if location.suffix == ".txt" or not os.path.exists(location):
        return location.parts[-3:-1] == VOC_LISTS.parts and _voc_folder(location).is_dir()
    rows = _classes(map(str, location.glob("*.txt")))
    return any(location.glob("*.xml")) and not _is_labelled(location) and not any(True for _ in rows)


def _voc_folder(location: Path) -> Path:
    """Return the folder of the XML files that belong to a list, or that are in the folder `location`."""
    return location.parents[2] / "Annotations" if location.suffix == ".txt" else location


def _voc_images(location: Path, folders: Sequence[Path], names: Sequence[str]) -> AnnotatedImages:
    folder = _voc_folder(location)
    files = {path.stem: str(path) for path in sorted(folder.glob("*.xml"))}
    lines = read_text(location, "surrogateescape").split("\n") if location != folder else files
    # The list of a class has 1 or -1 after each name.
    stems = [line if line in files else line.split()[0] for line in filter(None, map(str.strip, lines))]
    images = _images_by_stem((*folders, *_voc_folders(folder)))
    described = {images[stem]: files[stem] for stem in stems if stem in images and stem in files}
    missing = [stem for stem in stems if stem not in images or stem not in files]
    problems = _missing_images(location, missing, described, dict.fromkeys((*folders, *_voc_folders(folder))))
    sources = [*[location] * (location != folder), *map(Path, described.values())]
    return AnnotatedImages(location, sources, tuple(names), described, _read_voc, problems)


def _images_by_stem(folders: Sequence[Path]) -> dict[str, str]:
    files = (file for folder in reversed(folders) for file in sorted(folder.glob("*")))  # the first folder counts
    return {file.stem: str(file) for file in files if is_image(file.name)}


def _voc_folders(annotations: Path) -> list[Path]:
    """Return the folders that may have the images of a folder of XML files, by precedence.

    For `.../annotations/train` they are `.../images/train`, `.../images`, the folder itself, `.../train`, and `...`.
    """
    parts = annotations.parts
    level = next((level for level in (-1, -2) if parts[level:] and parts[level].lower() in ANNOTATION_FOLDERS), 0)
    if not level and _only_filled([annotations]):
        return [annotations, *(annotations / name for name in IMAGE_FOLDERS)]
    level = len(parts) + (level or (-2 if annotations.name in chain(*SPLIT_FOLDERS.values()) else -1))
    above, below = Path(*parts[:level]), parts[level + 1 :]
    folders = [above.joinpath(name, *below) for name in IMAGE_FOLDERS] + [above / name for name in IMAGE_FOLDERS]
    other_folders = [above.parent / name for name in IMAGE_FOLDERS] if above.name.lower() in ANNOTATION_FOLDERS else []
    other_folders += _only_filled(folder.joinpath(*below) for folder in subfolders(above))
    return [*folders, annotations, above.joinpath(*below), above, *other_folders]


# VisDrone


def _read_visdrone(annotated: AnnotatedImages, rules: RowRules, problems: Problems) -> dict[str, ImageRows]:
    """Read rows of left, top, width, height, score, category, ...; without ignored regions and the category others."""
    images, last = {}, min(VISDRONE_CLASSES, len(annotated.names))
    for path, file in annotated.images.items():
        rows, size, origin = [], (1, 1), f"{file}, line"
        with suppress(Exception), Image.open(path) as opened:  # a damaged image is reported by the scan
            size = opened.size
        for number, line in enumerate(map(str.strip, read_text(file).split("\n")), 1):
            try:
                *box, score, category = map(int, line.split(",")[:6]) if line else (0, 0, 0, 0, 0, 0)
                if score and 1 <= category <= last:
                    rows.append((number, box_row(category - 1, box, size, problems, f"{origin} {number}")))
            except ValueError:
                problems["rows that are not VisDrone's"].append(f"{origin} {number}")
        images[path] = image_rows(rows, None, origin)
    return images


def is_visdrone(location: Path) -> bool:
    """Return whether a path is a folder `images` with VisDrone's text files in `annotations` beside, and no labels."""
    beside = (location.parent / "annotations").glob("*.txt")
    return location.name == "images" and location.is_dir() and any(beside) and not _is_labelled(location)


def _visdrone_images(location: Path, names: Sequence[str]) -> AnnotatedImages:
    folder = location.parent / "annotations"
    files = {path: str(folder / f"{stem}.txt") for stem, path in _images_by_stem([location]).items()}
    matched = {path: file for path, file in files.items() if os.path.isfile(file)}
    problems = _missing_images(location, [path for path in files if path not in matched], matched, [folder])
    return AnnotatedImages(location, [*map(Path, matched.values())], tuple(names), matched, _read_visdrone, problems)


# Folders and files as --data


def data_yaml(folder: Path) -> Path | None:
    """Return the `data.yaml` of a folder, or its only other data YAML, or Darknet .data file. Raises `UserError`."""
    files = sorted(filter(Path.is_file, folder.glob("data.y*ml")))[:1]
    for file in [] if files else sorted(folder.glob("*.y*ml")):
        with suppress(UserError):  # a file for another program may be damaged
            keys = set(read_yaml(file))
            files += [file] if keys & {*SPLIT_FOLDERS} and keys & {"names", "nc"} else []
    for file in [] if files else sorted(filter(Path.is_file, folder.glob("*.data"))):
        with suppress(UserError):  # so may this
            files += [file] if "train" in _darknet_values(file) else []
    if len(files) > 1:
        raise UserError(f"{folder} has several data files ({', '.join(file.name for file in files)}); name one of them")
    return files[0] if files else None


def recognise(path: Path) -> tuple[str, dict[str, Any] | Path]:
    """Return title and data YAML of the layout of a folder or file, or of the only one below it. Raises `UserError`."""
    path = Path(os.path.abspath(path))
    if not path.is_dir():
        return "a data set of one file", _one_file(path)
    for layouts in (LAYOUTS, CLASS_LAYOUTS):
        for title, find in layouts.items():
            if (content := find(path)) is not None:
                return title, content
        inner = [] if (path / VOC_LISTS).is_dir() else _folders_below(path, layouts.values())
        if only := _only(path, {"train": [str(folder.relative_to(path)) for folder in inner]}):
            return f"the data set in it is {only['train']}", path / only["train"]
        error, is_annotated = _unrecognised(path)
        if is_annotated:  # annotations that are not read do not make folders of classes
            break
    raise error


def _folders_below(folder: Path, finds: Collection[Find], levels: int = 3, remaining: Any = None) -> list[Path]:
    """Return the data sets among the first 1,000 folders, three levels down, without any inside another."""
    remaining, data_sets = remaining or iter(range(SAMPLED_FILES)), list[Path]()
    for folder_below, _ in zip(subfolders(folder) if levels else (), remaining, strict=False):
        is_set = any(not is_image(entry.name) for entry in os.scandir(folder_below))
        with suppress(UserError):  # which says what is wrong once the folder is named
            is_set = is_set and any(find(folder_below) is not None for find in finds)
        data_sets += [folder_below] if is_set else _folders_below(folder_below, finds, levels - 1, remaining)
    return data_sets


def _one_file(file: Path) -> dict[str, Any]:
    suffix = file.suffix.lower()
    if is_coco(file) or is_voc(file) or has_records(file):
        return {"train": file.name}
    if suffix == ".data":
        return _darknet(file)
    if suffix == ".txt" and _is_labelled(file):
        other_names = {*SPLIT_FOLDERS["train"]} - {file.stem}  # which are not given; lists for validation may be beside
        content = _splits(file.parent, lambda path: path.stem not in other_names and _is_labelled(path), ["{}.txt"])
        return _with_classes(file.parent, content or {"train": file.name})
    faults = {
        ".xml": f"a single .xml file; give the folder of all if they are VOC's, otherwise {EXPORT}",
        ".txt": "a list without an image that exists and has a label file; fix it",
    }
    raise UserError(f"{file} is {faults.get(suffix, 'an archive; unpack it and give its folder')}")


def subfolders(folder: Path, problems: list[str] | None = None) -> list[Path]:
    """Return the subfolders, sorted by name, but hidden ones and run folders; [] for a file. Raises `UserError`."""
    try:
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        raise UserError(f"the folder {folder} cannot be read: {error.strerror}; fix its permissions") from None
    return [path for path in entries if path.is_dir() and path.name[0] != "." and not is_run_folder(path, problems)]


def _only(folder: Path, candidates: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the only path of each split, {} without one for training. Raises `UserError` if a split has several."""
    content: dict[str, Any] = {}
    for split, paths in candidates.items() if candidates["train"] else ():
        # What is for testing validates only if nothing else does.
        val_paths = [path for path in paths if split != "val" or path not in candidates["test"]]
        # Compared by inode and device: on some disks `Train` is `train`, and a link is the same source.
        files = {os.stat(folder / path)[1:3]: path for path in reversed(val_paths or paths)}
        if len(files) > 1:
            listed = [*files.values()][::-1]
            tops = [Path(path).parts[0] for path in listed]
            choice = f", or give --data {folder / (listed if tops[0] == tops[1] else tops)[0]}"
            way = f"write a data YAML with `{split}:`{choice if split == 'train' else ''}"
            raise UserError(f"{folder} has several sources of `{split}` ({', '.join(listed)}); {way}")
        content.update((split, path) for path in files.values())
    return content


def _splits(folder: Path, fits: Callable[[Path], bool], *groups: Sequence[str]) -> dict[str, Any] | None:
    """Return the path of each split by the first group of forms of which one for training fits; else None."""
    for forms in groups:
        paths = {key: [form.format(name) for form in forms for name in names] for key, names in SPLIT_FOLDERS.items()}
        if content := _only(folder, {split: [path for path in paths[split] if fits(folder / path)] for split in paths}):
            return content
    return None


def _images(path: Path) -> Iterator[str]:
    return filter(os.path.isfile, read_image_list(path)[0]) if path.is_file() else images_below(path)


def _classes(files: Iterable[str]) -> Iterator[int]:
    """Yield the class of each row in label files, if they exist; a row has five numbers at least."""
    for file in files:
        with suppress(UserError):
            for words in map(str.split, read_text(file).split("\n")):
                with suppress(ValueError, OverflowError):
                    if len(words) > 4 and all(map(math.isfinite, map(float, words))):
                        yield int(float(words[0]))


def _is_labelled(path: Path) -> bool:
    """Return whether one of the first images of a folder or a list has a label file with rows."""
    return path.exists() and any(True for _ in _classes(map(label_name, islice(_images(path), SAMPLED_FILES))))


def _with_classes(folder: Path, content: dict[str, Any], named: str = "") -> dict[str, Any]:
    """Add the names in a file of class names, or else the number of classes in the labels. Raises `UserError`.

    The file is `named`, in the folder, or above all images or labels of a split; others are of another data set.
    """
    searched = (file for pattern in CLASS_FILES for file in sorted(folder.rglob(pattern)) if file.is_file())
    files = [Path(named)] if named else list(searched)
    lists = {"\n".join(map(str.strip, read_text(file).split("\n"))).rstrip(): file for file in files}
    if len(lists) > 1:
        paths = " and ".join(map(str, lists.values()))
        raise UserError(f"{paths} differ; remove one, give the folder of one data set as --data, or write a data YAML")
    above, splits = tuple(f"{file.parent}{os.sep}" for file in files), [folder / path for path in content.values()]
    covers = (all(name.startswith(above) or label_name(name).startswith(above) for name in _images(s)) for s in splits)
    if files and (named or f"{folder}{os.sep}" in above or any(covers)):
        return {**content, "names": next(iter(lists)).split("\n")}
    return {**content, "nc": 1 + max(_classes(map(label_name, chain(*map(_images, splits)))), default=0)}


def _label_files(folder: Path) -> dict[str, Any] | None:
    content = _splits(folder, _is_labelled, ["{}.txt"], ["images/{}"], ["{}/images"], ["{}"])
    content = content or next(({"train": name} for name in ("images", ".") if _is_labelled(folder / name)), None)
    if content == {"train": "."} and not any(any(folder.glob(pattern)) for pattern in CLASS_FILES):
        parts = ("images", "train", "train.txt")  # of a complete data set: two are not joined
        finds: list[Find] = [lambda place: {} if any(_is_labelled(place / part) for part in parts) else None]
        inner = _folders_below(folder, finds)
        _only(folder, {"train": [str(subfolder.relative_to(folder)) for subfolder in inner]})
        beside = (label_name(str(file)) for file in folder.iterdir() if is_image(file.name))
        content = None if inner and not any(True for _ in _classes(beside)) else content
    return content and _with_classes(folder, content)


def _darknet_values(file: Path) -> dict[str, str]:
    pairs = (map(str.strip, line.partition("=")[::2]) for line in read_text(file).split("\n"))
    return {key: value for key, value in pairs if key in ("train", "valid", "names")}


def _darknet(file: Path) -> dict[str, Any]:
    """Return what a Darknet .data file names. Raises `UserError` if one of its files is absent."""
    values = {"train": "", **_darknet_values(file)}
    paths, message = resolve_paths(file, list(values.values()))
    for (key, name), path in zip(values.items(), paths, strict=True):
        if not os.path.isfile(path):
            raise UserError(f"{file}: `{key} = {name}` is not a file, neither beside it nor here; correct the path")
    log(message)
    content = {key.replace("valid", "val"): path for key, path in zip(values, paths, strict=True)}
    return _with_classes(file.parent, content, content.pop("names", ""))


def _coco_layout(folder: Path) -> dict[str, Any] | None:
    files = {split: sorted((folder / "annotations").glob(f"instances_{split}*.json")) for split in SPLIT_FOLDERS}
    return _only(folder, {split: [f"annotations/{file.name}" for file in files[split]] for split in files}) or None


def _annotation_files(folder: Path, pattern: str, fits: Callable[[Path], bool]) -> dict[str, Any] | None:
    """Return the only file that fits in a folder and its subfolders, or one for each split by the words of its path."""
    lists = [sorted(subfolder.glob(pattern))[:SAMPLED_JSON_FILES] for subfolder in (folder, *subfolders(folder))]
    files = [str(file.relative_to(folder)) for file in chain(*lists) if fits(file)]
    if len(files) < 2:
        return {"train": files[0]} if files else None

    def named(names: Sequence[str], text: Callable[[str], str]) -> list[str]:
        return [file for file in files if {*names} & {*re.split("[^a-z]+", text(file).lower())}]

    candidates = {split: named(names, os.path.basename) or named(names, str) for split, names in SPLIT_NAMES.items()}
    return _only(folder, {**candidates, "train": candidates["train"] or files})


def _voc_layout(folder: Path) -> dict[str, Any] | None:
    """Return the lists of each split in VOC's layout, of the folder or of the years in it, such as VOC2012."""

    def split_lists(name: str) -> list[str]:
        years = (folder, *sorted(folder.glob("VOC*")))
        lists = [file for year in years for file in sorted((year / VOC_LISTS).glob("*.txt")) if is_voc(file)]
        names = {*SPLIT_NAMES.get(name, (name,))} - ({"test"} if name == "val" else set())
        return [str(file.relative_to(folder)) for file in lists if file.stem.lower() in names]

    content: dict[str, Any] = {split: split_lists(split) for split in SPLIT_FOLDERS}
    content["train"] = content["train"] or ([] if content["val"] else split_lists("trainval"))
    content["val"] = content["val"] or content["test"]
    return {split: lists for split, lists in content.items() if lists} if content["train"] else None


def _xml_folder(folder: Path) -> dict[str, Any] | None:
    """Return the folder of VOC's XML files, unless lists say which split each file belongs to."""
    folders = [path for path in subfolders(folder) if path.name.lower() in ANNOTATION_FOLDERS]
    folders += [path for above in folders for path in subfolders(above) if path.name.lower() in ANNOTATION_FOLDERS]
    names = [str(path.relative_to(folder)) for path in folders if _has_files(path)] or ["."] * _has_files(folder)
    has_lists = any(file.stem.lower() in SPLIT_NAMES for file in (folder / VOC_LISTS).glob("*.txt"))
    return None if has_lists else _only(folder, {"train": names}) or None


def _other_folders(folder: Path) -> dict[str, Any] | None:
    folders = [path for path in subfolders(folder) if path.name.lower() not in ANNOTATION_FOLDERS]
    names = [path.name for path in folders if _has_files(path)]
    return {"train": names} if names else None


def _has_classes(folder: Path, min_count: int = 1) -> bool:
    """Return whether a folder has `min_count` or more folders of images, apart from those of splits, YOLO or VOC."""
    folders, splits = subfolders(folder), {name for names in SPLIT_FOLDERS.values() for name in names}
    names = {path.name for path in folders}
    if names & {"images", "labels", "JPEGImages"} or names <= splits:
        return False
    classes = (path for path in folders if next(images_below(path), ""))
    return len(list(islice(classes, min_count))) == min_count


# By precedence.
LAYOUTS: dict[str, Find] = {
    "labels by detect.py": _detected,
    "a data YAML": lambda folder: {} if data_yaml(folder) else None,  # of a folder inside
    "COCO's layout": _coco_layout,
    "VOC's layout": _voc_layout,
    "VOC's or LabelMe's files for each split": lambda folder: _splits(
        folder,
        _has_files,
        ["{}"],
        [f"{path.name}/{{}}" for path in subfolders(folder)],
        [f"{{}}/{path.name}" for split in subfolders(folder) for path in subfolders(split)],
    ),
    "VOC's or LabelMe's files": _xml_folder,
    "label files": _label_files,
    "COCO annotations": lambda folder: _annotation_files(folder, "*.json", lambda file: file_format(file) == "COCO"),
    "VOC's or LabelMe's files in a folder of another name": _other_folders,
    "VIA annotations": lambda folder: _annotation_files(folder, "*.json", lambda file: file_format(file)[:3] == "VIA"),
    "CSV": lambda folder: _annotation_files(folder, "*.csv", lambda file: not table_columns(file)[1]),
}
CLASS_LAYOUTS: dict[str, Find] = {
    "a folder of images per class in the folder of each split": lambda folder: _splits(folder, _has_classes, ["{}"]),
    "a folder of images per class": lambda folder: {} if _has_classes(folder, 2) else None,
}


def _unrecognised(folder: Path) -> tuple[UserError, bool]:
    """Return the error for a folder, what it has and what is missing, and whether it has annotations of any format."""
    walked = (Path(path, name) for path, _, names in os.walk(folder) for name in sorted(names))
    walked = (file for file in walked if f"{os.sep}." not in f"{os.sep}{file.relative_to(folder)}")  # but not .git
    files: dict[str, list[Path]] = {}
    for file in islice(walked, SAMPLED_FILES):
        noun = "image" if is_image(file.name) else f"{file.suffix.lower()} file".strip()
        files.setdefault(file.name if any(map(file.match, CLASS_FILES)) else noun, []).append(file)
    image, sampled = str(files.get("image", [folder])[0]), (paths[:SAMPLED_JSON_FILES] for paths in files.values())
    program = next(filter(None, map(file_format, chain.from_iterable(sampled))), "")
    advice = ", but no label files, no annotations, and no folder of images for each class (docs/data.md)"
    if program:
        is_read = program in ("COCO", *RECORDS)
        advice = f"; give the {program} file itself" if is_read else f"; {_conversion_advice(program, folder)}"
    elif "image" not in files:
        is_packed = any(f"{suffix} file" in files for suffix in ARCHIVES)
        advice = "; unpack the archive" if is_packed else ", but no images" if files else ""
    elif ".xml file" in files:
        advice = ", but no folder of VOC's .xml files with their images beside it"
    elif faults := [table_columns(file)[1] for file in files.get(".csv file", ())[:SAMPLED_JSON_FILES]]:
        advice = f"; {max(faults, key=lambda fault: 'row 2' in fault)}"  # a list of boxes, if a table has it
    elif ".txt file" in files:
        advice = f", but no label file where it belongs: that of {image} is expected at {label_name(image)}"
    counts = [noun if noun == paths[0].name else plural(len(paths), noun) for noun, paths in files.items()]
    content = " and ".join(counts) or "no files"
    error = UserError(f"{folder} is not recognised as a data set: it has {content}{advice}")
    return error, bool(program) or ".xml file" in files
