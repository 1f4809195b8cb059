"""What results say about a claim, on results made up for the purpose."""

import math

import numpy as np
import pytest

from vitrail.errors import VitrailError
from vitrail.reproduction.claims import Results, decide
from vitrail.reproduction.experiment import Arm, Claim, Experiment, Scale
from vitrail.reproduction.pages import evidence

SHAPE = {"name": "made-up", "title": "Made up", "about": ""}


def results(values, *, columns=(), **options) -> Results:
    """Results with these accuracies by row, or by row and column, each a list over the seeds.

    An item may also be a dictionary of measures.
    """
    rows = tuple(Arm(name=name) for name in options.pop("rows", values))
    seeds = max(len(seeds) for seeds in values.values())
    arms = tuple(Arm(name=name, x=x) for name, x in columns)
    scale = Scale(seeds=seeds, recipe="digits/vit")
    experiment = Experiment(**SHAPE, rows=rows, columns=arms, scales={"smoke": scale}, **options)
    by_cell = {
        cell: {
            seed: value if isinstance(value, dict) else {"top1": value}
            for seed, value in enumerate(over_seeds)
            if value is not None
        }
        for cell, over_seeds in values.items()
    }
    return Results(experiment.at("smoke"), by_cell)


def claim(test, **options) -> Claim:
    return Claim(text="", paper="", test=test, **{"measure": "top1", **options})


def verdict(test, found, **options):
    return decide(claim(test, **options), found).verdict


def test_differences_are_paired_by_seed():
    # The seeds differ by far more than the rows do.
    found = results({"a": [0.51, 0.711, 0.909], "b": [0.50, 0.70, 0.90]})
    assert verdict("above", found, pairs=(("a", "b"),)) == "held"
    assert verdict("above", found, pairs=(("b", "a"),)) == "not held"
    assert verdict("above", found, pairs=(("a", "b"),), margin=0.01) == "undecided"
    assert verdict("within", found, pairs=(("a", "b"),), margin=0.02) == "held"
    assert verdict("within", found, pairs=(("a", "b"),), margin=0.005) == "not held"


def test_all_pairs_must_hold():
    found = results({"a": [0.51, 0.711], "b": [0.50, 0.70], "c": [0.60, 0.80]})
    assert verdict("above", found, pairs=(("a", "b"), ("c", "b"))) == "held"
    assert verdict("above", found, pairs=(("a", "b"), ("a", "c"))) == "not held"


def test_nothing_is_decided_before_everything_is_measured():
    found = results({"a": [0.5, 0.6], "b": [None, None], "c": [0.1, 0.2]})
    decision = decide(claim("above", pairs=(("a", "c"), ("a", "b"))), found)
    assert decision.verdict is None
    assert [part.estimate is None for part in decision.parts] == [False, True]
    assert evidence(decision.parts[1], decision.claim) == "a − b: not measured"


def test_seeds_that_are_missing_leave_a_claim_open():
    # Looking after every seed would find a difference too often.
    found = results({"a": [0.51, 0.711, None], "b": [0.50, 0.70, 0.90]})
    decision = decide(claim("above", pairs=(("a", "b"),)), found)
    assert decision.verdict is None
    assert decision.parts[0].estimate.verdict == "held"
    assert evidence(decision.parts[0], decision.claim).endswith("n = 2; some runs are missing")


def test_the_best_column_is_not_chosen_before_all_are_there():
    values = {"a | slow": [0.9, 0.91], "a | fast": [None, None], "b | slow": [0.4, 0.411]}
    columns = (("slow", 1.0), ("fast", 2.0))
    found = results({**values, "b | fast": [0.3, 0.31]}, rows=("a", "b"), columns=columns)
    assert verdict("above", found, pairs=(("a", "b"),)) is None


def test_a_run_that_diverged_has_no_partner():
    found = results({"a": [0.5, 0.6, 0.7], "b": [{"top1": None}, 0.5, 0.61]})
    (part,) = decide(claim("above", pairs=(("a", "b"),)), found).parts
    assert part.estimate.n == 2
    assert part.estimate.mean == pytest.approx(0.095)
    assert ", n = 2, 1 diverged" in evidence(part, claim("above"))


