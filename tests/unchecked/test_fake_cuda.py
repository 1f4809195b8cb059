"""GPU code without a GPU: fake tensors have a device and a shape, and refuse what would make the
processor wait for the device."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from vitrail.config import Augment, Config, load_config
from vitrail.data.batch_augment import BatchAugment
from vitrail.data.decoded import DecodedImages
from vitrail.data.loader import TrainingBatch
from vitrail.data.preprocessing import Preprocessing
from vitrail.devices import Devices
from vitrail.training.build import build_model
from vitrail.training.checkpoint import TrainState
from vitrail.training.loop import Loop
from vitrail.training.objectives.classification import Classification
from vitrail.training.objectives.masked import MaskedPatches
from vitrail.training.optim import EMA, Schedule, build_optimizer

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
CLASSES = tuple("abcdefghij")
VIT = ("model.width=48", "model.depth=1", "model.heads=3", "model.mlp=96")
OTHER = (
    *("model.width=0", "model.depth=0", "model.heads=0", "model.mlp=0"),
    *("model.pool=", "model.positions="),
)
MASKED = ("train.objective=masked", "model.pool=class", "train.label_smoothing=0")
SETTINGS = [
    VIT,
    (*VIT, "augment.mixup=0.5", "augment.cutmix=1.0"),
    (*VIT, "train.objective=sigmoid"),
    (*VIT, "model.drop_path=0.2", "model.dropout=0.1", "model.layer_scale=0.1"),
    (*VIT, "model.positions=relative"),
    (*VIT, "model.positions=factorized", "model.injection=every"),
    *((*VIT, *MASKED, f"train.masked={target}") for target in ("mean", "grid", "pixels")),
    *((*OTHER, f"model.variant={name}") for name in ("R14x0.25", "ResNet18", "Axial-R14x0.25")),
    *((*OTHER, f"model.variant={name}") for name in ("Axial-Ti/8", "R14x0.25+Ti/32")),
]

UPDATES = [
    *((*VIT, f"optim.name={name}") for name in ("sgd", "adam", "adamw", "lamb", "muon")),
    (*VIT, "model.drop_path=0.2", "augment.mixup=0.5", "augment.cutmix=1.0"),
    (*VIT, *MASKED),
    (*OTHER, "model.variant=R14x0.25"),
]


@pytest.fixture(autouse=True)
def _real_draws(monkeypatch):
    """What is drawn for an image is computed with real numbers on the processor."""
    drawn = BatchAugment._draws

    def draws(*args):
        with unset_fake_temporarily():
            return drawn(*args)

    monkeypatch.setattr(BatchAugment, "_draws", draws)


def objective(config: Config, device: torch.device) -> nn.Module:
    """With fake weights on a device."""
    with unset_fake_temporarily():
        model = build_model(config, CLASSES).train()
    pre = Preprocessing(size=model.architecture.size)
    augment = BatchAugment(pre, config.augment, seed=0)
    inputs = SimpleNamespace(config=config, preprocessing=pre, skipped=(), augment=augment)
    if config.train.objective == "masked":
        share = config.train.masked_share
        found = MaskedPatches(model, target=config.train.masked, share=share, inputs=inputs)
    else:
        found = Classification(model, len(CLASSES), kind=config.train.objective, inputs=inputs)
    for module in found.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(torch.empty(p.shape, device=device))
        for name, x in list(module._buffers.items()):
            if x is not None:
                module._buffers[name] = torch.empty(x.shape, dtype=x.dtype, device=device)
    return found


def blank(size: tuple[int, int], device: torch.device) -> TrainingBatch:
    return TrainingBatch(
        images=torch.zeros(8, 3, *size, dtype=torch.uint8, device=device),
        targets=torch.zeros(8, dtype=torch.long, device=device),
    )


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
def test_losses_are_computed_on_the_device(settings):
    config = load_config("cifar10/small", [*settings, "train.batch=8"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = objective(config, CUDA)
        batch = blank(found.inputs.preprocessing.size, CUDA)
        for rows in (slice(0, 4), slice(4, 8)):
            losses = found(*found.prepare(batch, rows))
            assert losses.device == CUDA
            assert losses.shape == (4,)


@pytest.mark.parametrize("settings", UPDATES, ids=" ".join)
def test_an_update_never_waits(settings):
    """Not on a fake GPU, where torch cannot compute gradients without a real one."""
    config = load_config("cifar10/small", [*settings, "train.batch=8"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = objective(config, CPU)
        state = TrainState(
            wrapped=found,
            ema=EMA(found, 0.99),
            optimizer=build_optimizer(found, config.optim, CPU),
            scaler=torch.amp.GradScaler("cpu", enabled=False),
        )
        schedule = Schedule(steps=9, seconds=0, peak=1e-3, warmup=2, decay="cosine", floor=0)
        loop = Loop(
            state=state,
            schedule=schedule,
            devices=Devices(CPU, torch.float32),
            batch=8,
            clip=1.0,
            seed=0,
            microbatch=4,
        )
        for _ in range(2):
            loop.step(blank(found.inputs.preprocessing.size, CPU))
        with pytest.raises(torch._subclasses.fake_tensor.DataDependentOutputException):
            loop.check_finite()  # as it must


@pytest.mark.parametrize(
    "options",
    [
        {"crop": "inception"},
        {"crop": "pad"},
        {"crop": "resize"},
        {"crop": "inception", "randaugment_layers": 2},
        {"three_augment": True},
        {"color_jitter": 0.4},
        {"erasing": 0.5},
    ],
    ids=str,
)
def test_images_are_augmented_on_the_device(options):
    augment = BatchAugment(Preprocessing(size=(32, 24)), Augment(**options), seed=0)
    positions, size = np.arange(16), augment.decoded_size if "crop" in options else (32, 24)
    shapes = np.tile(np.array([size if min(size) else (40, 48)]), (16, 1))
    lengths = 3 * shapes.prod(1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        pixels = torch.empty(lengths.sum(), dtype=torch.uint8, device=CUDA)
        images = DecodedImages(pixels, np.cumsum(lengths) - lengths, shapes, positions, 3)
        boxes = augment.boxes(positions, shapes)
        cut = images.cut(positions, boxes, augment.flips(positions), CUDA)
        found = augment(cut, boxes, positions)
    assert found.device == CUDA
    assert found.shape == (16, 3, 32, 24)
