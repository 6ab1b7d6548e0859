"""COCO's annotation files, read by `read_coco` for training and evaluation; its results format, and its metrics.

Called by data/formats.py, and by val.py, which writes and prints what `report` returns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from utils.batch import CocoImage
from utils.console import table
from utils.errors import UserError, first_line, nearest, plural, shown
from utils.files import ROOT, csv_text, read_regular, read_yaml

UNUSED_CATEGORY_IDS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # COCO's 80 classes use the other ids from 1 to 90
AREAS = ("small", "medium", "large")
# The metrics of faster-coco-eval, in its order: metric, IoU, area of the objects, maximum detections per image.
COCO_METRICS = (
    *(("AP", iou, "all", 100) for iou in ("0.50:0.95", "0.50", "0.75")),
    *(("AP", "0.50:0.95", area, 100) for area in AREAS),
    *(("AR", "0.50:0.95", "all", detections) for detections in (1, 10, 100)),
    *(("AR", "0.50:0.95", area, 100) for area in AREAS),
)
# For boxes and for masks: the file of the metrics, and the title of their table.
COCO_OUTPUTS = {"bbox": ("coco.csv", "COCO"), "segm": ("coco_masks.csv", "COCO, masks")}


# Annotation files


@lru_cache(1)
def _decoders() -> dict[str, Any]:
    """Return msgspec's decoders of a file by how much of its annotations they read; outlines stay text.

    The objects of json.load take eight times as much memory as the file.
    """
    from msgspec import Raw, defstruct
    from msgspec.json import Decoder

    size = float | int | None
    category = defstruct("Category", [("id", int), ("name", Any), ("supercategory", Any, None)])
    image = defstruct("Image", [("id", int | str), ("file_name", str, ""), ("width", size, 0), ("height", size, 0)])
    references: list[Any] = [("image_id", int | str), ("category_id", int | None, None)]
    contents = [("id", Any, None), ("iscrowd", Any, 0), ("bbox", Any, None), ("segmentation", Raw, Raw())]
    kinds = {
        "references": defstruct("Reference", references, gc=False),
        "objects": defstruct("Annotation", [*references, *contents]),
        "mappings": dict[str, Any],
    }

    def decoder(kind: Any) -> Any:
        parts = [("categories", list[category]), ("images", list[image]), ("annotations", list[kind])]  # type: ignore[valid-type]
        return Decoder(defstruct("CocoFile", parts))

    return {name: decoder(kind) for name, kind in kinds.items()}


def read_coco(file: Path, annotations: str = "references") -> Any:
    """Return an annotation file as an object with `categories`, `images` and `annotations`. Raises `UserError`.

    Repeated entries of images and categories count once; an id with two meanings is an error.

    Args:
        annotations: "references" for their image and category ids alone, "objects" for boxes and outlines (as JSON)
            too, "mappings" for all that they have
    """
    import msgspec

    try:
        content = _decoders()[annotations].decode(read_regular(file))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; give a file of COCO annotations") from None
    except msgspec.ValidationError as error:
        raise UserError(f"{file} is not a COCO annotation file of objects ({error}); name another one") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise UserError(f"{file} is not JSON ({error}); download it again") from None
    for category in content.categories:
        category.name = str(category.name).strip()
    for image in content.images:
        image.file_name = image.file_name.replace("\\", "/")
    check_identities(file, "category id", [(category.id, category.name) for category in content.categories])
    check_identities(file, "image id", [(image.id, image.file_name) for image in content.images])
    check_identities(file, "file_name", [(image.file_name, image.id) for image in content.images])
    for entries in (content.images, content.categories):
        entries[:] = {entry.id: entry for entry in entries}.values()
    return content


def check_identities(file: Path, noun: str, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Raise `UserError` if one of the keys of an annotation file has two values; equal pairs may be repeated."""
    known: dict[Any, Any] = {}
    for key, value in pairs:
        if known.setdefault(key, value) != value:
            both = f"{shown(known[key])} and {shown(value)}"
            raise UserError(f"{file}: {noun} {shown(key)} stands for both {both}; give each one of its own")


