"""Measure `tiles` of a data YAML (docs/large-images.md).

python -m benchmarks.tiles draw FOLDER     # 40 images of 4,000 px with 12-px objects, and two data YAMLs
python -m benchmarks.tiles decode          # epochs over the windows of a file of 12,000 x 9,000 px
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

from data import cache
from data.builtin import SUBPIXELS, Drawing, DrawnSet, background, draw_stencil, paint, photograph
from data.cache import Images
from data.images import read_image
from data.labels import Labels
from data.tiles import Tiles, cut

SIDE, OBJECT_PIXELS, OBJECTS = 4000, 12, 150  # pixels of an image and of an object; objects of an image
NAMES, SHAPES = ("disc", "cross", "bar"), (0, 4, 5)  # shapes by number in data/builtin.py
WIDTH, HEIGHT, TILES, IMGSZ = 12_000, 9_000, Tiles(1024), 1024


def draw(rng: np.random.Generator, index: int) -> Drawing:
    """Draw an image and the rows of its label file."""
    image, rows = background(rng, SIDE), []
    for _ in range(OBJECTS):
        label, (left, top) = int(rng.integers(len(NAMES))), rng.integers(0, SIDE - 2 * OBJECT_PIXELS, 2).tolist()
        stencil = draw_stencil(rng, SHAPES[label], OBJECT_PIXELS)
        paint(rng, image, stencil, left, top)
        x, y, width, height = (side / SUBPIXELS for side in cv2.boundingRect(stencil.fine))
        box = np.array((left + x + width / 2, top + y + height / 2, width, height)) / SIDE
        rows.append(f"{label} {' '.join(f'{value:.7f}' for value in box)}\n")
    return photograph(rng, image), rows


def draw_set(folder: Path) -> None:
    """Draw the set, and write whole.yaml and tiles.yaml beside it."""
    DrawnSet("tiny", NAMES, (9,), draw, (32, 8)).draw_dataset(folder)
    content = {"path": str(folder.resolve()), "train": "images/train", "val": "images/val", "names": [*NAMES]}
    for name, tiles in (("whole", {}), ("tiles", {"tiles": {"size": 320}})):
        folder.with_name(f"{name}.yaml").write_text(yaml.safe_dump({**content, **tiles}))


def decode() -> None:
    """Print the seconds and the number of decodings of epochs over all windows in a random order."""
    decoded: list[Path] = []
    cache.read_pixels = lambda path, _: (decoded.append(path), read_image(path))[1]  # type: ignore[attr-defined]
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT // 8, WIDTH // 8, 3), np.uint8)
    image = cv2.resize(pixels, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
    sizes, nothing = np.array([(WIDTH, HEIGHT)], np.int32), np.zeros((0, 5), np.float32)
    windows = cut(Labels(nothing, np.zeros(2, np.int64), sizes, ()), TILES, with_whole=False)
    order = np.random.default_rng(0).permutation(len(windows.images)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for suffix in (".jpg", ".tif"):
            cv2.imwrite(str(file := Path(folder, f"photo{suffix}")), image)
            form: Any = {"sizes": windows.labels.sizes, "imgsz": IMGSZ, "reduced": True, "windows": windows}
            images = Images([file] * len(order), **form)
            for title, indices in (("first epoch", order), ("second epoch", order), ("8 windows undone", order[:8])):
                images.folder = "" if "undone" in title else images.folder  # a decoding for each window
                start = time.perf_counter()
                for index in indices:
                    images.read(index)
                    images.release()
                seconds = time.perf_counter() - start
                print(f"{suffix}: {title}: {len(indices)} windows, {len(decoded)} decodings, {seconds:.1f} s")
                decoded.clear()


if __name__ == "__main__":
    draw_set(Path(sys.argv[2])) if sys.argv[1] == "draw" else decode()
