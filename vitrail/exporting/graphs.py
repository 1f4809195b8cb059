"""A model as a graph in a file: ONNX, int8 ONNX or torch.export."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.onnx import OnnxExporterError
from torchvision.transforms.v2.functional import pil_to_tensor

from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.exporting.pipeline import Pipeline
from vitrail.model import Classifier
from vitrail.model.positions import LearnedPositions
from vitrail.model.variants import variant_name
from vitrail.weights.exported import METADATA_KEY, quiet

_QUANTIZED_OPS = ["MatMul", "Gemm", "Conv"]
_GELU_OUTPUT_OPS = {"Gelu", "Mul"}
"""A GELU node, or the last node of its decomposition."""


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """The options of `vitrail export` for a graph."""

    format: Literal["onnx", "pt2"]
    preprocessing: Literal["inside", "beside"]
    int8: bool
    dynamic_size: bool

    def __post_init__(self) -> None:
        if self.int8 and self.format != "onnx":
            raise VitrailError(f"--int8 is only for --format onnx, not {self.format}")
        if self.dynamic_size and self.inside:
            raise VitrailError(
                "--dynamic-size needs --preprocessing beside: preprocessing inside the graph "
                "resizes every image to the model's own size"
            )

    @property
    def inside(self) -> bool:
        """Whether preprocessing is part of the graph."""
        return self.preprocessing == "inside"


def describe_graph(
    model: Classifier, preprocess: Preprocessing, options: GraphOptions
) -> dict[str, Any]:
    """The metadata of an exported file: model, input, output, labels and preprocessing."""
    any_size = options.inside or options.dynamic_size
    sides = ["height", "width"] if any_size else list(preprocess.size)
    return {
        "variant": variant_name(model.architecture),
        "parameters": sum(x.numel() for x in model.parameters()),
        "features": model.feature_width,
        "classes": model.architecture.classes,
        "input": {
            "name": "images" if options.inside else "pixels",
            "type": "uint8" if options.inside else "float32",
            "shape": ["batch", len(preprocess.mean), *sides],
        },
        "output": "features" if model.head is None else "logits",
        "activation": model.activation,
        "labels": list(model.labels),
        "preprocessing": preprocess.to_dict() | {"where": options.preprocessing},
    }


def trace(model: nn.Module, preprocess: Preprocessing, options: GraphOptions) -> ExportedProgram:
    """The model, with its preprocessing if that goes inside, as a torch.export program."""
    module = Pipeline(model, preprocess) if options.inside else model
    learned = any(isinstance(part, LearnedPositions) for part in model.modules())
    if options.dynamic_size and options.format == "pt2" and learned:
        # The program would refuse the one size that needs no interpolation: the model's own.
        raise VitrailError(
            "--dynamic-size with learned position embeddings is only for --format onnx, not pt2"
        )
    # The second example is not square: torch would take equal sides for the same symbol.
    *_, example = example_inputs(preprocess, options, [1, 2])
    dynamic: dict[int, Any] = {0: Dim("batch", min=1)}
    if options.inside:
        dynamic |= {2: Dim("height"), 3: Dim("width")}
    if options.dynamic_size:
        dynamic |= {2: Dim.AUTO, 3: Dim.AUTO}
    with quiet():
        return torch.export.export(module.eval(), (example,), dynamic_shapes=(dynamic,))


def example_inputs(
    preprocess: Preprocessing, options: GraphOptions, batches: list[int]
) -> Iterator[Tensor]:
    """Random inputs of the graph, of a different size in each batch if the graph takes any."""
    generator = torch.Generator().manual_seed(0)
    channels, (rows, columns) = len(preprocess.mean), preprocess.size
    for number, batch in enumerate(batches):
        if options.inside:
            shape = (batch, channels, 150 + 13 * number, 200 + 29 * number)
            yield torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        else:
            more = 32 * number if options.dynamic_size else 0
            shape = (batch, channels, rows + more, columns + 2 * more)
            yield torch.randn(shape, generator=generator).clamp(-1, 1)


def input_transform(
    preprocess: Preprocessing, options: GraphOptions
) -> Callable[[Image.Image], Tensor]:
    """From an image to an input of the graph."""
    mode = "L" if len(preprocess.mean) == 1 else "RGB"
    return (lambda image: pil_to_tensor(image.convert(mode))) if options.inside else preprocess


def write_pt2(program: ExportedProgram, path: Path, metadata: dict[str, Any]) -> None:
    with _staged(path) as part, quiet():
        extra_files = {f"{METADATA_KEY}.json": json.dumps(metadata)}
        torch.export.save(program, part, extra_files=extra_files)


def write_onnx(program: ExportedProgram, path: Path, metadata: dict[str, Any]) -> None:
    _require_onnx()
    _protect_padding(program)
    with _staged(path) as part, quiet():
        try:
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=[metadata["input"]["name"]],
                output_names=[metadata["output"]],
            )
        except OnnxExporterError as error:
            reason = one_line(error.__cause__ or error)
            raise VitrailError(
                f"ONNX cannot represent this model; use --format pt2 ({reason})"
            ) from None
        assert onnx_program is not None
        onnx_program.model.metadata_props[METADATA_KEY] = json.dumps(metadata)
        onnx_program.save(part)


def _protect_padding(program: ExportedProgram) -> None:
    """Replace the zero padding before max pooling, which BiT has, by a tiny positive number.

    ONNX Runtime (1.31) would fuse the zeros into the pooling, which pads with minus infinity, and
    logits would be off by a hundredth.
    """
    for node in program.graph.nodes:
        pooled = any("max_pool" in str(user.target) for user in node.users)
        if pooled and node.target == torch.ops.aten.pad.default:
            node.args = (*node.args[:2], "constant", 1e-30)


def quantize(
    source: Path, target: Path, images: Iterable[Tensor], metadata: dict[str, Any]
) -> None:
    """An ONNX file in int8, for CPUs: static quantization by ONNX Runtime, calibrated on images.

    Only products with constant weights are quantized, and their outputs stay floats: rounding those
    too changes predictions and saves little time. The input of what follows a GELU stays float as
    well: it is one-sided, most of it is close to zero, and one step of 255 is larger than its whole
    negative part.
    """
    _require_onnx()
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    inputs = ({metadata["input"]["name"]: image[None].numpy()} for image in images)
    reader: Any = SimpleNamespace(get_next=lambda: next(inputs, None))
    with TemporaryDirectory() as folder, _staged(target) as part, quiet():
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            part,
            reader,
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=_QUANTIZED_OPS,
            nodes_to_exclude=_float_nodes(onnx.load(prepared).graph),
            extra_options={"OpTypesToExcludeOutputQuantization": _QUANTIZED_OPS},
        )
        graph = onnx.load(part)
        onnx.helper.set_model_props(graph, {METADATA_KEY: json.dumps(metadata)})
        onnx.save(graph, part)


def _float_nodes(graph: Any) -> list[str]:
    """Names of the products that would lose too much in int8, or have no weights."""
    weights = {tensor.name for tensor in graph.initializer}
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    products = [node for node in graph.node if node.op_type in _QUANTIZED_OPS]
    # The first convolution sees pixels, and is cheap.
    first = next((node.name for node in products if node.op_type == "Conv"), None)

    def stays_float(node: Any) -> bool:
        if node.name == first or weights.isdisjoint(node.input):
            return True
        return node.op_type != "Conv" and made_by.get(node.input[0]) in _GELU_OUTPUT_OPS

    return [node.name for node in products if stays_float(node)]


def _require_onnx() -> None:
    if not all(map(find_spec, ("onnx", "onnxruntime", "onnxscript"))):
        raise VitrailError("vitrail export needs the export extra: pip install 'vitrail[export]'")


@contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """A temporary path whose files are moved next to `path` at the end: large graphs have two."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
            yield Path(folder) / path.name
            for file in Path(folder).iterdir():
                shutil.move(file, path.parent / file.name)
    except OSError as error:
        raise FailureError(f"cannot write {path} ({one_line(error)})") from None
