"""Layers: output shapes, state-dict keys, and the numbers that the official weights depend on."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from models import layers
from models.heads.anchors import Detect, Segment

TWICE = "m.0.cv1 m.0.cv2 m.1.cv1 m.1.cv2"
C3GHOST = "cv1 cv2 cv3 " + " ".join(f"m.{n}.conv.{k}.cv{c}" for n in (0, 1) for k in (0, 2) for c in (1, 2))
IN_TR = [*(f"{name}.weight" for name in "qkv"), "ma.in_proj_weight", "ma.in_proj_bias", "ma.out_proj.weight"]
IN_TR += ["ma.out_proj.bias", "fc1.weight", "fc2.weight"]
C3TR = "cv1 cv2 cv3 m.linear.weight m.linear.bias " + " ".join(f"m.tr.{n}.{name}" for n in (0, 1) for name in IN_TR)


@pytest.mark.parametrize(
    ("layer", "shape", "names"),
    [
        (layers.Conv(4, 6, 3, dilation=2), (2, 6, 16, 16), ""),
        (layers.DWConv(4, 6, 3), (2, 6, 16, 16), ""),
        (layers.Focus(4, 6, 3), (2, 6, 8, 8), "conv"),
        (layers.RepConv(4, 6, 5, 2, 2), (2, 6, 8, 8), ""),
        (layers.ELAN(4, 6, 1, 8, 2), (2, 6, 16, 16), ""),
        (layers.GhostConv(4, 6, 3, 2), (2, 6, 8, 8), "cv1 cv2"),
        (layers.BottleneckCSP(4, 6, 2), (2, 6, 16, 16), f"cv1 cv2.weight cv3.weight cv4 bn {TWICE}"),
        (layers.C3Ghost(4, 8, 2), (2, 8, 16, 16), C3GHOST),
        (layers.C3TR(4, 8, 2), (2, 8, 16, 16), C3TR),
        (layers.Proto(4, 8, 3), (2, 3, 32, 32), "cv1 cv2 cv3"),
    ],
)
def test_output_shape_and_names_of_tensors(layer: nn.Module, shape: tuple[int, ...], names: str) -> None:
    """Names in the state dicts of YOLOv5's checkpoints, without those inside Conv and BatchNorm."""
    assert layer(torch.randn(2, 4, 16, 16)).shape == shape
    keys = [re.sub(r"\.conv\.weight$|(\bbn)\.\w+$|\.bn\.\w+$", r"\1", key) for key in layer.state_dict()]
    assert not names or list(dict.fromkeys(key.replace("conv.weight", "conv") for key in keys)) == names.split()


def test_skipped_norms_are_those_inside_of_conv() -> None:
    chain = nn.Sequential(layers.Conv(3, 4, 3), nn.BatchNorm2d(4)).eval()
    for norm in (chain[0].bn, chain[1]):
        norm.running_mean.fill_(1)
    images = torch.rand(1, 3, 8, 8)
    expected = chain[1](nn.functional.silu(chain[0].conv(images)))
    layers.without_batchnorm(chain)
    assert torch.equal(chain(images), expected)


def test_sppf_equals_spp() -> None:
    slow, fast = layers.SPP(4, 6).eval(), layers.SPPF(4, 6).eval()
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(1, 4, 20, 20)
    torch.testing.assert_close(slow(x), fast(x))


@torch.no_grad()
def test_focus_equals_a_convolution_of_kernel_6_and_stride_2() -> None:
    focus, whole = layers.Focus(3, 5, 3).eval(), layers.Conv(3, 5, 6, 2, 2).eval()
    for part, (row, column) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        whole.conv.weight[..., row::2, column::2] = focus.conv.conv.weight[:, 3 * part : 3 * part + 3]
    x = torch.randn(2, 3, 8, 12)
    torch.testing.assert_close(focus(x), whole(x), rtol=1e-4, atol=1e-5)


def test_half_of_a_ghost_convolution_is_computed_from_the_other_half() -> None:
    ghost = layers.GhostConv(4, 6, 3).eval()
    x = torch.randn(2, 4, 8, 8)
    assert (ghost.cv2.conv.groups, ghost.cv2.conv.kernel_size) == (3, (5, 5))
    assert torch.equal(ghost(x), torch.cat((ghost.cv1(x), ghost.cv2(ghost.cv1(x))), 1))


