"""Vitrail's own safetensors: our names; architecture, classes and preprocessing in the header."""

import json
import math
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from vitrail import aliases
from vitrail.data import preprocessing
from vitrail.errors import VitrailError
from vitrail.model.classifier import Activation
from vitrail.model.variants import from_dict, to_dict
from vitrail.weights.read import Contents, parsing

_KEY = "vitrail"
_VERSION = 1
COSTS = ("exaflops", "device_days")
"""What is stored of the cost of training."""


def recognize(contents: Contents) -> bool:
    """Whether the header is ours."""
    return _KEY in contents.metadata


def header(model: Any) -> dict[str, str]:
    """Everything but the tensors, as one JSON string."""
    pre = model.preprocess
    description = {
        "version": _VERSION,
        "architecture": to_dict(model.architecture),
        "labels": list(model.labels),
        "preprocessing": None if pre is None else pre.to_dict(),
        "activation": model.activation,
        "training_data": dict(model.training_data),
        "training_cost": None if model.training_cost is None else dict(model.training_cost),
    }
    return {"format": "pt", _KEY: json.dumps(description)}


def describe(contents: Contents) -> dict[str, Any]:
    """What `header` wrote, as fields of a `Checkpoint`."""
    with parsing(contents.path, "header of Vitrail"):
        stored = aliases.keys(json.loads(contents.metadata[_KEY]))
        if stored["version"] != _VERSION:
            raise VitrailError(f"{contents.path} was written by another version of Vitrail")
        architecture = from_dict(dict(stored["architecture"]))
        labels = tuple(map(str, stored["labels"]))
        if labels and len(labels) != architecture.classes:
            raise ValueError(f"{len(labels)} labels for {architecture.classes} classes")
        old = "activation" not in stored
        activation = _activation_of_run(contents.path) if old else stored["activation"]
        if activation not in get_args(Activation):
            raise ValueError(f"unknown activation {activation!r}")
        pre = stored["preprocessing"]
        return {
            "architecture": architecture,
            "labels": labels,
            "preprocessing": None if pre is None else preprocessing.from_dict(pre),
            "activation": activation,
            "training_data": dict(stored.get("training_data", {})),
            "training_cost": read_cost(stored.get("training_cost")),
        }


def read_cost(stored: Any) -> dict[str, float] | None:
    """The stored cost of training; older files have none."""
    if stored is None:
        return None
    for name in COSTS:
        value = stored[name]
        if type(value) not in (int, float) or not 0 <= float(value) < math.inf:
            raise ValueError(f"training cost with {name} {value!r}")
    return {name: float(stored[name]) for name in COSTS}


def _activation_of_run(path: Path) -> Activation:
    """For weights from before the header had the activation: that of the run they are in."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        folder = path if path.is_dir() else path.parent
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        if settings["train"]["objective"] == "sigmoid":
            return "sigmoid"
    return "softmax"
