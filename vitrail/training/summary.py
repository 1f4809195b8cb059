"""The facts of a run for run.json, and its first lines on the terminal."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64

from vitrail.config import Config
from vitrail.console import duration, rounded
from vitrail.data.check import absent_classes, describe_dataset
from vitrail.data.dataset import Source, Splits
from vitrail.devices import Devices
from vitrail.model import Classifier
from vitrail.model.variants import variant_name
from vitrail.training.build import planned_steps
from vitrail.training.cost import plan_compilation
from vitrail.weights.published import model_cost

BY_CONTENT = "2:"
"""Prefix of fingerprints that include image contents."""


def run_facts(
    config: Config,
    data: Splits,
    model: Classifier,
    devices: Devices,
    fingerprint: str,
) -> dict[str, Any]:
    cost = model_cost(model.architecture)
    parts = {"train": data.train, "val": data.val, "test": data.test}
    images = len(data.part("train").targets)
    return {
        "seed": config.seed,
        "hardware": devices.hardware(),
        "device": str(devices.device),
        "precision": str(devices.precision).removeprefix("torch."),
        "processes": devices.world,
        "steps": planned_steps(config, images),
        "compilation": plan_compilation(config, images, model, devices)[1],
        "data": {
            "name": data.name,
            "classes": len(data.labels),
            "labels": list(data.labels),
            **{key: None if part is None else len(part.targets) for key, part in parts.items()},
            "fingerprint": fingerprint,
            "warnings": absent_classes(describe_dataset(data).parts)
            if config.train.uses_labels
            else [],
            "broken": [],
        },
        "model": {
            "name": variant_name(model.architecture),
            "parameters": cost.parameters,
            "gmacs": cost.gmacs,
            "size": list(model.architecture.size),
            "init": config.model.init,
        },
    }


def data_fingerprint(source: Source, hashes: UInt64[np.ndarray, " n"] | None = None) -> str:
    """A digest of the names, classes and contents of the images, in order.

    Without `hashes`, as in earlier versions, of names and classes only.
    """
    digest = sha256(repr(source.labels).encode())
    digest.update(np.asarray(source.targets, dtype=np.int64).tobytes())
    for image in source.names:
        digest.update(image.encode(errors="surrogateescape") + b"\0")
    if hashes is None:
        return digest.hexdigest()
    digest.update(hashes.astype("<u8").tobytes())
    return f"{BY_CONTENT}{digest.hexdigest()}"


def header_lines(config: Config, info: dict[str, Any], folder: Path) -> list[str]:
    """The startup lines for the terminal."""
    data, model, train = info["data"], info["model"], config.train
    counts = [f"{data[part]:,} {part}" for part in ("train", "val", "test") if data[part]]
    changes = "".join(f"  + {setting}" for setting in info.get("changed", ()))
    init = Path(config.model.init)
    origin = f"from {init.name if init.exists() else init}" if config.model.init else "from scratch"
    rows, columns = model["size"]
    length = f"{info['steps']:,} steps" if info["steps"] else duration(60 * train.minutes)
    shown = [
        f"recipe   {info.get('recipe', 'from Python')}{changes}",
        f"data     {data['name']}  {' · '.join(counts)} · {data['classes']} classes",
        f"model    {model['name']}  {rounded(model['parameters'] / 1e6, 1)} M parameters · "
        f"{rounded(model['gmacs'], 2)} GMACs at {rows} × {columns} px · {origin}"
        f"{' · backbone frozen' if train.freeze else ''}",
        f"device   {info['hardware']} · {info['precision']}"
        f"{f' · {note}' if (note := info['compilation']) else ''}",
        f"train    {length} · batch {train.batch} · {config.optim.name}, lr {config.optim.lr:g} · "
        f"seed {config.seed}",
        f"run      {folder}",
        *(f"warning  {warning}" for warning in data.get("warnings", ())),
    ]
    if 0 < info["steps"] <= config.optim.warmup:
        shown.append(
            f"hint     optim.warmup={config.optim.warmup} covers the whole run, so the peak "
            f"learning rate is never reached; try optim.warmup={info['steps'] // 5}"
        )
    trains_all = config.model.init and train.uses_labels and not train.freeze
    if info["device"] == "cpu" and trains_all:
        shown.append("hint     no GPU found: train.freeze=true trains only the head, in minutes")
    return shown
