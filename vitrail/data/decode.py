"""Decodes files and bytes to upright RGB images, within limits of memory and time."""

import os
import re
import stat
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import ExifTags, Image, UnidentifiedImageError

from vitrail.errors import VitrailError, one_line

T = TypeVar("T")
Pixels = UInt8[np.ndarray, "y x 3"]

_UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    RuntimeError,
    LookupError,
    TypeError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
"""What Pillow's decoders raise on damaged files."""

_FORMATS = ("JPEG", "MPO", "PNG", "GIF", "BMP", "DIB", "WEBP", "AVIF", "TIFF", "PPM", "JPEG2000")
"""The only decoders that are used, whatever the file's suffix. Some of Pillow's others run
programs: Ghostscript for EPS."""

MEGAPIXELS = {"WEBP": 64, "AVIF": 64, "JPEG2000": 64}
MOST_MEGAPIXELS = 128
"""The most megapixels that are decoded: a pixel takes 16 to 20 bytes in these formats, 8 to 12 in
others, and one image should not take much more than a gigabyte. Pillow refuses above 178."""
_HALVED_MEGAPIXELS = 64
"""A larger JPEG is decoded at half its width and height, which takes a quarter."""
_MOST_BYTES = 1 << 30
"""The largest image file: 178 million pixels of 16 bits, uncompressed."""
_MOST_SCANS = 64
"""The most scans of a JPEG image: a scan of a few bytes can take as long to decode as all its
pixels. Progressive images have about 10 scans, others 1."""
_MOST_SEGMENTS = 10_000
"""The most segments of a JPEG file. With color profiles and previews, it has a few hundred."""
_JPEG = b"\xff\xd8"
_JPEG_SEGMENT = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
"""The start of a segment, or the end of the image (D9): not 00, which escapes 0xFF in compressed
data, nor markers without a length."""
_SEQUENTIAL = (b"\xff\xc0", b"\xff\xc1")
"""The header of an image that is not progressive."""
STRIP = 1 << 22
"""Pixels that are composited on white at a time."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The inverse of each EXIF orientation."""


def open_image(path: Path) -> Image.Image:
    """The image in a file, `upright`; a `VitrailError` says why it cannot be decoded."""
    return decode(regular_file(path), str(path))


def regular_file(path: Path) -> Path:
    """The path, if it is that of a file that is not too large."""
    with readable(str(path)):
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            # Opening a pipe may block forever.
            raise VitrailError(f"{path} is not a regular file; expected an image file")
        refuse_large(str(path), status.st_size)
    return path


def refuse_large(name: str, size: int) -> None:
    """Some decoders read the whole file, whatever it is."""
    if size > _MOST_BYTES:
        raise VitrailError(f"{name} is {size / 1e9:,.1f} GB; image files are limited to 1 GB")


def decode(file: Path | BytesIO, name: str) -> Image.Image:
    """The image in a file or in its bytes, the first one of several, `upright`."""
    with readable(name), opened(file) as image:
        load_bounded(image)
        return upright(image)


