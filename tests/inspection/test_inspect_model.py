"""The folder that `vitrail inspect` writes, from Python and on the terminal."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

import vitrail
from tests.data.pictures import photo, write
from tests.models import small
from vitrail.cli import main
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import VitrailError
from vitrail.inspection.tracer import checked_layers


def ready(kind: str, size: int | tuple[int, int] = 64, **options):
    """A small model that knows how to take pictures."""
    model = small(kind, size=size, **options)
    model.preprocess = Preprocessing(size=model.architecture.size)
    return model


def images_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))


def test_a_page_for_the_model_one_for_each_picture_and_their_parts(tmp_path):
    photos = [write(tmp_path / "a.png", 1), write(tmp_path / "b.png", 2)]
    found = vitrail.inspect(ready("vit"), photos, out=tmp_path / "out", device="cpu")
    parts = ("features", "gradient", "heads", "picture", "rollout", "rollout-map")
    assert images_below(tmp_path / "out") == sorted(
        [
            *("a.png", "b.png", "attention-distance.png", "filters.png", "model.png"),
            "positions.png",
            *(f"{name}/{part}.png" for name in "ab" for part in parts),
        ]
    )
    kept = json.loads((tmp_path / "out" / "inspection.json").read_text("utf-8"))
    assert kept == found
    assert found["absent"] == {}
    assert found["attention_distance"]["n"] == 2
    assert [row["layer"] for row in found["attention_distance"]["layers"]] == [0, 1]
    for image in found["images"]:
        assert np.array(image["rollout"]).shape == (4, 4)
        assert np.sum(image["rollout"]) == pytest.approx(1, abs=1e-4)
        assert image["gradient_class"] == image["guess"]
        for path in image["files"].values():
            with Image.open(path) as picture:
                assert np.asarray(picture).std() > 1  # not one flat color


def test_distances_are_the_mean_over_all_pictures(tmp_path):
    model, photos = ready("vit"), [photo(1), photo(2)]

    def distances(chosen):
        found = vitrail.inspect(model, chosen, out=tmp_path, device="cpu")
        return np.array([row["heads"] for row in found["attention_distance"]["layers"]])

    apart = [distances([one]) for one in photos]
    assert not np.allclose(*apart, atol=1e-3)
    assert distances(photos) == pytest.approx(np.mean(apart, 0), abs=2e-3)


@pytest.mark.parametrize(
    ("kind", "absent", "parts"),
    [
        ("vit-gap", {}, 6),
        ("vit-attention-pool", {}, 6),
        ("vit-registers", {}, 6),
        ("vit-no-positions", {"positions"}, 6),
        ("hybrid", {}, 6),
        ("axial-vit", {}, 6),
        ("axial-resnet", {"positions", "gradient"}, 5),
        ("resnet", {"positions", "attention"}, 2),
        ("classic-resnet", {"positions", "attention"}, 2),
    ],
)
def test_every_family_shows_what_it_has_and_says_what_it_has_not(kind, absent, parts, tmp_path):
    found = vitrail.inspect(ready(kind, (64, 96)), [photo()], out=tmp_path, device="cpu")
    assert set(found["absent"]) == set(absent)
    assert len(found["images"][0]["files"]) == parts + 1
    assert (tmp_path / "filters.png").exists()
    assert (tmp_path / "positions.png").exists() == ("positions" not in absent)
    assert (tmp_path / "attention-distance.png").exists() == ("attention" not in absent)


def test_without_pictures_the_weights_alone_are_shown(tmp_path):
    model = small("vit")  # which has no preprocessing, and needs none
    found = vitrail.inspect(model, out=tmp_path, device="cpu")
    assert images_below(tmp_path) == ["filters.png", "model.png", "positions.png"]
    assert found["attention_distance"] is None
    assert found["images"] == []
    assert len(found["filters"]["shares"]) == 28
    assert found["positions"]["grid"] == [4, 4]


@pytest.mark.parametrize("size", [48, (96, 48), (70, 130)])
def test_any_size_with_its_own_grid(size, tmp_path):
    found = vitrail.inspect(ready("vit"), [photo()], out=tmp_path, size=size, device="cpu")
    rows, columns = (size, size) if isinstance(size, int) else size
    grid = (rows // 16, columns // 16)
    assert found["size"] == [rows, columns]
    assert np.array(found["images"][0]["rollout"]).shape == grid
    with Image.open(tmp_path / "picture-1" / "picture.png") as picture:
        assert picture.width * grid[0] == picture.height * grid[1]  # whole patches alone


def test_layers_and_class_can_be_chosen(tmp_path):
    model = ready("vit", depth=5)
    found = vitrail.inspect(model, photo(), out=tmp_path, layers=[-1, 0], target="5", device="cpu")
    assert found["layers"] == [0, 4]
    assert [row["layer"] for row in found["attention_distance"]["layers"]] == [0, 4]
    assert found["images"][0]["gradient_class"] == "class 5"
    model.labels = tuple("abcdefg")
    named = vitrail.inspect(model, photo(), out=tmp_path, target="c", device="cpu")
    assert named["images"][0]["gradient_class"] == "c"
    with pytest.raises(VitrailError, match="no class 'h'"):
        vitrail.inspect(model, photo(), out=tmp_path, target="h", device="cpu")
    with pytest.raises(VitrailError, match="no class '0', nor any other"):
        vitrail.inspect(small("vit", classes=0), out=tmp_path, target=0, device="cpu")


def test_layers_count_from_both_ends():
    assert checked_layers([-1, 3, 0], 4) == (0, 3)
    for wrong in ([4], [-5], [0, 9]):
        with pytest.raises(VitrailError, match="they are 0 to 3"):
            checked_layers(wrong, 4)
    assert checked_layers(None, 2) == checked_layers([], 2) == (0, 1)
    with pytest.raises(VitrailError, match="this model has none"):
        checked_layers([0], 0)


@pytest.mark.parametrize("name", ["cat.png", "model.png"])
def test_a_photograph_is_never_overwritten(tmp_path, name):
    photo = write(tmp_path / name, 1)
    before = photo.read_bytes()
    with pytest.raises(VitrailError, match="would be overwritten; choose another folder"):
        vitrail.inspect(ready("vit"), [photo], out=tmp_path, device="cpu")
    assert photo.read_bytes() == before


def test_names_never_collide(tmp_path):
    photos = [write(tmp_path / name, 1) for name in ("a.png", "b/a.png", "model.png")]
    found = vitrail.inspect(ready("resnet"), photos, out=tmp_path / "out", device="cpu")
    assert [image["name"] for image in found["images"]] == ["a", "a-2", "model-2"]
    assert len({image["files"]["page"] for image in found["images"]}) == 3


@pytest.fixture
def weights(tmp_path):
    vitrail.save(ready("vit"), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def inspect(*words: object):
    return CliRunner().invoke(main, ["inspect", *map(str, words), "--device", "cpu"])


def test_the_verb_names_its_pages(weights, tmp_path):
    photos = write(tmp_path / "daisy.png")
    done = inspect(weights, photos, "--out", tmp_path / "out", "--size", "96x48", "--layers", "-1")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].endswith("96 × 48 px")
    assert lines[1].startswith("layer  1 ")
    assert lines[2:] == [str(tmp_path / "out" / name) for name in ("model.png", "daisy.png")]


def test_the_verb_prints_one_json_value(weights, tmp_path):
    done = inspect(weights, write(tmp_path / "daisy.png"), "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["images"][0]["name"] == "daisy"
    assert found["size"] == [64, 64]


def test_a_broken_picture_is_named_and_the_others_shown(weights, tmp_path):
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    good = write(tmp_path / "good.png")
    done = inspect(weights, tmp_path / "bad.jpg", good, "--out", tmp_path / "out", "--json")
    assert done.exit_code == 0
    assert done.stderr.splitlines() == [f"skipped  bad: {tmp_path / 'bad.jpg'} is not an image"]
    found = json.loads(done.stdout)
    assert [image["name"] for image in found["images"]] == ["good"]
    assert found["attention_distance"]["n"] == 1


@pytest.mark.parametrize("count", [1, 2])
def test_no_readable_picture_is_one_line(count, weights, tmp_path):
    done = inspect(weights, *[tmp_path / "absent.jpg"] * count, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert done.stderr == f"Error: {tmp_path / 'absent.jpg'} does not exist\n"
    assert done.stdout == ""


def test_a_folder_that_cannot_be_made_is_a_failure(weights, tmp_path):
    (tmp_path / "file").write_text("")
    done = inspect(weights, "--out", tmp_path / "file" / "below")
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: cannot create")


def looking_at_bright() -> vitrail.Classifier:
    """A ViT all of whose tokens look at the bright patches."""
    model = vitrail.create("Ti/16", classes=2, size=224, width=8, depth=2, heads=2, mlp=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.01
        model.embedding.weight[0] = 1 / 64  # brightness
        for block in model.blocks:
            _, key, _ = block.attention.qkv.weight.view(3, 8, 8)
            key[[0, 4], 0] = 8.0  # the first of each head
            block.attention.qkv.bias.view(3, 8)[0, [0, 4]] = 1.0
            block.norm1.weight.fill_(1)
        model.head.weight.normal_()
    model.preprocess = Preprocessing(size=(224, 224))
    return model.eval()


def test_a_model_that_looks_at_the_bright_is_shown_to_do_so(tmp_path):
    inner = np.zeros((14, 14), dtype=bool)
    inner[2:6, 5:13] = True  # neither in the middle nor as high as wide
    shown = Image.fromarray(np.where(inner, 230, 20).astype(np.uint8)).resize((224, 224), 0)
    found = vitrail.inspect(looking_at_bright(), shown.convert("RGB"), out=tmp_path, device="cpu")
    rows = found["attention_distance"]["layers"]
    assert [len(row["heads"]) for row in rows] == [2] * 2
    assert {row["uniform"] for row in rows} == {116.49}
    for key in ("rollout", "gradient_rollout"):
        seen = np.array(found["images"][0][key])
        assert np.median(seen[inner]) > 1.1 * np.median(seen[~inner]), key
