import pytest
import torch

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


@pytest.mark.parametrize("wrong", [{"pool": "max"}, {"dim_head": 5}])
def test_what_the_paper_does_not_have_is_one_line(wrong):
    with pytest.raises(VitrailError):
        ViT(
            image_size=32,
            patch_size=16,
            num_classes=2,
            dim=12,
            depth=1,
            heads=2,
            mlp_dim=8,
            **wrong,
        )
