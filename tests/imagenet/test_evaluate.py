"""ReaL, ObjectNet and ImageNet-V2, with a model whose guesses are written into the pictures."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from timm.data.real_labels import RealLabelsImagenet
from torch import nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

import vitrail
from tests.data.pictures import write_tar
from tests.evaluation.examples import linear
from tests.models import small
from vitrail.data.catalog import open_named
from vitrail.data.dataset import ArraySource, imagenet_classes
from vitrail.data.preprocessing import Preprocessing
from vitrail.errors import FailureError, VitrailError
from vitrail.evaluation.metrics import Predictions
from vitrail.evaluation.show import lines
from vitrail.imagenet.evaluate import evaluate, open_variant, relabel
from vitrail.imagenet.objectnet import objectnet
from vitrail.imagenet.real import real


class Reader(nn.Module):
    """Guesses the class that the middle pixel spells, then k+1, k−1, k+2, k−2."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.arange(classes, dtype=torch.float64))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        middle = pixels[:, :, pixels.shape[2] // 2, pixels.shape[3] // 2].double().round()
        spelled = 250 * middle[:, 0] + middle[:, 1]
        return -(self.numbers - spelled[:, None] - 0.1).abs()


def tensor(picture: Image.Image) -> torch.Tensor:
    return F.resize(F.pil_to_tensor(picture), [7, 7], InterpolationMode.NEAREST).float()


