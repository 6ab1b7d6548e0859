"""`DetectionHead`, the last layer of a detector, and what all heads share: box arithmetic, views, the loss on a GPU.

A kind of head is a module beside this one (layer, loss, assignment, decoding) and a line in models/yolo.py.
Called by models/tasks/detect.py and segment.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from models.layers import Head
from models.tasks.contract import Criterion, Function, LossTerms, Model, device_constant
from models.weights import same_names
from utils.batch import Batch, BoxSplit
from utils.errors import plural

EPSILON = 1e-7  # keeps divisors above 0
VECTOR_NUMBERS = 64  # at least as many as any CPU's vector register holds
SPAN_NUMBERS = 2**14  # a multiple of VECTOR_NUMBERS below torch's threshold for several threads
IMAGES_AT_ONCE = 64  # on a GPU; bounds the memory
MIN_TARGETS = 16  # of a padded batch
OUTSIDE = (0.0, 0.0, -1.0, -1.0, 0.0, 0.0)  # image, class, xywh of a target that matches nothing


def xywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Convert boxes from centre and size to corners, (..., 4) each."""
    centre, half = boxes[..., :2], boxes[..., 2:4] / 2
    return torch.cat((centre - half, centre + half), -1)


def xyxy_to_xywh(boxes: Tensor) -> Tensor:
    """Convert boxes from corners to centre and size, (..., 4) each."""
    low, high = boxes[..., :2], boxes[..., 2:4]
    return torch.cat(((low + high) / 2, high - low), -1)


def complete_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the CIoU (n,) of paired boxes, xywh, (n, 4) each; at most 1. No gradient passes through its weight alpha.

    Zheng et al., "Distance-IoU Loss" (AAAI 2020), equations 7 to 11.
    """
    (ax, ay, aw, ah), (bx, by, bw, bh) = a.unbind(-1), b.unbind(-1)
    hull_w = torch.maximum(ax + aw / 2, bx + bw / 2) - torch.minimum(ax - aw / 2, bx - bw / 2)
    hull_h = torch.maximum(ay + ah / 2, by + bh / 2) - torch.minimum(ay - ah / 2, by - bh / 2)
    intersection = (aw + bw - hull_w).clamp(min=0) * (ah + bh - hull_h).clamp(min=0)
    iou = intersection / (aw * ah + bw * bh - intersection + EPSILON)
    distance = ((ax - bx) ** 2 + (ay - by) ** 2) / (hull_w**2 + hull_h**2 + EPSILON)
    shape = 4 / math.pi**2 * (torch.atan(bw / bh.clamp(min=EPSILON)) - torch.atan(aw / ah.clamp(min=EPSILON))) ** 2
    with torch.no_grad():
        alpha = shape / (shape - iou + 1 + EPSILON)
    return iou - distance - alpha * shape


def least_logit(probability: float) -> float:
    """Return a nearly exact lower bound of the logits whose sigmoid in fp32 exceeds `probability`.

    It may be applied to objectness, which no confidence exceeds, and to class scores that are confidences.
    """
    bound = min(probability, 1.0) * (1 - 1e-5)
    return math.log(bound / (1 - bound)) if bound > 0 else -math.inf


def row_sigmoids(parts: Sequence[Tensor]) -> Tensor:
    """Return the sigmoids of parts (k, outputs), concatenated, in fp32.

    A CPU computes slightly different sigmoids for the last numbers of a thread's share, which do not fill a vector
    register. To make a sigmoid independent of its position, one thread computes each span, with spare rows at the end.
    """
    size = parts[0].shape[1]
    spare = parts[0].new_zeros(math.ceil(VECTOR_NUMBERS / size), size)
    rows = torch.cat((*parts, spare)).float()
    for span in torch.split(rows.view(-1), SPAN_NUMBERS if rows.device.type == "cpu" else rows.numel()):
        span.sigmoid_()
    return rows[: -len(spare)]


def image_groups(outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Iterate over parts of tensors (b, ...): many images for a GPU, as calls cost time; one for a CPU's cache."""
    count = 1 if outputs[0].device.type == "cpu" else IMAGES_AT_ONCE
    for first in range(0, len(outputs[0]), count):
        yield [tensor[first : first + count] for tensor in outputs]


class Candidates(NamedTuple):
    """The boxes of successive images that may exceed the confidence threshold; those of an image in a fixed order."""

    images: int  # number of images
    image: Tensor  # int64 (k,): number of each box's image, from 0
    scores: Tensor  # float32 (k, 5 + classes): xywh in pixels of the batch, objectness, class scores
    extra: Tensor  # float32 (k, extra): the boxes' other outputs, such as mask coefficients


