import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitrail.training.optim import Schedule


def at(schedule: Schedule, step: int, steps: int) -> float:
    return schedule.lr(step, step / steps)


def test_cosine_is_the_references_formula():
    schedule = Schedule(peak=0.03, warmup=500)
    for step in (0, 1, 250, 500, 501, 3000, 9999):
        progress = min(max((step - 500) / (10_000 - 500), 0), 1)
        expected = 0.03 * 0.5 * (1 + math.cos(math.pi * progress)) * min(1, step / 500)
        assert at(schedule, step, 10_000) == pytest.approx(expected, rel=1e-12)


def test_linear_decay_ends_at_the_floor():
    schedule = Schedule(peak=8e-4, warmup=10_000, decay="linear", floor=1e-5)
    assert at(schedule, 10_000, 518_000) == pytest.approx(8e-4)
    assert at(schedule, 518_000, 518_000) == pytest.approx(1e-5)
    assert at(schedule, 264_000, 518_000) == pytest.approx((8e-4 + 1e-5) / 2)


def test_a_staircase_falls_at_its_milestones():
    schedule = Schedule(peak=0.003, decay="staircase", milestones=(0.3, 0.6, 0.9))
    rates = [at(schedule, step, 500) for step in (0, 149, 150, 299, 300, 449, 450, 499)]
    expected = [3e-3, 3e-3, 3e-4, 3e-4, 3e-5, 3e-5, 3e-6, 3e-6]
    assert rates == pytest.approx(expected)


def test_cosine_agrees_with_torch():
    schedule = Schedule(peak=0.1)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    for step in range(100):
        assert at(schedule, step, 100) == pytest.approx(peer.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        peer.step()


@given(
    st.integers(1, 500),
    st.integers(0, 600),
    st.sampled_from(["cosine", "linear", "staircase", "constant"]),
    st.floats(0, 1),
)
def test_a_rate_lies_between_zero_and_the_peak(steps, warmup, decay, share):
    schedule = Schedule(peak=1.0, warmup=warmup, decay=decay)
    rate = at(schedule, int(share * steps), steps)
    assert 0 <= rate <= 1
