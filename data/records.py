"""CSV tables, and the JSON files of LabelMe and VIA 2, as COCO's annotations. Called by data/formats.py."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from utils.errors import UserError, quoted
from utils.files import read_text

CLASS_ATTRIBUTES = ("class", "label", "name", "type")  # of VIA's regions, by precedence; else the first is the class
ROUND_POINTS = 36  # of the outline of a circle or an ellipse; divisible by 4, so that its box is exact
# Names of columns in lower case without signs. The longest counts: `bbox_width` is the box's beside `width`.
COLUMNS = {
    "image": "(image|img)(file)?(name|path|id)?|file(name|path)?|path",
    "class": "(class|label|category)(name|id)?|name",
    **{"left": "(b?box)?(xmin|x1|left|x)", "top": "(b?box)?(ymin|y1|top|y)"},
    **{"right": "(b?box)?(xmax|x2|right)", "bottom": "(b?box)?(ymax|y2|bottom)"},
    **{"width": "(b?box)?(width|w)", "height": "(b?box)?(height|h)"},
    **{"image width": "(image|img)?width", "image height": "(image|img)?height"},
    **{"shape": "regionshapeattributes", "attributes": "regionattributes"},  # VIA's
}
HEADERLESS = ("image", "left", "top", "right", "bottom", "class", "image width", "image height")  # of Keras, SKU-110K
Row = tuple[str, tuple[int, int], tuple[str, str, Sequence[Any]] | None]  # image, its size; object, class, points


def read_records(files: Sequence[Path]) -> Any:
    """Return the annotations of files as `read_coco` does, and `files`; ids are names. Raises `UserError`.

    Sizes that the files lack are 0; they are 1 if coordinates are shares of the image.
    """
    images: dict[str, Any] = {}
    annotations: list[Any] = []
    for file in files:
        try:
            for image, (width, height), item in (
                _table_rows(file) if file.suffix.lower() == ".csv" else _json_rows(file)
            ):
                name = image.replace("\\", "/")
                images[name] = SimpleNamespace(id=name, file_name=name, width=width, height=height)
                annotations += [_annotation(name, *item)] if item else []
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error) as error:
            raise UserError(f"{file} cannot be read as annotations ({error}); fix it, or move it away") from None
    if 0 < max((max(each.bbox, default=0.0) for each in annotations), default=0.0) <= 1:
        images = {name: SimpleNamespace(id=name, file_name=name, width=1, height=1) for name in images}
    ids = {each.category_id for each in annotations}
    categories = [SimpleNamespace(id=each, name=each[1], supercategory=each[1]) for each in ids]
    return SimpleNamespace(files=files, images=[*images.values()], annotations=annotations, categories=categories)


def _annotation(image: str, number: str, label: str, points: Sequence[Sequence[Any]]) -> Any:
    xs, ys = zip(*[map(float, point) for point in points], strict=True) if points else ((0.0,), (0.0,))
    box, outline = (min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)), [[*chain(*zip(xs, ys, strict=True))]]
    coded = json.dumps(outline).encode() if len(points) > 2 else None
    category = label.isdecimal() and len(label), label  # numbers in their order
    return SimpleNamespace(id=number, image_id=image, category_id=category, bbox=box, segmentation=coded, iscrowd=0)


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row of a CSV file that is not empty."""
    text = read_text(file)
    reader = csv.reader(io.StringIO(text), delimiter=max(",;\t", key=text.partition("\n")[0].count))
    yield from ((reader.line_num, list(map(str.strip, row))) for row in reader if any(row))


def table_columns(file: Path) -> tuple[dict[str, int], str]:
    """Return the positions of `COLUMNS` in a CSV table of boxes, with `header` if it has one; or what is wrong."""
    try:
        head, first = (*(row for _, row in islice(_rows(file), 2)), [], [])[:2]
    except (csv.Error, UserError) as error:
        return {}, f"{file} cannot be read as CSV ({error})"
    if len(head) > 5 and all(re.fullmatch(r"-?[\d.]*", cell) for cell in head[1:5]):
        return dict(zip(HEADERLESS, range(len(head)), strict=False)), ""
    places = {re.sub("[^a-z0-9]", "", name.lower()): k for k, name in enumerate(head)}
    named = {key: max(filter(re.compile(form).fullmatch, places), key=len, default="") for key, form in COLUMNS.items()}
    columns = {"header": 0, **{key: places[name] for key, name in named.items() if name}}
    far = {"right", "bottom"} if "right" in columns else {"width", "height"}
    if {"image", "shape"} <= {*columns} or {"image", "left", "top", *far} <= {*columns}:
        return columns, ""
    lists = [name for name, cell in zip(head, first, strict=False) if cell.startswith(("[", "{", "("))]
    fault = f", row 2: `{lists[0]}` is a list in one cell" if lists else f" is CSV without boxes ({','.join(head)})"
    return {}, f"{file}{fault}; write a row for each box, with columns as filename,class,xmin,ymin,xmax,ymax"


