import base64
import io

import numpy as np
import pytest
from PIL import Image

from tests.evaluation.examples import LABELS, pictures
from vitrail.data.dataset import Subset
from vitrail.errors import VitrailError
from vitrail.evaluation.metrics import Predictions, measure
from vitrail.evaluation.mistakes import mistakes, thumbnail, with_examples


def answers(source, guesses, sure) -> Predictions:
    return Predictions(
        names=list(source.names),
        targets=source.targets,
        guesses=guesses[:, None],
        probabilities=np.asarray(sure)[:, None],
        loss=np.ones(len(guesses)),
        labels=source.labels,
    )


def decoded(uri: str) -> Image.Image:
    kind, data = uri.split(",")
    assert kind == "data:image/jpeg;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_surest_mistakes_come_first_and_what_is_right_never():
    source = pictures(60)
    guesses = (source.targets + np.arange(60) % 2) % len(LABELS)
    sure = np.random.default_rng(0).random(60)
    found = mistakes(answers(source, guesses, sure), source)
    expected = sorted(range(1, 60, 2), key=lambda i: -sure[i])[:24]
    assert [row["name"] for row in found] == [f"{i}.png" for i in expected]
    for row, i in zip(found, expected, strict=True):
        assert row["truth"] == LABELS[source.targets[i]]
        assert row["guess"] == LABELS[guesses[i]]
        assert row["probability"] == pytest.approx(sure[i])
        error = np.asarray(decoded(row["thumbnail"])).mean() - source.pixels[i].mean()
        assert abs(error) < 6


def test_every_frequent_confusion_has_its_surest_examples():
    source = pictures(60)
    guesses = (source.targets + 1) % len(LABELS)
    sure = np.random.default_rng(0).random(60)
    sure[source.targets == 0] /= 100  # none of these is among the surest mistakes
    whole = answers(source, guesses, sure)
    confused = measure(whole)["confused"]
    found = with_examples(confused, whole, source)
    assert [{k: v for k, v in row.items() if k != "examples"} for row in found] == confused
    for row in found:
        label = LABELS.index(row["truth"])
        best = sorted(np.flatnonzero(source.targets == label), key=lambda i: -sure[i])[:2]
        assert [one["name"] for one in row["examples"]] == [f"{i}.png" for i in best]
        assert all(
            (one["truth"], one["guess"]) == (row["truth"], row["guess"]) for one in row["examples"]
        )
    assert with_examples([], whole, source) == []


def test_pictures_are_found_by_name_where_some_are_missing_from_the_answers():
    part = Subset(pictures(9), np.array([7, 2, 5]))
    whole = answers(part, (part.targets + 1) % len(LABELS), np.array([0.5, 0.9, 0.7]))
    names = [row["name"] for row in mistakes(whole, part)]
    assert names == ["2.png", "5.png", "7.png"]


def test_a_picture_that_vanished_since_costs_only_its_thumbnail():
    source = pictures(3, errors={1: VitrailError("gone")})
    whole = answers(source, (source.targets + 1) % len(LABELS), np.array([0.5, 0.9, 0.7]))
    assert [row["name"] for row in mistakes(whole, source)] == ["2.png", "0.png"]


@pytest.mark.parametrize(
    ("size", "small"),
    [
        ((640, 320), (160, 80)),
        ((30, 20), (30, 20)),
        ((5000, 2), (160, 1)),
        ((160, 161), (159, 160)),
    ],
)
def test_thumbnails_keep_the_aspect_and_never_grow(size, small):
    picture = Image.new("RGB", size, "red")
    assert decoded(thumbnail(picture)).size == small
    assert picture.size == size
