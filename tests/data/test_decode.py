"""Every file that is an image becomes upright RGB; every other becomes one line."""

import io
import os
import zlib

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageOps

from tests.pictures import many_scans
from vitrail.data import decode as decoding
from vitrail.data.decode import decode, decode_pixels, open_image, upright
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError


def noise(height: int, width: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path):
    picture = noise(64, 96)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right
    picture.save(tmp_path / "turned.png", exif=exif)
    preprocess = Preprocessing(size=(96, 64))
    expected = preprocess(picture.transpose(Image.Transpose.ROTATE_270))
    assert torch.equal(preprocess(tmp_path / "turned.png"), expected)


def test_a_broken_picture_is_one_line(tmp_path):
    noise(64, 64).save(tmp_path / "a.jpg")
    data = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "zero.jpg").write_bytes(b"")
    for name in ("cut.jpg", "zero.jpg"):
        with pytest.raises(VitrailError, match=name) as error:
            Preprocessing()(tmp_path / name)
        assert "\n" not in str(error.value)


def test_transparent_pixels_are_white_whatever_lies_beneath():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 4), dtype=np.uint8)
    pixels[:2, :, 3], pixels[2:, :, 3] = 0, 255
    shown = np.asarray(upright(Image.fromarray(pixels)))
    assert (shown[:2] == 255).all()
    assert (shown[2:] == pixels[2:, :, :3]).all()


@pytest.mark.parametrize("transparency", [3, bytes([255, 255, 255, 0])])
def test_a_palette_may_have_transparent_colors(tmp_path, transparency):
    picture = Image.new("P", (4, 1))
    picture.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90, 1, 2, 3])
    picture.putdata([0, 1, 2, 3])
    picture.save(tmp_path / "p.png", transparency=transparency)
    shown = np.asarray(open_image(tmp_path / "p.png"))[0].tolist()
    assert shown == [[10, 20, 30], [40, 50, 60], [70, 80, 90], [255, 255, 255]]


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_an_unknown_range_are_refused(tmp_path, kind):
    Image.fromarray(np.full((4, 4), 200, dtype=kind)).save(tmp_path / "deep.tif")
    with pytest.raises(VitrailError, match=r"deep\.tif cannot be decoded: 32-bit pixels"):
        open_image(tmp_path / "deep.tif")


def test_sixteen_bits_and_a_transparent_gray_are_read(tmp_path):
    wide = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16))
    wide.save(tmp_path / "wide.png")
    assert np.asarray(open_image(tmp_path / "wide.png"))[0, :, 0].tolist() == [0, 100, 255]
    Image.fromarray(np.array([[0, 100]], dtype=np.uint8)).save(tmp_path / "l.png", transparency=0)
    assert np.asarray(open_image(tmp_path / "l.png"))[0, :, 1].tolist() == [255, 100]


def test_inks_become_colors(tmp_path):
    Image.new("CMYK", (8, 8), (255, 0, 0, 0)).save(tmp_path / "ink.jpg", quality=100)
    red, green, blue = open_image(tmp_path / "ink.jpg").getpixel((4, 4))
    assert red < 20
    assert min(green, blue) > 235


def test_the_first_picture_of_several_is_shown(tmp_path):
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for name in ("a.gif", "a.webp", "a.png", "a.tif"):
        lossless = {"lossless": True} if name == "a.webp" else {}
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:], **lossless)
        assert open_image(tmp_path / name).getpixel((0, 0)) == (255, 0, 0), name


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("suffix", ["png", "tif", "webp"])
def test_every_way_to_hold_a_camera_is_undone_and_only_once(tmp_path, turn, suffix):
    picture = noise(16, 24)
    exif = Image.Exif()
    exif[0x0112] = turn
    lossless = {"lossless": True} if suffix == "webp" else {}
    picture.save(tmp_path / f"a.{suffix}", exif=exif, **lossless)
    shown = open_image(tmp_path / f"a.{suffix}")
    with Image.open(tmp_path / f"a.{suffix}") as image:
        expected = ImageOps.exif_transpose(image)
    assert shown.size == ((24, 16) if turn < 5 else (16, 24))
    assert shown.tobytes() == expected.tobytes()
    assert upright(shown).tobytes() == shown.tobytes()


def test_a_damaged_note_of_the_camera_costs_the_turn_not_the_picture(tmp_path):
    picture = noise(16, 24)
    for number, exif in enumerate(
        (b"Exif\0\0rubbish", b"Exif\0\0MM\0*\0\0\0\x08\0\xff" + b"\x01\x12" * 9)
    ):
        picture.save(tmp_path / f"{number}.jpg", exif=exif, quality=95)
        assert open_image(tmp_path / f"{number}.jpg").size == (24, 16)


def test_large_is_read_and_huge_is_one_line(tmp_path, monkeypatch):
    noise(64, 64).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 - 1)
    assert open_image(tmp_path / "a.png").size == (64, 64)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64 // 2 - 1)
    with pytest.raises(VitrailError, match=r"a\.png cannot be decoded: Image size \(4096 pixels\)"):
        open_image(tmp_path / "a.png")


