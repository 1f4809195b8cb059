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
"""First bit and number of bits."""
FEW = 1 << 24
"""Comparisons that take no longer than the tables."""
BLOCK = 1 << 16
"""Hashes looked up at a time; these many stay in a processor's cache."""
MOST = 1 << 21
"""Candidates held at a time."""

_Found = tuple[Int[np.ndarray, " k"], Int[np.ndarray, " k"]]


def near(
    a: UInt64[np.ndarray, " n"], b: UInt64[np.ndarray, " m"], distance: int
) -> Iterator[_Found]:
    """Every (i, j) with at most `distance` bits between a[i] and b[j], once, some at a time."""
    if len(a) * len(b) <= FEW:
        yield from compare_all(a, b, distance)
    else:
        yield from look_up(a, b, distance)


def compare_all(
    a: UInt64[np.ndarray, " n"], b: UInt64[np.ndarray, " m"], distance: int
) -> Iterator[_Found]:
    """For few hashes the plain way is the fastest."""
    rows = max(1, MOST // max(1, len(b)))
    for start in range(0, len(a), rows):
        i, j = np.nonzero(np.bitwise_count(a[start : start + rows, None] ^ b) <= distance)
        if len(i):
            yield i + start, j


def look_up(
    a: UInt64[np.ndarray, " n"], b: UInt64[np.ndarray, " m"], distance: int
) -> Iterator[_Found]:
    """For many, each band of one in tables of the other's."""
    radii = band_radii(distance)
    for band, (first, bits) in enumerate(_BANDS):
        if radii[band] < 0:
            continue
        codes_a, codes_b = _band_of(a, first, bits), _band_of(b, first, bits)
        # In this order, hashes that are looked up together lie together in the table.
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
    """Where each code lies among all codes in their order."""

    def __init__(self, codes: Int[np.ndarray, " m"], bits: int) -> None:
        count = np.bincount(codes, minlength=1 << bits)
        # Most codes are not there: asking a small table first is what makes this fast.
        self.there = count > 0
        self.count = count.astype(np.int32)
        self.begin = (np.cumsum(count) - count).astype(np.int32)

    def find(self, codes: Int[np.ndarray, " n"]) -> Iterator[_Found]:
        """Positions in `codes` beside those of equal codes in the order, some at a time."""
        rows = np.flatnonzero(self.there[codes])
        count, begin = self.count[codes[rows]], self.begin[codes[rows]]
        ends = np.cumsum(count, dtype=np.int64)
        total = int(ends[-1]) if len(ends) else 0
        cuts = np.searchsorted(ends, np.arange(MOST, total, MOST))
        for some in np.split(np.arange(len(rows)), cuts):
            row, shift = repeated(count[some])
            yield rows[some][row], begin[some][row] + shift


def repeated(count: Int[np.ndarray, " n"]) -> _Found:
    """0 … n-1, each as often as `count` says, beside 0, 1, 2 … within each run."""
    row = np.repeat(np.arange(len(count)), count)
    starts = np.cumsum(count, dtype=np.int64) - count
    return row, np.arange(len(row)) - starts[row]


def _is_first(
    difference: UInt64[np.ndarray, " k"], band: int, radii: list[int], distance: int
) -> Bool[np.ndarray, " k"]:
    """Near enough, and not found by an earlier band already."""
    keep = np.bitwise_count(difference) <= distance
    for (first, bits), radius in zip(_BANDS[:band], radii[:band], strict=True):
        mask = np.uint64(((1 << bits) - 1) << first)
        keep &= np.bitwise_count(difference & mask) > radius
    return keep
