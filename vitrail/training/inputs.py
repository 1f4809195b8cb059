"""What the loop is fed with: augmented images for a model, or fixed features for its head"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitrail.config import Config
from vitrail.console import count_progress, log_progress
from vitrail.data.augment import mix, normalize, training_transform
from vitrail.data.check import grid
from vitrail.data.dataset import Source, Splits
from vitrail.data.loader import Augmented, Share, Stream, TrainingBatch, derive, training_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import Devices, cores, reshard
from vitrail.errors import VitrailError
from vitrail.evaluation.classify import Pictures, collate, evaluating, loader, predict, why
from vitrail.evaluation.features import Features, extract, kept_features
from vitrail.evaluation.metrics import summary
from vitrail.files import cache
from vitrail.model import Classifier
from vitrail.model.classifier import Activation, losses
from vitrail.model.vit import ViT
from vitrail.objectives.masked import draw
from vitrail.training.loop import Prepare

MASKING = -1
"""Sets the seeds of masks apart from those of augmentation and dropout."""
SHEET = 32
"""Images on the sheet of augmented training images."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What is trained, on what, and how it is measured on the way."""

    trained: nn.Module
    batches: Callable[[int], Iterator[TrainingBatch]]
    """The batches from a step on."""
    prepare: Prepare
    validate: Callable[[], dict[str, Any]] | None
    broken: tuple[tuple[str, str], ...] = ()
    computed: int = 0
    """Pictures whose fixed features had to be computed, in all processes."""
    sheet: Callable[[TrainingBatch], Image.Image] | None = None
    """A picture of a batch as the model sees it."""


