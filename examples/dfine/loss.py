"""The loss of D-FINE (arXiv 2410.13842) and RT-DETRv2 (arXiv 2407.17140), as sums and counts of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from models.tasks.contract import Criterion, LossTerms, device_constant
from utils.batch import Batch, GlobalCounts

from .denoising import corners
from .network import DFine, Outputs

LOSS_NAMES = ("vfl_loss", "l1_loss", "giou_loss", "fgl_loss", "ddf_loss")
DISTILLED = 4  # row of the last of them, which has a divisor of its own
PARTS = 4  # of a term: matched and denoising queries; in DDF further the edges of those without a target
TEMPERATURE = 5.0  # of DDF
TIE = 1e-10  # cost of a query's number: below the rounding of a cost, so only equal costs are decided by it
WORST_COST = 1e9  # in place of a cost that is not finite
TINY = 1e-30  # least area that is divided by


@dataclass(frozen=True)
class DFineTerms(LossTerms):
    """Terms whose last one, DDF, averages n edges with a target and m others in proportion to their square roots."""

    def share_of(self, counts: GlobalCounts) -> Tensor:
        """Return this process's share of each mean over the global batch: DDF's sums by root n (root n + root m)."""
        divisors = counts.values.clamp(min=self.least)
        if len(divisors) > DISTILLED:
            edges = counts.values[DISTILLED]
            roots = edges.sqrt() + edges.roll(PARTS // 2).sqrt()
            divisors = torch.cat((divisors[:DISTILLED], (divisors[DISTILLED].sqrt() * roots).clamp(min=1)[None]))
        return (self.weights * self.sums / divisors).sum(1)


class Queries(NamedTuple):
    """The outputs of k layers for some queries of each image, and the target of each query."""

    logits: Tensor  # (k, b, q, classes)
    boxes: Tensor  # (k, b, q, 4)
    rows: Tensor  # int64 (k, b, q): row of the target; the number of targets for a query without one
    used: Tensor  # bool (b, q): queries that count
    pairs: list[tuple[int, int]]  # of these layers and layers of distances


class DFineCriterion(Criterion):
    """Varifocal, L1 and GIoU terms of all layers, and of D-FINE's refined layers the fine-grained terms of its edges.

    Args:
        gains: weights of the terms
    """

    def __init__(self, model: DFine, gains: Sequence[float]) -> None:
        self.config, self.gains = model.config, tuple(gains)
        if model.config.model_type == "d_fine":
            self.edges = bin_edges(model.config.max_num_bins, model.config.up, model.config.reg_scale)

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
        """Return the layers that are trained, each with its layer of distances, as the paper pairs them.

        transformers pairs each layer of distances with the scores of the layer before.
        """
        first = layers - refined  # the layer before its refinement has no distances
        return [(layer, layer - first if layer >= first else None) for layer in range(layers)]

    def __call__(self, outputs: Outputs, batch: Batch) -> LossTerms:
        """Return the terms of the outputs for the targets (m, 6 or 7)."""
        split, targets = outputs.rows.shape[1], batch.targets[:, :6].float()
        logits, boxes = outputs.logits.float(), outputs.boxes.float().clamp(0, 1)
        table = torch.cat((targets, targets.new_zeros(1, 6)))  # its last row is that of queries without a target
        distances = references = None
        if outputs.distances is not None and outputs.references is not None:
            distances = outputs.distances.float().unflatten(3, (4, -1))
            references = outputs.references.float().detach()
        refined = 0 if distances is None else distances.shape[1]
        every = []
        for denoising in (False, True)[: 1 + (split > 0)]:
            part = slice(None, split) if denoising else slice(split, None)
            chosen = self.pairs(logits.shape[1], refined, denoising)
            layer_logits = [logits[:, layer, part] for layer, _ in chosen]
            layer_boxes = [boxes[:, layer, part] for layer, _ in chosen]
            if not denoising:
                layer_logits.append(outputs.encoder_logits.float())
                layer_boxes.append(outputs.encoder_boxes.float().clamp(0, 1))
            both = torch.stack(layer_logits), torch.stack(layer_boxes)
            if denoising:
                rows, used = outputs.rows.expand(len(chosen), -1, -1), outputs.used
            else:
                rows = self.matched(*both, targets)
                used = torch.ones_like(rows[0], dtype=torch.bool)
            pairs = [(number, layer) for number, (_, layer) in enumerate(chosen) if layer is not None]
            queries = Queries(*both, rows, used, pairs)
            sums, overlaps, counts = self._box_terms(queries, table)
            if distances is not None and references is not None:
                edges = distances[:, :, part], references[:, :, part], logits[:, -1, part]
                fine, edge_counts = self._edge_terms(queries, overlaps, table, *edges)
                sums, counts = torch.cat((sums, fine)), torch.cat((counts, edge_counts))
            every.append((sums, counts))
        return self._terms(every, refined > 0)

    def _terms(self, every: list[tuple[Tensor, Tensor]], fine: bool) -> LossTerms:
        """Return the terms of matched and, if there are any, denoising queries."""
        zeros = torch.zeros_like(every[0][0])
        pairs = [*every, (zeros, zeros)][:2]
        sums, counts = (torch.stack([pair[k] for pair in pairs], 1) for k in (0, 1))
        if fine:  # the last row, of edges without a target, becomes the third and fourth part of DDF
            sums, counts = (
                torch.cat((each[:-1], torch.cat((torch.zeros_like(each[:DISTILLED]), each[-1:]))), 1)
                for each in (sums, counts)
            )
        gains = device_constant(self.gains[: len(sums)], sums.device)[:, None].expand_as(sums)
        return DFineTerms(sums, counts, gains, least=1.0)

    # Matching

    @torch.no_grad()
    def matched(self, logits: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
        """Return the target of each query, int64 (k, b, q): the assignment of least cost in each layer and image.

        The costs of all layers are copied to the host at once. Of equal costs the first query's is the least.
        """
        config, count, queries = self.config, len(targets), logits.shape[2]
        rows = torch.full(logits.shape[:3], count, device=logits.device)
        if not count:
            return rows
        image, label = targets[:, :2].long().unbind(1)
        score = logits.transpose(2, 3)[:, image, label].sigmoid()  # (k, m, q)
        alpha, gamma = config.matcher_alpha, config.matcher_gamma
        costs = alpha * (1 - score) ** gamma * -(score + 1e-8).log()
        costs = config.matcher_class_cost * (costs - (1 - alpha) * score**gamma * -(1 - score + 1e-8).log())
        of_image, target = boxes[:, image], targets[:, None, 2:]
        costs = costs + config.matcher_bbox_cost * (of_image - target).abs().sum(-1)
        costs = costs - config.matcher_giou_cost * overlap(corners(of_image), corners(target))[1]
        copied = torch.cat((costs.flatten(0, 1), image[:, None].expand(count, queries)))  # one copy
        values = copied.cpu().double().numpy()
        costs_on_host = np.nan_to_num(values[:-count], nan=WORST_COST, posinf=WORST_COST, neginf=WORST_COST)
        costs_on_host = costs_on_host.reshape(len(logits), count, queries) + TIE * np.arange(queries)
        bounds = np.searchsorted(values[-count:, 0], np.arange(len(logits[0]) + 1))
        chosen = np.full((len(logits), count), queries)
        for layer, of_layer in enumerate(costs_on_host):
            for first, end in pairwise(bounds):
                target_rows, query = linear_sum_assignment(of_layer[first:end])
                chosen[layer, first + target_rows] = query
        spare = torch.cat((rows, rows[:, :, :1]), 2)  # a last query for targets beyond the number of queries
        layers = torch.arange(len(logits), device=logits.device)[:, None]
        query = torch.from_numpy(chosen).to(logits.device)
        spare[layers, image, query] = torch.arange(count, device=logits.device).expand_as(query)
        return spare[:, :, :-1]

    # Terms

    def _box_terms(self, queries: Queries, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sums of the first three terms, (3,), the overlaps with the targets (k, b, q), and the counts."""
        logits, boxes, rows, used, _ = queries
        config, count = self.config, len(table) - 1
        positive = rows < count
        of_target = table[rows]
        target = torch.where(positive[..., None], of_target[..., 2:], boxes.detach())
        ious, gious = overlap(corners(boxes), corners(target))
        overlaps = torch.where(positive, ious.detach(), 0)
        is_class = of_target[..., 1:2].long() == torch.arange(logits.shape[3], device=logits.device)
        is_class &= positive[..., None]
        scores = overlaps[..., None] * is_class
        weight = config.focal_loss_alpha * logits.detach().sigmoid() ** config.focal_loss_gamma * ~is_class + scores
        weight = weight * used[..., None]
        vfl = binary_cross_entropy_with_logits(logits, scores, weight, reduction="sum")
        l1 = (boxes - target).abs().sum()  # 0 without a target
        giou = torch.where(positive, 1 - gious, 0).sum()
        sums = torch.stack((vfl, l1, giou))
        return sums, overlaps, positive[0].sum().to(sums.dtype).expand(3)

    def _edge_terms(
        self,
        queries: Queries,
        overlaps: Tensor,
        table: Tensor,
        distances: Tensor,
        references: Tensor,
        last_logits: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (3,) of FGL, and of DDF for queries with a target and for others, and their counts.

        Args:
            distances: logits (b, refined, q, 4, bins) of the edges' distances
            references: (b, refined, q, 4)
            last_logits: class scores (b, q, classes) of the last layer, which teaches the others
        """
        count, (numbers, layers) = len(table) - 1, zip(*queries.pairs, strict=True)
        rows, overlaps = (torch.stack([each[number] for number in numbers]) for each in (queries.rows, overlaps))
        students, boxes = (torch.stack([each[:, k] for k in layers]) for each in (distances, references))
        positive, edges = rows < count, device_constant(self.edges, distances.device)
        target = corners(torch.where(positive[..., None], table[rows][..., 2:], boxes))
        sides = boxes[..., 2:].repeat(1, 1, 1, 2) / self.config.reg_scale + 1e-16
        centres, outward = boxes[..., :2].repeat(1, 1, 1, 2), device_constant((-1.0, -1.0, 1.0, 1.0), boxes.device)
        offset = (target - centres) * outward / sides - 0.5 * self.config.reg_scale
        left = (torch.bucketize(offset, edges, right=True) - 1).clamp(0, len(edges) - 2)
        share = ((offset - edges[left]) / (edges[left + 1] - edges[left])).clamp(0, 1)[..., None]
        bins = torch.arange(len(edges), device=edges.device) - left[..., None]
        label = torch.where(bins == 0, 1 - share, torch.where(bins == 1, share, 0))
        fgl = -(label * students.log_softmax(-1)).sum((-1, -2)) * overlaps
        fgl = torch.where(positive, fgl, 0).sum()
        teacher = (distances[:, -1].detach() / TEMPERATURE).log_softmax(-1)
        apart = (teacher.exp() * (teacher - (students / TEMPERATURE).log_softmax(-1))).sum((-1, -2))
        weight = torch.where(positive, overlaps, last_logits.detach().sigmoid().amax(-1)) * TEMPERATURE**2
        taught = device_constant(tuple(float(layer < distances.shape[1] - 1) for layer in layers), rows.device)
        ddf = weight * apart * taught[:, None, None] * queries.used
        known, others = (torch.where(which, ddf, 0).sum() for which in (positive, ~positive))
        matched = positive[0].sum().to(ddf.dtype)
        total = queries.used.sum().to(ddf.dtype)
        return torch.stack((fgl, known, others)), torch.stack((matched, 4 * matched, 4 * (total - matched)))


def bin_edges(bins: int, up: float, scale: float) -> tuple[float, ...]:
    """Return the distances that D-FINE's bins stand for, `bins` + 1 numbers: finer near 0 (equation 5)."""
    bound = abs(up) * abs(scale)
    step = (bound + 1) ** (2 / (bins - 2))
    right = [step**k - 1 for k in range(1, bins // 2)]
    return (-2 * bound, *(-each for each in reversed(right)), 0.0, *right, 2 * bound)


def overlap(boxes: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IoU and the generalised IoU of boxes (..., 4), xyxy."""
    shared = (torch.minimum(boxes[..., 2:], others[..., 2:]) - torch.maximum(boxes[..., :2], others[..., :2])).clamp(0)
    outer = torch.maximum(boxes[..., 2:], others[..., 2:]) - torch.minimum(boxes[..., :2], others[..., :2])
    first, second, inner, hull = (
        sides[..., 0] * sides[..., 1]
        for sides in (boxes[..., 2:] - boxes[..., :2], others[..., 2:] - others[..., :2], shared, outer)
    )
    union, hull = (first + second - inner).clamp(min=TINY), hull.clamp(min=TINY)
    ious = inner / union
    return ious, ious - (hull - union) / hull
