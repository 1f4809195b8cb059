"""Time and memory of finding duplicates among many pictures, with synthetic fingerprints.

    python benchmarks/duplicates.py [--pictures 1000000] [--others 1000000] [--planted 1000]

Compares two sets, or with --others 0 one set with itself. Reading and decoding the pictures, which
takes a dataset most of the time, is left out: what is measured is the search alone. Some pictures
of the first set are planted, with noise, among the others; the script says how many were found.
"""

import argparse
import resource
import time

import numpy as np

from vitrail.data.dataset import ArraySource
from vitrail.duplicates.fingerprints import Fingerprints
from vitrail.duplicates.matching import match


def synthetic(thumbnails: np.ndarray, chance: np.random.Generator) -> Fingerprints:
    """Fingerprints of pictures that do not exist."""
    n = len(thumbnails)
    names = [str(i) for i in range(n)]
    source = ArraySource(("none",), np.zeros(n, dtype=np.int64), names, np.zeros((0, 1, 1)))
    return Fingerprints(
        source,
        np.arange(n),
        chance.integers(0, 256, (n, 16), dtype=np.uint8),
        thumbnails,
    )


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=1_000_000)
    parser.add_argument("--others", type=int, default=1_000_000)
    parser.add_argument("--planted", type=int, default=1000)
    parser.add_argument("--crops", action="store_true", help="crops as well, as the verb does")
    arguments = parser.parse_args()
    chance = np.random.default_rng(0)
    a = chance.integers(0, 256, (arguments.pictures, 256), dtype=np.uint8)
    count = arguments.others or arguments.planted
    b = chance.integers(0, 256, (count, 256), dtype=np.uint8)
    chosen = chance.permutation(len(a))[: arguments.planted]
    noise = chance.integers(0, 3, (len(chosen), 256), dtype=np.uint8)
    b[: len(chosen)] = np.minimum(a[chosen], 253) + noise
    one = synthetic(np.concatenate([a, b]) if not arguments.others else a, chance)
    two = synthetic(b, chance) if arguments.others else None
    del a, b
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    found = match(one, two, crops=arguments.crops)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{len(one):,} pictures against {len(two) if two else 'themselves'}, "
        f"crops {arguments.crops}: {len(found):,} pairs "
        f"(planted {len(chosen):,}) in {seconds:.0f} s, peak {peak / 2**20:.2f} GiB "
        f"(before the search {before / 2**20:.2f} GiB)"
    )


if __name__ == "__main__":
    main()
