import pytest
import torch

import vitrail
from vitrail import VitrailError
from vitrail.vit_pytorch import ViT


def test_the_example_call_runs_unchanged():
    v = ViT(
        image_size=256,
        patch_size=32,
        num_classes=1000,
        dim=1024,
        depth=6,
        heads=16,
        mlp_dim=2048,
        dropout=0.1,
        emb_dropout=0.1,
    )
    img = torch.randn(1, 3, 256, 256)
    preds = v(img)
    assert preds.shape == (1, 1000)


def test_every_keyword_arrives():
    model = ViT(
        image_size=(64, 96),
        patch_size=16,
        num_classes=5,
        dim=96,
        depth=2,
        heads=3,
        mlp_dim=128,
        pool="mean",
        channels=1,
        dim_head=32,
        dropout=0.2,
        emb_dropout=0.3,
    )
    a = model.architecture
    assert (a.size, a.patch, a.classes, a.width, a.depth) == ((64, 96), 16, 5, 96, 2)
    assert (a.heads, a.mlp, a.pool, a.channels) == (3, 128, "mean", 1)
    assert model.dropout.p == 0.3
    assert model.blocks[0].dropout.p == 0.2
    assert model(torch.randn(2, 1, 64, 96)).shape == (2, 5)


def test_it_is_the_papers_block():
    model = ViT(image_size=32, patch_size=16, num_classes=2, dim=12, depth=1, heads=2, mlp_dim=8)
    assert model.blocks[0].attention.qkv.bias is not None
    assert not model.class_token.any()


TINY = {"image_size": 32, "patch_size": 16, "num_classes": 2, "dim": 12, "depth": 1, "heads": 2}


@pytest.mark.parametrize(("options", "width"), [({}, 64), ({"dim_head": 5}, 5)])
def test_a_head_is_as_wide_as_dim_head_says(options, width, tmp_path):
    model = ViT(**TINY, mlp_dim=8, **options).eval()
    attention = model.blocks[0].attention
    assert attention.qkv.weight.shape == (3 * 2 * width, 12)
    assert attention.out.weight.shape == (12, 2 * width)
    images = torch.randn(2, 3, 32, 32)
    assert model.attention(images)[0].shape == (2, 2, 5, 5)
    torch.nn.init.normal_(model.head.weight)
    vitrail.save(model, tmp_path / "model.safetensors")
    vitrail.save(model, tmp_path / "model.npz", to="google")
    for name in ("model.safetensors", "model.npz"):
        assert torch.equal(vitrail.load(tmp_path / name)(images), model(images))
    with pytest.raises(VitrailError, match="timm has no heads of width"):
        vitrail.save(model, tmp_path / "timm.safetensors", to="timm")


def test_patches_may_be_rectangles(tmp_path):
    model = ViT(**TINY | {"image_size": (32, 48), "patch_size": (16, 8)}, mlp_dim=8).eval()
    assert model.architecture.grid == (2, 6)
    assert model.embedding.weight.shape == (12, 3, 16, 8)
    images = torch.randn(2, 3, 32, 48)
    torch.nn.init.normal_(model.head.weight)
    vitrail.save(model, tmp_path / "model.safetensors")
    assert torch.equal(vitrail.load(tmp_path / "model.safetensors")(images), model(images))
    with pytest.raises(VitrailError, match="patches that are not square"):
        vitrail.save(model, tmp_path / "model.npz", to="google")
    assert ViT(**TINY | {"patch_size": (16, 16)}, mlp_dim=8).architecture.patch == 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"pool": "max"},
        {"dim_head": 0},
        {"image_size": 40},
        {"image_size": (32, 40)},
        {"patch_size": (16, 12)},
    ],
)
def test_what_cannot_be_built_is_one_line(wrong):
    with pytest.raises(VitrailError):
        ViT(**TINY | wrong, mlp_dim=8)