def test_nothing_is_decided_where_a_run_diverged():
    pairs = (("a", "b"),)
    found = results({"a": [0.7, 0.71, 0.72], "b": [0.5, 0.51, 0.52]})
    assert verdict("above", found, pairs=pairs) == "held"
    found = results({"a": [0.7, 0.71, 0.72], "b": [0.5, 0.51, {"top1": None}]})
    assert verdict("above", found, pairs=pairs) == "undecided"


def test_of_several_columns_the_best_on_val_is_compared():
    columns = (("slow", 1.0), ("fast", 2.0))
    found = results(
        {
            "a | slow": [{"top1": 0.9, "val_top1": 0.1}],
            "a | fast": [{"top1": 0.5, "val_top1": 0.2}],
            "b | slow": [{"top1": 0.4, "val_top1": 0.3}],
            "b | fast": [{"top1": 0.8, "val_top1": 0.2}],
        },
        rows=("a", "b"),
        columns=columns,
    )
    (part,) = decide(claim("above", pairs=(("a", "b"),)), found).parts
    assert part.name == "a | fast − b | slow"
    assert part.estimate.mean == pytest.approx(0.1)


def grid(first, second):
    columns = (("few", 10.0), ("all", 100.0))
    values = {}
    for row, (few, many) in {"ViT": first, "ResNet": second}.items():
        values |= {f"{row} | few": few, f"{row} | all": many}
    return results(values, rows=("ViT", "ResNet"), columns=columns)


def test_the_order_turns_if_each_leads_at_one_end():
    turned = grid(([0.2, 0.21], [0.9, 0.91]), ([0.4, 0.411], [0.8, 0.811]))
    assert verdict("turns", turned, pairs=(("ViT", "ResNet"),)) == "held"
    assert verdict("turns", turned, pairs=(("ResNet", "ViT"),)) == "not held"
    assert verdict("gains more", turned, pairs=(("ViT", "ResNet"),)) == "held"
    behind = grid(([0.2, 0.21], [0.7, 0.71]), ([0.4, 0.411], [0.8, 0.811]))
    assert verdict("turns", behind, pairs=(("ViT", "ResNet"),)) == "not held"


def lines():
    """b reaches a's accuracy at four times its compute, and begins higher."""
    points = {
        "a1": (1.0, 0.5), "a2": (4.0, 0.7), "a3": (16.0, 0.9),
        "b1": (2.0, 0.65), "b2": (4.0, 0.66), "b3": (64.0, 0.9),
    }  # fmt: skip
    rows = tuple(Arm(name=name, lines=(name[0],)) for name in points)
    scale = Scale(seeds=2, recipe="digits/vit")
    experiment = Experiment(**SHAPE, rows=rows, x=("gmacs",), form="chart", scales={"smoke": scale})
    by_cell = {
        name: {
            seed: {"gmacs": x, "top1": y + noise}
            for seed, noise in enumerate((0.0, 1e-4 * int(name[1])))
        }
        for name, (x, y) in points.items()
    }
    return Results(experiment.at("smoke"), by_cell)


def test_lines_are_compared_at_equal_x():
    (part,) = decide(claim("above at equal x", pairs=(("a", "b"),)), lines()).parts
    # At 2, 4 and 16, interpolated along the logarithm: 0.6 − 0.65, 0.7 − 0.66, 0.9 − 0.78. From 2
    # to 4 is one octave, from 4 to 16 are two.
    mean = ((-0.05 + 0.04) / 2 + 2 * (0.04 + 0.12) / 2) / 3
    assert part.estimate.mean == pytest.approx(mean, abs=1e-3)


def test_the_point_that_two_lines_share_is_no_comparison():
    begun = lines()
    begun.by_cell.update({name: {} for name in begun.by_cell if name not in ("a2", "b2")})
    (part,) = decide(claim("above at equal x", pairs=(("a", "b"),)), begun).parts
    assert part.estimate is None


def test_points_of_a_line_at_the_same_x_are_averaged():
    found = lines()
    twice = {"a2": {0: {"gmacs": 16.0, "top1": 0.7}, 1: {"gmacs": 16.0, "top1": 0.7001}}}
    x, y = Results(found.design, {**found.by_cell, **twice}).line("a", 0, "")
    assert x == pytest.approx([0.0, math.log(16)])
    assert y == pytest.approx([0.5, 0.8])


def test_lines_are_compared_at_the_lowest_x_of_both():
    assert verdict("above at the lowest x", lines(), pairs=(("b", "a"),)) == "held"
    assert verdict("above at equal x", lines(), pairs=(("b", "a"),)) == "not held"


