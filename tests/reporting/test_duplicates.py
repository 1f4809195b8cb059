"""The page about duplicates."""

from pathlib import Path

from PIL import Image

from tests.data.gallery import gallery, scene
from tests.reporting.pages import Page
from vitrail.data.dataset import Splits
from vitrail.duplicates.find import find
from vitrail.reporting import duplicates


def smaller(image: Image.Image) -> Image.Image:
    return image.resize((100, 76))


def test_the_page_counts_and_shows_pairs(tmp_path: Path):
    train = gallery([scene(0), scene(1), scene(2), None], "large/")
    other = Splits(name="<small>", test=gallery([scene(0), smaller(scene(1)), scene(9)], "small/"))
    found = find(Splits(name="photos", train=train), against=[other])
    target = duplicates.write(found, tmp_path / "page.html")
    page = Page(target)
    row = page.row("train")
    assert row == ["train", "test of <small>", "2", "1", "2", "2", "yes"]
    assert page.row("train", after=1) == ["train", "train", "0", "0", "0", "0", "no"]
    images = [uri for uri in page.addresses if uri.startswith("data:image/jpeg")]
    assert len(images) == 4
    assert "identical pixels large/0 small/0" in page.text
    assert "of 64 bits differ large/1 small/1" in page.text
    assert "1 image could not be read" in page.text
    assert "<small>" not in page.html
    assert not [uri for uri in page.addresses if not uri.startswith("data:")]


def test_the_least_sure_pairs_are_shown_as_well(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(duplicates, "CLOSEST", 1)
    monkeypatch.setattr(duplicates, "WEAKEST", 1)
    train = gallery([scene(seed) for seed in range(4)], "a")
    other = Splits(name="b", test=gallery([smaller(scene(seed)) for seed in range(4)], "b"))
    found = find(Splits(name="photos", train=train), against=[other], inside=False)
    chapter = duplicates.chapter(found.sections[0])
    assert [pair for pair, _ in chapter.closest] == [found.sections[0].pairs[0]]
    assert [pair for pair, _ in chapter.weakest] == [found.sections[0].pairs[-1]]


def test_an_image_that_is_gone_leaves_its_place_empty(tmp_path: Path):
    images: list[Image.Image | None] = [scene(0)]
    data = Splits(name="photos", train=gallery(images), test=gallery([scene(0)]))
    found = find(data)
    images[0] = None
    page = Page(duplicates.write(found, tmp_path / "page.html"))
    assert "no image" in page.text
