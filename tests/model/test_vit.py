import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vitrail
from tests.models import SMALL, noisy, small

VITS = [kind for kind in SMALL if kind.startswith(("vit", "hybrid", "axial-vit"))]


def test_the_whole_model_is_the_papers_equations():
    """Eq. 1 to 8 written out in float64, token by token and head by head."""
    model = small("vit", size=32).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    state = {key: tensor.detach() for key, tensor in model.state_dict().items()}
    for image, logits in zip(images, model(images), strict=True):
        assert (by_hand(image, state, layers=2, heads=3) - logits).abs().max() < 1e-10


def by_hand(image, w, layers, heads):
    patches = [image[:, y : y + 16, x : x + 16] for y in (0, 16) for x in (0, 16)]
    kernel = w["embedding.weight"].flatten(1)
    z = [kernel @ patch.flatten() + w["embedding.bias"] for patch in patches]
    z = [z_i + p for z_i, p in zip(z, w["positions.0.table"][0], strict=True)]
    z = torch.stack([w["class_token"][0, 0] + w["positions.0.class_slot"][0, 0], *z])
    for i in range(layers):
        b = f"blocks.{i}."
        x = norm(z, w[f"{b}norm1.weight"], w[f"{b}norm1.bias"])
        q, k, v = (x @ w[f"{b}attention.qkv.weight"].T + w[f"{b}attention.qkv.bias"]).chunk(3, -1)
        found = []
        for h in range(heads):
            part = slice(64 * h, 64 * (h + 1))
            weights = torch.softmax(q[:, part] @ k[:, part].T / math.sqrt(64), -1)
            found.append(weights @ v[:, part])
        out = torch.cat(found, -1)
        z = z + out @ w[f"{b}attention.out.weight"].T + w[f"{b}attention.out.bias"]
        x = norm(z, w[f"{b}norm2.weight"], w[f"{b}norm2.bias"])
        x = x @ w[f"{b}mlp.fc1.weight"].T + w[f"{b}mlp.fc1.bias"]
        x = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        z = z + x @ w[f"{b}mlp.fc2.weight"].T + w[f"{b}mlp.fc2.bias"]
    y = norm(z, w["norm.weight"], w["norm.bias"])[0]
    return w["head.weight"] @ y + w["head.bias"]


def norm(x, weight, bias):
    centerd = x - x.mean(-1, keepdim=True)
    return centerd / (centerd.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias


def test_a_fresh_head_answers_zero_or_its_bias():
    images = torch.randn(2, 3, 64, 64)
    assert not vitrail.create("Ti/16", depth=1, size=64)(images).any()
    assert (vitrail.create("Ti/16", depth=1, size=64, head_bias=-10.0)(images) == -10).all()


def test_dropout_is_where_the_paper_puts_it():
    model = vitrail.create("Ti/16", depth=3, dropout=0.1)
    sites = [name for name, module in model.named_modules() if isinstance(module, nn.Dropout)]
    assert len(sites) == 1 + 3 * 3
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.1}
    # After the positions, after attention's output, after both layers of the MLP; nowhere else.
    ends = {name.split(".", 2)[-1] for name in sites}
    assert ends == {"dropout", "mlp.dropout1", "mlp.dropout2"}


def test_dropout_acts_in_training_only():
    model = noisy(vitrail.create("Ti/16", depth=1, size=64, dropout=0.5))
    images = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(images), model(images))
    model.train()
    assert not torch.equal(model(images), model(images))


def test_drop_path_grows_with_depth_and_drops_whole_branches():
    model = vitrail.create("Ti/16", depth=4, drop_path=0.3)
    rates = [getattr(block.drop_path, "p", 0.0) for block in model.blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    block = noisy(vitrail.create("Ti/16", depth=2, drop_path=1.0)).blocks[1].train()
    x = torch.randn(2, 5, 192)
    assert torch.equal(block(x), x)


@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind.startswith("vit")])
def test_attention_weights_times_values_is_the_fused_result(kind):
    model = small(kind)
    images = torch.randn(2, 3, 64, 64)
    inputs = {}
    hooks = [
        module.register_forward_pre_hook(lambda _, x, i=i: inputs.__setitem__(i, x[0]))
        for i, module in enumerate(model.attention_layers())
    ]
    weights = model.attention(images)
    for hook in hooks:
        hook.remove()
    for i, module in enumerate(model.attention_layers()):
        _, _, v = module.split(inputs[i])
        explicit = (weights[i] @ v).transpose(1, 2).flatten(2)
        assert (module.out(explicit) - module(inputs[i])).abs().max() < 1e-5
        assert (weights[i].sum(-1) - 1).abs().max() < 1e-5


