"""What an experiment will cost, computed before anything runs and without its data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from vitrail.config import Config
from vitrail.data.catalog import known_datasets
from vitrail.errors import VitrailError
from vitrail.model import Architecture, parse_variant
from vitrail.model.classifier import as_size
from vitrail.model.vit import ViTArchitecture
from vitrail.reproduction.experiment import Design
from vitrail.reproduction.study import Study, Task
from vitrail.training.build import chosen_options, planned_steps, with_hyperrule
from vitrail.training.cost import UTILIZATION, exaflops
from vitrail.weights.load import open_checkpoint
from vitrail.weights.published import NAMES, model_cost

_PEAK = 989e12
"""Of an H200 or H100 in half precision, in operations per second."""
_SIDES = {"cifar10": 32.0, "cifar100": 32.0}
"""Pixels of images that BiT's HyperRule takes to be small."""
_STATE_BYTES = {"adam": 16, "adamw": 16, "lamb": 16}
"""Bytes of weights, gradients and optimizer state for each parameter; 12 with momentum alone."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """What is known of a run before it starts."""

    task: Task
    data: str
    images: int
    """In its training set."""
    seen: int
    """Images that it will be trained on, counting repetitions."""
    parameters: int
    gmacs: float

    @property
    def exaflops(self) -> float:
        return exaflops(self.gmacs, self.seen)

    @property
    def gpu_hours(self) -> float:
        return self.exaflops * 1e18 / (UTILIZATION * _PEAK) / 3600

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and optimizer state; activations come on top."""
        config = self.task.config
        ema = 4 if config.train.ema else 0
        return (_STATE_BYTES.get(config.optim.name, 12) + ema) * self.parameters


def plan(study: Study, design: Design) -> list[PlannedRun]:
    """The runs of an experiment, each once.

    Where settings are still to be chosen on val, the first of them stand for the choice.
    """
    tasks = study.tasks_of(design, expected=True)
    return [_planned(task, design.scale.images) for task in tasks]


def _planned(task: Task, images: Mapping[str, int]) -> PlannedRun:
    config = task.config
    source = config.data.source
    if source in images:
        n = images[source]
    elif source in known_datasets():
        n = known_datasets()[source].images
    else:
        n = 0
    n = min(n, config.data.subset or n)
    if config.train.hyperrule and n:
        config = with_hyperrule(config, n, _SIDES.get(source, math.inf))
        task = replace(task, config=config)
    cost = model_cost(_architecture(task))
    seen = 0
    if task.train and (n or config.train.steps):
        seen = planned_steps(config, n) * config.train.batch
    return PlannedRun(
        task=task,
        data=source,
        images=n,
        seen=seen,
        parameters=cost.parameters,
        gmacs=cost.gmacs,
    )


def _architecture(task: Task) -> Architecture:
    """The model that a run will train."""
    config, parent = task.config, task.parent
    if parent is not None:
        before = _architecture(parent)
        changed = {"size": as_size(config.data.size), "classes": _classes(config)}
        if isinstance(before, ViTArchitecture):
            changed["hidden"] = 0
        return replace(before, **changed)
    model, published = config.model, NAMES.get(config.model.init)
    options, classes = dict(chosen_options(model)), _classes(config)
    if published is not None:
        classes = classes if task.train else published.classes
        options = {key: options[key] for key in ("dropout", "drop_path") if key in options}
        variant = published.variant
        options = {**published.options, **options}
    elif model.init:
        loaded = open_checkpoint(model.init, size=config.data.size).architecture
        return replace(loaded, classes=classes) if task.train else loaded
    elif model.variant:
        variant = model.variant
    else:
        raise VitrailError(f"the model of {task.recipe} is not known before it is loaded")
    return parse_variant(variant, classes=classes, size=config.data.size, **options)


def _classes(config: Config) -> int:
    entry = known_datasets().get(config.data.source)
    return entry.classes if entry else 1000