class HeadView(NamedTuple):
    """The raw outputs of a head for a batch of images, or for scaled or mirrored copies of them (--augment)."""

    head: DetectionHead
    outputs: Any  # the input of the criterion
    num_extra: int = 0  # number of a box's outputs after its class scores
    scale: tuple[float, float] = (1.0, 1.0)  # width and height of the model's images, each as a share of the batch's
    mirrored_width: int = 0  # width of the batch in pixels if the images are mirrored, else 0
    skipped_level: int | None = None  # number of a level whose boxes are left out

    def candidates(self, conf_thres: float) -> Iterator[Candidates]:
        return self.head.candidates(self, conf_thres)


class DecodedView(NamedTuple):
    """The boxes of an exported file."""

    boxes: Tensor  # (b, n, 5 + classes + extra): xywh in pixels of the batch, objectness, class scores, other outputs
    outputs: None = None  # exported files return no raw maps for a loss
    num_extra: int = 0

    def candidates(self, conf_thres: float) -> Iterator[Candidates]:
        end = self.boxes.shape[2] - self.num_extra
        for (group,) in image_groups([self.boxes]):
            image, box = (group[..., 4] > conf_thres).nonzero(as_tuple=True)
            rows = group[image, box].float()
            yield Candidates(len(group), image, rows[:, :end], rows[:, end:])


BoxView: TypeAlias = HeadView | DecodedView


class DetectionHead(Head):
    """The last layer of a detector, with one input map per level.

    Its forward takes the list of maps, and the criterion's hints if there are any, and returns outputs of any type.
    """

    loss_names: ClassVar[tuple[str, ...]]  # the criterion's terms: columns of results.csv after train/ and val/
    # The keys of a hyperparameter YAML that `criterion` and `adapt` read; others are refused as flags.
    hyperparameters: ClassVar[frozenset[str]] = frozenset()
    features: ClassVar[frozenset[str]] = frozenset()  # features beyond the task's, see `Task.features`
    takes_anchors: ClassVar[bool]  # whether model YAMLs with it need `anchors`
    last_layers: ClassVar[str]  # name of the last convolution of a `level`, whose outputs `keep` copies
    box_outputs: ClassVar[int] = 0  # number of its outputs, for each anchor, before the class scores
    nc: int  # number of classes
    na: int = 1  # number of anchors of a cell
    stride: Tensor  # buffer (levels,), pixels per cell

    @abstractmethod
    def set_strides(self, strides: Sequence[float]) -> None:
        """Set the levels' strides in pixels, and from them the biases that training from scratch starts with."""

    @abstractmethod
    def criterion(self, hyp: Any, label_smoothing: float, imgsz: int, class_weights: Sequence[float] = ()) -> Criterion:
        """Return the loss of the head's raw outputs, by the keys of `hyp` in `hyperparameters`.

        `class_weights` are the weights of objects by class number; empty if all count the same.
        """

    @abstractmethod
    def candidates(self, view: HeadView, conf_thres: float) -> Iterator[Candidates]:
        """Iterate over the `image_groups` of boxes whose confidence, objectness x score, may exceed `conf_thres`."""

    @abstractmethod
    def decode(self, outputs: Any, num_extra: int = 0) -> Tensor:
        """Return all boxes of raw outputs, float32 (b, n, outputs of a box), as exported files do.

        A box is xywh in pixels, objectness if the head has it, class scores, `num_extra` other outputs. Boxes are
        ordered by level, then row and column.
        """

    @staticmethod
    def scored(decoded: Tensor) -> Tensor:
        """Add objectness to boxes of `decode` that lack it: (b, n, 5 + classes + extra), as suppression needs."""
        return decoded

    @torch.no_grad()
    def keep(self, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]) -> str:
        """Copy the outputs that fit from the head of a weight file for other classes; return in words which.

        Of each anchor the first `box_outputs` are copied, a class from the class of the same name, whatever its number,
        and the outputs after the classes if the file has as many; other classes are left unchanged. `prefix` is that of
        the head's tensors in `state`, the file's; `names` are the file's class names, `new` the model's.
        """
        same, start, copied = same_names(names, new), self.box_outputs, 0
        for level in range(len(self.stride)):
            layer = self.last_layers.format(level=level)
            tensors = self.get_submodule(layer).named_parameters()
            pairs = [(target, state.get(f"{prefix}.{layer}.{part}", torch.zeros(0))) for part, target in tensors]
            fits = (source.shape[1:] == target.shape[1:] and not len(source) % self.na for target, source in pairs)
            if not all(fits) or any(len(source) < self.na * (start + len(names)) for _, source in pairs):
                continue
            copied += 1
            for pair in pairs:
                target, source = (tensor.reshape(self.na, -1, *tensor.shape[1:]) for tensor in pair)
                target[:, :start] = source[:, :start]
                for number, file_number in same.items():
                    target[:, start + number] = source[:, start + file_number]
                others, file_others = target[:, start + self.nc :], source[:, start + len(names) :]
                if names and others.shape == file_others.shape:
                    others.copy_(file_others)
        if not copied:
            return "head: no class outputs kept, because the layers before them differ"
        kept = "box and objectness outputs" if start else "box outputs"
        return f"head: {kept} and classes of the same names kept, {plural(len(new) - len(same), 'class output')} new"

    def adapt(self, model: Model, split: BoxSplit, hyp: Any) -> None:
        """Adapt the head, and the model's YAML, to the training boxes before the first step; log how."""


