"""Classification: softmax or sigmoid cross-entropy."""

from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class Classify(nn.Module):
    """A model together with what it is to learn: a batch goes in, the loss of each image comes out.

    Losses are not averaged here, so that batches may be cut and spread in any way.
    """

    def __init__(
        self,
        model: nn.Module,
        classes: int,
        kind: Literal["softmax", "sigmoid"] = "softmax",
        label_smoothing: float = 0.0,
        class_weights: Float[Tensor, " classes"] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.classes = classes
        self.kind = kind
        self.label_smoothing = label_smoothing
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
        wanted = truth * (1 - self.label_smoothing) + self.label_smoothing / self.classes
        if self.kind == "softmax":
            losses = -(wanted * logits.log_softmax(-1)).sum(-1)
        else:
            # Summed over the classes, as the reference does.
            losses = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none").sum(-1)
        weights = self.class_weights
        return losses if weights is None else losses * (truth @ weights)
