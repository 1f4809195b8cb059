"""The images that a run is trained and validated on."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from vitrail.config import Config
from vitrail.console import count_progress, duration, log_progress, say
from vitrail.data.augment import training_transform
from vitrail.data.batch_augment import BatchAugment
from vitrail.data.dataset import Broken, Source, Splits
from vitrail.data.decoded import CutImages, DecodedImages, decode_images, decoded_batches
from vitrail.data.draws import ON_CPU, ON_DEVICE
from vitrail.data.loader import (
    Augmented,
    RankBatchSampler,
    ShuffledOrder,
    TrainingBatch,
    prepared_ahead,
    training_batches,
)
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sheets import grid
from vitrail.devices import Devices, decoding_processes
from vitrail.errors import VitrailError
from vitrail.evaluation.predictor import ImageBatches
from vitrail.model import Classifier

NO_VAL_IMAGE = "no image of val can be decoded; `vitrail data --check` lists the reasons"
_MANY = 1024
"""Fewer images are decoded before processes that decode have started."""
_VAL_BYTES = 1 << 28
"""Images of val that take no more are prepared once: 445 images at 224 px, or 21,845 at 32 px."""


class ImageInputs:
    """Augmented batches of train, and how val is read."""

    def __init__(self, model: Classifier, data: Splits, config: Config, devices: Devices) -> None:
        assert isinstance(model.preprocess, Preprocessing)
        self.preprocessing = model.preprocess
        self.data, self.config, self.devices = data, config, devices
        source, augment = data.part("train"), config.augment
        self.augment = None
        if augments_on_device(config, self.preprocessing, devices):
            self.augment = BatchAugment(self.preprocessing, augment, config.seed)
        self.decoded = self._decode(source)
        mixing = bool(augment.mixup or augment.cutmix)
        self.sampler = build_sampler(source.targets, source.blocks, config, devices, mixing)

    def _decode(self, source: Source) -> DecodedImages | None:
        """All training images, where they are decoded once."""
        config, devices, images = self.config, self.devices, len(source.targets)
        seen = config.train.steps * config.train.batch or config.train.epochs * images
        place = config.system.cache
        if self.augment is None:
            if place not in ("auto", "none"):
                say(f"cache    none: system.cache={place} needs system.augment=device")
            return None
        if place == "auto" and 0 < seen < 2 * images:
            place = "none"  # a single pass would gain nothing
        workers = decoding_workers(config, devices) if images >= _MANY else 0
        began = time.perf_counter()
        with count_progress("decoding train", devices.main) as advance:
            decoded = decode_images(
                source, self.augment, devices, place=place, workers=workers, progress=advance
            )
        if decoded is None:
            if place != "none" and devices.main:
                say("cache    none: the decoded images fit neither into memory nor on disk")
            return None
        if devices.main:
            say(f"cache    {decoded[1]}, in {duration(time.perf_counter() - began)}")
        return decoded[0]

    @property
    def skipped(self) -> Sequence[Broken]:
        """Images that could not be decoded before the first step."""
        return () if self.decoded is None else self.decoded.broken

    @property
    def draws(self) -> int:
        """Version of the rule by which augmentation is drawn."""
        return ON_CPU if self.augment is None else ON_DEVICE

    def batches(self, start: int) -> Iterator[TrainingBatch]:
        """Endless batches, starting at a step."""
        source, device = self.data.part("train"), self.devices.device
        sampler = replace(self.sampler, start=start)
        if self.augment is not None and self.decoded is not None:
            targets = source.targets
            batches = decoded_batches(self.decoded, self.augment, targets, sampler, device)
            return prepared_ahead(batches, device)
        options: dict[str, Any] = {"workers": decoding_workers(self.config, self.devices)}
        if self.augment is not None:
            dataset: Any = CutImages(source, self.augment)
            options["finish"] = partial(dataset.finish, device=device)
        else:
            transform = training_transform(self.preprocessing, self.config.augment)
            dataset = Augmented(source, transform, self.config.seed)
        return prepared_ahead(training_batches(dataset, sampler, device=device, **options), device)

    @property
    def val(self) -> ImageBatches:
        """The images of val, read by the same processes in every validation of the run."""
        self._val.progress = log_progress("evaluating val", self.devices.main)
        return self._val

    @cached_property
    def _val(self) -> ImageBatches:
        return self.prepared(self.data.part("val"))

    def prepared(self, source: Source) -> ImageBatches:
        """Images without augmentation, to be read in every evaluation of the run."""
        return ImageBatches(
            source,
            self.preprocessing,
            self.devices.device,
            batch=evaluation_batch(self.config, self.devices),
            workers=self.config.system.workers,
            keep=_VAL_BYTES,
        )


def augments_on_device(config: Config, preprocessing: Preprocessing, devices: Devices) -> bool:
    """Whether images are augmented in batches on the device."""
    where = config.system.augment
    # Without antialiasing, torch has another bicubic kernel than Pillow.
    other_kernel = preprocessing.interpolation == "bicubic" and not preprocessing.antialias
    if where == "device" and devices.device.type not in ("cuda", "cpu"):
        raise VitrailError(
            f"system.augment=device cannot use {devices.device.type}, which has no float64; "
            "use system.augment=cpu"
        )
    if where == "device" and other_kernel:
        raise VitrailError(
            "system.augment=device cannot resize bicubic without antialiasing, as model.init does; "
            "use system.augment=cpu"
        )
    if where == "auto":
        return devices.device.type == "cuda" and not other_kernel
    return where == "device"


def build_sampler(
    targets: Int[np.ndarray, " n"],
    blocks: Int[np.ndarray, " n"],
    config: Config,
    devices: Devices,
    mixing: bool = False,
) -> RankBatchSampler:
    """This process's share of each batch, in the order that the seed gives."""
    batch = config.train.batch
    if batch % devices.world:
        raise VitrailError(f"train.batch = {batch} cannot be shared by {devices.world} processes")
    order = ShuffledOrder(targets, blocks, config.seed, config.data.sampling == "balanced")
    return RankBatchSampler(order, batch, devices.rank, devices.world, start=0, mixing=mixing)


def decoding_workers(config: Config, devices: Devices) -> int:
    """Processes that decode, as set or chosen."""
    workers = config.system.workers
    return workers if workers >= 0 else decoding_processes(devices.device)


def evaluation_batch(config: Config, devices: Devices) -> int:
    """Images at a time without gradients."""
    share = config.train.batch // devices.world
    return max(1, min(config.system.microbatch or share, share, 128))


def image_sheet(images: Tensor, pre: Preprocessing) -> Image.Image:
    """Images as the model gets them, side by side."""
    std, mean = (torch.tensor(values)[:, None, None] for values in (pre.std, pre.mean))
    pixels = ((images.float().cpu() * std + mean).clamp(0, 1) * 255).round().byte()
    tiles = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    return grid(tiles, columns=8, side=128)
