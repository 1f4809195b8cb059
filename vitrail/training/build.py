"""From settings to the model, its preprocessing and the schedule of a run."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitrail import config
from vitrail.config import Config, build_config, set_value, to_flat
from vitrail.console import say
from vitrail.data.dataset import Source, Splits
from vitrail.data.opening import in_catalog, same_data
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import Devices, total_memory
from vitrail.errors import VitrailError
from vitrail.model import Architecture, Classifier, build_meta, create, parse_variant
from vitrail.model.classifier import as_size
from vitrail.model.variants import variant_name
from vitrail.training.optim import Schedule, hyperrule
from vitrail.weights.load import load

_SHAPE = (
    *("width", "depth", "heads", "mlp", "patch"),
    *("backbone", "backbone_width", "units", "axial"),
)
"""What the name of a variant says about the shape of its weights."""
_NOT_IN_NAME = ("root", "pool", "positions", "injection")
_HYPERRULE_IMAGES = 64
"""Images that the HyperRule opens to learn their size."""
_CROP = 0.875
"""From scratch: 256 to 224 pixels, as ImageNet is usually evaluated."""
_LEAST_SHARE = 0.1
"""The least share of a time budget for training itself: computing features may use the rest."""


def build_model(config: Config, labels: tuple[str, ...], keep_head: bool = False) -> Classifier:
    """The model to train, with the classes of the data and the preprocessing it will be used with.

    Weights to start from get a zero head, as in the paper, unless they know these classes and
    the settings, or the run that is resumed, keep theirs.
    """
    settings, data = config.model, config.data
    if settings.init:
        model = _from_weights(settings, data, labels, keep_head)
    elif settings.variant:
        model = create(
            settings.variant, classes=len(labels), size=data.size, **chosen_options(settings)
        )
    else:
        raise VitrailError("no model specified; set model.variant or model.init")
    model.activation = "sigmoid" if config.train.objective == "sigmoid" else "softmax"
    model.activation_checkpointing = config.system.recompute
    model.labels = labels
    model.preprocess = _preprocessing(model.preprocess, data)
    recorded = ("source", "val", "test", "split", "train_on")
    model.training_data = {key: getattr(data, key) for key in recorded} | {"every_class": True}
    return model.float()


def _refuse_other_split(origin: Mapping[str, Any], init: str, data: config.Data) -> None:
    """Weights that were trained on this data keep its test split, or they would be tested on images
    that they were trained on."""
    if not origin or not same_data(origin.get("source", ""), data.source):
        return
    for key in ("split", "test"):
        if (then := origin.get(key)) != (now := getattr(data, key)):
            raise VitrailError(
                f"model.init = {init} was trained on {data.source} with data.{key}={then}, not "
                f"{now}: test would hold images that it was trained on; set data.{key}={then}"
            )
    by_hash = data.split == "hash" and not in_catalog(data.source)
    if by_hash and not origin.get("every_class"):
        say(
            f"model.init = {init} is from a version that split small classes differently: test may "
            "hold images of them that it was trained on"
        )


def chosen_options(settings: config.Model) -> dict[str, Any]:
    """The options that differ from the variant's own."""
    names = ("width", "depth", "heads", "mlp", "root", "pool", "positions", "injection")
    more = ("hidden", "head_bias", "layer_scale", "dropout", "drop_path")
    return {key: value for key in (*names, *more) if (value := getattr(settings, key))}


def _from_weights(
    settings: config.Model, data: config.Data, labels: tuple[str, ...], keep_head: bool
) -> Classifier:
    """Trained weights, at the size and with the classes of the data."""
    if settings.variant:
        parse_variant(settings.variant)  # a misspelled name is an error before a download
    rates = {key: v for key in ("dropout", "drop_path") if (v := getattr(settings, key))}
    model = load(settings.init, size=data.size, **rates)
    _refuse_other_split(model.training_data, settings.init, data)
    _refuse_other_shape(model.architecture, settings, data)
    known = bool(labels) and model.head is not None and model.labels == labels
    if settings.keep_head and not known:
        named = ", ".join(model.labels[:3]) or "unnamed"
        raise VitrailError(
            f"model.keep_head=true: the classes of {settings.init} ({named} …) are not those of "
            f"{data.source}; remove model.keep_head to start from a zero head"
        )
    if not (known and (settings.keep_head or keep_head)):
        model.replace_head(len(labels), settings.head_bias)
    return model


