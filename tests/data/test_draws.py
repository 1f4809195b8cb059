import torch

from vitrail.data.draws import derive_seed, uniform


def test_seeds_of_their_own():
    seeds = {derive_seed(a, b) for a in range(30) for b in range(30)}
    assert len(seeds) == 900
    assert min(seeds) >= 0


def test_numbers_are_those_of_splitmix64():
    """By Python's unbounded integers."""

    def value(seed: int, number: int) -> float:
        x = (seed + number * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return ((x ^ (x >> 31)) >> 40) / 2**24

    seed, positions = 2**62 + 11, [0, 5, 10**12]
    expected = [[value(seed, 12 * p + i) for i in range(1, 13)] for p in positions]
    found = uniform(seed, torch.tensor(positions), 12)
    assert torch.equal(found, torch.tensor(expected))
