import json

import numpy as np

from tests.reporting.folders import Recipe, fake_run
from vitrail.reporting.charts import line, steps_per_epoch, thin, time_unit
from vitrail.reporting.loading import load_run
from vitrail.reporting.page import curve_cautions


def events(**columns) -> list[dict]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def test_few_points_are_left_as_they_are():
    x = np.arange(500.0)
    assert all(np.array_equal(part, x) for part in thin(x, x, 500))


def test_many_points_become_means_within_their_range():
    x = np.arange(12_345.0)
    y = np.sin(x / 700) + np.random.default_rng(0).random(len(x))
    middle, mean, low, high = thin(x, y, 500)
    assert len(middle) == 500
    assert (low <= mean).all()
    assert (mean <= high).all()
    assert low.min() == y.min()
    assert high.max() == y.max()
    assert (np.diff(middle) > 0).all()
    counts = np.diff([*np.linspace(0, len(x), 500, endpoint=False).astype(int), len(x)])
    assert np.isclose((mean * counts).sum(), y.sum())


def test_a_bucket_without_a_number_is_a_gap_and_others_ignore_theirs():
    x = np.arange(1000.0)
    y = np.ones(1000)
    y[:10], y[15] = np.nan, np.nan
    _, mean, low, high = thin(x, y, 100)
    assert np.isnan(mean[0])
    assert np.isnan(low[0])
    assert np.isnan(high[0])
    assert (mean[1:] == 1).all()


def test_points_that_have_no_place_are_left_out():
    found = events(step=[1, 2, 3], seconds=[1.0, None, 3.0], loss=[3.0, 2.0, 1.0])
    assert line(found, "loss", against="seconds", color="train").y.tolist() == [3.0, 1.0]
    assert line(found, "loss", against="step", color="train", scale=100.0).y.tolist() == [
        *(300.0, 200.0, 100.0)
    ]


def test_what_is_absent_throughout_is_no_mishap(tmp_path):
    folder = fake_run(tmp_path / "run", made=Recipe(steps=20))
    rows = events(event=["train"] * 2, step=[1, 2], grad_norm=[None] * 2, loss=[1.0, float("inf")])
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (caution,) = curve_cautions(load_run(folder))
    assert "1 of 2" in caution
    assert "loss" in caution
    assert "step 2" in caution


def test_epochs_and_times_have_their_units():
    assert steps_per_epoch(events(step=[10, 20], epoch=[2.0, 4.0])) == 5.0
    assert steps_per_epoch(events(step=[10], epoch=[None])) == 0.0
    assert [time_unit(seconds)[0] for seconds in (0.0, 179.0, 180.0, 10_799.0, 10_800.0)] == [
        *("s", "s", "min", "min", "h")
    ]
