"""Run folders as training and evaluation leave them, with plausible numbers from a seed."""

import base64
import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

FLOWERS = ["daisy", "dandelion", "roses", "sunflowers", "tulips"]

VERSIONS = {"vitrail": "0.1.0", "python": "3.12.1", "torch": "2.15.0", "torchvision": "0.30.0"}

CONFIG = """
seed = {seed}

[model]
variant = "{variant}"
init = "Ti/16-augreg-in21k"
dropout = 0.0

[data]
name = "flower_photos"
size = 224
flip = true

[train]
steps = {steps}
batch = 512

[optim]
name = "sgd"
lr = {lr}
betas = [0.9, 0.999]

[optim.schedule]
warmup = 10
"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a made-up run is like."""

    labels: list[str] = field(default_factory=lambda: list(FLOWERS))
    variant: str = "Ti/16"
    lr: float = 0.03
    seed: int = 0
    steps: int = 500
    every: int = 5
    """Steps between two lines of metrics."""
    skill: float = 0.9
    n_per_class: int = 80

    @property
    def n(self) -> int:
        return len(self.labels) * self.n_per_class


def fake_run(folder: Path, *, made: Recipe | None = None, **changes: Any) -> Path:
    """A finished run with everything in it; `changes` go over run.json."""
    made = made or Recipe()
    random = np.random.default_rng([made.seed, len(made.variant)])
    (folder / "evaluation").mkdir(parents=True, exist_ok=True)
    config = CONFIG.format(seed=made.seed, variant=made.variant, steps=made.steps, lr=made.lr)
    (folder / "config.toml").write_text(config, "utf-8")
    (folder / "run.json").write_text(json.dumps(info(folder.name, made) | changes), "utf-8")
    lines = "".join(json.dumps(row) + "\n" for row in metrics(random, made))
    (folder / "metrics.jsonl").write_text(lines, "utf-8")
    image(random, 480, 320).save(folder / "augmented.jpg")
    for split in ("val", "test"):
        write_result(folder, split, evaluation(random, made, split))
    return folder


def write_result(folder: Path, split: str, result: dict[str, Any]) -> None:
    (folder / "evaluation" / f"{split}.json").write_text(json.dumps(result), "utf-8")


def read_result(folder: Path, split: str = "test") -> dict[str, Any]:
    return json.loads((folder / "evaluation" / f"{split}.json").read_text("utf-8"))


