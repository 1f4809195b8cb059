"""BiT and the ResNet under hybrids, against their definitions written out with other means."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.signal import correlate2d

import vitrail
from tests.models import small
from vitrail.errors import VitrailError
from vitrail.model.resnet import SameConv, StandardizedConv, same_pad
from vitrail.weights.published import model_cost


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


def test_a_small_root_keeps_the_resolution():
    model = small("resnet-small-root", size=32)
    names = ["root", *(f"stages.{stage}" for stage in range(4)), "norm"]
    found = model.intermediates(torch.randn(1, 3, 32, 32), names)
    assert [tuple(x.shape[1:]) for x in found.values()] == [
        *((16, 32, 32), (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4), (512, 4, 4)),
    ]
    assert model.architecture.stride == 8
    large = vitrail.create("R14x0.25", size=32, classes=7)
    shapes = [{key: x.shape for key, x in one.state_dict().items()} for one in (model, large)]
    different = {key for key, shape in shapes[0].items() if shapes[1][key] != shape}
    assert shapes[0].keys() == shapes[1].keys()
    assert different == {"root.weight"}
    assert shapes[0]["root.weight"] == (16, 3, 3, 3)


def test_bit_with_a_small_root_is_a_few_lines():
    model = small("resnet-small-root", size=32).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    expected = by_hand(images, model.state_dict(), units=(1, 1, 1, 1))
    assert (model(images) - expected).abs().max() < 1e-9


def by_hand(x, w, units):
    def conv(x, name, stride=1):
        kernel = w[f"{name}.weight"]
        variance, mean = torch.var_mean(kernel, (1, 2, 3), correction=0, keepdim=True)
        kernel = (kernel - mean) / (variance + 1e-10).sqrt()
        return F.conv2d(x, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    def norm(x, name):  # from 64 channels up 32 groups, below groups of two channels
        grouped = x.unflatten(1, (min(32, x.shape[1] // 2), -1))
        variance, mean = torch.var_mean(grouped, (2, 3, 4), correction=0, keepdim=True)
        x = ((grouped - mean) / (variance + 1e-5).sqrt()).flatten(1, 2)
        return F.relu(x * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None])

    x = conv(x, "root")
    for stage, count in enumerate(units):
        for unit in range(count):
            name, stride = f"stages.{stage}.{unit}", 2 if stage and not unit else 1
            y = norm(x, f"{name}.norm1")
            x = x if unit else conv(y, f"{name}.projection", stride)
            y = norm(conv(y, f"{name}.conv1"), f"{name}.norm2")
            y = norm(conv(y, f"{name}.conv2", stride), f"{name}.norm3")
            x = x + conv(y, f"{name}.conv3")
    return norm(x, "norm").mean((2, 3)) @ w["head.weight"].T + w["head.bias"]


def test_a_hybrids_small_root_is_a_convolution_a_norm_and_a_relu():
    model = small("hybrid-small-root", size=32)
    root = model.backbone.root
    images = torch.randn(1, 3, 32, 32)
    maps = F.conv2d(images, root.conv.standardized(), padding=1)
    expected = F.relu(F.group_norm(maps, 8, root.norm.weight, root.norm.bias, 1e-6))
    assert torch.allclose(root(images), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("variant", "root"),
    [("R14x0.25", "small"), ("R26x0.375", "small"), ("R50x0.5", "imagenet"), ("R26x1.5", "small")],
)
def test_parameters_and_macs_are_those_of_the_formula(variant, root):
    with torch.device("meta"):
        a = vitrail.create(variant, classes=10, size=32, root=root).architecture
    cost = model_cost(a)
    assert (cost.parameters, cost.gmacs) == counted(a.units, int(64 * a.width), root, classes=10)


def counted(units, w, root, classes):
    """Parameters and billions of multiply-accumulates at 32 pixels."""
    kernel, side = (7, 16) if root == "imagenet" else (3, 32)
    parameters = 3 * kernel**2 * w
    macs = parameters * side**2
    side, inputs = side // 2 if root == "imagenet" else side, w
    for stage, count in enumerate(units):
        middle = w * 2**stage
        for unit in range(count):
            before, side = side, side // 2 if stage and not unit else side
            shortcut = 0 if unit else inputs * 4 * middle
            at_side = 9 * middle**2 + 4 * middle**2 + shortcut
            parameters += inputs * middle + at_side + 2 * inputs + 4 * middle
            macs += inputs * middle * before**2 + at_side * side**2
            inputs = 4 * middle
    head = inputs * classes
    return parameters + 2 * inputs + head + classes, round((macs + head) / 1e9, 4)


@pytest.mark.parametrize("factor", ["0.25", "0.5", "0.75", "1", "1.25", "2", "0.015625"])
def test_groups_have_two_channels_or_more_at_every_width(factor):
    with torch.device("meta"):
        model = vitrail.create(f"R14x{factor}", size=32)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.GroupNorm)]
    for norm in norms:
        per_group = norm.num_channels / norm.num_groups
        assert per_group >= min(2, norm.num_channels)
        assert norm.num_groups <= 32
        if norm.num_channels & (norm.num_channels - 1) == 0:  # published widths, and halves of them
            assert norm.num_groups == min(32, max(1, norm.num_channels // 2))


@pytest.mark.parametrize("width", [0.3, 0.01, -0.5, 0])
def test_a_width_without_whole_channels_is_one_line(width):
    with pytest.raises(VitrailError, match=rf"width = {width}: "):
        vitrail.create("R50x1", width=width)


# Logits of version 0.1 for the weights and the image of `arranged`.
PUBLISHED_SHAPES = {
    "R50x1": [5.22057, -2.3616, -8.74922],
    "R50+B/16": [4.20459, 7.56853, 0.16106],
}


@pytest.mark.parametrize("variant", PUBLISHED_SHAPES)
def test_published_shapes_compute_what_they_did(variant):
    model, image = arranged(variant)
    with torch.inference_mode():
        logits = model(image)[0]
    assert logits.tolist() == pytest.approx(PUBLISHED_SHAPES[variant], rel=1e-3, abs=1e-3)


def arranged(variant):
    """A published shape at 64 pixels whose weights need no random numbers."""
    model = vitrail.create(variant, classes=3, size=64).eval()
    for number, parameter in enumerate(model.parameters()):
        waves = torch.sin(1.7 * torch.arange(parameter.numel(), dtype=torch.float64) + number)
        scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.5
        with torch.no_grad():
            parameter.copy_(scale * waves.reshape(parameter.shape) + (parameter.ndim == 1) * 0.5)
    image = torch.cos(0.37 * torch.arange(3 * 64 * 64.0)).reshape(1, 3, 64, 64)
    return model, image


@pytest.mark.parametrize("variant", ["R14x0.25", "R14x0.25+Ti/32", "Axial-R14x0.25"])
def test_a_step_of_training_lowers_the_loss(variant):
    torch.manual_seed(0)
    options = {"depth": 2} if "+" in variant else {}
    model = vitrail.create(variant, classes=4, size=32, root="small", **options)
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 4
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(np.log(4))
    assert losses[-1] < 0.9 * losses[0]
    assert all(parameter.grad is not None for parameter in model.parameters())
