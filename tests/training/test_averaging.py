import pytest
import torch
from torch import nn

import vitrail
from vitrail.config import load_config
from vitrail.training.optim import EMA
from vitrail.training.train import train_config


@pytest.mark.parametrize("ramp", [True, False])
def test_the_average_follows_the_formula(ramp):
    model = nn.Linear(2, 1, bias=False)
    average = EMA(model, 0.9, ramp)
    expected = model.weight.detach().double().clone()
    for step in range(200):
        with torch.no_grad():
            model.weight.add_(torch.randn(1, 2))
        average.update(step)
        factor = min(0.9, (1 + step) / (10 + step)) if ramp else 0.9
        expected = factor * expected + (1 - factor) * model.weight.detach().double()
    torch.testing.assert_close(average.tensors["weight"].double(), expected, rtol=1e-5, atol=1e-5)


def test_batch_norms_statistics_are_averaged_and_counts_are_not():
    model = nn.BatchNorm1d(3)
    average = EMA(model, 0.999)
    assert set(average.tensors) == {"weight", "bias", "running_mean", "running_var"}


def test_the_model_has_the_averaged_weights_only_inside_the_block():
    model = nn.Linear(2, 2)
    average = EMA(model, 0.99)
    with torch.no_grad():
        model.weight.add_(1.0)
    live, kept = model.weight.detach().clone(), average.tensors["weight"].clone()
    with average.in_place():
        assert torch.equal(model.weight, kept)
    assert torch.equal(model.weight, live)
    assert torch.equal(average.tensors["weight"], kept)


def test_a_run_without_the_ramp_uses_its_factor_from_the_first_step(tmp_path):
    given = ["train.steps=2", "train.batch=8", "train.evaluations=0", "train.ema=1"]
    for ramp in (True, False):
        config = load_config("digits/vit", [*given, f"train.ema_ramp={str(ramp).lower()}"])
        train_config(config, tmp_path / str(ramp), device="cpu", test=False)
    heads = {key: vitrail.load(tmp_path / key).head.weight for key in ("True", "False")}
    assert heads["True"].count_nonzero()
    assert not heads["False"].count_nonzero()  # a head begins at zero
