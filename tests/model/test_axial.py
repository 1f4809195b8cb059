"""Attention along rows and columns, against loops over lines and places."""

import pytest
import torch

from tests.models import small
from vitrail.model.axial import GROUPS, LineAttention
from vitrail.model.vit import AxialAttention


@pytest.mark.parametrize("axis", ["row", "column"])
def test_axial_attention_is_attention_inside_each_line(axis):
    attention = AxialAttention(24, 3, axis).double()
    x = torch.randn(2, 4, 5, 24, dtype=torch.float64)
    lines = x if axis == "row" else x.transpose(1, 2)
    expected = torch.stack([line_by_line(attention, lines[:, i]) for i in range(lines.shape[1])], 1)
    expected = expected if axis == "row" else expected.transpose(1, 2)
    assert (attention(x) - expected).abs().max() < 1e-12


def line_by_line(attention, line):
    q, k, v = attention.qkv(line).chunk(3, -1)
    heads = []
    for h in range(3):
        part = slice(8 * h, 8 * (h + 1))
        weights = torch.softmax(q[..., part] @ k[..., part].mT / 8**0.5, -1)
        heads.append(weights @ v[..., part])
    return attention.out(torch.cat(heads, -1))


@pytest.mark.parametrize("axis", ["row", "column"])
def test_axial_weights_over_the_whole_grid_give_the_fused_result(axis):
    attention = AxialAttention(24, 3, axis).double()
    x = torch.randn(2, 4, 5, 24, dtype=torch.float64)
    weights = attention.weights(x)
    v = attention.qkv(x).chunk(3, -1)[2].flatten(1, 2)
    v = v.unflatten(-1, (3, 8)).transpose(1, 2)
    explicit = attention.out((weights @ v).transpose(1, 2).flatten(2)).unflatten(1, (4, 5))
    assert (explicit - attention(x)).abs().max() < 1e-12


def test_a_row_then_a_column_reach_the_whole_grid():
    model = small("axial-vit")
    rows, columns = model.attention(torch.randn(1, 3, 64, 64)).values()
    assert ((columns @ rows) > 0).all()
    assert (rows[0, 0].reshape(4, 4, 4, 4)[0, 0, 1:] == 0).all()


@pytest.mark.parametrize("axis", ["row", "column"])
def test_line_attention_is_the_sum_of_its_three_terms(axis):
    """Axial-DeepLab's equation, place by place; batch norms in evaluation are affine."""
    attention = LineAttention(16, 5, axis).double().eval()
    for norm in (attention.logits_norm, attention.output_norm, attention.qkv_norm):
        torch.nn.init.normal_(norm.weight)
        torch.nn.init.normal_(norm.bias)
    x = torch.randn(1, 16, 5, 5, dtype=torch.float64)
    found = attention(x)
    line = x[..., 2, :] if axis == "row" else x[..., :, 2]
    expected = one_line(attention, line)
    got = found[0, :, 2, :] if axis == "row" else found[0, :, :, 2]
    assert (got - expected).abs().max() < 1e-10


def one_line(attention, line):
    qkv = attention.qkv_norm(attention.qkv(line))[0].unflatten(0, (GROUPS, -1))
    q, k, v = qkv.split([1, 1, 2], 1)
    scale = attention.logits_norm.weight / (1 + attention.logits_norm.eps) ** 0.5
    shift = attention.logits_norm.bias
    m = line.shape[-1]
    content, place = (torch.zeros(GROUPS, 2, m, dtype=torch.float64) for _ in range(2))
    for g in range(GROUPS):
        logits = torch.zeros(m, m, dtype=torch.float64)
        for i in range(m):
            for j in range(m):
                rq = attention.offsets[i - j + m - 1][:1]
                rk = attention.offsets[j - i + m - 1][1:2]
                terms = (q[g, :, i] @ k[g, :, j], q[g, :, i] @ rq, k[g, :, j] @ rk)
                for t, term in enumerate(terms):
                    logits[i, j] += term * scale[t * GROUPS + g] + shift[t * GROUPS + g]
        weights = logits.softmax(-1)
        for i in range(m):
            for j in range(m):
                rv = attention.offsets[i - j + m - 1][2:]
                content[g, :, i] += weights[i, j] * v[g, :, j]
                place[g, :, i] += weights[i, j] * rv
    pairs = torch.stack([content.flatten(0, 1), place.flatten(0, 1)], 1).flatten(0, 1)
    return attention.output_norm(pairs[None])[0].unflatten(0, (-1, 2)).sum(1)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("axial-resnet", 224, [56, 56, 28, 14]),
        ("axial-resnet-small-root", 32, [32, 32, 16, 8]),
        ("axial-resnet-small-root", 33, [33, 33, 17, 9]),
    ],
)
def test_spans_follow_the_map_through_the_stages(kind, size, expected):
    model = small(kind, size=size)
    spans = [(len(unit.columns.offsets) + 1) // 2 for stage in model.stages for unit in stage]
    assert spans == expected
    lines = [x.shape[-1] for x in rows_of(model, size)]
    assert lines == expected


def rows_of(model, size):
    """What the row attention of each unit gets."""
    inputs = []
    for stage in model.stages:
        for unit in stage:
            unit.rows.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    model(torch.randn(1, 3, size, size))
    return inputs