def test_compute_is_compared_at_equal_accuracy():
    (part,) = decide(claim("less x", pairs=(("a", "b"),)), lines()).parts
    # What both reach, and the logarithms to base 2 of the compute for it, interpolated.
    reached = [0.65, 0.66, 0.7, 0.9]
    a, b = [1.5, 1.6, 2.0, 4.0], [1.0, 2.0, 2 + 4 * 0.04 / 0.24, 6.0]
    saved = np.trapezoid(np.subtract(b, a), reached) / 0.25
    assert part.estimate.mean == pytest.approx(saved, abs=5e-3)
    assert verdict("less x", lines(), pairs=(("a", "b"),)) == "held"
    assert verdict("less x", lines(), pairs=(("b", "a"),)) == "not held"


def test_compute_that_lowers_accuracy_is_not_needed():
    found = lines()
    worse = {"gmacs": 8.0, "top1": 0.1}
    by_cell = {**found.by_cell, "a2": {0: worse, 1: worse}}
    (part,) = decide(claim("less x", pairs=(("a", "b"),)), Results(found.design, by_cell)).parts
    assert part.estimate.mean > 0


def test_a_lead_that_shrinks_closes():
    assert verdict("closes", lines(), pairs=(("b", "a"),)) == "held"
    assert verdict("closes", lines(), pairs=(("a", "b"),)) == "not held"


def test_lines_without_a_common_range_cannot_be_compared():
    found = lines()
    claims = claim("above at equal x", pairs=(("a", "b"),))
    apart = {
        name: {seed: one | {"gmacs": one["gmacs"] * (100 if name[0] == "b" else 1)}
               for seed, one in by_seed.items()}
        for name, by_seed in found.by_cell.items()
    }  # fmt: skip
    decision = decide(claims, Results(found.design, apart))
    assert decision.verdict is None
    assert evidence(decision.parts[0], claims) == "a − b: no common range"


def test_seeds_whose_lines_are_apart_are_not_left_out():
    # With the second seed, b is so much better that a never reaches it.
    found = lines()
    better = {
        name: {0: by_seed[0], 1: by_seed[1] | {"top1": by_seed[1]["top1"] + 0.3}}
        for name, by_seed in found.by_cell.items()
        if name[0] == "b"
    }
    claims = claim("less x", pairs=(("a", "b"),))
    decision = decide(claims, Results(found.design, {**found.by_cell, **better}))
    assert decision.verdict is None
    assert decision.parts[0].apart


def test_a_line_that_misses_a_point_is_not_compared():
    found = lines()
    by_seed = found.by_cell["a2"]
    cut = {**found.by_cell, "a2": {0: by_seed[0], 1: by_seed[1] | {"top1": None}}}
    (part,) = decide(claim("less x", pairs=(("a", "b"),)), Results(found.design, cut)).parts
    assert part.estimate.n == 1
    assert part.estimate.verdict == "undecided"


@pytest.mark.parametrize("missing", ["a1", "a2", "b3"])
def test_lines_decide_nothing_before_all_their_points_are_there(missing):
    found = lines()
    rest = {name: by_seed for name, by_seed in found.by_cell.items() if name != missing}
    claims = claim("above at equal x", pairs=(("a", "b"),))
    assert decide(claims, Results(found.design, rest)).verdict is None


def test_datasets_that_are_missing_are_left_out_of_every_mean():
    columns = (("x", 1.0), ("y", 2.0), ("z", 3.0))
    values = {
        "a | x": [0.5, 0.6], "a | y": [0.7, 0.8], "a | z": [None, None],
        "b | x": [0.4, 0.5], "b | y": [0.5, 0.6], "b | z": [0.9, 0.9],
    }  # fmt: skip
    found = results(values, rows=("a", "b"), columns=columns, average=True)
    assert [column.name for column in found.columns] == ["x", "y"]
    (part,) = decide(claim("above", pairs=(("a", "b"),)), found).parts
    assert part.name == "a − b"
    assert part.estimate.mean == pytest.approx(0.15)


def test_what_does_not_depend_on_the_seed_is_counted():
    found = results({"a": [{"gmacs": 2.0}], "b": [{"gmacs": 1.0}]})
    assert verdict("above", found, pairs=(("a", "b"),), measure="gmacs") == "held"
    assert verdict("above", found, pairs=(("b", "a"),), measure="gmacs") == "not held"


