"""The search for near hashes, against comparing all with all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.duplicates import hamming
from vitrail.duplicates.hamming import compare_all, look_up, near


def brute_force(a: np.ndarray, b: np.ndarray, distance: int) -> list[tuple[int, int]]:
    i, j = np.nonzero(np.bitwise_count(a[:, None] ^ b[None, :]) <= distance)
    return list(zip(i.tolist(), j.tolist(), strict=True))


def found(a: np.ndarray, b: np.ndarray, distance: int, search=look_up) -> list[tuple[int, int]]:
    pairs = [zip(i.tolist(), j.tolist(), strict=True) for i, j in search(a, b, distance)]
    return sorted(pair for some in pairs for pair in some)


def related(seed: int, most_bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Random hashes, and others that differ from some of them in a few bits."""
    generator = np.random.default_rng(seed)
    a = generator.integers(0, 2**64, generator.integers(0, 60), dtype=np.uint64)
    b = [generator.integers(0, 2**64, 10, dtype=np.uint64)]
    for _ in range(60 if len(a) else 0):
        flipped = generator.permutation(64)[: generator.integers(0, most_bits + 1)]
        mask = sum(1 << int(bit) for bit in flipped)
        b.append(generator.choice(a, 1) ^ np.uint64(mask))
    return a, np.concatenate(b)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 8))
def test_every_near_pair_is_found_once_and_no_other(seed, distance):
    a, b = related(seed, distance + 3)
    assert found(a, b, distance) == brute_force(a, b, distance)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2**64 - 1), max_size=12),
    st.lists(st.integers(0, 2**64 - 1), max_size=12),
    st.integers(0, 8),
)
def test_hashes_of_any_kind_are_compared(a, b, distance):
    one, two = np.array(a, dtype=np.uint64), np.array(b, dtype=np.uint64)
    assert found(one, two, distance) == brute_force(one, two, distance)


def test_the_farthest_distance_is_exact_too():
    a, b = related(0, 16)
    expected = brute_force(a, b, 12)
    assert len(expected) > 20
    assert found(a, b, 12) == expected


@pytest.mark.parametrize("most", [1, 7, 100])
def test_many_equal_hashes_are_paired_piece_by_piece(monkeypatch, most):
    monkeypatch.setattr(hamming, "MOST", most)
    monkeypatch.setattr(hamming, "BLOCK", 8)
    a = np.array([5] * 20 + [4, 2**63], dtype=np.uint64)
    b = np.array([5] * 9 + [7], dtype=np.uint64)
    assert found(a, b, 1) == brute_force(a, b, 1)


def test_few_hashes_are_compared_all_with_all(monkeypatch):
    monkeypatch.setattr(hamming, "MOST", 100)
    a, b = related(1, 10)
    assert found(a, b, 6, compare_all) == brute_force(a, b, 6)


def test_many_hashes_go_through_the_tables():
    a, b = related(2, 4)
    strangers = np.random.default_rng(0).integers(0, 2**64, 1 << 19, dtype=np.uint64)
    many = np.concatenate([b, strangers])
    assert len(a) * len(many) > hamming.FEW
    assert set(brute_force(a, b, 3)) <= set(found(a, many, 3, near))
    assert found(a, many, 3, near) == found(a, many, 3, compare_all)


@pytest.mark.parametrize("distance", range(13))
def test_the_radii_of_the_bands_leave_no_gap(distance):
    # A pair that every band misses has at least one bit more than its radius in each of them.
    assert sum(radius + 1 for radius in hamming.band_radii(distance)) == distance + 1
