"""Every number against scikit-learn, scipy, or a loop that cannot be wrong."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn import metrics as sklearn

from tests.evaluation.examples import predictions
from vitrail.errors import VitrailError
from vitrail.evaluation.metrics import BINS, Predictions, bootstrap, count, measure, wilson


@st.composite
def answers(draw, fewest: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and targets; with few pictures, some classes never occur or are never said."""
    k, n = draw(st.integers(fewest, 8)), draw(st.integers(1, 40))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    scores = random.dirichlet(np.full(k, draw(st.sampled_from([0.3, 1.0, 5.0]))), n)
    scores = np.maximum(scores, 1e-12)
    return scores / scores.sum(1, keepdims=True), random.integers(0, k, n)


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.filterwarnings("ignore:A single label was found")
@given(answers())
def test_classes_and_averages_are_those_of_scikit_learn(found):
    scores, targets = found
    result, guess = measure(predictions(scores, targets)), scores.argmax(1)
    every = range(scores.shape[1])
    theirs = sklearn.precision_recall_fscore_support(
        targets, guess, labels=every, zero_division=0.0
    )
    ours = [[row[key] for row in result["per_class"]] for key in ("precision", "recall", "f1", "n")]
    assert np.allclose(ours, theirs, atol=1e-12)
    assert result["macro_f1"] == pytest.approx(
        sklearn.f1_score(targets, guess, average="macro", zero_division=0.0)
    )
    assert result["balanced_accuracy"] == pytest.approx(
        sklearn.balanced_accuracy_score(targets, guess)
    )
    assert result["confusion"] == sklearn.confusion_matrix(targets, guess, labels=every).tolist()


@given(answers(fewest=6))
def test_top_k_and_loss_are_those_of_scikit_learn(found):
    scores, targets = found
    result, every = measure(predictions(scores, targets)), range(scores.shape[1])
    for k in (1, 5):
        theirs = sklearn.top_k_accuracy_score(targets, scores, k=k, labels=every)
        assert result[f"top{k}"] == pytest.approx(theirs)
    assert result["loss"] == pytest.approx(sklearn.log_loss(targets, scores, labels=every))
    assert result["n"] == len(targets)


@given(answers())
def test_calibration_is_what_a_loop_over_bins_says(found):
    scores, targets = found
    result = measure(predictions(scores, targets))
    confidence, right = scores.max(1), scores.argmax(1) == targets
    expected = 0.0
    for i, row in enumerate(result["calibration"]):
        inside = (confidence > i / BINS) & (confidence <= (i + 1) / BINS)
        assert row["n"] == inside.sum()
        assert (row["low"], row["high"]) == (i / BINS, (i + 1) / BINS)
        if row["n"]:
            assert row["confidence"] == pytest.approx(confidence[inside].mean())
            assert row["accuracy"] == pytest.approx(right[inside].mean())
            expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
        else:
            assert row["confidence"] == row["accuracy"] == 0.0
    assert len(result["calibration"]) == 15
    assert result["ece"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("confidence", "where"),
    [(1.0, 14), (1 / 15, 0), (2 / 15, 1), (0.2, 2), (14 / 15, 13), (0.0, 0)],
)
def test_a_confidence_on_the_edge_belongs_to_the_bin_below(confidence, where):
    one = Predictions(
        names=["a"],
        targets=np.array([0]),
        guesses=np.array([[0]]),
        probabilities=np.array([[confidence]]),
        loss=np.array([1.0]),
        labels=("only",),
    )
    assert [row["n"] for row in measure(one)["calibration"]] == [i == where for i in range(15)]


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_intervals_of_proportions_are_wilsons(case):
    hits, n = case
    theirs = binomtest(hits, n).proportion_ci(0.95, method="wilson")
    assert wilson(hits, n) == pytest.approx([theirs.low, theirs.high], abs=1e-12)
    low, high = wilson(hits, n)
    assert 0 <= low <= hits / n <= high <= 1


@given(answers())
@settings(max_examples=30)
def test_everything_is_plain_and_finite_and_inside_its_interval(found):
    scores, targets = found
    result = measure(predictions(scores, targets))
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    for key, (low, high) in result["intervals"].items():
        assert 0 <= low <= result[key] <= high <= 1
    for row in result["per_class"]:
        low, high = row["interval"]
        assert 0 <= low <= row["recall"] <= high <= 1


