"""Every recipe loads, says what it is, and holds what the papers' tables hold."""

import itertools
import json
import math
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitrail import create, save
from vitrail import load as load_model
from vitrail.config import (
    RECIPES,
    Augment,
    Config,
    flatten,
    load_config,
    recipe_names,
    to_flat,
    to_toml,
)
from vitrail.data.augment import crop_source_size
from vitrail.data.catalog import known_datasets
from vitrail.data.preprocessing import Preprocessing
from vitrail.model.variants import parse_variant
from vitrail.training.build import _preprocessing
from vitrail.training.resolve import resolve_config
from vitrail.training.train import train_config
from vitrail.vtab.tasks import TASKS
from vitrail.weights.published import NAMES, PUBLISHED

ROOT = Path(__file__).parents[1]
NEEDS_DATA = {"finetune/folder", "vtab/vit", "finetune/bit_hyperrule"}


def text_of(name: str) -> str:
    return (RECIPES / f"{name}.toml").read_text(encoding="utf-8")


def flat(name: str) -> dict:
    return dict(flatten(tomllib.loads(text_of(name))))


def as_read(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_there_is_a_recipe_for_every_task():
    assert len(recipe_names()) > 50
    for name in ("finetune/folder", "digits/vit", "cifar10/vit", "flowers/vit", "flowers/resnet"):
        assert name in recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_it_loads_and_comes_back_from_its_own_text(name, tmp_path):
    config = load_config(name)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize("name", recipe_names())
def test_it_opens_with_the_paper_the_figure_and_the_cost(name):
    header = text_of(name).split("\n\n")[0]
    assert all(line.startswith("# ") for line in header.splitlines())
    assert re.search(r"^# Published: .", header, re.M)
    assert re.search(r"^# Cost: .", header, re.M)
    assert "arXiv" in header or name.startswith("digits/")
    assert max(map(len, text_of(name).splitlines())) <= 100


@pytest.mark.parametrize("name", recipe_names())
def test_it_holds_only_what_differs_from_the_defaults(name):
    defaults = to_flat(Config())
    for setting, value in flat(name).items():
        assert setting.startswith("sweep.") or as_read(defaults[setting]) != value, setting


@pytest.mark.parametrize("name", recipe_names())
def test_its_model_and_its_data_exist(name):
    config = load_config(name)
    if config.model.init:
        assert config.model.init in {row.name for row in PUBLISHED}
    else:
        parse_variant(config.model.variant, size=config.data.size)
    missing = name in NEEDS_DATA or name.startswith("pretrain/jft/")
    assert config.data.source == "" if missing else config.data.source in known_datasets()
    if missing and name != "finetune/folder":
        assert "data.source must name" in text_of(name)
    length = (config.train.steps, config.train.epochs, config.train.minutes)
    assert any(length) or config.train.hyperrule


@pytest.mark.parametrize("name", recipe_names())
def test_its_learning_rate_says_for_which_batch(name):
    lines = [line for line in text_of(name).splitlines() if line.startswith("lr = ")]
    batch = load_config(name).train.batch
    assert all(f"batch {batch}" in line or "for every 256" in line for line in lines)


# Table 3 of the paper: recipe, model, epochs, base learning rate, decay, weight decay, dropout.
TABLE_3 = """
jft/b16          B/16      7   8e-4 linear 0.1  0.0
jft/b32          B/32      7   8e-4 linear 0.1  0.0
jft/l32          L/32      7   6e-4 linear 0.1  0.0
jft/l16_7ep      L/16      7   4e-4 linear 0.1  0.0
jft/l16_14ep     L/16      14  4e-4 linear 0.1  0.0
jft/h14          H/14      14  3e-4 linear 0.1  0.0
jft/r50x1        R50x1     7   1e-3 linear 0.1  0.0
jft/r50x2        R50x2     7   1e-3 linear 0.1  0.0
jft/r101x1       R101x1    7   8e-4 linear 0.1  0.0
jft/r152x1       R152x1    7   6e-4 linear 0.1  0.0
jft/r152x2       R152x2    7   6e-4 linear 0.1  0.0
jft/r50_b16      R50+B/16  7   8e-4 linear 0.1  0.0
jft/r50_b32      R50+B/32  7   8e-4 linear 0.1  0.0
jft/r50_l32      R50+L/32  7   2e-4 linear 0.1  0.0
jft/r50_l16_7ep  R50+L/16  7   4e-4 linear 0.1  0.0
jft/r50_l16_14ep R50+L/16  14  4e-4 linear 0.1  0.0
imagenet21k/b16      B/16  90  1e-3 linear 0.03 0.1
imagenet21k/b32      B/32  90  1e-3 linear 0.03 0.1
imagenet21k/l16_30ep L/16  30  1e-3 linear 0.03 0.1
imagenet21k/l16_90ep L/16  90  1e-3 linear 0.03 0.1
imagenet21k/l32_30ep L/32  30  1e-3 linear 0.03 0.1
imagenet21k/l32_90ep L/32  90  1e-3 linear 0.03 0.1
imagenet/b16     B/16      300 3e-3 cosine 0.3  0.1
imagenet/b32     B/32      300 3e-3 cosine 0.3  0.1
imagenet/l16     L/16      300 3e-3 cosine 0.3  0.1
imagenet/l32     L/32      300 3e-3 cosine 0.3  0.1
"""
# Models of Tables 5 and 6 that Table 3 leaves out, with the values of its nearest rows.
NOT_IN_TABLE_3 = """
jft/r200x3       R200x3    14  6e-4 linear 0.1  0.0
imagenet21k/h14  H/14      90  1e-3 linear 0.03 0.1
"""


@pytest.mark.parametrize("row", [*TABLE_3.split("\n")[1:-1], *NOT_IN_TABLE_3.split("\n")[1:-1]])
def test_pre_training_is_table_3(row):
    name, variant, epochs, lr, decay, weight_decay, dropout = row.split()
    config = load_config(f"pretrain/{name}")
    model, train, optim = config.model, config.train, config.optim
    assert (model.variant, model.dropout) == (variant, float(dropout))
    assert (train.epochs, train.batch, config.data.size) == (float(epochs), 4096, 224)
    assert (optim.lr, optim.decay, optim.warmup) == (float(lr), decay, 10_000)
    assert (optim.name, optim.beta1, optim.beta2) == ("adamw", 0.9, 0.999)
    assert optim.weight_decay == float(weight_decay)
    imagenet = name.startswith("imagenet/")
    assert optim.clip == (1.0 if imagenet else 0.0)
    assert (train.objective, model.head_bias, optim.floor) == (
        ("softmax", 0.0, 0.0) if imagenet else ("sigmoid", -10.0, 1e-5)
    )
    assert model.hidden == ("/" in variant)
    augment = config.augment
    assert (augment.crop, augment.area, augment.flip) == ("inception", 0.05, True)
    assert (augment.randaugment_layers, augment.mixup, train.label_smoothing) == (0, 0.0, 0.0)


# Table 5: top-1 on ImageNet of each model that was pre-trained on these images. Those of JFT are in
# Table 6: model, epochs, exaFLOPs and top-1.
TABLE_5 = {
    "imagenet": {"b16": 77.91, "b32": 73.38, "l16": 76.53, "l32": 71.16},
    "imagenet21k": {"b16": 83.97, "b32": 81.28, "l16_90ep": 85.15, "l32_90ep": 80.99, "h14": 85.13},
}
TABLE_6 = """
b32 7 55 80.73
b16 7 224 84.15
l32 7 196 84.37
l16_7ep 7 783 86.30
l16_14ep 14 1567 87.12
h14 14 4262 88.08
r50x1 7 50 77.54
r50x2 7 199 82.12
r101x1 7 96 80.67
r152x1 7 141 81.88
r152x2 7 563 84.97
r200x3 14 3306 87.22
r50_b32 7 106 84.90
r50_b16 7 274 85.58
r50_l32 7 246 85.68
r50_l16_7ep 7 859 86.60
r50_l16_14ep 14 1668 87.12
"""


def header(name: str) -> str:
    """What a recipe says first, in one line."""
    return text_of(name).split("\n\n")[0].replace("\n# ", " ")


@pytest.mark.parametrize("data", TABLE_5)
def test_every_column_of_table_5_has_a_recipe(data):
    for model, top1 in TABLE_5[data].items():
        text = header(f"pretrain/{data}/{model}")
        assert f"{top1}%" in text
        assert "fine-tuning at 384 px (Table 5)" in text


@pytest.mark.parametrize("row", TABLE_6.split("\n")[1:-1])
def test_every_row_of_table_6_has_a_recipe(row):
    """All but R152x2 for 14 epochs, whose setting is in docs/paper.md."""
    model, epochs, exaflops, top1 = row.split()
    name = f"pretrain/jft/{model}"
    assert load_config(name).train.epochs == float(epochs)
    assert f"Published: {top1}% on ImageNet" in header(name)
    assert f"Cost: {exaflops} exaFLOPs" in header(name)


COMPUTED = re.compile(
    r"([\d.e-]+) exaFLOPs \(computed: 6 × ([\d.]+) ([GM])MACs × ([\d.,]+)( M)? images × ([\d,]+)"
)


@pytest.mark.parametrize("name", [n for n in recipe_names() if "computed" in text_of(n)])
def test_a_computed_cost_is_the_product_of_its_factors(name):
    found = COMPUTED.search(header(name))
    assert found is not None
    exaflops, macs, unit, images, millions, length = found.groups()
    flops = 6 * float(macs) * {"G": 1e9, "M": 1e6}[unit]
    seen = float(images.replace(",", "")) * (1e6 if millions else 1) * int(length.replace(",", ""))
    assert float(exaflops) == pytest.approx(flops * seen / 1e18, rel=0.06)
    train = load_config(name).train
    assert train.hyperrule or int(length.replace(",", "")) in (train.steps, train.epochs)


# Table 4: steps and learning rates; the dev fractions of B.1.1; the released code's warm-up.
TABLE_4 = {
    "imagenet": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500),
    "cifar100": (10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500),
    "cifar10": (10_000, (0.001, 0.003, 0.01, 0.03), 0.02, 500),
    "pets": (500, (0.001, 0.003, 0.01, 0.03), 0.1, 100),
    "flowers102": (500, (0.001, 0.003, 0.01, 0.03), 0.1, 100),
    "imagenet_resnet": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500),
    "imagenet_l16_512": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500),
    "imagenet_h14_518": (20_000, (0.003, 0.01, 0.03, 0.06), 0.01, 500),
}


