"""Through every format and back: not a bit may change."""

import pytest
import torch

import vitrail
from tests.models import SMALL, noisy, small
from vitrail.weights.load import read_checkpoint

SUFFIX = {
    "google": ".npz",
    "timm": ".safetensors",
    "huggingface": "",
    "torchvision": ".pth",
    "vitrail": ".safetensors",
}
ROUTES = {
    "vit": ["google", "timm", "huggingface", "torchvision", "vitrail"],
    "vit-b": ["google", "timm", "huggingface", "vitrail"],
    "vit-gap": ["google", "timm", "vitrail"],
    "vit-attention-pool": ["google", "timm", "vitrail"],
    "vit-hidden": ["google", "torchvision", "vitrail"],
    "vit-deit3": ["timm", "vitrail"],
    "vit-registers": ["timm", "vitrail"],
    "vit-no-positions": ["timm", "vitrail"],
    "hybrid": ["google", "timm", "vitrail"],
    "hybrid-16": ["google", "timm", "vitrail"],
    "hybrid-root": ["google", "timm", "vitrail"],
    "resnet": ["google", "timm", "huggingface", "vitrail"],
    "resnet-wide": ["google", "timm", "huggingface", "vitrail"],
    "classic-resnet": ["torchvision", "vitrail"],
}


@pytest.mark.parametrize("kind", ROUTES)
def test_a_round_trip_through_all_formats_is_bit_identical(kind, tmp_path):
    model = small(kind)
    path = tmp_path / "start.safetensors"
    vitrail.save(model, path)
    for to in [*ROUTES[kind], *reversed(ROUTES[kind])]:
        target = tmp_path / f"{to}-of-{path.stem}{SUFFIX[to]}"
        parity = vitrail.convert(path, target, to=to, size=64)
        assert parity.difference < 1e-6
        path = target
    back = vitrail.load(path, size=64).state_dict()
    expected = model.state_dict()
    assert back.keys() == expected.keys()
    for key, tensor in expected.items():
        assert back[key].dtype == tensor.dtype
        assert torch.equal(back[key], tensor), key


@pytest.mark.parametrize("kind", SMALL)
def test_our_own_format_holds_everything(kind, tmp_path):
    model = small(kind, size=(64, 96))
    model.labels = tuple("abcdefg")
    vitrail.save(model, tmp_path / "model.safetensors")
    back = vitrail.load(tmp_path / "model.safetensors")
    assert back.architecture == model.architecture
    assert back.labels == model.labels
    images = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        assert (back(images) - model(images)).abs().max() < 1e-5
    for key, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], tensor), key


def test_a_file_of_timms_survives_all_formats(checkpoint, tmp_path):
    path = checkpoint
    for to in ("google", "huggingface", "torchvision", "vitrail", "timm"):
        target = tmp_path / f"{to}{SUFFIX[to]}"
        parity = vitrail.convert(path, target, to=to)
        assert parity.difference == 0
        path = target
    expected, back = read_checkpoint(checkpoint).tensors, read_checkpoint(path).tensors
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in expected.items())


def test_a_rectangle_keeps_its_sides_where_the_file_can_say_them(tmp_path):
    model = small("vit", size=(64, 96))
    for to in ("timm", "huggingface"):
        for path in (tmp_path / to, tmp_path / f"{to}.safetensors"):
            vitrail.save(model, path, to=to)
            assert vitrail.load(path).architecture.size == (64, 96)


@pytest.mark.parametrize(
    ("kind", "to", "named"),
    [
        ("vit-relative", "timm", "relative positions"),
        ("vit-factorized", "google", "factorized positions"),
        ("vit-every", "google", "positions at every layer"),
        ("vit-deit3", "google", "LayerScale"),
        ("vit-registers", "huggingface", "register tokens"),
        ("vit-gap", "torchvision", "mean pooling"),
        ("vit-hidden", "timm", "hidden layer"),
        ("vit-hidden", "huggingface", "hidden layer before a classifier"),
        ("hybrid", "huggingface", "hybrid"),
        ("axial-vit", "google", "axial attention"),
        ("axial-resnet", "timm", "Axial-R14"),
        ("resnet", "torchvision", "no R"),
        ("classic-resnet", "huggingface", "no ResNet18"),
        *(("resnet-small-root", to, "no small root") for to in ("google", "timm", "huggingface")),
        *(("resnet-small-root", to, "no ResNet of width x0.25") for to in ("google", "timm")),
        *(("hybrid-small-root", to, "no small root") for to in ("google", "timm")),
        *(("hybrid-small-root", to, "no hybrid of width x0.25") for to in ("google", "timm")),
        ("resnet-small-root", "torchvision", "small root"),
        ("hybrid-small-root", "torchvision", "small root"),
        ("axial-resnet-small-root", "timm", "small root"),
    ],
)
def test_what_a_format_cannot_hold_is_named(kind, to, named, tmp_path):
    with pytest.raises(vitrail.VitrailError, match=named) as error:
        vitrail.save(small(kind), tmp_path / f"model{SUFFIX[to]}", to=to)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_switch_of_gelu_is_measured_apart(checkpoint, tmp_path):
    parity = vitrail.convert(checkpoint, tmp_path / "google.npz", to="google")
    assert parity.difference == 0
    assert 1e-5 < parity.switch < 1
    assert (parity.gelu, parity.eps) == ("tanh", 1e-6)
    same = vitrail.convert(tmp_path / "google.npz", tmp_path / "again.npz", to="google")
    assert same.switch == 0


def test_a_conversion_can_change_the_size(tmp_path):
    vitrail.save(noisy(vitrail.create("Ti/16", depth=1, size=64)), tmp_path / "a.safetensors")
    parity = vitrail.convert(
        tmp_path / "a.safetensors", tmp_path / "b.npz", to="google", size=(96, 96)
    )
    assert parity.difference < 1e-6
    assert vitrail.load(tmp_path / "b.npz").architecture.size == (96, 96)
