"""Distances and rollout against whole matrices, multiplied by hand."""

from dataclasses import replace

import pytest
import torch

from tests.models import SMALL, small
from vitrail.inspection import attention
from vitrail.inspection.attention import (
    Layer,
    Recording,
    _layer_grid,
    _spread,
    analyze_attention,
    record,
    summed_distance,
    uniform_distance,
)

SIZE = (96, 64)
ATTENTIVE = [kind for kind in SMALL if "resnet" not in kind or kind == "axial-resnet"]
SLOPED = [kind for kind in ATTENTIVE if kind != "axial-resnet"]


def noise(seed: int = 0, size: tuple[int, int] = SIZE) -> torch.Tensor:
    return torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(seed))


def attention_distance(weights, grid, pixels, prefix=0):
    """Mean attention distance of each head in pixels, from whole matrices."""
    rows = slice(0, weights.shape[1])
    return summed_distance(weights, rows, grid, prefix) * pixels / (grid[0] * grid[1])


@pytest.mark.parametrize("side", [33, 40, 64, 67, 96, 224])
def test_the_stride_of_a_stage_is_known_whatever_the_size(side):
    model, image = small("axial-resnet"), noise(size=(side, side))
    layers = record(model, image).layers
    assert [layer.pixels for layer in layers] == [4, 4, 4, 4, 8, 8, 16, 16]
    last = torch.zeros(1, 1, -(-side // 32), -(-side // 32))  # of a stage with a second unit
    assert _layer_grid(model, image, last)[1] == 32


@pytest.mark.parametrize("side", [31, 32, 40])
def test_a_small_roots_strides_are_known(side):
    axial, image = small("axial-resnet-small-root", size=32), noise(size=(side, side))
    found = record(axial, image)
    assert [layer.pixels for layer in found.layers] == [1, 1, 1, 1, 2, 2, 4, 4]
    assert found.grid == (-(-side // 8), -(-side // 8))
    hybrid = record(small("hybrid-small-root", size=32), image)
    assert {layer.pixels for layer in hybrid.layers} == {8}
    assert hybrid.grid == found.grid
    bit = record(small("resnet-small-root", size=32), image)
    assert len(bit.tokens) == bit.grid[0] * bit.grid[1] == found.grid[0] ** 2


@pytest.mark.parametrize(
    ("grid", "patch", "pixels"), [((14, 14), 16, 116.5), ((7, 7), 32, 115.5), ((16, 16), 14, 116.6)]
)
def test_uniform_attention_has_the_known_distance_and_identity_none(grid, patch, pixels):
    n = grid[0] * grid[1]
    weights = torch.stack([torch.full((n, n), 1 / n), torch.eye(n)])
    uniform, identity = attention_distance(weights, grid, patch).tolist()
    assert round(uniform, 1) == pixels
    assert identity == 0
    assert uniform_distance(grid, patch) == pytest.approx(uniform, rel=1e-5)


def test_class_token_and_registers_do_not_count():
    """Whatever the five tokens ahead do, the patches look one column to the right."""
    grid, prefix = (1, 4), 5
    patches = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [1, 0, 0, 0]]).float()
    weights = torch.rand(1, 9, 9)
    weights[0, prefix:, prefix:] = 0.25 * patches
    distance = attention_distance(weights, grid, 10, prefix)
    assert distance.item() == pytest.approx(10 * (1 + 1 + 1 + 3) / 4)


@pytest.mark.parametrize("cut", [1, 3, 5, 7])
def test_distances_are_the_same_in_pieces(cut):
    weights = torch.rand(2, 9, 9).softmax(-1)
    whole = summed_distance(weights, slice(0, 9), (2, 4), 1)
    pieces = [
        summed_distance(weights[:, rows], rows, (2, 4), 1)
        for rows in (slice(0, cut), slice(cut, 9))
    ]
    assert torch.allclose(sum(pieces), whole, atol=1e-5)


def test_a_rectangle_of_uniform_attention_agrees_with_its_formula():
    weights = torch.full((1, 15, 15), 1 / 15)
    assert attention_distance(weights, (3, 5), 8).item() == pytest.approx(
        uniform_distance((3, 5), 8)
    )


class Fixed(torch.nn.Module):
    """An attention layer with given weights."""

    def __init__(self, *heads: list[list[float]]) -> None:
        super().__init__()
        self.matrices = torch.tensor(heads)
        self.heads = len(heads)

    def weights(self, x, rows=slice(None)):
        return self.matrices[None, :, rows]


def test_rollout_of_two_layers_by_hand():
    """One head, then two whose mean is [[0, 1], [1, 0]]; the class token and one patch."""
    first = Layer(Fixed([[0.5, 0.5], [0.25, 0.75]]), torch.zeros(1), (1, 1), 1, 16)
    halves = [[0.0, 1.0], [1.0, 0.0]]
    second = replace(first, module=Fixed(halves, halves))
    made = Recording(
        layers=(first, second),
        tokens=torch.zeros(2, 4),
        grid=(1, 1),
        prefix=1,
        reader=torch.tensor([1.0, 0.0]),
        logits=None,
    )
    # Row of the class token: [1, 0] × [[.5, .5], [.5, .5]] × [[.75, .25], [.125, .875]].
    assert analyze_attention(made, ()).rollout.tolist() == [0.4375, 0.5625]


def naive_rollout(model, image):
    """The product of whole matrices, as it is written in the paper that it comes from."""
    matrices = model.attention(image)
    product = torch.eye(matrices[0].shape[-1])
    for layer in range(len(matrices)):
        mixed = matrices[layer][0].mean(0) + torch.eye(len(product))
        product = mixed / mixed.sum(-1, keepdim=True) @ product
    return product


@pytest.mark.parametrize("kind", SLOPED)
@torch.no_grad()
def test_rollout_equals_the_product_of_whole_matrices(kind, monkeypatch):
    monkeypatch.setattr(attention, "MAX_WEIGHTS", 100)  # many pieces
    model, image = small(kind, size=SIZE), noise()
    found = record(model, image)
    product = naive_rollout(model, image)
    assert torch.allclose(product.sum(-1), torch.ones(len(product)), atol=1e-5)
    assert torch.allclose(analyze_attention(found, ()).rollout, found.reader @ product, atol=1e-6)


@pytest.mark.parametrize("kind", ATTENTIVE)
def test_every_family_looks_with_rows_that_sum_to_one(kind):
    model = small(kind, size=64)
    made = record(model, noise())
    count = len(made.layers)
    found = analyze_attention(made, range(count))
    assert found.rollout.sum().item() == pytest.approx(1, abs=1e-5)
    assert found.rollout.min() >= 0
    assert sorted(found.distances) == sorted(found.heads) == list(range(count))
    for number, layer in enumerate(made.layers):
        assert torch.allclose(
            found.heads[number].sum((1, 2)), torch.ones(layer.module.heads), atol=1e-5
        )
        assert found.distances[number].min() > 0
        assert found.distances[number].max() < (SIZE[0] ** 2 + SIZE[1] ** 2) ** 0.5
        _, weights = next(iter(layer.chunks()))
        assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5)


@pytest.mark.parametrize("kind", ["vit", "vit-relative", "axial-vit", "axial-resnet"])
@torch.no_grad()
def test_no_piece_is_larger_than_it_may_be_and_all_together_are_the_matrix(kind, monkeypatch):
    monkeypatch.setattr(attention, "MAX_WEIGHTS", 2000)
    for layer in record(small(kind, size=SIZE), noise()).layers:
        pieces = [weights for _, weights in layer.chunks()]
        row = layer.module.heads * layer.tokens
        assert max(piece.numel() for piece in pieces) <= max(2000, row)
        assert torch.allclose(torch.cat(pieces, 1), layer.module.weights(layer.inputs)[0])


@pytest.mark.parametrize("kind", ["vit", "vit-registers", "vit-gap", "hybrid-root", "axial-vit"])
def test_distances_and_maps_are_those_of_the_whole_matrices(kind, monkeypatch):
    monkeypatch.setattr(attention, "MAX_WEIGHTS", 100)
    model, image = small(kind, size=SIZE), noise()
    made = record(model, image)
    found = analyze_attention(made, [1])
    assert list(found.distances) == list(found.heads) == [1]
    weights = model.attention(image, [1])[1][0].detach()
    layer = made.layers[1]
    expected = attention_distance(weights, layer.grid, layer.pixels, layer.prefix)
    assert torch.allclose(found.distances[1], expected, atol=1e-3)
    seen = torch.einsum("r, h r n -> h n", made.reader, weights)[:, made.prefix :]
    assert torch.allclose(found.heads[1].flatten(1), seen / seen.sum(1, keepdim=True), atol=1e-5)


def explicit(module, x):
    """What the fused kernel computes, with a matrix that keeps its gradient."""
    weights = module.weights(x)
    weights.retain_grad()
    module.kept = weights
    values = module.split(x)[2]
    if x.ndim == 4:
        order = "byhxk" if module.axis == "row" else "bxhyk"
        places = [order.index(letter) for letter in "bhyxk"]
        values = values.permute(places).flatten(2, 3)
    y = module.out((weights @ values).transpose(1, 2).flatten(2))
    return y.reshape(x.shape)


def naive_gradient_rollout(model, image, target):
    """Matrices and their gradients from autograd, weighted and multiplied as they are."""
    modules = model.attention_layers()
    for module in modules:
        module.forward = lambda x, module=module: explicit(module, x)
    try:
        model(image)[0, target].backward()
    finally:
        for module in modules:
            del module.forward
    product = torch.eye(modules[0].kept.shape[-1])
    for module in modules:
        weighted = (module.kept * module.kept.grad)[0].clamp(min=0).mean(0)
        product = product + weighted.detach() @ product
    return product


@pytest.mark.parametrize("kind", [kind for kind in SLOPED if kind != "vit-attention-pool"])
@pytest.mark.parametrize("target", [None, 3])
def test_gradient_weighted_rollout_equals_the_naive_one(kind, target, monkeypatch):
    monkeypatch.setattr(attention, "MAX_WEIGHTS", 100)
    model, image = small(kind, size=SIZE), noise()
    found = record(model, image, target)
    best = int(model(image).argmax())
    assert found.target == (best if target is None else target)
    expected = found.reader @ naive_gradient_rollout(model, image, found.target) - found.reader
    assert expected.abs().max() > 1e-6
    gradient = analyze_attention(found, ()).gradient
    assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-6)


