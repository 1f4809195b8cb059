"""Interpolation against scipy and against each peer's own code."""

import pytest
import scipy.ndimage
import torch
from timm.layers import resample_abs_pos_embed
from torchvision.models.vision_transformer import interpolate_embeddings
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTEmbeddings

import vitrail
from tests.models import small
from vitrail.model.positions import RelativePositions, resize_grid, sincos

SQUARES = [((14, 14), (24, 24)), ((7, 7), (12, 12)), ((16, 16), (37, 37)), ((24, 24), (14, 14))]
RECTANGLES = [((14, 14), (10, 30)), ((6, 9), (12, 5)), ((9, 6), (9, 7))]
WIDTH = 8


def table(grid: tuple[int, int], dtype=torch.float32) -> torch.Tensor:
    return torch.randn(1, grid[0] * grid[1], WIDTH, dtype=dtype)


@pytest.mark.parametrize(("old", "new"), SQUARES + RECTANGLES)
def test_googles_method_is_scipys_zoom(old, new):
    source = table(old, torch.float64)
    zoom = (new[0] / old[0], new[1] / old[1], 1)
    expected = scipy.ndimage.zoom(source.reshape(*old, WIDTH).numpy(), zoom, order=1)
    ours = resize_grid(source, old, new, "google").reshape(*new, WIDTH)
    assert (ours - torch.from_numpy(expected)).abs().max() < 1e-6
    single = resize_grid(source.float(), old, new, "google").reshape(*new, WIDTH)
    assert (single - torch.from_numpy(expected)).abs().max() < 1e-5


@pytest.mark.parametrize(("old", "new"), SQUARES + RECTANGLES)
def test_timms_method_is_timms(old, new):
    source = table(old)
    expected = resample_abs_pos_embed(source, list(new), list(old), num_prefix_tokens=0)
    assert (resize_grid(source, old, new, "timm") - expected).abs().max() < 1e-6


@pytest.mark.parametrize(("old", "new"), [*SQUARES, ((14, 14), (10, 30)), ((6, 6), (12, 5))])
def test_huggingfaces_method_is_transformers(old, new):
    config = ViTConfig(hidden_size=WIDTH, image_size=old[0] * 16, num_attention_heads=2)
    embeddings = ViTEmbeddings(config)
    source = table(old)
    slot = torch.randn(1, 1, WIDTH)
    embeddings.position_embeddings.data = torch.cat([slot, source], 1)
    tokens = torch.zeros(1, new[0] * new[1] + 1, WIDTH)
    expected = embeddings.interpolate_pos_encoding(tokens, new[0] * 16, new[1] * 16)
    assert torch.equal(expected[:, :1], slot)
    ours = resize_grid(source, old, new, "huggingface")
    assert (ours - expected[:, 1:]).abs().max() < 1e-6


@pytest.mark.parametrize(("old", "new"), SQUARES)
def test_torchvisions_method_is_torchvisions(old, new):
    source = table(old)
    slot = torch.randn(1, 1, WIDTH)
    state = {"encoder.pos_embedding": torch.cat([slot, source], 1)}
    expected = interpolate_embeddings(new[0] * 16, 16, state)["encoder.pos_embedding"]
    assert torch.equal(expected[:, :1], slot)
    ours = resize_grid(source, old, new, "torchvision")
    assert (ours - expected[:, 1:]).abs().max() < 1e-6


def test_the_methods_really_differ():
    source = table((14, 14))
    resized = [
        resize_grid(source, (14, 14), (24, 24), method)
        for method in ("google", "timm", "huggingface", "torchvision")
    ]
    for i, a in enumerate(resized):
        for j, b in enumerate(resized[:i]):
            # Enlarging, antialiasing has nothing to do: timm and huggingface agree there.
            assert (a - b).abs().max() > 0.1 or (j, i) == (1, 2)
    smaller = [resize_grid(source, (14, 14), (7, 7), m) for m in ("timm", "huggingface")]
    assert (smaller[0] - smaller[1]).abs().max() > 0.1


def test_the_same_grid_is_left_alone_to_the_bit():
    source = table((6, 9))
    assert resize_grid(source, (6, 9), (6, 9), "timm") is source


def test_loading_for_another_size_resizes_the_table_and_keeps_the_class_slot(tmp_path):
    model = small("vit", size=64)
    vitrail.save(model, tmp_path / "m.safetensors")
    for method in ("google", "timm"):
        loaded = vitrail.load(tmp_path / "m.safetensors", size=(96, 160), interpolation=method)
        expected = resize_grid(model.positions[0].table, (4, 4), (6, 10), method)
        assert torch.equal(loaded.positions[0].table, expected)
        assert torch.equal(loaded.positions[0].class_slot, model.positions[0].class_slot)
        assert loaded.architecture.size == (96, 160)


def test_the_default_method_is_that_of_the_checkpoints_family(tmp_path):
    model = small("vit", gelu="erf")
    for to, suffix in (("google", ".npz"), ("timm", ".pth"), ("torchvision", ".pth")):
        vitrail.save(model, tmp_path / f"{to}{suffix}", to=to)
        loaded = vitrail.load(tmp_path / f"{to}{suffix}", size=96)
        expected = resize_grid(model.positions[0].table, (4, 4), (6, 6), to)
        assert torch.equal(loaded.positions[0].table, expected)


@pytest.mark.parametrize("kind", ["vit", "vit-factorized", "vit-sincos", "vit-relative"])
def test_forward_interpolates_as_loading_does(kind, tmp_path):
    model = small(kind, size=64)
    vitrail.save(model, tmp_path / "m.safetensors")
    resized = vitrail.load(tmp_path / "m.safetensors", size=(96, 48))
    images = torch.randn(2, 3, 96, 48)
    with torch.inference_mode():
        assert (model(images) - resized(images)).abs().max() < 1e-5


def test_waves_are_those_of_the_formula():
    grid, width = (3, 5), 16
    ours = sincos(grid, width, torch.device("cpu"), torch.float64)[0]
    for y in range(3):
        for x in range(5):
            for i in range(4):
                angle = torch.tensor(10_000.0, dtype=torch.float64) ** (-i / 3)
                wanted = [
                    (x * angle).sin(),
                    (x * angle).cos(),
                    (y * angle).sin(),
                    (y * angle).cos(),
                ]
                found = ours[y * 5 + x].reshape(4, 4)[:, i]
                assert (found - torch.stack(wanted)).abs().max() < 1e-12


def test_relative_logits_are_the_query_against_the_offsets_embedding():
    tokens, heads, k = 5, 2, 4
    relative = RelativePositions(tokens, heads * k).double()
    q = torch.randn(3, heads, tokens, k, dtype=torch.float64)
    bias = relative(q)
    for h in range(heads):
        for i in range(tokens):
            for j in range(tokens):
                embedding = relative.table[i - j + tokens - 1, h * k : (h + 1) * k]
                wanted = q[:, h, i] @ embedding / k**0.5
                assert (bias[:, h, i, j] - wanted).abs().max() < 1e-12