@pytest.mark.parametrize("name", TABLE_4)
def test_fine_tuning_is_table_4(name):
    steps, grid, val, warmup = TABLE_4[name]
    config = load_config(f"finetune/{name}")
    assert (config.train.steps, config.data.val, config.optim.warmup) == (steps, val, warmup)
    assert config.sweep == {"optim.lr": grid}
    assert_papers_protocol(config)


def assert_papers_protocol(config: Config) -> None:
    optim = config.optim
    assert (optim.name, optim.momentum, optim.decay, optim.floor) == ("sgd", 0.9, "cosine", 0.0)
    assert (optim.clip, optim.weight_decay, config.train.batch) == (1.0, 0.0, 512)
    assert (config.train.objective, config.train.label_smoothing) == ("softmax", 0.0)


def test_vtab_has_one_setting_for_all_tasks():
    config = load_config("vtab/vit")
    assert (config.train.steps, config.optim.lr, config.data.size) == (2_500, 0.01, 384)
    assert (config.data.crop, config.augment.crop) == (0.0, "resize")
    assert config.sweep == {
        "data.source": tuple(f"vtab/{short}" for short in TASKS),
        "optim.lr": (0.003, 0.01),
        "train.steps": (500, 2500),
    }
    assert_papers_protocol(config)


