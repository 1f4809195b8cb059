"""torchvision as the oracle: its files load here, ours load strictly there, the logits agree."""

from pathlib import Path

import pytest
import torch
import torchvision

import vitrail
from tests.models import attentive, noisy, small
from vitrail.weights import load
from vitrail.weights.read import Contents


def theirs_vit(**options) -> torchvision.models.VisionTransformer:
    tiny = {
        "image_size": 64,
        "patch_size": 16,
        "num_layers": 2,
        "num_heads": 3,
        "hidden_dim": 192,
        "mlp_dim": 768,
        "num_classes": 7,
    }
    return noisy(torchvision.models.VisionTransformer(**tiny | options))


def largest_difference(ours, theirs, side: int = 64) -> float:
    images = torch.randn(3, 3, side, side)
    with torch.inference_mode():
        return (ours.eval()(images) - theirs.eval()(images)).abs().max().item()


@pytest.mark.parametrize("options", [{}, {"representation_size": 40}])
def test_a_file_of_torchvisions_vit_gives_its_logits(options, tmp_path):
    theirs = theirs_vit(**options)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    assert largest_difference(vitrail.load(tmp_path / "vit.pth"), theirs) < 1e-5


def test_the_older_names_of_the_mlp_are_known(tmp_path):
    theirs = theirs_vit()
    state = {
        key.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for key, tensor in theirs.state_dict().items()
    }
    torch.save(state, tmp_path / "vit.pth")
    assert largest_difference(vitrail.load(tmp_path / "vit.pth"), theirs) < 1e-5


@pytest.mark.parametrize(
    ("kind", "options"), [("vit", {}), ("vit-hidden", {"representation_size": 40})]
)
def test_our_file_loads_strictly_in_torchvision_and_gives_our_logits(kind, options, tmp_path):
    ours = small(kind, gelu="erf")
    vitrail.save(ours, tmp_path / "ours.pth", to="torchvision")
    theirs = theirs_vit(**options)
    theirs.load_state_dict(torch.load(tmp_path / "ours.pth", weights_only=True), strict=True)
    assert largest_difference(ours, theirs) < 1e-5


@pytest.mark.parametrize("depth", [18, 50])
def test_classic_resnets_agree_both_ways(depth, tmp_path):
    theirs = noisy(getattr(torchvision.models, f"resnet{depth}")(num_classes=7))
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = vitrail.load(tmp_path / "theirs.pth")
    assert ours.architecture.depth == depth
    assert largest_difference(ours, theirs) < 1e-5
    vitrail.save(ours, tmp_path / "ours.pth", to="torchvision")
    back = torch.load(tmp_path / "ours.pth", weights_only=True)
    assert all(torch.equal(tensor, back[key]) for key, tensor in theirs.state_dict().items())
    theirs.load_state_dict(back, strict=True)


def prepared(path) -> tuple[int, int, str]:
    pre = vitrail.load(path).preprocess
    return min(pre.size), pre.short_side, pre.interpolation


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_b_16_swag-9ac1b537.pth", (64, 64, "bicubic")),
        ("vit_b_16_lc_swag-4e70ced5.pth", (64, 64, "bicubic")),
        ("vit_l_16-852ce7e3.pth", (64, 69, "bilinear")),
        ("vit_b_16-c867db91.pth", (64, 73, "bilinear")),
        ("mine.pth", (64, 73, "bilinear")),
    ],
)
def test_a_published_file_opened_by_its_path_is_prepared_as_published(name, expected, tmp_path):
    torch.save(theirs_vit().state_dict(), tmp_path / name)
    assert prepared(tmp_path / name) == expected


def test_a_shape_that_only_swag_has_is_prepared_as_swag(monkeypatch):
    with torch.device("meta"):
        tensors = torchvision.models.vit_b_16(image_size=384).state_dict()
    contents = Contents(path=Path("renamed.pth"), tensors=dict(tensors))
    monkeypatch.setattr(load, "read", lambda path: contents)
    pre = load.read_checkpoint(contents.path).preprocessing
    assert (pre.size, pre.short_side, pre.interpolation) == ((384, 384), 384, "bicubic")


def test_the_heads_of_a_bare_file_are_said_and_can_be_set(tmp_path, capsys):
    theirs = attentive(theirs_vit(num_heads=6))
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    vitrail.load(tmp_path / "vit.pth")
    assert "3 heads of 64" in capsys.readouterr().err
    assert largest_difference(vitrail.load(tmp_path / "vit.pth", heads=6), theirs) < 1e-5
    assert capsys.readouterr().err == ""
