"""Tests of the built-in segmentation data set: outlines around the visible pixels of shapes, its own generators."""

from __future__ import annotations

import hashlib

import cv2
import numpy as np
import pytest

from data.builtin import shapes, shapes_seg

SIDE = shapes.SIDE_PIXELS


def filled(outline: list[tuple[float, float]], scale: int = 8) -> np.ndarray:
    """Return the share of each pixel that an outline covers, float32 (160, 160)."""
    mask = np.zeros((SIDE * scale, SIDE * scale), np.uint8)
    cv2.fillPoly(mask, [(np.array(outline) * scale).round().astype(np.int32)], 255)
    return cv2.resize(mask, (SIDE, SIDE), interpolation=cv2.INTER_AREA).astype(np.float32) / 255


def test_outlines_go_around_the_visible_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes are painted with their numbers instead of colours; objects cover each other in most images."""
    painted: list[np.ndarray] = []

    def paint(rng: np.random.Generator, image: np.ndarray, stencil: shapes.Stencil, left: int, top: int) -> None:
        painted.append(np.zeros((SIDE + 400, SIDE + 400), np.float32))
        height, width = stencil.fill.shape
        painted[-1][top + 200 : top + 200 + height, left + 200 : left + 200 + width] = stencil.fill

    monkeypatch.setattr(shapes, "paint", paint)
    covered = holes = clipped = 0
    for index in range(16):
        painted.clear()
        _, objects = shapes_seg.draw_image(0, 0, index)
        whole = [each[200:-200, 200:-200] for each in painted]
        assert len(objects) == len(whole)
        for number, (label, outline) in enumerate(objects):
            points, above = np.array(outline), np.zeros((SIDE, SIDE), np.float32)
            for other in whole[number + 1 :]:
                above = np.maximum(above, other)
            visible = whole[number] * (above == 0)
            mask = filled(outline)
            assert points.min() >= 0
            assert points.max() <= SIDE
            hidden = (above == 1) | (whole[number] == 0)
            assert (mask[visible == 1] > 0.5).mean() > 0.98
            assert (mask[hidden] < 0.5).mean() > 0.995
            covered += bool((above * whole[number]).sum() > 10)
            clipped += bool((painted[number].sum() - whole[number].sum()) > 5)
            x, y = points.mean(0).astype(int)
            holes += shapes.NAMES[label] == "ring" and bool(mask[y, x] < 0.1)
    assert covered > 10
    assert holes > 2
    assert clipped > 0


def test_the_shapes_of_the_detector_are_what_they_were() -> None:
    """`arrange` serves both sets: the arrangement of the first is that of its version, in hundredths of a pixel."""
    boxes = np.concatenate([shapes.draw_image(0, 0, index)[1] for index in range(20)])
    digest = hashlib.sha256((boxes * SIDE * 100).round().astype(np.int32).tobytes()).hexdigest()
    assert (shapes.DRAWING_VERSION, digest[:16]) == (1, "6c826f42cb32d6e2")
