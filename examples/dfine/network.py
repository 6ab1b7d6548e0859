"""The network: transformers' modules of D-FINE and RT-DETRv2, and what training them exactly needs besides.

transformers (Apache-2.0) takes a second of processor time to import; it is imported when a model is built.
"""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import grid_sample

from models.tasks.contract import Model
from models.yolo import whole_strides
from utils.errors import UserError, first_line

from .denoising import attention_mask, corners, noisy_targets

CLASSES = {"d_fine": "DFine", "rt_detr_v2": "RTDetrV2"}  # beginning of the names of transformers' classes
# Of configs without these keys: a background class score, and BatchNorm that learns without trained statistics.
DEFAULTS = {"initializer_bias_prior_prob": 0.01, "freeze_backbone_batch_norms": False}
LOGIT_LIMIT = 1e-5  # nearest that a coordinate comes to 0 and 1 before its logit is taken


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
        self.stride = max(self.config.feat_strides)
        self.imgsz = whole_strides(imgsz, self.stride)

    @property
    def head(self) -> nn.Module:
        """The class scores of the decoder's layers."""
        head: nn.Module = self.model.decoder.class_embed
        return head

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

        They are made of the targets (m, 7), see `noisy_targets`; by default there are none.
        """
        network, config = self.model, self.config
        maps = network.backbone.model(images).feature_maps
        maps = [project(each) for project, each in zip(network.encoder_input_proj, maps, strict=True)]
        device, dtype = images.device, maps[0].dtype
        with torch.inference_mode(False):  # these are cached, for training too
            for level, layer in zip(config.encode_proj_layers, network.encoder.aifi, strict=True):
                layer.position_embedding(*maps[level].shape[:1:-1], device, dtype)
        maps = network.encoder(maps).last_hidden_state
        maps = [*maps, *[maps[-1]] * (config.num_feature_levels - len(maps))]
        sources = [project(each) for project, each in zip(network.decoder_input_proj, maps, strict=True)]
        shapes = tuple((each.shape[2], each.shape[3]) for each in sources)
        memory = torch.cat([each.flatten(2).transpose(1, 2) for each in sources], 1)
        with torch.inference_mode(False):
            anchors, valid = network.generate_anchors(shapes, device=device, dtype=memory.dtype)
        features = network.enc_output(valid.to(memory.dtype) * memory)
        logits = network.enc_score_head(features)
        best = logits.amax(-1).topk(min(config.num_queries, memory.shape[1]), 1).indices[..., None]
        chosen = features.gather(1, best.expand(-1, -1, features.shape[2]))
        points = network.enc_bbox_head(chosen) + anchors.expand(len(images), -1, -1).gather(1, best.expand(-1, -1, 4))
        encoder_boxes, queries, mask = points.sigmoid(), chosen.detach(), None
        rows = used = best.new_zeros(len(images), 0)
        if self.training:
            targets = images.new_zeros(0, 7) if targets is None else targets.float()
            noise = config.label_noise_ratio, config.box_noise_scale
            noisy = noisy_targets(targets, len(images), config.num_denoising, config.num_labels, *noise)
            rows, used = noisy.rows, noisy.used
            queries = torch.cat((network.denoising_class_embed(noisy.labels).to(queries.dtype), queries), 1)
            points = torch.cat((noisy.boxes.logit(LOGIT_LIMIT).to(points.dtype), points), 1)
            mask = attention_mask(noisy.groups, chosen.shape[1], queries.dtype)
        decoded = network.decoder(
            inputs_embeds=queries,
            encoder_hidden_states=memory,
            encoder_attention_mask=mask,
            reference_points=points.detach(),
            spatial_shapes=torch.tensor(shapes),
            spatial_shapes_list=shapes,
        )
        heads = decoded.intermediate_logits, decoded.intermediate_reference_points
        refined = decoded.get("intermediate_predicted_corners"), decoded.get("initial_reference_points")
        encoded = logits.gather(1, best.expand(-1, -1, logits.shape[2])), encoder_boxes
        return Outputs(*heads, *refined, *encoded, rows, used.bool())


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


def build(yaml: Mapping[str, Any], names: Mapping[int, str], imgsz: int, source: str) -> DFine:
    """Build the model of a YAML, whose `config` has keys of transformers' config.json. Raises `UserError`."""
    config: Any = yaml.get("config")
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in CLASSES:
        raise UserError(f"{source}: `config` must have the model_type {' or '.join(CLASSES)}")
    modeling = modules_of(kind)
    try:
        settings = getattr(modeling, f"{CLASSES[kind]}Config")
        settings = settings(**{**DEFAULTS, **copy.deepcopy(config), "num_labels": len(names)})
        settings._attn_implementation = "eager"  # CUDA's fused kernels add in any order in the backward pass
        network = getattr(modeling, f"{CLASSES[kind]}ForObjectDetection")(settings).model
    except Exception as error:  # transformers checks types and some of the sizes
        raise UserError(f"{source}: this `config` makes no network ({first_line(error)}); correct it") from error
    return DFine(network, {**copy.deepcopy(dict(yaml)), "task": "dfine", "nc": len(names)}, names, imgsz)


