"""Folders as users have them."""

import os
import pickle
import unicodedata

import pytest
from PIL import Image

from tests.data.lists import write_lists
from tests.data.pictures import contents, encoded, photo, same, write, write_classes
from vitrail.data.folder import SUFFIXES, open_folder, open_lists
from vitrail.data.opening import open_data
from vitrail.errors import VitrailError


def failure(folder) -> str:
    with pytest.raises(VitrailError) as caught:
        open_folder(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sub_folders_are_classes_in_the_order_of_their_names(tmp_path):
    data = open_folder(write_classes(tmp_path / "photos", {"dog": 2, "cat": 3}))
    assert data.name == "photos"
    assert data.labels == ("cat", "dog")
    assert data.train.names == ["cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png"]
    assert data.train.targets.tolist() == [0, 0, 0, 1, 1]
    assert not data.train.blocks.any()
    assert same(data.train.image(3), photo(0))
    assert (data.val, data.test) == (None, None)


def test_classes_that_are_numbers_stand_in_the_order_of_numbers(tmp_path):
    data = open_folder(write_classes(tmp_path, {"10": 1, "9": 1, "2": 1}))
    assert data.labels == ("2", "9", "10")


def test_a_source_travels_to_another_process(tmp_path):
    source = open_folder(write_classes(tmp_path, {"a": 1, "b": 1})).train
    again = pickle.loads(pickle.dumps(source))
    assert same(again.image(1), source.image(1))


@pytest.mark.parametrize(
    "suffix", ["JPG", "Jpeg", "png", "BMP", "gif", "WebP", "tif", "TIFF", "ppm"]
)
def test_suffixes_are_read_in_either_case(tmp_path, suffix):
    write(tmp_path / "a" / f"1.{suffix}")
    write(tmp_path / "b" / "1.png")
    source = open_folder(tmp_path).train
    assert source.names[0] == f"a/1.{suffix}"
    assert source.image(0).size == (16, 12)


def test_every_suffix_is_one_that_pillow_opens():
    Image.init()
    assert {f".{suffix}" for suffix in SUFFIXES} <= set(Image.registered_extensions())


def test_folders_inside_a_class_belong_to_it(tmp_path):
    write(tmp_path / "a" / "2020" / "summer" / "1.png")
    write(tmp_path / "b" / "1.png")
    assert contents(open_folder(tmp_path).train) == {"a/2020/summer/1.png": "a", "b/1.png": "b"}


def test_what_systems_and_archives_leave_behind_is_passed_over(tmp_path, capsys):
    write_classes(tmp_path, {"a": 1, "b": 1})
    for name in (".DS_Store", "Thumbs.db", "LICENSE.txt", "a/.hidden.png", "a/._0.png", "b/x.txt"):
        (tmp_path / name).write_bytes(encoded())
    write(tmp_path / "__MACOSX" / "1.png")
    write(tmp_path / ".git" / "1.png")
    assert list(contents(open_folder(tmp_path).train)) == ["a/0.png", "b/0.png"]
    assert capsys.readouterr().err == ""


def test_a_name_is_the_same_however_the_disk_spells_it(tmp_path):
    apart = unicodedata.normalize("NFD", "Löwenzahn/größe.png")
    assert apart != "Löwenzahn/größe.png"
    write(tmp_path / apart)
    write(tmp_path / "雛菊" / "一.png")
    source = open_folder(tmp_path).train
    assert source.names == ["Löwenzahn/größe.png", "雛菊/一.png"]
    assert source.labels == ("Löwenzahn", "雛菊")
    assert same(source.image(0), photo())


def test_two_spellings_of_one_name_stay_two_pictures(tmp_path):
    for form in ("NFC", "NFD"):
        write(tmp_path / "a" / unicodedata.normalize(form, "é.png"))
    write(tmp_path / "b" / "1.png")
    assert len(set(open_folder(tmp_path).train.names)) == 3


def test_names_that_are_no_text_are_read(tmp_path):
    write_classes(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "a" / os.fsdecode(b"\xff.png")).write_bytes(encoded(7))
    source = open_folder(tmp_path).train
    assert source.names[1] == "a/\\xff.png"
    assert same(source.image(1), photo(7))


def test_links_are_followed_and_circles_end(tmp_path):
    write_classes(tmp_path / "elsewhere", {"cats": 1})
    write(tmp_path / "photos" / "dog" / "1.png")
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "elsewhere" / "cats")
    (tmp_path / "photos" / "dog" / "up").symlink_to(tmp_path / "photos")
    (tmp_path / "photos" / "dog" / "self").symlink_to("self")
    (tmp_path / "photos" / "dog" / "2.png").symlink_to(tmp_path / "photos" / "dog" / "1.png")
    found = open_folder(tmp_path / "photos").train
    assert found.names == ["cat/0.png", "dog/1.png", "dog/2.png"]