def spell(path: Path, number: int, border: int = 0, size: int = 9) -> Path:
    """A picture of one color, perhaps in a red frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (size, size), (255, 0, 0))
    inner = size - 2 * border
    picture.paste(Image.new("RGB", (inner, inner), (number // 250, number % 250, 0)), [border] * 2)
    picture.save(path)
    return path


def judge(folder: Path | str, labels: str, model: nn.Module | None = None, **more) -> dict:
    return evaluate(
        model or Reader(), folder, labels, split="test", model_name="m", transform=tensor, **more
    )


pytestmark = pytest.mark.usefixtures("place")


# ReaL


def image(number: int) -> str:
    return f"ILSVRC2012_val_{number:08d}.png"


@pytest.fixture
def validation(tmp_path) -> Path:
    """Six validation images, what the model will guess, and what is right."""
    folder = tmp_path / "val"
    guesses = {1: 10, 2: 20, 3: 30, 4: 40, 5: 50, 50_000: 60}
    for number, guess in guesses.items():
        spell(folder / f"n0000000{number % 2}" / image(number), guess)
    labels: list[list[int]] = [[] for _ in range(50_000)]
    labels[0] = [10]  # right
    labels[1] = [7, 20]  # right: any of several
    labels[2] = []  # left out
    labels[3] = [41, 999]  # among the first five only
    labels[4] = [55]  # wrong
    labels[49_999] = [62, 58]  # fourth and fifth guess
    (tmp_path / "real.json").write_text(json.dumps(labels))
    return folder


def test_a_guess_is_right_if_it_is_any_label_and_images_without_labels_are_left_out(validation):
    result = judge(validation, "real")
    assert (result["n"], result["left_out"], result["labels"]) == (5, 1, "real")
    assert result["top1"] == 2 / 5
    assert result["top5"] == 4 / 5
    assert "loss" not in result
    assert result["intervals"]["top1"][0] < 0.4 < result["intervals"]["top1"][1]
    wrong = {mistake["name"].partition("/")[2]: mistake["truth"] for mistake in result["mistakes"]}
    assert wrong[image(5)] == imagenet_classes()[55]
    assert lines(result)[0].endswith(f"n = 5, {validation} (real labels)")
    assert "excluded  1 images without a valid label" in lines(result)


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_neither_batches_nor_broken_pictures_confuse_the_labels(validation, batch):
    (validation / "n00000001" / image(1)).write_bytes(b"no picture")
    result = judge(validation, "real", batch=batch)
    assert [name for name, _ in result["broken"]] == [f"n00000001/{image(1)}"]
    assert (result["n"], result["top1"], result["top5"]) == (4, 1 / 4, 3 / 4)


def test_real_labels_work_on_shards_and_beside_the_data(validation, place, tmp_path):
    files = {
        f"{path.parent.name}/{path.name}": path.read_bytes() for path in validation.rglob("*.png")
    }
    archive = write_tar(tmp_path / "elsewhere" / "val.tar", files)
    place.mkdir()
    (tmp_path / "real.json").rename(place / "real.json")
    result = judge(archive, "real")
    assert (result["n"], result["top1"], result["top5"]) == (5, 2 / 5, 4 / 5)


def test_the_figures_are_those_of_timms_evaluator(tmp_path):
    chance = np.random.default_rng(0)
    n = 50_000
    info = Path(timm.data.__file__).parent / "_info" / "imagenet_real_labels.json"
    labels = json.loads(info.read_text(encoding="utf-8"))
    # Of the pictures with a label, half are guessed right at some place among five.
    guesses = np.stack([chance.permutation(1000)[:5] for _ in range(n)])
    for i in range(0, n, 2):
        if labels[i] and labels[i][0] not in guesses[i]:
            guesses[i, i % 5] = labels[i][0]
    oracle = RealLabelsImagenet([f"ILSVRC2012_val_{i + 1:08d}.JPEG" for i in range(n)])
    scores = torch.zeros(n, 1000)
    scores.scatter_(1, torch.from_numpy(guesses), torch.arange(5.0, 0.0, -1).repeat(n, 1))
    oracle.add_result(scores)
    source = ArraySource(
        ("x",),
        np.zeros(n, np.int64),
        [f"x/ILSVRC2012_val_{i + 1:08d}.JPEG" for i in range(n)],
        np.broadcast_to(np.zeros((1, 1, 1), np.uint8), (n, 1, 1)),
    )
    (tmp_path / "real.json").write_text(json.dumps(labels))
    asked = real(source, [tmp_path])
    kept = guesses[asked.indices]
    predictions = Predictions(
        names=list(asked.names),
        targets=asked.targets,
        guesses=kept,
        probabilities=np.full(kept.shape, 0.2),
        loss=np.zeros(len(kept)),
        labels=asked.labels,
    )
    hits = relabel(predictions, asked).targets[:, None] == kept
    assert len(kept) == 46_837
    assert 100 * hits[:, 0].mean() == pytest.approx(oracle.get_accuracy(1))
    assert 100 * hits.any(1).mean() == pytest.approx(oracle.get_accuracy(5))
    assert hits.any(1).mean() > 0.4


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", FailureError, r"cannot read .*real.json \(Expecting value"),
        ("[]", VitrailError, "real.json has 0 entries; expected 50,000 lists of class numbers"),
        ("{}", VitrailError, "real.json has 0 entries"),
        ("7", VitrailError, "real.json has no list; expected 50,000"),
        (json.dumps([[1000]] * 50_000), VitrailError, "not class numbers from 0 to 999"),
        (json.dumps([["7"]] * 50_000), VitrailError, "not class numbers from 0 to 999"),
        (json.dumps([[7.0]] * 50_000), VitrailError, "not class numbers from 0 to 999"),
        (json.dumps([[True]] * 50_000), VitrailError, "not class numbers from 0 to 999"),
        (json.dumps([[]] * 50_000), VitrailError, "none of 6 images has a label"),
        (None, FailureError, "cannot reach raw.githubusercontent.com"),
    ],
)
def test_labels_that_cannot_be_meant_are_one_line(validation, tmp_path, text, error, message):
    if text is None:
        (tmp_path / "real.json").unlink()
    else:
        (tmp_path / "real.json").write_text(text)
    with pytest.raises(error, match=message) as caught:
        judge(validation, "real")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", ["folder", "one", "tar"])
def test_the_validation_images_need_no_classes(validation, tmp_path, form):
    files = {path.name: path.read_bytes() for path in validation.rglob("*.png")}
    flat = tmp_path / "flat" / ("only" if form == "one" else "")
    flat.mkdir(parents=True)
    for name, content in files.items():
        (flat / name).write_bytes(content)
    data = tmp_path / "flat" if form != "tar" else write_tar(tmp_path / "val.tar", files)
    result = judge(data, "real")
    assert (result["n"], result["top1"], result["top5"]) == (5, 2 / 5, 4 / 5)


def test_where_real_json_is_looked_for_is_told(validation, tmp_path, monkeypatch):
    def offline(url):
        raise FailureError("cannot reach it")

    monkeypatch.setattr("vitrail.imagenet.real.fetch_file", offline)
    (tmp_path / "real.json").unlink()
    with pytest.raises(FailureError, match=r"no real.json in DATA, beside it or in \$VITRAIL_DATA"):
        judge(validation, "real")


def by_synonyms() -> tuple[str, ...]:
    return tuple(f"{name}, another name" for name in imagenet_classes())


def by_numbers() -> tuple[str, ...]:
    return tuple(f"n{number:08d}" for number in range(1000))


@pytest.mark.parametrize("labels", [by_synonyms, by_numbers])
def test_imagenets_classes_are_known_by_other_names_too(validation, labels):
    model = Reader()
    model.labels = labels()
    assert judge(validation, "real", model)["top1"] == 2 / 5
    assert model.labels == labels()  # nobody else's model is changed
    model.labels = labels()[::-1]
    with pytest.raises(VitrailError, match="unknown to the model"):
        judge(validation, "real", model)


def test_pictures_that_are_not_the_validation_images_are_told_apart(validation):
    spell(validation / "n00000001" / "cat.png", 3)
    with pytest.raises(VitrailError, match=r"'n00000001/cat.png' is not the name of a validation"):
        judge(validation, "real")


# ObjectNet


@pytest.fixture
def objects(tmp_path) -> Path:
    """Three classes, two of which ImageNet has; the red border spells another class."""
    root = tmp_path / "objectnet-1.0"
    mappings = {
        "folder_to_objectnet_label.json": {
            "alarm_clock": "Alarm clock",
            "backpack": "Backpack",
            "air_freshener": "Air freshener",
        },
        "objectnet_to_imagenet_1k.json": {
            "Alarm clock": "analog clock; digital clock",
            "Backpack": "backpack, back pack, knapsack",
        },
        # Class 409 of ImageNet stands in line 2 of the names, and so on.
        "pytorch_to_imagenet_2012_id.json": {"409": 2, "530": 0, "414": 1},
    }
    (root / "mappings").mkdir(parents=True)
    for name, value in mappings.items():
        (root / "mappings" / name).write_text(json.dumps(value))
    names = ["digital clock", "backpack, back pack, knapsack", "analog clock"]
    (root / "mappings" / "imagenet_to_label_2012_v2").write_text("\n".join(names) + "\n")
    for i, guess in enumerate((409, 530, 531)):
        spell(root / "images" / "alarm_clock" / f"{i}.png", guess, border=2)
    for i, guess in enumerate((414, 700, 411)):
        spell(root / "images" / "backpack" / f"{i}.png", guess, border=2)
    spell(root / "images" / "air_freshener" / "0.png", 5, border=2)
    return root


@pytest.mark.parametrize("below", ["", "images"])
def test_only_shared_classes_are_asked_and_only_they_compete(objects, below):
    result = judge(objects / below, "objectnet")
    assert (result["n"], result["left_out"]) == (6, 1)
    # 531 becomes 530, 700 becomes 530 (wrong), 411 becomes 409 (wrong, the next best is 414).
    assert result["top1"] == 4 / 6
    assert result["top5"] == 1.0  # three classes compete


def test_unmasked_all_thousand_classes_compete(objects):
    result = judge(objects, "objectnet-unmasked")
    assert result["n"] == 6
    assert result["top1"] == 3 / 6  # 409, 530 and 414
    assert result["top5"] == 4 / 6  # and 530 is near 531; 409 is near 411, but that is a clock


def test_the_border_is_cut_off(objects):
    asked, _, part = open_variant("objectnet", objects, "test")
    assert part == "train"  # as undivided data is called
    picture = np.asarray(asked.image(0))
    assert picture.shape == (5, 5, 3)
    assert (picture == [409 // 250, 409 % 250, 0]).all()
    assert asked.allowed == (409, 414, 530)
    assert asked.correct[0] == (409, 530)


def at(size: int, **more) -> Reader:
    """A reader with a preprocessing of its own, which gives the pixels as they are."""
    model = Reader()
    model.preprocess = Preprocessing(size=(size, size), mean=(0.0,) * 3, std=(1 / 255,) * 3, **more)
    return model


@pytest.mark.parametrize("labels", ["objectnet", "objectnet-unmasked"])
@pytest.mark.parametrize("own", [0, 400, 512])
def test_objectnet_is_cropped_as_in_bit_whatever_the_models_own_crop(objects, labels, own):
    model = at(480, short_side=own, interpolation="bicubic")
    result = evaluate(model, objects, labels, split="test", model_name="m")
    used = result["preprocessing"]
    assert used == replace(model.preprocess, short_side=512).to_dict()
    assert model.preprocess.short_side == own
    assert "preprocessing      short side 512, center crop 480 × 480 pixels (as in BiT)" in lines(
        result
    )


def test_bits_crop_shows_the_middle_of_the_image_without_its_border(objects):
    path = objects / "images" / "alarm_clock" / "0.png"
    pixels = np.random.default_rng(0).integers(0, 2, (68, 132, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    seen: list[torch.Tensor] = []
    model = at(60)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    evaluate(model, objects, "objectnet", split="test", model_name="m")
    # Without 2 pixels on each side, the short side is 64, and nothing is resized.
    middle = torch.from_numpy(pixels[4:64, 36:96]).permute(2, 0, 1)
    torch.testing.assert_close(seen[0][0], middle.double())


def test_other_labels_keep_the_models_own_preprocessing(validation):
    model = at(64, short_side=72)
    result = evaluate(model, validation, "real", split="test", model_name="m")
    assert result["preprocessing"] == model.preprocess.to_dict()
    assert "preprocessing      short side 72, center crop 64 × 64 pixels" in lines(result)


def test_masking_follows_a_model_that_knows_the_classes_in_another_order(objects):
    class Turned(Reader):
        labels = imagenet_classes()[::-1]

        def forward(self, pixels):
            return super().forward(pixels).flip(-1)

    assert judge(objects, "objectnet", Turned())["top1"] == 4 / 6


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("objectnet_to_imagenet_1k.json", None, "no objectnet_to_imagenet_1k.json in .*; it comes"),
        ("objectnet_to_imagenet_1k.json", "{}", "is empty or not a JSON object; unpack ObjectNet"),
        ("objectnet_to_imagenet_1k.json", "", r"cannot read .*1k.json \(Expecting value"),
        ("objectnet_to_imagenet_1k.json", '{"Sofa": "sofa"}', "mappings in .* are empty"),
        ("objectnet_to_imagenet_1k.json", '{"Backpack": "sofa"}', "do not belong together .*sofa"),
        ("imagenet_to_label_2012_v2", "", "do not belong together"),
        ("imagenet_to_label_2012_v2", None, "cannot read .*imagenet_to_label_2012_v2"),
        ("folder_to_objectnet_label.json", '{"sofa": "Backpack"}', "none of the 3 classes is one"),
    ],
)
def test_mappings_that_cannot_be_meant_are_one_line(objects, file, text, message):
    path = objects / "mappings" / file
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(VitrailError, match=message) as caught:
        judge(objects, "objectnet")
    assert "\n" not in str(caught.value)


def test_objectnet_in_shards_takes_the_mappings_beside_them(objects):
    files = {
        f"{path.parent.name}/{path.name}": path.read_bytes()
        for path in (objects / "images").rglob("*.png")
    }
    archive = write_tar(objects / "objects.tar", files)
    asked, of, _ = open_variant("objectnet", archive, "test")
    assert (len(asked.correct), of) == (6, 7)
    assert objectnet(asked.source, [objects]).allowed == asked.allowed


# ImageNet-V2, and any pictures in ImageNet's folders


def test_numbered_folders_are_imagenets_classes_in_the_order_of_numbers(tmp_path):
    for number, guess in {0: 0, 2: 2, 10: 10, 999: 997}.items():
        spell(tmp_path / "v2" / str(number) / "a.png", guess)
    result = judge(tmp_path / "v2", "imagenet")
    assert (result["n"], result["top1"], result["top5"]) == (4, 3 / 4, 1.0)
    named = {row["name"]: row["n"] for row in result["per_class"] if row["n"]}
    assert list(named) == [imagenet_classes()[i] for i in (0, 2, 10, 999)]


def test_the_catalog_has_imagenet_v2_with_imagenets_names(place):
    one = spell(place / "one.png", 3)
    for number in range(1000):
        folder = place / "imagenet_v2" / str(number)
        folder.mkdir(parents=True)
        (folder / "a.png").symlink_to(one)
    data = open_named("imagenet_v2")
    assert list(data.parts) == ["test"]
    assert data.labels == imagenet_classes()
    assert data.test.names[:3] == ["0/a.png", "1/a.png", "2/a.png"]
    assert judge("imagenet_v2", "imagenet")["top1"] == 1 / 1000


def test_other_folders_are_told_apart(tmp_path):
    for label in ("cat", "dog"):
        spell(tmp_path / "pets" / label / "a.png", 1)
    with pytest.raises(VitrailError, match=r"has 2 classes such as 'cat'; expected ImageNet's 1,0"):
        judge(tmp_path / "pets", "imagenet")


@pytest.mark.parametrize("numbers", ["0123456789", "12345", ["2", "1000"], ["7", "07"]])
def test_folders_that_number_classes_of_their_own_are_refused(tmp_path, numbers):
    for number in numbers:
        spell(tmp_path / "digits" / number / "a.png", 1)
    with pytest.raises(VitrailError, match=rf"digits has {len(numbers)} classes such as .*1,000"):
        judge(tmp_path / "digits", "imagenet")


def test_of_some_numbered_folders_it_is_said_how_they_are_read(tmp_path, capsys):
    for number in (7, 19):
        spell(tmp_path / "birds" / str(number) / "a.png", number)
    assert judge(tmp_path / "birds", "imagenet")["top1"] == 1.0
    said = "labels   folder 7 is read as class 7, cock, and the other 1 likewise\n"
    assert capsys.readouterr().err == said


def test_folders_may_have_imagenets_names(tmp_path, capsys):
    for number in (0, 1):
        spell(tmp_path / "fish" / imagenet_classes()[number] / "a.png", number)
    assert judge(tmp_path / "fish", "imagenet")["top1"] == 1.0
    assert not capsys.readouterr().err


def part_of(folder: Path, split: str) -> dict:
    return evaluate(Reader(), folder, "imagenet", split=split, model_name="m", transform=tensor)


def test_imagenets_val_is_tested_on_and_no_other_part_is_taken_for_one_that_is_not_there(tmp_path):
    for part, guess in {"train": 1, "val": 2}.items():
        for number in (2, 3):
            spell(tmp_path / "parts" / part / str(number) / "a.png", guess)
    result = part_of(tmp_path / "parts", "test")
    assert (result["split"], result["top1"]) == ("val", 1 / 2)
    result = part_of(tmp_path / "parts", "train")
    assert (result["split"], result["top1"]) == ("train", 0.0)
    (tmp_path / "parts" / "val").rename(tmp_path / "parts" / "test")
    assert part_of(tmp_path / "parts", "test")["top1"] == 1 / 2
    with pytest.raises(VitrailError, match="has no val split; it has train, test"):
        part_of(tmp_path / "parts", "val")


def test_an_only_part_is_taken_and_named(tmp_path):
    for number in (2, 3):
        spell(tmp_path / "all" / str(number) / "a.png", 2)
    assert part_of(tmp_path / "all", "val")["split"] == "train"


# Models and the command


@pytest.mark.parametrize("labels", ["objectnet", "objectnet-unmasked"])
def test_a_model_of_other_classes_is_told_apart(objects, labels):
    with pytest.raises(VitrailError, match="this model has 1010 classes, the dataset has 1000"):
        judge(objects, labels, Reader(1010))


def test_unknown_labels_suggest_one(validation):
    with pytest.raises(VitrailError, match="--labels reall is unknown; did you mean 'real'"):
        judge(validation, "reall", linear())


def test_the_command_asks_a_whole_classifier(objects):
    model = small("vit", classes=1000)
    model.preprocess = Preprocessing(size=(64, 64))
    result = vitrail.evaluate(model, objects, labels="objectnet", device="cpu")
    assert (result["n"], result["labels"], result["split"]) == (6, "objectnet", "train")
    assert result["preprocessing"]["short_side"] == 68
    assert result["top5"] == 1.0
