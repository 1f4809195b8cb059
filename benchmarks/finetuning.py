"""Fine-tuning beside timm: its ViT and ours, from the same weights, fed by the same loop.

    python benchmarks/finetuning.py WEIGHTS DATA --size 224 --lr 0.01 --seeds 3

prints test accuracy and images per second of both for each seed. The protocol is the paper's: SGD,
momentum 0.9, cosine, batch 512, 500 steps of which 100 warm up, clip 1, zero head, Inception crop.
"""

import argparse
import time
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import nn

from vitrail.config import Config, load_config
from vitrail.data.opening import open_run_data
from vitrail.devices import Devices, setup_devices
from vitrail.evaluation.predictor import Predictor, predict_dataset
from vitrail.training.build import build_model
from vitrail.training.checkpoint import TrainState
from vitrail.training.inputs import ImageInputs, decoding_workers
from vitrail.training.loop import Loop
from vitrail.training.objectives.classification import Classification
from vitrail.training.optim import Schedule, build_optimizer


def peer(ours: Any, weights: str, size: int) -> nn.Module:
    """timm's model with the same weights, head and preprocessing."""
    state = load_file(weights)
    model: Any = timm.create_model(
        "vit_tiny_patch16_224", img_size=size, num_classes=len(ours.labels)
    )
    state = {key: x for key, x in state.items() if not key.startswith("head.")}
    resized = timm.models.vision_transformer.checkpoint_filter_fn(state, model)
    model.load_state_dict(resized, strict=False)
    nn.init.zeros_(model.head.weight)
    model.labels, model.preprocess = ours.labels, ours.preprocess
    return model


def finetune(model: Any, config: Config, data: Any, where: Devices) -> tuple[float, float]:
    """Test top-1, and training images per second."""
    inputs = ImageInputs(model.train(), data, config, where)
    task = Classification(model, len(data.labels), inputs=inputs).to(where.device)
    steps, optim = config.train.steps, config.optim
    state = TrainState(
        wrapped=task,
        optimizer=build_optimizer(task, optim, where.device),
        ema=None,
        scaler=torch.amp.GradScaler(where.device.type, enabled=False),
    )
    loop = Loop(
        state=state,
        devices=where,
        schedule=Schedule(steps=steps, peak=optim.lr, warmup=optim.warmup),
        batch=config.train.batch,
        clip=optim.clip,
        seed=config.seed,
        microbatch=0,
    )
    start = time.perf_counter()
    loop.run(inputs.batches(0), lambda loop, batch: False)
    where.synchronize()
    speed = steps * config.train.batch / (time.perf_counter() - start)
    workers = decoding_workers(config, where)
    predictor = Predictor(model, data.test.labels, precision=where.precision)
    found, _ = predict_dataset(predictor, data.test, batch=256, workers=workers)
    return float((found.guesses[:, 0] == found.targets).mean()), speed


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights")
    parser.add_argument("data")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["ours", "timm"])
    args = parser.parse_args()
    for seed in range(args.seeds):
        settings = [
            *(f"seed={seed}", f"data.source={args.data}", "data.train_on=train+val"),
            *(f"model.init={args.weights}", f"data.size={args.size}", f"optim.lr={args.lr}"),
            *(f"train.steps={args.steps}", f"optim.warmup={args.steps // 5}", "train.batch=512"),
        ]
        config = load_config(None, settings)
        with setup_devices() as where:
            data = open_run_data(config)
            for name in ("ours", "timm"):
                if args.only not in (None, name):
                    continue
                torch.manual_seed(seed)
                model: Any = build_model(config, data.labels)
                if name == "timm":
                    model = peer(model, args.weights, args.size)
                top1, speed = finetune(model, config, data, where)
                told = f"seed {seed}  {name:4}  {args.size} px  lr {args.lr:g}"
                print(f"{told}  test {100 * top1:.2f}%  {speed:,.0f} img/s", flush=True)


if __name__ == "__main__":
    main()