def test_an_image_that_would_take_gigabytes_is_refused_from_its_header(tmp_path):
    small, huge = io.BytesIO(), [n.to_bytes(4) for n in (1, 13_000)]
    Image.new("RGB", (1, 1)).save(small, "PNG")
    head = small.getvalue().replace(huge[0] * 2, huge[1] * 2, 1)
    (tmp_path / "huge.png").write_bytes(head[:29] + zlib.crc32(head[12:29]).to_bytes(4) + head[33:])
    with pytest.raises(VitrailError, match=r"huge\.png .*13000 x 13000 pixels .*128 million"):
        open_image(tmp_path / "huge.png")


@pytest.mark.parametrize("suffix", ["webp", "avif", "jp2"])
def test_formats_whose_decoders_take_more_memory_may_have_fewer_pixels(
    tmp_path, suffix, monkeypatch
):
    noise(64, 64).save(tmp_path / f"a.{suffix}")
    monkeypatch.setattr(decoding, "MOST_MEGAPIXELS", 0.001)
    assert open_image(tmp_path / f"a.{suffix}").size == (64, 64)
    lower = dict.fromkeys(decoding.MEGAPIXELS, 0.001)
    monkeypatch.setattr(decoding, "MEGAPIXELS", lower)
    with pytest.raises(VitrailError, match=f"{suffix} cannot be decoded: 64 x 64 pixels"):
        open_image(tmp_path / f"a.{suffix}")


def test_a_jpeg_of_a_hundred_megapixels_is_read_at_half_its_size(tmp_path):
    image = Image.new("L", (10_000, 10_000), 200)
    image.paste(40, (0, 0, 5000, 10_000))
    image.save(tmp_path / "large.jpg")
    shown = open_image(tmp_path / "large.jpg")
    assert shown.size == (5000, 5000)
    assert [shown.getpixel((x, 2500))[0] for x in (100, 4900)] == [40, 200]


def test_a_jpeg_of_too_many_scans_is_refused_before_it_is_decoded(tmp_path):
    (tmp_path / "slow.jpg").write_bytes(many_scans(65))
    with pytest.raises(VitrailError, match=r"slow\.jpg cannot be decoded: .*more than 64 scans"):
        open_image(tmp_path / "slow.jpg")
    (tmp_path / "slow.jpg").write_bytes(many_scans(64))
    assert open_image(tmp_path / "slow.jpg").size == (64, 64)


@pytest.mark.parametrize(
    "between",
    [
        b"\xff" * 9,  # filling
        b"\xff\xd0",  # a restart, which has no length
        b"\xff\x05\xff\xff",  # no marker of a decoder, hence no length
        b"\xff\x00\x12\xff\x00",  # stuffed bytes
        b"\xff\xe0\x00\x00",  # an impossible length
        b"\xff\xfe\x00\x06\xff\xd9\xff\xd9",  # the end of an image, inside of a comment
    ],
)
def test_scans_are_counted_whatever_lies_between_them(between):
    data = many_scans(65, between)
    with pytest.raises(VitrailError, match="more than 64 scans"):
        decode(io.BytesIO(data), "x")


def test_only_scans_of_the_image_itself_are_counted():
    file = io.BytesIO()
    note = b"Exif\0\0" + 200 * b"\xff\xda\x00\x08"
    noise(64, 64).save(file, "JPEG", progressive=True, exif=note, comment=200 * b"\xff\xda")
    data = file.getvalue()
    assert data.count(b"\xff\xda") > 400
    assert decode(io.BytesIO(data + 200 * b"\xff\xda\x00\x08"), "x").size == (64, 64)


def test_scans_that_no_decoder_reads_are_not_counted():
    """Of a sequential image whose first scan has all colors, a second one is an error."""
    data = jpeg(noise(64, 96))
    scan = data.index(b"\xff\xda")
    pixels, image = both(data[:-2] + 100 * data[scan:-2] + data[-2:])
    assert pixels == image == "it cannot be decoded: broken data stream when reading image file"
    one_color = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\x12"
    for line in both(data[:scan] + 65 * one_color + data[-2:]):
        assert "more than 64 scans" in line


def test_a_jpeg_of_too_many_segments_is_refused():
    data = many_scans(20, 1000 * b"\xff\xe0\x00\x02")
    with pytest.raises(VitrailError, match="more than 10,000 segments"):
        decode(io.BytesIO(data), "x")


def test_transparent_pixels_are_put_on_white_in_strips_as_at_once(monkeypatch):
    pixels = np.random.default_rng(0).integers(0, 256, (37, 11, 4), dtype=np.uint8)
    image = Image.fromarray(pixels)
    white = Image.new("RGBA", image.size, "white")
    expected = Image.alpha_composite(white, image).convert("RGB")
    monkeypatch.setattr(decoding, "STRIP", 50)
    assert upright(image).tobytes() == expected.tobytes()


