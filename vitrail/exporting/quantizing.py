"""A graph in 8-bit numbers for CPUs, calibrated on the user's pictures (ONNX Runtime, static).

Only products with constant weights become 8-bit, and their results stay floats: rounding those too
costs decisions and gains little time. What follows a GELU stays a float as well: its input is
one-sided, most of it lies next to zero, and one step of 255 is larger than the whole negative part.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from vitrail.exporting.graphs import KEY, Wish, needed, quiet, together

PRODUCTS = ["MatMul", "Gemm", "Conv"]
AFTER_GELU = {"Gelu", "Mul"}
"""What ends a GELU: itself, or the last step of its formula."""


def quantize(
    source: Path, target: Path, pictures: Iterable[Tensor], wish: Wish, about: dict[str, Any]
) -> None:
    """The same graph in 8-bit numbers; `pictures` tell how large its inner numbers get."""
    needed()
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with TemporaryDirectory() as folder, together(target) as part, quiet():
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(source, prepared, skip_symbolic_shape=True)
        quantize_static(
            prepared,
            part,
            reader(pictures, wish.input),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=PRODUCTS,
            nodes_to_exclude=kept_as_floats(onnx.load(prepared).graph),
            extra_options={"OpTypesToExcludeOutputQuantization": PRODUCTS},
        )
        graph = onnx.load(part)
        onnx.helper.set_model_props(graph, {KEY: json.dumps(about)})
        onnx.save(graph, part)


def kept_as_floats(graph: Any) -> list[str]:
    """Names of the products that would lose too much, or have no weights."""
    weights = {one.name for one in graph.initializer}
    made_by = {name: node.op_type for node in graph.node for name in node.output}
    kept, first = [], True
    for node in graph.node:
        if node.op_type not in PRODUCTS:
            continue
        constant = any(name in weights for name in node.input)
        # The first layer sees pixels, and is cheap.
        is_first = node.op_type == "Conv" and first
        first = first and node.op_type != "Conv"
        after_gelu = node.op_type != "Conv" and made_by.get(node.input[0]) in AFTER_GELU
        if not constant or is_first or after_gelu:
            kept.append(node.name)
    return kept


def reader(pictures: Iterable[Tensor], name: str) -> Any:
    """The pictures as ONNX Runtime asks for them."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = iter(pictures)

        def get_next(self) -> Any:
            picture = next(self.left, None)
            return None if picture is None else {name: picture[None].numpy()}

    return Reader()
