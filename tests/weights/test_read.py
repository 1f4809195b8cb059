"""Hostile, broken and odd files: each gives its tensors bit for bit, or one line that names it."""

import io
import json
import os
import pickle
import random
import resource
import struct
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitrail.errors import VitrailError
from vitrail.weights.load import load
from vitrail.weights.read import Contents, read, write

NUMBERS = np.arange(4096, dtype=np.float32).reshape(64, 64)
MIB = 1 << 20
GIB = 1 << 30


def failure(path: Path) -> str:
    """The one line that a reader of tensors gets, and who asks for the model."""
    for reader in (load, read):
        with pytest.raises(VitrailError) as caught:
            reader(path)
        assert str(caught.value).isprintable()
        assert str(path) in str(caught.value)
    return str(caught.value)


@contextmanager
def sparing() -> Iterator[None]:
    """Within it, little time may pass and little memory be taken."""
    begun = time.monotonic()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 16 * MIB
    finally:
        tracemalloc.stop()
    assert time.monotonic() - begun < 5


def bits(tensor: Tensor) -> bytes:
    """Unlike a comparison of numbers, these tell one NaN from another and -0 from 0."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


# Archives of arrays


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "model.npz"
    np.savez(path, first=NUMBERS, second=NUMBERS + 1)
    return path


@pytest.fixture
def deflated_npz(tmp_path: Path) -> Path:
    path = tmp_path / "model.npz"
    np.savez_compressed(path, first=NUMBERS, second=NUMBERS + 1)
    return path


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def header_only(header: str, version: int = 1) -> bytes:
    """An .npy file of a header and no data."""
    length = struct.pack("<H" if version == 1 else "<I", len(header))
    return b"\x93NUMPY" + bytes((version, 0)) + length + header.encode("latin-1")


def floats(shape: str) -> bytes:
    """The header of an .npy file of that shape."""
    return header_only(f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}")


def archive(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


FIELDS = {"flags": (8, "<H"), "method": (10, "<H"), "crc": (16, "<I"), "size": (24, "<I")}


def forge(path: Path, **values: int) -> Path:
    """Lies in the archive's directory about its first member."""
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\x01\x02")
    for name, value in values.items():
        offset, kind = FIELDS[name]
        struct.pack_into(kind, data, start + offset, value)
    path.write_bytes(data)
    return path