def modules_of(kind: str) -> Any:
    """Import transformers' modules of a `model_type`. Raises `UserError` if it is not installed."""
    try:
        modeling: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except ImportError as error:
        reason = f"transformers cannot be imported ({first_line(error)})"
        raise UserError(f"{reason}; pip install -r examples/dfine/requirements-dfine.txt") from error
    os.environ.setdefault("TRANSFORMERS_DISABLE_TORCH_CHECK", "1")  # of shapes on the device, for which the host waits
    modeling.multi_scale_deformable_attention_v2 = deformable_attention
    return modeling


def deformable_attention(
    value: Tensor, shapes: Any, locations: Tensor, weights: Tensor, points: list[int], method: str = "default"
) -> Tensor:
    """Return the weighted sums (b, queries, heads * c) of values: transformers' function, with `sample`.

    Args:
        value: maps of all levels, (b, cells, heads, c)
        shapes: height and width of each level
        locations: (b, queries, heads, points of all levels, 2), x and y from 0 to 1; weights are alike
    """
    if method != "default":
        raise UserError(f"decoder_method: {method} is not supported; only `default` is")
    images, _, heads, channels = value.shape
    levels = value.permute(0, 2, 3, 1).flatten(0, 1).split([height * width for height, width in shapes], 2)
    grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1).split(points, 2)
    exact = value.is_cuda and torch.are_deterministic_algorithms_enabled()
    maps = [level.unflatten(2, shape) for level, shape in zip(levels, shapes, strict=True)]
    sampled = torch.cat([sample(*each, exact) for each in zip(maps, grids, strict=True)], 3)
    sums = (sampled * weights.transpose(1, 2).flatten(0, 1)[:, None]).sum(3)
    return sums.view(images, heads * channels, -1).transpose(1, 2).contiguous()


def sample(maps: Tensor, grid: Tensor, exact: bool) -> Tensor:
    """Return the values (n, c, k, p) of maps (n, c, h, w) at places (n, k, p, 2) from -1 to 1, 0 outside.

    The backward pass of torch's kernel adds in any order on a GPU; if `exact`, by an index, in the places' order.
    """
    if not exact:
        return grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    count, _, height, width = maps.shape
    x, y = ((grid[..., 0] + 1) * width - 1) / 2, ((grid[..., 1] + 1) * height - 1) / 2
    cells = maps.flatten(2).transpose(1, 2).flatten(0, 1)
    first = torch.arange(count, device=maps.device)[:, None, None] * (height * width)
    left, top, values = x.floor(), y.floor(), []
    for row, column in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        weight = torch.where(inside, (1 - (x - column).abs()) * (1 - (y - row).abs()), 0)
        index = first + (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).long()
        values.append(cells[index] * weight[..., None])
    return (values[0] + values[1] + values[2] + values[3]).permute(0, 3, 1, 2)