def info(name: str, made: Recipe) -> dict[str, Any]:
    """run.json."""
    return {
        "name": name,
        "command": f"vitrail train finetune/folder photos model.variant={made.variant} 'a b'",
        "recipe": "finetune/folder",
        "changed": [f"model.variant={made.variant}", f"train.steps={made.steps}"],
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "dirty": True,
        "versions": VERSIONS,
        "hardware": "1 × NVIDIA H200",
        "device": "cuda",
        "precision": "bf16",
        "processes": 1,
        "seed": made.seed,
        "started": "2026-03-01T09:30:12+00:00",
        "seconds": 754.2,
        "status": "finished",
        "message": "",
        "step": made.steps,
        "steps": made.steps,
        "data": {
            "name": "flower_photos",
            "classes": len(made.labels),
            "labels": made.labels,
            "train": 2936,
            "val": made.n,
            "test": made.n,
            "broken": [["roses/cut short.jpg", "image file is truncated"]],
        },
        "model": {
            "name": made.variant,
            "parameters": 5_525_381,
            "gmacs": 1.258,
            "size": [224, 224],
            "init": "Ti/16-augreg-in21k",
        },
        "cost": {
            "gmacs": 1.258,
            "images_seen": 512 * made.steps,
            "exaflops": 6 * 1.258e9 * 512 * made.steps / 1e18,
            "device_days": 754.2 / 86_400,
            "energy_joules": 9e5,
            "peak_memory_bytes": 3 << 30,
            "sessions": 2,
        },
        "best": {"step": made.steps - made.steps // 10, "epoch": 78.5, "top1": 0.975, "loss": 0.12},
    }


def metrics(random: np.random.Generator, made: Recipe) -> list[dict[str, Any]]:
    """metrics.jsonl: falling losses with noise, a warm-up and a cosine."""
    rows = []
    for step in range(made.every, made.steps + 1, made.every):
        done = step / made.steps
        when = {"step": step, "epoch": step * 512 / 2936, "seconds": 1.5 * step}
        fall = math.exp(-6 * done)
        rate = min(1.0, 10 * done) * (1 + math.cos(math.pi * done)) / 2
        rows.append(
            {
                "event": "train",
                **when,
                "loss": 0.2 + 1.4 * fall + 0.06 * random.random(),
                "lr": 0.03 * rate,
                "grad_norm": 0.6 + 2 * fall + 0.5 * random.random(),
                "images_per_second": 1650 + 40 * random.standard_normal(),
                "mfu": None,
            }
        )
        if step % max(made.every, made.steps // 10) == 0:
            top1 = made.skill * (1 - 0.6 * fall) + 0.01 * random.random()
            val = {"loss": 1.5 * fall + 0.12, "top1": top1, "top5": (1 + top1) / 2, "n": made.n}
            rows.append({"event": "val", **when, **val})
    return rows


def evaluation(random: np.random.Generator, made: Recipe, split: str) -> dict[str, Any]:
    """evaluation/<split>.json, from a made-up confusion matrix."""
    labels, k = made.labels, len(made.labels)
    confusion = np.zeros((k, k), dtype=int)
    for truth in range(k):
        wrong = random.random(k) ** 4
        wrong[truth] = 0
        chances = (1 - made.skill) * wrong / max(wrong.sum(), 1e-9)
        chances[truth] = 1 - chances.sum()
        confusion[truth] = random.multinomial(made.n_per_class, chances)
    return scores(confusion, labels, split) | {
        "confusion": confusion.tolist() if k <= 1000 else None,
        "calibration": bins(random, int(confusion.sum()), made.skill),
        "mistakes": mistakes(random, confusion, labels),
        "broken": [],
        "data": "flower_photos",
        "model": "Ti/16",
        "seconds": 3.4,
    }


def scores(confusion: np.ndarray, labels: list[str], split: str) -> dict[str, Any]:
    """What follows from the counts."""
    n, right = int(confusion.sum()), np.diag(confusion)
    recall = right / np.maximum(confusion.sum(1), 1)
    precision = right / np.maximum(confusion.sum(0), 1)
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-9)
    top1 = float(right.sum() / n)
    off = np.where(np.eye(len(labels)), 0, confusion)
    pairs = [np.unravel_index(i, off.shape) for i in np.argsort(-off, axis=None)[:20]]
    average = {"balanced_accuracy": float(recall.mean()), "macro_f1": float(f1.mean())}
    spans = {"top1": top1, "top5": (1 + top1) / 2, **average}
    return {
        **{"split": split, "n": n, "ece": 0.023, "loss": 0.131},
        **spans,
        "intervals": {key: [value - 0.02, min(1, value + 0.015)] for key, value in spans.items()},
        "per_class": [
            {
                **{"name": label, "n": int(confusion[i].sum()), "precision": float(precision[i])},
                **{"recall": float(recall[i]), "f1": float(f1[i])},
                "interval": [max(0.0, float(recall[i]) - 0.06), min(1.0, float(recall[i]) + 0.04)],
            }
            for i, label in enumerate(labels)
        ],
        "confused": [
            {"truth": labels[i], "guess": labels[j], "n": int(off[i, j])}
            for i, j in pairs
            if off[i, j]
        ],
    }


def bins(random: np.random.Generator, n: int, skill: float) -> list[dict[str, Any]]:
    """Fifteen bins of which the last holds most, the first none."""
    shares = np.linspace(0, 1, 15) ** 6
    counts = random.multinomial(n, shares / shares.sum())
    found = []
    for index, count in enumerate(counts):
        sure = (index + 0.5) / 15
        right = None if not count else min(1.0, max(0.0, sure - 0.1 * (1 - skill) + 0.04))
        found.append(
            {
                **{"low": index / 15, "high": (index + 1) / 15, "n": int(count)},
                **{"confidence": sure if count else None, "accuracy": right},
            }
        )
    return found


def mistakes(
    random: np.random.Generator, confusion: np.ndarray, labels: list[str]
) -> list[dict[str, Any]]:
    """The most confident ones, with pictures."""
    wrong = [(i, j) for i, j in np.argwhere(confusion) if i != j][:24]
    return [
        {
            "name": f"{labels[i]}/{random.integers(10**9)}_{random.integers(10**9):x}_n.jpg",
            "truth": labels[i],
            "guess": labels[j],
            "probability": 0.999 - 0.01 * place,
            "thumbnail": data_uri(image(random, 160, 120)),
        }
        for place, (i, j) in enumerate(wrong)
    ]


def image(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Soft patches of color."""
    pixels = random.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
