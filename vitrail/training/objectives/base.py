"""The interface between an objective and the training loop."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vitrail.data.draws import ON_CPU
from vitrail.data.loader import TrainingBatch


class Objective(nn.Module):
    """A model with the batches, the loss and the validation that it is trained with.

    Called with what `prepare` returns, it gives the loss of each image. Losses are not averaged
    here, so that batches may be split and spread over devices in any way.
    """

    model: Any
    """What is trained."""
    inputs: Any = None
    """The `ImageInputs` it is trained on; None for a linear probe, which is trained on features."""
    skipped: Sequence[tuple[str, str]] = ()
    """Images that could not be decoded before the first step, and the reason."""
    features_computed: int = 0
    """Images whose features were computed before the first step, in all processes."""

    @property
    def draws(self) -> int:
        """Version of the rule by which everything random is drawn."""
        return ON_CPU if self.inputs is None else self.inputs.draws

    def batches(self, start: int) -> Iterator[TrainingBatch]:
        """The batches of this process from a step on, without end."""
        return self.inputs.batches(start)

    def prepare(self, batch: TrainingBatch, rows: slice) -> tuple[Float[Tensor, "r ..."], Tensor]:
        """Inputs and targets of some rows of a batch."""
        raise NotImplementedError

    def validate(self) -> dict[str, Any]:
        """Figures on val, `loss` among them, and the images that were `skipped`."""
        raise NotImplementedError

    @property
    def compiled(self) -> nn.Module:
        """The module to compile: the model alone, so that validation is compiled as well."""
        return self.model
