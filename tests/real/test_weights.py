"""The real ViT-Ti/16 says what timm says, in every format, and knows what it sees."""

import numpy as np
import timm
import torch
from sklearn.datasets import load_sample_image

import vitrail
from tests.evaluation.examples import predict
from tests.weights.test_round_trip import SUFFIX
from vitrail.data.dataset import ArraySource
from vitrail.weights.load import read_checkpoint


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


def test_the_real_weights_survive_all_formats(real_weights, tmp_path):
    path = real_weights
    for to in ("google", "huggingface", "torchvision", "vitrail", "timm"):
        target = tmp_path / f"{to}{SUFFIX[to]}"
        parity = vitrail.convert(path, target, to=to)
        assert parity.difference == 0
        path = target
    expected, back = read_checkpoint(real_weights).tensors, read_checkpoint(path).tensors
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in expected.items())


def test_the_switch_of_gelu_moves_real_logits_a_little(real_weights, tmp_path):
    parity = vitrail.convert(real_weights, tmp_path / "google.npz", to="google")
    assert parity.difference == 0
    assert 0.005 < parity.switch < 0.1
    assert (parity.gelu, parity.eps) == ("tanh", 1e-6)


def test_real_weights_know_what_a_daisy_is(real_weights, flowers):
    model = vitrail.load(real_weights)
    names = [model.predict(picture)[0][0] for picture in flowers[:8]]
    assert names.count("daisy") >= 6


def test_real_weights_say_of_photographs_what_the_model_says_itself(real_weights, flowers):
    model = vitrail.load(real_weights)
    size = (240, 320)
    source = ArraySource(
        labels=model.labels or tuple(f"class {i}" for i in range(1000)),
        targets=np.array([985, 985, 985]),
        names=["a", "b", "c"],
        pixels=np.stack([np.asarray(flower.resize(size[::-1])) for flower in flowers[:3]]),
    )
    found, _ = predict(model, source)
    for i in range(3):
        names, sure = zip(*model.predict(source.image(i)), strict=True)
        assert tuple(source.labels[guess] for guess in found.guesses[i]) == names
        assert np.allclose(found.probabilities[i], sure, atol=1e-5)


def test_the_real_model_looks_at_the_flower(real_weights, tmp_path):
    """Of the sample photograph, the dahlia gets more attention per patch than what is around it."""
    flower = load_sample_image("flower.jpg")
    found = vitrail.inspect(real_weights, flower, out=tmp_path, device="cpu")
    rows = found["attention_distance"]["layers"]
    assert [len(row["heads"]) for row in rows] == [3] * 12
    assert {row["uniform"] for row in rows} == {116.49}
    # Figure 11: low layers mix local and global heads, high layers look far.
    assert min(rows[0]["heads"]) < 40
    assert min(rows[-1]["heads"]) > 100
    for key in ("rollout", "gradient_rollout"):
        seen = np.array(found["images"][0][key])
        inner = np.zeros((14, 14), dtype=bool)
        inner[4:11, 3:11] = True
        assert np.median(seen[inner]) > 1.1 * np.median(seen[~inner]), key
    alike = found["positions"]
    assert min(alike["same_row"], alike["same_column"]) > 0.3 > abs(alike["all"])
