"""Preprocessing inside the graph cuts, resizes and rounds as Pillow does."""

import numpy as np
import pytest
import torch

from vitrail import VitrailError
from vitrail.data.preprocessing import Preprocessing
from vitrail.exporting.pipeline import Pipeline

SIZES = [(60, 80), (33, 200), (96, 96), (20, 24), (1, 1), (64, 97)]


@pytest.mark.parametrize(
    "pre",
    [
        Preprocessing(size=(48, 48), short_side=55, interpolation="bicubic"),
        Preprocessing(size=(48, 48), mean=(0.2, 0.3, 0.4), std=(0.5, 0.6, 0.7)),
        Preprocessing(size=(40, 64), short_side=45),
        Preprocessing(size=(48, 48), antialias=False),
        Preprocessing(size=(48, 48), short_side=50, mean=(0.5,), std=(0.5,)),
    ],
)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_the_model_was_trained_with(pre, size):
    chance = np.random.default_rng(sum(size))
    picture = chance.integers(0, 256, (*size, len(pre.mean)), dtype=np.uint8)
    images = torch.from_numpy(picture).permute(2, 0, 1)[None]
    expected = pre(picture if len(pre.mean) == 3 else picture[..., 0])
    found = Pipeline(torch.nn.Flatten(), pre)(images).reshape(expected.shape)
    assert (found - expected).abs().max() < (1e-6 if pre.antialias else 1e-4)


def test_a_tall_picture_is_at_most_one_level_off():
    """Some versions of Pillow take the rows of tall pictures first."""
    pre = Preprocessing(size=(48, 48))
    picture = np.random.default_rng(0).integers(0, 256, (200, 60, 3), dtype=np.uint8)
    images = torch.from_numpy(picture).permute(2, 0, 1)[None]
    found = Pipeline(torch.nn.Flatten(), pre)(images).reshape(3, 48, 48)
    difference = (found - pre(picture)).abs()
    assert difference.max() < 1.01 / 127.5


def test_what_cannot_be_put_into_a_graph_is_one_line():
    with pytest.raises(VitrailError, match="--preprocessing beside"):
        Pipeline(torch.nn.Identity(), Preprocessing(interpolation="bicubic", antialias=False))
