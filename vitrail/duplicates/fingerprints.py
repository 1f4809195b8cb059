"""What an image looks like, in 280 bytes: enough to know it again after it was rescaled,
compressed, brightened or cropped a little.

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

from vitrail.data.dataset import Broken, Source
from vitrail.data.reading import Progress, read_all
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
"""Images whose thumbnail varies by less, in gray levels, look alike only to the last pixel."""
IN_MEMORY = 1 << 20
"""Images whose thumbnails stay in memory; those of more, at 256 bytes each, go to a file."""


@dataclass(frozen=True)
class Fingerprints:
    """The readable images of a source, by looks."""

    source: Source
    indices: Int[np.ndarray, " n"]
    """Their numbers in the source, in the order they were read."""
    digests: UInt8[np.ndarray, "n 16"]
    thumbnails: UInt8[np.ndarray, "n 256"]
    broken: tuple[Broken, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)


def fingerprints(source: Source, *, workers: int = 0, progress: Progress = None) -> Fingerprints:
    """Read every image once, in the order they lie in; the broken ones are named and left out."""
    count = len(source.targets)
    indices = np.zeros(count, dtype=np.int64)
    digests = np.zeros((count, _DIGEST), dtype=np.uint8)
    thumbnails = _room_for(count)
    broken = {}
    rows = 0
    for index, seen in read_all(source, fingerprint, workers=workers, progress=progress):
        if isinstance(seen, Broken):
            broken[index] = seen
            continue
        indices[rows] = index
        digests[rows], thumbnails[rows] = (np.frombuffer(part, np.uint8) for part in seen)
        rows += 1
    return Fingerprints(
        source,
        indices[:rows],
        digests[:rows],
        thumbnails[:rows],
        tuple(broken[index] for index in sorted(broken)),
    )


def _room_for(count: int) -> UInt8[np.ndarray, "n 256"]:
    """Room for thumbnails: in memory, or for very many in a file that vanishes with them."""
    shape = (count, _SIDE * _SIDE)
    if count <= IN_MEMORY:
        return np.zeros(shape, dtype=np.uint8)
    try:
        with TemporaryFile(prefix="vitrail-") as file:
            return np.asarray(np.memmap(file, dtype=np.uint8, mode="w+", shape=shape))
    except OSError as error:
        raise FailureError(
            f"cannot keep the fingerprints of {count:,} images ({one_line(error)}); free some "
            "space, or name another place in TMPDIR"
        ) from None


def fingerprint(image: Image.Image) -> tuple[bytes, bytes]:
    """Digest and thumbnail. The digest is one of pixels: the same image in another container, or
    with other metadata, has the same."""
    digest = hashlib.sha256(repr(image.size).encode())
    digest.update(image.tobytes())
    small = image.resize((_SIDE, _SIDE), Image.Resampling.BOX).convert("L")
    return digest.digest()[:_DIGEST], small.tobytes()


@dataclass(frozen=True)
class View:
    """The image itself, or what else may have been made of it: a crop, a mirror image."""

    low: Float[np.ndarray, "256 64"]
    """From a thumbnail to the numbers whose signs are the hash."""
    detail: Float[np.ndarray, "256 k"]
    """From a thumbnail to what it is compared by in the end."""


@cache
def views(*, crops: bool, mirrored: bool) -> tuple[View, ...]:
    """The ways to see an image, beginning with the image as it is."""
    places = [(0.5, 0.5), (0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)]
    seen = [np.eye(_SIDE * _SIDE)]
    if crops:
        seen += [
            np.kron(_window(part, y), _window(part, x)) for part in (0.95, 0.9) for y, x in places
        ]
    if mirrored:
        flip = np.kron(np.eye(_SIDE), np.eye(_SIDE)[::-1])
        seen += [matrix @ flip for matrix in seen]
    return tuple(_view(matrix) for matrix in seen)


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
    """What to compute from the thumbnail of an image for the thumbnail that `matrix` makes of it.

    In the detail, each frequency is scaled up by its height, since images have less of the higher
    ones: otherwise a bright spot in the middle would be enough to look alike.
    """
    basis, height = _frequencies()
    # The lowest frequencies differ least between images: dealt out among the bands of the search.
    dealt = np.concatenate([basis[start:_HASH_BITS:3] for start in range(3)])
    # Whole numbers sum to the same in any order, hence to the same hash on any machine.
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


def hashes(thumbnails: UInt8[np.ndarray, "n 256"], seen: View) -> UInt64[np.ndarray, " n"]:
    """The signs of the lowest frequencies of images, seen in one way."""
    bits = np.packbits(thumbnails @ seen.low > 0, axis=1, bitorder="little")
    return bits.view("<u8")[:, 0]


def look_alike(
    one: UInt8[np.ndarray, "n 256"], one_seen: View, other: UInt8[np.ndarray, "n 256"], plain: View
) -> Bool[np.ndarray, " n"]:
    """Whether each thumbnail, seen in one way, agrees with its partner.

    The correlation to reach comes nearer to 1 for images with little in them: a few dark lines
    on white, or a sky that fades, agree by chance.
    """
    first, second = one @ one_seen.detail, other @ plain.detail
    scale = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    correlation = (first * second).sum(1) / np.maximum(scale, 1e-9)
    content = np.minimum(_richness(first), _richness(second)) / _RICH
    return correlation >= 1 - _ROOM * np.minimum(content, 1) ** 2


def _richness(detail: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Over how many frequencies the content of an image is spread (participation ratio)."""
    power = detail**2
    return power.sum(1) ** 2 / np.maximum((power**2).sum(1), 1e-9)


def is_flat(thumbnails: UInt8[np.ndarray, "n 256"]) -> Bool[np.ndarray, " n"]:
    """Images of almost one color: what is left to compare in them is noise."""
    return thumbnails.std(1) < _FLAT
