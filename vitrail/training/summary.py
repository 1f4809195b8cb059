"""Who trains what, on what, with what: the first lines of a run, and the facts behind them."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt64

from vitrail.config import Config
from vitrail.console import duration
from vitrail.data.check import absent_classes
from vitrail.data.check import describe as inspect
from vitrail.data.dataset import Source, Splits
from vitrail.devices import Devices
from vitrail.model import Classifier
from vitrail.model.variants import name
from vitrail.training.loop import Length
from vitrail.weights.published import count

BY_CONTENT = "2:"
"""Begins a fingerprint that contents are part of."""


def describe(
    config: Config,
    data: Splits,
    model: Classifier,
    where: Devices,
    length: Length,
    recognized: str,
) -> dict[str, Any]:
    """For run.json."""
    cost = count(model.architecture)
    parts = {"train": data.train, "val": data.val, "test": data.test}
    classifies = config.train.objective != "masked"
    return {
        "seed": config.seed,
        "hardware": where.hardware(),
        "device": str(where.device),
        "precision": str(where.precision).removeprefix("torch."),
        "processes": where.world,
        "steps": length.steps,
        "data": {
            "name": data.name,
            "classes": len(data.labels),
            "labels": list(data.labels),
            **{key: None if part is None else len(part.targets) for key, part in parts.items()},
            "fingerprint": recognized,
            "warnings": absent_classes(inspect(data).parts) if classifies else [],
            "broken": [],
        },
        "model": {
            "name": name(model.architecture),
            "parameters": cost.parameters,
            "gmacs": cost.gmacs,
            "size": list(model.architecture.size),
            "init": config.model.init,
        },
    }


def fingerprint(source: Source, hashes: UInt64[np.ndarray, " n"] | None = None) -> str:
    """Tells two training sets apart by the names, classes and contents of their images, in order.

    Without `hashes`, as earlier versions did: by names and classes.
    """
    digest = sha256(repr(source.labels).encode())
    digest.update(np.asarray(source.targets, dtype=np.int64).tobytes())
    for picture in source.names:
        digest.update(picture.encode(errors="surrogateescape") + b"\0")
    if hashes is None:
        return digest.hexdigest()
    digest.update(hashes.astype("<u8").tobytes())
    return f"{BY_CONTENT}{digest.hexdigest()}"


def lines(config: Config, info: dict[str, Any], folder: Path) -> list[str]:
    """For the terminal."""
    data, model, train = info["data"], info["model"], config.train
    counts = [f"{data[part]:,} {part}" for part in ("train", "val", "test") if data[part]]
    changes = "".join(f"  + {setting}" for setting in info.get("changed", ()))
    init = Path(config.model.init)
    begun = f"from {init.name if init.exists() else init}" if config.model.init else "from scratch"
    rows, columns = model["size"]
    long = f"{info['steps']:,} steps" if info["steps"] else duration(60 * train.minutes)
    told = [
        f"recipe   {info.get('recipe', 'from Python')}{changes}",
        f"data     {data['name']}  {' · '.join(counts)} · {data['classes']} classes",
        f"model    {model['name']}  {model['parameters'] / 1e6:,.1f} M parameters · "
        f"{model['gmacs']:.2f} GMACs at {rows} × {columns} px · {begun}"
        f"{' · backbone frozen' if train.freeze else ''}",
        f"device   {info['hardware']} · {info['precision']}"
        f"{' · compiled' if config.system.compile else ''}",
        f"train    {long} · batch {train.batch} · {config.optim.name}, lr {config.optim.lr:g} · "
        f"seed {config.seed}",
        f"run      {folder}",
        *(f"warning  {warning}" for warning in data.get("warnings", ())),
    ]
    if 0 < info["steps"] <= config.optim.warmup:
        told.append(
            f"hint     optim.warmup={config.optim.warmup} is as long as the whole run, which never "
            f"reaches its learning rate; optim.warmup={info['steps'] // 5} would suit it"
        )
    classifies = train.objective != "masked"
    if info["device"] == "cpu" and config.model.init and classifies and not train.freeze:
        told.append("hint     no GPU here: train.freeze=true trains the head alone, in minutes")
    return told
