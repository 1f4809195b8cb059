"""The reference's initial weights, by their statistics."""

import math

import pytest
import torch
from scipy import stats
from torch import nn

import vitrail


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return vitrail.create("S/16", depth=2, classes=10, hidden=True, registers=1)


def assert_uniform(tensor: torch.Tensor, bound: float) -> None:
    sample = tensor.detach().flatten()[:20_000].numpy()
    assert stats.kstest(sample, stats.uniform(-bound, 2 * bound).cdf).pvalue > 1e-3


def assert_truncated_normal(tensor: torch.Tensor, std: float) -> None:
    """Standard deviation `std` after cutting at two standard deviations of the wider normal."""
    wide = std / 0.87962566103423978
    sample = tensor.detach().flatten()[:20_000].numpy()
    assert abs(sample).max() <= 2 * wide + 1e-6
    assert stats.kstest(sample, stats.truncnorm(-2, 2, scale=wide).cdf).pvalue > 1e-3
    assert tensor.std().item() == pytest.approx(std, rel=0.02)


def test_query_key_and_value_are_xavier_uniform_each_by_itself(model):
    for part in model.blocks[0].attention.qkv.weight.chunk(3):
        assert_uniform(part, math.sqrt(6 / (384 + 384)))
    assert not model.blocks[0].attention.qkv.bias.any()


def test_the_output_projection_and_the_mlp_are_xavier_uniform(model):
    block = model.blocks[1]
    assert_uniform(block.attention.out.weight, math.sqrt(6 / (384 + 384)))
    assert not block.attention.out.bias.any()
    for layer in (block.mlp.fc1, block.mlp.fc2):
        assert_uniform(layer.weight, math.sqrt(6 / (384 + 1536)))
        assert layer.bias.std().item() == pytest.approx(1e-6, rel=0.2)


def test_the_patch_embedding_and_the_hidden_layer_are_lecun_normal(model):
    assert_truncated_normal(model.embedding.weight, math.sqrt(1 / (16 * 16 * 3)))
    assert_truncated_normal(model.hidden.weight, math.sqrt(1 / 384))
    assert not model.embedding.bias.any()
    assert not model.hidden.bias.any()


def test_positions_are_noise_and_know_nothing_of_rows_and_columns(model):
    table = model.positions[0].table[0].detach()
    assert table.std().item() == pytest.approx(0.02, rel=0.02)
    assert stats.kstest(table.flatten()[:20_000].numpy() / 0.02, "norm").pvalue > 1e-3
    unit = table / table.norm(dim=-1, keepdim=True)
    similarity = unit @ unit.T
    neighbours = similarity.diagonal(1).mean()
    assert abs(neighbours.item() - similarity.diagonal(50).mean().item()) < 0.02
    assert model.positions[0].class_slot.std().item() == pytest.approx(0.02, rel=0.1)


def test_class_token_and_head_are_zero_and_norms_neutral(model):
    assert not model.class_token.any()
    assert not model.head.weight.any()
    assert not model.head.bias.any()
    for norm in (module for module in model.modules() if isinstance(module, nn.LayerNorm)):
        assert (norm.weight == 1).all()
        assert not norm.bias.any()


def test_the_pooling_probe_counts_as_one_input():
    probe = vitrail.create("S/16", depth=1, pool="attention").pool.probe
    assert_uniform(probe, math.sqrt(6 / (1 + 384)))


def test_what_pooling_registers_and_offsets_start_with():
    pool = vitrail.create("S/16", depth=1, pool="attention").pool
    for part in pool.kv.weight.chunk(2):
        assert_uniform(part, math.sqrt(6 / (384 + 384)))
    registers = vitrail.create("S/16", depth=1, registers=8).registers
    assert registers.std().item() == pytest.approx(1e-6, rel=0.1)
    relative = vitrail.create("S/16", depth=1, positions="relative")
    assert relative.blocks[0].attention.relative.table.std().item() == pytest.approx(0.02, rel=0.02)


def test_an_axial_unit_starts_as_its_shortcut():
    unit = vitrail.create("Axial-R26", units=(2, 1, 1, 1), size=32).stages[0][1].eval()
    x = torch.rand(2, 128, 8, 8)
    assert torch.equal(unit(x), x)


def test_activations_keep_their_scale_through_the_depth():
    model = vitrail.create("Ti/16", size=64).eval()
    names = [f"blocks.{i}" for i in range(12)]
    with torch.inference_mode():
        found = model.intermediates(torch.randn(4, 3, 64, 64), names)
    scales = [found[name].std().item() for name in names]
    assert max(scales) < 6 * min(scales)


def test_a_hybrids_units_start_as_their_shortcut():
    unit = vitrail.create("R26+S/32", depth=1).backbone.stage1[1]
    x = torch.rand(2, 256, 8, 8)
    assert torch.equal(unit(x), x)
    assert_truncated_normal(unit.conv1.weight, math.sqrt(1 / 256))


def test_two_models_of_one_seed_are_equal_and_of_two_seeds_are_not():
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return vitrail.create("Ti/16", depth=1).embedding.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
