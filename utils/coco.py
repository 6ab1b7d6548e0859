"""COCO's annotation files, which data/formats.py reads too; its results format and metrics, which val.py writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import DecodeError, Raw, defstruct
from msgspec.json import decode

from utils.batch import CocoImage
from utils.console import log, table
from utils.errors import UserError, first_line, nearest, plural, quoted
from utils.files import IMAGES_FILE, ROOT, csv_text, read_text, read_yaml

UNUSED_CATEGORY_IDS = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)  # COCO's 80 classes use the other ids from 1 to 90
# The metrics of faster-coco-eval, in its order: metric, IoU, area of the objects, maximum detections per image.
COCO_METRICS = (
    *(("AP", iou, "all", 100) for iou in ("0.50:0.95", "0.50", "0.75")),
    *(("AP", "0.50:0.95", area, 100) for area in ("small", "medium", "large")),
    *(("AR", "0.50:0.95", "all", detections) for detections in (1, 10, 100)),
    *(("AR", "0.50:0.95", area, 100) for area in ("small", "medium", "large")),
)
# For boxes and for masks: the file of the metrics, and the title of their table.
COCO_OUTPUTS = {"bbox": ("coco.csv", "COCO"), "segm": ("coco_masks.csv", "COCO, masks")}


# Annotation files

SIDE = float | int | None
CATEGORY = defstruct("Category", [("id", int), ("name", Any), ("supercategory", Any, None)])
NAMES = [(name, str, "") for name in ("file_name", "label_file")]  # the latter only in `IMAGES_FILE`
IMAGE: Any = defstruct("Image", [("id", int | str), *NAMES, ("width", SIDE, 0), ("height", SIDE, 0)])
REFERENCE: list[Any] = [("image_id", int | str), ("category_id", int | None, None)]  # fields of any annotation
OBJECT: list[Any] = [("id", Any, None), ("iscrowd", Any, 0), ("bbox", Any, None), ("segmentation", Raw, Raw())]


def read_coco(file: Path, objects: bool = False) -> Any:
    """Return an annotation file as an object with `categories`, `images` and `annotations`. Raises `UserError`.

    `objects` is whether annotations have boxes and outlines, which stay JSON, not only the ids of their images and
    categories. Repeated entries of images and categories count once; an id with two meanings is an error. Of
    results by detect.py, images and categories are in `IMAGES_FILE` beside them.
    """
    text, listed = read_text(file), file.parent / IMAGES_FILE
    is_results = text.startswith("[") and listed.is_file()
    annotation: Any = defstruct("Annotation", REFERENCE + OBJECT if objects else REFERENCE, gc=objects)
    lists = {"categories": list[CATEGORY], "images": list[IMAGE], "annotations": list[annotation]}  # type: ignore[valid-type]
    try:  # the objects of json.load take eight times as much memory as the file
        coco: Any = decode(read_text(listed) if is_results else text, type=defstruct("CocoFile", lists.items()))
        coco.annotations = decode(text, type=lists["annotations"]) if is_results else coco.annotations
    except (DecodeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read as COCO annotations ({error}); name another file") from None
    for category in coco.categories:
        category.name = str(category.name).strip()
    for image in coco.images:
        image.file_name = image.file_name.replace("\\", "/")
    _check_unique(file, "category id", ((category.id, category.name) for category in coco.categories))
    _check_unique(file, "image id", ((image.id, image.file_name) for image in coco.images))
    _check_unique(file, "file_name", ((image.file_name, image.id) for image in coco.images))
    for entries in (coco.images, coco.categories):
        entries[:] = {entry.id: entry for entry in entries}.values()
    return coco


def _check_unique(file: Path, noun: str, pairs: Iterable[tuple[Any, Any]]) -> None:
    values: dict[Any, Any] = {}
    for key, value in pairs:
        if values.setdefault(key, value) != value:
            raise UserError(f"{file}: {noun} {quoted(key)} means {quoted(values[key])} and {quoted(value)}; fix either")


# Results


class CocoIds(NamedTuple):
    """The ids of images and classes in results."""

    categories: tuple[int, ...]  # category ids, by class
    images: tuple[int | str | None, ...]  # image ids of a split, by index; None for an image without annotations
    origin: str  # the source of the ids, for the console


def default_ids(names: Mapping[int, str], paths: Sequence[Path]) -> CocoIds:
    """Return ids to use without annotations: the stems of the files, and COCO's ids or the numbers of the classes."""
    stems = [path.stem for path in paths]
    images = tuple(int(stem) if stem.isascii() and stem.isdecimal() else stem for stem in stems)
    images = images if len({*images}) == len({*stems}) else tuple(stems)  # 7.jpg and 07.jpg are two images
    if list(names.values()) == list(read_yaml(ROOT / "data" / "coco.yaml")["names"].values()):
        categories = tuple(number for number in range(1, 91) if number not in UNUSED_CATEGORY_IDS)
        return CocoIds(categories, images, "category ids are COCO's")
    return CocoIds(tuple(names), images, "category ids are the numbers of the classes, from 0")


