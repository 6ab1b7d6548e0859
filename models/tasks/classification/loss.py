"""The loss of a classifier: cross-entropy.

Made by `ClassificationTask.criterion`; called by the training loop and the evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from models.tasks.contract import Criterion, LossTerms
from models.tasks.shared.losses import at_least_float32, device_constant
from utils.batch import Batch


class ClassificationCriterion(Criterion):
    """Cross-entropy of logits (b, classes) against targets (b, classes): shares of the classes, which add up to 1.

    Args:
        classes: number of classes
        label_smoothing: value of --label-smoothing
        class_weights: weight of an image, by class number: an image of weight 2 counts as two equal images, and each
            share of a mixture has its class's weight; empty if all images count the same
    """

    def __init__(self, classes: int, label_smoothing: float = 0.0, class_weights: Sequence[float] = ()) -> None:
        self.classes, self.label_smoothing, self.class_weights = classes, label_smoothing, tuple(class_weights)

    def __call__(self, outputs: Tensor, batch: Batch) -> LossTerms:
        """Return the loss of logits (b, classes), in fp32 or fp64, as one term: a weighted sum over the images."""
        logits = at_least_float32(outputs)
        smoothed = batch.targets * (1 - self.label_smoothing) + self.label_smoothing / self.classes
        if self.class_weights:
            weighted = batch.targets * device_constant(self.class_weights, logits.device).to(batch.targets)
            images = weighted.sum(1, keepdim=True)
            smoothed = weighted * (1 - self.label_smoothing) + images * (self.label_smoothing / self.classes)
            total = -(smoothed * logits.log_softmax(1)).sum()
            least = min(1.0, *self.class_weights)
            return LossTerms(total.view(1, 1), images.sum().to(total).view(1, 1), total.new_ones(1, 1), least)
        total = -(smoothed * logits.log_softmax(1)).sum()
        return LossTerms(total.view(1, 1), total.new_full((1, 1), len(logits)), total.new_ones(1, 1))

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the mean over the images of a step."""
        return means.sum()

    def weight(self, batch: Batch) -> float:
        """Return the number of images: the validation loss is the mean over all images."""
        return len(batch.infos)
