"""What a user gets for a value of the wrong kind, where no checker of types stands in between."""

import numpy as np
import pytest
from PIL import Image

import vitrail
from tests.models import small
from vitrail import VitrailError


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("Ti/16", {"classes": -1}),
        ("Ti/16", {"classes": True}),
        ("Ti/16", {"depth": 0}),
        ("Ti/16", {"width": 0}),
        ("Ti/16", {"heads": 0}),
        ("Ti/16", {"pool": "cls"}),
        ("Ti/16", {"positions": "2d"}),
        ("Ti/16", {"gelu": "relu"}),
        ("Ti/16", {"dropout": 2.0}),
        ("R50x1", {"units": ()}),
        ("R50x0", {}),
        ("R50x1", {"root": "tiny"}),
        ("R26+S/32", {"backbone_width": "wide"}),
        ("ResNet50", {"channels": 0}),
        ("Axial-R50", {"units": (1, -2)}),
    ],
)
def test_a_wrong_value_is_one_line_that_names_it(variant, options):
    with pytest.raises(VitrailError, match=rf"^{next(iter(options), 'width')} = .*: expected"):
        vitrail.create(variant, **options)


@pytest.mark.parametrize("size", [0, -224, "224", 224.0, (224,), (1, 2, 3), (224, 0), None])
def test_a_wrong_size_is_one_line(size):
    with pytest.raises(VitrailError, match=r"^size = .*: expected pixels"):
        vitrail.create("Ti/16", size=size)


@pytest.fixture
def saved(tmp_path):
    vitrail.save(small("vit", gelu="erf"), tmp_path / "m.safetensors", to="timm")
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"classes": -3}, "classes = -3"),
        ({"size": 0}, "size = 0"),
        ({"size": (3,)}, "size = "),
        ({"interpolation": "cubic"}, "interpolation = 'cubic': expected one of google, timm"),
        ({"gelu": "relu"}, "gelu = 'relu'"),
        ({"depth": 3}, "cannot change depth"),
    ],
)
def test_a_wrong_wish_of_load_is_one_line(options, complaint, saved):
    with pytest.raises(VitrailError, match=complaint):
        vitrail.load(saved, **options)


def test_an_unknown_format_is_one_line(saved):
    with pytest.raises(VitrailError, match="unknown format 'jax'"):
        vitrail.save(vitrail.load(saved), saved.with_name("x.npz"), to="jax")


def test_predict_takes_pictures_arrays_and_paths_and_nothing_else(saved, tmp_path):
    model = vitrail.load(saved)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 90, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "p.png")
    answers = model.predict(picture)
    assert model.predict(pixels) == model.predict(str(tmp_path / "p.png")) == answers
    for wrong in (3, None, [1, 2]):
        with pytest.raises(VitrailError, match="expected an image"):
            model.predict(wrong)
    (tmp_path / "not.jpg").write_text("not a picture")
    with pytest.raises(VitrailError, match="is not an image"):
        model.predict(tmp_path / "not.jpg")
    with pytest.raises(VitrailError, match="does not exist"):
        model.predict(tmp_path / "none.jpg")