def deflated_zeros(size: int, start: bytes = b"") -> bytes:
    """Any amount of zeros, deflated without ever being in memory."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    first = deflate.compress(start) + deflate.flush(zlib.Z_FULL_FLUSH)
    again = deflate.compress(bytes(MIB)) + deflate.flush(zlib.Z_FULL_FLUSH)
    return first + again * (size // MIB) + deflate.flush()


@pytest.mark.parametrize("kind", ["<f2", "<f4", "<f8", ">f2", ">f4", ">f8", "<i8", "|u1", "|i1"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_arrives_bit_for_bit(tmp_path: Path, kind: str, order: str) -> None:
    noise = np.frombuffer(random.Random(0).randbytes(480), dtype=kind)
    array = noise.reshape((4, 3, -1), order="F" if order == "F" else "C")
    np.savez(tmp_path / "model.npz", a=array)
    tensor = read(tmp_path / "model.npz").tensors["a"]
    assert tensor.shape == array.shape
    native = array if np.dtype(kind).isnative else array.byteswap()
    assert bits(tensor) == native.tobytes()
    assert tensor.dtype == torch.from_numpy(np.zeros(1, np.dtype(kind).newbyteorder("="))).dtype


@pytest.mark.parametrize("order", ["C", "F"])
def test_bfloat16_as_jax_writes_it_arrives_bit_for_bit(tmp_path: Path, order: str) -> None:
    noise = np.frombuffer(random.Random(0).randbytes(240), dtype="V2")
    array = noise.reshape((4, 3, -1), order="F" if order == "F" else "C")
    np.savez(tmp_path / "model.npz", a=array)
    tensor = read(tmp_path / "model.npz").tensors["a"]
    assert tensor.dtype == torch.bfloat16
    assert tensor.shape == array.shape
    assert bits(tensor) == array.tobytes()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    assert "not a regular file" in failure(tmp_path / "model.safetensors")


def test_booleans_scalars_and_empty_arrays_arrive(tmp_path: Path) -> None:
    arrays = {"mask": NUMBERS > 7, "step": np.array(3.5), "none": np.zeros((0, 4), np.float32)}
    np.savez(tmp_path / "model.npz", **arrays)
    tensors = read(tmp_path / "model.npz").tensors
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        assert torch.equal(tensors[name], torch.from_numpy(array))


def test_an_array_may_be_written_to_without_a_copy(npz: Path) -> None:
    tensor = read(npz).tensors["first"]
    tensor += 1
    assert torch.equal(tensor, read(npz).tensors["second"])


def test_a_compressed_archive_of_zeros_is_no_bomb(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "model.npz", a=np.zeros(4 * MIB, np.float32))
    assert not read(tmp_path / "model.npz").tensors["a"].any()


@pytest.mark.parametrize("kept", [1, 3, 4, 30, 5000, 20_000, -1000, -22, -1])
def test_a_truncated_archive_is_refused(npz: Path, kept: int) -> None:
    npz.write_bytes(npz.read_bytes()[:kept])
    assert "fetch" in failure(npz)


@pytest.mark.parametrize("path", ["npz", "deflated_npz"])
def test_damage_in_the_middle_of_an_archive_is_found(
    path: str, request: pytest.FixtureRequest
) -> None:
    npz: Path = request.getfixturevalue(path)
    data = bytearray(npz.read_bytes())
    data[len(data) // 4] ^= 255
    npz.write_bytes(data)
    assert "is not a readable archive" in failure(npz)


def test_a_wrong_checksum_is_found(npz: Path) -> None:
    assert "Bad CRC-32" in failure(forge(npz, crc=1))


def test_an_encrypted_archive_is_refused(npz: Path) -> None:
    assert "encrypted" in failure(forge(npz, flags=1))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, 93, 99])
def test_a_compression_that_numpy_never_uses_is_refused(npz: Path, method: int) -> None:
    assert "model.npz: first.npy uses a compression" in failure(forge(npz, method=method))


def test_a_zip_bomb_is_refused_before_it_goes_off(tmp_path: Path) -> None:
    body = deflated_zeros(2 * GIB, npy(NUMBERS)[:128])
    path = archive(tmp_path / "bomb.npz", a=body)
    forge(path, method=zipfile.ZIP_DEFLATED, size=2 * GIB + 128)
    assert path.stat().st_size < 4 * MIB
    with sparing():
        assert "to 2,147,483,776 bytes; that is a zip bomb, not weights" in failure(path)


@pytest.mark.parametrize("size", [100, 10_000])
def test_a_zip_bomb_that_announces_little_is_refused(tmp_path: Path, size: int) -> None:
    # The header's own length is what numpy would then ask of the archive.
    body = deflated_zeros(GIB, b"\x93NUMPY\x02\x00\xff\xff\xff\x7f")
    path = archive(tmp_path / "bomb.npz", a=body)
    forge(path, method=zipfile.ZIP_DEFLATED, size=size)
    with sparing():
        assert "is not a readable" in failure(path)


@pytest.mark.parametrize("shape", ["(1000000000,)", "(4611686018427387904, 4)", "(2,)", "(-3,)"])
def test_an_array_that_announces_another_size_is_refused(tmp_path: Path, shape: str) -> None:
    path = archive(tmp_path / "model.npz", a=floats(shape) + bytes(12))
    with sparing():
        assert "model.npz: a.npy declares" in failure(path)


NO_ARRAYS = {
    "nothing": b"",
    "text": b"hello",
    "pickle": pickle.dumps([1, 2]),
    "no header": b"\x93NUMPY\x01\x00",
    "unknown version": b"\x93NUMPY\x09\x00\x00\x00",
    "half a header": header_only("{'descr': '<f4'"),
    "empty header": header_only("[]", version=3),
    "endless header": header_only(" " * 20_000, version=2),
    "no type": header_only("{'descr': (), 'fortran_order': False, 'shape': (3,)}"),
    "escape codes": floats("(3,) \n \x1b[31m"),
    "unknown sides": floats("(-1, -3)") + bytes(12),
    "endless sides": floats(f"(0, {2**62}, {2**62})"),
    "too many sides": floats(f"({'0, ' * 99})"),
    "signs": header_only("-" * 9000 + "1"),
    "open brackets": header_only("(" * 9000),
    "nested brackets": header_only("[" * 150 + "]" * 150),
}


@pytest.mark.parametrize("data", NO_ARRAYS.values(), ids=NO_ARRAYS)
def test_a_member_that_is_no_array_is_refused(tmp_path: Path, data: bytes) -> None:
    path = archive(tmp_path / "model.npz", good=npy(NUMBERS), bad=data)
    assert "model.npz: bad.npy is not a readable array (" in failure(path)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "b"]),
        np.array([b"a"]),
        np.array([1j], np.complex64),
        np.array(["2020-10-22"], "datetime64[D]"),
        np.array([(1, 2.0)], "i4,f4"),
        np.zeros(3, "V4"),
        np.zeros(3, "S0"),
        np.zeros(3, np.longdouble),
    ],
    ids=lambda array: str(array.dtype),
)
def test_an_array_of_something_else_than_numbers_is_refused(
    tmp_path: Path, array: np.ndarray
) -> None:
    np.savez(tmp_path / "model.npz", a=array)
    assert "a.npy holds" in failure(tmp_path / "model.npz")


def test_a_name_cannot_write_on_the_terminal(tmp_path: Path) -> None:
    path = archive(tmp_path / "model.npz", **{"a\nb\x1b[31m": npy(NUMBERS)})
    assert r"unprintable name 'a\nb\x1b[31m'" in failure(path)
    archive(path, **{"a\nb\x1b[31m": b"hello"})
    assert "is not a readable array" in failure(path)


# Code in disguise


class Payload:
    """Unpickling it calls a function on a path."""

    def __init__(self, function: Callable[..., object], *arguments: str) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture(params=["mkdir", "open", "exec"])
def payload(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Payload]:
    """Code that leaves a marker, and must not have."""
    marker = tmp_path / "marker"
    yield {
        "mkdir": Payload(os.mkdir, str(marker)),
        "open": Payload(open, str(marker), "w"),
        "exec": Payload(exec, f"import os; os.mkdir({str(marker)!r})"),
    }[request.param]
    assert not marker.exists()


def test_the_code_of_these_tests_would_run(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(os.mkdir, str(tmp_path / "marker"))))
    assert (tmp_path / "marker").exists()


def test_code_in_an_archive_of_arrays_is_not_run(tmp_path: Path, payload: Payload) -> None:
    objects = np.empty(1, object)
    objects[0] = payload
    np.savez(tmp_path / "model.npz", a=objects)
    assert "a.npy holds pickled Python objects, which are not loaded" in failure(
        tmp_path / "model.npz"
    )


def test_a_bare_pickle_in_an_archive_is_not_run(tmp_path: Path, payload: Payload) -> None:
    failure(archive(tmp_path / "model.npz", a=pickle.dumps(payload)))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["model.pth", "model.npz", "model.safetensors", "model"])
def test_code_in_a_torch_file_is_not_run(
    tmp_path: Path, payload: Payload, name: str, zipped: bool
) -> None:
    path = tmp_path / name
    value = {"model": {"a": torch.ones(3), "b": payload}}
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    message = failure(path)
    assert f"{path} holds Python code (" in message
    assert "it was not run: ask for a .safetensors file" in message


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_bare_pickle_is_not_run(tmp_path: Path, payload: Payload, protocol: int) -> None:
    path = tmp_path / "model.pth"
    path.write_bytes(pickle.dumps(payload, protocol))
    failure(path)


def test_torchscript_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("model/constants.pkl", b"")
    assert "holds Python code (TorchScript)" in failure(path)


# Torch files


@pytest.fixture(params=[True, False], ids=["zip", "legacy"])
def pth(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[Any], Path]:
    def save(value: Any) -> Path:
        path = tmp_path / "model.pth"
        torch.save(value, path, _use_new_zipfile_serialization=request.param)
        return path

    return save


@pytest.mark.parametrize("wrapper", ["", "model", "state_dict", "model_ema", "state_dict_ema"])
@pytest.mark.parametrize("prefix", ["", "module."])
def test_weights_are_found_inside_a_checkpoint(
    pth: Callable[[Any], Path], wrapper: str, prefix: str
) -> None:
    weights = {f"{prefix}a": torch.randn(3, 4), f"{prefix}b.module.c": torch.ones(2).bfloat16()}
    path = pth({wrapper: weights, "epoch": 3, "optimizer": {"state": {}}} if wrapper else weights)
    tensors = read(path).tensors
    assert list(tensors) == ["a", "b.module.c"]
    for found, saved in zip(tensors.values(), weights.values(), strict=True):
        assert found.dtype == saved.dtype
        assert torch.equal(found, saved)


def test_averaged_weights_are_preferred(pth: Callable[[Any], Path]) -> None:
    path = pth({"model": {"a": torch.zeros(1)}, "model_ema": {"a": torch.ones(1)}})
    assert read(path).tensors["a"] == 1


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.npz", "weights"])
def test_a_torch_file_is_known_by_its_bytes(
    pth: Callable[[Any], Path], tmp_path: Path, name: str
) -> None:
    path = pth({"a": torch.ones(3)}).rename(tmp_path / name)
    assert torch.equal(read(path).tensors["a"], torch.ones(3))


@pytest.mark.parametrize("kept", [1, 2, 10, 100, 600, 0.5, 0.9, -30, -1])
def test_a_truncated_torch_file_is_refused(pth: Callable[[Any], Path], kept: float) -> None:
    path = pth({"a": torch.randn(4096)})
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    assert "fetch" in failure(path)


@pytest.mark.parametrize("value", [[torch.ones(3)], 3, None, "text", torch.ones(3)])
def test_a_torch_file_without_a_state_dict_is_refused(
    pth: Callable[[Any], Path], value: Any
) -> None:
    assert f"holds a {type(value).__name__}, not a state dict" in failure(pth(value))


@pytest.mark.parametrize(
    "odd",
    [
        3,
        "text",
        {"b": torch.ones(3)},
        [torch.ones(3)],
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, device="meta"),
        torch.ones(3).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_state_dict_with_something_else_than_numbers_is_refused(
    pth: Callable[[Any], Path], odd: Any
) -> None:
    path = pth({"a": torch.ones(3), "odd\n\x1b": odd})
    assert "holds more than dense tensors of numbers: odd" in failure(path)


def test_only_the_first_oddities_are_named(pth: Callable[[Any], Path]) -> None:
    assert failure(pth({str(key): key for key in range(1000)})).endswith(
        ": 0, 1, 2, 3, 4 and 995 more; save the state dict alone"
    )


def test_one_number_that_pretends_to_be_many_is_refused(pth: Callable[[Any], Path]) -> None:
    path = pth({"a": torch.zeros(1).expand(2**40)})
    with sparing():
        assert "zip bomb" in failure(path)


def test_a_zip_bomb_in_a_torch_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"a": torch.zeros(3)}, path)
    with sparing():
        assert "zip bomb" in failure(forge(path, size=3 * GIB))


def test_a_storage_that_announces_more_than_it_has_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    torch.save({"a": torch.zeros(70_000)}, path)
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    number, lie = struct.pack("<ci", b"J", 70_000), struct.pack("<ci", b"J", 2**30)
    with zipfile.ZipFile(path, "w") as file:
        for name, data in members.items():
            file.writestr(name, data.replace(number, lie) if name.endswith("data.pkl") else data)
    assert "is not a readable torch file (" in failure(path)


# Safetensors


def safetensors(header: Any, data: bytes = bytes(12), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_safetensors_arrive_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "c": torch.randn(5).half(),
        "d": torch.arange(3),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    contents = read(tmp_path / "model.safetensors")
    assert contents.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        assert contents.tensors[name].dtype == tensor.dtype
        assert bits(contents.tensors[name]) == bits(tensor)


def test_a_header_that_begins_like_a_pickle_is_no_pickle(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = {"__metadata__": {"key": "value"}, "a": entry(0, 12, [3])}
    path.write_bytes(safetensors(json.dumps(header).encode().ljust(0x280)))
    assert path.read_bytes()[:2] == pickle.dumps(0, 2)[:2]
    assert read(path).metadata == {"key": "value"}
    assert torch.equal(read(path).tensors["a"], torch.zeros(3))


LIES = {
    "longer than the file": (safetensors({"a": entry(0, 12, [3])}, length=200), "header length"),
    "longer than any": (safetensors({"a": entry(0, 12, [3])}, length=2**62), "header too large"),
    "shorter than it is": (safetensors({"a": entry(0, 12, [3])}, length=20), "invalid JSON"),
    "data beyond the file": (safetensors({"a": entry(0, 4000, [1000])}), "not fully covered"),
    "data left over": (safetensors({"a": entry(0, 8, [2])}), "not fully covered"),
    "overlap": (safetensors({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}), "invalid offset"),
    "twice": (safetensors({"a": entry(0, 12, [3]), "b": entry(0, 12, [3])}), "invalid offset"),
    "backwards": (safetensors({"a": entry(12, 0, [3])}), "invalid offset"),
    "wrong shape": (safetensors({"a": entry(0, 12, [4])}), "shape"),
    "endless shape": (safetensors({"a": entry(0, 12, [2**62, 2**62])}), "overflow"),
    "endless side": (safetensors({"a": entry(0, 0, [0, 2**64 - 1])}, b""), "shape"),
    "unknown numbers": (safetensors({"a": entry(0, 12, [3], "F33\n\x1b")}), "unknown variant"),
    "six-bit numbers": (safetensors({"a": entry(0, 12, [16], "F6_E2M3")}), "F6_E2M3"),
    "no entry": (safetensors({"a": 3}), "invalid JSON"),
    "metadata of numbers": (safetensors({"__metadata__": {"a": 3}}, b""), "invalid JSON"),
    "no JSON": (safetensors(b"{hello}"), "invalid JSON"),
    "no UTF-8": (safetensors(b'{"\xff":3}'), "invalid UTF-8"),
    "a deep nest": (safetensors(b'{"a":' * 50_000), "invalid JSON"),
}


@pytest.mark.parametrize(("data", "reason"), LIES.values(), ids=LIES)
def test_a_lying_header_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with sparing():
        message = failure(path)
    assert "model.safetensors is not a readable safetensors file (" in message
    assert reason in message


@pytest.mark.parametrize("header", [b"hello, world", b"[1, 2, 3, 4]", b"[" * 10_000])
def test_a_header_that_is_no_object_is_refused(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors(header))
    assert "is not a safetensors, npz or torch file: it begins with b" in failure(path)


@pytest.mark.parametrize("kind", ["C64", "F8_E4M3", "F4"])
def test_numbers_that_no_model_computes_with_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.safetensors"
    count = {"C64": 1, "F8_E4M3": 8, "F4": 16}[kind]
    path.write_bytes(safetensors({"odd": entry(0, 8, [count], kind)}, bytes(8)))
    assert "holds more than dense tensors of numbers: odd" in failure(path)


@pytest.mark.parametrize("kept", [1, 8, 9, 100, -4000, -1])
def test_truncated_safetensors_are_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(4096)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    assert "fetch" in failure(path)


# Paths and folders


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pth", ".bin", ""])
@pytest.mark.parametrize(
    "text", ["hello\n", "<!DOCTYPE html>\n<html>", "version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_text_is_shown_to_be_one_whatever_its_name(
    tmp_path: Path, suffix: str, text: str
) -> None:
    path = tmp_path / f"model{suffix}"
    path.write_text(text)
    assert f"begins with {text[:16].encode()!r}; fetch the weights themselves" in failure(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pth"])
def test_an_empty_file_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model{suffix}"
    path.touch()
    assert failure(path) == f"{path} is empty; fetch it again"


def test_an_absent_path_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    assert failure(path) == f"{path} does not exist; check the path"
    path.symlink_to(tmp_path / "nowhere")
    assert failure(path) == f"{path} does not exist; check the path"


def test_a_path_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.npz"
    path.symlink_to(path)
    assert failure(path) == f"cannot read {path}: Too many levels of symbolic links"
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "model.npz"
    assert failure(path) == f"cannot read {path}: Not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_one_may_not_read_is_named(npz: Path) -> None:
    npz.chmod(0)
    assert failure(npz) == f"cannot read {npz}: Permission denied"


def test_a_wrong_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(torch.nn.LSTM(4, 4).state_dict(), path)
    assert read(path).tensors
    with pytest.raises(VitrailError) as caught:
        load(path)
    assert str(caught.value) == (
        f"{path} is not a checkpoint of a known architecture (it holds bias_hh_l0, bias_ih_l0, "
        "weight_hh_l0 …); known formats are google, timm, huggingface, torchvision and vitrail"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_file({"a": torch.ones(3)}, path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "vit"}')
    return path


def test_a_folder_brings_its_configuration(folder: Path) -> None:
    contents = read(folder)
    assert contents.path == folder
    assert contents.config == {"model_type": "vit"}
    assert contents.preprocessor == {}
    (folder / "preprocessor_config.json").write_text('{"size": 224}')
    assert read(folder).preprocessor == {"size": 224}
    assert torch.equal(contents.tensors["a"], torch.ones(3))


def test_safetensors_are_preferred_to_a_pickle(folder: Path) -> None:
    torch.save({"a": torch.zeros(3)}, folder / "pytorch_model.bin")
    assert read(folder).tensors["a"].all()
    (folder / "model.safetensors").unlink()
    assert not read(folder).tensors["a"].any()


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert failure(folder) == (
        f"{folder} holds no weights; expected model.safetensors or pytorch_model.bin in it"
    )


def test_broken_weights_in_a_folder_are_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in failure(folder)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "is not JSON ("),
        (b"{", "is not JSON ("),
        (b"<html>", "is not JSON ("),
        (b'{"a": "\xff"}', "is not JSON ("),
        (b'{"a": ' + b"[" * 200_000, "is not JSON ("),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON ("),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"3", "holds a JSON int, expected an object"),
    ],
)
def test_a_broken_configuration_is_named(
    folder: Path, name: str, text: bytes, problem: str
) -> None:
    (folder / name).write_bytes(text)
    assert f"{folder / name} {problem}" in failure(folder)


def test_a_folder_in_place_of_a_configuration_is_named(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    assert failure(folder) == f"cannot read {folder / 'config.json'}: Is a directory"


# Writing

PLACES = ["model.npz", "model.safetensors", "model.pth", "model.pt", "model.bin", "model"]


@contextmanager
def full_disk() -> Iterator[None]:
    """Within it no file can grow beyond a few kilobytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("place", PLACES)