def test_no_link_gives_a_picture_two_labels(tmp_path):
    for part in ("train", "test"):
        write_classes(tmp_path / part, {"cat": 1, "dog": 1})
    links = {"all": "..", "parts": "../..", "cats": "../cat"}
    for name, place in links.items():
        (tmp_path / "train" / "dog" / name).symlink_to(place)
    assert open_folder(tmp_path).part("train").names == ["cat/0.png", "dog/0.png"]


def test_what_training_wrote_is_no_class(tmp_path):
    write_classes(tmp_path, {"cat": 1, "dog": 1, "runs/first": 1, "runs/first/inspection": 1})
    for name in ("run.json", "config.toml"):
        (tmp_path / "runs" / "first" / name).touch()
    assert open_folder(tmp_path).labels == ("cat", "dog")


def test_a_pipe_is_not_waited_for(tmp_path):
    write_classes(tmp_path, {"cat": 1, "dog": 1})
    os.mkfifo(tmp_path / "cat" / "pipe.png")
    assert open_folder(tmp_path).train.names == ["cat/0.png", "dog/0.png"]


def test_parts_have_other_names_too(tmp_path):
    for part in ("Training", "dev", "testing"):
        write_classes(tmp_path / part, {"cat": 1, "dog": 1})
    assert list(open_folder(tmp_path).parts) == ["train", "val", "test"]


def test_a_link_to_nothing_is_named_when_it_is_opened(tmp_path):
    write_classes(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    source = open_folder(tmp_path).train
    with pytest.raises(VitrailError, match=r"gone\.png does not exist"):
        source.image(1)


def test_an_empty_class_is_left_out_and_said(tmp_path, capsys):
    write_classes(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "c").mkdir()
    assert open_folder(tmp_path).labels == ("a", "b")
    assert capsys.readouterr().err == (
        f"{tmp_path}/: left out class folders without images (1): 'c'\n"
    )


def test_a_folder_without_classes_says_what_is_expected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "photos" / "1.png")
    assert failure((tmp_path / "photos").relative_to(tmp_path)) == (
        "photos/ has no sub-folders; expected one folder per class, e.g. photos/cat/1.jpg"
    )


def test_a_folder_without_pictures_or_with_one_class_is_an_error(tmp_path):
    (tmp_path / "a").mkdir()
    assert "has no images in its sub-folders" in failure(tmp_path)
    write(tmp_path / "a" / "1.png")
    assert "has images of one class only, 'a'; expected one folder per class" in failure(tmp_path)
    write_classes(tmp_path / "a", {"cat": 1, "dog": 1})
    assert f"did you mean {tmp_path}/a?" in failure(tmp_path)


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_parts_above_the_classes_are_parts(tmp_path, val):
    for start, part in enumerate(("Train", val, "test")):
        write_classes(tmp_path / part, {"a": 1, "b": 2}, start=10 * start)
    write(tmp_path / "annotations" / "deeper" / "x.png")
    data = open_folder(tmp_path)
    assert data.train.names == data.val.names == data.test.names
    assert same(data.val.image(2), photo(12))


