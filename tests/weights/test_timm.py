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
from tests.models import attentive, noisy, small
from vitrail.weights import load
from vitrail.weights.read import Contents
from vitrail.weights.timm import TIMM

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
    "gray images": {"in_chans": 1},
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
    """timm standardizes with sqrt(var + 1e-8) and norms with 1e-5, the reference with std + 1e-5
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
        return TIMM.preprocessing(contents, vitrail.create("Ti/16", depth=1).architecture)

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
        assert TIMM.exceptions(contents) == ({"gelu": "tanh"} if tanh else {}), name


def test_a_checkpoint_gives_timms_logits_on_photographs(checkpoint, scenes):
    theirs = timm.create_model("vit_tiny_patch16_224", depth=2, checkpoint_path=str(checkpoint))
    ours = vitrail.load(checkpoint)
    config = timm.data.resolve_data_config({}, model=theirs.eval())
    transform = timm.data.create_transform(**config)
    images = torch.stack([transform(picture) for picture in scenes[:16]])
    same = torch.stack([ours.preprocess(picture) for picture in scenes[:16]])
    assert images.shape == (16, 3, 224, 224)
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


@pytest.fixture
def read(monkeypatch):
    """A model of timm as Vitrail describes it, from its shapes alone: as a bare file, or as a
    folder whose config.json is given."""

    def read(name: str, **config) -> load.Checkpoint:
        with torch.device("meta"):
            tensors = dict(timm.create_model(name).state_dict())
        contents = Contents(path=Path("model"), tensors=tensors, config=config)
        monkeypatch.setattr(load, "read", lambda path: contents)
        return load.read_checkpoint(contents.path)

    return read


@pytest.mark.parametrize(
    "name",
    [
        *("vit_giantopt_patch16_siglip_256", "vit_giantopt_patch16_siglip_gap_384"),
        *("vit_so400m_patch14_siglip_224", "vit_so400m_patch16_siglip_gap_256"),
        *("vit_large_patch16_siglip_384", "vit_large_patch16_siglip_512"),
        *("vit_base_patch32_siglip_256", "vit_base_patch16_plus_240"),
        *("vit_giant_patch14_224", "vit_gigantic_patch14_224", "test_vit"),
        *("vit_little_patch16_reg1_gap_256", "vit_small_patch16_36x1_224"),
    ],
)
def test_heads_and_gelu_follow_from_the_name_and_from_the_shape(name, read):
    with torch.device("meta"):
        block = timm.create_model(name).blocks[0]
    tanh = "tanh" in str(block.mlp.act).lower()
    for config in ({}, {"architecture": name}):
        checkpoint = read(name, **config)
        a = checkpoint.architecture
        assert (a.heads, a.gelu) == (block.attn.num_heads, "tanh" if tanh else "erf")
        assert bool(checkpoint.assumed) == (not config)


@pytest.mark.parametrize(
    ("name", "options"),
    [("test_vit", {"img_size": 32}), ("vit_base_patch16_gap_224", {"img_size": 32, "depth": 1})],
)
def test_a_folder_that_names_its_architecture_has_its_heads(name, options, tmp_path, capsys):
    theirs = attentive(timm.create_model(name, num_classes=7, **options))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    assert largest_difference(vitrail.load(tmp_path), theirs, 3, 32, 32) < 1e-4
    assert capsys.readouterr().err == ""


def test_what_a_bare_file_leaves_open_is_said_in_one_line_and_can_be_set(tmp_path, capsys):
    theirs = attentive(VisionTransformer(**TINY | {"num_heads": 6}, act_layer="gelu_tanh"))
    path = tmp_path / "model.safetensors"
    save_file(theirs.state_dict(), path)
    assert largest_difference(vitrail.load(path), theirs, 3, 64, 64) > 0.1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "3 heads of 64" in said
    assert "erf GELU" in said
    ours = vitrail.load(path, heads=6, gelu="tanh")
    assert largest_difference(ours, theirs, 3, 64, 64) < 1e-5
    assert "heads" not in capsys.readouterr().err
    told = tmp_path / "told.safetensors"
    vitrail.convert(path, told, to="vitrail", heads=6, gelu="tanh")
    assert largest_difference(vitrail.load(told), theirs, 3, 64, 64) < 1e-5
    assert vitrail.load(told, heads=6).architecture.heads == 6
    with pytest.raises(vitrail.VitrailError, match="6"):
        vitrail.load(told, heads=3)
    with pytest.raises(vitrail.VitrailError, match="heads"):
        vitrail.load(path, heads=5)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("vit_small_patch16_rope_224", "rotary"),
        ("vit_small_patch16_rope_mixed_ape_224", "rotary"),
        ("deit_tiny_distilled_patch16_224", "distilled DeiT"),
        ("vit_giant_patch14_dinov2", "SwiGLU"),
        ("vit_base_patch32_clip_224", "CLIP"),
        ("beit_base_patch16_224", "BEiT"),
        ("vit_so150m_patch16_reg4_gap_256", "so150m"),
    ],
)
def test_another_family_is_refused_by_name(name, family, read):
    for config in ({}, {"architecture": name}):
        with pytest.raises(vitrail.VitrailError, match=family):
            read(name, **config)


def test_dinov2s_own_giant_is_refused_by_name(tmp_path):
    theirs = VisionTransformer(**TINY)
    renamed = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"}
    state = theirs.state_dict()
    for ours, own in renamed.items():
        state = {key.replace(ours, own): x for key, x in state.items()}
    save_file(state, tmp_path / "dinov2.safetensors")
    with pytest.raises(vitrail.VitrailError, match="SwiGLU"):
        vitrail.load(tmp_path / "dinov2.safetensors")


@pytest.mark.parametrize(
    ("name", "refused", "said"),
    [
        ("resnetaa50", "resnetaa50", "resnetaa"),
        ("resnetblur18", "resnetblur18", "resnetblur"),
        ("vit_small_patch16_rope_ape_224", "rotary", "no rotary"),
    ],
)
def test_a_lookalike_is_refused_by_name_or_what_is_assumed_is_said(name, refused, said, read):
    with pytest.raises(vitrail.VitrailError, match=refused):
        read(name, architecture=name)
    assert said in read(name).assumed


def test_a_config_is_obeyed_or_refused_by_the_name_of_its_field(tmp_path):
    theirs = attentive(VisionTransformer(**TINY, act_layer="gelu_tanh", global_pool="avg"))
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")

    def loaded(**arguments):
        config = {"architecture": "vit_tiny_patch16_224", "model_args": arguments}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return vitrail.load(tmp_path)

    told = {"act_layer": "gelu_tanh", "global_pool": "avg", "norm_layer": None}
    assert largest_difference(loaded(**told), theirs, 3, 64, 64) < 1e-5
    for wrong in (
        {"act_layer": "quick_gelu"},
        {"global_pool": "max"},
        {"pool_include_prefix": True},
        {"norm_layer": "rmsnorm"},
    ):
        with pytest.raises(vitrail.VitrailError, match=next(iter(wrong))):
            loaded(**told | wrong)


def test_attention_pooling_that_leaves_tokens_out_is_refused(tmp_path):
    theirs = VisionTransformer(**TINY, reg_tokens=2, no_embed_class=True, global_pool="map")
    save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(vitrail.VitrailError, match="attention pooling"):
        vitrail.load(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["resnet18", "resnetv2_50x1_bit"])
def test_a_resnets_config_decides_how_images_are_prepared(name, read):
    told = {"input_size": [3, 320, 320], "crop_pct": 0.95, "interpolation": "bicubic"}
    colors = {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    pre = read(name, architecture=name, pretrained_cfg=told | colors).preprocessing
    assert (pre.size, pre.short_side, pre.interpolation) == ((320, 320), 336, "bicubic")
    assert (pre.mean, pre.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
