"""Pictures for the run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping

import cv2
import numpy as np

MOST_IMAGES = 16
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
    columns = math.ceil(math.sqrt(len(tiles)))
    tiles += [np.full_like(tiles[0], 255)] * (-len(tiles) % columns)
    rows = [np.concatenate(tiles[start : start + columns], 1) for start in range(0, len(tiles), columns)]
    return np.concatenate(rows)


def _draw_box(image: np.ndarray, low: np.ndarray, high: np.ndarray, label: int, names: Mapping[int, str]) -> None:
    colour = COLOURS[label % len(COLOURS)]
    cv2.rectangle(image, low.tolist(), high.tolist(), colour, 1, cv2.LINE_AA)
    place = (int(low[0]), max(int(low[1]) - 2, 8))
    cv2.putText(image, names[label], place, cv2.FONT_HERSHEY_SIMPLEX, 0.35, colour, 1, cv2.LINE_AA)
