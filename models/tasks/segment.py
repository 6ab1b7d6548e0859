"""`SegmentationTask`: the factory of a segmenter's model, criterion, postprocess and metrics. Named in models/tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from models.heads.anchors import (
    DetectionCriterion,
    Level,
    LossSettings,
    MapSizes,
    Segment,
    loss_settings,
    map_sizes,
    match,
    near_cells,
)
from models.heads.contract import EPSILON, DecodedView, head_of
from models.heads.dfl import DetectDFL
from models.tasks.contract import Criterion, Image, LossTerms, Model, Postprocess, Thresholds, View
from models.tasks.detect import (
    DecodedDetector,
    DetectionTask,
    SuppressedDetector,
    SuppressedView,
    allowed_rows,
    boxes_in_files,
    detect_with_more,
)
from models.tasks.losses import UnavailableCriterion, at_least_float32, device_constant
from models.tasks.masks import (
    DetectedMasks,
    GivenMaps,
    MaskMaps,
    PrototypeMaps,
    PrototypeView,
    SegmentationPrediction,
    SegmentationView,
    SuppressedMaskView,
    cut_by_boxes,
)
from models.tasks.segment_metrics import SEGMENTATION_METRICS, SegmentationMetrics
from models.yolo import YoloModel, head_class
from utils.batch import MASK_STRIDE, Batch, ImageInfo, SegmentationBatch, box_windows
from utils.errors import UserError
from utils.plots.drawing import MAX_GRID_IMAGES, draw_targets, tint

MAX_GROUP_VALUES = 2**20  # numbers in the largest tensor of a group; a group takes about 20 MB in fp32
# A group's targets have numbers of matches between two of these edges; a target usually has 3 cells for each anchor.
MATCH_EDGES = (3, 6, 9, 12, 18, 27)
SPARE_VALUES = 2**14  # numbers of padding that cost less than another group
SPARE_SHARE = 0.15  # share of a group's values that may be padding
WINDOW_COLUMNS = 5


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

    # int32 (t, 5): index on the maps (b, h, w) of a window's first pixel, the window's width and number of pixels, the
    # index of the truth's first pixel, and the width of the truth's own window
    windows: Tensor
    rows: Tensor  # int32 (n,): row of the coefficients for each match
    weights: Tensor  # (n, levels): weight of each match on its level; 0 on other levels, and for padding
    map_width: int
    groups: list[Group]


def plan_masks(
    matches: MaskMatches,
    image: np.ndarray,
    boxes: np.ndarray,
    windows: np.ndarray,
    size: tuple[int, int],
    levels: int,
    masks: int,
    device: torch.device,
) -> MaskPlan:
    """Return the plan for a batch of m targets.

    Args:
        matches: pairs of a target and an output
        image: number (m,) of each target's image
        boxes: window (m, 4) to compute for each target
        windows: window (m, 4) that the truth covers for each target
        size: height and width of the maps
        levels: number of levels
        masks: number of coefficients
    """
    height, width = size
    cut = np.concatenate((np.maximum(boxes[:, :2], windows[:, :2]), np.minimum(boxes[:, 2:], windows[:, 2:])), 1)
    left, top, right, bottom = cut.T
    pixels = (right - left).clip(min=0) * (bottom - top).clip(min=0)
    truth_width = (windows[:, 2] - windows[:, 0]).astype(np.int64)
    truth_pixels = truth_width * (windows[:, 3] - windows[:, 1])
    truth = truth_pixels.cumsum() - truth_pixels + (top - windows[:, 1]) * truth_width + left - windows[:, 0]
    table = np.stack(((image * height + top) * width + left, right - left, pixels, truth, truth_width), 1)

    order = np.argsort(matches.target, kind="stable")
    counts = np.bincount(matches.target, minlength=len(image))
    starts = counts.cumsum() - counts
    groups, rows, weights, chosen, targets_before, matches_before = [], [], [], [], 0, 0
    for group in _similar(counts, pixels, masks):
        each = counts[group].max()
        position = np.arange(each)
        padded = position >= counts[group][:, None]
        match = order[np.where(padded, 0, starts[group][:, None] + position)]
        weight = np.zeros((*match.shape, levels), np.float32)
        np.put_along_axis(weight, matches.level[match][..., None], matches.weight[match][..., None], 2)
        weight[padded] = 0
        rows.append(matches.row[match].ravel())
        weights.append(weight.reshape(-1, levels))
        chosen.append(group)
        targets_after, matches_after = targets_before + len(group), matches_before + match.size
        groups.append(
            Group(
                slice(targets_before, targets_after),
                slice(matches_before, matches_after),
                int(each),
                int(pixels[group].max()),
            )
        )
        targets_before, matches_before = targets_after, matches_after
    if not groups:
        empty = torch.zeros(0, levels, device=device)
        return MaskPlan(empty.int(), empty.int(), empty, width, [])
    return MaskPlan(
        _on_device(table[np.concatenate(chosen)].astype(np.int32), device),
        _on_device(np.concatenate(rows).astype(np.int32), device),
        _on_device(np.concatenate(weights), device),
        width,
        groups,
    )


def _similar(counts: np.ndarray, pixels: np.ndarray, masks: int) -> Iterator[np.ndarray]:
    """Iterate over groups of targets, by index, with similar numbers of matches and pixels.

    Targets without matches or pixels are left out.

    Args:
        counts: number of matches of each target, (m,)
        pixels: number of pixels of each target, (m,)
        masks: number of coefficients
    """
    (used,) = np.nonzero((counts > 0) & (pixels > 0))
    edge = np.searchsorted(MATCH_EDGES, counts[used])
    used = used[np.lexsort((used, -pixels[used], edge))]
    edges, sizes = np.searchsorted(MATCH_EDGES, counts[used]).tolist(), pixels[used].tolist()
    most = [*MATCH_EDGES, int(counts.max(initial=0))]
    start = spare = 0
    for end in range(1, len(used) + 1):
        if end < len(used) and edges[end] == edges[start]:
            more = spare + sizes[start] - sizes[end]
            count, each = end + 1 - start, most[edges[start]]
            within = count * sizes[start] * max(each, masks) <= MAX_GROUP_VALUES
            if within and more * each <= max(SPARE_VALUES, SPARE_SHARE * count * sizes[start] * each):
                spare = more
                continue
        yield used[start:end]
        start, spare = end, 0


def _on_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device, from page-locked memory, so that the host does not wait for the device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def mask_sums(coefficients: Tensor, prototypes: Tensor, truth: Tensor, plan: MaskPlan) -> Tensor:
    """Return the weighted sums of each level's binary cross-entropies, (levels,).

    Both gradients are accumulated in a fixed order.

    Args:
        coefficients: weights (r, masks) of the prototypes, for each output
        prototypes: maps (b, masks, h, w), whose weighted sums are the logits of a mask
        truth: true masks, uint8, see `SegmentationBatch.mask_pixels`
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
    first, width, count, start, truth_width = plan.windows[group.targets].view(-1, WINDOW_COLUMNS, 1).unbind(1)
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


