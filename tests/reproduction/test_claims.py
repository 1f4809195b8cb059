"""What results say about a claim, on results made up for the purpose."""

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
    return Claim(text="", paper="", test=test, **options)


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
    assert evidence(decision.parts[1]) == "a − b: not measured"


def test_a_run_that_diverged_has_no_partner():
    found = results({"a": [0.5, 0.6, 0.7], "b": [{"top1": None}, 0.5, 0.61]})
    (part,) = decide(claim("above", pairs=(("a", "b"),)), found).parts
    assert part.estimate.n == 2
    assert part.estimate.mean == pytest.approx(0.095)


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
    experiment = Experiment(**SHAPE, rows=rows, x="gmacs", form="chart", scales={"smoke": scale})
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
    # At 2, 4 and 16, interpolated along the logarithm: 0.6 − 0.65, 0.7 − 0.66, 0.9 − 0.78.
    assert part.estimate.mean == pytest.approx((-0.05 + 0.04 + 0.12) / 3, abs=1e-3)


def test_lines_are_compared_at_the_lowest_x_of_both():
    assert verdict("above at the lowest x", lines(), pairs=(("b", "a"),)) == "held"
    assert verdict("above at equal x", lines(), pairs=(("b", "a"),)) == "not held"


def test_compute_is_compared_at_equal_accuracy():
    # At 0.65, 0.66, 0.7 and 0.9, a needs 1 + 1.5, …: logarithms to base 2, interpolated.
    (part,) = decide(claim("less x", pairs=(("a", "b"),)), lines()).parts
    a = [
        2 * (y - 0.5) / 0.2 if y <= 0.7 else 2 + 2 * (y - 0.7) / 0.2 for y in (0.65, 0.66, 0.7, 0.9)
    ]
    b = [1.0, 2.0, 2 + 4 * (0.04 / 0.24), 6.0]
    saved = sum(y - x for x, y in zip(a, b, strict=True)) / 4
    assert part.estimate.mean == pytest.approx(saved, abs=2e-3)
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
    only = {name: found.by_cell[name] for name in ("a1", "b3")}
    assert decide(claims, Results(found.design, only)).verdict is None


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
    assert evidence(decide(near, found).parts[0], test="near") == "a: +0.58%"


def test_evidence_says_how_sure_it_is():
    found = results({"a": [0.52, 0.70, 0.92], "b": [0.50, 0.71, 0.91]})
    (part,) = decide(claim("above", pairs=(("a", "b"),)), found).parts
    text = evidence(part)
    assert text.startswith("a − b: +0.67 points (−3.13 to +4.46), n = 3; about ")
    assert text.endswith(" seeds would decide it")


def test_an_unknown_test_is_an_error():
    with pytest.raises(VitrailError, match="unknown test 'over'"):
        decide(claim("over"), results({"a": [0.5]}))
