"""Boxes and outlines in CSV tables and in the JSON files of LabelMe and VIA 2. Called by data/formats.py."""

from __future__ import annotations

import cmath
import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from utils.errors import UserError, quoted
from utils.files import read_text

DEFAULT_CLASS = "object"  # class of objects without one
CLASS_ATTRIBUTES = ("class", "label", "name", "type")  # of VIA's regions, by precedence; else the first is the class
ROUND_POINTS = 36  # of the outline of a circle or an ellipse; divisible by 4, so that the box of a circle is exact
# Names of columns in lower case without signs, by precedence; those of boxes may begin with `bbox` or `box`.
COLUMNS = {
    "image": ("filename", "imagefilename", "imagename", "imageid", "image", "filepath", "imagepath", "path", "file"),
    "class": ("class", "classname", "label", "labelname", "category", "categoryname", "name", "classid", "labelid"),
    **{"left": ("xmin", "x1", "left", "x"), "top": ("ymin", "y1", "top", "y")},
    **{"right": ("xmax", "x2", "right"), "bottom": ("ymax", "y2", "bottom")},
    **{"width": ("width", "w"), "height": ("height", "h")},
    **{"shape": ("regionshapeattributes",), "attributes": ("regionattributes",)},  # VIA's
}
HEADERLESS = ("image", "left", "top", "right", "bottom", "class", "image width", "image height")  # of Keras, SKU-110K


class Record(NamedTuple):
    """The objects of an image."""

    name: str  # path or file name of the image, perhaps without suffix
    size: tuple[int, int]  # width and height, (0, 0) if the file lacks them, (1, 1) if coordinates are shares
    origin: str  # start of a message about an object, which its number follows
    objects: list[tuple[int, str, list[Any]]]  # number, class, and outline (x, y), or two corners, or nothing


def points_box(points: Sequence[Any]) -> tuple[float, ...]:
    """Return left, top, width and height of the box of a record's points; () if there are none."""
    if not points:
        return ()
    (left, *_, right), (top, *_, bottom) = (
        axis if len(axis) == 2 else sorted(axis) for axis in zip(*points, strict=True)
    )
    return left, top, right - left, bottom - top


@lru_cache(4)
def read_records(files: Sequence[Path], stamp: bytes) -> list[Record]:
    """Return the records of files, read once as long as their stamp stays. Raises `UserError`."""
    records: dict[str, Record] = {}
    for file in files:
        try:
            for record in _read_table(file) if file.suffix.lower() == ".csv" else _read_json(file):
                records.setdefault(record.name, record._replace(objects=[])).objects.extend(record.objects)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error) as error:
            raise UserError(f"{file} cannot be read as annotations ({error}); fix it, or move it away") from None
    return list(records.values())


