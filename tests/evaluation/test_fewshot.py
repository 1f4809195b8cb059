"""Few-shot accuracy against a direct solution in float64, and what is shown to whom."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from tests.data.pictures import write_classes
from tests.models import small
from vitrail import VitrailError
from vitrail.data.dataset import Source
from vitrail.data.folder import FolderSource, read_classes
from vitrail.data.preprocessing import Preprocessing
from vitrail.evaluation.features import Features, extract
from vitrail.evaluation.fewshot import (
    extract_support,
    few_per_class,
    fit_and_score,
    nearest_neighbors,
    regress,
    with_bias,
)
from vitrail.evaluation.predictor import Predictor


def cloud(n: int, width: int, classes: int = 3, seed: int = 0) -> Features:
    """Vectors around one center for each class."""
    chance = torch.Generator().manual_seed(seed)
    targets = torch.arange(n) % classes
    centers = torch.randn(classes, width, generator=torch.Generator().manual_seed(99))
    vectors = centers[targets] + 0.7 * torch.randn(n, width, generator=chance)
    return Features(vectors, targets, np.arange(n), ())


def scored(train: Features, test: Features | None, **options) -> list[dict]:
    """The results for three classes, with images to draw from as far as their features go."""
    options = {"classes": 3, "targets": train.targets.numpy(), "seeds": [0]} | options
    return fit_and_score(train, test, **options)


def solved(shown: Features, ridge: float, classes: int) -> torch.Tensor:
    """The weights by the normal equations, in float64."""
    x = shown.vectors.double()
    x = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-5)
    x = torch.cat([x, torch.full((len(x), 1), 100.0, dtype=torch.float64)], 1)
    y = torch.full((len(x), classes), -1.0, dtype=torch.float64)
    y[torch.arange(len(x)), shown.targets] = 1.0
    return torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1]).double(), x.T @ y)


@pytest.mark.parametrize(("n", "width"), [(200, 16), (12, 16), (17, 16), (15, 192)])
@pytest.mark.parametrize("ridge", [1024.0, 1.0])
def test_more_or_fewer_pictures_than_features_give_the_ridge_solution(n, width, ridge):
    shown = cloud(n, width)
    expected = solved(shown, ridge, 3)
    found = regress(shown.vectors, shown.targets, 3).weights(ridge)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_scikit_learn_gives_the_same_answers():
    shown, asked = cloud(40, 10), cloud(25, 10, seed=1)
    mean, deviation = shown.vectors.double().mean(0), shown.vectors.double().std(0, correction=0)
    ours = regress(shown.vectors, shown.targets, 3)
    x, z = (with_bias((f.vectors.double() - mean) / (deviation + 1e-5)) for f in (shown, asked))
    y = 2 * torch.nn.functional.one_hot(shown.targets, 3).double() - 1
    theirs = Ridge(alpha=1024.0, fit_intercept=False, solver="cholesky").fit(x, y)
    difference = ours.scores(asked.vectors, 1024.0).numpy() - theirs.predict(z)
    assert np.abs(difference).max() < 1e-9


def test_one_decomposition_serves_every_strength():
    train, test = cloud(60, 8), cloud(30, 8, seed=1)
    together = scored(train, test, ridges=[0.1, 1024.0], shots=[5])
    apart = [scored(train, test, ridges=[ridge], shots=[5])[0] for ridge in (0.1, 1024.0)]
    assert together == apart


def test_a_feature_that_never_varies_does_no_harm():
    shown = cloud(9, 4)
    shown.vectors[:, 2] = 3.0
    assert regress(shown.vectors, shown.targets, 3).scores(shown.vectors, 1024.0).isfinite().all()


def test_every_class_is_shown_equally_often_and_fewer_lie_within_more():
    targets = np.array([0] * 30 + [1] * 4 + [2] * 20)
    ten, five = (few_per_class(targets, k, seed=1, classes=3) for k in (10, 5))
    assert np.bincount(targets[ten]).tolist() == [10, 4, 10]  # all there are of a rare class
    assert set(five.tolist()) < set(ten.tolist())
    assert not np.array_equal(ten, few_per_class(targets, 10, seed=2, classes=3))


def test_how_many_images_the_smallest_class_gave_is_told():
    found = scored(cloud(30, 6), cloud(9, 6), shots=[4, 100])
    assert [(row["shots"], row["fewest"], row["shown"]) for row in found] == [
        (4, 4, 12),
        (100, 10, 30),
    ]


def test_the_choice_is_that_of_numpys_generator():
    targets = np.array([1, 0, 1, 0, 1, 0])
    rng = np.random.default_rng(7)
    expected = [*rng.permutation([1, 3, 5])[:2], *rng.permutation([0, 2, 4])[:2]]
    assert few_per_class(targets, 2, seed=7, classes=2).tolist() == expected


def test_more_shots_know_more():
    train, test = cloud(300, 6), cloud(200, 6, seed=1)
    found = scored(train, test, shots=[1, 50], seeds=range(3))
    mean = {k: np.mean([row["accuracy"] for row in found if row["shots"] == k]) for k in (1, 50)}
    assert 1 / 3 < mean[1] < mean[50]
    assert {(row["shots"], row["seed"]) for row in found} == {
        (k, s) for k in (1, 50) for s in range(3)
    }
    assert {row["n"] for row in found} == {200}


def test_on_train_itself_what_was_shown_is_not_asked():
    train = cloud(30, 6)
    (row,) = scored(train, None, shots=[4])
    assert (row["shown"], row["n"]) == (12, 18)
    with pytest.raises(VitrailError, match="none is left"):
        scored(train, None, shots=[10])


def test_nearest_neighbors_vote_by_cosine_and_the_nearer_the_louder():
    shown = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    targets = torch.tensor([0, 1, 1])
    votes = nearest_neighbors(shown, targets, torch.tensor([[5.0, 0.1], [0.1, 9.0]]), 2)
    assert votes.argmax(1).tolist() == [0, 1]
    cosine = torch.nn.functional.cosine_similarity(torch.tensor([[5.0, 0.1]]), shown)
    expected = (cosine / 0.07).exp()
    assert torch.allclose(votes[0], torch.stack([expected[0], expected[1:].sum()]), rtol=1e-4)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"shots": [0]}, "shots"),
        ({"shots": []}, "shots"),
        ({"seeds": []}, "seeds"),
        ({"ridges": [0.0]}, "ridge"),
        ({"ridges": [math.nan]}, "ridge"),
        ({"ridges": []}, "ridge"),
    ],
)
def test_numbers_that_cannot_be_meant_are_one_line(wrong, told):
    with pytest.raises(VitrailError, match=rf"^{told} = "):
        scored(cloud(9, 4), cloud(9, 4), **{"shots": [1]} | wrong)


@pytest.fixture
def predictor() -> Predictor:
    model = small("vit", size=32)
    model.preprocess = Preprocessing(size=(32, 32))
    return Predictor(model.eval())


@pytest.fixture
def pool(tmp_path) -> Source:
    """12, 4 and 9 images."""
    return read_classes(write_classes(tmp_path, {"a": 12, "b": 4, "c": 9}))


def test_only_drawn_images_are_read_and_give_the_results_of_all(predictor, pool, monkeypatch):
    every = extract(predictor.model, pool)
    opened: list[int] = []
    image = FolderSource.image
    monkeypatch.setattr(FolderSource, "image", lambda *a: (opened.append(a[1]), image(*a))[1])
    drawn = extract_support(predictor, pool, shots=2, seeds=[0, 1])
    expected = {int(i) for seed in (0, 1) for i in few_per_class(pool.targets, 2, seed, 3)}
    assert sorted(opened) == sorted(expected) == drawn.indices.tolist()
    assert torch.allclose(drawn.vectors, every.vectors[drawn.indices], atol=1e-6)
    options = {"targets": pool.targets, "shots": [1, 2], "seeds": [0, 1]}
    assert scored(drawn, every, **options) == scored(every, every, **options)


def test_an_image_that_cannot_be_decoded_is_replaced_by_the_next(predictor, pool):
    orders = [few_per_class(pool.targets, 100, seed, 3) for seed in (0, 1)]
    of_a = [order[pool.targets[order] == 0].tolist() for order in orders]
    broken = {*of_a[0][:3], of_a[1][0]}
    for index in broken:
        (pool.root / pool.files[index]).write_bytes(b"no image")
    drawn = extract_support(predictor, pool, shots=2, seeds=[0, 1])
    assert {name for name, _ in drawn.skipped} == {pool.names[index] for index in broken}
    good = [[index for index in order if index not in broken][:2] for order in of_a]
    assert {*good[0], *good[1]} <= {*drawn.indices.tolist()}
    rows = scored(drawn, cloud(9, 192), targets=pool.targets, shots=[2], seeds=[0, 1])
    assert [(row["shown"], row["fewest"]) for row in rows] == [(6, 2)] * 2
    usable = ~np.isin(np.arange(25), [*broken])
    assert few_per_class(pool.targets, 2, 0, 3, usable).tolist()[:2] == good[0]


def test_a_class_with_too_few_good_images_falls_short_and_none_are_an_error(predictor, pool):
    for index in np.flatnonzero(pool.targets == 1)[1:]:
        (pool.root / pool.files[index]).write_bytes(b"no image")
    drawn = extract_support(predictor, pool, shots=2, seeds=[0])
    (row,) = scored(drawn, cloud(9, 192), targets=pool.targets, shots=[2])
    assert (row["shown"], row["fewest"]) == (5, 1)
    for file in pool.files:
        (pool.root / file).write_bytes(b"no image")
    with pytest.raises(VitrailError, match="no image can be decoded"):
        extract_support(predictor, pool, shots=2, seeds=[0])


def test_on_train_itself_a_broken_image_is_neither_shown_nor_asked():
    train = cloud(30, 6)
    there = np.delete(np.arange(30), few_per_class(train.targets.numpy(), 1, 0, 3))
    known = Features(train.vectors[there], train.targets[there], there, ())
    (row,) = scored(known, None, targets=train.targets.numpy(), shots=[4])
    assert (row["shown"], row["n"]) == (12, 15)
