"""`SegmentationTask`: the factory of a segmenter's model, criterion, postprocess and metrics. Named in models/tasks.

The mask loss is YOLOv5's. It groups targets of similar size, so that a batch takes few kernels and little memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.heads.anchors import DetectionCriterion, Level, MapSizes, Segment, map_sizes, match, near_cells, scale_gains
from models.heads.contract import EPSILON, BoxView, DecodedView, HeadView, UnavailableCriterion, require_head
from models.tasks.contract import Criterion, Image, LossTerms, Model, Thresholds, View, device_constant, upcast_half
from models.tasks.detect import (
    DecodedDetector,
    DetectionPostprocess,
    DetectionTask,
    SuppressedDetector,
    SuppressedView,
    boxes_in_files,
    detect,
)
from models.tasks.segment_metrics import (
    SEGMENTATION_METRICS,
    DetectedMasks,
    Logits,
    SegmentationMetrics,
    SegmentationPrediction,
    cut_by_boxes,
    known_masks,
    target_masks,
    weighted_prototypes,
)
from models.yolo import YoloModel
from utils.batch import MASK_STRIDE, Batch, ImageInfo, SegmentationBatch, box_windows
from utils.config.hyperparameters import AnchorKeys
from utils.errors import UserError
from utils.plots.drawing import MAX_GRID_IMAGES, display_pixels, draw_targets, tint

MAX_GROUP_VALUES = 2**20  # numbers in the largest tensor of a group; a group takes about 20 MB in fp32
# A group's targets have numbers of matches between two of these edges; a target usually has 3 cells for each anchor.
MATCH_EDGES = (3, 6, 9, 12, 18, 27)
SPARE_VALUES = 2**14  # numbers of padding that cost less than another group
SPARE_SHARE = 0.15  # share of a group's values that may be padding


class MaskMatches(NamedTuple):
    """Pairs of a target and an output of the network, in the order of the outputs. All fields are (n,), on the host."""

    target: np.ndarray
    row: np.ndarray  # row of the coefficients
    level: np.ndarray
    weight: np.ndarray  # float32: weight of the pair's sum of cross-entropies


class Group(NamedTuple):
    """Targets that are computed together, padded to the same numbers of matches and pixels."""

    targets: slice  # rows of `MaskPlan.windows`
    matches: slice  # rows of `MaskPlan.rows` and `MaskPlan.weights`, target by target
    matches_each: int
    pixels_each: int


class MaskPlan(NamedTuple):
    """The work of `mask_sums` for t targets with matches and pixels; tensors are on the device."""

    windows: Tensor  # int32 (t, 5), see `window_table`
    rows: Tensor  # int32 (n,): row of the coefficients for each match
    weights: Tensor  # (n, levels): weight of each match on its level; 0 on other levels, and for padding
    map_width: int
    groups: list[Group]


def window_table(batch: SegmentationBatch, size: tuple[int, int]) -> np.ndarray:
    """Return the pixels in each target's box and their truth, int64 (m, 5), for maps of `size` (h, w).

    The columns are: index on the maps (b, h, w) of the first pixel, width and number of pixels, index in `mask_pixels`
    of the first pixel's truth, and width of the truth's own window, which may be larger than the box.
    """
    (height, width), truth = size, batch.windows.astype(np.int64)
    boxes = box_windows(batch.host_targets[:, 2:], *size)
    left, top = np.maximum(boxes[:, :2], truth[:, :2]).T
    right, bottom = np.minimum(boxes[:, 2:], truth[:, 2:]).T
    pixels = (right - left).clip(min=0) * (bottom - top).clip(min=0)
    truth_width, truth_height = (truth[:, 2:] - truth[:, :2]).T
    truth_start = (truth_width * truth_height).cumsum() - truth_width * truth_height
    first = (batch.host_targets[:, 0].astype(np.int64) * height + top) * width + left
    first_truth = truth_start + (top - truth[:, 1]) * truth_width + left - truth[:, 0]
    return np.stack((first, right - left, pixels, first_truth, truth_width), 1)


def plan_masks(
    matches: MaskMatches, table: np.ndarray, levels: int, masks: int, map_width: int, device: torch.device
) -> MaskPlan:
    """Return the plan for a batch of m targets, whose `window_table` is `table`; `masks`: number of coefficients."""
    counts, pixels = np.bincount(matches.target, minlength=len(table)), table[:, 2]
    grouped = [*_similar(counts, pixels, masks)]
    targets = np.concatenate([np.zeros(0, np.int64), *grouped])
    sizes = [(len(group), int(counts[group].max()), int(pixels[group].max())) for group in grouped]
    # The matches of each target, padded with its first one.
    repeats = np.repeat([most for _, most, _ in sizes], [count for count, _, _ in sizes]).astype(np.int64)
    position = np.arange(repeats.sum()) - np.repeat(repeats.cumsum() - repeats, repeats)
    target = np.repeat(targets, repeats)
    padded = position >= counts[target]
    order, starts = np.argsort(matches.target, kind="stable"), counts.cumsum() - counts
    match = order[starts[target] + np.where(padded, 0, position)]
    weights = np.zeros((len(match), levels), np.float32)
    weights[np.arange(len(match)), matches.level[match]] = np.where(padded, 0, matches.weight[match])
    groups, end, matches_end = [], 0, 0
    for count, most, most_pixels in sizes:
        chosen, chosen_matches = slice(end, end + count), slice(matches_end, matches_end + count * most)
        groups.append(Group(chosen, chosen_matches, most, most_pixels))
        end, matches_end = chosen.stop, chosen_matches.stop
    windows, rows = table[targets].astype(np.int32), matches.row[match].astype(np.int32)
    return MaskPlan(
        _on_device(windows, device), _on_device(rows, device), _on_device(weights, device), map_width, groups
    )


def _similar(counts: np.ndarray, pixels: np.ndarray, masks: int) -> Iterator[np.ndarray]:
    """Iterate over groups of targets, by index, with similar numbers of matches `counts` and of `pixels`, (m,) each.

    Targets without matches or pixels are left out.
    """
    (used,) = np.nonzero((counts > 0) & (pixels > 0))
    edge = np.searchsorted(MATCH_EDGES, counts[used])
    used = used[np.lexsort((used, -pixels[used], edge))]
    edges, sizes = np.searchsorted(MATCH_EDGES, counts[used]).tolist(), pixels[used].tolist()
    most = [*MATCH_EDGES, int(counts.max(initial=0))]
    start = spare = 0
    for end in range(1, len(used) + 1):
        if end < len(used) and edges[end] == edges[start]:
            wider = spare + sizes[start] - sizes[end]
            count, matches = end + 1 - start, most[edges[start]]
            fits = count * sizes[start] * max(matches, masks) <= MAX_GROUP_VALUES
            if fits and wider * matches <= max(SPARE_VALUES, SPARE_SHARE * count * sizes[start] * matches):
                spare = wider
                continue
        yield used[start:end]
        start, spare = end, 0


def _on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, from page-locked memory, so that the host does not wait for the device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def mask_sums(coefficients: Tensor, prototypes: Tensor, truth: Tensor, plan: MaskPlan) -> Tensor:
    """Return the weighted sums of each level's binary cross-entropies, (levels,).

    The logits of a mask are the sum of the prototypes (b, masks, h, w), weighted by an output's coefficients, (r,
    masks); `truth` is `SegmentationBatch.mask_pixels`. Both gradients are accumulated in a fixed order.
    """
    pixels = prototypes.permute(0, 2, 3, 1).reshape(-1, prototypes.shape[1])
    sums: Tensor = _MaskSums.apply(coefficients, pixels, truth, plan)
    return sums


class _MaskSums(torch.autograd.Function):
    """Compute `mask_sums` with one row of prototypes per pixel, (b * h * w, masks)."""

    @staticmethod
    def forward(ctx: Any, coefficients: Tensor, pixels: Tensor, truth: Tensor, plan: MaskPlan) -> Tensor:
        ctx.save_for_backward(coefficients, pixels, truth)
        ctx.plan = plan
        sums = coefficients.new_zeros(plan.weights.shape[1])
        for group in plan.groups:
            _, _, logits, target, valid, _ = _group_logits(coefficients, pixels, truth, plan, group)
            # Binary cross-entropy of logit x and target y is log(1 + e^x) - x y. The products add up the pixels.
            linear = logits.bmm(target[..., None])
            values = functional.softplus(logits).bmm(valid[..., None]) - linear
            sums += values.flatten() @ plan.weights[group.matches].to(values)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        coefficients, pixels, truth = ctx.saved_tensors
        plan: MaskPlan = ctx.plan
        coefficient_gradient, pixel_gradient = torch.zeros_like(coefficients), torch.zeros_like(pixels)
        for group in plan.groups:
            chosen, near, logits, target, valid, index = _group_logits(coefficients, pixels, truth, plan, group)
            error = logits.sigmoid_().mul_(valid[:, None]).sub_(target[:, None])
            scale = (plan.weights[group.matches].to(gradient) @ gradient).view(len(target), -1, 1)
            by_match = (error.bmm(near) * scale).flatten(0, 1)
            by_pixel = error.transpose(1, 2).bmm(chosen * scale).flatten(0, 1)
            coefficient_gradient.index_add_(0, plan.rows[group.matches], by_match)
            pixel_gradient.index_add_(0, index, by_pixel)
        return coefficient_gradient, pixel_gradient, None, None


def _group_logits(
    coefficients: Tensor, pixels: Tensor, truth: Tensor, plan: MaskPlan, group: Group
) -> Sequence[Tensor]:
    """Return the logits of a group of n targets, and the tensors that they are computed from.

    The result is: coefficients (n, matches, masks), prototypes (n, p, masks), logits (n, matches, p), truth (n, p), 1
    for pixels and 0 for padding (n, p), and the index of each pixel on the maps (n * p,).
    """
    first, width, count, start, truth_width = plan.windows[group.targets, :, None].unbind(1)
    position = torch.arange(group.pixels_each, dtype=torch.int32, device=pixels.device)
    valid = position < count
    position = torch.where(valid, position, 0)  # padding repeats the first pixel
    # The quotient is exact: the half keeps it further away from whole numbers than rounding can move it.
    row = ((position + 0.5) / width).int()
    column = position - row * width
    index = (first + row * plan.map_width + column).flatten()
    chosen = coefficients.index_select(0, plan.rows[group.matches]).view(len(first), group.matches_each, -1)
    near = pixels.index_select(0, index).view(len(first), group.pixels_each, -1)
    valid = valid.to(pixels.dtype)
    target = truth.index_select(0, (start + row * truth_width + column).flatten()).view_as(valid) * valid
    return chosen, near, chosen.bmm(near.transpose(1, 2)), target, valid, index


class SegmentationCriterion(DetectionCriterion):
    """The detector's terms, and the cross-entropy of the masks of all outputs that are matched to targets.

    Formulas and gains are YOLOv5's. The host repeats the matching so that it need not wait for the device; for this the
    criterion copies the anchors to the host when it is made.
    """

    def __init__(
        self, hyp: AnchorKeys, head: Segment, label_smoothing: float = 0.0, class_weights: Sequence[float] = ()
    ) -> None:
        super().__init__(hyp, head, label_smoothing, class_weights)
        self.masks = head.no - 5 - head.nc
        self._host_anchors = head.anchors.detach().cpu().clone()

    def __call__(  # type: ignore[override]
        self, outputs: tuple[Sequence[Tensor | Level], Tensor], batch: Batch
    ) -> LossTerms:
        """Return the loss terms, whose parts are the levels.

        The mask term is the sum over the images of the mean over an image's matches on a level; its count is the number
        of images. A match's value is the sum of the cross-entropies in its box, divided by the number of the map's
        pixels and by the box's normalised area. Outputs are maps as for `DetectionCriterion`, with 5 + classes + masks
        outputs, and prototypes (b, masks, h, w).
        """
        with_masks, (maps, prototypes) = cast("SegmentationBatch", batch), outputs
        terms, rows = self.box_terms(maps, batch.targets)
        size, levels, device = (prototypes.shape[2], prototypes.shape[3]), len(maps), prototypes.device
        matches = self._mask_matches(map_sizes(maps), with_masks.host_targets, size)
        plan = plan_masks(matches, window_table(with_masks, size), levels, self.masks, size[1], device)
        coefficients = rows.flatten(0, 2)[:, 5 + self.classes :]
        sums = mask_sums(coefficients, upcast_half(prototypes), with_masks.mask_pixels, plan)
        counts = device_constant((float(len(prototypes)),) * levels, device)
        weights = device_constant((self.hyp.box,) * levels, device)
        terms["seg_loss"] = sums.to(rows), counts.to(rows), weights.to(rows)
        return LossTerms.stacked(terms, self._head.loss_names, self.min_divisor)

    def _mask_matches(self, sizes: MapSizes, targets: np.ndarray, size: tuple[int, int]) -> MaskMatches:
        """Match targets (m, 6) on the host, as the detector does on the device; `size`: height and width of the masks'
        maps."""
        cells = near_cells(sizes, torch.from_numpy(targets))
        matched = match(cells, self._host_anchors, self.hyp.anchor_t).numpy()
        level, cell, anchor = np.nonzero(matched)
        _, near, anchors = matched.shape
        target = cell % max(len(targets), 1)
        image = targets[target, 0].astype(np.int64) * len(sizes) + level
        area = targets[target, 4] * targets[target, 5] * np.float32(size[0] * size[1])
        weight = np.array(self.class_weights or (1.0,) * self.classes)[targets[target, 1].astype(np.int64)]
        weight = weight / (area.clip(min=EPSILON) * np.bincount(image, weight)[image])  # a mean over an image's matches
        return MaskMatches(target, (level * near + cell) * anchors + anchor, level, weight.astype(np.float32))


class SegmentationView(NamedTuple):
    """The outputs of a model for a batch."""

    boxes: BoxView | SuppressedView  # `SuppressedView` of an exported file with suppression; else with coefficients
    maps: Tensor  # (b, m, h, w): each detection's mask in that case, 0 or 1, cropped to its box; else the prototypes

    @property
    def outputs(self) -> tuple[list[Tensor], Tensor] | None:
        return None if self.boxes.outputs is None else (self.boxes.outputs, self.maps)


class SegmentationPostprocess(DetectionPostprocess):
    """Run one or several models and detect the instances in the images."""

    def views(  # type: ignore[override]
        self, model: Model, inputs: Tensor, augment: bool
    ) -> list[SegmentationView]:
        """Run `model` on `inputs`. Raises `UserError` if `augment`."""
        if augment:
            raise UserError("--augment is for detectors: masks of scaled and mirrored images are not joined")
        *boxes, maps = model(inputs)
        if isinstance(boxes[0], list):
            return [SegmentationView(HeadView(require_head(model), boxes[0], num_extra=maps.shape[1]), maps)]
        if len(boxes) == 1:  # an exported file's boxes
            return [SegmentationView(DecodedView(boxes[0], num_extra=maps.shape[1]), maps)]
        return [SegmentationView(SuppressedView(*boxes), maps)]

    def __call__(  # type: ignore[override]
        self, views: Sequence[View], batch: Batch
    ) -> list[SegmentationPrediction]:
        """Return the instances in each image. The boxes of all models suppress each other; each keeps its own model's
        prototypes. A view with a `SuppressedView` is always the only one."""
        segmentation_views, infos = cast("Sequence[SegmentationView]", views), cast("Sequence[ImageInfo]", batch.infos)
        boxes, logits = self._detect(segmentation_views)
        height, width = segmentation_views[0].maps.shape[2:]
        iou_thres, retina = self.thresholds.iou_thres, self.thresholds.retina_masks
        predictions = []
        file_boxes = boxes_in_files(boxes, infos)
        for info, network_boxes, rows, maps in zip(infos, boxes, file_boxes, logits, strict=True):
            corners = rows[:, :4].numpy()
            masks = DetectedMasks(maps, (height, width), network_boxes, corners, info.size, info.placement, retina)
            fields = (info.image, info.path, self.names, info.size, rows, info.rows, iou_thres, masks, info.outlines)
            predictions.append(SegmentationPrediction(*fields))
        return predictions

    def _detect(self, views: Sequence[SegmentationView]) -> tuple[list[Tensor], list[Logits]]:
        """Return the detections of each image, (k, 6) in pixels of the batch, and their masks."""
        boxes, maps = zip(*views, strict=True)
        detected, logits = detect(boxes, self.thresholds), list[Logits]()
        for (_, extra, view), *image_maps in zip(detected, *maps, strict=True):
            if isinstance(boxes[0], SuppressedView):
                logits.append(known_masks(image_maps[0][extra[:, 0]]))
            else:
                logits.append(weighted_prototypes(extra, view, image_maps))
        return [image.boxes for image in detected], logits


class DecodedSegmenter(DecodedDetector):
    """A segmenter with the decoding of its boxes, in fp32."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map images (b, 3, h, w), in 0 to 1, to boxes and prototypes.

        Boxes are (b, n, 5 + classes + masks): xywh in pixels, objectness, scores, mask coefficients; prototypes are
        (b, masks, h / 4, w / 4).
        """
        maps, prototypes = self.model(images)
        return self.head.decode(maps, prototypes.shape[1]), prototypes.float()


class SuppressedSegmenter(SuppressedDetector):
    """A `DecodedSegmenter` with non-maximum suppression. No shape depends on the number of detections."""

    decoding: DecodedSegmenter

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """Map images (b, 3, h, w), in 0 to 1, to detections (b, most, 6), their numbers (b,) and masks.

        Detections and numbers are as in `SuppressedDetector`. Masks are (b, most, h / 4, w / 4), 0 or 1, cropped to the
        boxes.
        """
        decoded, prototypes = self.decoding(images)
        masks = prototypes.shape[1]
        detections, counts, box = self.select(decoded[..., :-masks])
        coefficients = decoded[..., -masks:].gather(1, box[..., None].expand(-1, -1, masks))
        logits = (coefficients @ prototypes.flatten(2)).view(*box.shape, *prototypes.shape[2:])
        inside = cut_by_boxes((logits > 0).flatten(0, 1), detections[..., :4].flatten(0, 1) / MASK_STRIDE)
        return detections, counts, inside.view_as(logits).to(torch.float32)


class SegmentationTask(DetectionTask):
    """Instance segmentation, as in YOLOv5: a detector whose boxes have masks."""

    metric_names = SEGMENTATION_METRICS
    official_weights = r"yolov5[nsmlx]-seg\.pt"
    prediction = SegmentationPrediction
    features = DetectionTask.features - {"copies"} | {"masks"}
    heads = (Segment,)
    export_modules = (DecodedSegmenter, SuppressedSegmenter)

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> YoloModel:
        """Build the model of a YAML. Raises `UserError` unless the prototypes are a quarter of the images."""
        model = super().build_model(yaml, imgsz, source)
        stride = int(require_head(model).stride[0]) // 2  # `Proto` doubles height and width
        if stride != MASK_STRIDE:
            raise UserError(
                f"{source}: the first map of Segment has stride {2 * stride}, and masks need {2 * MASK_STRIDE}; "
                "name a row of that stride first"
            )
        return model

    def criterion(self, model: Model) -> Criterion:
        if not isinstance(head := model.head, Segment):
            return UnavailableCriterion()
        hyp = scale_gains(self.hyp, head, model.imgsz)
        return SegmentationCriterion(hyp, head, self.label_smoothing, self.class_weights)

    def postprocess(self, model: Model, thresholds: Thresholds) -> SegmentationPostprocess:
        return SegmentationPostprocess(self.names, thresholds)

    def metrics(self, drawn: frozenset[int] = frozenset()) -> SegmentationMetrics:
        return SegmentationMetrics(self.names, drawn)

    def draw_batch(self, batch: Batch) -> Image:
        planes = batch.images[:MAX_GRID_IMAGES].cpu().numpy()[:, ::-1].transpose(0, 2, 3, 1)
        images = np.stack([*map(display_pixels, planes)])
        numbers, labels = cast("SegmentationBatch", batch).host_targets[:, :2].astype(int).T
        (drawn,) = np.nonzero(numbers < len(images))
        size = (images.shape[1] // MASK_STRIDE, images.shape[2] // MASK_STRIDE)
        masks = target_masks(cast("SegmentationBatch", batch), drawn, size).cpu().numpy()
        for mask, target in zip(masks, drawn, strict=True):
            whole = mask.repeat(MASK_STRIDE, 0).repeat(MASK_STRIDE, 1)
            tint(images[numbers[target]], whole, labels[target])
        return draw_targets(images.transpose(0, 3, 1, 2)[:, ::-1], batch.targets.cpu().numpy(), self.names)
