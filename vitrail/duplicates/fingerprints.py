"""Perceptual fingerprints of images, 280 bytes each, that survive resizing, compression, brightness
changes and slight crops.

A fingerprint is a digest of all pixels and a gray thumbnail. The 64-bit hash of a thumbnail holds
the signs of its lowest frequencies (a DCT, as in pHash), so that hashes of the same scene differ in
few bits. All of it is linear: the hash that a cropped or mirrored copy would have comes from the
thumbnail of the original by one more matrix.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryFile

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8, UInt64
from PIL import Image

from vitrail.console import Advance
from vitrail.data.dataset import Broken, Source
from vitrail.data.loader import read_all
from vitrail.errors import FailureError, one_line

_SIDE = 16
_DIGEST = 16
_HASH_BITS = 64
_FINEST = 10
"""Highest frequency that thumbnails are compared by; finer detail is lost to a crop."""
_ROOM = 0.13
"""How far below 1 the correlation of two thumbnails may be, for images rich in detail."""
_RICH = 20.0
"""Frequencies over which the content of such an image is spread; photographs have about 25."""
_FLAT = 3.0
"""Images whose thumbnail varies by less, in gray levels, match only if their pixels are equal."""
IN_MEMORY = 1 << 20
"""Images whose thumbnails stay in memory; those of more, at 256 bytes each, go to a file."""


@dataclass(frozen=True)
class Fingerprints:
    """The fingerprints of a source's readable images."""

    source: Source
    indices: Int[np.ndarray, " n"]
    """In the source, in the order they were read."""
    digests: UInt8[np.ndarray, "n 16"]
    thumbnails: UInt8[np.ndarray, "n 256"]
    broken: tuple[Broken, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)


def fingerprints(
    source: Source, *, workers: int = 0, progress: Advance | None = None
) -> Fingerprints:
    """Reads every image once; broken ones are named and left out."""
    count = len(source.targets)
    indices = np.zeros(count, dtype=np.int64)
    digests = np.zeros((count, _DIGEST), dtype=np.uint8)
    thumbnails = _allocate(count)
    broken = {}
    rows = 0
    for index, result in read_all(source, fingerprint, workers=workers, progress=progress):
        if isinstance(result, Broken):
            broken[index] = result
            continue
        indices[rows] = index
        digests[rows], thumbnails[rows] = (np.frombuffer(part, np.uint8) for part in result)
        rows += 1
    return Fingerprints(
        source,
        indices[:rows],
        digests[:rows],
        thumbnails[:rows],
        tuple(broken[index] for index in sorted(broken)),
    )


def _allocate(count: int) -> UInt8[np.ndarray, "n 256"]:
    """Thumbnails in memory, or very many in a temporary file."""
    shape = (count, _SIDE * _SIDE)
    if count <= IN_MEMORY:
        return np.zeros(shape, dtype=np.uint8)
    try:
        with TemporaryFile(prefix="vitrail-") as file:
            return np.asarray(np.memmap(file, dtype=np.uint8, mode="w+", shape=shape))
    except OSError as error:
        raise FailureError(
            f"cannot store the fingerprints of {count:,} images ({one_line(error)}); free some "
            "space, or set TMPDIR to another folder"
        ) from None


def fingerprint(image: Image.Image) -> tuple[bytes, bytes]:
    """Digest and thumbnail. The digest is of the pixels, so format and metadata do not matter."""
    digest = hashlib.sha256(repr(image.size).encode())
    digest.update(image.tobytes())
    small = image.resize((_SIDE, _SIDE), Image.Resampling.BOX).convert("L")
    return digest.digest()[:_DIGEST], small.tobytes()


@dataclass(frozen=True)
class View:
    """A linear map of thumbnails: the identity, a crop or a mirror image."""

    low: Float[np.ndarray, "256 64"]
    """From a thumbnail to the numbers whose signs are the hash."""
    detail: Float[np.ndarray, "256 k"]
    """From a thumbnail to the numbers by which candidates are compared."""


