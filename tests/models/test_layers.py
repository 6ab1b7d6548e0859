"""The building blocks: shapes, state-dict keys, and the numbers that the official weights depend on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.layers import C3, SPP, SPPF, Bottleneck, Classify, Concat, Conv, Detect, DWConv
from models.matching import read


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Conv(4, 6, 3, 2), (2, 6, 8, 8)),
        (Conv(4, 6, (1, 5)), (2, 6, 16, 16)),
        (Conv(4, 6, 3, dilation=2), (2, 6, 16, 16)),
        (DWConv(4, 6, 3), (2, 6, 16, 16)),
        (Bottleneck(4, 6), (2, 6, 16, 16)),
        (C3(4, 6, 2), (2, 6, 16, 16)),
        (SPP(4, 6), (2, 6, 16, 16)),
        (SPPF(4, 6), (2, 6, 16, 16)),
    ],
)
def test_output_shape(layer: nn.Module, shape: tuple[int, ...]) -> None:
    assert layer(torch.randn(2, 4, 16, 16)).shape == shape


def test_conv_has_yolov5s_batch_norm_and_no_bias() -> None:
    conv = Conv(4, 6)
    assert (conv.bn.eps, conv.bn.momentum, conv.conv.bias) == (1e-3, 0.03, None)
    assert list(conv.state_dict()) == ["conv.weight", *(f"bn.{key}" for key in nn.BatchNorm2d(1).state_dict())]


def test_depth_wise_groups() -> None:
    assert DWConv(8, 12, 3).conv.groups == 4


def test_shortcut_only_between_equal_channels() -> None:
    assert Bottleneck(4, 4).add
    assert not Bottleneck(4, 6).add
    assert not Bottleneck(4, 4, shortcut=False).add


def test_sppf_sees_what_spp_sees() -> None:
    slow, fast = SPP(4, 6).eval(), SPPF(4, 6).eval()
    fast.load_state_dict(slow.state_dict())
    x = torch.randn(1, 4, 20, 20)
    torch.testing.assert_close(slow(x), fast(x))


def test_concat() -> None:
    assert Concat()([torch.zeros(1, 2, 3, 3), torch.zeros(1, 5, 3, 3)]).shape == (1, 7, 3, 3)


def test_classify_is_linear_in_the_mean_over_the_map() -> None:
    head = Classify(4, 3, dropout=0.5).eval()
    x = torch.randn(2, 4, 5, 7)
    mean = head.conv(x).mean((2, 3))
    assert mean.shape == (2, 1280)
    torch.testing.assert_close(head(x), mean @ head.linear.weight.T + head.linear.bias)


def test_classify_drops_between_mean_and_linear() -> None:
    head = Classify(4, 3, dropout=1.0)
    assert torch.equal(head(torch.randn(2, 4, 5, 7)), head.linear.bias.expand(2, 3))
    assert Classify(4, 3).drop.p == 0


ANCHORS = [[10, 13, 16, 30], [116, 90, 156, 198]]


@pytest.mark.parametrize("training", [True, False])
def test_detect_gives_raw_maps_in_either_mode(training: bool) -> None:
    head = Detect(3, ANCHORS, (4, 6)).train(training)
    maps = head([torch.randn(2, 4, 8, 6), torch.randn(2, 6, 4, 3)])
    assert [m.shape for m in maps] == [(2, 2, 8, 6, 8), (2, 2, 4, 3, 8)]
    assert (head.nc, head.nl, head.na) == (3, 2, 2)


def test_detect_orders_a_cells_numbers_by_anchor_then_output() -> None:
    head = Detect(3, ANCHORS[:1], (4,))
    nn.init.zeros_(head.m[0].weight)
    with torch.no_grad():
        head.m[0].bias.zero_()[8 + 5] = 1.0  # second anchor, first class
    (raw,) = head([torch.randn(1, 4, 2, 2)])
    assert raw.nonzero()[:, [1, 4]].tolist() == [[1, 5]] * 4


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_detect_computes_what_is_asked_as_it_is_on_the_whole_map(layout: torch.memory_format) -> None:
    """With its gradients; cells may be asked for twice, or not at all."""
    detect = Detect(3, [[8, 8, 16, 16], [32, 32, 64, 64]], [6, 10]).double()
    given = [torch.randn(2, c, side, side, dtype=torch.double) for c, side in ((6, 8), (10, 4))]
    index = torch.tensor([[0, 1, 1, 1], [2, 0, 3, 3], [3, 1, 0, 0]])
    slopes = [torch.randn(4, 2, 8, dtype=torch.double) for _ in given]

    def values(few: bool) -> list[torch.Tensor]:
        maps = [one.contiguous(memory_format=layout).requires_grad_() for one in given]
        cells = torch.stack([index] * 2)
        levels = detect(maps, cells) if few else [read(raw, index) for raw in detect(maps)]
        # Objectness is read off the maps alone.
        rows = [torch.cat((level.rows[..., :4], level.rows[..., 5:]), 2) for level in levels]
        kept = [torch.cat((slope[..., :4], slope[..., 5:]), 2) for slope in slopes]
        total = sum((row * slope).sum() for row, slope in zip(rows, kept, strict=True))
        total = total + sum(level.objectness.square().sum() for level in levels)
        return [
            *rows,
            *(level.objectness for level in levels),
            *torch.autograd.grad(total, [*maps, *detect.parameters()]),
        ]

    for few, whole in zip(values(True), values(False), strict=True):
        torch.testing.assert_close(few, whole)
    (nothing, *_) = detect([one.requires_grad_() for one in given], torch.zeros(2, 3, 0, dtype=torch.long))
    assert nothing.rows.shape == (0, 2, 8)


@pytest.mark.parametrize("anchors", [ANCHORS, ANCHORS[::-1]])
def test_anchors_go_into_cells_small_ones_to_small_strides(anchors: list[list[int]]) -> None:
    head = Detect(3, anchors, (4, 6))
    head.set_strides([8.0, 32.0])
    pixels = head.anchors * head.stride.view(-1, 1, 1)
    torch.testing.assert_close(pixels, torch.tensor(ANCHORS, dtype=torch.float32).view(2, 2, 2))
    assert "stride" not in head.state_dict()


def test_anchors_to_be_found() -> None:
    assert Detect(3, 3, (4, 6)).anchors.tolist() == [[[1, 2], [3, 4], [5, 6]]] * 2


def test_anchors_that_do_not_fit_the_levels() -> None:
    with pytest.raises(ValueError, match="has 1 input maps, but `anchors` has 2 rows"):
        Detect(3, ANCHORS, (4,))
    with pytest.raises(ValueError, match="same number"):
        Detect(3, [[1, 2], [1, 2, 3, 4]], (4, 6))


def test_bias_initialisation() -> None:
    head = Detect(3, ANCHORS, (4, 6))
    head.set_strides([8.0, 32.0])
    for convolve in head.m:
        nn.init.zeros_(convolve.bias)
    head.initialise_biases()
    expected = [0, 0, 0, 0, math.log(8 / 20**2), *[math.log(0.6 / 2.00001)] * 3]
    torch.testing.assert_close(head.m[1].bias.detach(), torch.tensor(expected * 2))
    assert head.m[0].bias[4].item() == pytest.approx(math.log(8 / 80**2))
