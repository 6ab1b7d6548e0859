"""Folding BatchNorm into convolutions: the same outputs from fewer layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from models.ensemble import fuse
from models.layers import RepConv
from models.loading import transfer
from models.weights import read_weights
from models.yolo import YoloModel, build_model
from tests.making import tiny_anchor_free, tiny_detector


def with_statistics(model: YoloModel) -> YoloModel:
    """Draw the statistics and weights of BatchNorm, as after training."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)
    return model.eval()


def batch_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def largest_difference(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference between maps, relative to the largest number of each map."""
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(one, other, strict=True))


@torch.no_grad()
def test_outputs_are_equal_up_to_rounding() -> None:
    model = with_statistics(build_model(tiny_detector()))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fused = fuse(model)
    images = torch.rand(2, 3, 32, 48)
    assert largest_difference(model(images), fused(images)) < 1e-5
    assert (batch_norms(model), batch_norms(fused)) == (3, 0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_in_a_chain_only_batch_norm_after_a_convolution_is_folded() -> None:
    chain = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).eval()
    for k in (0, 2, 4):
        nn.init.uniform_(chain[k].running_var, 0.5, 2)
    fused, images = fuse(chain), torch.randn(2, 3, 5, 5)
    torch.testing.assert_close(chain(images), fused(images))
    assert [type(layer).__name__ for layer in fused] == ["BatchNorm2d", "Conv2d", "Identity", "ReLU", "BatchNorm2d"]


def test_weights_keep_their_memory_format() -> None:
    fused = fuse(build_model(tiny_detector()).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    assert fused.model[1].conv.weight.is_contiguous(memory_format=torch.channels_last)


@torch.no_grad()
def test_official_weights_on_photos(shared: Path) -> None:
    files = sorted((shared / "data" / "coco128").rglob("*.jpg"))[:4]
    pixels = np.stack([np.asarray(Image.open(file).convert("RGB").resize((256, 320))) for file in files])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    weights = read_weights(shared / "weights" / "yolov5n.pt")
    assert weights.model is not None
    model = build_model(weights.model, nc=80)
    transfer(model, weights.state)
    fused = fuse(model.eval())
    assert batch_norms(fused) == 0
    assert largest_difference(model(images), fused(images)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("options", [(3, 1, 1), (5, 2, 2), (1, 1, 1)])  # kernel, stride, groups
def test_both_convolutions_of_a_rep_conv_become_one(options: tuple[int, int, int]) -> None:
    layer = with_statistics(RepConv(4, 6, *options))
    fused, images = fuse(layer), torch.rand(2, 4, 12, 8)
    torch.testing.assert_close(fused(images), layer(images))
    assert sum(isinstance(module, nn.Conv2d) for module in fused.modules()) == 1
    assert batch_norms(fused) == 0


@torch.no_grad()
def test_an_anchor_free_detector() -> None:
    model = with_statistics(build_model(tiny_anchor_free()))
    fused, images = fuse(model), torch.rand(2, 3, 32, 48)
    for one, other in zip(fused(images), model(images), strict=True):
        assert largest_difference(list(one), list(other)) < 1e-5
    assert not any(module.conv2 for module in fused.modules() if isinstance(module, RepConv))
