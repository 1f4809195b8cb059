import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitrail.training.objectives.classification import Classification


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_softmax_is_torchs_cross_entropy(smoothing):
    logits, targets = torch.randn(7, 5, dtype=torch.float32), torch.randint(5, (7,))
    losses = Classification(nn.Identity(), 5, "softmax", smoothing)(logits, targets)
    expected = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(losses, expected)


def test_sigmoid_is_summed_over_the_classes():
    logits, targets = torch.randn(7, 5), torch.randint(5, (7,))
    losses = Classification(nn.Identity(), 5, "sigmoid")(logits, targets)
    wanted = F.one_hot(targets, 5)
    expected = -(wanted * logits.sigmoid().log() + (1 - wanted) * (-logits).sigmoid().log()).sum(1)
    torch.testing.assert_close(losses, expected)


def test_soft_targets_are_taken_as_they_are():
    logits = torch.randn(3, 4)
    targets = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.1, 0.2, 0.3, 0.4]])
    losses = Classification(nn.Identity(), 4)(logits, targets)
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"))


def test_class_weights_scale_each_images_loss():
    logits, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    weights = torch.tensor([0.5, 1.0, 3.0])
    plain = Classification(nn.Identity(), 3)(logits, targets)
    weighed = Classification(nn.Identity(), 3, class_weights=weights)(logits, targets)
    torch.testing.assert_close(weighed, plain * weights[targets])


def test_the_losses_of_parts_are_those_of_the_whole():
    logits, targets = torch.randn(8, 3), torch.randint(3, (8,))
    task = Classification(nn.Identity(), 3, label_smoothing=0.1, class_weights=torch.rand(3))
    parts = torch.cat([task(logits[:5], targets[:5]), task(logits[5:], targets[5:])])
    torch.testing.assert_close(parts, task(logits, targets))
