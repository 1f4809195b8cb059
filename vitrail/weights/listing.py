"""Every variant and published checkpoint with its cost, as `vitrail models` lists them.

Counting takes seconds for a large model, so the figures are kept in costs.json, which
`python -m vitrail.weights.listing` writes and a test counts again. Reading it needs no torch.
"""

import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from vitrail.weights.published import NAMES

if TYPE_CHECKING:
    from vitrail.model import Architecture

COSTS = files("vitrail.weights") / "costs.json"


@dataclass(frozen=True)
class Cost:
    """What one image costs, and how much there is to store."""

    parameters: int
    gmacs: float
    tokens: int
    """Tokens in the last layer; the places of the last map for a convolutional network."""


def listing(pattern: str = "") -> list[dict[str, Any]]:
    """A row for each name with `pattern` in it, variants first; * and ? are wildcards."""
    costs = json.loads(COSTS.read_text(encoding="utf-8"))
    rows = []
    for name, cost in costs.items():
        if not fnmatchcase(name.lower(), f"*{pattern.lower()}*"):
            continue
        row = NAMES.get(name)
        rows.append(
            {
                "name": name,
                "variant": row.variant if row else name,
                **cost,
                "size": row.size if row else 224,
                "classes": row.classes if row else 1000,
                "data": row.data if row else "",
                "top1": row.top1 if row else None,
                "cited": row.cited if row else "",
                "source": row.source if row else "",
            }
        )
    return rows


def architectures() -> dict[str, "Architecture"]:
    """The named variants at 224 pixels and 1,000 classes, and every published checkpoint."""
    from vitrail.model.variants import NAMED, describe

    found = {name: describe(name) for name in NAMED}
    for row in NAMES.values():
        size = {"size": row.size, "classes": row.classes}
        found[row.name] = describe(row.variant, **size, **row.options)
    return found


@cache
def count(architecture: "Architecture") -> Cost:
    """Parameters, multiply-accumulates and tokens of one image, without memory or arithmetic."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from vitrail.model import build

    with torch.device("meta"), torch.no_grad():
        model = build(architecture).eval()
        images = torch.zeros(1, architecture.channels, *architecture.size)
        tokens = model.tokens(images).shape[1]
        with FlopCounterMode(display=False) as counter:
            model(images)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # The counter takes a multiplication and an addition for two.
    return Cost(parameters, round(counter.get_total_flops() / 2e9, 4), tokens)


def write() -> None:
    """Count everything again."""
    from pathlib import Path

    known: dict[Any, Cost] = {}
    costs = {}
    for name, architecture in architectures().items():
        if architecture not in known:
            known[architecture] = count(architecture)
        costs[name] = asdict(known[architecture])
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cost)}" for name, cost in costs.items())
    Path(str(COSTS)).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    write()