@cache
def views(*, crops: bool, mirrored: bool) -> tuple[View, ...]:
    """The identity, then crops and mirror images."""
    corners = [(0.5, 0.5), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    matrices = [np.eye(_SIDE * _SIDE)]
    if crops:
        matrices += [
            np.kron(_window(part, y), _window(part, x)) for part in (0.95, 0.9) for y, x in corners
        ]
    if mirrored:
        flip = np.kron(np.eye(_SIDE), np.eye(_SIDE)[::-1])
        matrices += [matrix @ flip for matrix in matrices]
    return tuple(_view(matrix) for matrix in matrices)


def _window(part: float, place: float) -> Float[np.ndarray, "16 16"]:
    """One axis of a crop: a part of it, from the beginning (place 0) to the end (place 1)."""
    at = (1 - part) * place * _SIDE + part * (np.arange(_SIDE) + 0.5) - 0.5
    at = at.clip(0, _SIDE - 1)
    low = np.minimum(at.astype(int), _SIDE - 2)
    row, weight = np.arange(_SIDE), at - low
    matrix = np.zeros((_SIDE, _SIDE))
    matrix[row, low], matrix[row, low + 1] = 1 - weight, weight
    return matrix


def _view(matrix: Float[np.ndarray, "256 256"]) -> View:
    """Hash and detail of the thumbnail that `matrix` makes of a thumbnail.

    In the detail, frequencies are weighted by their height, since images have less of the higher
    ones: otherwise a bright spot in the middle of both would be enough to match.
    """
    basis, height = _frequencies()
    # The lowest frequencies differ least between images, so each band of the search gets a third.
    dealt = np.concatenate([basis[start:_HASH_BITS:3] for start in range(3)])
    # Integers have the same sum in any order, hence the same hash on any machine.
    low = np.rint((dealt @ matrix) * (1 << 16)).T
    detail = ((basis * height[:, None])[height <= _FINEST] @ matrix).T
    return View(low, detail.astype(np.float32))


@cache
def _frequencies() -> tuple[Float[np.ndarray, "255 256"], Float[np.ndarray, " 255"]]:
    """The two-dimensional DCT without its constant, lowest frequencies first; and their heights."""
    grid = np.arange(_SIDE)
    cosines = np.cos(np.pi * np.outer(grid, grid + 0.5) / _SIDE)
    cosines /= np.linalg.norm(cosines, axis=1, keepdims=True)
    height = np.hypot(*np.meshgrid(grid, grid, indexing="ij")).ravel()
    order = np.argsort(height, kind="stable")[1:]
    return np.kron(cosines, cosines)[order], height[order]


def hashes(thumbnails: UInt8[np.ndarray, "n 256"], view: View) -> UInt64[np.ndarray, " n"]:
    """The signs of the lowest frequencies of a view of the thumbnails."""
    bits = np.packbits(thumbnails @ view.low > 0, axis=1, bitorder="little")
    return bits.view("<u8")[:, 0]


def same_scene(
    one: UInt8[np.ndarray, "n 256"], view: View, other: UInt8[np.ndarray, "n 256"], plain: View
) -> Bool[np.ndarray, " n"]:
    """Whether a view of each thumbnail correlates with its partner.

    The threshold is closer to 1 for images with little content: a few dark lines on white, or a
    gradient of the sky, correlate by chance.
    """
    first, second = one @ view.detail, other @ plain.detail
    scale = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    correlation = (first * second).sum(1) / np.maximum(scale, 1e-9)
    content = np.minimum(_richness(first), _richness(second)) / _RICH
    return correlation >= 1 - _ROOM * np.minimum(content, 1) ** 2


def _richness(detail: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Over how many frequencies the content of an image is spread (participation ratio)."""
    power = detail**2
    return power.sum(1) ** 2 / np.maximum((power**2).sum(1), 1e-9)


def is_flat(thumbnails: UInt8[np.ndarray, "n 256"]) -> Bool[np.ndarray, " n"]:
    """Images of almost one color, which differ only in noise."""
    return thumbnails.std(1) < _FLAT