def test_only_the_chosen_layers_are_computed_and_no_hook_stays():
    model = small("vit")
    images = torch.randn(1, 3, 64, 64)
    assert list(model.attention(images, layers=[-1])) == [-1]
    assert torch.equal(model.attention(images, [-1])[-1], model.attention(images, [1])[1])
    with pytest.raises(vitrail.VitrailError, match="there are 2"):
        model.attention(images, layers=[0, 2])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_without_positions_patches_have_no_order():
    model = small("vit-no-positions")
    x, grid = model.embed(torch.randn(1, 3, 64, 64))
    order = torch.cat([torch.tensor([0]), 1 + torch.randperm(16)])
    assert (model.encode(x, grid)[:, 0] - model.encode(x[:, order], grid)[:, 0]).abs().max() < 1e-5
    ordered = small("vit")
    images = torch.randn(1, 3, 64, 64)
    assert (ordered(images) - ordered(images.flip(-1))).abs().max() > 1e-3


def test_the_eight_cells_of_table_8_differ():
    kinds = [
        "vit",
        "vit-no-positions",
        "vit-factorized",
        "vit-relative",
        "vit-every",
        "vit-shared",
        "vit-factorized-every",
        "vit-factorized-shared",
    ]
    counts = {kind: sum(p.numel() for p in small(kind).parameters()) for kind in kinds}
    plain, d = counts["vit-no-positions"], 192
    assert counts["vit"] == counts["vit-shared"] == plain + 17 * d
    assert counts["vit-every"] == plain + 2 * 17 * d
    assert counts["vit-factorized"] == counts["vit-factorized-shared"] == plain + (4 + 4) * d // 2
    assert counts["vit-factorized-every"] == plain + 2 * (4 + 4) * d // 2
    assert counts["vit-relative"] == plain + 2 * 33 * d


@pytest.mark.parametrize("injection", ["every", "shared"])
def test_positions_are_added_again_before_every_layer(injection):
    model = small("vit", injection=injection)
    images = torch.randn(1, 3, 64, 64)
    x, grid = model.embed(images)
    expected = model.blocks[0](x)
    again = model.positions[1 if injection == "every" else 0]
    expected = model.blocks[1](again(expected, grid))
    assert torch.equal(model.encode(x, grid), expected)


def test_factorized_positions_are_a_column_and_a_row_side_by_side():
    positions = small("vit-factorized", size=(32, 48)).positions[0]
    added = positions(torch.zeros(1, 7, 192), (2, 3))[0]
    assert not added[0].any()  # the class token
    for y in range(2):
        for x in range(3):
            expected = torch.cat([positions.columns[x], positions.rows[y]])
            assert torch.equal(added[1 + 3 * y + x], expected)


def test_global_average_pooling_averages_the_patches_alone():
    model = small("vit-gap")
    images = torch.randn(2, 3, 64, 64)
    assert model.tokens(images).shape == (2, 16, 192)
    assert (model.features(images) - model.tokens(images).mean(1)).abs().max() < 1e-6


def test_registers_ride_along_but_are_not_pooled():
    model = small("vit-registers", pool="mean", class_token=False)
    images = torch.randn(2, 3, 64, 64)
    tokens = model.tokens(images)
    assert tokens.shape == (2, 4 + 16, 192)
    assert (model.features(images) - tokens[:, 4:].mean(1)).abs().max() < 1e-6


