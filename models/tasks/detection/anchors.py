"""AutoAnchor: do the model's anchors suit the data, and if not, which would?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ENOUGH = 0.98  # best possible recall from which the anchors stay as they are
GENERATIONS, MUTATED, SPREAD, CLIP = 1000, 0.9, 0.1, (0.3, 3.0)  # of the genetic refinement
ROUNDS = 30  # of k-means
LEAST_SIDE = 2  # pixels; smaller boxes have no say
SAMPLE = 20_000  # boxes that the search looks at


class Fit(NamedTuple):
    """Best possible recall (share of boxes that some anchor fits) and mean anchors fitting a box."""

    recall: float
    anchors_per_box: float


def fit(sides: np.ndarray, anchors: np.ndarray, threshold: float) -> Fit:
    """How `anchors` (k, 2) suit boxes of `sides` (n, 2), both in pixels: within a factor `threshold` both ways."""
    fits = _likeness(sides, anchors) > 1 / threshold
    return Fit(float(fits.any(1).mean()), float(fits.sum(1).mean()))


def _likeness(sides: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """(n, k): the worse of the two sides' ratios, turned to be at most 1."""
    ratio = sides[:, None] / anchors[None]
    return np.minimum(ratio, 1 / ratio).min(2)


def _fitness(sides: np.ndarray, anchors: np.ndarray, threshold: float) -> float:
    best = _likeness(sides, anchors).max(1)
    return float((best * (best > 1 / threshold)).mean())


def find_anchors(sides: np.ndarray, count: int, threshold: float, seed: int = 0) -> np.ndarray:
    """`count` anchors (count, 2) in pixels for boxes of `sides` (n, 2), smallest first: k-means, then mutation.

    The same boxes and seed give the same anchors.
    """
    rng = np.random.default_rng(seed)
    large = (sides >= LEAST_SIDE).any(1)
    sides = sides[large] if large.any() else sides
    if len(sides) > SAMPLE:
        sides = sides[rng.choice(len(sides), SAMPLE, replace=False)]
    anchors = _k_means(sides, count, rng)
    best = _fitness(sides, anchors, threshold)
    for _ in range(GENERATIONS):
        factors = 1 + (rng.random(anchors.shape) < MUTATED) * rng.random() * rng.standard_normal(anchors.shape) * SPREAD
        mutant = (anchors * factors.clip(*CLIP)).clip(min=LEAST_SIDE)
        score = _fitness(sides, mutant, threshold)
        if score > best:
            anchors, best = mutant, score
    return anchors[np.argsort(anchors.prod(1))]


def _k_means(sides: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Cluster centres of the boxes' sides, each axis in units of its own spread."""
    spread = sides.std(0) + 1e-9
    points = sides / spread
    centres = points[rng.choice(len(points), count, replace=len(points) < count)]
    for _ in range(ROUNDS):
        nearest = ((points[:, None] - centres[None]) ** 2).sum(2).argmin(1)
        members = [points[nearest == k] for k in range(count)]
        centres = np.stack([own.mean(0) if len(own) else old for own, old in zip(members, centres, strict=True)])
    return (centres * spread).clip(min=LEAST_SIDE)
