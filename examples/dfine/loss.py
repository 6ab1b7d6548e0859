"""The loss of D-FINE (arXiv 2410.13842) and RT-DETRv2 (arXiv 2407.17140), as sums and counts of the global batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, kl_div, pad

from models.tasks.contract import Criterion, LossTerms, device_constant
from utils.batch import Batch

from .denoising import NONE, corners
from .network import DFine, Outputs, modules_of

LOSS_NAMES = ("vfl_loss", "l1_loss", "giou_loss", "fgl_loss", "ddf_loss")
DISTILLED = 4  # row of DDF
TEMPERATURE = 5.0  # of DDF
TIE = 1e-10  # cost of a query's number: below the rounding of a cost, so that it decides between equal costs only
WORST_COST = 1e9  # in place of a cost that is not finite
TINY = 1e-30  # least area that is divided by


@dataclass(frozen=True)
class DFineTerms(LossTerms):
    """Terms of four parts: matched and denoising queries with a target, and the others of both.

    DDF weights its means over n edges with a target and m others by the square roots of n and m.
    """

    def share_of_mean(self, global_counts: Tensor) -> Tensor:
        """Return this process's share of each mean over the global batch; DDF's divisor is root n (root n + root m)."""
        divisors, roots = global_counts, global_counts[DISTILLED:].sqrt()
        divisors = torch.cat((divisors[:DISTILLED], roots * (roots + roots.roll(2, 1))))
        return (self.weights * self.sums / divisors.clamp(min=self.min_divisor)).sum(1)


class DFineCriterion(Criterion):
    """Varifocal, L1 and GIoU terms of all layers, and the terms of D-FINE's distributions of edges, FGL and DDF."""

    def __init__(self, model: DFine, gains: Sequence[float]) -> None:
        self.config, self.gains = model.config, tuple(gains)
        if self.config.model_type == "d_fine":
            decoder, function = model.model.decoder, modules_of("d_fine").weighting_function
            self.bins = tuple(function(decoder.max_num_bins, decoder.up, decoder.reg_scale).tolist())

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the targets, which the denoising queries are made of."""
        return (batch.targets,)

    def weight(self, batch: Batch) -> float:
        """Return the number of images."""
        return len(batch.infos)

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the sum of the terms."""
        return means.sum()

    def pairs(self, layers: int, refined: int) -> tuple[Iterable[int], slice]:
        """Return the layers to train, and which of them belong to the layers of distances, as in the paper.

        transformers takes the scores of a layer and the distances of the next.
        """
        return range(layers), slice(layers - refined, layers)

    def __call__(self, outputs: Outputs, batch: Batch) -> LossTerms:
        """Return the terms of the outputs for the targets (m, 6 or more)."""
        split, refined = outputs.rows.shape[1], 0 if outputs.distances is None else outputs.distances.shape[1]
        targets, config = batch.targets[:, :6].float(), self.config
        layers, fine = self.pairs(outputs.logits.shape[1], refined)
        # The encoder's choice is one more layer, without denoising queries.
        logits, boxes = (
            torch.stack([*(values[:, layer] for layer in layers), pad(encoder, (0, 0, split, 0))]).float()
            for values, encoder in ((outputs.logits, outputs.encoder_logits), (outputs.boxes, outputs.encoder_boxes))
        )
        boxes = boxes.clamp(0, 1)
        rows = pad(self.matched(logits[:, :, split:], boxes[:, :, split:], targets), (split, 0), value=NONE)
        used = pad(torch.ones_like(rows[:, :, split:], dtype=torch.bool), (split, 0))
        rows[:-1, :, :split], used[:-1, :, :split] = outputs.rows, outputs.used
        positive, of_target = rows >= 0, torch.cat((targets, targets.new_zeros(1, 6)))[rows]
        target = torch.where(positive[..., None], of_target[..., 2:], boxes.detach())
        ious, gious = overlap(corners(boxes), corners(target))
        overlaps = torch.where(positive, ious.detach(), 0)
        is_class = of_target[..., 1:2].long() == torch.arange(logits.shape[3], device=logits.device)
        is_class &= positive[..., None]
        scores = overlaps[..., None] * is_class
        weight = config.focal_loss_alpha * logits.detach().sigmoid() ** config.focal_loss_gamma * ~is_class + scores
        vfl = binary_cross_entropy_with_logits(logits, scores, weight * used[..., None], reduction="none").sum(-1)
        terms = [vfl, (boxes - target).abs().sum(-1), torch.where(positive, 1 - gious, 0)]
        sums = [by_part(values, positive, split) for values in terms]
        numbers = by_part(used[0].to(logits.dtype), positive[0], split)
        counts = [numbers[:2].repeat(2)] * len(sums)
        if refined:
            positive = positive[fine]
            fgl, ddf = self.edge_terms(outputs, target[fine], positive, overlaps[fine], used[fine])
            sums += [by_part(fgl, positive, split), by_part(ddf, positive[: len(ddf)], split)]
            counts += [counts[0], 4 * numbers]
        gains = device_constant(self.gains, logits.device)[:, None].expand(-1, len(numbers))
        return DFineTerms(torch.stack(sums), torch.stack(counts), gains)

    def edge_terms(
        self, outputs: Outputs, target: Tensor, positive: Tensor, overlaps: Tensor, used: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return FGL (k, b, n) and, without the last layer, DDF of all queries, in the first k layers of distances.

        `target` are the boxes (k, b, n, 4) that the `positive` queries have as targets, with these `overlaps`.
        """
        assert outputs.distances is not None
        assert outputs.references is not None
        distances = outputs.distances.float().transpose(0, 1).unflatten(3, (4, -1))
        boxes = outputs.references.float().detach().transpose(0, 1)[: len(target)]
        # How far the target's edges are from the references', in the unit of the bins: transformers' `bbox2distance`.
        bins, outward = (device_constant(values, boxes.device) for values in (self.bins, (-1.0, -1.0, 1.0, 1.0)))
        scale = self.config.reg_scale
        sides = boxes[..., 2:].repeat(1, 1, 1, 2) / scale + 1e-16
        offset = (corners(target) - boxes[..., :2].repeat(1, 1, 1, 2)) * outward / sides - 0.5 * scale
        left = (torch.bucketize(offset, bins, right=True) - 1).clamp(0, len(bins) - 2)
        share = ((offset - bins[left]) / (bins[left + 1] - bins[left])).clamp(0, 1)
        number = torch.arange(len(bins), device=bins.device)
        label = (1 - (number - left[..., None] - share[..., None]).abs()).clamp(min=0)  # the two bins beside it
        fgl = -(label * distances[: len(target)].log_softmax(-1)).sum((-1, -2)) * overlaps  # 0 without a target
        soft = (distances / TEMPERATURE).log_softmax(-1)
        students, teacher = soft[:-1][: len(target)], soft[-1].detach()
        apart = kl_div(students, teacher.expand_as(students), reduction="none", log_target=True).sum((-1, -2))
        certain = outputs.logits[:, -1].detach().float().sigmoid().amax(-1)
        weight = torch.where(positive, overlaps, certain) * used * TEMPERATURE**2
        return fgl, weight[: len(students)] * apart

    @torch.no_grad()
    def matched(self, logits: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
        """Return the row of each query, int64 (k, b, q), by the assignment of least cost in each layer and image.

        The costs of all layers are copied to the host at once. Of queries with equal costs the first is taken.
        """
        config, count, (layers, images, queries) = self.config, len(targets), logits.shape[:3]
        image, label = targets[:, :2].long().unbind(1)
        score = logits.transpose(2, 3)[:, image, label].sigmoid()  # (k, m, q)
        alpha, gamma = config.matcher_alpha, config.matcher_gamma
        gain = alpha * (1 - score) ** gamma * (score + 1e-8).log()
        loss = (1 - alpha) * score**gamma * (1 - score + 1e-8).log()
        costs = config.matcher_class_cost * (loss - gain)
        predicted, true = boxes[:, image], targets[:, None, 2:]
        costs = costs + config.matcher_bbox_cost * (predicted - true).abs().sum(-1)
        costs = costs - config.matcher_giou_cost * overlap(corners(predicted), corners(true))[1]
        copied = torch.cat((costs, image[:, None].expand(1, count, queries))).cpu().double().numpy()
        costs_on_host = np.nan_to_num(copied[:-1], nan=WORST_COST, posinf=WORST_COST, neginf=WORST_COST)
        costs_on_host += TIE * np.arange(queries)
        rows = np.full((layers, images, queries), NONE)
        bounds = np.searchsorted(copied[-1, :, 0], np.arange(images + 1))
        for of_layer, costs_of_layer in zip(rows, costs_on_host, strict=True):
            for of_image, (first, end) in zip(of_layer, pairwise(bounds), strict=True):
                target, query = linear_sum_assignment(costs_of_layer[first:end])
                of_image[query] = first + target
        return torch.from_numpy(rows).to(logits.device)


def by_part(values: Tensor, with_target: Tensor, split: int) -> Tensor:
    """Return the sums of values (k, b, n): of matched and denoising queries with a target, and of the others (4,)."""
    halves = torch.where(with_target, values, 0), torch.where(with_target, 0, values)
    return torch.stack([part.sum() for half in halves for part in (half[..., split:], half[..., :split])])


def overlap(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IoU and the generalised IoU of boxes (..., 4), xyxy."""
    inner = torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])
    hull = torch.maximum(boxes[..., 2:], others[..., 2:]) - torch.minimum(boxes[..., :2], others[..., :2])
    sides = boxes[..., 2:] - boxes[..., :2], others[..., 2:] - others[..., :2], inner.clamp(0), hull
    first, second, inner, hull = (side[..., 0] * side[..., 1] for side in sides)
    union, hull = (first + second - inner).clamp(min=TINY), hull.clamp(min=TINY)
    ious = inner / union
    return ious, ious - (hull - union) / hull