def _rows(file: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the cells of each row of a CSV file that is not empty, and the line in which it ends."""
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
    positions = {re.sub("[^a-z0-9]", "", name.lower()): k for k, name in reversed([*enumerate(head)])}
    forms = {key: [start + name for name in names for start in ("bbox", "box", "")] for key, names in COLUMNS.items()}
    has_corners = any(form in positions for form in forms["right"])
    for side in ("width", "height"):  # beside corners they are the image's
        forms |= {f"image {side}": [f"image{side}", *[side] * has_corners], side: [] if has_corners else forms[side]}
    places = {key: [positions[form] for form in forms[key] if form in positions] for key in forms}
    columns = {"header": 0, **{key: found[0] for key, found in places.items() if found}}
    if "image" in columns and ({*_sides(columns)} <= {*columns} or "shape" in columns):
        return columns, ""
    lists = [name for name, cell in zip(head, first, strict=False) if cell.startswith(("[", "{", "("))]
    fault = f", row 2: `{lists[0]}` is a list in one cell" if lists else f" is CSV without boxes ({','.join(head)})"
    return {}, f"{file}{fault}; write a row for each box, with columns as filename,class,xmin,ymin,xmax,ymax"


def _sides(columns: Mapping[str, int]) -> tuple[str, ...]:
    return ("left", "top", "width", "height") if "width" in columns else ("left", "top", "right", "bottom")


def _read_table(file: Path) -> Iterator[Record]:
    """Yield a record per row. A row without a box is an image without objects; numbers up to 1 are shares."""
    columns, fault = table_columns(file)
    if fault:
        raise UserError(fault)
    records, largest = [], 0.0
    for line, row in islice(_rows(file), int("header" in columns), None):
        cells = {key: row[k] if k < len(row) else "" for key, k in columns.items()}
        box, label, points = [cells.get(side, "") for side in _sides(columns)], cells.get("class") or DEFAULT_CLASS, []
        if "shape" in columns:
            box = [cells["shape"].strip("{}")]
            label, points = _class(json.loads(cells["attributes"])), _points(json.loads(cells["shape"]))
        elif any(box):
            try:
                left, top, *far = map(float, box)
            except ValueError:
                raise UserError(f"{file}, row {line}: {quoted(box)} must be four numbers, of one box") from None
            right, bottom = (left + far[0], top + far[1]) if "width" in columns else far
            points, largest = [(left, top), (right, bottom)], max(largest, left, top, right, bottom)
        size = int(float(cells.get("image width") or 0)), int(float(cells.get("image height") or 0))
        objects = [(line, label, points)] if any(box) else []
        records.append(Record(cells["image"], size, f"{file}, line", objects))
    yield from (record._replace(size=(1, 1)) if 0 < largest <= 1 else record for record in records)


def _read_json(file: Path) -> Iterator[Record]:
    """Yield the record of LabelMe's file or those of VIA's, none for a file of another program."""
    content = json.loads(read_text(file))
    if isinstance(content, dict) and "imagePath" in content:
        objects = [
            (k, str(item["label"]).strip(), _labelme_points(item)) for k, item in enumerate(content["shapes"], 1)
        ]
        size = int(content.get("imageWidth") or 0), int(content.get("imageHeight") or 0)
        yield Record(file.stem, size, f"{file}: shape", objects)
    else:
        for image in content.get("_via_img_metadata", content).values():
            regions = image["regions"].values() if isinstance(image["regions"], dict) else image["regions"]  # of VIA 1
            pairs = [(_class(item["region_attributes"]), _points(item["shape_attributes"])) for item in regions]
            objects = [(k, *pair) for k, pair in enumerate(pairs, 1)]
            yield Record(image["filename"], (0, 0), f"{file}: {image['filename']}, region", objects)


def _class(attributes: Mapping[str, Any]) -> str:
    values = {name.strip().lower(): value for name, value in attributes.items()}
    value = next((values[name] for name in CLASS_ATTRIBUTES if name in values), next(iter(values.values()), ""))
    if isinstance(value, dict):  # of check boxes
        value = next((name for name, is_checked in value.items() if is_checked), "")
    return str(value).strip() or DEFAULT_CLASS


def _points(shape: Mapping[str, Any]) -> list[Any]:
    """Return the points of VIA's shape: see `Record`."""
    numbers = {key: float(value) for key, value in shape.items() if isinstance(value, int | float)}
    if shape["name"] == "rect":
        x, y, width, height = (numbers[key] for key in ("x", "y", "width", "height"))
        return [(x, y), (x + width, y + height)]
    if "cx" in numbers and shape["name"] != "point":
        across, down = (numbers.get(key, numbers.get("r", 0.0)) for key in ("rx", "ry"))
        return _ellipse(complex(numbers["cx"], numbers["cy"]), across, down, cmath.rect(1, numbers.get("theta", 0.0)))
    points = list(zip(*(map(float, shape.get(f"all_points_{axis}", ())) for axis in "xy"), strict=True))
    return points if len(points) > 2 else []


def _labelme_points(shape: Mapping[str, Any]) -> list[Any]:
    """Return the points of LabelMe's shape: see `Record`."""
    form, points = shape.get("shape_type") or "polygon", [(float(x), float(y)) for x, y in shape["points"]]
    if form == "circle":
        return _ellipse(complex(*points[0]), *[math.dist(*points)] * 2)
    if form in ("rectangle", "mask"):
        xs, ys = zip(*points, strict=True)
        return [(min(xs), min(ys)), (max(xs), max(ys))]
    return points if form in ("polygon", "rotation") and len(points) > 2 else []


def _ellipse(centre: complex, across: float, down: float, direction: complex = 1) -> list[Any]:
    turns = (2 * math.pi * k / ROUND_POINTS for k in range(ROUND_POINTS))
    points = (centre + direction * complex(across * math.cos(turn), down * math.sin(turn)) for turn in turns)
    return [(point.real, point.imag) for point in points]