def annotated_ids(file: Path, names: Mapping[int, str], paths: Sequence[Path]) -> CocoIds:
    """Return the ids in an annotation file, an image's by the `file_name` that ends its path. Raises `UserError`."""
    coco = read_coco(file)
    categories = {category.name: category.id for category in coco.categories}
    for name in names.values():
        if name not in categories:
            raise UserError(f"{file} has no category '{name}'{nearest(name, categories)}; give the data set's own")
    image_ids = {image.file_name: image.id for image in coco.images}
    endings = (("/".join(path.parts[start:]) for start in range(1, len(path.parts))) for path in paths)
    names_in_file = (next(filter(image_ids.__contains__, path_endings), None) for path_endings in endings)
    images = tuple(map(image_ids.get, names_in_file))
    if not any(image is not None for image in images):
        raise UserError(f"{file} has none of the {len(paths)} images, such as {paths[0].name}; give the split's own")
    matched = ((image, str(path)) for image, path in zip(images, paths, strict=True) if image is not None)
    _check_unique(file, "image id", matched)
    return CocoIds(tuple(categories[name] for name in names.values()), images, f"ids are from {file}")


def results(images: Sequence[CocoImage], ids: CocoIds) -> list[dict[str, Any]]:
    """Return COCO's results of the images with an id, in falling confidence: boxes are x, y, w, h in pixels."""
    rows = []
    for image in sorted(images, key=lambda image: image.image):
        corners, confidence, label = image.rows[:, :4], image.rows[:, 4], image.rows[:, 5].astype(int)
        boxes = np.concatenate((corners[:, :2], corners[:, 2:] - corners[:, :2]), 1).round(3).tolist()
        masks = [{"segmentation": mask} for mask in image.masks] or [{}] * len(boxes)
        image_id = ids.images[image.image]
        for box, score, class_id, mask in zip(boxes, confidence.tolist(), label.tolist(), masks, strict=True):
            row = {"image_id": image_id, "category_id": ids.categories[class_id], "bbox": box, "score": round(score, 5)}
            rows.append({**row, **mask})
    return [row for row in rows if row["image_id"] is not None]


# Metrics


def metrics(file: Path, ids: CocoIds, rows: list[dict[str, Any]]) -> Iterator[tuple[str, list[float]]]:
    """Iterate over the `COCO_METRICS` by kind, "bbox" and, with masks, "segm"; -1: not measured. Raises `UserError`."""
    from faster_coco_eval import COCO, COCOeval_faster

    iou_types = ("bbox", "segm") if any("segmentation" in row for row in rows) else ("bbox",)
    try:
        annotations = json.loads(read_text(file))
        # The annotations' own ids are replaced: the evaluator ignores id 0 and merges equal ids.
        boxed = [item for item in annotations["annotations"] if item.get("bbox")]  # as in training
        crowd = {"iscrowd": 0} if all(item.get("iscrowd") for item in boxed) else {}  # objects: see data/formats.py
        objects = enumerate(boxed or annotations["annotations"], 1)
        truth = COCO({**annotations, "annotations": [{**item, **crowd, "id": number} for number, item in objects]})
        predicted = truth.loadRes(rows) if rows else COCO({**annotations, "annotations": []})
        for iou_type in iou_types:
            evaluation = COCOeval_faster(truth, predicted, iou_type)
            evaluation.params.imgIds = [image for image in ids.images if image is not None]
            evaluation.params.catIds = list(ids.categories)
            evaluation.run()
            yield iou_type, [float(value) for value in evaluation.stats[: len(COCO_METRICS)]]
    except Exception as error:  # the annotations may lack anything
        raise UserError(
            f"{file} cannot be used ({type(error).__name__}: {first_line(error)}); give a file of COCO annotations, "
            f"with bbox, area and iscrowd{', and segmentation' if 'segm' in iou_types else ''}"
        ) from error


def report(
    write: Callable[[Mapping[str, str]], object],
    file: Path | None,
    named_by_user: bool,
    predictions: Sequence[CocoImage],
    names: Mapping[int, str],
    images: Sequence[Path],
    stem: str,
) -> None:
    """Write the predictions for `images` as COCO's results, <stem>_predictions.json; write and print COCO's metrics.

    An annotation file that does not fit is a warning, or if it is `named_by_user` a `UserError`, raised once the
    results are written. `write` writes text files by name.
    """
    ids = default_ids(names, images)
    try:
        try:
            ids = annotated_ids(file, names, images) if file else ids
        finally:
            rows = results(predictions, ids)
            write({f"{stem}_predictions.json": json.dumps(rows)})
            log(f"{plural(len(rows), 'result')} in {stem}_predictions.json; {ids.origin}")
        if missing := ids.images.count(None):
            log(f"warning: {file} lacks {missing} of the images; results and COCO's metrics exclude them")
        for kind, values in metrics(file, ids, rows) if file else ():
            document, title = COCO_OUTPUTS[kind]
            measured = [(*key, "" if value < 0 else value) for key, value in zip(COCO_METRICS, values, strict=True)]
            write({document: csv_text(("metric", "iou", "area", "max_det", "value"), measured)})
            log(*table([(title, "IoU", "area", "maxDets", "value"), *measured]), always=True)
    except UserError as error:
        if named_by_user:
            raise
        log(f"warning: {error}")