def require_head(model: Model) -> DetectionHead:
    """Return the head of a detector. Raises TypeError if it has none, as with an exported file."""
    if not isinstance(model.head, DetectionHead):
        raise TypeError(f"{type(model).__name__} has no detection head")
    return model.head


class BoxCriterion(Criterion):
    """The loss of a detector, with YOLOv5's objective. Targets outside of the images must not change it."""

    def for_gpu(self, captured: Callable[[Function], Function]) -> Criterion:
        """Return the loss with padded targets, but a class derived from one of ours, which may read more, as it is."""
        return PaddedCriterion(self, captured) if BoxCriterion in type(self).__bases__ else self

    def objective(self, means: Tensor, images: int) -> Tensor:
        return means.sum() * images

    def weight(self, batch: Batch) -> float:
        """Return 1: YOLOv5 weights all batches of a validation equally."""
        return 1.0


def padded(targets: Tensor) -> Tensor:
    """Return targets (m, 6) padded to the next larger of the lengths 16, 24, 32, 48, 64 ..., with boxes that match
    nothing: they have no size and lie outside of image 0."""
    power = 1 << max(len(targets).bit_length(), 4)
    length = power * 3 // 4 if len(targets) < power * 3 // 4 and power > MIN_TARGETS else power
    box = device_constant(OUTSIDE, targets.device)
    return torch.cat((targets, box.expand(length - len(targets), -1)))


class PaddedCriterion(BoxCriterion):
    """A detector's loss on a GPU: batches have one of a few numbers of targets, so that kernels can be captured.

    They have so whether or not kernels are captured, because a sum over more targets is rounded differently.
    """

    def __init__(self, criterion: BoxCriterion, captured: Callable[[Function], Function]) -> None:
        self.criterion, self.captured = criterion, captured
        self.objective, self.weight = criterion.objective, criterion.weight  # type: ignore[method-assign]
        self.functions: dict[torch.Size, tuple[Function, Function]] = {}  # hints and loss, by the shape of the images
        self.min_divisor = 1.0  # of the last loss

    def hints(self, batch: Batch) -> tuple[Tensor, ...]:
        if type(self.criterion).hints is Criterion.hints:
            return ()
        return self._functions(batch)[0](padded(batch.targets))

    def __call__(self, outputs: Any, batch: Batch) -> LossTerms:
        sums, counts, weights = self._functions(batch)[1](outputs, padded(batch.targets))
        return LossTerms(sums, counts, weights, self.min_divisor)

    def _functions(self, batch: Batch) -> tuple[Function, Function]:
        shape = batch.images.shape
        if shape not in self.functions:
            like = Batch(torch.empty(shape, device="meta"), batch.targets, ())  # only the shape of its images is read

            def hints(targets: Tensor) -> tuple[Tensor, ...]:
                return self.criterion.hints(replace(like, targets=targets))

            def loss(outputs: Any, targets: Tensor) -> tuple[Tensor, ...]:
                terms = self.criterion(outputs, replace(like, targets=targets))
                self.min_divisor = terms.min_divisor
                return terms.sums, terms.counts, terms.weights

            self.functions[shape] = self.captured(hints), self.captured(loss)
        return self.functions[shape]


class UnavailableCriterion(BoxCriterion):
    """The loss of an exported file, which returns no raw outputs, so that it is never called and every term is NaN."""

    def __call__(self, outputs: None, batch: Batch) -> LossTerms:
        raise NotImplementedError
