"""`DetectionTask`: a detector's model, loss, suppression, exported module and metrics. Named by `TASKS`.

`BoxTask` is its half that knows no network, for tasks of other networks that predict upright boxes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.heads.anchors import Detect
from models.heads.contract import (
    BoxView,
    Candidates,
    DecodedView,
    DetectionHead,
    HeadView,
    UnavailableCriterion,
    require_head,
    xywh_to_xyxy,
)
from models.heads.dfl import DetectDFL
from models.loading import head_prefix, head_tensors
from models.tasks.contract import Criterion, Image, Model, Postprocess, Prediction, Task, Thresholds, View
from models.tasks.metrics import DETECTION_METRICS, DetectionMetrics
from models.tasks.predictions import DetectionPrediction
from models.yolo import YoloModel, build_model, detection_head
from utils.batch import Batch, BoxSplit, ImageInfo, layout
from utils.config.hyperparameters import Augmentation, Hyperparameters, Recipes, keys_of
from utils.console import log
from utils.errors import plural
from utils.plots.drawing import draw_targets

MAX_CANDIDATES = 30_000  # most confident candidates of an image that are compared
FIRST_CANDIDATES_PER_DETECTION = 3  # first round's candidates, per detection that an image may have
CANDIDATE_GROWTH = 3  # factor of the number of candidates in each further round
MAX_TOGETHER = 1024  # largest `max_det` for `batch_nms`, which holds the remaining boxes in registers
# Pixels that separate the boxes of two classes, so that these never overlap; more than any image's side.
CLASS_OFFSET_PIXELS = 7680
EXPORTED_CANDIDATES_PER_DETECTION = 10  # pairs of box and class that an exported file compares
PADDING_GREY = 0.447  # value, in 0 to 1, around a scaled image: near the mean of ImageNet's channels
AUGMENTATIONS = ((1.0, False), (0.83, True), (0.67, False))  # scales of --augment's copies; mirrored; as in YOLOv5


class SuppressedView(NamedTuple):
    """The detections of an exported file with suppression in its graph."""

    detections: Tensor  # (b, m, 6): xyxy in pixels of the batch, confidence, class; padded with zeros
    counts: Tensor  # (b,) number of rows that are detections
    outputs: None = None


DetectionView: TypeAlias = BoxView | SuppressedView


# Suppression


class Detections(NamedTuple):
    """The k detections of an image, in falling confidence."""

    boxes: Tensor  # float32 (k, 6): xyxy in pixels of the batch, confidence, class
    extra: Tensor  # (k, extra): outputs after the class scores; of a `SuppressedView` the number of its row
    view: Tensor  # int64 (k,): number of the view that each detection comes from


@torch.no_grad()
def detect(views: Sequence[DetectionView], thresholds: Thresholds) -> list[Detections]:
    """Return the detections of each image, which do not depend on the other images.

    A box counts for every class whose objectness x score exceeds `conf_thres`. Among boxes of the same class that
    overlap by more than `iou_thres`, in any views, the most confident one remains. There is no time limit. If views
    have different numbers of extra outputs, shorter rows are padded with zeros. A `SuppressedView` is the only view.
    """
    detected: list[Detections] = []
    if isinstance(suppressed := views[0], SuppressedView):
        for detections, count in zip(suppressed.detections, suppressed.counts.tolist(), strict=True):
            rows = detections[: int(count)]
            is_allowed = (rows[:, 4] > thresholds.conf_thres) & _of_classes(rows[:, 5], thresholds)
            row = is_allowed.nonzero()[: thresholds.max_det]
            detected.append(Detections(rows[row[:, 0]], row, torch.zeros_like(row[:, 0])))
        return detected
    box_views = cast("Sequence[BoxView]", views)
    width = max(view.num_extra for view in box_views)
    for group in zip(*(view.candidates(thresholds.conf_thres) for view in box_views), strict=True):
        scores, image = torch.cat([part.scores for part in group]), torch.cat([part.image for part in group])
        extra = torch.cat([functional.pad(part.extra, (0, width - part.extra.shape[1])) for part in group])
        view = torch.cat([part.image.new_full((len(part.image),), number) for number, part in enumerate(group)])
        boxes, row, counts = suppress(Candidates(group[0].images, image, scores, extra), thresholds)
        detected += map(Detections, *(torch.split(column, counts) for column in (boxes, extra[row], view[row])))
    return detected


def suppress(candidates: Candidates, thresholds: Thresholds) -> tuple[Tensor, Tensor, list[int]]:
    """Return the detections (k, 6) of images, their rows in `candidates`, int64 (k,), and the number in each image."""
    device, is_fast = candidates.scores.device, thresholds.max_det <= MAX_TOGETHER
    nms = _batch_nms(thresholds.max_det, device) if device.type == "cuda" and is_fast else None
    scores, image = _allowed_scores(candidates.scores, thresholds), candidates.image
    offset = 0 if thresholds.agnostic_nms else CLASS_OFFSET_PIXELS
    confidence = scores[:, 5:] * scores[:, 4:5]
    row, label = (confidence > thresholds.conf_thres).nonzero(as_tuple=True)
    confidence, order = confidence[row, label].sort(descending=True, stable=True)
    image, by_image = image[row[order]].sort(stable=True)
    order = order[by_image]  # by image, then in falling confidence
    row = row[order]
    boxes = torch.cat((xywh_to_xyxy(scores[row, :4]), confidence[by_image, None], label[order, None].float()), 1)
    starts = torch.searchsorted(image, torch.arange(candidates.images + 1, device=image.device))
    planes = boxes[:, :4] + boxes[:, 5:] * offset
    remaining = (nms or nms_by_image)(planes, starts, thresholds.iou_thres, MAX_CANDIDATES, thresholds.max_det)
    is_box = remaining >= 0
    remaining = remaining[is_box]
    return boxes[remaining], row[remaining], is_box.sum(1).tolist()


@cache
def _batch_nms(max_det: int, device: torch.device) -> Callable[..., Tensor] | None:
    """Return `batch_nms` if Triton can compile it here, which also takes a C compiler."""
    with contextlib.suppress(Exception):
        from models.triton_kernels import batch_nms

        boxes, starts = torch.zeros(1, 4, device=device), torch.tensor((0, 1), device=device)
        batch_nms(boxes, starts, 0.5, MAX_CANDIDATES, max_det)
        return batch_nms
    return None


def nms_by_image(boxes: Tensor, starts: Tensor, iou_thres: float, most: int, max_det: int) -> Tensor:
    """Return what `batch_nms` returns.

    Only more confident boxes suppress a box, so a few hundred of the most confident usually suffice. If too few of them
    remain, less confident boxes are compared with the remaining ones: a suppressed box suppresses nothing.
    """
    from torchvision.ops import nms  # imported here because it takes over a second: errors in flags are reported before

    detections = torch.full((len(starts) - 1, max_det), -1, device=boxes.device)
    for image, (start, end) in zip(detections, pairwise(starts.tolist()), strict=True):
        remaining, compared, count = starts[:0], start, FIRST_CANDIDATES_PER_DETECTION * max_det
        while len(remaining) < max_det and compared < min(end, start + most):
            stop = min(end, start + min(count, most))
            remaining = torch.cat((remaining, torch.arange(compared, stop, device=boxes.device)))
            falling = -torch.arange(len(remaining), device=boxes.device, dtype=torch.float32)
            remaining = remaining[nms(boxes[remaining], falling, iou_thres)]
            compared, count = stop, count * CANDIDATE_GROWTH
        image[: len(remaining)] = remaining[:max_det]
    return detections


def _allowed_scores(scores: Tensor, thresholds: Thresholds) -> Tensor:
    """Return scores (n, 5 + classes) with 0 for classes that `classes` or `one_class` exclude."""
    if not thresholds.classes and not thresholds.one_class:
        return scores
    counts = torch.ones_like(scores, dtype=torch.bool)
    if thresholds.one_class:
        counts[:, 5:] = functional.one_hot(scores[:, 5:].argmax(1), scores.shape[1] - 5).bool()
    counts[:, 5:] &= _of_classes(torch.arange(scores.shape[1] - 5, device=scores.device), thresholds)
    return scores.where(counts, 0)


def _of_classes(labels: Tensor, thresholds: Thresholds) -> Tensor:
    """Return which labels are among `classes`, bool of the same shape."""
    if not thresholds.classes:
        return torch.ones_like(labels, dtype=torch.bool)
    return torch.isin(labels, torch.tensor(thresholds.classes, device=labels.device))


# From outputs to predictions


def boxes_in_files(detections: Sequence[Tensor], infos: Sequence[ImageInfo]) -> list[Tensor]:
    """Convert each image's detections (k, 6) from pixels of the batch to the file's, clipped, in fp64 on the CPU."""
    if not detections:
        return []
    counts = [len(image) for image in detections]
    image = torch.repeat_interleave(torch.tensor(counts))
    offset, scale, size = (
        torch.tensor([pair * 2 for pair in pairs], dtype=torch.float64)[image]
        for pairs in zip(*((info.placement.offset, info.placement.scale, info.size) for info in infos), strict=True)
    )
    rows = torch.cat(list(detections)).cpu()
    corners = ((rows[:, :4] - offset.float()) / scale).clamp(min=torch.zeros(4), max=size)
    return list(torch.split(torch.cat((corners, rows[:, 4:]), 1), counts))


def box_predictions(
    detections: Sequence[Tensor], batch: Batch, names: Mapping[int, str], thresholds: Thresholds
) -> list[DetectionPrediction]:
    """Return the prediction for each image of a batch, from its detections (k, 6) in falling confidence: xyxy in pixels
    of the batch, confidence, class."""
    infos: Sequence[ImageInfo] = batch.infos
    return [
        DetectionPrediction(info.image, info.path, names, info.size, boxes, info.rows, thresholds.iou_thres)
        for boxes, info in zip(boxes_in_files(detections, infos), infos, strict=True)
    ]


def scaled_copy(images: Tensor, scale: float, mirrored: bool, stride: int) -> tuple[Tensor, tuple[float, float]]:
    """Return a copy of images (b, c, h, w) in 0 to 1 for --augment, padded on the right and below to whole strides.

    Also returns the exact scale of width and height, after rounding to whole pixels.
    """
    if mirrored:
        images = images.flip(3)
    if scale == 1:
        return images, (1.0, 1.0)
    sides = images.shape[2:]
    height, width = (int(side * scale) for side in sides)
    below, right = (math.ceil(side / stride) * stride - side for side in (height, width))
    small = functional.interpolate(images, size=(height, width), mode="bilinear", align_corners=False)
    padded = functional.pad(small, (0, right, 0, below), value=PADDING_GREY)
    return padded, (width / sides[1], height / sides[0])


class DetectionPostprocess(Postprocess):
    """Run one or several models on views of images and detect the objects in them."""

    def __init__(self, names: Mapping[int, str], thresholds: Thresholds) -> None:
        self.names, self.thresholds = dict(names), thresholds

    def views(self, model: Model, inputs: Tensor, augment: bool) -> list[DetectionView]:
        """Run `model` on `inputs` or, if `augment`, on each of `AUGMENTATIONS`, the first of which is the identity.

        With `augment` the first view skips the coarsest level's boxes, and the last view the finest level's: the other
        views are better for objects of these sizes.
        """
        if not augment:
            outputs = model(inputs)
            if model.head is not None:
                return [HeadView(require_head(model), outputs)]
            if not isinstance(outputs, Tensor):
                return [SuppressedView(*outputs)]
            head = detection_head(model.yaml)
            return [DecodedView(head.scored(outputs) if head else outputs)]
        views = []
        for scale, mirrored in AUGMENTATIONS:
            images, exact_scale = scaled_copy(inputs, scale, mirrored, model.stride)
            mirrored_width = inputs.shape[3] if mirrored else 0
            views.append(HeadView(require_head(model), model(images), scale=exact_scale, mirrored_width=mirrored_width))
        strides = require_head(model).stride.tolist()
        if len(strides) > 1:
            views[0] = views[0]._replace(skipped_level=strides.index(max(strides)))
            views[-1] = views[-1]._replace(skipped_level=strides.index(min(strides)))
        return [*views]

    def __call__(self, views: Sequence[View], batch: Batch) -> list[DetectionPrediction]:
        """Return the detections of each image. The boxes of all views, of one or more models, suppress each other."""
        detected = detect(cast("Sequence[DetectionView]", views), self.thresholds)
        return box_predictions([image.boxes for image in detected], batch, self.names, self.thresholds)


# Modules of exported files


class DecodedDetector(nn.Module):
    """A detector with its decoding, in fp32."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.head = require_head(model)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, 3, h, w), in 0 to 1, to boxes (b, n, outputs), see `DetectionHead.decode`."""
        return self.head.decode(self.model(images))


