"""A model as a graph in one file, and back again as something that can be called."""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim
from torch.onnx import OnnxExporterError

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.exporting.pipeline import Pipeline
from vitrail.model import Classifier
from vitrail.model.positions import LearnedPositions

KEY = "vitrail"
"""Where the files keep labels and preprocessing."""
FormatName = Literal["onnx", "pt2"]
Place = Literal["inside", "beside"]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a graph should be like."""

    format: FormatName = "onnx"
    preprocessing: Place = "inside"
    int8: bool = False
    dynamic_size: bool = False

    def __post_init__(self) -> None:
        if self.int8 and self.format != "onnx":
            raise VitrailError(f"--int8 is for --format onnx, not {self.format}")
        if self.dynamic_size and self.preprocessing == "inside":
            raise VitrailError(
                "--dynamic-size is for --preprocessing beside: inside, pictures of any size are "
                "resized to the model's own"
            )

    @property
    def input(self) -> str:
        """What the graph calls what it takes."""
        return "images" if self.preprocessing == "inside" else "pixels"


def preprocessing_of(model: Classifier) -> Preprocessing:
    """The model's own, which is to travel with it."""
    if not isinstance(model.preprocess, Preprocessing):
        raise VitrailError("this model has no preprocessing; load it with vitrail.load(...)")
    return model.preprocess


def description(model: Classifier, wish: Wish) -> dict[str, Any]:
    """All that a user of the file needs besides the graph."""
    pre = preprocessing_of(model)
    inside = wish.preprocessing == "inside"
    sides = ["height", "width"] if inside or wish.dynamic_size else list(pre.size)
    return {
        "input": {
            "name": wish.input,
            "type": "uint8" if inside else "float32",
            "shape": ["batch", len(pre.mean), *sides],
        },
        "output": "features" if model.head is None else "logits",
        "activation": model.activation,
        "labels": list(model.labels),
        "preprocessing": pre.to_dict() | {"where": wish.preprocessing},
    }


def trace(model: nn.Module, wish: Wish, pre: Preprocessing) -> torch.export.ExportedProgram:
    """The model, with its preprocessing where that is wished for, as torch sees it."""
    module = Pipeline(model, pre) if wish.preprocessing == "inside" else model
    learned = any(isinstance(part, LearnedPositions) for part in model.modules())
    if wish.dynamic_size and wish.format == "pt2" and learned:
        # It would refuse the one size that needs no interpolation: the model's own.
        raise VitrailError("learned positions with --dynamic-size are for --format onnx, not pt2")
    # Not a square: torch would take equal sides for one and the same number.
    *_, example = examples(wish, pre, [1, 2])
    dynamic: dict[int, Any] = {0: Dim("batch", min=1)}
    if wish.preprocessing == "inside":
        dynamic |= {2: Dim("height"), 3: Dim("width")}
    if wish.dynamic_size:
        dynamic |= {2: Dim.AUTO, 3: Dim.AUTO}
    with quiet():
        return torch.export.export(module.eval(), (example,), dynamic_shapes=(dynamic,))


def examples(wish: Wish, pre: Preprocessing, batches: list[int]) -> Iterator[Tensor]:
    """Noise as the graph takes it, each batch of another size where it takes any."""
    chance = torch.Generator().manual_seed(0)
    rows, columns = pre.size
    for number, batch in enumerate(batches):
        if wish.preprocessing == "inside":
            shape = (batch, len(pre.mean), 150 + 13 * number, 200 + 29 * number)
            yield torch.randint(0, 256, shape, generator=chance, dtype=torch.uint8)
        else:
            more = 32 * number if wish.dynamic_size else 0
            shape = (batch, len(pre.mean), rows + more, columns + 2 * more)
            yield torch.randn(shape, generator=chance).clamp(-1, 1)


def write_pt2(program: torch.export.ExportedProgram, path: Path, about: dict[str, Any]) -> None:
    """torch.export's own file."""
    with together(path) as part, quiet():
        torch.export.save(program, part, extra_files={f"{KEY}.json": json.dumps(about)})


def keep_padding(program: torch.export.ExportedProgram) -> None:
    """Zeros around a map whose maxima are taken, as BiT has them, made a little more than zero.

    ONNX Runtime (1.31) would make them part of the pooling, which pads with minus infinity, and
    logits would be off by a hundredth.
    """
    for node in program.graph.nodes:
        pooled = any("max_pool" in str(user.target) for user in node.users)
        if pooled and node.target == torch.ops.aten.pad.default:
            node.args = (*node.args[:2], "constant", 1e-30)


def write_onnx(
    program: torch.export.ExportedProgram, path: Path, wish: Wish, about: dict[str, Any]
) -> None:
    """An ONNX file."""
    needed()
    keep_padding(program)
    with together(path) as part, quiet():
        try:
            found = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=[wish.input],
                output_names=[about["output"]],
            )
        except OnnxExporterError as error:
            reason = one_line(error.__cause__ or error)
            raise VitrailError(
                f"ONNX cannot hold this model; use --format pt2 ({reason})"
            ) from None
        assert found is not None
        found.model.metadata_props[KEY] = json.dumps(about)
        found.save(part)


def needed() -> None:
    """The packages that ONNX takes."""
    if not all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))):
        raise VitrailError("vitrail export needs the export extra: pip install 'vitrail[export]'")


@contextmanager
def quiet() -> Iterator[None]:
    """Without what exporters say about their own inner workings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


@contextmanager
def together(path: Path) -> Iterator[Path]:
    """A place to write files to, which then move to where they belong: large graphs are two."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
            yield Path(folder) / path.name
            for file in Path(folder).iterdir():
                shutil.move(file, path.parent / file.name)
    except OSError as error:
        raise FailureError(f"cannot write {path} ({one_line(error)})") from None


class Exported(nn.Module):
    """An exported file as a model: what it answers can be measured like any other's."""

    def __init__(self, path: Path, wish: Wish, labels: tuple[str, ...]) -> None:
        super().__init__()
        self.labels, self.wish = labels, wish
        self.call = opened_onnx(path, wish) if wish.format == "onnx" else opened_pt2(path)

    def forward(self, images: Tensor) -> Tensor:
        return self.call(images.to(torch.uint8) if self.wish.preprocessing == "inside" else images)


def opened_onnx(path: Path, wish: Wish) -> Callable[[Tensor], Tensor]:
    """The graph in ONNX Runtime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {wish.input: images.numpy()})[0])


def opened_pt2(path: Path) -> Callable[[Tensor], Tensor]:
    """The graph in torch."""
    with quiet():
        return torch.export.load(path).module()


def as_images(pre: Preprocessing) -> Callable[[Image.Image], Tensor]:
    """From a picture to what a graph with preprocessing inside takes."""

    def to_bytes(picture: Image.Image) -> Tensor:
        mode = "L" if len(pre.mean) == 1 else "RGB"
        array = np.atleast_3d(np.array(picture.convert(mode)))
        return torch.from_numpy(array).permute(2, 0, 1).contiguous()

    return to_bytes