def decode_pixels(file: Path | BytesIO, name: str, side: int = 0) -> Pixels:
    """The pixels of `decode`; JPEG files, which are most, take two thirds of the time.

    With a `side`, a JPEG file may be decoded at a half, a quarter or an eighth of its size, if its
    short side does not become shorter than that.
    """
    with readable(name), opened(file) as image:
        shrinks = side and image.format == "JPEG" and min(image.size) >= 2 * side
        if shrinks:
            scale = min(image.size) // side
            image.draft(None, (image.width // scale, image.height // scale))
        elif (pixels := _jpeg_pixels(image)) is not None:
            return pixels
        load_bounded(image)
        return np.asarray(upright(image))


def _jpeg_pixels(image: Image.Image) -> Pixels | None:
    """The pixels of a plain JPEG file by torchvision, which is the same library without Pillow's
    copies; None for any other file, and where it fails: Pillow says why."""
    try:
        from torchvision.io import ImageReadMode, decode_jpeg
    except ImportError:  # it will be gone one day
        return None
    large = image.width * image.height > _HALVED_MEGAPIXELS * 1e6
    if image.format != "JPEG" or image.mode not in ("RGB", "L") or large or _orientation(image) > 1:
        return None
    data: Any = image.fp  # type: ignore[attr-defined]
    try:
        pixels: Any = decode_jpeg(
            torch.frombuffer(data.getbuffer(), dtype=torch.uint8), ImageReadMode.RGB
        )
    except (RuntimeError, AttributeError):  # AttributeError: built without libjpeg
        return None
    return pixels.permute(1, 2, 0).numpy()


def opened(file: Path | BytesIO) -> Image.Image:
    """An image of one of the `_FORMATS`, of which only the header is decoded."""
    if isinstance(file, Path):
        with file.open("rb", buffering=0) as source:
            if (start := source.read(2)) == _JPEG:
                file = BytesIO(start + source.read())
    if isinstance(file, BytesIO):
        _refuse_many_scans(file.getbuffer())
    return Image.open(file, formats=_available_formats())


def _refuse_many_scans(data: memoryview) -> None:
    """Walks the segments of a JPEG file: a small file with many scans can take minutes to decode.

    The compressed data after each scan's segment is searched for the next marker, as in libjpeg,
    which reads no second scan where the first has all components and the image is not progressive.
    """
    if data[:2] != _JPEG:
        return
    scans, position, components = 0, 2, b""
    for _ in range(_MOST_SEGMENTS):
        found = _JPEG_SEGMENT.search(data, position)
        if found is None or found[0] == b"\xff\xd9":
            return
        end = found.end()
        if found[0] in _SEQUENTIAL:
            components = bytes(data[end + 7 : end + 8])
        elif found[0] == b"\xff\xda":
            scans += 1
            if data[end + 2 : end + 3] == components:
                return
        if scans > _MOST_SCANS:
            raise ValueError(f"more than {_MOST_SCANS} scans; save it as a baseline JPEG")
        position = end + max(2, int.from_bytes(data[end : end + 2]))
    raise ValueError(f"more than {_MOST_SEGMENTS:,} segments")


@cache
def _available_formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)


def load_bounded(image: Image.Image) -> None:
    """Decodes an image unless it would take too much memory: small files can have many pixels."""
    width, height = image.size
    if image.format in ("JPEG", "MPO"):
        if width * height > _HALVED_MEGAPIXELS * 1e6:
            image.draft(None, (width // 2, height // 2))
    elif width * height > 1e6 * (most := MEGAPIXELS.get(image.format or "", MOST_MEGAPIXELS)):
        raise ValueError(
            f"{width} x {height} pixels are too many for memory; {image.format} images are limited "
            f"to {most} million"
        )
    image.load()


def upright(image: Image.Image) -> Image.Image:
    """The pixels as every model gets them: rotated as EXIF says, transparent pixels on white, 8-bit
    RGB."""
    if (turn := _TURNS.get(_orientation(image))) is not None:
        image = image.transpose(turn)
    image = _eight_bits(image)
    rgb = _on_white(image) if image.has_transparency_data else image.convert("RGB")
    rgb.info = {}  # `Preprocessing` calls `upright` again, which must not rotate the image twice
    return rgb


def _on_white(image: Image.Image) -> Image.Image:
    """Colors under transparent pixels are often garbage. A few rows at a time, to save memory."""
    canvas = Image.new("RGB", image.size)
    rows = max(1, STRIP // max(1, image.width))
    for top in range(0, image.height, rows):
        part = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = Image.new("RGBA", part.size, "white")
        canvas.paste(Image.alpha_composite(white, part).convert("RGB"), (0, top))
    return canvas


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation; an image with damaged EXIF data is used as it is."""
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except _UNREADABLE:
        return 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """16 bits scaled to 8; Pillow's own conversion would clip at 255."""
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise ValueError("32-bit pixels of unknown range; save it with 8 or 16 bits")
    if not image.mode.startswith("I"):
        return image
    return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))


@contextmanager
def readable(name: str) -> Iterator[None]:
    """Turns whatever decoding raises into one line, and ignores warnings."""
    try:
        with quiet():
            yield
    except VitrailError:
        raise
    except FileNotFoundError:
        raise VitrailError(f"{name} does not exist") from None
    except UnidentifiedImageError:
        if name.lower().endswith((".heic", ".heif")):
            message = f"{name} is a HEIC file, which cannot be decoded; save it as JPEG"
            raise VitrailError(message) from None
        raise VitrailError(f"{name} is not an image") from None
    except MemoryError:
        raise VitrailError(f"{name} cannot be decoded: out of memory") from None
    except _UNREADABLE as error:
        raise VitrailError(f"{name} cannot be decoded: {one_line(error)}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Silences Pillow's warnings about odd metadata and large images, and torchvision's warning
    that its decoders are deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities")
        yield


def in_threads(function: Callable[[int], T], count: int, ahead: int = 32) -> Iterator[T]:
    """`function` of 0, 1, … count - 1, in order; at most `ahead` results wait in memory.

    Decoding, reading and hashing release the interpreter lock.
    """
    # Warning filters are shared by all threads, so they are set here as well.
    with quiet(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for first in range(0, count, ahead):
            yield from pool.map(function, range(first, min(first + ahead, count)))