# Results


class CocoIds(NamedTuple):
    """The ids of images and classes in results."""

    categories: tuple[int, ...]  # category ids, by class
    images: tuple[int | str, ...]  # image ids of a split, by index
    origin: str  # the source of the ids, for the console


def default_ids(names: Mapping[int, str], paths: Sequence[Path]) -> CocoIds:
    """Return ids to use without annotations: the stems of the files, and COCO's ids or the numbers of the classes."""
    images = tuple(map(_image_id, paths))
    if list(names.values()) == list(read_yaml(ROOT / "data" / "coco.yaml")["names"].values()):
        categories = tuple(number for number in range(1, 91) if number not in UNUSED_CATEGORY_IDS)
        return CocoIds(categories, images, "category ids are COCO's")
    return CocoIds(tuple(names), images, "category ids are the numbers of the classes, from 0")


def _image_id(path: Path) -> int | str:
    return int(path.stem) if path.stem.isascii() and path.stem.isdecimal() else path.stem


def results(images: Sequence[CocoImage], ids: CocoIds) -> list[dict[str, Any]]:
    """Return COCO's results by image, in falling confidence: boxes are x, y, w, h in pixels of the file."""
    rows = []
    for image in sorted(images, key=lambda image: image.image):
        corners, confidence, label = image.rows[:, :4], image.rows[:, 4], image.rows[:, 5].astype(int)
        boxes = np.concatenate((corners[:, :2], corners[:, 2:] - corners[:, :2]), 1).round(3).tolist()
        masks = [{"segmentation": mask} for mask in image.masks] or [{}] * len(boxes)
        for box, score, number, mask in zip(boxes, confidence.tolist(), label.tolist(), masks, strict=True):
            image_id, category_id = ids.images[image.image], ids.categories[number]
            row = {"image_id": image_id, "category_id": category_id, "bbox": box, "score": round(score, 5)}
            rows.append({**row, **mask})
    return rows


# Metrics


class Annotations(NamedTuple):
    """A COCO annotation file and its ids for the images and classes of a split."""

    file: Path
    content: Any  # of `read_coco`, annotations as mappings
    ids: CocoIds
    annotated: frozenset[int]  # indices of the split's images that are in the file


def find_annotations(roots: Sequence[Path], split: str, paths: Sequence[Path]) -> tuple[Path | None, str]:
    """Return the annotation file of a split with the images `paths`, or None with the reason as a message.

    It is below the first of the data set's folders `roots` that has annotations/instances_<folder of the images>.json,
    or else a single instances_<split>*.json there.
    """
    name, pattern = f"instances_{paths[0].parent.name}.json", f"instances_{split}*.json"
    for folder in (root / "annotations" for root in roots):
        files = [folder / name] if (folder / name).is_file() else [*folder.glob(pattern)]
        if len(files) == 1:
            return files[0], ""
    return None, f"no {name} and not one {pattern} in {roots[0] / 'annotations'}; give a file with --annotations"


def read_annotations(file: Path, names: Mapping[int, str], paths: Sequence[Path]) -> Annotations:
    """Read the annotations of the images `paths` of a split. Raises `UserError`, also for other images or classes."""
    content = read_coco(file, "mappings")
    categories = {category.name: category.id for category in content.categories}
    for name in names.values():
        if name not in categories:
            raise UserError(
                f"{file} has no category '{name}'{nearest(name, categories)}; give the data set's own annotations"
            )
    image_ids = list(_image_ids({image.file_name: image.id for image in content.images}, paths))
    annotated = frozenset(index for index, image_id in enumerate(image_ids) if image_id is not None)
    if not annotated:
        raise UserError(
            f"{file} has none of the {len(paths)} images, such as {paths[0].name}; give the split's own annotations"
        )
    images = [_image_id(path) if known is None else known for path, known in zip(paths, image_ids, strict=True)]
    check_identities(file, "image id", list(zip(images, map(str, paths), strict=True)))
    ids = CocoIds(tuple(categories[name] for name in names.values()), tuple(images), f"ids are from {file}")
    return Annotations(file, content, ids, annotated)