def test_a_test_part_alone_is_a_test_part(tmp_path):
    data = open_folder(write_classes(tmp_path / "test", {"a": 1, "b": 2}).parent)
    assert list(data.parts) == ["test"]
    with pytest.raises(VitrailError, match="has no train split; it has test"):
        data.part("train")


def test_a_class_may_be_called_train(tmp_path):
    write_classes(tmp_path, {"bus": 1, "train": 2})
    write(tmp_path / "train" / "steam" / "1.png")
    assert open_folder(tmp_path).labels == ("bus", "train")


def test_an_empty_part_is_left_out_and_said(tmp_path, capsys):
    write_classes(tmp_path / "train", {"a": 1, "b": 1})
    (tmp_path / "val").mkdir()
    assert list(open_folder(tmp_path).parts) == ["train"]
    assert capsys.readouterr().err == f"{tmp_path}/val/ is empty and left out\n"


def test_parts_without_classes_are_not_taken_for_classes(tmp_path):
    write_classes(tmp_path, {"train": 3, "test": 3})
    assert "train/ has no sub-folders; expected one folder per class" in failure(tmp_path)


def test_classes_that_differ_between_parts_are_named(tmp_path):
    write_classes(tmp_path / "train", {"a": 1, "b": 1, "fish": 1})
    write_classes(tmp_path / "test", {"a": 1, "b": 1})
    message = failure(tmp_path)
    assert message.startswith(f"{tmp_path}/train has images of 'fish' and {tmp_path}/test has")
    write_classes(tmp_path / "test", {"fish": 1, "bird": 1})
    assert failure(tmp_path).startswith(f"{tmp_path}/test has images of 'bird'")


def test_one_part_under_two_names_is_an_error(tmp_path):
    for part in ("train", "val", "valid"):
        write_classes(tmp_path / part, {"a": 1, "b": 1})
    assert "keep one of them" in failure(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_folder_that_may_not_be_read_is_named(tmp_path):
    write_classes(tmp_path, {"a": 1, "b": 1})
    (tmp_path / "a").chmod(0)
    assert "a (Permission denied)" in failure(tmp_path)


def test_images_that_are_left_out_are_counted_in_one_line(tmp_path, capsys):
    folder = write_classes(tmp_path / "photos", {"a": 2, "b": 2})
    write(folder / "loose.png")
    (folder / "notes.txt").write_text("no image")
    for name in ("a/1.HEIC", "b/deep/2.heif", "c/3.heic", "4.heic"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
    assert open_folder(folder).labels == ("a", "b")
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        f"{folder}/: left out images outside the class folders (1) and .heic and .heif files, "
        "which have to be saved as JPEG (4)"
    )
    assert second.endswith("left out class folders without images (1): 'c'")


def test_images_beside_parts_are_counted_and_flat_images_without_classes_are_not(tmp_path, capsys):
    for part in ("train", "test"):
        write_classes(tmp_path / "photos" / part, {"a": 1, "b": 1})
    write(tmp_path / "photos" / "loose.png")
    open_folder(tmp_path / "photos")
    line = f"{tmp_path / 'photos'}/: left out images outside the class folders (1)\n"
    assert capsys.readouterr().err == line
    write(tmp_path / "flat" / "1.png")
    assert len(open_folder(tmp_path / "flat", unlabeled=True).train.targets) == 1
    assert not capsys.readouterr().err


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
    assert data.val.image(3).size == (16, 12)


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
        ("test.txt", "\nimages/one.png 100000\n", "line 2: class 100000 is too large"),
        ("test.txt", f"images/one.png {'9' * 5000}\n", "line 1: class 9{20} is too large"),
        ("test.txt", "gone.png 1\n", r"test.txt lists gone.png, which is not in .*cifar$"),
        ("val200.txt", "images/one.png 1\n", "val200.txt lists 1 images; expected 200$"),
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
