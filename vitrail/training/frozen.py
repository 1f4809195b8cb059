"""A frozen backbone: features are computed once, and only the head is trained on them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitrail.console import Advance
from vitrail.data.loader import Batch, Broken, Share
from vitrail.data.source import Source
from vitrail.errors import VitrailError
from vitrail.evaluation.classify import Pictures, evaluating, loader, why
from vitrail.model import Classifier
from vitrail.training.devices import Devices


@dataclass(frozen=True)
class Features:
    """What a backbone makes of the pictures of a source that can be decoded."""

    vectors: Float[Tensor, "n d"]
    targets: Int[Tensor, " n"]
    indices: Int[np.ndarray, " n"]
    """Number of each picture in its source."""
    broken: tuple[Broken, ...]


def extract(
    model: Classifier,
    source: Source,
    where: Devices,
    *,
    workers: int,
    batch: int = 64,
    progress: Advance | None = None,
) -> Features:
    """The features of every picture, in the source's order; processes share the work."""
    assert model.preprocess is not None
    mine = np.arange(where.rank, len(source.targets), where.world)
    pictures = Pictures(source, mine, model.preprocess)
    found: list[tuple[Any, Any]] = []
    broken: list[tuple[int, str]] = []
    with evaluating(model), where.autocast():
        for part in loader(pictures, batch, workers, where.device):
            broken += [(index, why(error)) for index, error in part.broken]
            if part.pixels is not None:
                pixels = part.pixels.to(where.device, non_blocking=True)
                found.append((part.indices, model.features(pixels).float().cpu()))
            if progress is not None:
                progress(len(part.indices) + len(part.broken), total=len(pictures))
    return merged(found, broken, source, where)


def merged(found: Any, broken: Any, source: Source, where: Devices) -> Features:
    """What all processes found, in the source's order."""
    parts: list[Any] = [(found, broken)]
    if where.world > 1:
        parts = [None] * where.world
        dist.all_gather_object(parts, (found, broken))
    pairs = [pair for part, _ in parts for pair in part]
    names = source.names
    told = tuple((names[i], reason) for _, part in parts for i, reason in sorted(part))
    if not pairs:
        raise VitrailError(f"no picture can be decoded; {told[0][1] if told else 'there are none'}")
    indices = torch.cat([indices for indices, _ in pairs])
    vectors = torch.cat([vectors for _, vectors in pairs])
    order = indices.argsort()
    numbers = indices[order].numpy()
    return Features(vectors[order], torch.as_tensor(source.targets)[numbers], numbers, told)


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
