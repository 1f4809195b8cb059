"""The images that a run is trained and validated on."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from vitrail.config import Config
from vitrail.data.augment import training_transform
from vitrail.data.dataset import Splits
from vitrail.data.loader import (
    Augmented,
    RankBatchSampler,
    ShuffledOrder,
    TrainingBatch,
    training_batches,
)
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.sheets import grid
from vitrail.devices import Devices, cores
from vitrail.errors import VitrailError
from vitrail.model import Classifier

NO_VAL_IMAGE = "no image of val can be decoded; `vitrail data --check` lists the reasons"


class ImageInputs:
    """Augmented batches of train, and how val is read."""

    def __init__(self, model: Classifier, data: Splits, config: Config, devices: Devices) -> None:
        assert isinstance(model.preprocess, Preprocessing)
        self.preprocessing = model.preprocess
        self.data, self.config, self.devices = data, config, devices
        source, augment = data.part("train"), config.augment
        transform = training_transform(self.preprocessing, augment)
        self.dataset = Augmented(source, transform, config.seed)
        mixing = bool(augment.mixup or augment.cutmix)
        self.sampler = build_sampler(source.targets, source.blocks, config, devices, mixing)

    def batches(self, start: int) -> Iterator[TrainingBatch]:
        """From a step on, without end."""
        return training_batches(
            self.dataset,
            replace(self.sampler, start=start),
            workers=decoding_workers(self.config, self.devices),
            device=self.devices.device,
        )

    def val_options(self) -> dict[str, Any]:
        """How val is read: for `predict_dataset`."""
        batch = evaluation_batch(self.config, self.devices)
        # Processes take longer to start than a few batches take to decode.
        few = len(self.data.part("val").targets) // (batch * self.devices.world)
        return {"batch": batch, "workers": min(decoding_workers(self.config, self.devices), few)}


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
    """Processes that decode: all cores beside a GPU, none where the cores compute as well."""
    if config.system.workers >= 0:
        return config.system.workers
    if devices.device.type != "cuda":
        return 0
    return max(1, cores() // min(devices.world, torch.cuda.device_count()))


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