def images_for(model: Classifier, data: Splits, config: Config, where: Devices) -> Inputs:
    """Augmented images for the whole model."""
    model.train()
    pre = model.preprocess
    assert isinstance(pre, Preprocessing)
    source = data.part("train")
    of_batches = ("mixup", "cutmix", "mixed")
    augmentation = {k: v for k, v in vars(config.augment).items() if k not in of_batches}
    dataset = Augmented(source, training_transform(pre, **augmentation), config.seed)
    masked = config.train.objective == "masked"
    mixing = not masked and bool(config.augment.mixup or config.augment.cutmix)
    share = share_of(stream_of(source.targets, source.blocks, config), config, where, mixing)
    workers = workers_for(config, where)
    prepared = partial(prepare, pre, config, len(data.labels))
    if masked:
        prepared = partial(prepare_masked, pre, config, model)

    def batches(start: int) -> Iterator[TrainingBatch]:
        return training_batches(
            dataset, replace(share, start=start), workers=workers, device=where.device
        )

    def validate() -> dict[str, Any]:
        val = data.part("val")
        batch = evaluation_batch(config, where)
        predictions, broken = predict(
            model,
            val,
            batch=batch,
            precision=where.precision,
            # Processes take longer to start than a few batches take to decode.
            workers=min(workers, len(val.targets) // batch),
            progress=log_progress("evaluating val", where.main),
        )
        reshard(model)
        if not len(predictions.targets):
            raise VitrailError("no picture of val can be decoded; `vitrail data` says why")
        found = (predictions.guesses, predictions.targets, predictions.loss)
        return summary(*found, len(val.labels)) | {"broken": broken}

    return Inputs(
        trained=model,
        batches=batches,
        prepare=prepared,
        validate=None if data.val is None else validate,
        sheet=partial(sheet, pre, prepared),
    )


def validated_by_loss(
    material: Inputs, task: nn.Module, data: Splits, config: Config, where: Devices
) -> Inputs:
    """The same material, measured by the objective's own loss: without labels there is no score."""
    if data.val is None:
        return material
    val, batch = data.val, evaluation_batch(config, where)
    model = material.trained
    assert isinstance(model, Classifier)
    pre = model.preprocess
    assert isinstance(pre, Preprocessing)
    mine = np.arange(where.rank, len(val.targets), where.world)
    pictures = Pictures(val, mine, pre)
    workers = min(workers_for(config, where), len(pictures) // batch)
    patches = patches_of(model)
    # Sharded models exchange weights in each pass, so all processes must run equally many: where
    # one has no images left, it computes on a blank one that does not count.
    passes = math.ceil(math.ceil(len(val.targets) / where.world) / batch)
    blank = torch.zeros(1, len(pre.mean), *pre.size)

    def validate() -> dict[str, Any]:
        losses, broken = torch.zeros(2, dtype=torch.float64), []
        batches = chain(loader(pictures, batch, workers, where.device), repeat(collate([])))
        advance = log_progress("evaluating val", where.main)
        with evaluating(task), where.autocast():
            for part in islice(batches, passes):
                broken += [(val.names[index], why(error)) for index, error in part.broken]
                pixels = blank if part.pixels is None else part.pixels
                indices = part.indices if len(part.indices) else torch.tensor([0])
                # The same patches in every evaluation.
                noise = draw(0, indices.to(where.device, non_blocking=True), patches)
                found = task(pixels.to(where.device, non_blocking=True), noise)
                n = len(part.indices)
                losses += torch.tensor([found[:n].double().sum().item(), n])
                advance(len(part.indices) + len(part.broken), total=len(pictures))
        reshard(task)
        total, n = where.total(losses).tolist()
        if not n:
            raise VitrailError("no picture of val can be decoded; `vitrail data` says why")
        return {"loss": total / n, "n": int(n), "broken": broken}

    return replace(material, validate=validate)


def features_for(model: Classifier, data: Splits, config: Config, where: Devices) -> Inputs:
    """Features of train and val, computed once, for the model's head."""
    model.to(where.device).eval().requires_grad_(False)
    head = model.head
    assert head is not None
    head.requires_grad_(True)
    workers = workers_for(config, where)

    kept = kept_features(model, where.precision, cache())

    def features(part: Source, title: str) -> Features:
        with count_progress(f"features of {title}", where.main) as advance:
            return extract(
                model,
                part,
                precision=where.precision,
                workers=workers,
                kept=kept,
                progress=advance,
            )

    train = features(data.part("train"), "train")
    val = None if data.val is None else features(data.val, "val")
    targets = train.targets.numpy()
    share = share_of(stream_of(targets, np.zeros_like(targets), config), config, where)
    return Inputs(
        trained=head,
        batches=lambda start: feature_batches(train, replace(share, start=start), where.device),
        prepare=lambda batch, rows: (batch.images[rows], batch.targets[rows]),
        validate=None
        if val is None
        else partial(validate_features, head, model.activation, val, where.device),
        broken=train.broken + (() if val is None else val.broken),
        computed=int(where.total(torch.tensor([kept.computed])).item()),
    )


def stream_of(targets: Any, blocks: Any, config: Config) -> Stream:
    """The order of the run."""
    return Stream(targets, blocks, config.seed, config.data.sampling == "balanced")


def share_of(stream: Stream, config: Config, where: Devices, mixing: bool = False) -> Share:
    """This process's part of the batches."""
    batch = config.train.batch
    if batch % where.world:
        raise VitrailError(f"train.batch = {batch} cannot be shared by {where.world} processes")
    return Share(stream, batch, where.rank, where.world, start=0, mixing=mixing)


def prepare(
    pre: Preprocessing, config: Config, classes: int, batch: TrainingBatch, rows: slice
) -> tuple[Tensor, Tensor]:
    """Pixels as the model takes them, mixed where the settings say so."""
    mixup, cutmix, share = config.augment.mixup, config.augment.cutmix, config.augment.mixed
    if not (mixup or cutmix):
        return normalize(batch.images[rows], pre), batch.targets[rows]
    images, targets = batch.preceded(rows)
    # Drawn from the step alone: all processes and all parts of a batch are mixed alike.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            derive(config.seed, batch.first // config.train.batch, 0)
        )
        inputs, targets = mix(
            normalize(images, pre),
            targets,
            mixup=mixup,
            cutmix=cutmix,
            classes=classes,
            share=share,
        )
    return inputs[:-1], targets[:-1]


def prepare_masked(
    pre: Preprocessing, config: Config, model: Classifier, batch: TrainingBatch, rows: slice
) -> tuple[Tensor, Tensor]:
    """Pixels as the model takes them, and the noise that decides which patches it cannot see."""
    inputs = normalize(batch.images[rows], pre)
    first, last = batch.first + rows.start, batch.first + rows.stop
    positions = torch.arange(first, last, device=inputs.device)
    return inputs, draw(derive(config.seed, MASKING), positions, patches_of(model))


def patches_of(model: nn.Module) -> int:
    """Patches of one image."""
    assert isinstance(model, ViT)
    return math.prod(model.architecture.grid)


def workers_for(config: Config, where: Devices) -> int:
    """Processes that decode: all cores beside a GPU, none where the cores compute as well."""
    if config.system.workers >= 0:
        return config.system.workers
    if where.device.type != "cuda":
        return 0
    return max(1, cores() // min(where.world, torch.cuda.device_count()))


def evaluation_batch(config: Config, where: Devices) -> int:
    """Images at a time without gradients."""
    share = config.train.batch // where.world
    return max(1, min(config.system.microbatch or share, share, 128))


def sheet(pre: Preprocessing, prepare: Prepare, batch: TrainingBatch) -> Image.Image:
    """The first images of a batch as the model gets them."""
    images, _ = prepare(batch, slice(0, min(SHEET, len(batch))))
    std, mean = (torch.tensor(values)[:, None, None] for values in (pre.std, pre.mean))
    pixels = ((images.float().cpu() * std + mean).clamp(0, 1) * 255).round().byte()
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    return grid(pictures, columns=8, side=128)


def feature_batches(
    features: Features, share: Share, device: torch.device
) -> Iterator[TrainingBatch]:
    """Batches of features; they are small enough to lie on the device as a whole."""
    vectors, targets = features.vectors.to(device), features.targets.to(device)
    chunks = iter(share)
    per_step = share.chunks_per_step
    for step in count(share.start):
        chosen = [index for _ in range(per_step) for _, index in next(chunks)]
        rows = torch.tensor(chosen, device=device)
        yield TrainingBatch(images=vectors[rows], targets=targets[rows], first=share.first(step))


@torch.no_grad()
def validate_features(
    head: nn.Module, activation: Activation, features: Features, device: torch.device
) -> dict[str, Any]:
    """Loss and accuracy of the head on features."""
    logits = head(features.vectors.to(device)).float().cpu()
    guesses = logits.topk(min(5, logits.shape[1])).indices
    loss = losses(logits, features.targets, activation)
    return summary(guesses.numpy(), features.targets.numpy(), loss.numpy(), logits.shape[1])
