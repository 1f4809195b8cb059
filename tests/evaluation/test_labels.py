import pytest

from vitrail.data.dataset import imagenet_classes
from vitrail.errors import VitrailError
from vitrail.evaluation.labels import NEW_HEAD, class_order


def test_the_same_classes_need_no_change():
    assert class_order(("a", "b"), ("a", "b")) is None
    assert class_order(("crane", "b", "crane"), ("crane", "b", "crane")) is None
    assert class_order((), ("a", "b")) is None


WORDNET = ("n01440764", *(f"n{i:08d}" for i in range(2_000_000, 2_000_998)), "n15075141")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (tuple(map(str, range(1000))), "--labels imagenet"),
        (("2", "10", "999"), "--labels imagenet"),
        (WORDNET, "--labels imagenet"),
        (tuple("12345"), NEW_HEAD),
        (("7", "2000"), NEW_HEAD),
        (("cat", "dog"), NEW_HEAD),
        ((), NEW_HEAD),
    ],
)
def test_folders_that_may_be_imagenets_are_told_how_to_be_read(labels, says):
    with pytest.raises(VitrailError, match="this model has 1000 classes") as caught:
        class_order(imagenet_classes(), labels)
    assert str(caught.value).endswith(says)
    with pytest.raises(VitrailError) as caught:
        class_order(("a", "b"), labels)
    assert str(caught.value).endswith(NEW_HEAD)


def test_another_order_is_mapped():
    known, labels = ("a", "b", "c"), ("c", "a", "b")
    order = class_order(known, labels)
    assert order is not None
    assert tuple(known[place] for place in order) == labels


@pytest.mark.parametrize(
    ("known", "labels", "says"),
    [
        (("a", "b"), ("a", "b", "c"), r"has 2 classes, pets has 3 \('c' unknown to the model\)"),
        (("a", "b", "c"), ("a", "b"), r"has 3 classes, pets has 2 \('c' not in pets\)"),
        (
            ("a", "b"),
            tuple("vwxyz"),
            r"\('v', 'w', 'x' and 2 more unknown to the model\); train a new",
        ),
        (("crane", "crane", "a"), ("a", "crane", "crane"), "share a name"),
        (("a", "b", "b"), ("a", "a", "b"), "share a name"),
    ],
)
def test_other_classes_are_one_line_that_names_them(known, labels, says):
    with pytest.raises(VitrailError, match=says) as caught:
        class_order(known, labels, "pets")
    assert "\n" not in str(caught.value)