LOSS_NAMES = ("box_loss", "seg_loss", "obj_loss", "cls_loss")  # names of the terms, in the order of `LossTerms`


class SegmentationCriterion(DetectionCriterion):
    """The detector's terms, and the cross-entropy of the masks of all outputs that are matched to targets.

    Formulas and gains are YOLOv5's. The host repeats the matching so that it need not wait for the device; for this the
    criterion copies the anchors to the host when it is made.
    """

    def __init__(self, settings: LossSettings, head: Segment, class_weights: Sequence[float] = ()) -> None:
        super().__init__(settings, head, class_weights)
        self.masks = head.no - 5 - head.nc
        self._host_anchors = head.anchors.detach().cpu().clone()

    def __call__(  # type: ignore[override]
        self, outputs: tuple[Sequence[Tensor | Level], Tensor], batch: Batch
    ) -> LossTerms:
        """Return the loss terms, whose parts are the levels.

        The mask term is the sum over the images of the mean over an image's matches on a level; its count is the number
        of images. A match's value is the sum of the cross-entropies in its box, divided by the number of the map's
        pixels and by the box's normalised area.

        Args:
            outputs: maps as for `DetectionCriterion`, with 5 + classes + masks outputs, and prototypes (b, masks, h, w)
        """
        given = cast("SegmentationBatch", batch)
        maps, prototypes = outputs
        terms, rows = self.box_terms(maps, given.targets)
        size = (prototypes.shape[2], prototypes.shape[3])
        plan = plan_masks(
            self._mask_matches(map_sizes(maps), given.host_targets, size),
            given.host_targets[:, 0].astype(np.int64),
            box_windows(given.host_targets[:, 2:], *size).astype(np.int64),
            given.windows,
            size,
            len(maps),
            self.masks,
            prototypes.device,
        )
        coefficients = rows.flatten(0, 2)[:, 5 + self.classes :]
        sums = mask_sums(coefficients, at_least_float32(prototypes), given.mask_pixels, plan)
        counts = device_constant((float(len(prototypes)),) * len(maps), prototypes.device)
        weights = device_constant((self.settings.box,) * len(maps), prototypes.device)
        sums, counts, weights = (
            torch.cat((of_boxes[:1], of_masks[None].to(of_boxes), of_boxes[1:]))
            for of_boxes, of_masks in zip(
                (terms.sums, terms.counts, terms.weights), (sums, counts, weights), strict=True
            )
        )
        return LossTerms(sums, counts, weights, terms.least)

    def _mask_matches(self, sizes: MapSizes, targets: np.ndarray, size: tuple[int, int]) -> MaskMatches:
        """Match targets on the host, as the detector does on the device.

        Args:
            sizes: height and width of each level's map
            targets: image, class and normalised xywh of the targets, (m, 6)
            size: height and width of the mask maps
        """
        cells = near_cells(sizes, torch.from_numpy(targets))
        matched = match(cells, self._host_anchors, self.settings.anchor_t).numpy()
        level, cell, anchor = np.nonzero(matched)
        _, near, anchors = matched.shape
        target = cell % max(len(targets), 1)
        image = targets[target, 0].astype(np.int64) * len(sizes) + level
        area = targets[target, 4] * targets[target, 5] * np.float32(size[0] * size[1])
        if self.class_weights:  # the mean over an image's matches is weighted
            share = np.array(self.class_weights)[targets[target, 1].astype(np.int64)]
            weight = share / (area.clip(min=EPSILON) * np.bincount(image, share)[image]) if len(target) else area
        else:
            weight = 1 / (area.clip(min=EPSILON) * np.bincount(image)[image]) if len(target) else area
        return MaskMatches(target, (level * near + cell) * anchors + anchor, level, weight.astype(np.float32))


