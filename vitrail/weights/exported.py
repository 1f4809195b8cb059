"""The files of `vitrail export` (ONNX, int8 ONNX, torch.export) as models that predict.

Files are not trusted. ONNX holds only known operators. A pt2 archive may hold pickles, names of
Python functions and expressions that torch evaluates; one that has any of them is refused.
"""

import io
import json
import logging
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from vitrail.data import preprocessing
from vitrail.errors import VitrailError
from vitrail.model import Classifier
from vitrail.weights.load import EXPORTED, load, resolve
from vitrail.weights.read import parsing

METADATA_KEY = "vitrail"
_PT2_MEMBERS = (
    r"(\.data|\.format)/\w+|byteorder|version|archive_(format|version)|models/model\.json|"
    r"data/(weights/(weight_\d+|model_weights_config\.json)|sample_inputs/model\.pt|"
    r"constants/(tensor_\d+|model_constants_config\.json))|extra/vitrail\.json"
)
# Words of torch's expressions of sizes, such as Add(Symbol('s14', positive=True), Integer(-1)), and
# of its conditions, such as L['images'].size()[2] // 16 != 1.
_SIZE_WORDS = (
    r"Symbol|Integer|Add|Mul|Pow|Mod|Max|Min|FloorDiv|CleanDiv|PythonMod|TruncToInt|ToFloat|"
    r"positive|nonnegative|integer|True|False|[su]\d+|\d+|L|images|pixels|size|torch|sym_(max|min)"
)
_TARGETS = (
    r"torch\.ops\.aten\.\w+\.\w+|_operator\.(add|sub|mul|floordiv|mod|neg|pow|eq|ne|[lg][et])"
)


def open_model(source: str | Path) -> "Classifier | ExportedModel":
    """A MODEL for prediction alone: any that `load` takes, or an exported file."""
    path = Path(source)
    if path.suffix in EXPORTED and not path.is_dir():
        return ExportedModel(resolve(source)[0])
    return load(source)


class Graph(nn.Module):
    """An exported file that takes its own input: bytes of any size, or pixels."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        if not path.is_file():
            raise VitrailError(f"{path} does not exist; check the path")
        opened = _open_onnx if path.suffix == ".onnx" else _open_pt2
        with parsing(path, "exported file"):
            self._run, metadata = opened(path)
        if METADATA_KEY not in metadata:
            raise VitrailError(f"{path} does not describe its input; write it with vitrail export")
        with parsing(path, "exported file"):
            self.metadata: dict[str, Any] = json.loads(metadata[METADATA_KEY])
            self.labels = tuple(map(str, self.metadata["labels"]))
            self.inside = self.metadata["preprocessing"].pop("where") == "inside"

    def forward(self, inputs: Tensor) -> Tensor:
        return self._run(inputs.to(torch.uint8) if self.inside else inputs)


class ExportedModel(nn.Module):
    """An exported file that takes preprocessed pixels, as the model that it was exported from.

    It runs on the CPU, and gives only what the file computes: logits, or features without classes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file, self.graph = path, Graph(path)
        with parsing(path, "exported file"):
            known = self.graph.metadata
            self.variant, self.parameter_count = str(known["variant"]), int(known["parameters"])
            self.feature_width = int(known["features"])
            self.labels, self.activation = self.graph.labels, known["activation"]
            self.preprocess = preprocessing.from_dict(known["preprocessing"])
            size, classes = self.preprocess.size, int(known["classes"])
            self.architecture = SimpleNamespace(size=size, classes=classes)
            self.head = nn.Identity() if known["output"] == "logits" else None
        if self.graph.inside and not self.preprocess.antialias:
            raise VitrailError(
                f"{path} resizes images itself and without antialiasing; export the model with "
                "--preprocessing beside"
            )

    def forward(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        return self.graph(self._to_bytes(pixels) if self.graph.inside else pixels)

    def features(self, pixels: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d"]:
        """What the head reads, of a file without classes."""
        if self.head is not None:
            raise VitrailError(
                f"{self.file} gives no features; use the model that it was exported from"
            )
        return self(pixels)

    def _to_bytes(self, pixels: Float[Tensor, "b c y x"]) -> UInt8[Tensor, "b c height width"]:
        """The bytes of preprocessed pixels, in the middle of an image that the graph, which resizes
        and crops, does not resize and crops to these bytes again."""
        p = self.preprocess
        mean, std = (torch.tensor(color).view(-1, 1, 1) for color in (p.mean, p.std))
        image = ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
        scale = p.short_side / min(p.size) if p.short_side else 1
        more = [round(side * scale) - side for side in p.size]
        before = [round(extra / 2) for extra in more]
        sides = (before[1], more[1] - before[1], before[0], more[0] - before[0])
        return F.pad(image, sides)


_Opened = tuple[Callable[[Tensor], Tensor], dict[str, str]]
"""What runs a file, and its metadata."""


def _open_onnx(path: Path) -> _Opened:
    if find_spec("onnxruntime") is None:
        raise VitrailError(f"{path} needs the export extra: pip install 'vitrail[export]'")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that spin while they wait take the cores that decode.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(inputs: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: inputs.numpy()})[0])

    return run, session.get_modelmeta().custom_metadata_map


def _open_pt2(path: Path) -> _Opened:
    data = path.read_bytes()  # once: what is checked is what is loaded
    _refuse_code(path, data)
    extra = {f"{METADATA_KEY}.json": ""}
    with quiet():
        module = torch.export.load(io.BytesIO(data), extra_files=extra).module()
    # Not the module itself: as a part of another one it cannot change its mode.
    return lambda inputs: module(inputs), {METADATA_KEY: extra[f"{METADATA_KEY}.json"]}


def _refuse_code(path: Path, data: bytes) -> None:
    """Stop before torch.export.load unpickles, calls or evaluates what a stranger wrote."""

    def refuse(what: object) -> None:
        raise VitrailError(f"{path} holds {str(what)[:80]!r}, which may run code; it is not loaded")

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name.partition("/")[2]: name for name in archive.namelist()}
        for name in members:
            if not re.fullmatch(_PT2_MEMBERS, name):
                refuse(name)
        inputs = archive.read(members["data/sample_inputs/model.pt"])
        described = [
            json.loads(archive.read(members[name]))
            for name in members
            if name.endswith(".json") and not name.startswith("extra/")
        ]
    # torch.export.load tries this first, and only then to unpickle.
    torch.load(io.BytesIO(inputs), weights_only=True)
    for key, text in (pair for part in described for pair in _strings(part)):
        if key in ("expr_str", "guards_code"):
            known = re.fullmatch(r"[\w\s()\[\]'.,<>=!/%*+-]*", text) and all(
                re.fullmatch(_SIZE_WORDS, word) for word in set(re.findall(r"\w+", text))
            )
        elif key == "target":
            known = re.fullmatch(_TARGETS, text)
        else:  # names and numbers, which torch writes into the code of the module
            known = key != "use_pickle" and re.fullmatch(r"[\w .,:>+-]*", text)
        if not known:
            refuse(text)


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string in nested JSON with its key, every key, and whether there are pickles."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield "", name
            # Where a node comes from, and how arguments nest: read as JSON, and never as code.
            if name not in ("metadata", "in_spec", "out_spec"):
                yield from _strings(inner, name)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner, key)
    elif isinstance(value, str):
        yield key, value
    elif value is True and key == "use_pickle":
        yield key, key


@contextmanager
def quiet() -> Iterator[None]:
    """Without the exporters' warnings about their own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
