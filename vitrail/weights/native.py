"""Vitrail's own safetensors: our names, and all that a user of the weights needs in the header."""

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

from vitrail.data import preprocessing
from vitrail.errors import VitrailError
from vitrail.model.classifier import Activation
from vitrail.model.variants import Architecture, from_dict, to_dict
from vitrail.weights.files import Contents, parsing

KEY = "vitrail"
VERSION = 1


def recognise(contents: Contents) -> bool:
    """The header says so."""
    return KEY in contents.metadata


def header(model: Any) -> dict[str, str]:
    """All but the tensors, as one JSON string."""
    pre = model.preprocess
    description = {
        "version": VERSION,
        "architecture": to_dict(model.architecture),
        "labels": list(model.labels),
        "preprocessing": None if pre is None else pre.to_dict(),
        "activation": model.activation,
        "learnt_from": dict(model.learnt_from),
    }
    return {"format": "pt", KEY: json.dumps(description)}


class Description(NamedTuple):
    """What the header says."""

    architecture: Architecture
    labels: tuple[str, ...]
    preprocessing: preprocessing.Preprocessing | None
    activation: Activation
    learnt_from: dict[str, Any]


def describe(contents: Contents) -> Description:
    """What `header` wrote."""
    with parsing(contents.path, "header of Vitrail"):
        told = json.loads(contents.metadata[KEY])
        if told["version"] != VERSION:
            raise VitrailError(f"{contents.path} was written by another version of Vitrail")
        architecture = from_dict(dict(told["architecture"]))
        labels = tuple(map(str, told["labels"]))
        if labels and len(labels) != architecture.classes:
            raise ValueError(f"{len(labels)} labels for {architecture.classes} classes")
        activation = told["activation"] if "activation" in told else of_run(contents.path)
        if activation not in get_args(Activation):
            raise ValueError(f"unknown activation {activation!r}")
        pre = told["preprocessing"]
        return Description(
            architecture,
            labels,
            None if pre is None else preprocessing.from_dict(pre),
            activation,
            dict(told.get("learnt_from", {})),
        )


def of_run(path: Path) -> Activation:
    """The activation of weights written before they carried it: that of the run they lie in."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        folder = path if path.is_dir() else path.parent
        settings = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
        if settings["train"]["objective"] == "sigmoid":
            return "sigmoid"
    return "softmax"
