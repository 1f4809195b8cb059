import math

import pytest

from vitrail.reporting.rendering import (
    between,
    count,
    duration,
    fixed,
    joules,
    memory,
    operations,
    percent,
    plural,
    short,
    significant,
)


def plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def test_a_share_has_as_many_digits_as_its_images_can_tell():
    assert plain(percent(0.97312, 367)) == "97.3%"
    assert plain(percent(0.97312, 10_000)) == "97.31%"
    assert plain(between((0.951, 0.986), 367)) == "95.1 to 98.6%"
    assert between((math.nan, 0.5), 367) == ""


@pytest.mark.parametrize("write", [percent, fixed, count, duration, significant, operations])
def test_what_is_not_known_is_a_dash(write):
    assert write(math.nan) == write(None) == "–"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0.25, "0 s"), (59.6, "60 s"), (119.4, "2 min"), (754.2, "13 min")),
        *((7199, "2.0 h"), (7500, "2.1 h"), (360_000, "4.2 days")),
    ],
)
def test_times_are_written_as_on_the_console(seconds, words):
    assert plain(duration(seconds)) == words


def test_costs_have_three_digits_and_a_unit():
    assert [plain(operations(x)) for x in (4262.3, 0.9, 3.2e-5, 1e-12)] == [
        *("4,262 exaFLOPs", "900 petaFLOPs", "32 teraFLOPs", "0.001 gigaFLOPs")
    ]
    assert [plain(joules(x)) for x in (9e6, 9e4, 90.0)] == ["2.5 kWh", "25 Wh", "90 J"]
    assert [plain(memory(x)) for x in (3 << 30, 310 << 20)] == ["3 GiB", "310 MiB"]
    values = (12_300.0, 0.00123456, -1e-5, -2000.0)
    assert [significant(x) for x in values] == ["12,300", "0.00123", "−1e-05", "−2,000"]


def test_counts_and_long_texts():
    assert [plain(plural(n, "class")) for n in (1, 2)] == ["1 class", "2 classes"]
    assert plain(plural(1200, "line")) == "1,200 lines"
    assert short("a" * 60) == "a" * 60
    assert short("start" + "." * 100 + "end.jpg", 20) == "start........" + "…" + "nd.jpg"
    assert len(short("x" * 1000, 44)) == 44