def test_attention_pooling_is_one_more_matrix_to_weight():
    model, image = small("vit-attention-pool", size=SIZE), noise()
    found = record(model, image)
    tokens = model.tokens(image).detach()
    pool = model.pool
    weights = pool.weights(tokens).requires_grad_()
    y = pool.out((weights @ pool.split(tokens)[2]).transpose(1, 2).flatten(1))
    logits = model.head(y + pool.mlp(pool.norm(y)))
    assert torch.allclose(logits, model(image), atol=1e-5)
    (slope,) = torch.autograd.grad(logits[0, found.target], weights)
    start = (weights * slope)[0, :, 0].clamp(min=0).mean(0).detach()
    expected = start @ naive_gradient_rollout(model, image, found.target)
    assert torch.allclose(analyze_attention(found, ()).gradient, expected, rtol=1e-3, atol=1e-6)
    assert torch.allclose(found.reader, weights[0, :, 0].mean(0).detach())


def test_what_the_head_reads_stands_for_the_class_token():
    read = {
        kind: record(small(kind, size=SIZE), noise()).reader.tolist()
        for kind in ("vit", "vit-registers", "vit-gap", "axial-vit")
    }
    assert read["vit"] == [1.0, *[0.0] * 24]
    assert read["vit-registers"] == [1.0, *[0.0] * 28]
    assert read["vit-gap"] == read["axial-vit"] == pytest.approx([1 / 24] * 24)


