"""The losses of ten steps, as they were: what changes them by accident shows here first."""

from pathlib import Path
from typing import Any

import pytest

from vitrail.runs import Run
from vitrail.training.resolve import resolve_config
from vitrail.training.train import train_config

TINY = {
    "model.width": 24,
    "model.depth": 2,
    "model.heads": 2,
    "model.mlp": 48,
    "model.dropout": 0.1,
    "model.drop_path": 0.1,
    "data.size": 8,
    "data.subset": 128,
    "augment.crop": "pad",
    "augment.mixup": 0.2,
    "augment.cutmix": 0.0,
    "train.steps": 10,
    "train.batch": 16,
    "train.evaluations": 0,
    "optim.warmup": 2,
    "optim.weight_decay": 0.1,
    "system.log_steps": 1,
}
PLAIN = {"augment.mixup": 0.0, "model.dropout": 0.0, "model.drop_path": 0.0}
RUNS: dict[str, dict[str, Any]] = {
    "adamw": {"optim.name": "adamw", "optim.lr": 0.01},
    "sgd": {"optim.name": "sgd", "optim.lr": 0.1},
    "lamb": {"optim.name": "lamb", "optim.lr": 0.05},
    "muon": {"optim.name": "muon", "optim.lr": 0.02},
    "masked": PLAIN | {"train.objective": "masked", "optim.lr": 0.01},
    "frozen": PLAIN
    | {
        "model.init": str(Path(__file__).parents[1] / "fixtures" / "finished-0.1"),
        **dict.fromkeys(("model.width", "model.depth", "model.heads", "model.mlp"), 0),
        **dict.fromkeys(("model.variant", "model.pool", "model.positions"), ""),
        "train.freeze": True,
        "augment.crop": "none",
        "optim.lr": 0.1,
    },
}
# From one CPU, torch 2.15 and one thread; two threads move Muon's by 2e-5, the others by less.
LOSSES = {
    "adamw": "2.3026 2.3026 2.3093 2.3116 2.3295 2.3264 2.3002 2.2893 2.2974 2.3112",
    "sgd": "2.3026 2.3026 2.3163 2.3380 2.3161 2.3970 2.4260 2.3342 2.2209 2.2950",
    "lamb": "2.3026 2.3026 2.3498 2.2999 2.3490 2.3451 2.3065 2.3115 2.2701 2.3039",
    "muon": "2.3026 2.3026 2.3174 2.3251 2.3545 2.3588 2.2926 2.2697 2.3318 2.3567",
    "masked": "6.2383 6.2383 6.0750 5.6947 5.1991 4.7801 4.4426 4.1964 4.0579 3.9706",
    "frozen": "2.3026 2.3026 2.2307 2.4578 2.3207 2.3902 2.1287 1.3463 0.9970 1.2317",
}


def losses(folder: Path, settings: dict[str, Any]) -> list[float]:
    config = resolve_config("digits/vit", TINY | settings).config
    train_config(config, folder, resume=False, device="cpu")
    return [event["loss"] for event in Run(folder).events() if event["event"] == "train"]


@pytest.mark.parametrize("name", RUNS)
def test_the_losses_are_what_they_were_and_the_same_twice(name, tmp_path):
    first = losses(tmp_path / "first", RUNS[name])
    assert first == pytest.approx([float(x) for x in LOSSES[name].split()], rel=1e-3)
    assert losses(tmp_path / "second", RUNS[name]) == first
