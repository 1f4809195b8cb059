"""What is known again, and what is not."""

import io

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from tests.data.gallery import gallery, scene
from vitrail.duplicates import fingerprints as module
from vitrail.duplicates.fingerprints import fingerprint, fingerprints, hashes, is_flat, views
from vitrail.errors import FailureError


def file_of(image: Image.Image, kind: str, **options) -> Image.Image:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return Image.open(file).convert("RGB")


def thumbnail(image: Image.Image) -> np.ndarray:
    return np.frombuffer(fingerprint(image)[1], np.uint8)[None]


def bits_between(one: np.ndarray, view, other: np.ndarray) -> int:
    plain = views(crops=False, mirrored=False)[0]
    return int(np.bitwise_count(hashes(one, view) ^ hashes(other, plain))[0])


def test_the_digest_is_one_of_pixels_not_of_files():
    notes = PngInfo()
    notes.add_text("Author", "someone")
    copies = [file_of(scene(0), "PNG", pnginfo=notes), file_of(scene(0), "BMP"), scene(0)]
    assert len({fingerprint(copy)[0] for copy in copies}) == 1
    assert fingerprint(file_of(scene(0), "JPEG"))[0] != fingerprint(scene(0))[0]


def test_the_same_bytes_in_another_shape_are_another_picture():
    wide, tall = Image.new("RGB", (8, 2)), Image.new("RGB", (2, 8))
    assert wide.tobytes() == tall.tobytes()
    assert fingerprint(wide)[0] != fingerprint(tall)[0]


def test_a_picture_takes_less_than_300_bytes():
    prints = fingerprints(gallery([scene(seed) for seed in range(10)]))
    arrays = (prints.indices, prints.digests, prints.thumbnails)
    assert sum(array.nbytes for array in arrays) / len(prints) < 300


def test_the_hash_of_a_mirror_image_follows_from_the_thumbnail():
    one, mirrored = (thumbnail(image) for image in (scene(0), ImageOps.mirror(scene(0))))
    plain, flip = views(crops=False, mirrored=True)
    assert bits_between(one, flip, mirrored) == 0
    assert bits_between(one, plain, mirrored) > 16


@pytest.mark.parametrize("number", range(1, 11))
def test_the_hash_of_a_crop_nearly_follows_from_the_thumbnail(number):
    part = 0.95 if number <= 5 else 0.9
    y, x = [(0.5, 0.5), (0, 0), (0, 1), (1, 0), (1, 1)][(number - 1) % 5]
    image = scene(1, 400, 400)
    side, room = round(400 * part), 400 - round(400 * part)
    crop = image.crop((x * room, y * room, x * room + side, y * room + side))
    every = views(crops=True, mirrored=False)
    assert len(every) == 11
    apart = [bits_between(thumbnail(image), view, thumbnail(crop)) for view in every]
    assert apart[number] <= 5
    assert apart[number] == min(apart)
    assert apart[0] > apart[number]


def test_broken_pictures_are_named_and_the_others_keep_their_numbers():
    prints = fingerprints(gallery([None, scene(0), None, scene(1)], "p"))
    assert prints.indices.tolist() == [1, 3]
    assert (prints.thumbnails[1] == thumbnail(scene(1))[0]).all()
    assert [(one.name, one.reason) for one in prints.broken] == [
        ("p0", "p0 cannot be decoded: it is torn"),
        ("p2", "p2 cannot be decoded: it is torn"),
    ]


def test_nothing_has_no_fingerprints():
    assert len(fingerprints(gallery([]))) == 0


def test_pictures_of_almost_one_color_are_flat():
    generator = np.random.default_rng(0)
    noise = np.clip(250 + 3 * generator.standard_normal((64, 64, 3)), 0, 255).astype(np.uint8)
    prints = [thumbnail(Image.fromarray(noise)), thumbnail(scene(0))]
    assert is_flat(np.concatenate(prints)).tolist() == [True, False]


def test_very_many_thumbnails_lie_in_a_file_and_are_the_same(monkeypatch, tmp_path):
    pictures = gallery([scene(0), None, scene(1), scene(2)])
    here = fingerprints(pictures)
    monkeypatch.setattr(module, "IN_MEMORY", 3)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    there = fingerprints(pictures)
    assert isinstance(there.thumbnails.base.base, np.memmap)
    assert list(tmp_path.iterdir()) == []
    for name in ("indices", "digests", "thumbnails"):
        assert np.array_equal(getattr(here, name), getattr(there, name))
    assert here.broken == there.broken


def test_a_disk_that_cannot_hold_them_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "IN_MEMORY", 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(FailureError, match=r"fingerprints of 1 images.*TMPDIR"):
        fingerprints(gallery([scene(0)]))
