"""Make the inputs of tests: images, label files, data sets, batches, small models, the environment of a launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from data.labels import label_name
from utils.batch import Batch, ImageInfo, Placement
from utils.config.parser import given_flags

CLASS_NAMES = {0: "disc", 1: "traffic light", 2: "bar"}

# Files


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Return an image of coarse noise, uint8 (height, width, 3): squares of four pixels survive JPEG and resizing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), np.uint8)
    return coarse.repeat(4, 0).repeat(4, 1)[:height, :width]


def plain(width: int, height: int, value: int = 90) -> np.ndarray:
    """Return a grey image, uint8 (height, width, 3)."""
    return np.full((height, width, 3), value, np.uint8)


def write_image(file: Path, pixels: np.ndarray | None = None, *rows: str, **options: Any) -> Path:
    """Write RGB pixels, by default 20 x 20 of noise, and a label file if there are rows. options: Pillow's, to save."""
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(20, 20) if pixels is None else pixels).save(file, **options)
    if rows:
        write_label(file, *rows)
    return file


def label_file(image: Path) -> Path:
    """Return the label file of an image."""
    return Path(label_name(str(image)))


def write_label(image: Path, *rows: str) -> Path:
    """Write the label file of an image."""
    file = label_file(image)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(rows))
    return file


def spoil(*files: Path) -> None:
    """Overwrite files with text of the same size and modification time."""
    for file in files:
        status = file.stat()
        file.write_bytes(b"x" * status.st_size)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def write_yaml(file: Path, content: Mapping[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(dict(content), sort_keys=False))
    return file


# Batches


NO_CHANGE = Placement()
NO_LABELS = np.zeros((0, 5), np.float32)


def image_info(
    image: int = 0,
    size: tuple[int, int] = (100, 200),
    placement: Placement = NO_CHANGE,
    rows: np.ndarray = NO_LABELS,
    path: str = "/data/a.jpg",
    outlines: tuple[np.ndarray, ...] = (),
) -> ImageInfo:
    """Describe an image of a detector's batch. size: width and height. rows: labels (n, 5)."""
    return ImageInfo(image, path, size, placement, rows, outlines)


def grey_batch(*infos: Any, targets: Tensor | None = None, side: int = 64, count: int = 0) -> Batch:
    """Make a batch of grey images of `side` pixels: one for each of `infos`, or `count`."""
    pixels = torch.full((len(infos) or count, 3, side, side), 51, dtype=torch.uint8)
    return Batch(pixels, torch.zeros(0, 6) if targets is None else targets, infos)


# Models


def options_of(kind: type[Any], argv: Sequence[str]) -> Any:
    """Return the flags of a command line over their defaults, as a script does."""
    return kind(**given_flags(kind, argv))


def tiny_detector() -> dict[str, Any]:
    """Return the YAML content of a detector of two levels, strides 4 and 8, quick to build."""
    return {
        "nc": 3,
        "anchors": [[4, 4, 8, 4], [16, 16, 32, 24]],
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]]],
        "head": [[[1, 2], 1, "Detect", ["nc", "anchors"]]],
    }


def tiny_anchor_free() -> dict[str, Any]:
    """Return the YAML content of an anchor-free detector of strides 4 and 8, with an auxiliary branch."""
    return {
        "nc": 3,
        "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "Conv", [8, 3, 2]], [-1, 1, "RepNCSPELAN", [8, 8]]],
        "head": [[-1, 1, "AConv", [16]], [[2, 3], 1, "DetectDFL", ["nc"]]],
        "auxiliary": [
            [2, 1, "CBLinear", [[8, 16]]],
            ["image", 1, "Conv", [8, 5, 4]],
            [[5, -1], 1, "CBFuse", [[0]]],
            [-1, 1, "ADown", [16]],
            [[5, -1], 1, "CBFuse", [[1]]],
            [[7, 9], 1, "DetectDFL", ["nc"]],
        ],
    }


# The environment

LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"),
)


def without_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove a launcher's variables; what the test itself puts there goes with the test."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def launched(monkeypatch: pytest.MonkeyPatch, world_size: int, local_world_size: int) -> None:
    """Set what a launcher tells the first process of a machine."""
    without_launcher(monkeypatch)
    values = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": local_world_size, "LOCAL_RANK": 0}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below a folder by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
