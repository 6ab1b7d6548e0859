"""The network: transformers' modules of D-FINE and RT-DETRv2, and what training them exactly needs besides.

transformers (Apache-2.0) takes seconds of processor time to import; it is imported when a model is built.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from models.tasks.contract import Model, device_constant
from models.yolo import whole_strides
from utils.errors import UserError, first_line

from .denoising import corners, denoising_queries

CLASSES = {"d_fine": "DFine", "rt_detr_v2": "RTDetrV2"}  # beginning of the names of transformers' classes


class Outputs(NamedTuple):
    """The outputs of all decoder layers, for d denoising and q other queries.

    D-FINE's first layer counts twice, before and after its refinement: the last `refined` of `layers` are refined.
    """

    logits: Tensor  # (b, layers, d + q, classes)
    boxes: Tensor  # (b, layers, d + q, 4): cxcywh from 0 to 1
    distances: Tensor | None  # (b, refined, d + q, 4 * bins): logits of each edge's distance; None for RT-DETRv2
    references: Tensor | None  # (b, refined, d + q, 4): boxes that the distances are measured from
    encoder_logits: Tensor  # (b, q, classes)
    encoder_boxes: Tensor  # (b, q, 4)
    rows: Tensor  # int64 (b, d): the target of a positive denoising query, else -1
    used: Tensor  # bool (b, d): denoising queries that count


class DFine(Model):
    """A detector that predicts a fixed number of boxes, without suppression.

    The network's parameters have the names that they have in transformers' files.
    """

    model: Any
    config: Any

    def __init__(self, network: nn.Module, yaml: dict[str, Any], names: Mapping[int, str], imgsz: int) -> None:
        super().__init__()
        self.model, self.config = network, network.config
        self.yaml, self.names = yaml, dict(names)
        self.queries = self.config.num_queries
        self.stride = max(self.config.feat_strides)
        self.imgsz = whole_strides(imgsz, self.stride)

    @property
    def head(self) -> nn.Module:
        """The class scores of the decoder's layers."""
        return cast(nn.Module, self.model.decoder.class_embed)

    def train(self, mode: bool = True) -> DFine:
        """Set the mode; the decoder returns all layers in both, and the encoder does not wait for the device."""
        super().train(mode)
        self.model.decoder.training = True
        for module in self.model.encoder.modules():
            if type(module).__name__.endswith("EncoderLayer"):
                module.training = False
        return self

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Outputs:
        """Run the network on images (b, 3, h, w) in 0 to 1; in training with denoising queries.

        They are made of the targets (m, 7), see `denoising_queries`; by default there are none.
        """
        height, width = map(int, images.shape[2:])
        cells = sum((height // stride) * (width // stride) for stride in self.config.feat_strides)
        self.config.num_queries = min(self.queries, cells)
        targets = images.new_zeros(0, 7) if targets is None else targets.float()
        with_gradients = torch.is_grad_enabled()
        # The network caches tensors: those that a validation makes must be usable in training.
        with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
            outputs = self.model(images, labels=(targets, len(images)))
        layers = outputs.intermediate_logits, outputs.intermediate_reference_points
        edges = outputs.intermediate_predicted_corners, outputs.initial_reference_points
        nothing = images.new_zeros(len(images), 0)
        denoising = outputs.denoising_meta_values or (nothing.long(), nothing.bool())
        return Outputs(*layers, *edges, outputs.enc_topk_logits, outputs.enc_topk_bboxes, *denoising)


class Scored(nn.Module):
    """The module of exported files: images to (b, q, 4 + classes), boxes as xyxy in pixels and confidences."""

    def __init__(self, model: DFine) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Map images (b, 3, h, w), in 0 to 1, to boxes and confidences."""
        outputs = self.model(images)
        return torch.cat((pixel_boxes(outputs, images), outputs.logits[:, -1].float().sigmoid()), 2)


def pixel_boxes(outputs: Outputs, images: Tensor) -> Tensor:
    """Return the last layer's boxes, float32 (b, q, 4), xyxy in pixels of the images."""
    height, width = images.shape[2:]
    left, top, right, bottom = corners(outputs.boxes[:, -1].float()).unbind(-1)
    return torch.stack((left * width, top * height, right * width, bottom * height), -1)


@cache
def modules_of(kind: str) -> Any:
    """Import transformers' modules of a `model_type`, with our functions in place of two. Raises `UserError`."""
    try:
        modeling: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except ImportError as error:
        reason = f"transformers cannot be imported ({first_line(error)})"
        raise UserError(f"{reason}; pip install -r examples/dfine/requirements-dfine.txt") from error
    os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # of shapes on the device, for which the host waits
    attention = modeling.multi_scale_deformable_attention_v2
    modeling.multi_scale_deformable_attention_v2 = partial(deformable_attention, attention)
    modeling.get_contrastive_denoising_training_group = denoising_queries
    return modeling


def deformable_attention(attention: Callable[..., Tensor], value: Tensor, *arguments: Any) -> Tensor:
    """Return the result of transformers' `attention`; on a GPU by `exact_attention` if determinism is asked for."""
    if arguments[-1] == "default" and value.is_cuda and torch.are_deterministic_algorithms_enabled():
        return exact_attention(value, *arguments[:-1])
    return attention(value, *arguments)


def exact_attention(value: Tensor, shapes: Any, locations: Tensor, weights: Tensor, points: list[int]) -> Tensor:
    """Return the weighted sums (b, queries, heads * c) of values between cells, 0 outside of the maps.

    The backward pass of torch's `grid_sample` adds in any order on a GPU, that of an index in the places' order.

    Args:
        value: maps of all levels, (b, cells, heads, c)
        shapes: height and width of each level
        locations: (b, queries, heads, points of all levels, 2), x and y from 0 to 1; weights are alike
        points: number of points of each level
    """
    levels, first_cell = [], 0
    for (height, width), count in zip(shapes, points, strict=True):
        levels += [(height, width, first_cell)] * count
        first_cell += height * width
    heights, widths, firsts = device_constant(tuple(levels), value.device).unbind(1)
    x, y = locations[..., 0] * widths - 0.5, locations[..., 1] * heights - 0.5
    left, top, sums = x.floor(), y.floor(), []
    image = torch.arange(len(value), device=value.device)[:, None, None, None]
    head = torch.arange(value.shape[2], device=value.device)[:, None]
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        inside = (row >= 0) & (row < heights) & (column >= 0) & (column < widths)
        cell = torch.where(inside, firsts + row * widths + column, 0).long()
        share = torch.where(inside, (1 - (x - column).abs()) * (1 - (y - row).abs()), 0) * weights
        sums.append((value[image, cell, head] * share[..., None]).sum(3))
    return (sums[0] + sums[1] + sums[2] + sums[3]).flatten(2).to(value.dtype)
