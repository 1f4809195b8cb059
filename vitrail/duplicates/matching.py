"""Matches images of one set, or of two, by digest, then by hash and thumbnail.

Images with equal pixels form a group, and only the first row of a group, its representative, is
searched for. For example, if the rows 0, 1, 2, 3 of a set show the images B, A, B, C:

    digests          [A, B, C]     one per group, sorted
    representatives  [1, 0, 3]     the first row of each group
    group_of_row     [1, 0, 1, 2]  the group of each row

Within the set, row 2 is an exact duplicate of row 0, and near duplicates are searched among rows
1, 0 and 3. If row 5 of another set is near image B, the search finds the pair (0, 5), and all rows
of the group are paired with it: (0, 5) and (2, 5).
"""

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
_DISTANCE = 8
"""Bits of the 64-bit hashes that may differ. With more than 12, the search would take hours for a
million images and find unrelated ones."""

Rows = Int[np.ndarray, " k"]
_Matches = Int[np.ndarray, "_ 3"]
"""A row of the first set, a row of the second, and the bits between their hashes, or EXACT."""


@dataclass(frozen=True)
class _Groups:
    """A set of images, grouped by equal pixels."""

    thumbnails: UInt8[np.ndarray, "n 256"]
    digests: np.ndarray
    """Of each group, sorted."""
    representatives: Int[np.ndarray, " groups"]
    """The first row of each group."""
    group_of_row: Int[np.ndarray, " n"]
    searched: Int[np.ndarray, " searched"]
    """The representatives that are not flat."""

    def hashes(self, view: View) -> UInt64[np.ndarray, " searched"]:
        """The hashes of a view of the searched images."""
        return _chunked(lambda some: hashes(some, view), self.thumbnails, self.searched)

    def members(self, representatives: Int[np.ndarray, " some"]) -> tuple[Rows, Rows]:
        """All rows of the groups of some representatives, after the position of each one's
        representative: for [0, 3] in the example above, [0, 0, 1] and [0, 2, 3]."""
        rows_by_group = np.argsort(self.group_of_row, kind="stable")
        group_starts = np.concatenate([[0], np.cumsum(np.bincount(self.group_of_row))])
        groups = self.group_of_row[representatives]
        positions, shifts = repeated(group_starts[groups + 1] - group_starts[groups])
        return positions, rows_by_group[group_starts[groups][positions] + shifts]


def _grouped(prints: Fingerprints) -> _Groups:
    keys = prints.digests.view(f"S{prints.digests.shape[1]}").reshape(-1)
    digests, representatives, group_of_row = np.unique(keys, return_index=True, return_inverse=True)
    flat = _chunked(is_flat, prints.thumbnails, representatives).astype(bool)
    searched = representatives[~flat]
    return _Groups(prints.thumbnails, digests, representatives, group_of_row, searched)


def _chunked(
    function: Callable[[np.ndarray], np.ndarray], thumbnails: UInt8[np.ndarray, "n 256"], rows: Rows
) -> np.ndarray:
    """A function of thumbnails, a few at a time: all of them as floats would not fit."""
    starts = range(0, max(len(rows), 1), _CHUNK)
    return np.concatenate([function(thumbnails[rows[i : i + _CHUNK]]) for i in starts])


def match(
    a: Fingerprints, b: Fingerprints | None = None, *, crops: bool = True, mirrored: bool = False
) -> _Matches:
    """Pairs of rows that are duplicates, within one set or across two; one image may be a crop of
    the other, by up to a tenth of each side, or its mirror image.

    Among images with equal pixels each is paired with one of the others, so that a thousand
    copies make a thousand pairs, not half a million.
    """
    all_views = views(crops=crops, mirrored=mirrored)
    groups_a = _grouped(a)
    if b is None:
        representative_of_row = groups_a.representatives[groups_a.group_of_row]
        copies = np.flatnonzero(representative_of_row != np.arange(len(a)))
        exact = _triples(representative_of_row[copies], copies, EXACT)
        return np.concatenate([exact, _search(groups_a, None, all_views)])
    groups_b = _grouped(b)
    _, shared_a, shared_b = np.intersect1d(
        groups_a.digests, groups_b.digests, assume_unique=True, return_indices=True
    )
    exact = _triples(groups_a.representatives[shared_a], groups_b.representatives[shared_b], EXACT)
    pairs = _merge([exact, _search(groups_a, groups_b, all_views)])
    pairs_of_a, rows_a = groups_a.members(pairs[:, 0])
    pairs_of_b, rows_b = groups_b.members(pairs[:, 1])
    return _merge(
        [
            _triples(rows_a, pairs[pairs_of_a, 1], pairs[pairs_of_a, 2]),
            _triples(pairs[pairs_of_b, 0], rows_b, pairs[pairs_of_b, 2]),
        ]
    )


