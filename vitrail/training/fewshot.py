"""Few-shot accuracy of a model that is being trained, by the method of `vitrail fewshot`."""

from dataclasses import dataclass
from typing import Any

from vitrail.config import Config
from vitrail.data.dataset import Source, Splits
from vitrail.data.folder import NO_CLASS
from vitrail.devices import gather_outside_blocks, reshard
from vitrail.errors import VitrailError
from vitrail.evaluation.features import extract_batches, not_empty
from vitrail.evaluation.fewshot import extract_support, fit_and_score
from vitrail.evaluation.held_out import split_as_trained
from vitrail.evaluation.predictor import ImageBatches, Predictor
from vitrail.model import Classifier
from vitrail.training.inputs import evaluation_batch
from vitrail.training.objectives import Objective


@dataclass(frozen=True)
class FewshotData:
    """The images that the support set is drawn from, and those that accuracy is measured on."""

    train: Source
    queries: Source


def open_fewshot_data(config: Config, data: Splits, model: Classifier) -> FewshotData | None:
    """The images of `train.fewshot`; None without it, or where nothing is evaluated."""
    train = config.train
    if not train.fewshot or train.freeze or data.val is None:
        return None
    if train.fewshot_data:
        other = split_as_trained(model, train.fewshot_data)
        return FewshotData(other.part("train"), other.part("test"))
    if len(data.labels) < 2 or (NO_CLASS in data.labels and not train.uses_labels):
        raise VitrailError(
            f"train.fewshot={train.fewshot} needs labels, which {data.name} does not have; set "
            "train.fewshot_data to data with classes"
        )
    return FewshotData(data.part("train"), data.part("val"))


@dataclass(frozen=True)
class FewshotProbe:
    """Measures the current weights in each evaluation of a run."""

    config: Config
    objective: Objective
    train: Source
    queries: ImageBatches

    def __call__(self) -> dict[str, Any]:
        """The accuracy, and the images that were `skipped`; all processes must call it together."""
        inputs, model = self.objective.inputs, self.objective.model
        precision, shots = inputs.devices.precision, self.config.train.fewshot
        predictor = Predictor(model, precision=precision)
        gather_outside_blocks(self.objective)
        support = extract_support(
            predictor,
            self.train,
            shots=shots,
            seeds=[self.config.seed],
            batch=evaluation_batch(self.config, inputs.devices),
            workers=self.config.system.workers,
        )
        queries = not_empty(extract_batches(predictor, self.queries))
        reshard(self.objective)
        (result,) = fit_and_score(
            support,
            queries,
            targets=self.train.targets,
            classes=len(self.train.labels),
            shots=[shots],
            seeds=[self.config.seed],
        )
        return {"fewshot": result["accuracy"], "skipped": [*support.skipped, *queries.skipped]}


def build_probe(
    config: Config, objective: Objective, data: FewshotData | None
) -> FewshotProbe | None:
    if data is None:
        return None
    inputs = objective.inputs
    own = data.queries is inputs.data.val
    queries = inputs.val if own else inputs.prepared(data.queries)
    return FewshotProbe(config, objective, data.train, queries)
