"""COCO's results format, and COCO's own numbers where there are annotations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from utils.errors import UserError, nearest
from utils.files import ROOT, csv_text, read_yaml

NOT_USED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # of COCO's category ids 1 to 90: its 80 classes have the others
# What faster-coco-eval measures, in its order: metric, IoU, area of the objects, most detections per image.
NUMBERS = (
    ("AP", "0.50:0.95", "all", 100),
    ("AP", "0.50", "all", 100),
    ("AP", "0.75", "all", 100),
    ("AP", "0.50:0.95", "small", 100),
    ("AP", "0.50:0.95", "medium", 100),
    ("AP", "0.50:0.95", "large", 100),
    ("AR", "0.50:0.95", "all", 1),
    ("AR", "0.50:0.95", "all", 10),
    ("AR", "0.50:0.95", "all", 100),
    ("AR", "0.50:0.95", "small", 100),
    ("AR", "0.50:0.95", "medium", 100),
    ("AR", "0.50:0.95", "large", 100),
)


class CocoImage(NamedTuple):
    """What was found in an image."""

    image: int  # its index in the split
    path: str
    rows: np.ndarray  # (k, 6): xyxy in pixels of its file, confidence, class


@dataclass(frozen=True)
class Ids:
    """What images and classes are called in results."""

    categories: tuple[int, ...]  # by class
    images: tuple[int | str, ...]  # of the images of a split, by index
    told: str  # where the categories' are from


@dataclass(frozen=True)
class Annotations:
    """A COCO file, and what it calls the images and classes of a split."""

    file: Path
    content: dict[str, Any]
    ids: Ids
    known: frozenset[int]  # images of the split, by index, that it has

    def doubts(self) -> list[str]:
        """A sentence where it lacks images of the split."""
        missing = len(self.ids.images) - len(self.known)
        return [f"warning: {self.file} lacks {missing} of the images: COCO's numbers are without them"] * bool(missing)


def own_ids(names: Mapping[int, str], paths: Sequence[Path]) -> Ids:
    """Without annotations: an image is called by its number, where its name is one; COCO's classes have COCO's ids."""
    images = tuple(map(_image_id, paths))
    if list(names.values()) == list(read_yaml(ROOT / "data" / "coco.yaml")["names"].values()):
        categories = tuple(number for number in range(1, 91) if number not in NOT_USED)
        return Ids(categories, images, "category ids are COCO's")
    return Ids(tuple(names), images, "category ids are the numbers of the classes, from 0")


def _image_id(path: Path) -> int | str:
    return int(path.stem) if path.stem.isascii() and path.stem.isdecimal() else path.stem


def find_annotations(roots: Sequence[Path], split: str, paths: Sequence[Path]) -> tuple[Path | None, str]:
    """The file below the data set's folder, the first of `roots` that has any, with the annotations of a split of these
    images; and a sentence where there is none to take.

    It is annotations/instances_<folder of the images>.json, else the one whose name begins like the split's.
    """
    for folder in (root / "annotations" for root in roots):
        beside = folder / f"instances_{paths[0].parent.name}.json"
        found = [beside] if beside.is_file() else sorted(folder.glob(f"instances_{split}*.json"))
        if len(found) == 1:
            return found[0], ""
        if found:
            files = " and ".join(file.name for file in found)
            return None, f"{folder} has {files}; --annotations says which of them to compare with"
    looked = f"no instances_{paths[0].parent.name}.json and no instances_{split}*.json in {roots[0] / 'annotations'}"
    return None, f"{looked}: --annotations names a file to compare with"


def read_annotations(file: Path, names: Mapping[int, str], paths: Sequence[Path]) -> Annotations:
    """Annotations for the images `paths` of a split, with classes `names`. Raises `UserError` for a file that is none,
    or is one of other images or classes."""
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; give a file of COCO annotations") from None
    except ValueError:
        raise UserError(f"{file} is not JSON; give a file of COCO annotations") from None
    try:
        categories = {str(one["name"]).strip(): int(one["id"]) for one in content["categories"]}
        images = {str(one["file_name"]): one["id"] for one in content["images"]}
        content["annotations"]
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{file} lacks `images` with a file_name and id, `annotations`, or `categories` with a name and id; give a "
            "file of COCO annotations"
        ) from None
    for name in names.values():
        if name not in categories:
            raise UserError(f"{file} has no category '{name}'{nearest(name, categories)}; give the data set's own file")
    by_path = list(_called(images, paths))
    known = frozenset(index for index, number in enumerate(by_path) if number is not None)
    if not known:
        raise UserError(
            f"{file} has none of the {len(paths)} images, such as {paths[0].name}; give the split's own file"
        )
    ids = tuple(_image_id(path) if number is None else number for path, number in zip(paths, by_path, strict=True))
    return Annotations(
        file, content, Ids(tuple(categories[name] for name in names.values()), ids, f"ids are those of {file}"), known
    )


def _called(images: Mapping[str, Any], paths: Sequence[Path]) -> Iterator[Any]:
    """The id of each image, or None: of the file_name with which its path ends, else of the one of its last part."""
    last: dict[str, list[Any]] = {}
    for name, number in images.items():
        last.setdefault(PurePath(name).name, []).append(number)
    for path in paths:
        endings = ("/".join(path.parts[start:]) for start in range(1, len(path.parts)))
        number = next((images[ending] for ending in endings if ending in images), None)
        same = last.get(path.name, [])
        yield number if number is not None or len(same) != 1 else same[0]


def results(found: Sequence[CocoImage], ids: Ids) -> list[dict[str, Any]]:
    """COCO's results, image by image, the most confident first: boxes x, y, w, h in pixels of the file."""
    rows = []
    for one in sorted(found, key=lambda one: one.image):
        corners, confidence, label = one.rows[:, :4], one.rows[:, 4], one.rows[:, 5].astype(int)
        boxes = np.concatenate((corners[:, :2], corners[:, 2:] - corners[:, :2]), 1).round(3).tolist()
        for box, score, number in zip(boxes, confidence.tolist(), label.tolist(), strict=True):
            rows.append(
                {
                    "image_id": ids.images[one.image],
                    "category_id": ids.categories[number],
                    "bbox": box,
                    "score": round(score, 5),
                }
            )
    return rows


