"""Matches images of one set, or of two, by digest, then by hash and thumbnail."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt8, UInt64

from vitrail.duplicates.fingerprints import Fingerprints, View, hashes, is_flat, same_scene, views
from vitrail.duplicates.hamming import near, repeated

MOST = 1_000_000
"""Pairs that are recorded; beyond, only those of an image that has none yet."""
_CHUNK = 1 << 14
EXACT = -1

Rows = Int[np.ndarray, " k"]
_Matches = Int[np.ndarray, "_ 3"]
"""Row of the one, row of the other, and the bits between their hashes, or EXACT."""


@dataclass(frozen=True)
class _Distinct:
    """The different images of a set."""

    thumbnails: UInt8[np.ndarray, "n 256"]
    digests: np.ndarray
    """Sorted, each once."""
    first: Int[np.ndarray, " m"]
    """The first row that holds it."""
    group: Int[np.ndarray, " n"]
    """For each row, which image it holds."""
    uneven: Int[np.ndarray, " u"]
    """First rows of the images that are not flat."""

    def hashes(self, view: View) -> UInt64[np.ndarray, " u"]:
        """The hashes of a view of the images that are not flat."""
        return _chunked(lambda some: hashes(some, view), self.thumbnails, self.uneven)

    def rows(self, first: Int[np.ndarray, " some"]) -> tuple[Rows, Rows]:
        """All rows of the images with these first rows, after the position of each in `first`."""
        order = np.argsort(self.group, kind="stable")
        starts = np.concatenate([[0], np.cumsum(np.bincount(self.group))])
        groups = self.group[first]
        position, shift = repeated(starts[groups + 1] - starts[groups])
        return position, order[starts[groups][position] + shift]


def _distinct(prints: Fingerprints) -> _Distinct:
    keys = prints.digests.view(f"S{prints.digests.shape[1]}").reshape(-1)
    digests, first, group = np.unique(keys, return_index=True, return_inverse=True)
    flat = _chunked(is_flat, prints.thumbnails, first)
    return _Distinct(prints.thumbnails, digests, first, group, first[~flat.astype(bool)])


def _chunked(
    function: Callable[[np.ndarray], np.ndarray], thumbnails: UInt8[np.ndarray, "n 256"], rows: Rows
) -> np.ndarray:
    """A function of thumbnails, a few at a time: all of them as floats would not fit."""
    starts = range(0, max(len(rows), 1), _CHUNK)
    return np.concatenate([function(thumbnails[rows[i : i + _CHUNK]]) for i in starts])


def match(
    a: Fingerprints, b: Fingerprints | None = None, *, distance: int, crops: bool, mirrored: bool
) -> _Matches:
    """Pairs of rows that are duplicates, within one set or across two.

    Among images with equal pixels each is paired with one of the others, so that a thousand
    copies make a thousand pairs, not half a million.
    """
    all_views = views(crops=crops, mirrored=mirrored)
    one = _distinct(a)
    if b is None:
        copies = np.flatnonzero(one.first[one.group] != np.arange(len(a)))
        exact = _triples(one.first[one.group[copies]], copies, EXACT)
        return np.concatenate([exact, _search(one, None, all_views, distance)])
    two = _distinct(b)
    _, i, j = np.intersect1d(one.digests, two.digests, assume_unique=True, return_indices=True)
    exact = _triples(one.first[i], two.first[j], EXACT)
    found = _merge([exact, _search(one, two, all_views, distance)])
    position_a, rows_a = one.rows(found[:, 0])
    position_b, rows_b = two.rows(found[:, 1])
    return _merge(
        [
            _triples(rows_a, found[position_a, 1], found[position_a, 2]),
            _triples(found[position_b, 0], rows_b, found[position_b, 2]),
        ]
    )


def _search(
    one: _Distinct, two: _Distinct | None, all_views: Sequence[View], distance: int
) -> _Matches:
    """Near duplicates: each view of one set is compared with the other as it is."""
    plain = all_views[0]
    rounds = [(one, one if two is None else two, view, False) for view in all_views]
    if two is not None:
        rounds += [(two, one, view, True) for view in all_views[1:]]
    known = {id(side): side.hashes(plain) for side in (one, two) if side is not None}
    pairs = _Pairs(len(one.group), None if two is None else len(two.group))
    for left, right, view, swapped in rounds:
        for i, j in near(left.hashes(view), known[id(right)], distance):
            i, j = left.uneven[i], right.uneven[j]
            new = pairs.is_new(*((j, i) if swapped else (i, j)))
            i, j = i[new], j[new]
            images, others = left.thumbnails[i], right.thumbnails[j]
            good = same_scene(images, view, others, plain)
            bits = np.bitwise_count(hashes(images[good], view) ^ hashes(others[good], plain))
            i, j = i[good], j[good]
            pairs.add(_triples(j, i, bits) if swapped else _triples(i, j, bits))
        pairs.tidy()
    return _merge(pairs.found)


class _Pairs:
    """Pairs as they are found, never many more than MOST."""

    def __init__(self, ones: int, others: int | None) -> None:
        self.inside = others is None
        self.found: list[_Matches] = []
        self.count = 0
        self.named = np.zeros(ones, dtype=bool)
        self.named_others = self.named if others is None else np.zeros(others, dtype=bool)

    def is_new(self, i: Rows, j: Rows) -> Bool[np.ndarray, " k"]:
        """Which pairs to compare by thumbnail."""
        new = i != j if self.inside else np.ones(len(i), dtype=bool)
        return new if self.count < MOST else new & ~(self.named[i] & self.named_others[j])

    def add(self, pairs: _Matches) -> None:
        if not len(pairs):
            return
        if self.inside:
            pairs[:, :2] = np.sort(pairs[:, :2], axis=1)
        self.named[pairs[:, 0]] = True
        self.named_others[pairs[:, 1]] = True
        self.found.append(pairs)
        self.count += len(pairs)

    def tidy(self) -> None:
        """Drops pairs that were found again in another view."""
        self.found = [_merge(self.found)]
        self.count = len(self.found[0])


def _triples(i: Rows, j: Rows, bits: Rows | np.ndarray | int) -> _Matches:
    return np.stack([i, j, np.broadcast_to(bits, i.shape)], axis=1).astype(np.int64)


def _merge(found: list[_Matches]) -> _Matches:
    """Each pair once, with its smallest distance."""
    rows = np.concatenate([np.zeros((0, 3), dtype=np.int64), *found])
    rows = rows[np.lexsort(rows.T[::-1])]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:, :2] != rows[:-1, :2]).any(1)
    return rows[new]
