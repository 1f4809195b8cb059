import numpy as np
import pytest
import torch
from scipy import stats

from vitrail.data.draws import derive_seed, symmetric_beta, uniform


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


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 8.0, 1e4])
def test_numbers_of_a_beta_distribution_are_scipys(alpha):
    steps = torch.arange(20_000)
    draws = uniform(derive_seed(0, int(100 * alpha)), steps, 2).double().numpy()
    found = symmetric_beta(alpha, *draws.T)
    assert ((found >= 0) & (found <= 1)).all()
    # Nearer to the ends than this, a float64 no longer tells one number from another.
    low, high = stats.beta.cdf([1e-9, 1 - 1e-9], alpha, alpha)
    for end, share in ((found < 1e-9, low), (found > 1 - 1e-9, 1 - high)):
        assert stats.binomtest(int(end.sum()), len(found), share).pvalue > 0.01
    inside = found[(found >= 1e-9) & (found <= 1 - 1e-9)]
    assert len(inside) > 0.3 * (high - low) * len(found)

    def cumulative(x: np.ndarray) -> np.ndarray:
        return (stats.beta.cdf(x, alpha, alpha) - low) / (high - low)

    assert stats.kstest(inside, cumulative).pvalue > 0.01


def test_the_first_and_last_draws_give_numbers_of_a_beta_distribution():
    last = 1 - 2.0**-24
    draws = np.array([[u, v] for u in (0.0, last) for v in (0.0, 0.25, 0.5, last)])
    for alpha in (1e-3, 0.2, 1.0, 1e3):
        found = symmetric_beta(alpha, *draws.T)
        assert np.isfinite(found).all()
        assert (found[[0, 2]] == [1, 0]).all()
