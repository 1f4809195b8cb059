"""Linear probe: the head alone is trained, on features that are computed once."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.config import Config
from vitrail.console import count_progress
from vitrail.data.dataset import Source, Splits
from vitrail.data.loader import TrainingBatch
from vitrail.devices import Devices
from vitrail.evaluation.features import Features, extract, open_cache
from vitrail.evaluation.metrics import summary
from vitrail.files import cache_folder
from vitrail.model import Classifier
from vitrail.model.classifier import losses
from vitrail.training.inputs import build_sampler, decoding_workers
from vitrail.training.objectives.classification import Classification


class LinearProbe(Classification):
    """Cross-entropy of a head on features of train and val without augmentation."""

    def __init__(
        self, model: Classifier, data: Splits, config: Config, devices: Devices, **options: Any
    ) -> None:
        model.to(devices.device).eval().requires_grad_(False)
        assert model.head is not None
        model.head.requires_grad_(True)
        super().__init__(model.head, len(data.labels), **options)
        cached = open_cache(model, devices.precision, cache_folder())

        def features_of(source: Source, split: str) -> Features:
            with count_progress(f"features of {split}", devices.main) as advance:
                return extract(
                    model,
                    source,
                    precision=devices.precision,
                    workers=decoding_workers(config, devices),
                    cache=cached,
                    progress=advance,
                )

        train = features_of(data.part("train"), "train")
        self.val = None if data.val is None else features_of(data.val, "val")
        self.skipped = train.skipped + (() if self.val is None else self.val.skipped)
        self.features_computed = int(devices.total(torch.tensor([cached.computed])).item())
        self.device, self.activation = devices.device, model.activation
        targets = train.targets.numpy()
        self.sampler = build_sampler(targets, np.zeros_like(targets), config, devices)
        # Small enough to be on the device as a whole.
        self.vectors, self.targets = (
            train.vectors.to(devices.device),
            train.targets.to(devices.device),
        )

    def batches(self, start: int) -> Iterator[TrainingBatch]:
        sampler = replace(self.sampler, start=start)
        chunks = iter(sampler)
        for step in count(start):
            chosen = [index for _ in range(sampler.chunks_per_step) for _, index in next(chunks)]
            rows = torch.tensor(chosen, device=self.device)
            images, targets = self.vectors[rows], self.targets[rows]
            yield TrainingBatch(images=images, targets=targets, first=sampler.first(step))

    def prepare(self, batch: TrainingBatch, rows: slice) -> tuple[Float[Tensor, "r ..."], Tensor]:
        return batch.images[rows], batch.targets[rows]

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        assert self.val is not None
        logits = self.model(self.val.vectors.to(self.device)).float().cpu()
        guesses = logits.topk(min(5, logits.shape[1])).indices
        loss = losses(logits, self.val.targets, self.activation)
        found = (guesses.numpy(), self.val.targets.numpy(), loss.numpy())
        return summary(*found, self.classes)