class SegmentationPostprocess(Postprocess):
    """Run one or several models and detect the instances in the images.

    Args:
        names: class names, by number
    """

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        """Raise `UserError` if `thresholds` name an unknown class."""
        thresholds.refuse_unknown_classes(names)
        self.names, self.thresholds = dict(names), thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[SegmentationView]:
        """Run `model` on `inputs`. Raises `UserError` if `augment`."""
        if augment:
            raise UserError("--augment is for detectors: masks of scaled and mirrored images are not joined")
        outputs = model(inputs)
        if isinstance(outputs[0], list):
            maps, prototypes = outputs
            return [PrototypeView(head_of(model).view(maps, more=prototypes.shape[1]), prototypes)]
        if len(outputs) == 2:  # an exported file's boxes
            boxes, prototypes = outputs
            return [PrototypeView(DecodedView(boxes, more=prototypes.shape[1]), prototypes)]
        detections, counts, masks = outputs
        return [SuppressedMaskView(SuppressedView(detections, counts), masks)]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[SegmentationPrediction]:
        """Return the instances in each image. The boxes of all models suppress each other; each keeps its own model's
        prototypes. A `SuppressedMaskView` is always the only view."""
        boxes, maps = self._detect(cast("Sequence[SegmentationView]", views))
        infos: Sequence[ImageInfo] = batch.infos
        predictions = []
        for info, network_boxes, file_boxes, of_image in zip(
            infos, boxes, boxes_in_files(boxes, infos), maps, strict=True
        ):
            corners = file_boxes[:, :4].numpy()
            retina = self.thresholds.retina_masks
            masks = DetectedMasks(of_image, network_boxes, corners, info.size, info.placement, retina)
            prediction = SegmentationPrediction(
                image=info.image,
                path=info.path,
                size=info.size,
                rows=file_boxes,
                labels=info.rows,
                names=self.names,
                iou_thres=self.thresholds.iou_thres,
                source=masks,
                label_outlines=info.outlines,
            )
            predictions.append(prediction)
        return predictions

    def _detect(self, views: Sequence[SegmentationView]) -> tuple[list[Tensor], list[MaskMaps]]:
        """Return the detections of each image, (k, 6) in pixels of the batch, and their masks."""
        if isinstance(first := views[0], SuppressedMaskView):
            rows = allowed_rows(first.boxes, self.thresholds)
            detections = [image[of_image] for image, of_image in zip(first.boxes.detections, rows, strict=True)]
            return detections, [GivenMaps(image[of_image]) for image, of_image in zip(first.masks, rows, strict=True)]
        prototype_views = [view for view in views if isinstance(view, PrototypeView)]
        detected = detect_with_more([view.boxes for view in prototype_views], self.thresholds)
        prototypes = zip(*(view.prototypes for view in prototype_views), strict=True)
        maps: list[MaskMaps] = [
            PrototypeMaps(one.more, one.view, of_image) for one, of_image in zip(detected, prototypes, strict=True)
        ]
        return [one.boxes for one in detected], maps


