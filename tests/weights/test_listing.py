import json

import pytest

from vitrail.weights.listing import COSTS, architectures, count, listing
from vitrail.weights.published import PUBLISHED

KEPT = json.loads(COSTS.read_text(encoding="utf-8"))
LISTED = architectures()
# One of every family and kind, small enough to count in a moment.
COUNTED = [
    "Ti/16",
    "b/32",
    "B/16",
    "So400m/14",
    "R+Ti/16",
    "R50+B/16",
    "R50x1",
    "Axial-B/32",
    "Axial-R26",
    "ResNet50",
    "B/16-in21k",
    "S/16-deit3-in1k-384",
    "S/14-dinov2-reg4",
    "B/16-siglip",
    "R50x1-bit-in21k",
]


def test_everything_that_exists_is_listed():
    assert list(KEPT) == list(LISTED)
    assert {row["name"] for row in listing()} >= {row.name for row in PUBLISHED}


@pytest.mark.parametrize("name", COUNTED)
def test_kept_figures_are_those_of_the_model(name):
    cost = count(LISTED[name])
    assert (cost.parameters, cost.gmacs, cost.tokens) == tuple(KEPT[name].values())


def test_vit_costs_follow_the_formula():
    """Eq. 1 to 8 in multiply-accumulates: patches, then 12 D² + 2 n D for each token and layer."""
    for name, n, d, layers, patch in (("B/16", 197, 768, 12, 16), ("L/32", 50, 1024, 24, 32)):
        embedding = (n - 1) * 3 * patch**2 * d
        blocks = layers * n * (12 * d * d + 2 * n * d)
        assert KEPT[name]["gmacs"] == pytest.approx((embedding + blocks + 1000 * d) / 1e9, abs=1e-4)


def test_published_files_have_the_parameters_their_sizes_prove():
    # 400.0 MiB of float32 for the original B/32 with its hidden layer; 391 for AugReg's B/16.
    assert KEPT["B/32-in21k"]["parameters"] == 104_843_091
    assert KEPT["B/16-augreg-in21k"]["parameters"] == 102_595_923


def test_a_pattern_keeps_what_contains_it():
    assert {row["variant"] for row in listing("deit")} == {"Ti/16", "S/16", "B/16", "L/16", "H/14"}
    assert [row["name"] for row in listing("r?+ti")] == []
    assert listing("R+Ti/16*384")[0]["top1"] == 75.40
    assert listing("nothing like it") == []
