"""The loss of D-FINE (arXiv 2410.13842) and RT-DETRv2 (arXiv 2407.17140), as sums and counts of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, pad

from models.tasks.contract import Criterion, LossTerms, device_constant
from utils.batch import Batch, GlobalCounts

from .denoising import NONE, corners
from .network import DFine, Outputs

LOSS_NAMES = ("vfl_loss", "l1_loss", "giou_loss", "fgl_loss", "ddf_loss")
DISTILLED = 4  # row of DDF, whose third and fourth part are the edges of matched and denoising queries without a target
TEMPERATURE = 5.0  # of DDF
TIE = 1e-10  # cost of a query's number: below the rounding of a cost, so that it decides between equal costs only
WORST_COST = 1e9  # in place of a cost that is not finite
TINY = 1e-30  # least area that is divided by


@dataclass(frozen=True)
class DFineTerms(LossTerms):
    """Terms whose fifth, DDF, averages n edges with a target and m others, weighted by the square roots of n and m."""

    def share_of(self, counts: GlobalCounts) -> Tensor:
        """Return this process's share of each mean over the global batch; DDF's divisor is root n (root n + root m)."""
        divisors = counts.values.clamp(min=self.least)
        if len(divisors) > DISTILLED:
            roots = counts.values[DISTILLED:].sqrt()
            distilled = divisors[DISTILLED:].sqrt() * (roots + roots.roll(2, 1))
            divisors = torch.cat((divisors[:DISTILLED], distilled.clamp(min=self.least)))
        return (self.weights * self.sums / divisors).sum(1)


class DFineCriterion(Criterion):
    """Varifocal, L1 and GIoU terms of all layers, and the terms of D-FINE's distributions of edges, FGL and DDF."""

    def __init__(self, model: DFine, gains: Sequence[float]) -> None:
        self.config, self.fine = model.config, model.config.model_type == "d_fine"
        self.gains = tuple(gains) if self.fine else tuple(gains[:3])

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        """Return the targets, which the denoising queries are made of."""
        return (batch.targets,)

    def weight(self, batch: Batch) -> float:
        """Return the number of images."""
        return len(batch.infos)

    def objective(self, means: Tensor, images: int) -> Tensor:
        """Return the sum of the terms."""
        return means.sum()

    def pairs(self, layers: int, refined: int, denoising: bool) -> list[tuple[int, int | None]]:
        """Return the layers to train, each with its layer of distances, as in the paper.

        transformers takes the scores of a layer and the distances of the next.
        """
        first = layers - refined  # layers before have no distances
        return [(layer, layer - first if layer >= first else None) for layer in range(layers)]

    def __call__(self, outputs: Outputs, batch: Batch) -> LossTerms:
        """Return the terms of the outputs for the targets (m, 6 or more)."""
        split, targets = outputs.rows.shape[1], batch.targets[:, :6].float()
        table = torch.cat((targets, targets.new_zeros(1, 6)))
        refined = 0 if outputs.distances is None else outputs.distances.shape[1]
        every: list[tuple[Tensor, Tensor]] = []  # of matched and denoising queries: sums and counts
        for denoising in (False, True)[: 1 + (split > 0)]:
            part = slice(None, split) if denoising else slice(split, None)
            pairs = self.pairs(outputs.logits.shape[1], refined, denoising)
            logits = [outputs.logits[:, layer, part] for layer, _ in pairs]
            boxes = [outputs.boxes[:, layer, part] for layer, _ in pairs]
            if not denoising:
                logits, boxes = [*logits, outputs.encoder_logits], [*boxes, outputs.encoder_boxes]
            scores, coordinates = torch.stack(logits).float(), torch.stack(boxes).float().clamp(0, 1)
            if denoising:
                rows, used = outputs.rows.expand(len(logits), -1, -1), outputs.used
            else:
                rows, used = self.matched(scores, coordinates, targets), torch.ones_like(scores[0, ..., 0])
            terms, overlaps = self._box_terms(scores, coordinates, rows, used, table)
            positive = (rows[0] >= 0).sum().to(terms.dtype).view(1)
            numbers = positive.expand(3)
            if refined:
                fine = [(number, layer) for number, (_, layer) in enumerate(pairs) if layer is not None]
                matches, ious = (torch.stack([each[number] for number, _ in fine]) for each in (rows, overlaps))
                edges = self._edge_terms(outputs, part, [layer for _, layer in fine], matches, ious, used, table)
                terms = torch.cat((terms, edges))
                numbers = torch.cat((numbers, positive, 4 * positive, 4 * (used.sum() - positive)))
            every.append((terms, numbers))
        columns = (pad(torch.stack(each, 1), (0, 2 - len(every))) for each in zip(*every, strict=True))
        sums, counts = (
            torch.cat((each[:5], pad(each[5:], (0, 0, 4, 0))[:5]), 1) if refined else each for each in columns
        )
        return DFineTerms(sums, counts, device_constant(self.gains, sums.device)[:, None].expand_as(sums))

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
        of_image, target = boxes[:, image], targets[:, None, 2:]
        costs = costs + config.matcher_bbox_cost * (of_image - target).abs().sum(-1)
        costs = costs - config.matcher_giou_cost * overlap(corners(of_image), corners(target))[1]
        copied = torch.cat((costs, image[:, None].expand(1, count, queries))).cpu().double().numpy()
        costs_on_host = np.nan_to_num(copied[:-1], nan=WORST_COST, posinf=WORST_COST, neginf=WORST_COST)
        costs_on_host += TIE * np.arange(queries)
        chosen = np.full((layers, count), queries)  # of targets beyond the number of queries: a column that is cut off
        bounds = np.searchsorted(copied[-1, :, 0], np.arange(images + 1))
        for layer, of_layer in enumerate(costs_on_host):
            for first, end in pairwise(bounds):
                target_rows, query = linear_sum_assignment(of_layer[first:end])
                chosen[layer, first + target_rows] = query
        rows = torch.full((layers, images, queries + 1), NONE, device=logits.device)
        layer_numbers = torch.arange(layers, device=logits.device)[:, None]
        query = torch.from_numpy(chosen).to(logits.device)
        rows[layer_numbers, image, query] = torch.arange(count, device=logits.device).expand_as(query)
        return rows[..., :-1]

    def _box_terms(
        self, logits: Tensor, boxes: Tensor, rows: Tensor, used: Tensor, table: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of the first three terms, (3,), and the overlaps with the targets, (k, b, q)."""
        positive, of_target = rows >= 0, table[rows]
        target = torch.where(positive[..., None], of_target[..., 2:], boxes.detach())
        ious, gious = overlap(corners(boxes), corners(target))
        overlaps = torch.where(positive, ious.detach(), 0)
        is_class = of_target[..., 1:2].long() == torch.arange(logits.shape[3], device=logits.device)
        is_class &= positive[..., None]
        scores, config = overlaps[..., None] * is_class, self.config
        weight = config.focal_loss_alpha * logits.detach().sigmoid() ** config.focal_loss_gamma * ~is_class + scores
        vfl = binary_cross_entropy_with_logits(logits, scores, weight * used[..., None], reduction="sum")
        l1, giou = (boxes - target).abs().sum(), torch.where(positive, 1 - gious, 0).sum()
        return torch.stack((vfl, l1, giou)), overlaps

    def _edge_terms(
        self,
        outputs: Outputs,
        part: slice,
        layers: list[int],
        rows: Tensor,
        overlaps: Tensor,
        used: Tensor,
        table: Tensor,
    ) -> Tensor:
        """Return the sums (3,) of FGL, and of DDF for queries with a target and for others, of layers of distances."""
        assert outputs.distances is not None
        assert outputs.references is not None
        scale, distances = self.config.reg_scale, outputs.distances[:, :, part].float().unflatten(3, (4, -1))
        students = torch.stack([distances[:, layer] for layer in layers])
        boxes = torch.stack([outputs.references[:, layer, part] for layer in layers]).float().detach()
        positive, edges = rows >= 0, device_constant(bin_edges(self.config), boxes.device)
        # How far the target's edges are from the references', in the unit of the bins; see `distance2bbox` there.
        target = corners(torch.where(positive[..., None], table[rows][..., 2:], boxes))
        outward = device_constant((-1.0, -1.0, 1.0, 1.0), boxes.device)
        sides = boxes[..., 2:].repeat(1, 1, 1, 2) / scale + 1e-16
        offset = (target - boxes[..., :2].repeat(1, 1, 1, 2)) * outward / sides - 0.5 * scale
        left = (torch.bucketize(offset, edges, right=True) - 1).clamp(0, len(edges) - 2)
        share = ((offset - edges[left]) / (edges[left + 1] - edges[left])).clamp(0, 1)[..., None]
        bins = torch.arange(len(edges), device=edges.device) - left[..., None]
        label = torch.where(bins == 0, 1 - share, torch.where(bins == 1, share, 0))
        fgl = -(label * students.log_softmax(-1)).sum((-1, -2)) * overlaps  # 0 without a target
        teacher = (distances[:, -1].detach() / TEMPERATURE).log_softmax(-1)
        apart = (teacher.exp() * (teacher - (students / TEMPERATURE).log_softmax(-1))).sum((-1, -2))
        certain = outputs.logits[:, -1, part].detach().float().sigmoid().amax(-1)
        taught = device_constant(tuple(float(layer < distances.shape[1] - 1) for layer in layers), rows.device)
        ddf = torch.where(positive, overlaps, certain) * TEMPERATURE**2 * apart * taught[:, None, None] * used
        return torch.stack((fgl.sum(), torch.where(positive, ddf, 0).sum(), torch.where(positive, 0, ddf).sum()))


def bin_edges(config: Any) -> tuple[float, ...]:
    """Return the distances that D-FINE's bins stand for, one more than bins: finer near 0 (the paper's W(n))."""
    bins, bound = config.max_num_bins, abs(config.up * config.reg_scale)
    right = [(bound + 1) ** (2 * k / (bins - 2)) - 1 for k in range(1, bins // 2)]
    return (-2 * bound, *(-each for each in reversed(right)), 0.0, *right, 2 * bound)


def overlap(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IoU and the generalised IoU of boxes (..., 4), xyxy."""
    shared = (torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])).clamp(0)
    outer = torch.maximum(boxes[..., 2:], others[..., 2:]) - torch.minimum(boxes[..., :2], others[..., :2])
    sides = boxes[..., 2:] - boxes[..., :2], others[..., 2:] - others[..., :2], shared, outer
    first, second, inner, hull = (each[..., 0] * each[..., 1] for each in sides)
    union, hull = (first + second - inner).clamp(min=TINY), hull.clamp(min=TINY)
    ious = inner / union
    return ious, ious - (hull - union) / hull
