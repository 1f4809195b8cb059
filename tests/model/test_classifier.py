"""What every model of the family answers to."""

import pytest
import torch
import torch.nn.functional as F

import vitrail
from tests.models import SMALL, small


@pytest.mark.parametrize("kind", SMALL)
def test_logits_are_the_head_of_the_features_of_the_tokens(kind):
    model = small(kind, size=(64, 96))
    images = torch.randn(2, 3, 64, 96)
    with torch.inference_mode():
        features, tokens, logits = model.features(images), model.tokens(images), model(images)
        assert torch.equal(model.head(features), logits)
    assert tokens.ndim == 3
    assert features.shape[0] == tokens.shape[0] == 2
    assert logits.shape == (2, 7)


@pytest.mark.parametrize("kind", SMALL)
def test_every_parameter_gets_a_gradient(kind):
    model = small(kind).train()
    loss = F.cross_entropy(model(torch.randn(3, 3, 64, 64)), torch.tensor([0, 1, 2]))
    loss.backward()
    idle = [
        name
        for name, p in model.named_parameters()
        if p.grad is None or not p.grad.isfinite().all()
    ]
    assert not idle
    assert all(p.grad.any() for name, p in model.named_parameters() if "qkv.bias" not in name)


@pytest.mark.parametrize("kind", SMALL)
def test_without_classes_logits_are_the_features(kind):
    model = small(kind, classes=0)
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(model(images), model.features(images))
    assert model.head is None


@pytest.mark.parametrize("kind", SMALL)
def test_a_new_head_starts_at_zero_and_is_part_of_the_architecture(kind):
    model = small(kind).double()
    model.labels = ("old",)
    model.replace_head(3, bias=-10.0)
    assert (model(torch.randn(2, 3, 64, 64, dtype=torch.float64)) == -10).all()
    assert (model.architecture.classes, model.labels) == (3, ())


@pytest.mark.parametrize("kind", SMALL)
def test_attention_is_a_distribution_over_all_tokens(kind):
    model = small(kind, size=(32, 64))
    images = torch.randn(2, 3, 32, 64)
    if not model.attention_layers():
        with pytest.raises(vitrail.VitrailError, match="no attention layers"):
            model.attention(images)
        return
    for weights in model.attention(images).values():
        b, heads, n, m = weights.shape
        assert (b, n) == (2, m)
        assert heads > 1
        assert (weights >= 0).all()
        assert (weights.sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("kind", SMALL)
def test_models_know_the_same_interface_in_bfloat16(kind):
    model = small(kind)
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        fast = model(images)
    with torch.inference_mode():
        exact = model(images)
    scale = exact.abs().max()
    assert fast.dtype == torch.bfloat16
    assert (fast.float() - exact).abs().max() < 0.1 * scale


@pytest.mark.parametrize("kind", SMALL)
def test_recomputed_activations_give_the_same_gradients(kind):
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 1])

    def gradients(recompute: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        model = small(kind)
        model.activation_checkpointing = recompute
        F.cross_entropy(model(images), labels).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    kept, recomputed = gradients(False), gradients(True)
    for name, gradient in kept.items():
        assert (gradient - recomputed[name]).abs().max() < 1e-5, name