def test_what_is_written_is_read_again_bit_for_bit(tmp_path: Path, place: str) -> None:
    noise = torch.from_numpy(np.frombuffer(random.Random(0).randbytes(480), np.uint8).copy())
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8)
    tensors = {f"a/{kind}.b": noise.view(kind).view(3, -1).mT for kind in kinds}
    tensors |= {"scalar": torch.tensor(3.5), "scalar16": torch.tensor(2).bfloat16()}
    path = tmp_path / "new" / place
    config = {"a": 1, "é": "ü"} if place == "model" else {}
    write(Contents(path=path, tensors=tensors, config=config))
    contents = read(path)
    assert contents.config == config
    assert set(contents.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert contents.tensors[name].dtype == tensor.dtype
        assert contents.tensors[name].shape == tensor.shape
        assert bits(contents.tensors[name]) == bits(tensor)


def test_metadata_is_kept(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model"):
        path = tmp_path / name
        write(Contents(path=path, tensors={"a": torch.ones(1)}, metadata={"key": "value"}))
        assert read(path).metadata == {"key": "value"}


@pytest.mark.parametrize("place", PLACES)
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    write(Contents(path=path, tensors={"a": torch.ones(3)}, config={"old": True}))
    before = snapshot(tmp_path)
    large = {"a": torch.ones(50_000), "b": torch.ones(50_000)}
    with full_disk(), pytest.raises(VitrailError) as caught:
        write(Contents(path=path, tensors=large, config={"old": False}))
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(f"cannot write {path}")
    assert "File too large" in message
    assert "; free some space or choose another place" in message
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("place", PLACES)
def test_a_place_inside_a_file_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("in the way")
    path = tmp_path / "file" / place
    with pytest.raises(VitrailError, match=f"^cannot write {path}"):
        write(Contents(path=path, tensors={"a": torch.ones(3)}))
    assert snapshot(tmp_path) == {tmp_path / "file": b"in the way"}


@pytest.mark.parametrize("place", PLACES[:-1])
def test_a_folder_in_the_way_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / place).mkdir()
    with pytest.raises(VitrailError, match="Is a directory"):
        write(Contents(path=tmp_path / place, tensors={"a": torch.ones(3)}))
    assert not snapshot(tmp_path)


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VitrailError) as caught:
        write(Contents(path=tmp_path / "model.onnx", tensors={"a": torch.ones(3)}))
    assert str(caught.value) == (
        "cannot write '.onnx' files; use .npz, .safetensors, .pth or a folder"
    )
    assert not snapshot(tmp_path)