def test_recording_leaves_the_model_as_it_was():
    model = small("vit").train()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    found = record(model, noise())
    assert model.training
    assert not model.activation_checkpointing
    assert found.target is not None
    assert analyze_attention(found, ()).gradient is not None
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.allclose(found.logits, model.eval()(noise())[0], atol=1e-5)


def test_a_model_without_classes_or_with_other_terms_has_no_gradient():
    assert record(small("vit", classes=0), noise()).target is None
    bare = analyze_attention(record(small("vit", classes=0), noise()), ())
    assert bare.gradient is None
    assert analyze_attention(record(small("axial-resnet"), noise()), ()).gradient is None


def test_a_map_that_was_averaged_is_spread_evenly_over_what_it_was_made_of():
    small_map = torch.tensor([6.0, 4.0, 2.0, 3.0, 2.0, 1.0])
    spread_out = _spread(small_map, (2, 3), (3, 5)).unflatten(0, (3, 5))
    expected = torch.tensor([[1.5, 1.5, 1, 1, 1], [1.5, 1.5, 1, 1, 1], [1.5, 1.5, 1, 1, 1]])
    assert torch.equal(spread_out, expected)
    assert spread_out.sum() == small_map.sum()


@pytest.mark.parametrize("kind", ["vit", "hybrid-root", "hybrid", "axial-resnet", "resnet"])
@pytest.mark.parametrize("size", [(64, 64), (65, 97), (96, 160)])
def test_grids_are_those_of_the_tokens_at_any_size(kind, size):
    made = record(small(kind), noise(size=size))
    assert made.prefix + made.grid[0] * made.grid[1] == len(made.tokens)
    for layer in made.layers:
        assert layer.module.weights(layer.inputs).shape[-1] == layer.tokens
        assert layer.pixels * layer.grid[0] <= size[0] + layer.pixels
