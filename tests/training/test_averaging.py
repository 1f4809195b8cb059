import torch
from torch import nn

from vitrail.training.averaging import Average


def test_the_average_follows_the_formula():
    model = nn.Linear(2, 1, bias=False)
    average = Average(model, 0.9)
    expected = model.weight.detach().double().clone()
    for step in range(200):
        with torch.no_grad():
            model.weight.add_(torch.randn(1, 2))
        average.update(step)
        factor = min(0.9, (1 + step) / (10 + step))
        expected = factor * expected + (1 - factor) * model.weight.detach().double()
    torch.testing.assert_close(average.tensors["weight"].double(), expected, rtol=1e-5, atol=1e-5)


def test_batch_norms_statistics_are_averaged_and_counts_are_not():
    model = nn.BatchNorm1d(3)
    average = Average(model, 0.999)
    assert set(average.tensors) == {"weight", "bias", "running_mean", "running_var"}


def test_the_model_has_the_averaged_weights_only_inside_the_block():
    model = nn.Linear(2, 2)
    average = Average(model, 0.99)
    with torch.no_grad():
        model.weight.add_(1.0)
    live, kept = model.weight.detach().clone(), average.tensors["weight"].clone()
    with average.in_place():
        assert torch.equal(model.weight, kept)
    assert torch.equal(model.weight, live)
    assert torch.equal(average.tensors["weight"], kept)
