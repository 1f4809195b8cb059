"""`convert`: one checkpoint format to another, with proof that nothing changed on the way."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.model import Architecture
from vitrail.model.variants import name
from vitrail.weights.loading import (
    FORMATS,
    Checkpoint,
    FormatName,
    Gelu,
    open_checkpoint,
    read,
    save,
    to_model,
)

IMAGES = 2
SEED = 0
TOLERANCE = 1e-4
"""Largest difference in logits that rounding explains; a wrong layout is off by whole units."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What a conversion did to the numbers."""

    source: str
    source_format: str
    target: str
    target_format: str
    variant: str
    parameters: int
    classes: int
    images: int
    """Random images that both models were given."""
    difference: float
    """Largest difference in logits between the source under the target's GELU and epsilon, and the
    file as it was read back."""
    features: float
    """The same for the features, which tell two models apart even where a head is still zero."""
    switch: float
    """Largest change in logits that the target's GELU and epsilon make by themselves."""
    gelu: str
    eps: float

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for `--json`."""
        return asdict(self)

    @property
    def holds(self) -> bool:
        """Whether the written file is the same model."""
        return max(self.difference, self.features) <= TOLERANCE

    def lines(self) -> list[str]:
        """The report for a person."""
        meaning = f"GELU {self.gelu}, LayerNorm epsilon {self.eps:g}"
        moved = (
            f"{self.target_format} means {meaning}; that alone moves logits by {self.switch:.1e}"
        )
        return [
            f"read    {self.source}  {self.source_format} · {self.variant} · "
            f"{self.parameters:,} parameters · {self.classes:,} classes",
            f"wrote   {self.target}  {self.target_format}",
            f"parity  largest difference {self.difference:.1e} in logits, {self.features:.1e} in "
            f"features, over {self.images} random images, read back",
            *(
                [f"switch  {moved if self.switch else f'none: {meaning}, as before'}"]
                * bool(self.gelu)
            ),
        ]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: FormatName,
    size: int | tuple[int, int] | None = None,
    heads: int | None = None,
    gelu: Gelu | None = None,
) -> Parity:
    """Write `source` as a checkpoint of format `to`, read that back and compare the logits.

    `heads` and `gelu` are for a source that does not say them.
    """
    checkpoint = open_checkpoint(source, size, heads=heads, gelu=gelu)
    architecture = checkpoint.architecture
    target = Path(target)
    if target.exists() and target.samefile(checkpoint.path):
        raise VitrailError(f"{target} is the source itself; give another name")
    model = to_model(checkpoint)
    save(model, target, to)
    kept = to in ("vitrail", checkpoint.format)
    switched = architecture if kept else FORMATS[to].numerics(architecture)
    images = sample_images(architecture)
    as_it_was = answers(checkpoint, images)
    expected = answers(replace(checkpoint, architecture=switched), images)
    back = answers(read(target, known_size=architecture.size), images)
    return Parity(
        source=str(source),
        source_format=checkpoint.format,
        target=str(target),
        target_format=to,
        variant=name(architecture),
        parameters=sum(x.numel() for x in model.parameters()),
        classes=architecture.classes,
        images=IMAGES,
        difference=largest(expected[0], back[0]),
        features=largest(expected[1], back[1]),
        switch=largest(as_it_was[0], expected[0]),
        gelu=getattr(switched, "gelu", ""),
        eps=getattr(switched, "eps", 0.0),
    )


def sample_images(a: Architecture) -> Tensor:
    """The same noise for every model of a shape."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(IMAGES, a.channels, *a.size, generator=generator).clamp(-1, 1)


@torch.inference_mode()
def answers(checkpoint: Checkpoint, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and features of a checkpoint, in float32."""
    model = to_model(checkpoint).float()
    features = model.features(images)
    return features if model.head is None else model.head(features), features


def largest(a: Tensor, b: Tensor) -> float:
    """The largest difference; models that answer in other shapes differ without bound."""
    if a.shape != b.shape:
        raise VitrailError(f"the converted model answers {tuple(b.shape)}, not {tuple(a.shape)}")
    return (a - b).abs().max().item()
