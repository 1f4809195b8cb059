"""Every dialect of Google's .npz: generations, prefixes, stacked blocks, folded norms."""

import numpy as np
import pytest
import torch

import vitrail
from tests.models import small
from vitrail.weights.google import GENERATIONS

OLD_POSITIONS = "Transformer/posembed_input/pos_embedding"


def arrays(model, path) -> dict[str, np.ndarray]:
    vitrail.save(model, path, to="google")
    with np.load(path) as file:
        return dict(file)


def linen(key: str) -> str:
    if key == OLD_POSITIONS:
        return "pos_embedding"
    if key.startswith("Transformer/encoderblock_"):
        for newer, older in GENERATIONS:
            key = key.replace(older, newer)
    return key


def stacked(named: dict[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    first = "Transformer/encoderblock_0/"
    parts = [key.removeprefix(first) for key in named if key.startswith(first)]
    kept = {key: x for key, x in named.items() if "encoderblock_" not in key}
    return kept | {
        f"Transformer/encoderblock/{part}": np.stack(
            [named[f"Transformer/encoderblock_{i}/{part}"] for i in range(depth)]
        )
        for part in parts
    }


def assert_same_model(model, path, **options) -> None:
    loaded = vitrail.load(path, **options)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("prefix", ["", "opt/target/", "params/", "params/img/"])
@pytest.mark.parametrize("generation", ["older", "linen", "stacked"])
@pytest.mark.parametrize("slot", [True, False])
def test_every_spelling_gives_the_same_tensors(prefix, generation, slot, tmp_path):
    model = small("vit", class_slot=slot)
    named = arrays(model, tmp_path / "a.npz")
    # Without a class slot our own file is in the newer names already.
    named = {key.removeprefix("params/"): x for key, x in named.items()}
    if generation != "older":
        named = {linen(key): x for key, x in named.items()}
    if generation == "stacked":
        named = stacked(named, depth=2)
    np.savez(tmp_path / "b.npz", **{prefix + key: x for key, x in named.items()})
    assert_same_model(model, tmp_path / "b.npz")


def test_position_embeddings_at_the_place_between_the_generations_are_found(tmp_path):
    model = small("vit")
    named = arrays(model, tmp_path / "a.npz")
    named["Transformer/pos_embedding"] = named.pop(OLD_POSITIONS)
    np.savez(tmp_path / "b.npz", **named)
    assert_same_model(model, tmp_path / "b.npz")


def test_a_text_tower_and_an_optimizers_state_are_left_alone(tmp_path):
    model = small("vit-attention-pool")
    named = arrays(model, tmp_path / "a.npz")
    assert all(key.startswith("params/") for key in named)
    named = {key.replace("params/", "params/img/"): x for key, x in named.items()}
    extra = {
        "params/txt/head/kernel": np.zeros(3),
        "opt/count": np.zeros(1),
        "params/t": np.ones(1),
    }
    np.savez(tmp_path / "b.npz", **named, **extra)
    assert_same_model(model, tmp_path / "b.npz")


def test_the_first_attention_pooled_files_are_read(tmp_path):
    model = small("vit-attention-pool")
    named = arrays(model, tmp_path / "a.npz")
    np.savez(tmp_path / "b.npz", **{key.replace("MAPHead_0/", ""): x for key, x in named.items()})
    assert_same_model(model, tmp_path / "b.npz")


def test_fixed_waves_are_recognized_by_their_absence(tmp_path):
    model = small("vit-sincos", pool="mean", class_token=False)
    named = arrays(model, tmp_path / "a.npz")
    assert not any("pos_embedding" in key for key in named)
    assert_same_model(model, tmp_path / "a.npz", size=64)


def test_hybrids_may_keep_their_norms_with_leading_axes(tmp_path):
    model = small("hybrid")
    named = arrays(model, tmp_path / "a.npz")
    assert named["embedding/kernel"].shape == (1, 1, 2048, 384)
    assert named["block1/unit1/conv_proj/kernel"].shape == (1, 1, 64, 256)
    norms = {key for key in named if "/gn" in key or key.startswith("gn_root")}
    folded = {key: x[None, None, None] if key in norms else x for key, x in named.items()}
    np.savez(tmp_path / "b.npz", **folded)
    assert_same_model(model, tmp_path / "b.npz")


def test_bit_files_may_number_their_convolutions(tmp_path):
    model = small("resnet", size=224)
    named = arrays(model, tmp_path / "a.npz")
    assert named["resnet/head/conv2d/kernel"].shape == (1, 1, 2048, 7)
    assert "resnet/block2/unit02/b/group_norm/gamma" in named
    numbered = {
        key.replace("standardized_conv2d", f"standardized_conv2d_{i}"): x
        for i, (key, x) in enumerate(named.items())
    }
    np.savez(tmp_path / "b.npz", **numbered)
    assert_same_model(model, tmp_path / "b.npz")


def test_shapes_are_those_of_the_published_files(tmp_path):
    named = arrays(small("vit", hidden=192), tmp_path / "a.npz")
    block = "Transformer/encoderblock_1/"
    shapes = {
        "cls": (1, 1, 192),
        "embedding/kernel": (16, 16, 3, 192),
        OLD_POSITIONS: (1, 17, 192),
        f"{block}LayerNorm_0/scale": (192,),
        f"{block}MultiHeadDotProductAttention_1/query/kernel": (192, 3, 64),
        f"{block}MultiHeadDotProductAttention_1/query/bias": (3, 64),
        f"{block}MultiHeadDotProductAttention_1/out/kernel": (3, 64, 192),
        f"{block}MlpBlock_3/Dense_0/kernel": (192, 768),
        "Transformer/encoder_norm/bias": (192,),
        "pre_logits/kernel": (192, 192),
        "head/kernel": (192, 7),
    }
    assert {key: named[key].shape for key in shapes} == shapes


def test_bfloat16_files_are_read_as_bfloat16(tmp_path):
    model = small("vit").bfloat16()
    named = arrays(model, tmp_path / "a.npz")
    assert named["cls"].dtype == np.dtype("V2")
    assert_same_model(model, tmp_path / "a.npz")
