"""COCO annotation files: their classes, their images, and their objects as rows of label files.

Called by data/data_yaml.py for splits that name such a file, by data/labels.py, and by data/convert.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from data import remote, storage
from data.polygons import decode_rle, joined, mask_outline
from utils.coco import check_identities
from utils.errors import UserError, nearest, plural, shortened
from utils.files import cache_folder, file_name, one_at_a_time, replacing

T = TypeVar("T")
MAX_MASK_PIXELS = 2**28
CONTENTS_VERSION = 2  # version of the cached `Contents`
CUT_KEY = "cut at the edge of their image"  # the tally's key of boxes that are cut, not left out

CocoBox = tuple[float, float, float, float]  # left, top, width, height in pixels, as in COCO


class Tally(Counter[str]):
    """Counts of the label files and boxes that were written, and of items that were left out, by reason."""

    @property
    def omitted(self) -> str:
        """Items that were left out, by reason, such as `2 boxes without an area, 1 crowds`; '' if there are none."""
        reasons = {why: count for why, count in self.items() if count and why not in ("files", "boxes", CUT_KEY)}
        return ", ".join(f"{count} {why}" for why, count in sorted(reasons.items()))

    def lines(self, folder: Path) -> list[str]:
        """Format the counts for the console.

        Args:
            folder: folder of the label files
        """
        return [
            f"{plural(self['files'], 'label file')} with {plural(self['boxes'], 'box')} in {folder}"
            + (f", {self[CUT_KEY]} of them {CUT_KEY}" if self[CUT_KEY] else ""),
            *([f"left out: {self.omitted}"] if self.omitted else []),
        ]


def box_row(label: int, box: CocoBox, size: tuple[int, int], tally: Tally) -> str:
    """Return a label row, `class x y width height` as shares of the image; '' if no part of the box is in the image.

    Numbers have 6 significant digits, as in the published labels of COCO.

    Args:
        label: class number
        size: width and height of the image in pixels
        tally: counts to which the box is added, by what happens to it
    """
    if not all(map(math.isfinite, box)):
        tally["boxes that are not finite"] += 1
        return ""
    x, y, width, height = box
    inner = x >= 0 and y >= 0 and x + width <= size[0] and y + height <= size[1]
    if not inner and width > 0 and height > 0:
        right, bottom = min(x + width, size[0]), min(y + height, size[1])
        x, y = max(x, 0.0), max(y, 0.0)
        width, height = right - x, bottom - y
        if width <= 0 or height <= 0:
            tally["boxes outside of their image"] += 1
            return ""
    if width <= 0 or height <= 0:
        tally["boxes without an area"] += 1
        return ""
    tally["boxes"] += 1
    tally[CUT_KEY] += not inner
    shares = ((x + width / 2) / size[0], (y + height / 2) / size[1], width / size[0], height / size[1])
    return f"{label} {' '.join(f'{share:.6g}' for share in shares)}\n"


# The file


@lru_cache(1)
def _decoders() -> tuple[Any, Any]:
    """Return msgspec's decoders of a whole file, and of one without boxes and outlines, which is faster.

    They check the types while they read and keep outlines as text: the objects of json.load take eight times as much
    memory as the file.
    """
    try:
        from msgspec import Raw, defstruct
        from msgspec.json import Decoder
    except ImportError:
        raise UserError("COCO annotation files need msgspec: pip install msgspec") from None
    category = defstruct("Category", [("id", int), ("name", Any), ("supercategory", Any, None)])
    size = [("width", Any, 0), ("height", Any, 0)]
    image = defstruct("Image", [("id", int | str), ("file_name", str, ""), *size])
    references: list[Any] = [("image_id", int | str), ("category_id", int | None, None)]
    reference = defstruct("Reference", references, gc=False)
    contents = [("id", Any, None), ("iscrowd", Any, 0), ("bbox", Any, None), ("segmentation", Raw, Raw())]
    annotation = defstruct("Annotation", [*references, *contents])

    def decoder(kind: type) -> Any:
        parts = [("categories", list[category]), ("images", list[image]), ("annotations", list[kind])]  # type: ignore[valid-type]
        return Decoder(defstruct("CocoFile", parts))

    return decoder(annotation), decoder(reference)


def _read(file: Path, objects: bool) -> Any:
    """Return the content of a file. Raises `UserError`.

    Args:
        objects: whether to read boxes and outlines
    """
    whole, slim = _decoders()
    import msgspec

    try:
        content = (whole if objects else slim).decode(storage.read_bytes(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        raise UserError(f"{file} is not a COCO annotation file of objects ({error}); name another one") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}); download it again") from None
    categories = [(category.id, str(category.name).strip()) for category in content.categories]
    check_identities(file, [(image.id, _name(image)) for image in content.images], categories)
    for entries in (content.images, content.categories):
        entries[:] = {entry.id: entry for entry in entries}.values()
    return content


class Rows(NamedTuple):
    """The rows of an image's label file.

    Attributes:
        name: path of the image's file, with / between folders
        rows: lines of the label file
        image_id: the image's id in the annotation file
        size: width and height of the image, None if unknown
        ids: annotation id of each row
    """

    name: str
    rows: list[str]
    image_id: int | str
    size: tuple[int, int] | None
    ids: list[Any]


class ImageRows(NamedTuple):
    """The objects of an image that has no label file.

    Attributes:
        text: rows as in a label file
        size: width and height that the annotation gives, None if it gives none
        origin: start of a message about row k, followed by `ids[k]`
        ids: id of each row's annotation
    """

    text: str
    size: tuple[int, int] | None
    origin: str
    ids: Sequence[Any]


class AnnotatedRows(NamedTuple):
    """The objects that an annotation file describes.

    Attributes:
        images: objects of each image, by path
        problems: sentences about what is left out
    """

    images: dict[str, ImageRows]
    problems: list[str]


def coco_rows(
    file: Path, names: Sequence[str], tally: Tally, polygons: bool = False, crowd: bool = False
) -> Iterator[Rows]:
    """Yield the rows of every image of an annotation file. Raises `UserError`.

    Args:
        names: class names by number
        tally: counts to which omitted items are added
        polygons: whether rows are `class x1 y1 x2 y2 ...` instead of boxes
        crowd: whether to include regions of many objects (iscrowd 1)
    """
    content = _read(file, objects=True)
    by_image: dict[Any, list[Any]] = {image.id: [] for image in content.images}
    for item in content.annotations:
        if item.image_id in by_image:
            by_image[item.image_id].append(item)
        else:
            tally["boxes of images that the file lacks"] += 1
    del content.annotations  # frees the objects of each image once its rows are made
    known = {name.strip(): number for number, name in enumerate(names)}
    numbers = {category.id: known.get(str(category.name).strip()) for category in content.categories}
    for image in content.images:
        rows, ids = [], []
        for item in by_image.pop(image.id):
            if item.iscrowd and not crowd:
                tally["crowds"] += 1
                continue
            try:
                label = numbers[item.category_id]
                row = _row(item, label, image, polygons, tally) if label is not None else ""
                tally["boxes of categories that are not in `names`"] += label is None
            except (KeyError, TypeError, ValueError, IndexError, ArithmeticError) as error:
                raise UserError(f"{file}: annotation {item.id} is damaged ({error!r}); fix it") from None
            if row:
                rows.append(row)
                ids.append(item.id)
        yield Rows(_name(image), rows, image.id, _size(image), ids)


def _name(image: Any) -> str:
    return file_name(image.file_name.replace("\\", "/"))


def _size(image: Any) -> tuple[int, int] | None:
    """Return the width and height that an annotation file gives for an image, None if it gives none."""
    with suppress(TypeError, ValueError, OverflowError):
        size = int(image.width), int(image.height)
        return size if min(size) > 0 else None
    return None


def _row(item: Any, label: int, image: Any, polygons: bool, tally: Tally) -> str:
    size = int(image.width), int(image.height)
    x, y, width, height = map(float, item.bbox)
    row = box_row(label, (x, y, width, height), size, tally)
    if not polygons or not row:
        return row
    outline = _outline(item.segmentation, size, tally)
    if not len(outline):
        tally["outlines, replaced by the box"] += 1
        outline = np.array([(x, y), (x + width, y), (x + width, y + height), (x, y + height)])
    shares = (outline / size).clip(0.0, 1.0).ravel().tolist()
    return f"{label}{' %.6g' * len(shares)}\n" % tuple(shares)


def _outline(raw: Any, image: tuple[int, int], tally: Tally) -> np.ndarray:
    """Return one outline for a list of polygons or a mask in run-length encoding, (p, 2); it may be empty.

    Args:
        raw: segmentation as JSON
        image: width and height of the image
    """
    from msgspec.json import decode  # faster than json.loads

    segmentation = decode(raw) if bytes(raw) else None
    if isinstance(segmentation, dict):
        # A mask takes a byte per pixel, whatever the length of its JSON.
        if tuple(segmentation["size"]) != image[::-1] or image[0] * image[1] > MAX_MASK_PIXELS:
            tally["masks of another size than their image"] += 1
            return np.zeros((0, 2))
        return np.array(mask_outline(decode_rle(segmentation["counts"], segmentation["size"])))
    parts = [np.array(part, float).reshape(-1, 2) for part in segmentation or () if len(part) > 4]
    if len(parts) < 2:
        return parts[0] if parts else np.zeros((0, 2))
    return np.array(joined([list(map(tuple, part.tolist())) for part in parts]))


# Splits of a data set


class Contents(NamedTuple):
    """What a data set needs from an annotation file before its labels.

    Attributes:
        names: names of all categories, by ascending id
        groups: categories without objects that are the supercategory of others; Roboflow's exports have one
        images: file names of all images
    """

    names: list[str]
    groups: list[str]
    images: list[str]

    @property
    def classes(self) -> list[str]:
        """The class names of a data set whose YAML has no `names`."""
        return [name for name in self.names if name not in self.groups]

    def group_messages(self, file: Path) -> list[str]:
        """Return a line for the console about each category that is not a class.

        Args:
            file: annotation file that has these contents
        """
        return [
            f"{file}: the category '{name}' has no objects and is the supercategory of others, so it is not a class; "
            "name the classes (`names:` of a data YAML, --names of data.convert) if it should be one"
            for name in self.groups
        ]


def read_contents(file: Path) -> Contents:
    """Return classes and images of an annotation file, from the cache if it has not changed. Raises `UserError`."""
    size, changed = storage.stamp(file)
    return _contents(file, f"{CONTENTS_VERSION}\0{size}\0{changed}\0")


@lru_cache(8)
def _contents(file: Path, stamp: str) -> Contents:
    key = hashlib.sha256(stamp.encode() + os.fsencode(file)).hexdigest()
    return Contents(**cached_json(key, lambda: _parse_contents(_read(file, objects=False), file)._asdict()))


def cached_json(key: str, compute: Callable[[], T]) -> T:
    """Return the cached value for `key`; if there is none, compute and store it, in one process at a time."""
    cached = cache_folder() / "annotations" / f"{key[:32]}.json"
    with one_at_a_time(cached.with_suffix(".lock")):
        with suppress(OSError, ValueError):  # absent or damaged
            known: T = json.loads(cached.read_bytes())
            return known
        content = compute()
        with suppress(OSError), replacing(cached) as target:  # if this fails, it is computed again the next time
            target.write(json.dumps(content).encode())
        return content


def _parse_contents(content: Any, file: Path) -> Contents:
    used = {item.category_id for item in content.annotations}
    parents = {str(category.supercategory) for category in content.categories}
    ordered = [(str(one.name).strip(), one.id) for one in sorted(content.categories, key=lambda one: one.id)]
    groups = [name for name, number in ordered if name in parents and number not in used]
    names = [name for name, _ in ordered]
    if len(groups) == len(names):
        raise UserError(f"{file} has no categories, so there is nothing to learn from it; name another file")
    return Contents(names, groups, list(map(_name, content.images)))


def _leaves(name: str, parents: Sequence[str]) -> bool:
    """Return whether a file_name of an annotation file leads out of all folders that are searched for it."""
    if not os.path.isabs(name) and ".." not in name.split("/"):
        return False
    paths = [os.path.normpath(os.path.join(parent, name)) for parent in parents]
    return not any(path.startswith(os.path.join(os.path.normpath(parent), "")) for path in paths for parent in parents)


@dataclass(frozen=True)
class AnnotatedImages:
    """The images of a split that an annotation file describes.

    Attributes:
        file: annotation file
        names: class names by number
        images: file names in the annotation file, by image path
    """

    file: Path
    names: tuple[str, ...]
    images: Mapping[str, str]

    def files(self) -> list[Path]:
        """Return the files that the objects are read from."""
        return [self.file]

    def stamp(self) -> bytes:
        """Return bytes that change with everything that the rows depend on, for the key of a cache."""
        size, changed = storage.stamp(self.file)
        return f"{self.file}\0{size}\0{changed}\0{self.names}\0".encode(errors="surrogateescape")

    def rows(self, polygons: bool) -> AnnotatedRows:
        """Return the objects of each image. Raises `UserError`."""
        tally = Tally()
        by_name: dict[str, ImageRows] = {}
        origin = f"{self.file}: annotation"
        nothing = ImageRows("", None, origin, ())
        for each in coco_rows(self.file, self.names, tally, polygons):
            by_name[each.name] = ImageRows("".join(each.rows), each.size, origin, each.ids)
        del tally["crowds"]  # as intended
        problems = [f"{self.file}: left out: {tally.omitted}"] if tally.omitted else []
        return AnnotatedRows({path: by_name.get(name, nothing) for path, name in self.images.items()}, problems)


def _may_exist(folder: str) -> bool:
    return remote.is_remote(folder) or os.path.isdir(folder)


def usual_image_folders(file: Path, split: str) -> list[Path]:
    """Return the existing local folders where an annotation file's images usually are; [] for a remote file.

    They are named after the split, or `images`, and are beside the file or beside its folder `annotations`.
    """
    if remote.is_remote(file):
        return []
    part = file.stem.removeprefix("instances_")  # such as train2017
    bases = [file.parent, *([file.parent.parent] if file.parent.name.lower().startswith("annotation") else [])]
    names = (part, f"images/{part}", f"images/{split}", split, "images", "")
    return [base / name for base in bases for name in names if (base / name).is_dir()]


def find_images(file: Path, folders: Sequence[Path], names: Sequence[str]) -> tuple[AnnotatedImages, list[str]]:
    """Return the images of an annotation file, and sentences about its problems.

    Raises `UserError` if the file cannot be read, or has none of the classes.

    Args:
        folders: folders to search after the annotation file's own
        names: class names of the data set
    """
    contents = read_contents(file)
    known = set(contents.names)
    repeated = [name for name, count in Counter(contents.names).items() if count > 1 and name in names]
    missing_names = [name for name in names if name.strip() not in known]
    if len(missing_names) == len(names):
        raise UserError(
            f"{file} has no category '{names[0]}'{nearest(names[0], sorted(known))}, nor any other of the data set's "
            "`names`; correct `names:`, or leave it out to use the file's"
        )
    problems = [f"{file}: no category '{name}'{nearest(name, sorted(known))}" for name in missing_names]
    problems += [f"{file}: several categories are named '{shortened(name)}'; they are one class" for name in repeated]
    parents = [os.path.join(folder, "") for folder in (file.parent, *folders)]
    searched_in = [(parent, storage.file_test(parent)) for parent in parents]
    images: list[tuple[str, str]] = []
    missing: list[str] = []
    outside: list[str] = []
    for name in contents.images:
        if _leaves(name, parents):
            outside.append(name)
            continue
        path = next((path for parent, is_file in searched_in if is_file(path := os.path.join(parent, name))), None)
        if path is None:
            missing.append(name)
        else:
            images.append((name, os.path.normpath(path)))
    if outside:
        example = f"such as {shortened(outside[0])}"
        problems.append(f"{file}: {len(outside)} of its images are outside of the data set, {example}; left out")
    if missing:
        searched = ", ".join(dict.fromkeys(map(remote.shown_path, map(os.path.normpath, filter(_may_exist, parents)))))
        example = f"such as {shortened(missing[0])}, looked for in {searched}"
        if len(missing) == len(contents.images):
            raise UserError(
                f"{file}: none of its {plural(len(missing), 'image')} exists, {example}; give their folder as "
                "`images:` of a data YAML"
            )
        problems.append(f"{file}: {len(missing)} of its images do not exist, {example}; left out")
    check_identities(file, images)  # two names may lead to one file
    return AnnotatedImages(file, tuple(names), {path: name for name, path in images}), problems
