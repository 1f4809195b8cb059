"""All pairs of 64-bit hashes that differ in a few bits, without comparing a million with a million.

Multi-index hashing (Norouzi, Punjani and Fleet 2012): cut the hashes into three bands. Two hashes
that differ in few bits differ in still fewer within one of the bands, so that it is enough to look
up each band of one, with every such change, in a table of the other's.
"""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from jaxtyping import Bool, Int, UInt64

_BANDS = ((0, 22), (22, 21), (43, 21))
"""First bit and number of bits of each band."""
FEW = 1 << 24
"""Comparisons that take no longer than the tables."""
BLOCK = 1 << 16
"""Hashes looked up at a time; this many fit into a processor's cache."""
MOST = 1 << 21
"""Candidates held at a time."""

_IndexPairs = tuple[Int[np.ndarray, " k"], Int[np.ndarray, " k"]]


def near(
    a: UInt64[np.ndarray, " n"], b: UInt64[np.ndarray, " m"], distance: int
) -> Iterator[_IndexPairs]:
    """Every (i, j) with at most `distance` bits between a[i] and b[j], once, some at a time."""
    if len(a) * len(b) <= FEW:
        yield from compare_all(a, b, distance)
    else:
        yield from look_up(a, b, distance)


def compare_all(
    a: UInt64[np.ndarray, " n"], b: UInt64[np.ndarray, " m"], distance: int
) -> Iterator[_IndexPairs]:
    """Compares every hash with every other, which is the fastest way for few of them."""
    rows = max(1, MOST // max(1, len(b)))
    for start in range(0, len(a), rows):
        i, j = np.nonzero(np.bitwise_count(a[start : start + rows, None] ^ b) <= distance)
        if len(i):
            yield i + start, j


def look_up(
    a: UInt64[np.ndarray, " n"], b: UInt64[np.ndarray, " m"], distance: int
) -> Iterator[_IndexPairs]:
    """Looks up each band of `a` in a table of the bands of `b`."""
    radii = band_radii(distance)
    for band, (first, bits) in enumerate(_BANDS):
        if radii[band] < 0:
            continue
        codes_a, codes_b = _band_of(a, first, bits), _band_of(b, first, bits)
        # In this order, hashes that are looked up together are close together in the table.
        order_a, order_b = (np.argsort(codes, kind="stable") for codes in (codes_a, codes_b))
        table = _Table(codes_b, bits)
        sorted_b = b[order_b]
        every = list(_changes(bits, radii[band]))
        for start in range(0, len(a), BLOCK):
            rows = order_a[start : start + BLOCK]
            hashes, codes = a[rows], codes_a[rows]
            for change in every:
                for i, j in table.find(codes ^ change):
                    keep = _is_first(hashes[i] ^ sorted_b[j], band, radii, distance)
                    if keep.any():
                        yield rows[i[keep]], order_b[j[keep]]


def band_radii(distance: int) -> list[int]:
    """How many bits may change within each band: if each had one more, the sum would exceed
    `distance`. Minus one: the other bands find every pair."""
    spare = distance + 1 - len(_BANDS)
    return [(spare + band) // len(_BANDS) for band in range(len(_BANDS))]


def _band_of(hashes: UInt64[np.ndarray, " n"], first: int, bits: int) -> Int[np.ndarray, " n"]:
    """Some consecutive bits, as a number."""
    return ((hashes >> np.uint64(first)) & np.uint64((1 << bits) - 1)).astype(np.int64)


def _changes(bits: int, radius: int) -> Iterator[int]:
    """Numbers with at most `radius` of the bits set."""
    for count in range(radius + 1):
        for chosen in combinations(range(bits), count):
            yield sum(1 << bit for bit in chosen)


class _Table:
    """Finds the positions of each code in the sorted list of all codes."""

    def __init__(self, codes: Int[np.ndarray, " m"], bits: int) -> None:
        count = np.bincount(codes, minlength=1 << bits)
        # Most codes are absent: looking into a small table first is what makes this fast.
        self.present = count > 0
        self.count = count.astype(np.int32)
        self.begin = (np.cumsum(count) - count).astype(np.int32)

    def find(self, codes: Int[np.ndarray, " n"]) -> Iterator[_IndexPairs]:
        """Positions in `codes`, and those of equal codes in the sorted list, some at a time."""
        rows = np.flatnonzero(self.present[codes])
        count, begin = self.count[codes[rows]], self.begin[codes[rows]]
        ends = np.cumsum(count, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        cuts = np.searchsorted(ends, np.arange(MOST, total, MOST))
        for some in np.split(np.arange(len(rows)), cuts):
            row, shift = repeated(count[some])
            yield rows[some][row], begin[some][row] + shift


def repeated(count: Int[np.ndarray, " n"]) -> _IndexPairs:
    """For counts [2, 0, 3]: [0, 0, 2, 2, 2] and [0, 1, 0, 1, 2]."""
    row = np.repeat(np.arange(len(count)), count)
    starts = np.cumsum(count, dtype=np.int64) - count
    return row, np.arange(len(row)) - starts[row]


def _is_first(
    difference: UInt64[np.ndarray, " k"], band: int, radii: list[int], distance: int
) -> Bool[np.ndarray, " k"]:
    """Which pairs are near enough and were not found by an earlier band."""
    keep = np.bitwise_count(difference) <= distance
    for (first, bits), radius in zip(_BANDS[:band], radii[:band], strict=True):
        mask = np.uint64(((1 << bits) - 1) << first)
        keep &= np.bitwise_count(difference & mask) > radius
    return keep
