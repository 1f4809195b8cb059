"""Filters, positions and features, against scikit-learn and against what is known of them."""

import pytest
import torch
from sklearn.decomposition import PCA

import vitrail
from tests.models import SMALL, small
from vitrail.inspection.embeddings import (
    feature_colors,
    first_filters,
    position_similarity,
    principal_components,
    why_no_positions,
)


@pytest.mark.parametrize("shape", [(40, 9), (9, 40), (12, 12)])
def test_principal_components_are_scikit_learns(shape):
    x = torch.randn(shape, dtype=torch.float64)
    components, shares = principal_components(x, 5)
    oracle = PCA(5, svd_solver="full").fit(x.numpy())
    for mine, other in zip(components, torch.tensor(oracle.components_), strict=True):
        assert min((mine - other).abs().max(), (mine + other).abs().max()) < 1e-9
    assert shares.tolist() == pytest.approx(oracle.explained_variance_ratio_.tolist())


def test_there_are_never_more_components_than_directions():
    assert len(principal_components(torch.randn(4, 20), 28)[0]) == 3
    assert len(principal_components(torch.randn(50, 6), 28)[0]) == 6


@pytest.mark.parametrize("kind", SMALL)
def test_every_family_has_filters(kind):
    found = first_filters(small(kind))
    patchy = kind.startswith(("vit", "axial-vit"))
    side = 16 if patchy else 3 if kind.endswith("small-root") else 7
    assert found.of == ("patch embedding" if patchy else "first convolution")
    assert found.components.shape[1:] == (3, side, side)
    # Sixteen filters of a quarter of the width have no more directions.
    assert len(found.components) == len(found.shares) == (15 if side == 3 else 28)
    assert 0 < found.shares.sum() <= 1


def test_a_kernel_made_of_two_patterns_gives_them_back():
    model = small("vit")
    a, b = torch.linalg.qr(torch.randn(768, 2))[0].mT
    with torch.no_grad():
        mix = torch.randn(192, 2)
        mix -= mix.mean(0)
        kernel = 3 * mix[:, :1] * a + mix[:, 1:] * b
        model.embedding.weight.copy_(kernel.reshape(192, 3, 16, 16))
    found = first_filters(model)
    span = torch.stack([a, b])
    for component in found.components[:2].flatten(1):
        assert (span @ component).norm().item() == pytest.approx(1, abs=1e-4)
    assert found.shares[:2].sum().item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "kind", ["vit", "vit-factorized", "vit-sincos", "vit-every", "hybrid-root"]
)
def test_positions_are_most_alike_to_themselves(kind):
    model = small(kind, size=96)
    grid = model.architecture.grid
    found = position_similarity(model, grid)
    maps = found.maps.flatten(1)
    assert torch.allclose(maps.diagonal(), torch.ones(len(maps)), atol=1e-5)
    assert torch.allclose(maps, maps.mT, atol=1e-5)
    assert maps.max() <= 1 + 1e-5
    assert ("first layer" in found.kind) == (kind == "vit-every")


def test_a_factorized_position_is_alike_along_its_row_and_its_column():
    model = vitrail.create("Ti/16", size=96, depth=1, positions="factorized")
    maps = position_similarity(model, (6, 6)).maps.unflatten(0, (6, 6))
    here = maps[2, 3]
    others = here.clone()
    others[2], others[:, 3] = -1, -1
    assert min(here[2].min(), here[:, 3].min()) > others.max()


def test_of_a_large_grid_some_maps_are_shown():
    found = position_similarity(small("vit"), (40, 20))
    assert found.maps.shape == (16 * 16, 40, 20)
    assert found.rows[[0, -1]].tolist() == [0, 39]
    assert found.columns[[0, -1]].tolist() == [0, 19]
    assert position_similarity(small("vit"), (3, 20)).rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("vit-no-positions", "this model has no position embeddings"),
        ("vit-relative", "relative position embeddings encode offsets"),
        ("resnet", "ResNet has no position embeddings"),
        ("axial-resnet", "AxialResNet encodes relative offsets"),
    ],
)
def test_a_model_without_positions_says_so(kind, reason):
    assert why_no_positions(small(kind)).startswith(reason)
    assert position_similarity(small(kind), (2, 2)) is None


def test_patches_of_three_kinds_get_three_colors():
    kinds = torch.randn(3, 32)
    tokens = kinds[torch.tensor([0, 0, 1, 1, 2, 2])] + 1e-3 * torch.randn(6, 32)
    colors = feature_colors(tokens, (3, 2))
    assert colors.shape == (3, 2, 3)
    assert colors.min() >= 0
    assert colors.max() <= 1
    distance = torch.cdist(colors[:, 0], colors[:, 0])
    assert distance[~torch.eye(3, dtype=torch.bool)].min() > 0.3


def test_patches_that_are_all_alike_have_some_color():
    assert feature_colors(torch.ones(4, 8), (2, 2)).isfinite().all()
    assert feature_colors(torch.randn(1, 8), (1, 1)).shape == (1, 1, 3)
