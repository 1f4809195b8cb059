"""Names that version 0.1 wrote, and their names today. Everything that reads a file looks here."""

from collections.abc import Mapping
from typing import Any

SETTINGS = {"train.average": "train.ema", "train.average_ramp": "train.ema_ramp"}
VALUES = {"factorised": "factorized"}
KEYS = {
    "average": "ema",
    "learnt_from": "training_data",
    "optimiser": "optimizer",
    "sittings": "sessions",
}


def setting(text: str) -> str:
    """`section.key` or `section.key=value` under its name today, also below `sweep.`."""
    name, equals, value = text.partition("=")
    prefix = "sweep." if name.startswith("sweep.") else ""
    name = name.removeprefix(prefix)
    return f"{prefix}{SETTINGS.get(name, name)}{equals}{VALUES.get(value, value)}"


def keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A stored dictionary with the keys of today."""
    return {KEYS.get(key, key): value for key, value in stored.items()}
