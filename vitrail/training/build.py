"""From settings to what a run works with: the model, its preprocessing, its length."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from vitrail import config
from vitrail.config import Config
from vitrail.console import say
from vitrail.data.dataset import Source, Splits
from vitrail.data.opening import in_catalog, same_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.model import Classifier, create
from vitrail.model.classifier import as_size
from vitrail.model.variants import name
from vitrail.settings import build, put, to_flat
from vitrail.training.loop import Length
from vitrail.training.optim import hyperrule
from vitrail.weights.load import load

SHAPE = ("width", "depth", "heads", "mlp", "patch", "backbone", "units", "axial")
"""What the name of a variant says about the shape of its weights."""
READING = ("pool", "positions", "injection")
"""What it does not say."""
SAMPLED = 64
"""Pictures that the HyperRule looks at to learn their size."""
FROM_SCRATCH_CROP = 0.875
"""256 to 224 pixels, as ImageNet is usually evaluated."""


def build_model(
    settings: config.Model, data: config.Data, labels: tuple[str, ...], keep_head: bool = False
) -> Classifier:
    """The model to train, with the classes of the data and the preprocessing it will be used with.

    Weights to start from get a zero head, as in the paper, unless they know these classes and
    the settings, or the run that is resumed, keep theirs.
    """
    if settings.init:
        model = from_weights(settings, data, labels, keep_head)
    elif settings.variant:
        model = create(
            settings.variant, classes=len(labels), size=data.size, **chosen_options(settings)
        )
    else:
        raise VitrailError("neither model.variant nor model.init says which model to train")
    model.labels = labels
    model.preprocess = evaluation_preprocessing(model.preprocess, data)
    told = ("source", "val", "test", "split", "train_on")
    model.training_data = {key: getattr(data, key) for key in told} | {"every_class": True}
    return model.float()


def refuse_other_parts(learned: Mapping[str, Any], init: str, data: config.Data) -> None:
    """Weights that learned from these very data go on with the same test part, or they would be
    tested on pictures that they learned from."""
    if not learned or not same_data(learned.get("source", ""), data.source):
        return
    for key in ("split", "test"):
        if (then := learned.get(key)) != (now := getattr(data, key)):
            raise VitrailError(
                f"model.init = {init} was trained on {data.source} with data.{key}={then}, not "
                f"{now}: test would hold images that it was trained on; set data.{key}={then}"
            )
    lent = data.split == "hash" and not in_catalog(data.source)
    if lent and not learned.get("every_class"):
        say(
            f"model.init = {init} is of a version that split classes of few images otherwise: test "
            "may hold images of them that it learned from"
        )


def chosen_options(settings: config.Model) -> dict[str, Any]:
    """The options that differ from the variant's own."""
    names = ("width", "depth", "heads", "mlp", "pool", "positions", "injection", "hidden")
    more = ("head_bias", "layer_scale", "dropout", "drop_path")
    return {key: value for key in (*names, *more) if (value := getattr(settings, key))}


def from_weights(
    settings: config.Model, data: config.Data, labels: tuple[str, ...], keep_head: bool
) -> Classifier:
    """Trained weights, at the size and with the classes of the data."""
    rates = {key: v for key in ("dropout", "drop_path") if (v := getattr(settings, key))}
    model = load(settings.init, size=data.size, **rates)
    refuse_other_parts(model.training_data, settings.init, data)
    refuse_other_shape(model.architecture, settings, data)
    known = bool(labels) and model.head is not None and model.labels == labels
    if settings.keep_head and not known:
        named = ", ".join(model.labels[:3]) or "unnamed"
        raise VitrailError(
            f"model.keep_head=true: the classes of {settings.init} ({named} …) are not those of "
            f"{data.source}; leave it out to start from a zero head"
        )
    if not (known and (settings.keep_head or keep_head)):
        model.replace_head(len(labels), settings.head_bias)
    return model


def refuse_other_shape(found: Any, settings: config.Model, data: config.Data) -> None:
    """Weights keep their shape; settings that describe another one are a mistake."""
    given = chosen_options(settings)
    wanted = {key: value for key, value in given.items() if key in (*SHAPE, *READING)}
    if settings.variant:
        with torch.device("meta"):
            model = create(settings.variant, classes=0, size=data.size, **given)
        wanted |= {key: getattr(model.architecture, key, None) for key in SHAPE}
    for key, value in wanted.items():
        has = getattr(found, key, None)
        if has != value:
            raise VitrailError(
                f"model.init = {settings.init} is a {name(found)} with {key} {has}, the settings "
                f"say {value}; leave model.{key if key in given else 'variant'} out"
            )


def evaluation_preprocessing(of_weights: Any, data: config.Data) -> Preprocessing:
    """How pictures are prepared for evaluation and use, at the size of this run."""
    size = as_size(data.size)
    known = of_weights if isinstance(of_weights, Preprocessing) else None
    crop = data.crop
    if crop < 0:
        crop = min(known.size) / known.short_side if known and known.short_side else 0.0
        if known is None:
            crop = FROM_SCRATCH_CROP
    short_side = round(min(size) / crop) if crop else 0
    return replace(known or Preprocessing(), size=size, short_side=short_side)


def apply_hyperrule(settings: Config, data: Splits) -> Config:
    """The settings with BiT's HyperRule worked out, where they ask for it.

    It fills in what is at its default; what a recipe or a user has set otherwise stays.
    """
    if not settings.train.hyperrule:
        return settings
    train = data.part("train")
    sides = some_sides(train)
    found = hyperrule(len(train.targets), float(np.median(sides)))
    values, defaults = to_flat(settings), to_flat(Config())
    if settings.train.epochs or settings.train.minutes:
        del found["train.steps"]
    for key, value in found.items():
        if values[key] == defaults[key]:
            put(values, key, value)
    put(values, "train.hyperrule", False)
    return build(values)


def some_sides(source: Source) -> list[float]:
    """The side of a square as large as the picture, for some of the pictures; BiT's measure."""
    found = []
    for index in sorted(set(np.linspace(0, len(source.targets) - 1, SAMPLED, dtype=int))):
        with suppress(VitrailError):  # a broken picture is named where it is trained on
            width, height = source.image(int(index)).size
            found.append((width * height) ** 0.5)
    if not found:
        raise VitrailError("train.hyperrule: none of the pictures looked at can be decoded")
    return found


def length_of(settings: Config, images: int) -> Length:
    """How long the run is, in updates or seconds."""
    train = settings.train
    if train.minutes:
        return Length(seconds=60 * train.minutes)
    steps = train.steps or round(train.epochs * images / train.batch)
    if train.epochs:
        steps = max(1, steps)
    if not steps:
        raise VitrailError("how long to train? set train.steps, train.epochs or train.minutes")
    return Length(steps=steps)
