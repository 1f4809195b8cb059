"""`vitrail export`: a model as a file that runs without Vitrail, checked against the original."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from vitrail.console import say
from vitrail.data.dataset import Source
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.evaluation.held_out import select_images, split_as_trained
from vitrail.evaluation.predictor import Predictor, PreparedImages, Transform, predict_dataset
from vitrail.exporting.graphs import (
    GraphOptions,
    describe_graph,
    example_inputs,
    input_transform,
    quantize,
    trace,
    write_onnx,
    write_pt2,
)
from vitrail.exporting.hub import Library, export_hub
from vitrail.files import write_json
from vitrail.model import Classifier
from vitrail.model.classifier import NO_PREPROCESSING
from vitrail.weights.convert import Parity
from vitrail.weights.exported import Graph
from vitrail.weights.load import load

TOLERANCE = 1e-4
"""Largest difference in logits that rounding explains, for logits up to 10."""
_MIN_UNCHANGED = 0.95
"""The least share of predictions that int8 must leave unchanged."""
_BATCHES = [1, 2, 7]
_CALIBRATION_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class GraphParity:
    """An exported graph compared with the original model."""

    target: str
    format: str
    preprocessing: str
    int8: bool
    bytes: int
    batches: tuple[int, ...]
    difference: float
    """Largest difference in logits, over random inputs in these batches."""
    largest: float
    """The largest logit of the original there."""
    n: int = 0
    before: float | None = None
    after: float | None = None
    kept: float | None = None
    """Top-1 accuracy on n test images, and the share of predictions that are the same."""

    @property
    def holds(self) -> bool:
        """Whether the file is the same model; for int8, whether it predicts the same."""
        if self.int8:
            return self.kept is not None and self.kept >= _MIN_UNCHANGED
        return self.difference <= TOLERANCE * max(1, self.largest / 10)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        int8 = ", int8" if self.int8 else ""
        batches = ", ".join(map(str, self.batches))
        lines = [
            f"wrote     {self.target}  {self.format}{int8}, preprocessing {self.preprocessing} · "
            f"{self.bytes / 1e6:.1f} MB",
            f"parity    largest difference {self.difference:.1e} in logits, over random inputs in "
            f"batches of {batches}, read back",
        ]
        if self.before is not None:
            lines.append(
                f"accuracy  {self.before:.2%} before, {self.after:.2%} after; "
                f"{self.kept:.2%} of predictions unchanged (n = {self.n:,})"
            )
        return lines


def export(  # noqa: PLR0913
    model: str | Path | Classifier,
    target: str | Path,
    *,
    kind: Literal["onnx", "pt2", "hub"] | None = None,
    int8: bool = False,
    data: str | Path = "",
    dynamic_size: bool = False,
    preprocessing: Literal["inside", "beside"] = "inside",
    to: Library | None = None,
    upload: str = "",
) -> GraphParity | Parity:
    """Write a model as an ONNX file, a torch.export pt2 file or a Hugging Face hub folder.

    The result is read back and compared with the original. `data` calibrates int8 (on its train
    split) and measures accuracy before and after (on its test split). `to` and `upload` are for the
    hub. Without a `kind`, the suffix of `target` decides between onnx and pt2.
    """
    target = Path(target)
    if kind == "hub":
        graph_only = {
            **{"--int8": int8, "--data": data, "--dynamic-size": dynamic_size},
            "--preprocessing": preprocessing != "inside",
        }
        for option, given in graph_only.items():
            if given:
                raise VitrailError(f"{option} does not apply to --format hub")
        if isinstance(model, Classifier):
            raise VitrailError(
                "a hub folder is exported from a saved model; save it with vitrail.save(...)"
            )
        return export_hub(model, target, to=to or "timm", upload=upload)
    if to or upload:
        raise VitrailError("--to and --upload are only for --format hub")
    suffixes = [f".{kind}"] if kind else [".onnx", ".pt2"]
    if target.suffix not in suffixes:
        expected = " or ".join(suffixes)
        raise VitrailError(f"{target.name}: expected a name that ends in {expected}")
    options = GraphOptions(
        format="pt2" if target.suffix == ".pt2" else "onnx",
        preprocessing=preprocessing,
        int8=int8,
        dynamic_size=dynamic_size,
    )
    if int8 and not data:
        raise VitrailError("--int8 needs images for calibration; add --data DATA")
    return _export_graph(model, target, options, data)


def _export_graph(
    model: str | Path | Classifier, target: Path, options: GraphOptions, data: str | Path
) -> GraphParity:
    loaded = model if isinstance(model, Classifier) else load(model)
    preprocess = loaded.preprocess
    if not isinstance(preprocess, Preprocessing):
        raise VitrailError(NO_PREPROCESSING)
    # A copy: the caller's model keeps its device, mode and precision.
    loaded = copy.deepcopy(loaded).float().cpu().eval().requires_grad_(False)
    metadata = describe_graph(loaded, preprocess, options)
    program = trace(loaded, preprocess, options)
    if options.format == "pt2":
        write_pt2(program, target, metadata)
    elif options.int8:
        with TemporaryDirectory() as folder:
            float_file = Path(folder) / "float.onnx"
            write_onnx(program, float_file, metadata)
            images = _calibration_images(loaded, data, input_transform(preprocess, options))
            quantize(float_file, target, images, metadata)
    else:
        write_onnx(program, target, metadata)
    if not options.inside:
        write_json(target.with_suffix(".json"), metadata)
    graph = Graph(target)
    difference, largest = _compare_logits(loaded, graph, preprocess, options)
    measured: dict[str, Any] = {}
    if data:
        test = select_images(loaded, data, "test").source
        measured = _compare_accuracy(loaded, graph, test, input_transform(preprocess, options))
    return GraphParity(
        target=str(target),
        format=options.format,
        preprocessing=options.preprocessing,
        int8=options.int8,
        bytes=sum(path.stat().st_size for path in target.parent.glob(f"{target.name}*")),
        batches=tuple(_BATCHES),
        difference=difference,
        largest=largest,
        **measured,
    )


def _calibration_images(
    model: Classifier, data: str | Path, transform: Transform
) -> Iterator[Tensor]:
    """Random images of the train split: those of the test split are for measuring."""
    source = next(iter(split_as_trained(model, data).parts.values()))
    order = np.random.default_rng(0).permutation(len(source.targets))
    images = PreparedImages(source, order[:_CALIBRATION_IMAGES], transform)
    for i in range(len(images)):
        _, image = images[i]
        if isinstance(image, Tensor):
            yield image


@torch.inference_mode()
def _compare_logits(
    model: Classifier, graph: Graph, preprocess: Preprocessing, options: GraphOptions
) -> tuple[float, float]:
    """The largest difference in logits on random inputs, and the largest logit."""
    difference = largest = 0.0
    for inputs in example_inputs(preprocess, options, _BATCHES):
        pixels = inputs
        if graph.inside:
            pixels = torch.stack([preprocess(to_pil_image(image)) for image in inputs])
        expected = model(pixels)
        difference = max(difference, (expected - graph(inputs)).abs().max().item())
        largest = max(largest, expected.abs().max().item())
    return difference, largest


def _compare_accuracy(
    model: Classifier, graph: Graph, source: Source, transform: Transform
) -> dict[str, Any]:
    """Top-1 accuracy of both on the same images."""
    # Images of different sizes do not fit in one batch.
    batch = 1 if graph.inside else 8
    original = Predictor(model, source.labels)
    before, broken = predict_dataset(original, source, batch=8)
    readback = Predictor(graph, source.labels, transform=transform)
    after, _ = predict_dataset(readback, source, batch=batch)
    for name, reason in broken:
        say(f"left out  {name}: {reason}")
    if not len(before):
        raise VitrailError("none of the images in the test split can be read; check --data")
    return {
        "n": len(before),
        "before": float((before.guesses[:, 0] == before.targets).mean()),
        "after": float((after.guesses[:, 0] == after.targets).mean()),
        "kept": float((before.guesses[:, 0] == after.guesses[:, 0]).mean()),
    }