def test_attention_pooling_is_one_query_and_an_mlp():
    model = small("vit-attention-pool").double()
    pool = model.pool
    x = torch.randn(2, 9, 192, dtype=torch.float64)
    weight = torch.cat([pool.q.weight, pool.kv.weight])
    bias = torch.cat([pool.q.bias, pool.kv.bias])
    y, _ = F.multi_head_attention_forward(
        pool.probe.expand(2, -1, -1).transpose(0, 1),
        x.transpose(0, 1),
        x.transpose(0, 1),
        embed_dim_to_check=192,
        num_heads=3,
        in_proj_weight=weight,
        in_proj_bias=bias,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=pool.out.weight,
        out_proj_bias=pool.out.bias,
    )
    expected = y[0] + pool.mlp(pool.norm(y[0]))
    assert (pool(x) - expected).abs().max() < 1e-10


def test_the_hidden_layer_of_pre_training_is_a_tanh_and_goes_when_the_head_is_replaced():
    model = small("vit-hidden")
    images = torch.randn(2, 3, 64, 64)
    pooled = model.pooled(model.tokens(images))
    assert torch.equal(model.features(images), model.hidden(pooled).tanh())
    model.replace_head(5)
    assert torch.equal(model(images), torch.zeros(2, 5))
    assert torch.equal(model.features(images), pooled)
    assert model.architecture.hidden == 0
    assert "hidden.weight" not in model.state_dict()


def test_as_wide_as_the_tokens_is_the_papers_hidden_layer():
    assert vitrail.create("Ti/16", depth=1, hidden=True).hidden.weight.shape == (192, 192)


def test_pixels_beyond_the_last_whole_patch_are_not_seen():
    """H/14 at 384 pixels: 27 patches a side, the last 6 rows and columns ignored."""
    model = noisy(vitrail.create("Ti/14", depth=1, size=384))
    assert model.architecture.grid == (27, 27)
    images = torch.randn(1, 3, 384, 384)
    other = images.clone()
    other[..., 378:, :] = 0
    other[..., 378:] = 1
    assert torch.equal(model(images), model(other))
    assert torch.equal(model(images), model(images[..., :378, :378]))


@pytest.mark.parametrize("kind", VITS)
@pytest.mark.parametrize("size", [(96, 128), (70, 100)])
def test_any_other_size_works(kind, size):
    assert small(kind)(torch.randn(2, 3, *size)).isfinite().all()


@pytest.mark.parametrize("channels", [1, 4])
def test_any_number_of_channels_works(channels):
    for kind in ("vit", "hybrid-root", "resnet", "axial-resnet", "classic-resnet"):
        model = small(kind, channels=channels)
        assert model(torch.randn(2, channels, 64, 64)).shape == (2, 7)


def test_intermediates_are_the_outputs_of_the_named_modules():
    model = small("vit")
    images = torch.randn(2, 3, 64, 64)
    found = model.intermediates(images, ["embedding", "blocks.0", "blocks.1.mlp", "norm"])
    assert list(found) == ["embedding", "blocks.0", "blocks.1.mlp", "norm"]
    assert found["embedding"].shape == (2, 192, 4, 4)
    assert torch.equal(found["norm"], model.tokens(images))
    with pytest.raises(vitrail.VitrailError, match=r"did you mean 'blocks.0'"):
        model.intermediates(images, ["block.0"])
    with pytest.raises(vitrail.VitrailError, match="'blocks' has no output of its own"):
        model.intermediates(images, ["blocks"])
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("resnet", ["root", "stages.0", "stages.1.0", "norm"]),
        ("classic-resnet", ["stem", "stages.3"]),
        ("axial-resnet", ["stem", "stages.2", "stages.2.0.rows"]),
        ("hybrid", ["backbone", "backbone.stage2", "blocks.0"]),
        ("axial-vit", ["blocks.0", "blocks.1.attention"]),
    ],
)
def test_every_family_names_its_intermediates(kind, names):
    found = small(kind).intermediates(torch.randn(1, 3, 64, 64), names)
    assert list(found) == names
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_predict_needs_what_load_brings():
    model = small("vit")
    with pytest.raises(vitrail.VitrailError, match=r"vitrail\.load"):
        model.predict(None)
