"""COCO's results format, and COCO's metrics if there are annotations.

Called by val.py, which writes and prints what `report` returns; a task's predictions return a `CocoImage`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from utils.batch import CocoImage
from utils.errors import UserError, first_line, nearest, plural, shown
from utils.files import ROOT, csv_text, read_regular, read_yaml

UNUSED_CATEGORY_IDS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # COCO's 80 classes use the other ids from 1 to 90
# The metrics of faster-coco-eval, in its order: metric, IoU, area of the objects, maximum detections per image.
COCO_METRICS = (
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
# For boxes and for masks: the file of the metrics, and the title of their table.
COCO_OUTPUTS = {"bbox": ("coco.csv", "COCO"), "segm": ("coco_masks.csv", "COCO, masks")}


@dataclass(frozen=True)
class CocoIds:
    """The ids of images and classes in results."""

    categories: tuple[int, ...]  # category ids, by class
    images: tuple[int | str, ...]  # image ids of a split, by index
    origin: str  # the source of the ids, for the console


@dataclass(frozen=True)
class Annotations:
    """A COCO annotation file and its ids for the images and classes of a split."""

    file: Path
    content: dict[str, Any]
    ids: CocoIds
    annotated: frozenset[int]  # indices of the split's images that are in the file

    def warnings(self) -> list[str]:
        """Return a warning if the file lacks images of the split."""
        missing = len(self.ids.images) - len(self.annotated)
        return [f"warning: {self.file} lacks {missing} of the images; COCO's metrics exclude them"] * bool(missing)


def check_identities(file: Path, images: Sequence[tuple[Any, str]], categories: Sequence[tuple[Any, str]] = ()) -> None:
    """Raise `UserError` if an id of an annotation file has two names, or an image's name two ids.

    Images and categories are given as id and name. Entries may be repeated, and categories may share a name.
    """
    names = [(name, image) for image, name in images]
    for noun, pairs in (("category id", categories), ("image id", images), ("file_name", names)):
        known: dict[Any, Any] = {}
        for key, value in pairs:
            if known.setdefault(key, value) != value:
                both = f"{shown(known[key])} and {shown(value)}"
                raise UserError(f"{file}: {noun} {shown(key)} stands for both {both}; give each one of its own")


def default_ids(names: Mapping[int, str], paths: Sequence[Path]) -> CocoIds:
    """Return ids to use without annotations.

    An image's id is the stem of its file name, as a number if possible. COCO's classes have COCO's ids, others their
    numbers.
    """
    images = tuple(map(_image_id, paths))
    if list(names.values()) == list(read_yaml(ROOT / "data" / "coco.yaml")["names"].values()):
        categories = tuple(number for number in range(1, 91) if number not in UNUSED_CATEGORY_IDS)
        return CocoIds(categories, images, "category ids are COCO's")
    return CocoIds(tuple(names), images, "category ids are the numbers of the classes, from 0")


def _image_id(path: Path) -> int | str:
    return int(path.stem) if path.stem.isascii() and path.stem.isdecimal() else path.stem


def find_annotations(roots: Sequence[Path], split: str, paths: Sequence[Path]) -> tuple[Path | None, str]:
    """Return the annotation file of a split with the images `paths`, or None with the reason as a message.

    The file is annotations/instances_<folder of the images>.json, or else the only one that matches
    instances_<split>*.json.

    Args:
        roots: folders of the data set, searched in order
    """
    for folder in (root / "annotations" for root in roots):
        named = folder / f"instances_{paths[0].parent.name}.json"
        files = [named] if named.is_file() else sorted(folder.glob(f"instances_{split}*.json"))
        if len(files) == 1:
            return files[0], ""
        if files:
            names = " and ".join(file.name for file in files)
            return None, f"{folder} has {names}; choose one with --annotations"
    missing = f"no instances_{paths[0].parent.name}.json and no instances_{split}*.json in {roots[0] / 'annotations'}"
    return None, f"{missing}; give a file with --annotations"


def read_annotations(file: Path, names: Mapping[int, str], paths: Sequence[Path]) -> Annotations:
    """Read the annotations of the images `paths` of a split, with classes `names`.

    Raises `UserError` if the file has no annotations, or does not match the images or classes.
    """
    try:
        content = json.loads(read_regular(file))
        categories = {str(one["name"]).strip(): int(one["id"]) for one in content["categories"]}
        images = {str(one["file_name"]): one["id"] for one in content["images"]}
        named = [(int(one["id"]), str(one["name"]).strip()) for one in content["categories"]]
        check_identities(file, [(one["id"], str(one["file_name"])) for one in content["images"]], named)
        content["annotations"]
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; give a file of COCO annotations") from None
    except json.JSONDecodeError:
        raise UserError(f"{file} is not JSON; give a file of COCO annotations") from None
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{file} lacks `images` with a file_name and id, `annotations`, or `categories` with a name and id; give a "
            "file of COCO annotations"
        ) from None
    for name in names.values():
        if name not in categories:
            raise UserError(
                f"{file} has no category '{name}'{nearest(name, categories)}; give the data set's own annotations"
            )
    image_ids = list(_image_ids(images, paths))
    annotated = frozenset(index for index, image_id in enumerate(image_ids) if image_id is not None)
    if not annotated:
        raise UserError(
            f"{file} has none of the {len(paths)} images, such as {paths[0].name}; give the split's own annotations"
        )
    ids = CocoIds(
        tuple(categories[name] for name in names.values()),
        tuple(_image_id(path) if known is None else known for path, known in zip(paths, image_ids, strict=True)),
        f"ids are from {file}",
    )
    check_identities(file, list(zip(ids.images, map(str, paths), strict=True)))
    return Annotations(file, content, ids, annotated)


def _image_ids(images: Mapping[str, Any], paths: Sequence[Path]) -> Iterator[Any]:
    """Iterate over the ids of the images `paths`; None for one without annotations.

    An image matches the file_name that its path ends with, or else the only file_name with the same last part.
    """
    by_last_part: dict[str, list[Any]] = {}
    for name, image_id in images.items():
        by_last_part.setdefault(PurePath(name).name, []).append(image_id)
    for path in paths:
        endings = ("/".join(path.parts[start:]) for start in range(1, len(path.parts)))
        image_id = next((images[ending] for ending in endings if ending in images), None)
        same = by_last_part.get(path.name, [])
        yield image_id if image_id is not None or len(same) != 1 else same[0]


def results(images: Sequence[CocoImage], ids: CocoIds) -> list[dict[str, Any]]:
    """Return COCO's results by image, in falling confidence: boxes are x, y, w, h in pixels of the file."""
    rows = []
    for image in sorted(images, key=lambda image: image.image):
        corners, confidence, label = image.rows[:, :4], image.rows[:, 4], image.rows[:, 5].astype(int)
        boxes = np.concatenate((corners[:, :2], corners[:, 2:] - corners[:, :2]), 1).round(3).tolist()
        masks = [{"segmentation": mask} for mask in image.masks] or [{}] * len(boxes)
        for box, score, number, mask in zip(boxes, confidence.tolist(), label.tolist(), masks, strict=True):
            rows.append(
                {
                    "image_id": ids.images[image.image],
                    "category_id": ids.categories[number],
                    "bbox": box,
                    "score": round(score, 5),
                    **mask,
                }
            )
    return rows


