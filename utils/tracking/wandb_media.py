"""W&B's media of a run: images with boxes and masks, and tables and charts made from the run folder's text files.

Used by utils/tracking/wandb.py.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from utils.summary import Box, Example, evenly_spaced

AS_TABLES = {"classes.csv"}  # files shown as tables
MAX_ROWS = 10_000  # W&B draws no more rows of a table
EXAMPLE_PIXELS = 640  # longer side of an example image
LINE_PIXELS = 3  # line width of an outline
CURVE_TITLES = {"": "", "mask_": " of masks"}  # end of the title, by the beginning of the file's name


def image_with_boxes(
    wandb: Any, example: Example, pixels: np.ndarray, names: Sequence[str], shape: Sequence[int]
) -> Any:
    """Return an image of W&B, with boxes and masks of labels and predictions.

    W&B's boxes are upright: the lines of other outlines become a mask, and the boxes around them carry the captions.

    Args:
        pixels: the example's image, uint8 (h, w, 3) BGR
        shape: height and width to pad the image to
    """
    size = pixels.shape[1], pixels.shape[0]
    padding, shares = [(0, shape[0] - size[1]), (0, shape[1] - size[0])], (size[0] / shape[1], size[1] / shape[0])
    boxes, masks = {}, {}
    for title, these, outlines in (
        ("ground_truth", example.labels, example.label_outlines),
        ("predictions", example.predictions, example.prediction_outlines),
    ):
        boxes[title] = {"box_data": [_box(box, names, shares) for box in these], "class_labels": dict(enumerate(names))}
        lines = [box.outline for box in these]
        if outlines or any(lines):
            class_map = _class_map(these, outlines or lines, size, filled=bool(outlines))
            masks[title] = {"mask_data": np.pad(class_map, padding), "class_labels": dict(enumerate(names, 1))}
    pixels = np.pad(pixels[..., ::-1], [*padding, (0, 0)])
    return wandb.Image(pixels, boxes=boxes, masks=masks or None, caption=example.name, file_type="jpg")


def _box(box: Box, names: Sequence[str], shares: tuple[float, float]) -> dict[str, Any]:
    """Return a box in the form of `wandb.Image`, for an image with these shares of the padded width and height."""
    left, top, right, bottom = np.multiply(box.xyxy, 2 * shares).tolist()
    wandb_box: dict[str, Any] = {
        "position": {"minX": left, "minY": top, "maxX": right, "maxY": bottom},
        "class_id": box.label,
        "box_caption": names[box.label],
    }
    if box.confidence is not None:
        wandb_box["scores"] = {"confidence": box.confidence}
        wandb_box["box_caption"] += f" {box.confidence:.2f}"
    return wandb_box


def _class_map(boxes: Sequence[Box], outlines: Sequence[Sequence[float]], size: tuple[int, int], filled: bool) -> Any:
    """Return a mask in the form of `wandb.Image`: the class of each pixel plus one, 0 for none, int (height, width).

    Args:
        outlines: an outline for each box, x, y, x, y, ... as fractions of width and height; the first is in front
        size: width and height in pixels
        filled: whether to draw the insides of the outlines instead of their lines
    """
    image = Image.new("I", size)
    pen = ImageDraw.Draw(image)
    for box, outline in zip(reversed(boxes), reversed(outlines), strict=True):
        if len(outline) >= 4:  # Pillow cannot draw a polygon of one point
            points = [(x * size[0], y * size[1]) for x, y in zip(outline[::2], outline[1::2], strict=True)]
            if filled:
                pen.polygon(points, fill=box.label + 1)
            else:
                pen.line([*points, *points[:2]], fill=box.label + 1, width=LINE_PIXELS, joint="curve")
    return np.asarray(image)


def charts(wandb: Any, documents: Mapping[str, str]) -> dict[str, Any]:
    """Return W&B's tables and charts of CSV files, by key.

    The known files are `AS_TABLES`, confusion_matrix.csv, and PR_curve.csv and curves.csv with or without `mask_`.

    Args:
        wandb: the package wandb
        documents: contents of the files, by name
    """
    made: dict[str, Any] = {}
    for name in AS_TABLES & set(documents):
        head, *rows = csv.reader(documents[name].splitlines())
        made[f"tables/{name.removesuffix('.csv')}"] = wandb.Table(
            columns=head, data=[[_value(cell) for cell in row] for row in rows]
        )
    for prefix, of in CURVE_TITLES.items():
        if text := documents.get(f"{prefix}PR_curve.csv"):
            points = thinned([(name, float(x), float(y)) for name, x, y in _body(text)])
            key = f"charts/{prefix}PR_curve"
            made[key] = line_chart(wandb, points, f"Precision over recall{of}", "recall", "precision")
        if text := documents.get(f"{prefix}curves.csv"):
            points = thinned(list(f1_rows(_body(text))))
            made[f"charts/{prefix}F1_curve"] = line_chart(wandb, points, f"F1 over confidence{of}", "confidence", "F1")
    if text := documents.get("confusion_matrix.csv"):
        made["charts/confusion_matrix"] = confusion_chart(wandb, text)
    return made


def f1_rows(rows: Sequence[Sequence[str]]) -> Iterator[tuple[str, float, float]]:
    """Iterate over the class, confidence and F1 of each row of curves.csv."""
    for name, confidence, precision, recall in rows:
        p, r = float(precision), float(recall)
        yield name, float(confidence), 2 * p * r / (p + r) if p + r else 0.0


def thinned(rows: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Return at most `MAX_ROWS` rows, evenly spaced in each class, with four significant digits."""
    by_class: dict[str, list[tuple[str, float, float]]] = {}
    for name, x, y in rows:
        by_class.setdefault(name, []).append((name, float(f"{x:.4g}"), float(f"{y:.4g}")))
    most = max(MAX_ROWS // max(len(by_class), 1), 1)
    return [points[k] for points in by_class.values() for k in evenly_spaced(len(points), most)]


def line_chart(wandb: Any, rows: Sequence[Sequence[Any]], title: str, x: str, y: str) -> Any:
    """Return a chart with a line for each class.

    Args:
        rows: class, x and y of each point
    """
    table = wandb.Table(columns=["class", x, y], data=[list(row) for row in rows])
    words = {"title": title, "x-axis-title": x, "y-axis-title": y}
    fields = {"x": x, "y": y, "class": "class"}
    return wandb.plot_table("wandb/area-under-curve/v0", table, fields, words)  # of wandb.plot.pr_curve


def confusion_chart(wandb: Any, text: str) -> Any:
    """Return W&B's confusion matrix from confusion_matrix.csv; only the largest counts if there are many classes."""
    head, *rows = csv.reader(text.splitlines())
    cells = [(row[0], name, int(count)) for row in rows for name, count in zip(head[1:], row[1:], strict=True)]
    cells = sorted(cells, key=lambda cell: -cell[2])[:MAX_ROWS] if len(cells) > MAX_ROWS else cells
    table = wandb.Table(columns=["Actual", "Predicted", "nPredictions"], data=[list(cell) for cell in cells])
    fields = {name: name for name in table.columns}
    words = {"title": "Confusion matrix"}
    return wandb.plot_table("wandb/confusion_matrix/v1", table, fields, words)  # of wandb.plot.confusion_matrix


def _body(text: str) -> list[list[str]]:
    """Return the rows of a CSV file without its header."""
    return list(csv.reader(text.splitlines()))[1:]


def _value(cell: str) -> Any:
    """Return a cell as a number, None if it is empty, or as text."""
    try:
        return int(cell) if cell.isdigit() else float(cell)
    except ValueError:
        return cell or None
