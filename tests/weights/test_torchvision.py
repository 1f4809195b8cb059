"""torchvision as the oracle: its files load here, ours load strictly there, the logits agree."""

import pytest
import torch
import torchvision

import vitrail
from tests.models import noisy, small


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
