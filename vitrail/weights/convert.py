"""`convert`: one checkpoint format to another, with a check that the outputs are the same."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.model.variants import variant_name
from vitrail.weights.load import (
    FORMATS,
    Checkpoint,
    FormatName,
    Gelu,
    open_checkpoint,
    read_checkpoint,
    save,
    to_model,
)

_IMAGES = 2
_SEED = 0
# Largest difference in logits that rounding explains; a wrong layout is off by whole units.
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The outcome of a conversion."""

    source: str
    source_format: str
    target: str
    target_format: str
    variant: str
    parameters: int
    classes: int
    images: int
    """Number of random images compared."""
    difference: float
    """Largest difference in logits between the source, with the target's GELU and epsilon, and the
    file as read back."""
    features: float
    """The same for the features, which differ even where a head is still zero."""
    switch: float
    """Largest change in logits that the target's GELU and epsilon make by themselves."""
    gelu: str
    eps: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def holds(self) -> bool:
        """Whether the written file is the same model, up to rounding."""
        return max(self.difference, self.features) <= _TOLERANCE

    def lines(self) -> list[str]:
        numerics = f"GELU {self.gelu}, LayerNorm epsilon {self.eps:g}"
        effect = f"none: {numerics}, as before"
        if self.switch:
            effect = (
                f"{self.target_format} implies {numerics}; "
                f"this alone changes logits by {self.switch:.1e}"
            )
        switch = [f"switch  {effect}"] if self.gelu else []
        return [
            f"read    {self.source}  {self.source_format} · {self.variant} · "
            f"{self.parameters:,} parameters · {self.classes:,} classes",
            f"wrote   {self.target}  {self.target_format}",
            f"parity  largest difference {self.difference:.1e} in logits, {self.features:.1e} in "
            f"features, over {self.images} random images, read back",
            *switch,
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

    `heads` and `gelu` are for a source that does not state them.
    """
    checkpoint = open_checkpoint(source, size, heads=heads, gelu=gelu)
    architecture = checkpoint.architecture
    target = Path(target)
    if target.exists() and target.samefile(checkpoint.path):
        raise VitrailError(f"{target} is the source itself; give another name")
    model = to_model(checkpoint)
    save(model, target, to)
    same = to in ("vitrail", checkpoint.format)
    switched = architecture if same else FORMATS[to].numerics(architecture)
    generator = torch.Generator().manual_seed(_SEED)
    images = torch.randn(_IMAGES, architecture.channels, *architecture.size, generator=generator)
    images = images.clamp(-1, 1)
    original = _outputs(checkpoint, images)
    expected = _outputs(replace(checkpoint, architecture=switched), images)
    back = _outputs(read_checkpoint(target, known_size=architecture.size), images)
    return Parity(
        source=str(source),
        source_format=checkpoint.format,
        target=str(target),
        target_format=to,
        variant=variant_name(architecture),
        parameters=sum(x.numel() for x in model.parameters()),
        classes=architecture.classes,
        images=_IMAGES,
        difference=_largest(expected[0], back[0]),
        features=_largest(expected[1], back[1]),
        switch=_largest(original[0], expected[0]),
        gelu=getattr(switched, "gelu", ""),
        eps=getattr(switched, "eps", 0.0),
    )


@torch.inference_mode()
def _outputs(checkpoint: Checkpoint, images: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and features of a checkpoint, in float32."""
    model = to_model(checkpoint).float()
    features = model.features(images)
    return features if model.head is None else model.head(features), features


def _largest(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        raise VitrailError(f"the converted model outputs {tuple(b.shape)}, not {tuple(a.shape)}")
    return (a - b).abs().max().item()