def score(annotations: Annotations, rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """COCO's twelve `NUMBERS` of results, over the images of the split that are annotated; -1 where there is nothing to
    measure. Raises `UserError` where faster-coco-eval is not installed, or cannot use the annotations."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        raise UserError("COCO's own numbers need faster-coco-eval: pip install faster-coco-eval") from None
    images = [annotations.ids.images[index] for index in sorted(annotations.known)]
    wanted = set(images)
    try:
        truth = COCO(annotations.content)
        own = [dict(row) for row in rows if row["image_id"] in wanted]
        # Older versions load no empty results.
        found = truth.loadRes(own) if own else COCO({**annotations.content, "annotations": []})
        measured = COCOeval_faster(truth, found, "bbox")
        measured.params.imgIds = images
        measured.params.catIds = list(annotations.ids.categories)
        measured.evaluate()
        measured.accumulate()
        measured.summarize()
    except Exception as error:  # annotations may lack anything
        raise UserError(
            f"{annotations.file} cannot be used ({type(error).__name__}: {str(error).partition(chr(10))[0]}); give a "
            "file of COCO annotations, with id, bbox, area and iscrowd"
        ) from error
    return [float(value) for value in measured.stats[: len(NUMBERS)]]


def table(scores: Sequence[float]) -> list[str]:
    """COCO's numbers as lines of text."""
    row = "{:>22} {:>9} {:>9} {:>10} {:>10}"
    lines = [row.format("COCO", "IoU", "area", "most", "value")]
    for number, value in zip(NUMBERS, scores, strict=True):
        lines.append(row.format(*number, f"{value:.4f}" if value >= 0 else "-"))
    return lines


def text(scores: Sequence[float]) -> str:
    """coco.csv: the same, empty where there was nothing to measure."""
    head = ("metric", "iou", "area", "max_det", "value")
    rows = [(*number, f"{value:.9g}" if value >= 0 else "") for number, value in zip(NUMBERS, scores, strict=True)]
    return csv_text(head, rows)