@pytest.mark.parametrize(("name", "size"), [("l16_512", 512), ("h14_518", 518)])
def test_the_largest_models_are_averaged_at_higher_resolution(name, size):
    config = load_config(f"finetune/imagenet_{name}")
    assert (config.data.size, config.train.ema) == (size, 0.9999)
    assert not config.train.ema_ramp
    variant = NAMES[config.model.init].variant
    assert size % int(variant.split("/")[1]) == 0


def test_other_fine_tuning_is_at_384_pixels():
    for name in ("imagenet", "cifar10", "cifar100", "pets", "flowers102", "imagenet_resnet"):
        config = load_config(f"finetune/{name}")
        assert (config.data.size, config.train.ema, config.train.keep) == (384, 0.0, "last")


@pytest.mark.parametrize("name", ["imagenet", "cifar10", "cifar100", "pets", "flowers102"])
@pytest.mark.parametrize(("size", "source"), [(384, 448), (128, 160)])
def test_two_settings_prepare_images_as_bit_does(name, size, source):
    """Whatever crop the weights have."""
    given = ["augment.crop=resize", "data.crop=0", f"data.size={size}"]
    config = resolve_config(f"finetune/{name}", given, lists=True).config
    assert config.augment == Augment(crop="resize")
    used = _preprocessing(Preprocessing(size=(224, 224), short_side=256), config.data)
    assert (used.size, used.short_side) == ((size, size), 0)
    assert crop_source_size(used) == [source, source]


# RandAugment's layers and magnitude, Mixup (AugReg, Figure 4's caption).
AUGREG = {
    "none": (0, None, 0.0),
    "light1": (2, 0, 0.0),
    "light2": (2, 10, 0.2),
    "medium1": (2, 15, 0.2),
    "medium2": (2, 15, 0.5),
    "strong1": (2, 20, 0.5),
    "strong2": (2, 20, 0.8),
}


