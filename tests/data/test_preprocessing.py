"""Each family's evaluation preprocessing, against that family's own code."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.models import ViT_B_16_Weights
from transformers import ViTImageProcessor

import vitrail
from tests.models import small
from vitrail.data.preprocessing import Preprocessing, from_dict
from vitrail.errors import VitrailError


def noise(height: int, width: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def loaded(tmp_path, to: str, name: str, size: int = 224) -> vitrail.Classifier:
    vitrail.save(small("vit", size=size, gelu="erf"), tmp_path / name, to=to)
    return vitrail.load(tmp_path / name)


@pytest.mark.parametrize("shape", [(300, 500), (100, 90), (224, 224)])
def test_googles_is_a_plain_bilinear_squeeze_without_smoothing(shape, tmp_path):
    model = loaded(tmp_path, "google", "m.npz")
    picture = noise(*shape)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float()
    expected = F.interpolate(pixels, (224, 224), mode="bilinear", align_corners=False)
    expected = (expected - 127.5) / 127.5
    assert (model.preprocess(picture) - expected[0]).abs().max() < 1e-5


def test_torchvisions_is_torchvisions(tmp_path):
    model = loaded(tmp_path, "torchvision", "m.pth")
    picture = noise(300, 500)
    expected = ViT_B_16_Weights.IMAGENET1K_V1.transforms()(picture)
    assert (model.preprocess(picture) - expected).abs().max() < 1e-6


def test_huggingfaces_is_the_image_processors(tmp_path):
    model = loaded(tmp_path, "huggingface", "folder")
    picture = noise(300, 500)
    processor = ViTImageProcessor()
    expected = processor(picture, return_tensors="pt")["pixel_values"][0]
    # The processor resizes tensors where Pillow is used here: a rounding of one level in 255.
    assert (model.preprocess(picture) - expected).abs().max() <= 2 / 255 + 1e-6


def test_a_folder_for_transformers_carries_the_preprocessing_it_was_trained_with(tmp_path):
    model = loaded(tmp_path, "timm", "m.safetensors", size=64)
    vitrail.save(model, tmp_path / "hub", to="huggingface")
    assert vitrail.load(tmp_path / "hub").preprocess == model.preprocess
    processor = ViTImageProcessor.from_pretrained(tmp_path / "hub")
    picture = noise(96, 160)
    expected = processor(picture, return_tensors="pt")["pixel_values"][0]
    assert expected.shape == (3, 64, 64)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1", "LA", "YCbCr", "I;16"])
def test_every_mode_of_picture_becomes_rgb(mode):
    picture = noise(64, 80, "L" if mode == "I;16" else mode)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture).astype(np.uint16) * 257)
    image = Preprocessing(size=(32, 48))(picture)
    assert image.shape == (3, 32, 48)
    if mode in ("L", "I;16"):
        gray = Preprocessing(size=(32, 48))(noise(64, 80, "L"))
        assert (image - gray).abs().max() < 0.01
        assert image.std() > 0.05


@pytest.mark.parametrize("shape", [(300, 500), (500, 300), (400, 400), (100, 90)])
def test_a_rectangle_is_cropped_from_a_picture_that_covers_it(shape):
    white = Image.new("RGB", shape[::-1], "white")
    image = Preprocessing(size=(224, 448), short_side=248)(white)
    assert image.shape == (3, 224, 448)
    assert (image > 0.99).all()  # no black bars


def test_gray_models_get_one_channel():
    image = Preprocessing(size=(32, 32), mean=(0.5,), std=(0.5,))(noise(64, 64))
    assert image.shape == (1, 32, 32)


def test_a_description_survives_a_file_and_refuses_what_it_does_not_know():
    described = Preprocessing(
        size=(64, 96), short_side=70, interpolation="bicubic", mean=(0.1,) * 3
    )
    assert from_dict(described.to_dict()) == described
    with pytest.raises(VitrailError, match="does not know"):
        from_dict({"size": [3, 4], "rotation": 7})


def test_colors_that_cannot_be_converted_are_one_line():
    with pytest.raises(VitrailError, match="the image cannot be decoded: conversion"):
        Preprocessing()(Image.new("La", (4, 4)))
