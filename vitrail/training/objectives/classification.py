"""Classification: softmax or sigmoid cross-entropy."""

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from vitrail.data.augment import mix, normalize
from vitrail.data.dataset import Source
from vitrail.data.draws import derive_seed
from vitrail.data.loader import TrainingBatch
from vitrail.devices import reshard
from vitrail.errors import VitrailError
from vitrail.evaluation.metrics import summary
from vitrail.evaluation.predictor import Predictor, predict_batches
from vitrail.training.inputs import NO_VAL_IMAGE, ImageInputs
from vitrail.training.objectives.base import Objective


class Classification(Objective):
    """Cross-entropy with the labels of the data, which mixup and CutMix may have mixed."""

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        kind: Literal["softmax", "sigmoid"] = "softmax",
        label_smoothing: float = 0.0,
        class_weights: Float[Tensor, " classes"] | None = None,
        inputs: ImageInputs | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.classes = classes
        self.kind = kind
        self.label_smoothing = label_smoothing
        self.inputs = inputs
        self.skipped = () if inputs is None else inputs.skipped
        self.register_buffer("class_weights", class_weights, persistent=False)

    def forward(
        self,
        inputs: Float[Tensor, "b ..."],
        targets: Int[Tensor, " b"] | Float[Tensor, "b classes"],
    ) -> Float[Tensor, " b"]:
        logits = self.model(inputs).float()
        if targets.ndim == 1:
            targets = F.one_hot(targets, self.classes)
        truth = targets.to(logits)
        smooth = truth * (1 - self.label_smoothing) + self.label_smoothing / self.classes
        if self.kind == "softmax":
            losses = -(smooth * logits.log_softmax(-1)).sum(-1)
        else:  # sigmoid, summed over the classes, as in the reference code
            losses = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none").sum(-1)
        weights = self.class_weights
        return losses if weights is None else losses * (truth @ weights)

    def prepare(self, batch: TrainingBatch, rows: slice) -> tuple[Float[Tensor, "r ..."], Tensor]:
        """Normalized pixels, mixed where the settings say so."""
        config, pre = self.inputs.config, self.inputs.preprocessing
        if not (config.augment.mixup or config.augment.cutmix):
            return normalize(batch.images[rows], pre), batch.targets[rows]
        images, targets = batch.preceded(rows)
        # Drawn from the step alone: all processes and all parts of a batch are mixed alike.
        step = batch.first // config.train.batch
        images, targets = self._mixed(normalize(images, pre), targets, step)
        return images[:-1], targets[:-1]

    def _mixed(
        self, images: Float[Tensor, "b c y x"], targets: Int[Tensor, " b"], step: int
    ) -> tuple[Tensor, Tensor]:
        if self.inputs.augment is not None:
            return self.inputs.augment.mix(images, targets, step=step, classes=self.classes)
        config = self.inputs.config
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(config.seed, step, 0))
            return mix(
                images,
                targets,
                mixup=config.augment.mixup,
                cutmix=config.augment.cutmix,
                classes=self.classes,
                share=config.augment.mixed,
            )

    def validate(self) -> dict[str, Any]:
        """Loss, top-1, top-5 and balanced accuracy on val."""
        images, precision = self.inputs.val, self.inputs.devices.precision
        labels = images.source.labels
        predictor = Predictor(self.model, labels, precision=precision)
        predictions, skipped = predict_batches(predictor, images)
        reshard(self.model)
        if not len(predictions):
            raise VitrailError(NO_VAL_IMAGE)
        found = (predictions.guesses, predictions.targets, predictions.loss)
        return summary(*found, len(labels)) | {"skipped": skipped}


def balanced_weights(source: Source) -> Float[Tensor, " classes"]:
    """The inverse of each class's share, scaled so that the mean weight of an image is one."""
    counts = np.bincount(source.targets, minlength=len(source.labels))
    present = counts > 0
    weights = np.zeros(len(counts), dtype=np.float32)
    weights[present] = len(source.targets) / (present.sum() * counts[present])
    return torch.from_numpy(weights)
