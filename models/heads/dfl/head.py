"""`DetectDFL`, the anchor-free head of YOLOv9's detectors. Registered in models/yolo.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.heads.contract import DetectionHead
from models.heads.dfl.loss import LOSS_NAMES, DFLCriterion
from models.heads.dfl.views import BINS, SIDES, DFLView, decode
from models.layers import Conv
from models.tasks.contract import Criterion
from models.weights import same_names
from utils.config.hyperparameters import AlignmentKeys, keys_of
from utils.errors import plural

MAX_SCORE_CHANNELS = 128  # largest number of hidden channels that the number of classes may give a class branch
BIN_STEP = 0.5  # how much the initial logits of the distances decrease from bin to bin
EXPECTED_OBJECTS = 5  # objects per level that an untrained head's class scores predict in an image of 640 px


class DFLLevel(NamedTuple):
    """The raw outputs of one level."""

    sides: Tensor  # (b, 4 x 16, h, w): logits of the distances from a cell's centre to left, top, right and bottom
    scores: Tensor  # (b, classes, h, w): logits


class DFLBranches(nn.Module):
    """The convolutions of one level: (b, c1, h, w) to a `DFLLevel`.

    Args:
        box: number of hidden channels of the box branch
        score: number of hidden channels of the class branch
    """

    def __init__(self, c1: int, box: int, score: int, nc: int) -> None:
        super().__init__()
        self.anchor_conv = nn.Sequential(
            Conv(c1, box, 3), Conv(box, box, 3, groups=SIDES), nn.Conv2d(box, SIDES * BINS, 1, groups=SIDES)
        )
        self.class_conv = nn.Sequential(Conv(c1, score, 3), Conv(score, score, 3), nn.Conv2d(score, nc, 1))

    def forward(self, x: Tensor) -> DFLLevel:
        return DFLLevel(self.anchor_conv(x), self.class_conv(x))


class DetectDFL(DetectionHead):
    """An anchor-free head: for each cell, distributions of the distances to the box's sides, and class scores.

    It is trained with the generalized focal loss (arXiv 2006.04388) and task-aligned assignment (arXiv 2108.07755), as
    in YOLOv9 (arXiv 2402.13616).

    Args:
        nc: number of classes
        channels: number of channels of each input map
        score_channels: number of hidden channels of the class branches; if None, the larger of the first map's channels
            and min(2 nc, 128)
    """

    description = "detection head"
    example = "[[15, 18, 21], 1, DetectDFL, [nc]]"
    loss_names = LOSS_NAMES
    hyperparameters = keys_of(AlignmentKeys)
    takes_anchors = False

    def __init__(self, nc: int, channels: Sequence[int], score_channels: int | None = None) -> None:
        super().__init__()
        self.nc = nc
        box = max(math.ceil(channels[0] // 4 / SIDES) * SIDES, SIDES * BINS)
        score = score_channels or max(channels[0], min(2 * nc, MAX_SCORE_CHANNELS))
        self.register_buffer("stride", torch.ones(len(channels)), persistent=False)
        self.heads = nn.ModuleList(DFLBranches(c1, box, score, nc) for c1 in channels)

    def forward(self, maps: Sequence[Tensor]) -> list[DFLLevel]:
        """Map (b, channels, h, w) of each level to its `DFLLevel`."""
        return [branches(x) for branches, x in zip(self.heads, maps, strict=True)]

    @torch.no_grad()
    def placed(self, strides: Sequence[float]) -> None:
        """Set the levels' strides in pixels, and the biases of the last convolutions.

        Class scores predict 5 objects per level, and boxes are 3 strides wide and high. Equal biases would make them 15
        strides wide: they overlap little with small objects, whose weight in the loss, the overlap, would be near 0.
        """
        self.stride.copy_(torch.tensor(strides))
        for branches, stride in zip(self.heads, self.stride, strict=True):
            branches.get_parameter("anchor_conv.2.bias").copy_(-BIN_STEP * torch.arange(BINS).repeat(SIDES))
            bias = branches.get_parameter("class_conv.2.bias")
            bias.copy_(torch.log(EXPECTED_OBJECTS / self.nc / (640 / stride) ** 2).expand_as(bias))

    def criterion(
        self, hyp: AlignmentKeys, label_smoothing: float, imgsz: int, class_weights: Sequence[float] = ()
    ) -> Criterion:
        """Return YOLOv9's loss; its class targets are soft already, so `label_smoothing` changes nothing."""
        return DFLCriterion(hyp, self, class_weights)

    def view(self, outputs: list[DFLLevel], more: int = 0) -> DFLView:
        """Return the plain view of raw outputs; `more` is ignored, as no task adds outputs to this head."""
        return DFLView(outputs, self.stride.to(outputs[0].sides.device))

    def decode(self, outputs: list[DFLLevel], more: int = 0) -> Tensor:
        """Return all boxes, (b, n, 4 + classes): xywh in pixels, class scores; by level, row, column."""
        return decode(DFLView(outputs, self.stride.float()))

    @staticmethod
    def scored(decoded: Tensor) -> Tensor:
        """Return boxes (b, n, 4 + classes) with an objectness of 1, (b, n, 5 + classes)."""
        return torch.cat((decoded[..., :4], torch.ones_like(decoded[..., :1]), decoded[..., 4:]), -1)

    @torch.no_grad()
    def keep(self, prefix: str, state: Mapping[str, Tensor], names: Mapping[int, str], new: Mapping[int, str]) -> str:
        """Copy the class rows of a file's head into this one, and return in words which were copied, or why none were.

        `transfer` has already loaded the box branches and, if they are as wide, the first layers of the class branches.
        Each row of the last layer is copied from the class of the same name, whatever its number; other classes are
        left unchanged.

        Args:
            prefix: prefix of the head's tensors in `state`
            state: the file's tensors, by name
            names: the file's class names, by number
            new: the model's class names, by number
        """
        same, taken = same_names(names, new), 0
        for number, branches in enumerate(self.heads):
            targets = [branches.get_parameter(f"class_conv.2.{part}") for part in ("weight", "bias")]
            sources = [state.get(f"{prefix}.heads.{number}.class_conv.2.{part}") for part in ("weight", "bias")]
            pairs = [
                (target, source)
                for target, source in zip(targets, sources, strict=True)
                if source is not None and source.shape[1:] == target.shape[1:] and len(source) >= len(names)
            ]
            if len(pairs) == len(targets):
                taken += 1
                for target, source in pairs:
                    for row, of_file in same.items():
                        target[row] = source[of_file]
        if not taken:
            return "from its head the boxes, not the classes: the layers before them differ"
        return f"from its head the boxes and {len(same) or 'none'} of {plural(len(new), 'class')}"
