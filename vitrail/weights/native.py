"""Vitrail's own safetensors: our names, and all that a user of the weights needs in the header."""

import json
from typing import Any

from vitrail.data import preprocessing
from vitrail.errors import VitrailError
from vitrail.model.variants import Architecture, from_dict, to_dict
from vitrail.weights.files import Contents, parsing

KEY = "vitrail"
VERSION = 1


def recognise(contents: Contents) -> bool:
    """The header says so."""
    return KEY in contents.metadata


def header(model: Any) -> dict[str, str]:
    """Architecture, classes and preprocessing as one JSON string."""
    pre = model.preprocess
    description = {
        "version": VERSION,
        "architecture": to_dict(model.architecture),
        "labels": list(model.labels),
        "preprocessing": None if pre is None else pre.to_dict(),
    }
    return {"format": "pt", KEY: json.dumps(description)}


def describe(
    contents: Contents,
) -> tuple[Architecture, tuple[str, ...], preprocessing.Preprocessing | None]:
    """Architecture, classes and preprocessing, as `header` wrote them."""
    with parsing(contents.path, "header of Vitrail"):
        told = json.loads(contents.metadata[KEY])
        if told["version"] != VERSION:
            raise VitrailError(f"{contents.path} was written by another version of Vitrail")
        architecture = from_dict(dict(told["architecture"]))
        labels = tuple(map(str, told["labels"]))
        if labels and len(labels) != architecture.classes:
            raise ValueError(f"{len(labels)} labels for {architecture.classes} classes")
        pre = told["preprocessing"]
        return architecture, labels, None if pre is None else preprocessing.from_dict(pre)