def score(
    annotations: Annotations, rows: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ("bbox",)
) -> Iterator[tuple[str, list[float]]]:
    """Iterate over `kinds` and the `COCO_METRICS` of results on the annotated images of the split.

    A metric is -1 if there is nothing to measure. Raises `UserError` if faster-coco-eval is not installed, or cannot
    use the annotations.

    Args:
        kinds: kinds of result to score: "bbox" for boxes, "segm" for masks
    """
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        raise UserError("COCO's metrics need faster-coco-eval: pip install faster-coco-eval") from None
    images = [annotations.ids.images[index] for index in sorted(annotations.annotated)]
    annotated = set(images)
    usable = [dict(row) for row in rows if row["image_id"] in annotated]
    try:
        # The annotations' own ids are replaced: the evaluator ignores id 0 and merges equal ids.
        numbered = [{**one, "id": number} for number, one in enumerate(annotations.content["annotations"], 1)]
        truth = COCO({**annotations.content, "annotations": numbered})
        # Older versions do not load empty results.
        predicted = truth.loadRes(usable) if usable else COCO({**annotations.content, "annotations": []})
        for kind in kinds:
            evaluation = COCOeval_faster(truth, predicted, kind)
            evaluation.params.imgIds = images
            evaluation.params.catIds = list(annotations.ids.categories)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
            yield kind, [float(value) for value in evaluation.stats[: len(COCO_METRICS)]]
    except Exception as error:  # the annotations may lack anything
        raise UserError(
            f"{annotations.file} cannot be used ({type(error).__name__}: {first_line(error)}); give a file of COCO "
            f"annotations, with bbox, area and iscrowd{', and segmentation' * ('segm' in kinds)}"
        ) from error


def table(scores: Sequence[float], title: str) -> list[str]:
    """Return COCO's metrics as lines of text."""
    row = "{:>22} {:>9} {:>9} {:>10} {:>10}"
    lines = [row.format(title, "IoU", "area", "most", "value")]
    for metric, value in zip(COCO_METRICS, scores, strict=True):
        lines.append(row.format(*metric, f"{value:.4f}" if value >= 0 else "-"))
    return lines


def csv_document(scores: Sequence[float]) -> str:
    """Return COCO's metrics as coco.csv; a value is empty if there was nothing to measure."""
    head = ("metric", "iou", "area", "max_det", "value")
    rows = [(*metric, f"{value:.9g}" if value >= 0 else "") for metric, value in zip(COCO_METRICS, scores, strict=True)]
    return csv_text(head, rows)


@dataclass(frozen=True)
class Report:
    """What --save-json writes and prints.

    Attributes:
        documents: text files, by name
        lines: lines for the console
        tables: COCO's metrics as lines for the console
        problem: the reason why there are no metrics; '' if there are metrics, or no annotations
    """

    documents: dict[str, str]
    lines: list[str]
    tables: list[str]
    problem: str = ""


def report(
    file: Path | None, predictions: Sequence[CocoImage], names: Mapping[int, str], images: Sequence[Path], stem: str
) -> Report:
    """Return the predictions for `images` as COCO's results, and COCO's metrics if there is a file of annotations.

    Args:
        stem: beginning of the name of the results file
    """
    ids, truth, problem = default_ids(names, images), None, ""
    if file:
        try:
            truth = read_annotations(file, names, images)
            ids = truth.ids
        except UserError as error:
            problem = str(error)
    rows = results(predictions, ids)
    documents, tables = {f"{stem}_predictions.json": json.dumps(rows)}, []
    lines = [f"{plural(len(rows), 'result')} in {stem}_predictions.json; {ids.origin}"]
    if truth:
        lines += truth.warnings()
        kinds = ["bbox"] + ["segm"] * any(image.masks for image in predictions)
        try:
            for kind, scores in score(truth, rows, kinds):
                document, title = COCO_OUTPUTS[kind]
                documents[document] = csv_document(scores)
                tables += table(scores, title)
        except UserError as error:
            problem = str(error)
    return Report(documents, lines, tables, problem)
