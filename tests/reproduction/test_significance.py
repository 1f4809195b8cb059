"""Intervals and verdicts, beside SciPy's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitrail.reproduction.significance import (
    combine,
    exact,
    interval,
    is_above,
    is_within,
    t_probability,
    t_quantile,
)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 30, 199])
def test_students_t_is_scipys(freedom):
    for t in (0.0, 0.3, 1.0, 2.5, 40.0):
        assert t_probability(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=1e-12)
    for p in (0.5, 0.9, 0.95, 0.975, 0.999):
        assert t_quantile(p, freedom) == pytest.approx(stats.t.ppf(p, freedom), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=8).filter(lambda x: np.std(x) > 1e-6))
def test_the_interval_is_scipys(values):
    found = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert interval(values) == pytest.approx((found.low, found.high), rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(st.lists(st.floats(-0.05, 0.05), min_size=2, max_size=8).filter(lambda x: np.std(x) > 1e-6))
def test_equivalence_is_two_one_sided_tests(values):
    low = stats.ttest_1samp(values, -0.02, alternative="greater").pvalue
    high = stats.ttest_1samp(values, 0.02, alternative="less").pvalue
    assert (is_within(values, 0.02).verdict == "held") == (max(low, high) < 0.05)


def test_equivalence_has_the_interval_that_decides_it():
    values = [0.009, 0.007, 0.0085]
    found = is_within(values, 0.0105)
    assert found.verdict == "held"
    assert (found.low, found.high) == interval(values, 0.9)
    assert found.high < 0.0105 < interval(values)[1]


def test_differences_far_from_zero_hold_and_close_ones_are_undecided():
    assert is_above([0.02, 0.021, 0.019]).verdict == "held"
    assert is_above([-0.02, -0.021, -0.019]).verdict == "not held"
    undecided = is_above([0.02, -0.01, 0.01])
    assert undecided.verdict == "undecided"
    assert undecided.low < 0 < undecided.high
    assert is_above([0.02, 0.021, 0.019], bound=0.03).verdict == "not held"


def test_the_seeds_that_are_needed_would_decide():
    values = [0.02, -0.01, 0.01]
    needed = is_above(values).needed
    mean, std = np.mean(values), np.std(values, ddof=1)

    def low(n):
        return mean - stats.t.ppf(0.975, n - 1) * std / n**0.5

    assert low(needed) > 0 >= low(needed - 1)


def test_one_seed_decides_nothing_but_a_count_does():
    assert is_above([0.5]).verdict == "undecided"
    assert is_above([0.5]).needed is None  # nothing is known of the deviation
    assert exact(3.0, True).verdict == "held"
    assert exact(3.0, False).verdict == "not held"


def test_a_difference_of_zero_never_becomes_significant():
    assert is_above([0.01, -0.01]).needed is None


def test_all_parts_must_hold():
    held, not_held, undecided = (
        is_above(values) for values in ([1.0, 1.1], [-1.0, -1.1], [1.0, -0.9])
    )
    assert combine([held, held]) == "held"
    assert combine([held, undecided]) == "undecided"
    assert combine([held, undecided, not_held]) == "not held"
