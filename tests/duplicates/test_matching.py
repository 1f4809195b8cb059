"""Pairs of rows, within one set and across two."""

import tracemalloc

import numpy as np
from PIL import Image

from tests.data.gallery import gallery, scene
from vitrail.duplicates import matching
from vitrail.duplicates.fingerprints import Fingerprints, fingerprints
from vitrail.duplicates.matching import EXACT, match


def matched(a: Fingerprints, b: Fingerprints | None = None) -> list[tuple[int, int, bool]]:
    found = match(a, b, crops=False)
    return sorted((i, j, bits == EXACT) for i, j, bits in found.tolist())


def prints(*images: Image.Image) -> Fingerprints:
    return fingerprints(gallery(images))


def noisy(image: Image.Image, seed: int) -> Image.Image:
    """Other pixels, the same picture."""
    noise = np.random.default_rng(seed).integers(-2, 3, (image.height, image.width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def test_strangers_are_not_paired():
    assert matched(prints(*(scene(seed) for seed in range(40)))) == []
    assert matched(prints(scene(0), scene(1)), prints(scene(2))) == []


def test_copies_are_paired_with_the_first_of_them_alone():
    copies = [scene(0)] * 50
    assert matched(prints(scene(1), *copies)) == [(1, j, True) for j in range(2, 51)]


def test_every_copy_in_either_set_is_named():
    a, b = prints(scene(0), scene(1), scene(0), scene(0)), prints(scene(2), scene(0), scene(0))
    assert matched(a, b) == [(0, 1, True), (0, 2, True), (2, 1, True), (3, 1, True)]


def test_copies_of_what_looks_alike_are_named_too():
    a, b = prints(scene(0), scene(1), scene(0)), prints(noisy(scene(0), 0))
    assert matched(a, b) == [(0, 0, False), (2, 0, False)]
    assert matched(b, a) == [(0, 0, False), (0, 2, False)]


def test_inside_one_set_a_pair_is_told_once():
    assert matched(prints(noisy(scene(0), 0), scene(1), scene(0))) == [(0, 2, False)]


def test_white_pictures_are_not_alike_by_accident():
    def white(seed: int) -> Image.Image:
        return noisy(Image.new("RGB", (64, 64), (250, 250, 250)), seed)

    assert matched(prints(*(white(seed) for seed in range(30)))) == []
    assert matched(prints(white(0), white(1), white(0))) == [(0, 2, True)]


def test_a_fading_sky_is_not_every_fading_sky():
    def sky(slope: float) -> Image.Image:
        rows = np.linspace(40, 40 + slope, 64)[:, None, None] + np.zeros((64, 64, 3))
        return noisy(Image.fromarray(rows.astype(np.uint8)), int(slope))

    alike = matched(prints(*(sky(slope) for slope in np.linspace(60, 200, 30))))
    assert len(alike) < 5


def test_beyond_a_limit_every_picture_is_still_named(monkeypatch):
    alike = prints(*(noisy(scene(0), seed) for seed in range(30)))
    everything = matched(alike)
    assert len(everything) == 30 * 29 // 2
    monkeypatch.setattr(matching, "MOST", 1)
    monkeypatch.setattr("vitrail.duplicates.hamming.MOST", 16)
    monkeypatch.setattr("vitrail.duplicates.hamming.BLOCK", 4)
    limited = matched(alike)
    assert len(limited) < 200
    assert set(limited) < set(everything)
    assert {row for i, j, _ in limited for row in (i, j)} == set(range(30))


def test_many_pictures_are_searched_in_little_more_memory_than_their_fingerprints():
    """A million against a million: benchmarks/duplicates.py."""
    chance = np.random.default_rng(0)
    sets = []
    for _ in range(2):
        thumbnails = chance.integers(0, 256, (60_000, 256), dtype=np.uint8)
        digests = chance.integers(0, 256, (60_000, 16), dtype=np.uint8)
        sets.append(Fingerprints(gallery([]), np.arange(60_000), digests, thumbnails))
    a, b = sets
    b.thumbnails[:50] = a.thumbnails[100:150] ^ 1
    b.digests[50:60] = a.digests[:10]
    tracemalloc.start()
    found = matched(a, b)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [
        *((i, i + 50, True) for i in range(10)),
        *((i + 100, i, False) for i in range(50)),
    ]
    # Their own 34 MB are not counted; all pairs at a byte each would take 3.6 GB.
    assert peak < 150e6


def test_empty_sets_have_no_pairs():
    assert matched(prints()) == []
    assert matched(prints(), prints(scene(0))) == []
    assert matched(prints(scene(0)), prints()) == []
