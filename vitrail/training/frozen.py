"""A frozen backbone: features are computed once, and only the head is trained on them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from vitrail.data.loader import Batch, Share
from vitrail.evaluation.features import Features


def feature_batches(features: Features, share: Share, device: torch.device) -> Iterator[Batch]:
    """Batches of features; they are small enough to lie on the device as a whole."""
    vectors, targets = features.vectors.to(device), features.targets.to(device)
    chunks = iter(share)
    per_step = share.chunks_per_step
    while True:
        chosen = [index for _ in range(per_step) for _, index in next(chunks)]
        rows = torch.tensor(chosen, device=device)
        yield Batch(images=vectors[rows], targets=targets[rows])


@torch.no_grad()
def validate(head: nn.Module, features: Features, device: torch.device) -> dict[str, Any]:
    """Loss and accuracy of the head on features."""
    logits = head(features.vectors.to(device)).float().cpu()
    likely = logits.log_softmax(-1)
    truth = features.targets[:, None]
    best = likely.topk(min(5, likely.shape[1])).indices == truth
    return {
        "loss": -likely.gather(1, truth).mean().item(),
        "top1": best[:, 0].float().mean().item(),
        "top5": best.any(1).float().mean().item(),
        "n": len(truth),
    }