@pytest.mark.parametrize("level", AUGREG)
def test_augregs_levels(level):
    layers, magnitude, mixup = AUGREG[level]
    config = load_config(f"pretrain/augreg/{level}")
    assert config.augment.randaugment_layers == layers
    assert config.augment.mixup == mixup
    assert magnitude is None or config.augment.randaugment_magnitude == magnitude
    optim = config.optim
    assert (optim.lr, optim.weight_decay, optim.warmup, optim.clip) == (1e-3, 0.1, 10_000, 1.0)
    assert (config.train.epochs, config.train.batch) == (300, 4096)
    others = {k: v for k, v in to_flat(config).items() if not k.startswith("augment.")}
    same = {k: v for k, v in to_flat(load_config("pretrain/augreg/none")).items() if k in others}
    assert others == same


def test_the_plain_baselines_differ_in_length_only():
    runs = [load_config(f"pretrain/imagenet/s16_{epochs}ep") for epochs in (90, 150, 300)]
    assert [run.train.epochs for run in runs] == [90, 150, 300]
    assert len({tuple(v for k, v in to_flat(r).items() if k != "train.epochs") for r in runs}) == 1
    config = runs[0]
    assert (config.optim.lr, config.optim.weight_decay, config.train.batch) == (1e-3, 0.1, 1024)
    assert (config.model.pool, config.model.positions, config.augment.mixup) == (
        "mean",
        "sincos",
        0.2,
    )


def test_the_flower_pair_differs_in_the_model_only():
    vit, resnet = (to_flat(load_config(f"flowers/{name}")) for name in ("vit", "resnet"))
    assert {k for k in vit if vit[k] != resnet[k]} == {"model.init"}
    rows = [NAMES[pair["model.init"]] for pair in (vit, resnet)]
    assert rows[0].data == rows[1].data == "ImageNet-21k"


@pytest.mark.parametrize(
    "name", [n for n in recipe_names() if "/bit_" in n and n.startswith("pre")]
)
def test_bits_own_pre_training(name):
    config = load_config(name)
    optim = config.optim
    assert (optim.name, optim.momentum, optim.warmup, optim.decay) == (
        *("sgd", 0.9, 5000, "staircase"),
    )
    assert optim.lr == pytest.approx(0.03 * config.train.batch / 256)
    assert optim.weight_decay == 1e-4


def test_digits_are_never_mirrored():
    assert load_config("digits/vit").augment.flip is False


def test_the_guide_lists_every_recipe():
    guide = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `([\w/]+)` \|", guide, re.M))
    assert listed == set(recipe_names())


def test_the_guide_gives_each_recipe_its_own_published_figure():
    guide = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for name, figure in re.findall(r"^\| `([\w/]+)` \|.*\| ([\d.]+)%", guide, re.M):
        assert f"{figure}%" in text_of(name), name


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """A folder of a few pictures in three classes."""
    folder = tmp_path_factory.mktemp("photos")
    for label, number in itertools.product(("a", "b", "c"), range(8)):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 50, 3), np.uint8)
        (folder / label).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> dict[str, Path]:
    """A small model in place of each kind of published one."""
    folder = tmp_path_factory.mktemp("weights")
    models = {"ViT": create("Ti/16", size=32, depth=1), "ResNet": create("R26x1", size=32)}
    for kind, model in models.items():
        save(model, folder / f"{kind}.safetensors", to="vitrail")
    return {kind: folder / f"{kind}.safetensors" for kind in models}


def shrunk(name: str, weights: dict[str, Path]) -> list[str]:
    """What makes a recipe's model small, and its run a single step."""
    config = load_config(name)
    given = [
        "train.steps=1",
        "train.batch=4",
        "train.evaluations=1",
        "data.subset=0",
        "data.val=0.2",
    ]
    given += ["data.test=0.2", "data.split=stratified", "system.workers=0", "system.compile=false"]
    # The rule would make it 500 steps of 512 images again.
    given += ["train.hyperrule=false"]
    if config.model.init:
        kind = "ViT" if "/" in config.model.init else "ResNet"
        return [*given, f"model.init={weights[kind]}", "data.size=32"]
    variant = config.model.variant
    if "/" not in variant:
        return [*given, "model.variant=R26x1", "data.size=32"]
    if "+" in variant:
        given, variant = [*given, "model.variant=R+Ti/16"], "Ti/32"
    if not config.model.depth:
        given += ["model.width=32", "model.depth=1", "model.heads=2", "model.mlp=32"]
    return [*given, f"data.size={2 * int(variant.partition('/')[2])}"]


@pytest.mark.parametrize("name", recipe_names())
def test_its_first_step_runs_on_tiny_data(name, photos, weights, tmp_path):
    config = load_config(name, [f"data.source={photos}", *shrunk(name, weights)])
    run = train_config(config, tmp_path / "run", device="cpu")
    events = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert {event["event"] for event in events} == {"train", "val"}
    assert all(math.isfinite(event["loss"]) for event in events)
    assert run.info()["status"] == "finished"
    assert len(load_model(run.folder).labels) == (0 if config.train.objective == "masked" else 3)
