"""AutoAnchor: check whether a model's anchors fit the boxes of the training images, and search for better ones.

Called by `Detect.adapt`. Sides (n, 2) are widths and heights of boxes, anchors (k, 2) too, in pixels at the model's
image size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from utils.console import log

if TYPE_CHECKING:
    from models.heads.anchors import Detect

MUTATION_ROUNDS = 1000
MUTATION_PROBABILITY = 0.9  # probability that a side mutates
MUTATION_SPREAD = 0.1  # largest standard deviation of a mutation's factor
MUTATION_FACTORS = (0.3, 3.0)  # smallest and largest factor of a mutation
K_MEANS_ROUNDS = 30
MIN_BOX_SIDE_PIXELS = 2  # boxes with both sides smaller are ignored
MAX_SAMPLED_BOXES = 20_000  # boxes that the search uses


def adapt_anchors(head: Detect, yaml: dict[str, Any], sides: np.ndarray, threshold: float, sufficient: float) -> None:
    """Replace the anchors of a head and of its model's YAML if at most a share `sufficient` of the boxes fit one; log
    what was done. The sides of a box that fits an anchor differ by less than the factor `threshold`."""
    if not len(sides):
        log("AutoAnchor: the training images have no boxes; the anchors are unchanged")
        return
    strides = head.stride[:, None, None].to(head.anchors)
    current = (head.anchors * strides).reshape(-1, 2).numpy()
    (recall, per_box), outcome = fit(sides, current, threshold), ""
    if recall <= sufficient:
        better = find_anchors(sides, len(current), threshold)
        (new_recall, new_per_box), outcome = fit(sides, better, threshold), "; no better anchors found"
        if new_recall > recall:
            anchors = torch.from_numpy(better).to(head.anchors).view_as(head.anchors)
            if strides[0] > strides[-1]:  # small anchors belong to small strides
                anchors = anchors.flip(0)
            head.anchors.copy_(anchors / strides)
            yaml["anchors"] = anchors.reshape(head.nl, -1).tolist()
            outcome = f"; new anchors: {new_recall:.1%}, {new_per_box:.2f} per box"
    log(f"AutoAnchor: {recall:.1%} of the boxes match an anchor, {per_box:.2f} anchors per box{outcome}")


def fit(sides: np.ndarray, anchors: np.ndarray, threshold: float) -> tuple[float, float]:
    """Return the best possible recall, the share of boxes that some anchor fits, and the mean number that fit a box."""
    fits = _similarity(sides, anchors) > 1 / threshold
    return float(fits.any(0).mean()), float(fits.sum(0).mean())


def find_anchors(sides: np.ndarray, count: int, threshold: float) -> np.ndarray:
    """Return `count` anchors, smallest first: k-means, then mutation. The same boxes give the same anchors."""
    rng = np.random.default_rng(0)
    large = (sides >= MIN_BOX_SIDE_PIXELS).any(1)
    sides = sides[large] if large.any() else sides
    if len(sides) > MAX_SAMPLED_BOXES:
        sides = sides[rng.choice(len(sides), MAX_SAMPLED_BOXES, replace=False)]
    anchors = _k_means(sides, count, rng)
    best = _fitness(sides, anchors, threshold)
    for _ in range(MUTATION_ROUNDS):
        mutates = rng.random(anchors.shape) < MUTATION_PROBABILITY
        factors = 1 + mutates * rng.random() * rng.standard_normal(anchors.shape) * MUTATION_SPREAD
        mutant = (anchors * factors.clip(*MUTATION_FACTORS)).clip(min=MIN_BOX_SIDE_PIXELS)
        fitness = _fitness(sides, mutant, threshold)
        if fitness > best:
            anchors, best = mutant, fitness
    return np.asarray(anchors[np.argsort(anchors.prod(1))])


def _similarity(sides: np.ndarray, anchors: np.ndarray) -> np.ndarray:
    """Return the smaller of the width and height ratios, each inverted if above 1: (k, n)."""
    # (2, k, n): numpy reduces the first axis 20 times as fast as a short last one.
    ratio = np.ascontiguousarray(sides.T)[:, None] / anchors.T[:, :, None]
    return np.asarray(np.minimum(ratio, 1 / ratio).min(0))


def _fitness(sides: np.ndarray, anchors: np.ndarray, threshold: float) -> float:
    best = _similarity(sides, anchors).max(0)
    return float((best * (best > 1 / threshold)).mean())


def _k_means(sides: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return cluster centres (count, 2), in pixels, of the boxes' sides; each axis is scaled by its deviation first."""
    spread = sides.std(0) + 1e-9
    points = sides / spread
    centres = points[rng.choice(len(points), count, replace=len(points) < count)]
    for _ in range(K_MEANS_ROUNDS):
        nearest = ((points[:, None] - centres[None]) ** 2).sum(2).argmin(1)
        clusters = [points[nearest == k] for k in range(count)]
        centres = np.stack([own.mean(0) if len(own) else old for own, old in zip(clusters, centres, strict=True)])
    return np.asarray((centres * spread).clip(min=MIN_BOX_SIDE_PIXELS))
