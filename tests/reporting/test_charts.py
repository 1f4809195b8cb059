import json
import re

import numpy as np
import pytest

from tests.reporting.folders import Recipe, fake_run
from vitrail.reporting.charts import (
    PointSeries,
    Scatter,
    draw_scatter,
    line,
    pareto_front,
    steps_per_epoch,
    thin,
    time_unit,
)
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


def test_the_front_has_what_no_other_beats_by_cost():
    pairs = [(4.0, 0.9), (1.0, 0.5), (2.0, 0.4), (2.0, 0.7), (2.0, 0.7), (3.0, 0.7), (1.0, 0.6)]
    assert pareto_front(pairs) == [6, 3, 4, 0]
    assert pareto_front([(5.0, -1.0)]) == [0]
    assert pareto_front([]) == []


def scatter(*series: PointSeries, **options) -> str:
    return draw_scatter(Scatter(title="Top-1", x_name="cost", series=series, **options), "key").svg


def texts(svg: str) -> list[str]:
    return re.findall(r">([^<>\n]+)</text>", svg)


def test_a_scatter_chart_has_letters_error_bars_and_colors_of_the_page():
    svg = scatter(
        PointSeries(x=[1.0], y=[80.0], color="run0", letters=["A"], error=[2.0]),
        PointSeries(x=[5.0], y=[90.0], color="run1", letters=["B"]),
        unit="%",
    )
    assert 'aria-label="Top-1 by cost"' in svg
    assert {"A", "B", "cost", "80%", "90%"} <= set(texts(svg))
    assert "var(--run0)" in svg
    assert "var(--run1)" in svg
    assert "#fe" not in svg
    assert svg.count("var(--run0)") > svg.count("var(--run1)")  # its error bar


def test_a_front_and_lines_are_drawn_only_if_asked_for():
    series = PointSeries(x=[3.0, 1.0, 2.0], y=[3.0, 1.0, 0.0], color="run0")
    joined = PointSeries(x=series.x, y=series.y, color="run0", joined=True)
    plain = scatter(series).count("<path")
    assert scatter(series, front=True).count("<path") > plain
    assert scatter(joined).count("<path") == plain + 1


@pytest.mark.parametrize(
    ("xs", "log", "ticks"),
    [
        ([1.0, 9.0], None, {"2", "4", "6", "8"}),
        ([1.0, 9.0], True, {"1", "2", "5"}),
        ([1.0, 20.0], None, {"1", "2", "5", "10", "20"}),
        ([1.0, 20.0], False, {"5", "10", "15", "20"}),
        ([1.0, 20_000.0], None, {"1", "10", "100", "1,000", "10,000"}),
        ([0.0, 20.0], None, {"0", "5", "10", "15", "20"}),
    ],
)
def test_the_axis_is_logarithmic_if_costs_span_a_factor_of_ten(xs, log, ticks):
    svg = scatter(PointSeries(x=xs, y=[0.5] * len(xs), color="run0"), log=log)
    below = svg[: svg.index(">cost<")]
    assert set(texts(below)) >= ticks


def test_letters_of_points_in_one_place_stand_apart():
    svg = scatter(*(PointSeries(x=[1], y=[1], color="run0", letters=[one]) for one in "ABCD"))
    places = re.findall(r'x="([-\d.]+)" y="([-\d.]+)"[^>]*>[A-D]<', svg)
    assert len(set(places)) == len(places) == 4


def test_no_points_are_no_chart():
    assert not scatter(PointSeries(x=[], y=[], color="run0"))
    assert not scatter()