# Everything else that can happen to a file


def complaint(path: Path) -> str:
    try:
        read(path)
    except VitrailError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("container", ["npz", "deflated", "safetensors", "zip", "legacy"])
def test_random_damage_never_gives_another_error(tmp_path: Path, container: str) -> None:
    path = tmp_path / "model"
    tensors = {"a": torch.randn(5, 7), "b.c": torch.ones(3).half()}
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    with path.open("wb") as file:
        {
            "npz": lambda: np.savez(file, **arrays),
            "deflated": lambda: np.savez_compressed(file, **arrays),
            "safetensors": lambda: save_file(tensors, path),
            "zip": lambda: torch.save(tensors, file),
            "legacy": lambda: torch.save(tensors, file, _use_new_zipfile_serialization=False),
        }[container]()
    whole, dice = path.read_bytes(), random.Random(0)
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] = dice.choice(
                (0, 1, 127, 128, 255, dice.randrange(256))
            )
        path.write_bytes(data)
        assert complaint(path).isprintable()


@pytest.mark.parametrize("name", ["m.safetensors", "m.npz", "m.pth"])
def test_written_files_are_as_readable_as_any_other(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    write(Contents(path=tmp_path / name, tensors={"a": torch.zeros(2)}))
    assert (tmp_path / name).stat().st_mode == (tmp_path / "other").stat().st_mode