def _refuse_other_shape(found: Any, settings: config.Model, data: config.Data) -> None:
    """Weights keep their shape; settings that describe another one are an error."""
    given = chosen_options(settings)
    wanted = {key: value for key, value in given.items() if key in (*_SHAPE, *_NOT_IN_NAME)}
    if settings.variant:
        described = parse_variant(settings.variant, classes=0, size=data.size, **given)
        wanted |= {key: getattr(described, key, None) for key in _SHAPE}
    for key, value in wanted.items():
        has = getattr(found, key, None)
        if has != value:
            raise VitrailError(
                f"model.init = {settings.init} is a {variant_name(found)} with {key} {has}, but "
                f"the settings request {value}; remove model.{key if key in given else 'variant'}"
            )


def _preprocessing(of_weights: Any, data: config.Data) -> Preprocessing:
    """The preprocessing for evaluation and prediction, at the size of this run."""
    size = as_size(data.size)
    known = of_weights if isinstance(of_weights, Preprocessing) else None
    crop = data.crop
    if crop < 0:
        crop = min(known.size) / known.short_side if known and known.short_side else 0.0
        if known is None:
            crop = _CROP
    short_side = round(min(size) / crop) if crop else 0
    return replace(known or Preprocessing(), size=size, short_side=short_side)


def choose_microbatch(config: Config, model: Classifier, devices: Devices) -> int:
    """Images per forward pass: as set, or all of the process's images (0), halved when a GPU runs
    out of memory.

    A process that runs out of main memory is killed without an error, so on a CPU the share is
    halved until its activations fit into a third of the memory.
    """
    chosen, share = config.system.microbatch, config.train.batch // devices.world
    if chosen or config.train.freeze or devices.device.type != "cpu":
        return chosen
    activations = activation_bytes(model.architecture, config.system.recompute)
    most = total_memory() // (3 * devices.world * activations)
    while share > max(1, most):
        share = chosen = share // 2
    return chosen


@cache
def activation_bytes(architecture: Architecture, recompute: bool = False) -> int:
    """Bytes that the forward pass of one image keeps for the backward pass, in float32."""
    meta = build_meta(architecture).eval()
    meta.activation_checkpointing = recompute
    kept = {p.untyped_storage()._cdata: 0 for p in meta.parameters()}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage._cdata, storage.nbytes())
        return tensor

    shape = (1, architecture.channels, *architecture.size)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = meta(torch.zeros(shape, device="meta"))  # keeps what was counted
    del outputs
    return max(1, sum(kept.values()))


def apply_hyperrule(settings: Config, data: Splits) -> Config:
    """The settings with BiT's HyperRule applied, where it is on."""
    if not settings.train.hyperrule:
        return settings
    train = data.part("train")
    return with_hyperrule(settings, len(train.targets), float(np.median(_some_sides(train))))


def with_hyperrule(settings: Config, images: int, median_side: float) -> Config:
    """The settings with the HyperRule for so many training images of such a size.

    It replaces defaults only; what a recipe or a user has set stays.
    """
    found = hyperrule(images, median_side)
    values, defaults = to_flat(settings), to_flat(Config())
    if settings.train.epochs or settings.train.minutes:
        del found["train.steps"]
    for key, value in found.items():
        if values[key] == defaults[key]:
            set_value(values, key, value)
    set_value(values, "train.hyperrule", False)
    return build_config(values)


def _some_sides(source: Source) -> list[float]:
    """The side of a square of the same area, for some of the images; BiT's measure of size."""
    sides = []
    for index in sorted(set(np.linspace(0, len(source.targets) - 1, _HYPERRULE_IMAGES, dtype=int))):
        with suppress(VitrailError):  # a broken image is named when it is trained on
            width, height = source.image(int(index)).size
            sides.append((width * height) ** 0.5)
    if not sides:
        raise VitrailError("train.hyperrule: none of the sampled images can be decoded")
    return sides


def planned_steps(config: Config, images: int) -> int:
    """Updates of the run; 0 where a time budget decides."""
    train = config.train
    if train.minutes:
        return 0
    steps = train.steps or round(train.epochs * images / train.batch)
    if train.epochs:
        steps = max(1, steps)
    if not steps:
        raise VitrailError("no training length: set train.steps, train.epochs or train.minutes")
    return steps


def build_schedule(config: Config, images: int, prepared: float = 0.0) -> Schedule:
    """Length and learning rate; seconds spent before the first update count into a budget."""
    optim, seconds = config.optim, 60 * config.train.minutes
    return Schedule(
        steps=planned_steps(config, images),
        seconds=max(seconds - prepared, _LEAST_SHARE * seconds),
        peak=optim.lr,
        warmup=optim.warmup,
        decay=optim.decay,
        floor=optim.floor,
        milestones=optim.milestones,
    )