def _search(groups_a: _Groups, groups_b: _Groups | None, all_views: Sequence[View]) -> _Matches:
    """Near duplicates among representatives: every view (whole, cropped, mirrored) of the images of
    one set is compared with the whole images of the other, then the other way around."""
    whole = all_views[0]
    rounds = [(groups_a, groups_a if groups_b is None else groups_b, view) for view in all_views]
    if groups_b is not None:
        rounds += [(groups_b, groups_a, view) for view in all_views[1:]]
    sides = [groups_a] if groups_b is None else [groups_a, groups_b]
    whole_hashes = {id(side): side.hashes(whole) for side in sides}
    pairs = _PairList([len(side.group_of_row) for side in sides])
    for viewed, other, view in rounds:
        swapped = viewed is groups_b
        for viewed_at, other_at in near(viewed.hashes(view), whole_hashes[id(other)], _DISTANCE):
            rows, other_rows = viewed.searched[viewed_at], other.searched[other_at]
            new = pairs.is_new(*((other_rows, rows) if swapped else (rows, other_rows)))
            rows, other_rows = rows[new], other_rows[new]
            images, other_images = viewed.thumbnails[rows], other.thumbnails[other_rows]
            same = same_scene(images, view, other_images, whole)
            bits = np.bitwise_count(hashes(images[same], view) ^ hashes(other_images[same], whole))
            triples = _triples(rows[same], other_rows[same], bits)
            pairs.add(triples[:, [1, 0, 2]] if swapped else triples)
        pairs.drop_repeated()
    return _merge(pairs.batches)


class _PairList:
    """Pairs as they are found, never many more than MOST."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.within_one_set = len(sizes) == 1
        self.batches: list[_Matches] = []
        self.count = 0
        has_pair = [np.zeros(size, dtype=bool) for size in sizes]
        self.has_pair_a, self.has_pair_b = has_pair[0], has_pair[-1]

    def is_new(self, rows_a: Rows, rows_b: Rows) -> Bool[np.ndarray, " k"]:
        """Which pairs to compare by thumbnail."""
        new = rows_a != rows_b if self.within_one_set else np.ones(len(rows_a), dtype=bool)
        if self.count < MOST:
            return new
        return new & ~(self.has_pair_a[rows_a] & self.has_pair_b[rows_b])

    def add(self, pairs: _Matches) -> None:
        if not len(pairs):
            return
        if self.within_one_set:
            pairs[:, :2] = np.sort(pairs[:, :2], axis=1)
        self.has_pair_a[pairs[:, 0]] = True
        self.has_pair_b[pairs[:, 1]] = True
        self.batches.append(pairs)
        self.count += len(pairs)

    def drop_repeated(self) -> None:
        """Drops pairs that were found again in another view."""
        self.batches = [_merge(self.batches)]
        self.count = len(self.batches[0])


def _triples(rows_a: Rows, rows_b: Rows, bits: np.ndarray | int) -> _Matches:
    return np.stack([rows_a, rows_b, np.broadcast_to(bits, rows_a.shape)], 1).astype(np.int64)


def _merge(batches: list[_Matches]) -> _Matches:
    """Each pair once, with its smallest distance."""
    pairs = np.concatenate([np.zeros((0, 3), dtype=np.int64), *batches])
    pairs = pairs[np.lexsort(pairs.T[::-1])]
    new = np.ones(len(pairs), dtype=bool)
    new[1:] = (pairs[1:, :2] != pairs[:-1, :2]).any(1)
    return pairs[new]
