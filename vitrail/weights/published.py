"""The table of published checkpoints, and the cost of every model: what `vitrail models` lists.

Counting takes seconds for a large model, so the costs are stored in costs.json, which
`python -m vitrail.weights.published` writes and a test counts again. Reading needs no torch.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vitrail.model import Architecture

COSTS = files("vitrail.weights") / "costs.json"


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published checkpoint."""

    name: str
    """What a user types."""
    variant: str
    """A row of the table of variants."""
    size: int
    """Side, in pixels, of the images it was last trained on."""
    classes: int = 1000
    """Zero: features only."""
    source: str
    """`https://…`, a file; `hub:owner/repository`, a folder on the Hugging Face Hub; or
    `package:folder`, a folder of this package."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """How its architecture differs from the variant's defaults."""
    data: str
    """What it was trained on, in order."""
    crop: float = 0.0
    """Fraction of the short side that its evaluation crops; zero if the file or its family
    determines it."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """How that evaluation resizes, if `crop` is given."""
    top1: float | None = None
    """Published ImageNet-1k top-1, in percent."""
    cited: str = ""
    """Source of that figure."""


def _family(
    name: str, source: str, rows: list[list[Any]], usual: int = 224, **shared: Any
) -> list[Published]:
    """The checkpoints of one family in published.toml."""
    return [
        Published(
            name=f"{variant}-{name}" + (f"-{size}" if usual and size != usual else ""),
            variant=variant,
            size=size,
            source=source.format(*words.split()),
            top1=top1[0] if top1 else None,
            **shared,
        )
        for variant, size, words, *top1 in rows
    ]


_TABLE = tomllib.loads((files("vitrail.weights") / "published.toml").read_text(encoding="utf-8"))

PUBLISHED = tuple(row for family in _TABLE["family"] for row in _family(**family))

BUILTIN = Published(**_TABLE["builtin"])
"""The model that comes with Vitrail, so that everything works without a download."""

NAMES = {row.name: row for row in (BUILTIN, *PUBLISHED)}
"""Every published name that a MODEL may be."""


@dataclass(frozen=True)
class Cost:
    """Compute for one image, and the size of the model."""

    parameters: int
    gmacs: float
    tokens: int
    """Tokens in the last layer; positions of the last feature map for a convolutional network."""


def listing(pattern: str = "") -> list[dict[str, Any]]:
    """A row for each name that contains `pattern`, variants first; * and ? are wildcards."""
    costs = json.loads(COSTS.read_text(encoding="utf-8"))
    rows = []
    for name, cost in costs.items():
        if not fnmatchcase(name.lower(), f"*{pattern.lower()}*"):
            continue
        row = NAMES.get(name) or Published(name=name, variant=name, size=224, data="", source="")
        rows.append(
            {
                "name": name,
                "variant": row.variant,
                **cost,
                "size": row.size,
                "classes": row.classes,
                "data": row.data,
                "top1": row.top1,
                "cited": row.cited,
                "source": row.source,
            }
        )
    return rows


def architectures() -> dict[str, "Architecture"]:
    """The named variants at 224 pixels and 1,000 classes, and every published checkpoint."""
    from vitrail.model.variants import NAMED, parse_variant

    named = {name: parse_variant(name) for name in NAMED}
    for row in NAMES.values():
        named[row.name] = parse_variant(
            row.variant, size=row.size, classes=row.classes, **row.options
        )
    return named


def model_cost(architecture: "Architecture") -> Cost:
    """Parameters, multiply-accumulates and tokens for one image."""
    parameters, macs, tokens, width = _count_body(replace(architecture, classes=0))
    classes = architecture.classes
    macs += classes * width
    return Cost(parameters + classes * (width + 1), round(macs / 1e9, 4), tokens)


@cache
def _count_body(architecture: "Architecture") -> tuple[int, int, int, int]:
    """Parameters, multiply-accumulates, tokens and width of the features of a model without a head,
    counted on the meta device."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from vitrail.model import build_meta

    model = build_meta(architecture).eval()
    images = torch.zeros(1, architecture.channels, *architecture.size, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        tokens = model.tokens(images)
        features = model.pool_tokens(tokens)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # The counter counts a multiplication and an addition as two.
    return parameters, counter.get_total_flops() // 2, tokens.shape[1], features.shape[1]


def _write_costs() -> None:
    costs = {
        name: asdict(model_cost(architecture)) for name, architecture in architectures().items()
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cost)}" for name, cost in costs.items())
    Path(str(COSTS)).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    _write_costs()
