"""BiT and the ResNet under hybrids, against their definitions written out with other means."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.signal import correlate2d

import vitrail
from tests.models import small
from vitrail.model.resnet import SameConv, StandardizedConv, same_pad


def test_bits_kernels_have_zero_mean_and_unit_variance():
    conv = StandardizedConv(8, 16, 3).double()
    with torch.no_grad():
        conv.weight += 3
    kernel = conv.standardized()
    w = conv.weight.detach().numpy()
    mean, variance = w.mean((1, 2, 3), keepdims=True), w.var((1, 2, 3), keepdims=True)
    assert np.abs(kernel.detach().numpy() - (w - mean) / np.sqrt(variance + 1e-10)).max() < 1e-12


def test_the_hybrids_kernels_divide_by_the_deviation_plus_epsilon():
    conv = SameConv(8, 16, 3).double()
    w = conv.weight.detach().numpy()
    expected = (w - w.mean((1, 2, 3), keepdims=True)) / (w.std((1, 2, 3), keepdims=True) + 1e-5)
    assert np.abs(conv.standardized().detach().numpy() - expected).max() < 1e-12


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "before", "after"),
    [(224, 7, 2, 2, 3), (384, 7, 2, 2, 3), (112, 3, 2, 0, 1), (225, 7, 2, 3, 3), (56, 3, 1, 1, 1)],
)
def test_same_padding_is_tensorflows(side, kernel, stride, before, after):
    x = torch.ones(1, 1, side, side)
    padded = same_pad(x, kernel, stride)
    assert padded.shape[-1] == side + before + after
    assert not padded[..., :before].any() if before else True
    assert padded[..., before].sum() == side
    out = F.conv2d(padded, torch.ones(1, 1, kernel, kernel), stride=stride)
    assert out.shape[-1] == -(-side // stride)


def test_a_strided_same_convolution_is_the_plain_sum():
    conv = SameConv(1, 1, 3, stride=2).double()
    x = torch.randn(1, 1, 6, 8, dtype=torch.float64)
    padded = np.pad(x[0, 0].numpy(), ((0, 1), (0, 1)))
    kernel = conv.standardized()[0, 0].detach().numpy()
    expected = correlate2d(padded, kernel, mode="valid")[::2, ::2]
    assert np.abs(conv(x)[0, 0].detach().numpy() - expected).max() < 1e-12


def test_bits_root_pools_over_a_zero_border():
    """Where the root's answer is negative, the border's zeros win, and nothing else does."""
    model = small("resnet", channels=1)
    with torch.no_grad():
        model.root.weight.zero_()
        model.root.weight[:, :, 3, 3] = -1  # standardized: minus the pixel, plus a little of others
    seen = []
    hook = model.stages[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(torch.ones(1, 1, 64, 64))
    hook.remove()
    pooled = seen[0]
    expected = F.max_pool2d(F.pad(model.root(torch.ones(1, 1, 64, 64)), (1, 1, 1, 1)), 3, 2)
    assert torch.equal(pooled, expected)
    padding_pool = F.max_pool2d(model.root(torch.ones(1, 1, 64, 64)), 3, 2, padding=1)
    assert not torch.equal(pooled, padding_pool)


def test_the_width_factor_multiplies_every_channel():
    with torch.device("meta"):
        one, three = vitrail.create("R50x1"), vitrail.create("R50x3")
    for (name, a), (_, b) in zip(one.named_parameters(), three.named_parameters(), strict=True):
        if name == "head.bias":
            continue
        factor = 1 if name == "head.weight" else 3
        assert b.shape[0] == factor * a.shape[0], name


@pytest.mark.parametrize("size", [(64, 64), (65, 97), (33, 128)])
def test_hybrid_grids_are_what_the_convolutions_give(size):
    for kind in ("hybrid", "hybrid-16"):
        model = small(kind, size=size)
        images = torch.randn(1, 3, *size)
        _, grid = model.embed(images)
        assert grid == model.architecture.grid


def test_classic_resnets_are_torchvisions_with_a_zero_head():
    model = vitrail.create("ResNet50", classes=3)
    assert not model(torch.randn(2, 3, 64, 64)).any()
    assert model.tokens(torch.randn(2, 3, 64, 64)).shape == (2, 4, 2048)
