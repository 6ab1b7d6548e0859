"""The loss of a classifier: cross-entropy.

Made by `ClassificationTask.criterion`; called by the training loop and the evaluation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from models.tasks.contract import Criterion, LossTerms
from utils.batch import Batch


class ClassificationCriterion(Criterion):
    """Cross-entropy of logits (b, classes) against targets (b, classes), shares that add up to 1."""

    def __init__(self, classes: int, label_smoothing: float = 0.0) -> None:
        self.classes, self.label_smoothing = classes, label_smoothing

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerms:
        """Return the loss of logits (b, classes), in fp32 or fp64: one term, a sum over the images."""
        logits = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        smoothed = batch.targets * (1 - self.label_smoothing) + self.label_smoothing / self.classes
        total = -(smoothed * logits.log_softmax(1)).sum()
        return LossTerms(total.view(1, 1), total.new_full((1, 1), len(logits)), total.new_ones(1, 1))

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the mean over the images of a step."""
        return means.sum()

    def weight(self, batch: Batch) -> float:
        """Return the number of images: the loss of a validation is the mean over all images."""
        return len(batch.infos)
