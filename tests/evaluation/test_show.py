import numpy as np
import pytest

from tests.evaluation.examples import predictions
from vitrail.evaluation.metrics import measure
from vitrail.evaluation.show import classes, lines, show, show_fewshot


def result(n: int, k: int, broken=()) -> dict:
    random = np.random.default_rng(0)
    targets = random.integers(0, k, n)
    scores = random.dirichlet(np.ones(k), n) + np.eye(k)[targets] / k
    found = measure(predictions(scores / scores.sum(1, keepdims=True), targets))
    return found | {"data": "pets", "split": "test", "model": "ti16", "broken": list(broken)}


def test_the_headline_has_number_interval_and_count():
    found = result(200, 4)
    first = lines(found)[0]
    low, high = found["intervals"]["top1"]
    assert first.startswith("top-1")
    assert f"{100 * found['top1']:.2f}%" in first
    assert f"{100 * low:.1f} to {100 * high:.1f}%" in first
    assert first.endswith("n = 200, pets (test)")
    text = "\n".join(lines(found))
    for name in ("balanced accuracy", "macro-F1", "calibration error"):
        assert name in text
    assert "top-5" not in text  # of four classes
    assert "top-5" in "\n".join(lines(result(200, 6)))
    assert "worst" not in text
    assert "broken" not in text


def test_every_class_has_its_line_while_they_are_few(capsys):
    found = result(200, 30)
    assert [row[0] for row in classes(found)[1]] == [f"class {i}" for i in range(30)]
    show(found)
    said = capsys.readouterr().out
    assert all(f"\nclass {i} " in said for i in range(30))
    assert all(line in said for line in lines(found))


def test_of_many_classes_the_worst_are_shown_and_those_without_pictures_are_not():
    found = result(120, 40)
    found["per_class"][3] |= {"n": 0, "f1": 0.0}
    rows = classes(found)[1]
    f1 = sorted(row["f1"] for row in found["per_class"] if row["n"])
    assert [float(row[4][:-1]) for row in rows] == pytest.approx(
        [100 * value for value in f1[:10]], abs=0.005
    )
    assert "class 3" not in [row[0] for row in rows]
    assert any(f"10 worst of {len(f1)} classes" in line for line in lines(found))
    assert any(f"for {40 - len(f1)} of 40 classes" in line for line in lines(found))


def test_the_few_classes_with_images_are_all_shown_and_only_they():
    for k in (8, 1000):
        found = result(60, k)
        for row in found["per_class"][4:]:
            row |= {"n": 0, "recall": 0.0, "f1": 0.0}
        there = [row["name"] for row in found["per_class"] if row["n"]]
        assert [row[0] for row in classes(found)[1]] == there
        said = "\n".join(lines(found))
        assert "worst" not in said
        assert f"for {k - len(there):,} of {k:,} classes" in said


def test_more_shots_than_images_are_told(capsys):
    row = {"seed": 0, "ridge": 1024.0, "accuracy": 0.9, "knn": 0.8, "shown": 180, "n": 20}
    rows = [row | {"shots": shots, "fewest": min(shots, 36)} for shots in (10, 100)]
    broken = [[f"{i}.jpg", "torn"] for i in range(7)]
    show_fewshot({"results": rows, "data": "photos", "split": "test", "broken": broken})
    *above, last = capsys.readouterr().out.splitlines()
    assert last == "skipped  7 in all; --json lists them"
    said = [line for line in above if "training images" in line]
    assert len(said) == 1
    assert said[0].startswith("100 shots ")
    assert "36" in said[0]


def test_confusions_and_broken_pictures_are_named():
    found = result(300, 4, broken=[[f"{i}.jpg", "truncated"] for i in range(7)])
    text = "\n".join(lines(found))
    pair = found["confused"][0]
    assert f"{pair['truth']} predicted as {pair['guess']}: {pair['n']}" in text
    assert "7 images that could not be read; --json lists all" in text
    assert "0.jpg: truncated" in text
    assert "6.jpg" not in text
