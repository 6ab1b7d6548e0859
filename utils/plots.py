"""Pictures for the run folder."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import cv2
import numpy as np

MOST_IMAGES = 16
MOST_NAMES = 120  # classes that a confusion matrix names
MOST_COUNTS = 1000  # cells of it that have their count written in, the largest ones: each takes 2 ms
LINE, LINES, CAPTION_WIDTH = 16, 2, 150  # of captions: height and number of lines, least width, in pixels
COLOURS = (
    (54, 67, 244),
    (243, 150, 33),
    (80, 175, 76),
    (0, 152, 255),
    (176, 39, 156),
    (212, 188, 0),
    (99, 30, 233),
)  # BGR


def draw_targets(images: np.ndarray, targets: np.ndarray, names: Mapping[int, str]) -> np.ndarray:
    """A grid of up to 16 `images`, uint8 (b, 3, h, w) RGB, with `targets` (m, 6): image, class, normalised xywh."""
    tiles = []
    for number, image in enumerate(images[:MOST_IMAGES]):
        tile = np.ascontiguousarray(image.transpose(1, 2, 0)[..., ::-1])
        for _, label, x, y, width, height in targets[targets[:, 0] == number]:
            sides = np.array(tile.shape[1::-1])
            low, high = ((np.array([x, y]) + sign * np.array([width, height]) / 2) * sides for sign in (-1, 1))
            _draw_box(tile, low.astype(int), high.astype(int), int(label), names)
        tiles.append(tile)
    return _grid(tiles)


def draw_captioned(images: Sequence[np.ndarray], captions: Sequence[str]) -> np.ndarray:
    """A grid of up to 16 `images` of one shape, uint8 (h, w, 3) BGR, each above its caption of a few lines."""
    tiles = []
    for image, caption in zip(images[:MOST_IMAGES], captions, strict=False):
        width = max(image.shape[1], CAPTION_WIDTH)
        lines = caption.split("\n")
        tile = np.full((image.shape[0] + LINE * LINES, width, 3), 255, np.uint8)
        left = (width - image.shape[1]) // 2
        tile[: image.shape[0], left : left + image.shape[1]] = image
        for number, line in enumerate(lines[:LINES], 1):
            place = (3, image.shape[0] + LINE * number - 5)
            cv2.putText(tile, line, place, cv2.FONT_HERSHEY_SIMPLEX, 0.4, (0, 0, 0), 1, cv2.LINE_AA)
        tiles.append(tile)
    return _grid(tiles)


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The confusion matrix `counts` (c, c) by true and predicted class, uint8 (h, w, 3) BGR.

    Colours are shares of the true class; the counts are written in while there is room.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: it is slow to import, and not always drawn
    from matplotlib.figure import Figure

    names = [name.replace("$", r"\$") for name in names]  # no formulas
    size = len(names)
    side = min(max(5.0, 1.5 + 0.32 * size), 40.0)  # inches
    figure = Figure((side * 1.15, side), dpi=100, layout="compressed")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    shown = axes.imshow(shares, "Blues", vmin=0, vmax=1)
    figure.colorbar(shown, label="share of the true class", fraction=0.046)
    axes.set(xlabel="predicted", ylabel="true")
    if size <= MOST_NAMES:
        axes.set_xticks(range(size), names, rotation=90, fontsize=8)
        axes.set_yticks(range(size), names, fontsize=8)
        cells = np.argwhere(counts)
        for true, predicted in cells[np.argsort(-counts[tuple(cells.T)], kind="stable")[:MOST_COUNTS]]:
            colour = "white" if shares[true, predicted] > 0.5 else "black"
            text = str(counts[true, predicted])
            axes.text(predicted, true, text, ha="center", va="center", color=colour, fontsize=8 if len(text) < 4 else 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a character that the font lacks is drawn as a box
        canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., 2::-1])


def _grid(tiles: list[np.ndarray]) -> np.ndarray:
    """Tiles of one shape, in rows of about as many as there are rows."""
    columns = math.ceil(math.sqrt(len(tiles)))
    tiles = tiles + [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    rows = [np.concatenate(tiles[start : start + columns], 1) for start in range(0, len(tiles), columns)]
    return np.concatenate(rows)


def _draw_box(image: np.ndarray, low: np.ndarray, high: np.ndarray, label: int, names: Mapping[int, str]) -> None:
    colour = COLOURS[label % len(COLOURS)]
    cv2.rectangle(image, low.tolist(), high.tolist(), colour, 1, cv2.LINE_AA)
    place = (int(low[0]), max(int(low[1]) - 2, 8))
    cv2.putText(image, names[label], place, cv2.FONT_HERSHEY_SIMPLEX, 0.35, colour, 1, cv2.LINE_AA)
