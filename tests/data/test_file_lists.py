"""Lists of files beside the pictures, in the form in which VTAB-1k is handed around."""

import pytest

from tests.data.lists import write_lists
from vitrail.data.file_lists import open_lists
from vitrail.data.opening import open_data
from vitrail.errors import VitrailError


def test_every_list_is_a_part_in_its_own_order(tmp_path):
    folder = write_lists(tmp_path / "cifar")
    data = open_lists(folder)
    assert {part: len(source.targets) for part, source in data.parts.items()} == {
        "train": 800,
        "val": 200,
        "test": 30,
    }
    assert data.name == "cifar"
    assert data.labels == tuple(map(str, range(10)))
    assert data.train.names[:2] == ["images/train800/0000.png", "images/train800/0001.png"]
    assert data.train.targets[:12].tolist() == [*range(10), 0, 1]
    assert data.val.picture(3).size == (16, 12)


def test_a_folder_with_lists_is_data_like_any_other(tmp_path):
    data = open_data(write_lists(tmp_path / "cifar"))
    assert [len(part.targets) for part in data.parts.values()] == [800, 200, 30]


def test_one_list_of_a_thousand_has_no_val_part_of_its_own(tmp_path):
    folder = write_lists(tmp_path / "cifar")
    (folder / "train800.txt").unlink()
    data = open_lists(folder)
    assert {part: len(x.targets) for part, x in data.parts.items()} == {"train": 1000, "test": 30}


def test_names_may_have_spaces_and_lines_may_be_blank(tmp_path):
    folder = write_lists(tmp_path / "cifar")
    (folder / "a b.png").symlink_to(folder / "images" / "one.png")
    (folder / "test.txt").write_text("\na b.png 0000003\n\n")
    assert open_lists(folder).test.names == ["a b.png"]
    assert open_lists(folder).test.targets.tolist() == [3]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("test.txt", None, "has no test.txt; put it beside train800.txt, train800val200.txt, val"),
        ("test.txt", "", "test.txt is empty; expected lines such as images/000001.jpg 7"),
        ("test.txt", "images/one.png\n", "test.txt, line 1: expected a path, a space and a class"),
        ("test.txt", "images/one.png cat\n", "line 1: expected a path"),
        ("test.txt", "\nimages/one.png 100000\n", "line 2: class 100000 is not below 100,000"),
        ("test.txt", f"images/one.png {'9' * 5000}\n", "line 1: class 9{20} is not below"),
        ("test.txt", "gone.png 1\n", r"test.txt names gone.png, which is not in .*cifar$"),
        ("val200.txt", "images/one.png 1\n", "val200.txt lists 1 pictures; expected 200$"),
    ],
)
def test_a_list_that_cannot_be_meant_is_one_line(tmp_path, file, text, message):
    folder = write_lists(tmp_path / "cifar")
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(VitrailError, match=message) as caught:
        open_lists(folder)
    assert "\n" not in str(caught.value)


def test_train_without_val_is_one_line(tmp_path):
    folder = write_lists(tmp_path / "cifar")
    for name in ("val200.txt", "train800val200.txt"):
        (folder / name).unlink()
    with pytest.raises(VitrailError, match=r"has train800.txt but no val200.txt; add it, or"):
        open_lists(folder)