def _table_rows(file: Path) -> Iterator[Row]:
    """Yield the rows of a CSV table; one without a box is an image without objects."""
    columns, fault = table_columns(file)
    if fault:
        raise UserError(fault)
    for line, row in islice(_rows(file), int("header" in columns), None):
        cells = {key: row[k] if k < len(row) else "" for key, k in columns.items()}
        has_corners, which, item = "right" in columns, f"line {line}", None
        far = ("right", "bottom") if has_corners else ("width", "height")
        box = [cells.get(side, "") for side in ("left", "top", *far)]
        if len(cells.get("shape", "")) > 2:
            item = which, *_region(json.loads(cells["shape"]), json.loads(cells["attributes"]))
        elif any(box):
            try:
                left, top, right, bottom = map(float, box)
            except ValueError:
                raise UserError(f"{file}, row {line}: {quoted(box)} must be the four numbers of one box") from None
            corner = (right, bottom) if has_corners else (left + right, top + bottom)
            item = which, cells.get("class") or "object", [(left, top), corner]
        width, height = (int(float(cells.get(f"image {side}") or 0)) * has_corners for side in ("width", "height"))
        yield cells["image"], (width, height), item


def _json_rows(file: Path) -> Iterator[Row]:
    """Yield the objects of LabelMe's file, or of VIA's, and images without objects."""
    content = json.loads(read_text(file))
    if "imagePath" in content:
        size = int(content.get("imageWidth") or 0), int(content.get("imageHeight") or 0)
        yield file.stem, size, None
        for number, shape in enumerate(content["shapes"], 1):
            form, points = shape.get("shape_type") or "polygon", shape["points"]
            areas = points if form in ("rectangle", "mask", "polygon", "rotation") else []
            points = _ellipse(*points[0], *[math.dist(*points)] * 2) if form == "circle" else areas
            yield file.stem, size, (f"{file.name}, shape {number}", str(shape["label"]).strip(), points)
        return
    for image in content.get("_via_img_metadata", content).values():
        yield image["filename"], (0, 0), None
        regions = image["regions"].values() if isinstance(image["regions"], dict) else image["regions"]  # of VIA 1
        for number, region in enumerate(regions, 1):
            item = _region(region["shape_attributes"], region["region_attributes"])
            yield image["filename"], (0, 0), (f"{image['filename']}, region {number}", *item)


def _region(shape: Mapping[str, Any], attributes: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    """Return class and points of VIA's region."""
    values = {name.strip().lower(): value for name, value in attributes.items()}
    label = next((values[name] for name in CLASS_ATTRIBUTES if name in values), next(iter(values.values()), ""))
    if isinstance(label, dict):  # of check boxes
        label = next((name for name, is_checked in label.items() if is_checked), "")
    points: Sequence[Any] = [*zip(shape.get("all_points_x", ()), shape.get("all_points_y", ()), strict=True)]
    if shape["name"] == "rect":
        x, y, width, height = (shape[key] for key in ("x", "y", "width", "height"))
        points = [(x, y), (x + width, y + height)]
    elif shape["name"] in ("circle", "ellipse"):
        across, down = (shape.get(key, shape.get("r")) for key in ("rx", "ry"))
        points = _ellipse(shape["cx"], shape["cy"], across, down, shape.get("theta", 0))
    return str(label).strip() or "object", points


def _ellipse(x: float, y: float, across: float, down: float, angle: float = 0.0) -> Sequence[Any]:
    turns, cos, sin = (2 * math.pi * k / ROUND_POINTS for k in range(ROUND_POINTS)), math.cos(angle), math.sin(angle)
    points = ((across * math.cos(turn), down * math.sin(turn)) for turn in turns)
    return [(x + cos * a - sin * d, y + sin * a + cos * d) for a, d in points]
