"""What a model learns: one file for each objective, all of them for the same training loop."""

from typing import Any

from vitrail.config import Config
from vitrail.data.dataset import Splits
from vitrail.devices import Devices
from vitrail.model import Classifier
from vitrail.training.inputs import ImageInputs
from vitrail.training.objectives.base import Objective
from vitrail.training.objectives.classification import Classification, balanced_weights
from vitrail.training.objectives.linear_probe import LinearProbe
from vitrail.training.objectives.masked import MaskedPatches

__all__ = ["Objective", "build_objective"]


def build_objective(config: Config, model: Classifier, data: Splits, devices: Devices) -> Objective:
    """The objective of the settings, with the model inside and the data to train it on."""
    train = config.train
    model.train()
    if train.objective == "masked":
        return MaskedPatches(
            model,
            target=train.masked,
            share=train.masked_share,
            inputs=ImageInputs(model, data, config, devices),
        )
    assert train.objective in ("softmax", "sigmoid"), train.objective
    options: dict[str, Any] = {"kind": train.objective, "label_smoothing": train.label_smoothing}
    if train.class_weights == "balanced":
        options["class_weights"] = balanced_weights(data.part("train"))
    if train.freeze:
        return LinearProbe(model, data, config, devices, **options)
    inputs = ImageInputs(model, data, config, devices)
    return Classification(model, len(data.labels), **options, inputs=inputs)
