"""timm as the oracle: its files load here, ours load strictly there, and the logits agree."""

import json
from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.layers import GroupNormAct
from timm.models.resnetv2 import ResNetV2
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_hybrid import HybridEmbed, _resnetv2

import vitrail
from tests.models import noisy, small
from vitrail.weights.files import Contents
from vitrail.weights.timm import exceptions, preprocessing

TINY = {"img_size": 64, "embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 7}
VITS = {
    "class token": {},
    "average pooling": {"class_token": False, "global_pool": "avg"},
    "average pooling, norm before it": {
        "class_token": False,
        "global_pool": "avg",
        "fc_norm": False,
    },
    "attention pooling": {"class_token": False, "global_pool": "map"},
    "DeiT-III": {"no_embed_class": True, "init_values": 1e-4},
    "DINOv2 with registers": {"no_embed_class": True, "init_values": 1e-4, "reg_tokens": 4},
    "no positions": {"pos_embed": "none"},
    "features only": {"num_classes": 0},
    "grey images": {"in_chans": 1},
    "rectangle": {"img_size": (64, 96)},
}


def hybrid(units: tuple[int, ...], **options) -> VisionTransformer:
    backbone = _resnetv2(units)
    embed = partial(HybridEmbed, backbone=backbone)
    return VisionTransformer(**TINY | options, embed_layer=embed)


def bit(units: tuple[int, ...] = (1, 2, 1, 1), width: int = 1) -> ResNetV2:
    conv = partial(timm.layers.StdConv2d, eps=1e-8)
    return ResNetV2(
        layers=units,
        width_factor=width,
        num_classes=7,
        stem_type="fixed",
        conv_layer=conv,
        norm_layer=partial(GroupNormAct, num_groups=32),
    )


def largest_difference(ours, theirs, *shape: int) -> float:
    images = torch.randn(3, *shape)
    with torch.inference_mode():
        return (ours.eval()(images) - theirs.eval()(images)).abs().max().item()


@pytest.mark.parametrize("kind", VITS)
def test_a_file_of_timms_vit_gives_its_logits(kind, tmp_path):
    theirs = noisy(VisionTransformer(**TINY | VITS[kind]))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    height, width = theirs.patch_embed.img_size
    ours = vitrail.load(tmp_path / "model.safetensors", size=(height, width))
    channels = theirs.patch_embed.proj.in_channels
    assert largest_difference(ours, theirs, channels, height, width) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("vit", {}),
        ("vit-gap", {"class_token": False, "global_pool": "avg", "fc_norm": False}),
        ("vit-attention-pool", {"class_token": False, "global_pool": "map"}),
        ("vit-deit3", {"no_embed_class": True, "init_values": 1.0}),
        ("vit-registers", {"no_embed_class": True, "reg_tokens": 4}),
        ("vit-no-positions", {"pos_embed": "none"}),
        ("vit-sincos", {"no_embed_class": True}),  # the waves written out as a table
    ],
)
def test_our_file_loads_strictly_in_timm_and_gives_our_logits(kind, options, tmp_path):
    ours = small(kind, gelu="erf")
    vitrail.save(ours, tmp_path / "ours.safetensors", to="timm")
    theirs = VisionTransformer(**TINY | options)
    theirs.load_state_dict(load_file(tmp_path / "ours.safetensors"), strict=True)
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5


def test_beside_registers_the_class_position_is_folded_into_the_token(tmp_path):
    ours = small("vit-registers", class_slot=True, gelu="erf")
    vitrail.save(ours, tmp_path / "ours.safetensors", to="timm")
    theirs = VisionTransformer(**TINY, no_embed_class=True, reg_tokens=4)
    theirs.load_state_dict(load_file(tmp_path / "ours.safetensors"), strict=True)
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5


def test_dinov2s_own_names_are_known(tmp_path):
    options = {"init_values": 1e-4, "num_classes": 0, "reg_tokens": 4, "no_embed_class": True}
    theirs = noisy(VisionTransformer(**TINY | options))
    state = theirs.state_dict()
    slot = torch.randn(1, 1, 192)
    state["register_tokens"] = state.pop("reg_token")
    state["pos_embed"] = torch.cat([slot, state["pos_embed"]], 1)
    state["cls_token"] = state["cls_token"] - slot
    state["mask_token"] = torch.zeros(1, 192)
    save_file(state, tmp_path / "dinov2.safetensors")
    ours = vitrail.load(tmp_path / "dinov2.safetensors")
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5


@pytest.mark.parametrize("width", [1, 2])
def test_bit_resnets_agree_both_ways(width, tmp_path):
    theirs = noisy(bit(width=width))
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    ours = vitrail.load(tmp_path / "theirs.safetensors")
    assert largest_difference(ours, theirs, 3, 65, 96) < 1e-4
    vitrail.save(ours, tmp_path / "ours.safetensors", to="timm")
    back = load_file(tmp_path / "ours.safetensors")
    assert all(torch.equal(tensor, back[key]) for key, tensor in theirs.state_dict().items())
    theirs.load_state_dict(back, strict=True)


