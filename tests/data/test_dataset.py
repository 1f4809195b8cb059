"""What a split must keep, whatever the data."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.data.dataset import ArraySource, Splits, hash_fractions, hold_out, random_subset
from vitrail.errors import VitrailError

NAMES = st.lists(st.tuples(st.integers(0, 3), st.text(min_size=1, max_size=6)), unique=True)
FRACTIONS = st.sampled_from([0.0, 0.1, 0.25, 0.4])


def source_of(items: list[tuple[int, str]]) -> ArraySource:
    targets = np.array([label for label, _ in items], dtype=np.int64)
    names = [f"{label}/{name}" for label, name in items]
    pixels = np.zeros((len(items), 1, 1), np.uint8)
    return ArraySource(("0", "1", "2", "3"), targets, names, pixels)


def many(n: int, classes: int = 4) -> ArraySource:
    return source_of([(i % classes, f"{i}.jpg") for i in range(n)])


def split(source: ArraySource, val: float, test: float, how="hash") -> dict[str, list[str]]:
    data = hold_out(Splits(name="x", train=source), val=val, test=test, how=how)
    return {name: list(part.names) for name, part in data.parts.items()}


def split_if_any(source: ArraySource, val: float, test: float, how="hash") -> dict[str, set[str]]:
    """The parts as sets; nothing held out where there are too few images for that."""
    try:
        return {name: set(names) for name, names in split(source, val, test, how).items()}
    except VitrailError as error:
        if "too few images" not in str(error):
            raise
        return {}


@settings(deadline=None)
@given(NAMES, FRACTIONS, FRACTIONS, st.sampled_from(["hash", "stratified"]))
def test_parts_are_disjoint_and_lose_nothing(items, val, test, how):
    source = source_of(items)
    parts = split_if_any(source, val, test, how)
    if parts:
        assert set().union(*parts.values()) == set(source.names)
        assert sum(map(len, parts.values())) == len(source.names)
        assert set(parts) == {"train"} | ({"val"} if val else set()) | ({"test"} if test else set())


@settings(deadline=None)
@given(NAMES, NAMES, FRACTIONS, FRACTIONS)
def test_added_files_move_only_what_small_classes_lent(items, more, val, test):
    before = split_if_any(source_of(items), val, test)
    after = split_if_any(source_of(list(dict.fromkeys([*items, *more]))), val, test)
    alone = by_hash_alone([f"{label}/{name}" for label, name in items], val, test)
    for name in alone if before and after else ():
        now, then = (next(p for p in x if name in x[p]) for x in (after, before))
        # What moves was not where its hash alone puts it, before or since.
        assert now == then or alone[name] != then or alone[name] != now


def by_hash_alone(names: list[str], val: float, test: float) -> dict[str, str]:
    return {
        name: "test" if at < test else "val" if at < test + val else "train"
        for name, at in zip(names, hash_fractions(names), strict=True)
    }


@settings(deadline=None)
@given(NAMES, FRACTIONS, FRACTIONS)
def test_a_class_that_a_hash_leaves_out_of_a_part_gives_its_nearest_image(items, val, test):
    source = source_of(items)
    parts = split_if_any(source, val, test)
    for label in source.labels if parts else ():
        own = sorted(
            (name for name in source.names if name.startswith(f"{label}/")),
            key=lambda name: hash_fractions([name])[0],
        )
        found = [[name for name in own if name in parts.get(x, ())] for x in ("test", "val")]
        alone = by_hash_alone(own, val, test)
        if not own:
            continue
        # In the order of their hashes: test, then val, then train, which always has the last.
        assert own[: len(found[0] + found[1])] == found[0] + found[1] != own
        wanted = [max(1, list(alone.values()).count("test")) if test else 0]
        wanted[0] = min(wanted[0], max(1, len(own) - 2))
        both = max(wanted[0] + 1, sum(x != "train" for x in alone.values()))
        wanted.append(both if val else wanted[0])
        assert [len(found[0]), len(found[0] + found[1])] == [min(n, len(own) - 1) for n in wanted]


def test_classes_of_many_images_are_split_as_ever():
    source = many(8000)
    assert split(source, 0.1, 0.2) == split(source, 0.1, 0.2, "hash alone")
    alone = by_hash_alone(source.names, 0.1, 0.2)
    assert all(alone[name] == p for p, x in split(source, 0.1, 0.2).items() for name in x)


def test_models_of_earlier_versions_keep_their_split():
    items = [(0, f"{i}") for i in range(200)] + [(1, "a"), (1, "b")]
    for how, lent in (("hash", 1), ("hash alone", 0)):
        parts = split(source_of(items), 0.1, 0.1, how)
        assert sum(name.startswith("1/") for name in parts["test"]) == lent


@settings(deadline=None)
@given(NAMES, FRACTIONS, FRACTIONS, FRACTIONS, st.sampled_from(["hash", "stratified"]))
def test_another_val_leaves_test_as_it_is(items, val, other, test, how):
    one, two = (split_if_any(source_of(items), v, test, how) for v in (val, other))
    if one and two:
        assert one.get("test") == two.get("test")


@settings(deadline=None)
@given(NAMES, FRACTIONS, st.sampled_from([0.1, 0.4, 0.59]))
def test_an_exact_split_is_exact_and_leaves_every_class_something_to_learn(items, val, test):
    source = source_of(items)
    parts = split_if_any(source, val, test, "stratified")
    for label in source.labels if parts else ():
        counts = {
            part: sum(name.startswith(f"{label}/") for name in names)
            for part, names in parts.items()
        }
        n = sum(counts.values())
        assert counts["test"] == max(0, min(round(n * test), n - 1))
        wanted = min(round(n * val), n - 1 - counts["test"]) if n else 0
        assert counts.get("val", 0) == wanted
        assert counts["train"] >= min(n, 1)


@settings(deadline=None)
@given(NAMES.filter(len), st.data(), st.integers(0, 5))
def test_a_smaller_subset_is_part_of_a_larger_one(items, data, seed):
    source = source_of(items)
    large = data.draw(st.integers(1, len(items)))
    small = data.draw(st.integers(1, large))
    one, two = (random_subset(source, n, seed).names for n in (small, large))
    assert len(one) == small
    assert set(one) <= set(two)


def test_fractions_come_out_about_right_in_every_class():
    parts = split(many(8000), 0.1, 0.2)
    for label in "0123":
        n = {part: sum(x.startswith(label) for x in names) for part, names in parts.items()}
        assert abs(n["test"] - 400) < 80
        assert abs(n["val"] - 200) < 60


def test_the_split_is_this_one_for_ever():
    # People compare numbers across years: a change here makes them wrong.
    parts = split(many(20), 0.1, 0.2, "hash alone")
    assert parts["test"] == ["1/5.jpg", "1/9.jpg", "1/13.jpg", "0/16.jpg", "1/17.jpg"]
    assert parts["val"] == ["3/15.jpg"]
    parts = split(many(20), 0.1, 0.2)
    assert parts["test"] == ["2/2.jpg", "1/5.jpg", "1/9.jpg", "3/15.jpg", "0/16.jpg", "1/17.jpg"]
    assert parts["val"] == ["3/3.jpg", "0/12.jpg", "1/13.jpg", "2/18.jpg"]
    assert random_subset(many(20), 3, seed=1).names == ["1/13.jpg", "2/14.jpg", "3/19.jpg"]


def test_the_order_of_files_does_not_matter():
    source = many(200)
    turned = source_of([(int(n[0]), n[2:]) for n in reversed(source.names)])
    one, two = split(source, 0.1, 0.1), split(turned, 0.1, 0.1)
    assert {part: set(names) for part, names in one.items()} == {
        part: set(names) for part, names in two.items()
    }


@pytest.mark.parametrize("how", ["hash", "stratified"])
def test_a_part_that_the_data_brings_is_kept_and_the_other_taken_from_train(how):
    first = hold_out(Splits(name="x", train=many(1000)), val=0.0, test=0.2, how=how)
    assert first.val is None
    again = hold_out(first, val=0.1, test=0.2, how=how)
    assert again.test is first.test
    # Not empty, although train holds nothing that falls below 0.2.
    assert 50 < len(again.val.names) < 110
    assert set(again.val.names) <= set(first.train.names)


def test_without_train_nothing_is_taken_out():
    data = Splits(name="x", test=many(10))
    assert hold_out(data, val=0.1, test=0.1, how="hash") == data


def test_a_subset_is_drawn_by_its_seed():
    drawn = [random_subset(many(100), 10, seed).names for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("size", [-1, 101])
def test_a_subset_larger_than_train_says_how_many_there_are(size):
    with pytest.raises(VitrailError, match=f"data.subset={size}: train has 100 images"):
        random_subset(many(100), size, 0)


def test_too_few_images_are_one_line_that_says_what_to_do():
    with pytest.raises(VitrailError) as caught:
        split(many(4), 0.1, 0.1)
    assert str(caught.value) == (
        "x has too few images (4): the test split would be empty; use more images of a class "
        "(three are enough for train, val and test), or data.test=0 for none"
    )
    with pytest.raises(
        VitrailError, match=r"x has too few images \(8\): the val split would be empty; use more"
    ):
        split(many(8), 0.1, 0.1)
    assert [*map(len, split(many(12), 0.1, 0.1).values())] == [4, 4, 4]
    with pytest.raises(VitrailError, match=r"be empty; use data\.split=hash, or more images, or"):
        split(many(12), 0.1, 0.1, "stratified")


@pytest.mark.parametrize("how", ["hash", "stratified"])
def test_the_only_image_of_a_class_is_trained_on(how):
    items = [(0, f"{i}") for i in range(50)] + [(1, "5")]
    assert "1/5" in split(source_of(items), 0.1, 0.85, how)["train"]


@pytest.mark.parametrize(
    ("val", "test"), [(0.5, 0.5), (-0.1, 0.0), (0.0, 1.0), (float("nan"), 0.0)]
)
def test_fractions_that_leave_nothing_are_refused(val, test):
    with pytest.raises(VitrailError, match="leave nothing to train on"):
        split(many(100), val, test)
