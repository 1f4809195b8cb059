"""A model → a file that runs without Vitrail, proved against the original."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.console import say
from vitrail.data.dataset import Source
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.evaluation.held_out import select_images, split_as_trained
from vitrail.evaluation.predictor import Predictor, PreparedImages, Transform, predict_dataset
from vitrail.exporting.graphs import (
    Exported,
    FormatName,
    Place,
    Wish,
    as_images,
    description,
    examples,
    preprocessing_of,
    trace,
    write_onnx,
    write_pt2,
)
from vitrail.exporting.quantizing import quantize
from vitrail.files import write_json
from vitrail.model import Classifier
from vitrail.weights.load import load

TOLERANCE = 1e-4
"""Largest difference in logits that rounding explains, as long as they are 10 at most."""
KEPT = 0.95
"""The least share of decisions that 8-bit numbers may leave as they were."""
BATCHES = [1, 2, 7]
CALIBRATION = 64
"""Pictures that tell how large the inner numbers of a model get."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What an export did to the answers."""

    target: str
    format: str
    preprocessing: str
    int8: bool
    bytes: int
    batches: tuple[int, ...]
    difference: float
    """Largest difference in logits to the original, over noise in these batches."""
    largest: float
    """The largest logit of the original there."""
    n: int = 0
    before: float | None = None
    after: float | None = None
    kept: float | None = None
    """Top-1 on n pictures of DATA, and the share of decisions that are the same."""

    @property
    def holds(self) -> bool:
        """Whether the file is the same model; 8-bit numbers are judged by their decisions."""
        if self.int8:
            return self.kept is not None and self.kept >= KEPT
        return self.difference <= TOLERANCE * max(1, self.largest / 10)

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for `--json`."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for a person."""
        what = f"{self.format}{', int8' if self.int8 else ''}, preprocessing {self.preprocessing}"
        batches = ", ".join(map(str, self.batches))
        told = [
            f"wrote     {self.target}  {what} · {self.bytes / 1e6:.1f} MB",
            f"parity    largest difference {self.difference:.1e} in logits, over noise in batches "
            f"of {batches}, read back",
        ]
        if self.before is not None and self.after is not None:
            told.append(
                f"accuracy  {self.before:.2%} before, {self.after:.2%} after; "
                f"{self.kept:.2%} of decisions kept (n = {self.n:,})"
            )
        return told


def export(
    model: str | Path | Classifier,
    target: str | Path,
    *,
    kind: FormatName | None = None,
    int8: bool = False,
    data: str | Path = "",
    dynamic_size: bool = False,
    preprocessing: Place = "inside",
) -> Parity:
    """Writes the model as ONNX or torch.export's pt2, reads it back and compares the answers.

    `data` calibrates 8-bit numbers (its train part) and shows what became of accuracy (test).
    Without a `kind`, the name of the target tells.
    """
    target = Path(target)
    if kind is None and target.suffix not in (".onnx", ".pt2"):
        raise VitrailError(f"{target.name}: expected a name that ends in .onnx or .pt2")
    kind = kind or ("pt2" if target.suffix == ".pt2" else "onnx")
    wish = Wish(format=kind, preprocessing=preprocessing, int8=int8, dynamic_size=dynamic_size)
    if target.suffix != f".{kind}":
        raise VitrailError(f"{target.name}: expected a name that ends in .{kind}")
    if int8 and not data:
        raise VitrailError("--int8 is calibrated on pictures; name some with --data DATA")
    loaded = model if isinstance(model, Classifier) else load(model)
    # Never the caller's own: it stays where it is, and in its precision.
    loaded = copy.deepcopy(loaded).float().cpu().eval().requires_grad_(False)
    write(loaded, target, wish, data)
    return compare(loaded, target, wish, data)


def write(model: Classifier, target: Path, wish: Wish, data: str | Path) -> None:
    """The file, and its description beside it where that is wished for."""
    pre, about = preprocessing_of(model), description(model, wish)
    program = trace(model, wish, pre)
    if wish.format == "pt2":
        write_pt2(program, target, about)
    elif not wish.int8:
        write_onnx(program, target, wish, about)
    else:
        with TemporaryDirectory() as folder:
            floats = Path(folder) / "floats.onnx"
            write_onnx(program, floats, wish, about)
            quantize(floats, target, calibration(model, data, wish), wish, about)
    if wish.preprocessing == "beside":
        write_json(target.with_suffix(".json"), about)


def calibration(model: Classifier, data: str | Path, wish: Wish) -> Iterator[Tensor]:
    """Some pictures that the model may have learned from: those of test are for measuring."""
    source = next(iter(split_as_trained(model, data).parts.values()))
    order = np.random.default_rng(0).permutation(len(source.targets))
    transform = transform_of(preprocessing_of(model), wish)
    pictures = PreparedImages(source, order[:CALIBRATION], transform)
    found = [pictures[i][1] for i in range(len(pictures))]
    return (picture for picture in found if isinstance(picture, Tensor))


def transform_of(pre: Preprocessing, wish: Wish) -> Transform:
    """From a picture to what the graph takes."""
    return as_images(pre) if wish.preprocessing == "inside" else pre


def compare(model: Classifier, target: Path, wish: Wish, data: str | Path) -> Parity:
    """The original and the file as it was read back, on noise and on DATA."""
    exported = Exported(target, wish, model.labels)
    difference, largest = differences(model, exported)
    measured: dict[str, Any] = {}
    if data:
        measured = accuracy(model, exported, select_images(model, data, "test").source)
    return Parity(
        target=str(target),
        format=wish.format,
        preprocessing=wish.preprocessing,
        int8=wish.int8,
        bytes=sum(path.stat().st_size for path in target.parent.glob(f"{target.name}*")),
        batches=tuple(BATCHES),
        difference=difference,
        largest=largest,
        **measured,
    )


@torch.inference_mode()
def differences(model: Classifier, exported: Exported) -> tuple[float, float]:
    """The largest one in logits, preprocessing included where the graph has it, and the largest
    logit."""
    pre, worst, largest = preprocessing_of(model), 0.0, 0.0
    for images in examples(exported.wish, pre, BATCHES):
        pixels = images
        if exported.wish.preprocessing == "inside":
            pixels = torch.stack([pre(picture_of(image)) for image in images])
        expected = model(pixels)
        worst = max(worst, (expected - exported(images)).abs().max().item())
        largest = max(largest, expected.abs().max().item())
    return worst, largest


def picture_of(image: Tensor) -> Image.Image:
    """Bytes of a picture as Pillow has them."""
    array = image.permute(1, 2, 0).numpy()
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


def accuracy(model: Classifier, exported: Exported, source: Source) -> dict[str, Any]:
    """Top-1 of both on the same pictures."""
    transform = transform_of(preprocessing_of(model), exported.wish)
    # Pictures of different sizes do not go into one batch.
    batch = 1 if exported.wish.preprocessing == "inside" else 8
    original = Predictor(model, source.labels)
    readback = Predictor(exported, source.labels, transform=transform)
    before, broken = predict_dataset(original, source, batch=8)
    after, _ = predict_dataset(readback, source, batch=batch)
    for name, reason in broken:
        say(f"left out  {name}: {reason}")
    if not len(before):
        raise VitrailError("no picture of the data can be read; nothing was compared")
    return {
        "n": len(before),
        "before": float((before.guesses[:, 0] == before.targets).mean()),
        "after": float((after.guesses[:, 0] == after.targets).mean()),
        "kept": float((before.guesses[:, 0] == after.guesses[:, 0]).mean()),
    }