def test_bottleneck_csp_normalises_both_halves_together() -> None:
    csp = layers.BottleneckCSP(4, 6, 2).eval()
    nn.init.uniform_(csp.bn.weight)
    x = torch.randn(2, 4, 8, 8)
    halves = csp.bn(torch.cat((csp.cv3(csp.m(csp.cv1(x))), csp.cv2(x)), 1))
    torch.testing.assert_close(csp(x), csp.cv4(halves * halves.sigmoid()))


@torch.no_grad()
def test_transformer_by_hand() -> None:
    """Two heads of two channels over 3 x 2 cells, one layer."""
    block = layers.Transformer(4, 2, 1).double()
    x = torch.randn(1, 4, 3, 2, dtype=torch.double)
    cells = x[0].flatten(1).T  # (6, 4)
    cells = cells + cells @ block.linear.weight.T + block.linear.bias
    layer = block.tr[0]
    inside = zip(
        (layer.q, layer.k, layer.v), layer.ma.in_proj_weight.chunk(3), layer.ma.in_proj_bias.chunk(3), strict=True
    )
    q, k, v = (cells @ first.weight.T @ second.T + bias for first, second, bias in inside)
    heads = [
        ((q[:, part] @ k[:, part].T) / math.sqrt(2)).softmax(1) @ v[:, part] for part in (slice(0, 2), slice(2, 4))
    ]
    attended = cells + torch.cat(heads, 1) @ layer.ma.out_proj.weight.T + layer.ma.out_proj.bias
    expected = attended + attended @ layer.fc1.weight.T @ layer.fc2.weight.T
    torch.testing.assert_close(block(x)[0].flatten(1).T, expected)


def test_classify_is_linear_in_the_mean_over_the_map() -> None:
    head = layers.Classify(4, 3, dropout=1.0)
    x = torch.randn(2, 4, 5, 7)
    assert torch.equal(head(x), head.linear.bias.expand(2, 3))  # dropout comes before the linear layer
    mean = head.eval().conv(x).mean((2, 3))
    assert mean.shape == (2, 1280)
    torch.testing.assert_close(head(x), mean @ head.linear.weight.T + head.linear.bias)


ANCHORS = [[10, 13, 16, 30], [116, 90, 156, 198]]


@pytest.mark.parametrize("anchors", [ANCHORS, ANCHORS[::-1]])
def test_small_anchors_go_to_small_strides(anchors: list[list[int]]) -> None:
    head = Detect(3, anchors, (4, 6))
    head.set_strides([8.0, 32.0])
    pixels = head.anchors * head.stride.view(-1, 1, 1)
    torch.testing.assert_close(pixels, torch.tensor(ANCHORS, dtype=torch.float32).view(2, 2, 2))
    assert "stride" not in head.state_dict()


def test_anchors_that_do_not_fit_the_levels() -> None:
    for anchors, channels in ((ANCHORS, (4,)), ([[1, 2], [1, 2, 3, 4]], (4, 6))):
        with pytest.raises(ValueError, match="`anchors`"):
            Detect(3, anchors, channels)


def test_bias_initialisation() -> None:
    """The mask coefficients keep theirs."""
    head = Segment(3, ANCHORS, 5, 8, (4, 6))
    for convolve in head.m:
        nn.init.zeros_(convolve.bias)
    head.set_strides([8.0, 32.0])
    expected = [0, 0, 0, 0, math.log(8 / 20**2), *[math.log(0.6 / 2.00001)] * 3, *[0] * 5]
    torch.testing.assert_close(head.m[1].bias.detach(), torch.tensor(expected * 2))
    assert head.m[0].bias[4].item() == pytest.approx(math.log(8 / 80**2))


def test_a_fused_map_is_the_sum_of_scaled_maps() -> None:
    first = layers.CBLinear(4, [3, 5])(torch.rand(1, 4, 2, 4))
    assert [tuple(one.shape) for one in first] == [(1, 3, 2, 4), (1, 5, 2, 4)]
    second, last = (torch.rand(1, 5, 8, 8),), torch.rand(1, 5, 4, 8)
    fused = layers.CBFuse([1, 0])([first, second, last])
    # Nearest neighbours: rows and columns are repeated, or every second one is taken.
    expected = last + first[1].repeat_interleave(2, 2).repeat_interleave(2, 3) + second[0][:, :, ::2]
    torch.testing.assert_close(fused, expected)
