"""Weights files to tensors and back. Files are not trusted: no pickled code, no zip bombs.

The container (npz, safetensors, torch zip, folder) is detected from the first bytes, not the name.
"""

import io
import itertools
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import VitrailError, one_line
from vitrail.files import atomic_write, write_bytes, write_json

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weights files in a folder; the first that exists is used."""

# Beyond both, an archive counts as a zip bomb: real weights hardly compress.
_MAX_INFLATED_BYTES = 1 << 30
_MAX_INFLATION = 100

_NUMBERS = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}

# What DataParallel and torch.compile put before every name.
_WRAPPED = r"^(module\.|_orig_mod\.)+"
# Where training scripts put the weights inside a larger checkpoint.
_WRAPPERS = ("model_ema", "state_dict_ema", "model", "state_dict")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a file or folder of weights holds, before it is interpreted."""

    path: Path
    tensors: dict[str, Tensor]
    metadata: dict[str, str] = field(default_factory=dict)
    """The strings in a safetensors header."""
    config: dict[str, Any] = field(default_factory=dict)
    """config.json beside the weights; Vitrail's safetensors files have it in their header."""
    preprocessor: dict[str, Any] = field(default_factory=dict)
    """preprocessor_config.json, likewise."""
    size: tuple[int, int] | None = None
    """Rows and columns of the images it is for, if the caller knows them."""
    heads: int | None = None
    """Number of heads, likewise."""
    gelu: Literal["tanh", "erf"] | None = None
    """Kind of GELU, likewise."""

    def rows(self, key: str) -> int:
        """Rows of a tensor; zero if there is none of that name."""
        return self.tensors[key].shape[0] if key in self.tensors else 0

    def count(self, template: str) -> int:
        """How many of `template.format(0)`, `template.format(1)`, … there are in a row."""
        return next(i for i in itertools.count() if template.format(i) not in self.tensors)

    def units(self, template: str, start: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
        """Residual units of each stage, from keys with a stage and a unit, counted from `start`."""
        units: list[int] = []
        while True:
            stage, unit = start[0] + len(units), start[1]
            while template.format(stage, unit) in self.tensors:
                unit += 1
            if unit == start[1]:
                return tuple(units)
            units.append(unit - start[1])


def read(path: Path) -> Contents:
    """The contents of a weights file, or of a folder laid out as on the Hugging Face Hub."""
    try:
        return _read_folder(path) if path.is_dir() else _read_file(path)
    except FileNotFoundError:
        raise VitrailError(f"{path} does not exist; check the path") from None
    except OSError as error:
        where = error.filename or path
        raise VitrailError(f"cannot read {where}: {one_line(error)}") from None


@contextmanager
def parsing(what: Path | str, kind: str) -> Iterator[None]:
    """Turn whatever a parser raises into one line; each has a dozen kinds of errors."""
    try:
        yield
    except (VitrailError, OSError):
        raise
    except KeyError as error:
        raise VitrailError(
            f"{what} is not a known {kind}: it has no {one_line(error.args[0])}"
        ) from None
    except Exception as error:
        raise VitrailError(
            f"{what} is not a readable {kind} ({one_line(error)}); it may be truncated: fetch it "
            "again"
        ) from None


def _read_folder(folder: Path) -> Contents:
    parts = [_read_file(path) for path in _weights_in(folder)]
    return Contents(
        path=folder,
        tensors={key: tensor for part in parts for key, tensor in part.tensors.items()},
        metadata=parts[0].metadata,
        config=_read_json(folder / "config.json"),
        preprocessor=_read_json(folder / "preprocessor_config.json"),
    )


def _weights_in(folder: Path) -> list[Path]:
    """The weights file of a folder, or the shards that its index lists."""
    for path in (folder / name for name in WEIGHTS):
        if path.is_file():
            return [path]
        if index := _read_json(path.with_name(f"{path.name}.index.json")):
            with parsing(path, "index"):
                shards = sorted(set(index["weight_map"].values()))
                if not shards or any(Path(shard).name != shard for shard in shards):
                    raise VitrailError(f"{path}'s index names files outside its folder")
                return [folder / shard for shard in shards]
    raise VitrailError(f"{folder} holds no weights; expected {' or '.join(WEIGHTS)} in it")


def _read_json(path: Path) -> dict[str, Any]:
    return _parse_json(path, path.read_bytes()) if path.exists() else {}


def _parse_json(where: Path | str, text: str | bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise VitrailError(f"{where} is not JSON ({one_line(error)}); fetch it again") from None
    if not isinstance(value, dict):
        raise VitrailError(f"{where} holds a JSON {type(value).__name__}, expected an object")
    return value


def _read_file(path: Path) -> Contents:
    if path.exists() and not path.is_file():  # reading a pipe could block forever
        raise VitrailError(f"{path} is not a regular file; expected weights")
    with path.open("rb") as file:
        start = file.read(16)
    if not start:
        raise VitrailError(f"{path} is empty; fetch it again")
    if start[:4] == b"PK\x03\x04":
        contents = Contents(path=path, tensors=_read_zip(path))
    # Checked before torch: a safetensors header of 640 bytes begins like a pickle.
    elif start[8:9] == b"{":
        contents = _read_safetensors(path)
    elif start[:1] == b"\x80":
        contents = Contents(path=path, tensors=_read_torch(path))
    else:
        raise VitrailError(
            f"{path} is not a safetensors, npz or torch file: it begins with {start!r}; "
            "fetch the weights themselves"
        )
    # Names are printed, and a terminal obeys escape codes.
    if hidden := [key for key in contents.tensors if not key.isprintable()]:
        raise VitrailError(
            f"{path} has a tensor of the unprintable name {ascii(hidden[0])[:80]}; rename it"
        )
    return contents


def _read_safetensors(path: Path) -> Contents:
    # The library checks every offset of the header against the file.
    with parsing(path, "safetensors file"), safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    sidecars: dict[str, Any] = {
        name: _parse_json(f"{path}: {name} in the header", metadata.pop(name))
        for name in ("config", "preprocessor")
        if name in metadata
    }
    return Contents(path=path, tensors=_checked(path, tensors), metadata=metadata, **sidecars)


def _read_zip(path: Path) -> dict[str, Tensor]:
    """An .npz archive of arrays, or torch's own zip of a state dict."""
    with parsing(path, "archive"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        _refuse_bomb(path, sum(member.file_size for member in members))
        if any(member.filename.endswith("data.pkl") for member in members):
            return _read_torch(path)
        return {
            member.filename.removesuffix(".npy"): _read_npy(path, archive, member)
            for member in members
        }


def _refuse_bomb(path: Path, inflated: int) -> None:
    """Stop before a small file fills the memory."""
    size = path.stat().st_size
    if inflated > _MAX_INFLATED_BYTES and inflated > _MAX_INFLATION * size:
        raise VitrailError(
            f"{path} would grow from {size:,} to {inflated:,} bytes; "
            "that is a zip bomb, not weights"
        )


def _read_npy(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Tensor:
    """One array of an .npz; its header is trusted only where it agrees with the bytes."""
    where = f"{path}: {one_line(member.filename)}"
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise VitrailError(
            f"{where} uses a compression that NumPy does not write; save it with np.savez"
        )
    with archive.open(member) as stream:
        data = stream.read(member.file_size)  # a limit: it may hold more than it declares
    with parsing(where, "array"):
        file = io.BytesIO(data)
        version = npy.read_magic(file)
        reader = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = reader(file)
        if dtype.hasobject:
            raise VitrailError(f"{where} holds pickled Python objects, which are not loaded")
        bfloat16 = dtype == np.dtype("V2")  # how numpy writes JAX's
        if not bfloat16 and (dtype.kind not in "fiub" or dtype.itemsize > 8):
            raise VitrailError(f"{where} holds {one_line(dtype)}, not numbers a model can use")
        expected, rest = math.prod(shape) * dtype.itemsize, len(data) - file.tell()
        if expected != rest:
            raise VitrailError(
                f"{where} declares {expected:,} bytes but has {rest:,}; fetch it again"
            )
        array = np.frombuffer(bytearray(memoryview(data)[file.tell() :]), dtype=dtype)
        array = array.reshape(shape, order="F" if fortran else "C")
        if bfloat16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.astype(dtype.newbyteorder("="), copy=False))


def _read_torch(path: Path) -> dict[str, Tensor]:
    """A torch checkpoint's weights, without what the training script saved around them."""
    with parsing(path, "torch file"):
        value = _unpickle(path)
    for wrapper in _WRAPPERS:
        if isinstance(value, Mapping) and isinstance(value.get(wrapper), Mapping):
            value = value[wrapper]
    if not isinstance(value, Mapping):
        raise VitrailError(
            f"{path} holds a {type(value).__name__}, not a state dict; save the state dict itself"
        )
    tensors = _checked(path, {re.sub(_WRAPPED, "", str(key)): x for key, x in value.items()})
    # One number, expanded, can pretend to be any amount of them.
    _refuse_bomb(path, sum(tensor.nbytes for tensor in tensors.values()))
    return tensors


def _unpickle(path: Path) -> Any:
    """Tensors and plain values of a torch checkpoint: code in it is refused, never run."""
    try:
        # An open file, since torch would trust the suffix of a path.
        with warnings.catch_warnings(action="ignore"), path.open("rb") as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        message = str(error)
        if code := re.search(r"GLOBAL (\S+)|(TorchScript) archive", message):
            raise VitrailError(
                f"{path} holds Python code ({one_line(code[1] or code[2])}), not only tensors; "
                "it was not run: ask for a .safetensors file"
            ) from None
        # Torch puts a page of advice before its reason.
        raise RuntimeError(message.rpartition("WeightsUnpickler error:")[2]) from None


def _checked(path: Path, tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, if all are dense tensors of numbers: not sparse, quantized or anything else."""
    odd = [
        one_line(key)
        for key, x in tensors.items()
        if not isinstance(x, Tensor)
        or x.dtype not in _NUMBERS
        or x.layout is not torch.strided
        or x.device.type != "cpu"
    ]
    if odd:
        shown = ", ".join(odd[:5]) + (f" and {len(odd) - 5} more" if odd[5:] else "")
        raise VitrailError(
            f"{path} holds more than dense tensors of numbers: {shown}; save the state dict alone"
        )
    return tensors


def write(contents: Contents, folder: bool = False) -> None:
    """Write the contents to their path: the suffix picks the container, no suffix is a folder.

    Written beside the target and moved into place, so that a full disk or a kill leaves no
    partial file.
    """
    path, metadata = contents.path, contents.metadata
    tensors = {key: tensor.contiguous() for key, tensor in contents.tensors.items()}
    if folder or not path.suffix:
        # The weights first: if the disk is full, the old configuration stays with the old weights.
        atomic_write(path / WEIGHTS[0], lambda part: save_file(tensors, part, metadata))
        write_json(path / "config.json", contents.config)
        write_json(path / "preprocessor_config.json", contents.preprocessor)
    elif path.suffix == ".npz":
        write_bytes(path, lambda file: np.savez(file, **_as_arrays(tensors)))
    elif path.suffix == ".safetensors":
        # A single file stores what the tensors do not show, such as the number of heads.
        sidecars = {"config": contents.config, "preprocessor": contents.preprocessor}
        metadata = metadata | {name: json.dumps(value) for name, value in sidecars.items() if value}
        atomic_write(path, lambda part: save_file(tensors, part, metadata))
    elif path.suffix in (".pt", ".pth", ".bin"):
        write_bytes(path, lambda file: save_torch(file, tensors))
    else:
        raise VitrailError(
            f"cannot write '{path.suffix}' files; use .npz, .safetensors, .pth or a folder"
        )


def _as_arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """bfloat16 as JAX's own files have it."""
    return {
        key: x.view(torch.int16).numpy().view(np.dtype("V2"))
        if x.dtype == torch.bfloat16
        else x.numpy()
        for key, x in ((key, x.detach().cpu()) for key, x in tensors.items())
    }


def save_torch(file: Any, value: Any) -> None:
    """`torch.save`; on a full disk, which torch only counts bytes of, what the disk reported."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        raise error.__context__ or error from None
