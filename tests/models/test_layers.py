"""Layers: output shapes, state-dict keys, and the numbers that the official weights depend on."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from models import layers
from models.heads.anchors import Detect, Segment, read_level


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (layers.Conv(4, 6, 3, 2), (2, 6, 8, 8)),
        (layers.Conv(4, 6, (1, 5)), (2, 6, 16, 16)),
        (layers.Conv(4, 6, 3, dilation=2), (2, 6, 16, 16)),
        (layers.DWConv(4, 6, 3), (2, 6, 16, 16)),
        (layers.Bottleneck(4, 6), (2, 6, 16, 16)),
        (layers.C3(4, 6, 2), (2, 6, 16, 16)),
        (layers.SPP(4, 6), (2, 6, 16, 16)),
        (layers.SPPF(4, 6), (2, 6, 16, 16)),
        (layers.Focus(4, 6, 3), (2, 6, 8, 8)),
        (layers.RepConv(4, 6), (2, 6, 16, 16)),
        (layers.RepConv(4, 6, 5, 2, 2), (2, 6, 8, 8)),
        (layers.ELAN(4, 6, 8), (2, 6, 16, 16)),
        (layers.ELAN(4, 6, 8, 2), (2, 6, 16, 16)),
        (layers.RepNCSPELAN(4, 6, 8, repeats=2), (2, 6, 16, 16)),
        (layers.AConv(4, 6), (2, 6, 8, 8)),
        (layers.ADown(4, 6), (2, 6, 8, 8)),
        (layers.SPPELAN(4, 6), (2, 6, 16, 16)),
        (layers.GhostConv(4, 6, 3, 2), (2, 6, 8, 8)),
        (layers.GhostBottleneck(4, 4), (2, 4, 16, 16)),
        (layers.GhostBottleneck(4, 8, 3, 2), (2, 8, 8, 8)),
        (layers.BottleneckCSP(4, 6, 2), (2, 6, 16, 16)),
        (layers.C3Ghost(4, 8, 2), (2, 8, 16, 16)),
        (layers.C3TR(4, 8, 2), (2, 8, 16, 16)),
        (layers.Proto(4, 8, 3), (2, 3, 32, 32)),
        (layers.DWConvTranspose2d(4, 6, 4, 2, 1), (2, 6, 32, 32)),
        (layers.Contract(4), (2, 64, 4, 4)),
        (layers.Expand(2), (2, 1, 32, 32)),
        (layers.MixConv2d(4, 6, (1, 3, 5), 2), (2, 6, 8, 8)),
        (layers.MixConv2d(4, 6, (1, 3), equal_channels=False), (2, 6, 16, 16)),
        (layers.CrossConv(4, 6, 5, 2), (2, 6, 8, 8)),
        (layers.C3x(4, 6, 2), (2, 6, 16, 16)),
        (layers.C3SPP(4, 6, (5, 9)), (2, 6, 16, 16)),
    ],
)
def test_output_shape(layer: nn.Module, shape: tuple[int, ...]) -> None:
    assert layer(torch.randn(2, 4, 16, 16)).shape == shape


def test_conv_has_batch_norm_of_yolov5_and_no_bias() -> None:
    conv = layers.Conv(4, 6)
    assert (conv.bn.eps, conv.bn.momentum, conv.conv.bias) == (1e-3, 0.03, None)


def test_skipped_norms_are_those_inside_of_conv() -> None:
    chain = nn.Sequential(layers.Conv(3, 4, 3), nn.BatchNorm2d(4)).eval()
    for norm in (chain[0].bn, chain[1]):
        norm.running_mean.fill_(1)
    images = torch.rand(1, 3, 8, 8)
    expected = chain[1](nn.functional.silu(chain[0].conv(images)))
    layers.skip_norms(chain)
    assert torch.equal(chain(images), expected)


def test_sppf_equals_spp() -> None:
    slow, fast = layers.SPP(4, 6).eval(), layers.SPPF(4, 6).eval()
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(1, 4, 20, 20)
    torch.testing.assert_close(slow(x), fast(x))


def test_contract_and_expand() -> None:
    """As in YOLOv5, channels are ordered by row and column of the pixel, then by channel."""
    x = torch.arange(8.0).view(1, 2, 2, 2)
    assert layers.Contract()(x).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert torch.equal(layers.Expand()(layers.Contract()(x)), x)


# Names in the state dicts of YOLOv5's checkpoints, without those inside Conv and BatchNorm.
KEYS = {
    layers.Focus(4, 6): "conv",
    layers.GhostConv(4, 6): "cv1 cv2",
    layers.GhostBottleneck(4, 6, 3, 2): "conv.0.cv1 conv.0.cv2 conv.1 conv.2.cv1 conv.2.cv2 shortcut.0 shortcut.1",
    layers.GhostBottleneck(4, 4): "conv.0.cv1 conv.0.cv2 conv.2.cv1 conv.2.cv2",
    layers.BottleneckCSP(4, 6): "cv1 cv2.weight cv3.weight cv4 bn m.0.cv1 m.0.cv2",
    layers.C3Ghost(4, 8): "cv1 cv2 cv3 m.0.conv.0.cv1 m.0.conv.0.cv2 m.0.conv.2.cv1 m.0.conv.2.cv2",
    layers.C3TR(4, 8): "cv1 cv2 cv3 m.linear.weight m.linear.bias m.tr.0.q.weight m.tr.0.k.weight m.tr.0.v.weight "
    "m.tr.0.ma.in_proj_weight m.tr.0.ma.in_proj_bias m.tr.0.ma.out_proj.weight m.tr.0.ma.out_proj.bias "
    "m.tr.0.fc1.weight m.tr.0.fc2.weight",
    layers.Proto(4, 8, 3): "cv1 cv2 cv3",
    layers.CrossConv(4, 6): "cv1 cv2",
    layers.MixConv2d(4, 6): "m.0.weight m.1.weight bn",
    layers.C3x(4, 6): "cv1 cv2 cv3 m.0.cv1 m.0.cv2",
    layers.C3SPP(4, 6): "cv1 cv2 cv3 m.cv1 m.cv2",
    layers.DWConvTranspose2d(4, 6): "weight bias",
}


@pytest.mark.parametrize(("layer", "names"), KEYS.items())
def test_names_of_tensors(layer: nn.Module, names: str) -> None:
    keys = [re.sub(r"\.conv\.weight$|(\bbn)\.\w+$|\.bn\.\w+$", r"\1", key) for key in layer.state_dict()]
    assert list(dict.fromkeys(key.replace("conv.weight", "conv") for key in keys)) == names.split()


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


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_detect_computes_the_same_at_given_cells_as_everywhere(layout: torch.memory_format) -> None:
    """Outputs and gradients agree; a cell may occur twice, and there may be none."""
    detect = Detect(3, [[8, 8, 16, 16], [32, 32, 64, 64]], [6, 10]).double()
    inputs = [torch.randn(2, c, side, side, dtype=torch.double) for c, side in ((6, 8), (10, 4))]
    index = torch.tensor([[0, 1, 1, 1], [2, 0, 3, 3], [3, 1, 0, 0]])
    slopes = [torch.randn(4, 2, 8, dtype=torch.double) for _ in inputs]

    def values(at_cells: bool) -> list[torch.Tensor]:
        maps = [x.contiguous(memory_format=layout).requires_grad_() for x in inputs]
        cells = torch.stack([index] * 2)
        levels = detect(maps, cells) if at_cells else [read_level(raw, index) for raw in detect(maps)]
        # Objectness is compared on the whole maps.
        rows = [torch.cat((level.rows[..., :4], level.rows[..., 5:]), 2) for level in levels]
        weights = [torch.cat((slope[..., :4], slope[..., 5:]), 2) for slope in slopes]
        total = sum((row * slope).sum() for row, slope in zip(rows, weights, strict=True))
        objectness = [level.objectness for level in levels]
        total = total + sum(values.square().sum() for values in objectness)
        return [*rows, *objectness, *torch.autograd.grad(total, [*maps, *detect.parameters()])]

    torch.testing.assert_close(values(True), values(False))
    level, _ = detect(inputs, torch.zeros(2, 3, 0, dtype=torch.long))
    assert level.rows.shape == (0, 2, 8)


@pytest.mark.parametrize("anchors", [ANCHORS, ANCHORS[::-1]])
def test_small_anchors_go_to_small_strides(anchors: list[list[int]]) -> None:
    head = Detect(3, anchors, (4, 6))
    head.placed([8.0, 32.0])
    pixels = head.anchors * head.stride.view(-1, 1, 1)
    torch.testing.assert_close(pixels, torch.tensor(ANCHORS, dtype=torch.float32).view(2, 2, 2))
    assert "stride" not in head.state_dict()


def test_anchors_by_number() -> None:
    assert Detect(3, 3, (4, 6)).anchors.tolist() == [[[1, 2], [3, 4], [5, 6]]] * 2


def test_anchors_that_do_not_fit_the_levels() -> None:
    for anchors, channels in ((ANCHORS, (4,)), ([[1, 2], [1, 2, 3, 4]], (4, 6))):
        with pytest.raises(ValueError, match=r"input maps|same number"):
            Detect(3, anchors, channels)


def test_bias_initialisation() -> None:
    """The mask coefficients keep theirs."""
    head = Segment(3, ANCHORS, 5, 8, (4, 6))
    for convolve in head.m:
        nn.init.zeros_(convolve.bias)
    head.placed([8.0, 32.0])
    expected = [0, 0, 0, 0, math.log(8 / 20**2), *[math.log(0.6 / 2.00001)] * 3, *[0] * 5]
    torch.testing.assert_close(head.m[1].bias.detach(), torch.tensor(expected * 2))
    assert head.m[0].bias[4].item() == pytest.approx(math.log(8 / 80**2))


# YOLOv9's


def test_a_fused_map_is_the_sum_of_scaled_maps() -> None:
    first = layers.CBLinear(4, [3, 5])(torch.rand(1, 4, 2, 4))
    assert [tuple(one.shape) for one in first] == [(1, 3, 2, 4), (1, 5, 2, 4)]
    second, last = (torch.rand(1, 5, 8, 8),), torch.rand(1, 5, 4, 8)
    fused = layers.CBFuse([1, 0])([first, second, last])
    # Nearest neighbours: rows and columns are repeated, or every second one is taken.
    expected = last + first[1].repeat_interleave(2, 2).repeat_interleave(2, 3) + second[0][:, :, ::2]
    torch.testing.assert_close(fused, expected)


def test_an_odd_number_of_channels_cannot_be_halved() -> None:
    with pytest.raises(ValueError, match="7"):
        layers.ELAN(4, 6, 7)