def test_the_measure_of_an_experiment_may_be_exact():
    found = results({"a": [{"gmacs": 2.0}], "b": [{"gmacs": 1.0}]}, measure="gmacs")
    assert verdict("above", found, pairs=(("a", "b"),), measure="gmacs") == "held"
    assert verdict("within", found, pairs=(("a", "b"),), measure="gmacs", margin=1.5) == "held"
    assert verdict("within", found, pairs=(("a", "b"),), measure="gmacs", margin=0.5) == "not held"


def test_a_measure_can_be_tested_by_itself():
    found = results({"a": [{"growth": 0.2}, {"growth": 0.21}, {"growth": 0.19}]})
    assert verdict("positive", found, measure="growth") == "held"
    assert verdict("positive", found, of=("a",), measure="growth", margin=0.3) == "not held"


def test_figures_of_the_paper_are_matched_up_to_a_relative_margin():
    found = results({"a": [{"parameters": 86.5e6}]})
    expected = {"a": 86e6}
    near = claim("near", expected=expected, margin=0.01, measure="parameters")
    assert decide(near, found).verdict == "held"
    far = claim("near", expected=expected, margin=0.001, measure="parameters")
    assert decide(far, found).verdict == "not held"
    assert evidence(decide(near, found).parts[0], near) == "a: +0.58%"


def test_evidence_says_how_sure_it_is():
    found = results({"a": [0.52, 0.70, 0.92], "b": [0.50, 0.71, 0.91]})
    above = claim("above", pairs=(("a", "b"),))
    text = evidence(decide(above, found).parts[0], above)
    assert text.startswith("a − b: +0.67 points (−3.13 to +4.46), n = 3; about ")
    assert text.endswith(" seeds would decide it")


def test_evidence_has_the_unit_of_its_measure():
    found = results({"a": [{"growth": 0.0123}]}, train=False, measure="gmacs")
    growth = claim("positive", measure="growth")
    assert evidence(decide(growth, found).parts[0], growth) == "a: +0.0123, one model"
    points = claim("positive", measure="top1")
    found = results({"a": [0.51, 0.52, 0.53], "b": [0.5099, 0.52, 0.53]})
    above = claim("above", pairs=(("a", "b"),))
    assert evidence(decide(above, found).parts[0], points).startswith("a − b: +0.00 points (−0.01")


def test_saved_compute_is_counted_in_doublings():
    claims = claim("less x", pairs=(("a", "b"),))
    (part,) = decide(claims, lines()).parts
    text = evidence(part, claims)
    assert text.startswith(f"x that a saves over b: +{part.estimate.mean:.2f} doublings (")


def test_claims_are_about_the_measure_of_the_experiment():
    experiment = Experiment(
        **SHAPE,
        rows=(Arm(name="a"),),
        measure="gmacs",
        claims=(claim("positive", measure=""), claim("positive", measure="parameters")),
        scales={"smoke": Scale(recipe="digits/vit")},
    )
    assert [one.measure for one in experiment.at("smoke").claims] == ["gmacs", "parameters"]


def test_evidence_of_equality_has_the_interval_that_decides():
    found = results({"a": [0.52, 0.70, 0.92], "b": [0.50, 0.71, 0.91]})
    within = claim("within", pairs=(("a", "b"),), margin=0.5)
    assert (
        evidence(decide(within, found).parts[0], within)
        == "a − b: +0.67 points (90%: −1.91 to +3.24), n = 3"
    )


@pytest.mark.parametrize(
    ("test", "options", "message"),
    [
        ("above", {}, "it has no pairs"),
        ("near", {}, "it has no expected"),
        ("near", {"expected": {"a": 0.0}}, "expects 0"),
        ("within", {"pairs": (("a", "b"),)}, "margin above zero"),
        ("turns", {"pairs": (("a", "b"),)}, "several columns"),
        ("above", {"pairs": (("a", "c"),)}, "no 'c'"),
    ],
)
def test_claims_that_test_nothing_are_errors(test, options, message):
    with pytest.raises(VitrailError, match=message):
        decide(claim(test, **options), results({"a": [0.5], "b": [0.5]}))


def test_an_unknown_test_is_an_error():
    with pytest.raises(VitrailError, match="unknown test 'over'"):
        decide(claim("over"), results({"a": [0.5]}))