class SuppressedDetector(nn.Module):
    """A `DecodedDetector` with non-maximum suppression. No shape depends on the number of detections.

    Detections are `max_det` for each image, at most `max_det_per_class` of a class, padded with rows of zeros.
    """

    def __init__(self, decoding: DecodedDetector, thresholds: Thresholds) -> None:
        import torchvision.ops  # noqa: F401  # imported here because torch.jit.trace fails if it traces the first import

        super().__init__()
        self.decoding, self.thresholds = decoding, thresholds

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Map images (b, 3, h, w), in 0 to 1, to detections (b, max_det, 6) and the number of each image's, int32 (b,).

        Detections are xyxy in pixels, confidence and class, in falling confidence.
        """
        return self.select(self.decoding.head.scored(self.decoding(images)))[:2]

    def select(self, decoded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return detections and numbers like `forward`, and the index of each detection's box, int64 (b, max_det), from
        boxes (b, n, 5 + classes) with objectness and class scores. The index of a padding row is any number below n."""
        boxes, label, confidence, box = self._candidates(decoded)
        confidence = confidence * self._not_suppressed(boxes, label, confidence)
        if self.thresholds.max_det_per_class < self.thresholds.max_det:
            confidence = confidence * self._within_class(label, confidence)
        best, order = confidence.topk(self.thresholds.max_det)
        rows = torch.cat((boxes, label[..., None]), 2)
        rows = rows.gather(1, order[..., None].expand(-1, -1, 5))
        valid = (best > 0).float()[..., None]
        detections = torch.cat((rows[..., :4], best[..., None], rows[..., 4:]), 2) * valid
        return detections, valid.sum((1, 2)).int(), box.gather(1, order).clamp(max=decoded.shape[1] - 1)

    def _candidates(self, decoded: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the k most confident pairs of box and class: xyxy (b, k, 4); class, confidence and box index (b, k).

        The pairs are in falling confidence; a confidence that does not exceed the threshold is set to 0.
        """
        count, classes = EXPORTED_CANDIDATES_PER_DETECTION * self.thresholds.max_det, decoded.shape[2] - 5
        # A small image has fewer boxes, hence the padding.
        decoded = torch.cat((decoded, decoded.new_zeros(1, 1, 1).expand(decoded.shape[0], count, classes + 5)), 1)
        # k boxes are enough: each of the k most confident pairs belongs to a box whose best pair is as confident.
        _, box = (decoded[..., 5:].amax(2) * decoded[..., 4]).topk(count)
        rows = decoded.gather(1, box[..., None].expand(-1, -1, classes + 5))
        confidence, pair = (rows[..., 5:] * rows[..., 4:5]).flatten(1).topk(count)
        row = torch.div(pair, classes, rounding_mode="floor")
        boxes = xywh_to_xyxy(rows[..., :4]).gather(1, row[..., None].expand(-1, -1, 4))
        confidence = confidence * (confidence > self.thresholds.conf_thres)
        return boxes, (pair - row * classes).float(), confidence, box.gather(1, row)

    def _not_suppressed(self, boxes: Tensor, label: Tensor, confidence: Tensor) -> Tensor:
        """Return which candidates are not suppressed by a more confident one, (b, k), 0 or 1.

        Offsets separate images vertically and classes horizontally, so that one call of `nms` serves all.
        """
        from torchvision.ops import nms

        count, k = label.shape
        image = torch.arange(count, device=label.device, dtype=boxes.dtype)[:, None].expand(-1, k)
        plane = torch.zeros_like(label) if self.thresholds.agnostic_nms else label
        offset = torch.stack((plane, image), 2) * CLASS_OFFSET_PIXELS
        remaining = nms((boxes + offset.repeat(1, 1, 2)).flatten(0, 1), confidence.flatten(), self.thresholds.iou_thres)
        return torch.zeros_like(confidence).flatten().index_fill(0, remaining, 1.0).view_as(confidence)

    def _within_class(self, label: Tensor, confidence: Tensor) -> Tensor:
        """Return which candidates are among the most confident of their class, (b, k), 0 or 1."""
        classes = torch.arange(self.decoding.head.nc, device=label.device)
        is_of_class = (label[..., None] == classes).float() * (confidence > 0)[..., None]
        rank = is_of_class.cumsum(1)
        return (is_of_class * (rank <= self.thresholds.max_det_per_class)).amax(2)


# Tasks


class BoxTask(Task):
    """Upright boxes from any network: metrics, predictions, inputs, pictures and COCO rows.

    The task of a network that is not built from rows of a model YAML derives from this class, and defines `recipe`,
    `recipes`, `loss_names`, `build_model`, `criterion`, `postprocess` (see `box_predictions`) and `export_module`.
    """

    metric_names: ClassVar[tuple[str, ...]] = DETECTION_METRICS
    prediction: ClassVar[type[Prediction] | None] = DetectionPrediction
    features = frozenset({"mixing", "augmentation", "padding", "detections", "boxes", "copies", "examples"})

    def metrics(self, drawn: frozenset[int] = frozenset()) -> DetectionMetrics:
        return DetectionMetrics(self.names, drawn)

    def inputs(self, batch: Batch) -> Tensor:
        """Return the images as float32 (b, channels, h, w) in 0 to 1."""
        largest = torch.iinfo(batch.images.dtype).max
        return batch.images.float(memory_format=layout(batch.images.device)).div_(largest)  # type: ignore[call-arg]

    def draw_batch(self, batch: Batch) -> Image:
        return draw_targets(batch.images.cpu().numpy(), batch.targets.cpu().numpy(), self.names)


class DetectionTask(BoxTask):
    """Object detection by the models of YOLOv5 and YOLOv9: rows of a model YAML, the last of them a `DetectionHead`."""

    recipe = Hyperparameters
    recipes = Recipes(trained="finetune", few="scratch-small", many="low", yolov5="low")
    official_weights = r"yolov5[nsmlx]6?\.pt|v9-[tsmc]\.pt"
    features = BoxTask.features | {"suppression"}
    heads: ClassVar[tuple[type[DetectionHead], ...]] = (Detect, DetectDFL)  # of its models; the usual one first
    export_modules = (DecodedDetector, SuppressedDetector)  # of exported files, without and with suppression

    def __init__(self, names: Mapping[int, str], hyp: Hyperparameters, label_smoothing: float = 0.0) -> None:
        super().__init__(names, hyp, label_smoothing)
        self.hyp = hyp
        self.anchors = round(hyp.anchors)  # number of anchors per level to search for; 0 keeps the YAML's anchors

    @classmethod
    def features_of(cls, yaml: Mapping[str, Any]) -> frozenset[str]:
        head = detection_head(yaml)
        return cls.features | (head.features if head else frozenset())

    def unused_keys(self, yaml: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the detector's keys that neither augmentation nor the head of a YAML's model reads.

        Keys that a derived task adds are not among them.
        """
        if not (head := detection_head(yaml)):
            return ()
        read = keys_of(Augmentation) | {"keep_head"} | head.hyperparameters
        return tuple(key for key in Hyperparameters.__dataclass_fields__ if key not in read)

    def model_yaml(self, yaml: Mapping[str, Any]) -> dict[str, Any]:
        """Return a model's YAML with the recipe's `anchors`, if set, and without `auxiliary` if `tal_aux` is 0."""
        changed = {**yaml, "anchors": self.anchors} if self.anchors else dict(yaml)
        if not self.hyp.tal_aux:
            changed.pop("auxiliary", None)
        return changed

    def fresh_tensors(self, from_yaml: bool) -> tuple[str, ...]:
        """Return `anchors` if the YAML or the hyperparameters replace the weight file's anchors."""
        return ("anchors",) if from_yaml or self.anchors else ()

    def build_model(self, yaml: Mapping[str, Any], imgsz: int, source: str = "the model YAML") -> YoloModel:
        """Build the model of a YAML for this task's classes and images of about `imgsz` pixels, at least 2 strides."""
        model = build_model(dict(yaml), nc=len(self.names), source=source, head=self.heads, imgsz=imgsz)
        model.names = dict(self.names)
        return model

    def loss_names_of(self, model: Model) -> tuple[str, ...]:
        return (detection_head(model.yaml) or self.heads[0]).loss_names

    def criterion(self, model: Model) -> Criterion:
        """Return the loss of `model`, as its head defines it; for an exported file every term is NaN."""
        if model.head is None:
            return UnavailableCriterion()
        return require_head(model).criterion(self.hyp, self.label_smoothing, model.imgsz, self.class_weights)

    def postprocess(self, model: Model, thresholds: Thresholds) -> DetectionPostprocess:
        return DetectionPostprocess(self.names, thresholds)

    def export_module(self, model: Model, suppression: Thresholds | None) -> nn.Module:
        """Return the one of `export_modules` that maps images to boxes, or to detections after suppression."""
        from models.ensemble import fuse  # only here, because training does not need it

        decoded, suppressed = self.export_modules
        decoding = decoded(fuse(model)).eval()
        return suppressed(decoding, suppression).eval() if suppression else decoding

    def keep_head(self, model: Model, state: Mapping[str, Tensor], names: Mapping[int, str]) -> str:
        """Copy boxes, objectness and classes of equal names from a weight file, if the key `keep_head` is set."""
        parts = head_tensors(model)
        fits = all(name not in state or state[name].shape == part.shape for name, part in parts.items())
        if not self.hyp.keep_head or (fits and dict(names) == self.names):
            return ""
        return require_head(model).keep(head_prefix(model), state, names, self.names)

    def adapt(self, model: Model, split: BoxSplit) -> None:
        require_head(model).adapt(model, split, self.hyp)

    def fit_classes(self, model: Model, batches: Iterable[Batch], new: Sequence[int]) -> None:
        """Fit the outputs of `new` classes of a head with anchors, if the key `fit_classes` is set; log how."""
        head = require_head(model)
        if not (self.hyp.fit_classes and isinstance(head, Detect) and len(self.names) > 1):
            return  # a loss with one class does not read its output
        inputs: list[Any] = []
        hook = head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
        model.eval()
        run = ((model(self.inputs(batch)), batch.targets) for batch in batches)
        cells = head.fit_classes(((inputs.pop(), targets) for _, targets in run), new, self.hyp.anchor_t)
        hook.remove()
        model.train()
        log(f"outputs of {plural(len(new), 'new class')} fitted to {cells:,} cells of training photos")