@pytest.mark.parametrize(("units", "patch"), [((1, 1, 2), 1), ((1, 1, 1, 1), 1), ((), 8)])
def test_hybrids_agree_up_to_the_epsilons_of_their_resnets(units, patch, tmp_path):
    """timm standardises with sqrt(var + 1e-8) and norms with 1e-5, the reference with std + 1e-5
    and 1e-6: the logits differ by rounding of that size, and the tensors not at all."""
    theirs = noisy(hybrid(units, patch_size=patch))
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    ours = vitrail.load(tmp_path / "theirs.safetensors")
    assert ours.architecture.backbone == units
    assert largest_difference(ours, theirs, 3, 64, 64) < 5e-3
    vitrail.save(ours, tmp_path / "ours.safetensors", to="timm")
    back = load_file(tmp_path / "ours.safetensors")
    theirs.load_state_dict(back, strict=True)
    assert all(torch.equal(tensor, back[key]) for key, tensor in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("vit", partial(VisionTransformer, **TINY)),
        (
            "vit-attention-pool",
            partial(VisionTransformer, **TINY, class_token=False, global_pool="map"),
        ),
        ("vit-deit3-like", partial(VisionTransformer, **TINY, no_embed_class=True)),
        ("hybrid", partial(hybrid, (1, 1, 1, 1), patch_size=1)),
        ("hybrid-root", partial(hybrid, (), patch_size=8)),
        ("resnet", partial(bit)),
    ],
)
def test_timms_own_npz_loader_reads_our_google_files(kind, model, tmp_path):
    source = noisy(model())
    save_file(source.state_dict(), tmp_path / "timm.safetensors")
    vitrail.convert(tmp_path / "timm.safetensors", tmp_path / "ours.npz", to="google")
    theirs = model()
    theirs.load_pretrained(str(tmp_path / "ours.npz"))
    loaded = theirs.state_dict()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in source.state_dict().items())


def test_a_hub_folder_brings_heads_pooling_preprocessing_and_labels(tmp_path):
    theirs = noisy(VisionTransformer(**TINY | {"num_heads": 6}))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 7,
        "global_pool": "token",
        "model_args": {"num_heads": 6},
        "label_names": list("abcdefg"),
        "pretrained_cfg": {
            "input_size": [3, 64, 64],
            "crop_pct": 0.8,
            "interpolation": "bilinear",
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = vitrail.load(tmp_path)
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5
    assert ours.labels == tuple("abcdefg")
    assert (ours.preprocess.short_side, ours.preprocess.interpolation) == (80, "bilinear")
    assert ours.preprocess.mean == (0.1, 0.2, 0.3)


def test_a_preprocessing_that_cannot_be_followed_is_none_rather_than_wrong():
    def described(**told):
        contents = Contents(path=Path("model"), tensors={}, config={"pretrained_cfg": told})
        return preprocessing(contents, vitrail.create("Ti/16", depth=1).architecture)

    assert described(crop_pct=1.0, crop_mode="squash").short_side == 0
    assert described(crop_pct=0.875).short_side == 256
    assert described(crop_pct=0.9, crop_mode="squash") is None
    assert described(crop_mode="border") is None
    assert described(interpolation="lanczos") is None


def test_which_of_timms_models_have_the_tanh_gelu_is_known():
    for name in timm.list_models("vit_*siglip*"):
        with torch.device("meta"):
            block = timm.create_model(name).blocks[0]
        contents = Contents(path=Path("model"), tensors={}, config={"architecture": name})
        tanh = getattr(block.mlp.act, "approximate", None) == "tanh" or "Tanh" in str(block.mlp.act)
        assert exceptions(contents) == ({"gelu": "tanh"} if tanh else {}), name


def test_the_real_weights_give_timms_logits_on_real_photographs(real_weights, flowers):
    theirs = timm.create_model("vit_tiny_patch16_224", checkpoint_path=str(real_weights)).eval()
    ours = vitrail.load(real_weights)
    config = timm.data.resolve_data_config({}, model=theirs)
    transform = timm.data.create_transform(**config)
    images = torch.stack([transform(picture) for picture in flowers])
    same = torch.stack([ours.preprocess(picture) for picture in flowers])
    assert images.shape == (64, 3, 224, 224)
    assert (images - same).abs().max() < 1e-6
    with torch.inference_mode():
        expected, logits = theirs(images), ours(images)
        assert (logits - expected).abs().max() < 1e-4
        assert torch.equal(logits.argmax(1), expected.argmax(1))
        expected, logits = theirs.double()(images.double()), ours.double()(images.double())
        assert (logits - expected).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["vit", "vit-gap", "vit-deit3", "vit-registers", "R50x1"])
def test_timm_loads_a_converted_folder_as_it_is(kind, tmp_path):
    sized = {"size": 64, "classes": 5}
    model = vitrail.create("R50x1", **sized) if kind == "R50x1" else small(kind, **sized)
    vitrail.save(model, tmp_path / "ours.safetensors")
    vitrail.convert(tmp_path / "ours.safetensors", tmp_path / "theirs", to="timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'theirs'}", pretrained=True).eval()
    ours = vitrail.load(tmp_path / "theirs").eval()
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.allclose(theirs(images), ours(images), atol=1e-4)