def test_the_keys_are_those_of_the_file_format():
    result = measure(predictions(np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0, 0])))
    assert set(result) == {
        *("top1", "top5", "n", "ece", "loss", "balanced_accuracy", "macro_f1", "intervals"),
        *("per_class", "confusion", "confused", "calibration"),
    }
    assert result["confused"] == [{"truth": "class 0", "guess": "class 1", "n": 1}]
    assert (result["top1"], result["top5"]) == (0.5, 1.0)
    assert result["per_class"][1] == {
        **{"name": "class 1", "n": 0, "precision": 0.0, "recall": 0.0, "f1": 0.0},
        "interval": [0.0, 1.0],
    }


def test_the_most_frequent_confusions_come_first_in_their_direction():
    truth = np.repeat([0, 1, 2, 2, 0], [3, 5, 1, 4, 9])
    guess = np.repeat([1, 0, 0, 1, 0], [3, 5, 1, 4, 9])
    result = measure(predictions(np.eye(3)[guess] * 0.9 + 0.1 / 3, truth))
    assert [(c["truth"][-1], c["guess"][-1], c["n"]) for c in result["confused"]] == [
        ("1", "0", 5),
        ("2", "1", 4),
        ("0", "1", 3),
        ("2", "0", 1),
    ]


def test_the_bootstrap_agrees_with_resampled_pictures_measured_by_scikit_learn():
    random = np.random.default_rng(1)
    truth = random.integers(0, 4, 400)
    guess = np.where(random.random(400) < 0.7, truth, random.integers(0, 4, 400))
    theirs = []
    for _ in range(400):
        picks = random.integers(0, 400, 400)
        theirs.append(sklearn.f1_score(truth[picks], guess[picks], average="macro"))
    low, high = bootstrap(truth, guess, 4)["macro_f1"]
    assert [low, high] == pytest.approx(np.quantile(theirs, [0.025, 0.975]), abs=0.012)
    assert bootstrap(truth, guess, 4)["macro_f1"] == [low, high]
    assert bootstrap(truth, guess, 4, seed=1)["macro_f1"] != [low, high]


def test_95_of_100_intervals_hold_the_true_balanced_accuracy():
    random = np.random.default_rng(0)
    recall = np.array([0.95, 0.8, 0.6])
    held = 0
    for _ in range(200):
        truth = random.integers(0, 3, 300)
        guess = np.where(random.random(300) < recall[truth], truth, (truth + 1) % 3)
        low, high = bootstrap(truth, guess, 3, resamples=300)["balanced_accuracy"]
        held += low <= recall.mean() <= high
    assert 180 <= held <= 199


@pytest.mark.parametrize("shift", [0, 1])
def test_all_right_and_all_wrong_are_no_certainty(shift):
    truth = np.arange(12) % 3
    found = measure(predictions(np.eye(3)[(truth + shift) % 3] * 0.7 + 0.1, truth))
    expected = wilson(0 if shift else 12, 12)
    assert found["intervals"]["macro_f1"] == found["intervals"]["balanced_accuracy"] == expected
    assert found["macro_f1"] == found["balanced_accuracy"] == 1 - shift


def test_few_pictures_per_class_leave_the_estimate_inside_its_interval():
    random = np.random.default_rng(0)
    truth = np.repeat(np.arange(1000), 5)
    guess = np.where(random.random(5000) < 0.6, truth, random.integers(0, 1000, 5000))
    low, high = bootstrap(truth, guess, 1000)["macro_f1"]
    assert low + 0.005 < count(truth, guess, 1000).macro_f1() < high - 0.005


def test_many_classes_need_no_matrix_and_little_time():
    random = np.random.default_rng(0)
    n, classes = 2000, 21_843
    found = Predictions(
        names=[""] * n,
        targets=random.integers(0, classes, n),
        guesses=random.integers(0, classes, (n, 5)),
        probabilities=random.random((n, 5), dtype=np.float32),
        loss=random.random(n, dtype=np.float32),
        labels=tuple(map(str, range(classes))),
    )
    result = measure(found)
    assert result["confusion"] is None
    assert len(result["per_class"]) == classes
    assert len(result["confused"]) == 20
    json.dumps(result, allow_nan=False)


def test_ten_thousand_pictures_are_measured_in_a_moment():
    random = np.random.default_rng(0)
    found = predictions(random.dirichlet(np.ones(100), 10_000), random.integers(0, 100, 10_000))
    start = time.process_time()
    measure(found)
    assert time.process_time() - start < 2  # 0.3 s on an idle core


def test_no_picture_is_one_line():
    with pytest.raises(VitrailError, match="no images to evaluate"):
        measure(predictions(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)))