def test_no_program_is_run_for_an_image(tmp_path, monkeypatch):
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # or it was looked for before
    Image.new("RGB", (4, 4)).save(tmp_path / "photo.eps")
    (tmp_path / "photo.eps").rename(tmp_path / "photo.jpg")
    with pytest.raises(VitrailError, match=r"photo\.jpg is not an image"):
        open_image(tmp_path / "photo.jpg")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "photo.jpg")
    for path in (tmp_path / "photo.jpg", "/dev/zero"):
        with pytest.raises(VitrailError, match="not a regular file"):
            Preprocessing()(path)


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "tif", "bmp", "ppm"])
def test_no_damage_gets_past_as_anything_but_one_line(suffix):
    file = io.BytesIO()
    noise(32, 40).save(file, Image.registered_extensions()[f".{suffix}"])
    whole = file.getvalue()
    rng = np.random.default_rng(0)
    broken = 0
    for _ in range(60):
        data = bytearray(whole[: rng.integers(1, len(whole))])
        for place in rng.integers(0, len(data), 4):
            data[place] = rng.integers(256)
        try:
            decode(io.BytesIO(data), "x")
        except VitrailError as error:
            broken += 1
            if not str(error).startswith("x ") or "\n" in str(error):
                raise
    assert broken > 20


# Pixels without Pillow's copies.


JPEGS = {
    "baseline": {},
    "444": {"subsampling": 0},
    "422": {"subsampling": 1},
    "411": {"subsampling": "4:1:1"},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_rows": 1},
    "rgb": {"keep_rgb": True},
}


def jpeg(picture: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **options)
    return file.getvalue()


def both(data: bytes) -> list[np.ndarray | str]:
    """What two ways to decode a file give: its pixels, or a line."""
    found: list[np.ndarray | str] = []
    for function in (decode_pixels, decode):
        try:
            found.append(np.asarray(function(io.BytesIO(data), "it")))
        except VitrailError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("kind", JPEGS)
@pytest.mark.parametrize("size", [(64, 96), (33, 47), (1, 1), (200, 7)])
def test_pixels_are_those_of_the_image(kind, size):
    for mode in ("RGB", "L", "CMYK"):
        if kind == "rgb" and mode != "RGB":
            continue
        picture = noise(208, 208, mode).resize(size)
        pixels, image = both(jpeg(picture, quality=85, **JPEGS[kind]))
        assert np.array_equal(pixels, image)
        assert pixels.shape == (*size[::-1], 3)


def test_pixels_of_damaged_files_are_those_of_the_image():
    data, random = jpeg(noise(120, 160), restart_marker_rows=2), np.random.default_rng(0)
    lines = 0
    for number in range(60):
        torn = bytearray(data)
        if number % 3:
            torn[random.integers(20, len(torn))] ^= 1 << random.integers(8)
        else:
            torn = torn[: random.integers(20, len(torn))]
        pixels, image = both(bytes(torn))
        assert type(pixels) is type(image)
        assert np.array_equal(pixels, image)
        lines += isinstance(pixels, str)
    assert 20 <= lines < 60


def test_pixels_of_other_files_are_those_of_the_image():
    exif = Image.Exif()
    exif[0x0112] = 6
    files = [jpeg(noise(64, 96), exif=exif)]
    for kind, mode in (("PNG", "RGBA"), ("GIF", "P"), ("WEBP", "RGB"), ("BMP", "RGB")):
        file = io.BytesIO()
        noise(64, 96, mode).save(file, kind)
        files.append(file.getvalue())
    for data in files:
        pixels, image = both(data)
        assert np.array_equal(pixels, image)


def test_without_torchvisions_decoder_pillow_gives_the_same(monkeypatch):
    data = jpeg(noise(64, 96))
    expected = decode_pixels(io.BytesIO(data), "it")
    monkeypatch.delattr("torchvision.io.decode_jpeg")
    assert np.array_equal(decode_pixels(io.BytesIO(data), "it"), expected)


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        ((800, 600), 100, (200, 150)),  # a quarter: an eighth would be 75
        ((800, 600), 300, (400, 300)),
        ((800, 600), 301, (800, 600)),
        ((1600, 1000), 100, (200, 125)),
        ((801, 601), 300, (401, 301)),
        ((800, 600), 0, (800, 600)),
    ],
)
def test_large_files_are_decoded_at_a_smaller_scale(size, side, expected):
    picture = noise(size[1] // 8 * 8, size[0] // 8 * 8).resize(size)
    data = jpeg(picture, quality=95)
    pixels = decode_pixels(io.BytesIO(data), "it", side)
    assert pixels.shape == (*expected[::-1], 3)
    whole = picture.resize(expected, Image.Resampling.BOX)
    level = 3 if size[0] % 8 == 0 else 12  # a row and a column more are not in phase
    assert np.abs(pixels.astype(int) - np.asarray(whole)).mean() < level
    file = io.BytesIO()
    picture.save(file, "PNG")
    assert decode_pixels(io.BytesIO(file.getvalue()), "it", side).shape == (*size[::-1], 3)
