"""`--fast` takes a form that decides as the model itself does, or says that there is none."""

import copy

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tests.models import small
from vitrail import devices
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation import fast
from vitrail.evaluation.fast import Form, choose_form
from vitrail.evaluation.predictor import Predictor

KINDS = ["vit", "vit-gap", "vit-relative", "vit-attention-pool", "hybrid"]
PIXELS = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def ready(kind: str = "vit"):
    torch.manual_seed(0)
    model = small(kind, size=64)
    model.preprocess = Preprocessing(size=(64, 64))
    return model


@pytest.mark.parametrize("form", fast.FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_is_the_same_model(kind, form):
    model = ready(kind)
    if form.compiled or not form.available(model):
        pytest.skip(f"this machine has no {form.name}")
    other = form.build(copy.deepcopy(model))
    with torch.inference_mode():
        expected, found = model(PIXELS), other(PIXELS.to(next(other.parameters()).dtype)).float()
        features = other.features(PIXELS.to(next(other.parameters()).dtype)).float()
        scale = expected.abs().max()
        assert (found - expected).abs().max() < (1e-4 if "float32" in form.name else 0.1) * scale
        assert features.shape == model.features(PIXELS).shape
        # The model that was copied is as it was.
        assert torch.equal(model(PIXELS), expected)


def test_graphs_are_recorded_once_for_each_size(monkeypatch):
    sizes = []

    def record(function, images):
        sizes.append(len(images))
        return function

    monkeypatch.setattr(devices, "_record_inference", record)
    twice = devices.graph_inference(lambda images: 2 * images, most=4)
    for count in (1, 3, 4, 5, 2, 3, 0):
        assert torch.equal(twice(PIXELS[:count]), 2 * PIXELS[:count])
    assert sizes == [1, 4, 2]


def wrong(model):
    model.head.weight.neg_()
    return model


def always(device: torch.device) -> bool:
    return True


def never(device: torch.device) -> bool:
    return False


FORMS = (
    Form("slow", always, lambda model: model),
    Form("good", always, lambda model: model),
    Form("wrong", always, wrong),
    Form("compiled", always, lambda model: model, compiled=True),
    Form("elsewhere", never, lambda model: model),
)


@pytest.mark.parametrize(
    ("seconds", "compiled", "line"),
    [
        # The model itself comes first.
        ([1.0, 2.0, 0.5, 0.1], False, "good: 2.0 times float32; 100.0% of decisions kept"),
        ([1.0, 2.0, 0.5, 0.1, 0.25], True, "compiled: 4.0 times float32; 100.0%"),
        ([1.0, 2.0, 0.99, 0.1], False, "float32: no other form on this machine is faster"),
    ],
)
def test_the_fastest_form_that_keeps_the_decisions(monkeypatch, capsys, seconds, compiled, line):
    monkeypatch.setattr(fast, "FORMS", FORMS)
    monkeypatch.setattr(fast, "_time", lambda candidates, parts: seconds)
    model = ready()
    with torch.no_grad():
        assert model.head is not None
        torch.nn.init.normal_(model.head.weight)
    predictor = Predictor(model)
    best = choose_form(predictor, PIXELS, 8, "of these images", compiled=compiled)
    assert line in capsys.readouterr().err
    assert (best is predictor) == ("no other form" in line)
    with torch.inference_mode():
        assert torch.equal(best.logits(PIXELS).argmax(-1), predictor.logits(PIXELS).argmax(-1))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    chance = np.random.default_rng(0)
    for number in range(130):
        pixels = chance.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    (folder / "001.png").write_bytes(b"no picture")
    return folder


@pytest.mark.parametrize("features", [False, True])
def test_predictions_are_those_of_the_model(photos, capsys, features):
    model = ready()
    plain = list(vitrail.predict(model, photos, top=7, features=features))
    assert "fast" not in capsys.readouterr().err
    quick = list(vitrail.predict(model, photos, top=7, features=features, fast=True))
    line = capsys.readouterr().err
    assert line.startswith("fast     ")
    assert "(15 of these images)" in line
    assert [row["path"] for row in quick] == [row["path"] for row in plain]
    pairs = [pair for pair in zip(plain, quick, strict=True) if "top" in pair[0]]
    assert len(pairs) == 129
    for slow, soon in pairs:
        assert {one["label"]: one["probability"] for one in soon["top"]} == pytest.approx(
            {one["label"]: one["probability"] for one in slow["top"]}, abs=0.05
        )


def test_a_few_images_are_not_worth_it(photos, capsys):
    rows = vitrail.predict(ready(), [photos / "002.png"] * 3, fast=True)
    assert len(list(rows)) == 3
    assert "fast     not used: with 3 images" in capsys.readouterr().err