def _image_ids(images: Mapping[str, Any], paths: Sequence[Path]) -> Iterator[Any]:
    """Iterate over the ids of the images `paths`; None for one without annotations.

    An image matches the file_name that its path ends with, or else the only one with the same last part.
    """
    by_last_part: dict[str, list[Any]] = {}
    for name, image_id in images.items():
        by_last_part.setdefault(PurePath(name).name, []).append(image_id)
    for path in paths:
        endings = ("/".join(path.parts[start:]) for start in range(1, len(path.parts)))
        same = by_last_part.get(path.name, [])
        yield next((images[ending] for ending in endings if ending in images), same[0] if len(same) == 1 else None)


def score(
    annotations: Annotations, rows: Sequence[Mapping[str, Any]], kinds: Sequence[str] = ("bbox",)
) -> Iterator[tuple[str, list[float]]]:
    """Iterate over `kinds` ("bbox", "segm") and the `COCO_METRICS` of results; a value is -1 if nothing is measured.

    Raises `UserError` if faster-coco-eval is not installed, or cannot use the annotations.
    """
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError:
        raise UserError("COCO's metrics need faster-coco-eval: pip install faster-coco-eval") from None
    import msgspec

    content, images = annotations.content, [annotations.ids.images[index] for index in sorted(annotations.annotated)]
    annotated = set(images)
    usable = [dict(row) for row in rows if row["image_id"] in annotated]
    try:
        # The annotations' own ids are replaced: the evaluator ignores id 0 and merges equal ids.
        numbered = [{**one, "id": number} for number, one in enumerate(content.annotations, 1)]
        described = msgspec.to_builtins({"images": content.images, "categories": content.categories})
        truth = COCO({**described, "annotations": numbered})
        # Older versions do not load empty results.
        predicted = truth.loadRes(usable) if usable else COCO({**described, "annotations": []})
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
            f"annotations, with bbox, area and iscrowd{', and segmentation' if 'segm' in kinds else ''}"
        ) from error


class Report(NamedTuple):
    """What --save-json writes and prints."""

    documents: dict[str, str]  # text files, by name
    lines: list[str]  # for the console
    tables: list[str]  # COCO's metrics, for the console
    problem: str = ""  # the reason why there are no metrics; '' if there are, or if there are no annotations


def report(
    file: Path | None, predictions: Sequence[CocoImage], names: Mapping[int, str], images: Sequence[Path], stem: str
) -> Report:
    """Return the predictions for `images` as COCO's results, <stem>_predictions.json, and metrics by a file, if any."""
    truth, problem, tables = None, "", []
    try:
        truth = read_annotations(file, names, images) if file else None
    except UserError as error:
        problem = str(error)
    ids = truth.ids if truth else default_ids(names, images)
    rows = results(predictions, ids)
    documents = {f"{stem}_predictions.json": json.dumps(rows)}
    lines = [f"{plural(len(rows), 'result')} in {stem}_predictions.json; {ids.origin}"]
    if truth:
        if missing := len(images) - len(truth.annotated):
            lines.append(f"warning: {file} lacks {missing} of the images; COCO's metrics exclude them")
        kinds = ["bbox", "segm"] if any(image.masks for image in predictions) else ["bbox"]
        try:
            for kind, scores in score(truth, rows, kinds):
                document, title = COCO_OUTPUTS[kind]
                measured = list(zip(COCO_METRICS, scores, strict=True))
                of_file = ((*metric, f"{value:.9g}" if value >= 0 else "") for metric, value in measured)
                documents[document] = csv_text(("metric", "iou", "area", "max_det", "value"), of_file)
                printed = [(*metric, value if value >= 0 else "-") for metric, value in measured]
                tables += table([(title, "IoU", "area", "most", "value"), *printed])
        except UserError as error:
            problem = str(error)
    return Report(documents, lines, tables, problem)
