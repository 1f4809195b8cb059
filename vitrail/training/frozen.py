"""A frozen backbone: features are computed once, and only the head is trained on them."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import nn

from vitrail.data.loader import Batch, Share
from vitrail.evaluation.features import Features
from vitrail.evaluation.metrics import summary
from vitrail.model.classifier import Activation, losses


def feature_batches(features: Features, share: Share, device: torch.device) -> Iterator[Batch]:
    """Batches of features; they are small enough to lie on the device as a whole."""
    vectors, targets = features.vectors.to(device), features.targets.to(device)
    chunks = iter(share)
    per_step = share.chunks_per_step
    for step in count(share.start):
        chosen = [index for _ in range(per_step) for _, index in next(chunks)]
        rows = torch.tensor(chosen, device=device)
        yield Batch(images=vectors[rows], targets=targets[rows], first=share.first(step))


@torch.no_grad()
def validate(
    head: nn.Module, activation: Activation, features: Features, device: torch.device
) -> dict[str, Any]:
    """Loss and accuracy of the head on features."""
    logits = head(features.vectors.to(device)).float().cpu()
    guesses = logits.topk(min(5, logits.shape[1])).indices
    loss = losses(logits, features.targets, activation)
    return summary(guesses.numpy(), features.targets.numpy(), loss.numpy(), logits.shape[1])