class DecodedSegmenter(DecodedDetector):
    """A segmenter with the decoding of its boxes, in fp32."""

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map images (b, 3, h, w), in 0 to 1, to boxes and prototypes.

        Boxes are (b, n, 5 + classes + masks): xywh in pixels, objectness, scores, mask coefficients; prototypes are
        (b, masks, h / 4, w / 4).
        """
        maps, prototypes = self.model(images)
        masks = prototypes.shape[1]
        return self.head.decode(maps, masks), prototypes.float()


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

    loss_names = LOSS_NAMES
    metric_names = SEGMENTATION_METRICS
    official_weights = r"yolov5[nsmlx]-seg\.pt"
    prediction = SegmentationPrediction
    features = DetectionTask.features - {"copies"} | {"masks"}
    heads = (Segment,)
    export_modules = (DecodedSegmenter, SuppressedSegmenter)

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> YoloModel:
        """Build the model of a YAML. Raises `UserError` unless the prototypes are a quarter of the images."""
        if head_class(yaml) is DetectDFL:
            raise UserError(
                f"{source}: a DetectDFL head has no masks; take a model with Segment, such as yolov5n-seg.yaml"
            )
        model = super().build_model(yaml, imgsz, source)
        stride = int(head_of(model).stride[0]) // 2  # `Proto` doubles height and width
        if stride != MASK_STRIDE:
            raise UserError(
                f"{source}: the first map of Segment has stride {2 * stride}, and masks need {2 * MASK_STRIDE}; "
                "name a row of that stride first"
            )
        return model

    def loss_names_of(self, model: Model) -> tuple[str, ...]:
        """Return the names of the terms."""
        return LOSS_NAMES

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`, with gains scaled to it; for an exported file every term is NaN."""
        if not isinstance(head := model.head, Segment):
            return UnavailableCriterion(len(LOSS_NAMES))
        settings = loss_settings(self.hyp, self.label_smoothing)
        return SegmentationCriterion(settings.scaled(head.nl, head.nc, model.imgsz), head, self.class_weights)

    def postprocess(  # type: ignore[override]
        self, model: Model, thresholds: Thresholds
    ) -> SegmentationPostprocess:
        """Return the conversion of outputs to instances. Raises `UserError` for an unknown class in `thresholds`."""
        return SegmentationPostprocess(self.names, thresholds)

    def metrics(self, shown: frozenset[int] = frozenset()) -> SegmentationMetrics:
        """Return precision, recall and mean average precision of boxes and masks; `shown` are images to draw."""
        return SegmentationMetrics(self.names, shown)

    def draw_batch(self, batch: Batch) -> Image:
        """Draw a grid of the batch's images with their boxes and masks."""
        given = cast("SegmentationBatch", batch)
        images, pixels = given.images[:MAX_GRID_IMAGES].cpu().numpy()[:, ::-1].copy(), given.mask_pixels.cpu().numpy()
        sides = given.windows[:, 2:] - given.windows[:, :2]
        ends = sides.prod(1).cumsum().tolist()
        square = np.ones((MASK_STRIDE, MASK_STRIDE), bool)
        targets = given.host_targets[:, :2].astype(int).tolist()
        for (image, label), window, (width, height), end in zip(
            targets, (given.windows * MASK_STRIDE).tolist(), sides.tolist(), ends, strict=True
        ):
            if image < len(images):
                left, top, right, bottom = window
                mask = np.kron(pixels[end - width * height : end].reshape(height, width) > 0, square)
                tint(images[image].transpose(1, 2, 0)[top:bottom, left:right], mask, label)
        return draw_targets(images[:, ::-1], given.targets.cpu().numpy(), self.names)
