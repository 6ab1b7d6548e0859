"""The loss of heat maps: binary cross-entropy against a Gaussian around each keypoint."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from models.tasks.contract import Criterion, LossTerms
from utils.batch import Batch

SIGMA_CELLS = 1.0  # of the Gaussian
KEYPOINT_WEIGHT = 20.0  # of a cell at a keypoint, against 1 elsewhere


class HeatmapCriterion(Criterion):
    """One term: the mean over all cells of all maps."""

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerms:
        """Return the loss of logits (b, classes, h, w)."""
        logits = outputs.float()
        target = heat(batch.targets, logits.shape)
        weight = 1 + (KEYPOINT_WEIGHT - 1) * target
        total = binary_cross_entropy_with_logits(logits, target, weight, reduction="sum")
        return LossTerms(total.view(1, 1), total.new_full((1, 1), logits.numel()), total.new_ones(1, 1))

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the mean over the cells of a step."""
        return means.sum()

    def weight(self, batch: Batch) -> float:
        """Return the number of images."""
        return len(batch.infos)


def heat(targets: Tensor, shape: torch.Size) -> Tensor:
    """Return the target maps, `shape` (b, classes, h, w), of keypoints (m, 4): image, class, normalised x and y."""
    (image, label), (x, y) = targets[:, :2].long().unbind(1), targets[:, 2:].unbind(1)
    rows = torch.arange(shape[2], device=targets.device) + 0.5
    columns = torch.arange(shape[3], device=targets.device) + 0.5
    across, down = (columns - x[:, None] * shape[3]) ** 2, (rows - y[:, None] * shape[2]) ** 2
    peaks = (-(across[:, None] + down[:, :, None]) / (2 * SIGMA_CELLS**2)).exp()  # (m, h, w)
    # A map of several keypoints has the highest of their peaks in each cell.
    number = (image * shape[1] + label)[:, None, None].expand_as(peaks)
    return targets.new_zeros(shape).flatten(0, 1).scatter_reduce(0, number, peaks, "amax").view(shape)
