"""Names, addresses and sizes are held against what timm and torchvision themselves declare."""

import json
import re
from functools import cache
from urllib.parse import urlsplit

import pytest
import timm
from torchvision.models import vision_transformer

from vitrail.model.variants import parse_variant
from vitrail.weights.published import (
    COSTS,
    NAMES,
    PUBLISHED,
    Published,
    architectures,
    listing,
    model_cost,
)

HUB = [row for row in PUBLISHED if row.source.startswith("hub:")]
WEB = [row for row in PUBLISHED if row.source.startswith("https:")]
TORCH = [row for row in PUBLISHED if row.cited == "torchvision.models.vision_transformer"]
BIT = [row for row in PUBLISHED if re.search(r"BiT-M-R\d+x\d(-ILSVRC2012)?\.npz", row.source)]
SAVED = json.loads(COSTS.read_text(encoding="utf-8"))
LISTED = architectures()
# One of every family and kind, small enough to count in a moment.
COUNTED = [
    "Ti/16",
    "b/32",
    "B/16",
    "So400m/14",
    "R+Ti/16",
    "R50+B/16",
    "R50x1",
    "Axial-B/32",
    "Axial-R26",
    "ResNet50",
    "B/16-in21k",
    "S/16-deit3-in1k-384",
    "S/14-dinov2-reg4",
    "B/16-siglip",
    "R50x1-bit-in21k",
]


def name_of(row: Published) -> str:
    return row.name


@cache
def timm_configurations() -> dict[str, timm.models.PretrainedCfg]:
    """timm's pretrained configurations, by the address of the original file."""
    found = (timm.models.get_pretrained_cfg(name) for name in timm.list_pretrained())
    return {cfg.url: cfg for cfg in found if cfg is not None and isinstance(cfg.url, str)}


def test_names_and_sources_are_unique() -> None:
    assert len({row.name for row in PUBLISHED}) == len(PUBLISHED)
    assert len({row.source for row in PUBLISHED}) == len(PUBLISHED)


def test_crops_of_torchvision_files_are_torchvisions() -> None:
    transforms = {
        weights.url: weights.transforms()
        for name in dir(vision_transformer)
        if name.endswith("_Weights")
        for weights in getattr(vision_transformer, name)
    }
    for row in TORCH:
        expected = transforms[row.source]
        crop, kind = row.crop or 224 / 256, row.interpolation
        assert round(row.size / crop) == expected.resize_size[0]
        assert (row.size, kind) == (expected.crop_size[0], expected.interpolation.value)


def test_a_name_is_found_exactly_or_not_at_all() -> None:
    for row in PUBLISHED:
        assert NAMES.get(row.name) is row
    assert NAMES.get("b/16-in21k") is None
    assert NAMES.get("B/16") is None


@pytest.mark.parametrize(
    "name",
    [
        "B/16-in21k",
        "B/16-in21k-in1k-384",
        "B/16-augreg-in21k",
        "B/16-augreg-in21k-in1k-384",
        "S/16-deit-in1k",
        "S/16-deit3-in22k-in1k-384",
        "S/14-dinov2",
        "S/14-dinov2-reg4",
        "R50x1-bit-in21k",
        "R50x1-bit-in21k-in1k",
        "B/16-torchvision-in1k",
    ],
)
def test_the_usual_names_are_there(name: str) -> None:
    assert NAMES.get(name) is not None


@pytest.mark.parametrize("row", PUBLISHED, ids=name_of)
def test_a_row_is_coherent(row: Published) -> None:
    assert row.name.startswith(f"{row.variant}-")
    assert row.classes in {0, 1000, 21843}
    assert (row.top1 is None) == (row.cited == "")
    assert row.top1 is None or (70 < row.top1 < 92 and row.classes == 1000)
    _, slash, patch = row.variant.partition("/")
    assert not slash or row.size % int(patch) == 0


@pytest.mark.parametrize("row", PUBLISHED, ids=name_of)
def test_a_variant_is_one_that_can_be_built(row: Published) -> None:
    assert parse_variant(row.variant, classes=row.classes, size=row.size)


@pytest.mark.parametrize("row", WEB, ids=name_of)
def test_an_address_is_a_plain_https_file(row: Published) -> None:
    parts = urlsplit(row.source)
    assert re.fullmatch(r"[\w./%-]+\.(npz|pth)", parts.path)
    assert "{" not in row.source
    assert parts.netloc in {"storage.googleapis.com", "download.pytorch.org"}


@pytest.mark.parametrize("row", HUB, ids=name_of)
def test_a_hub_repository_is_one_that_timm_hosts(row: Published) -> None:
    repository = row.source.removeprefix("hub:")
    model = repository.removeprefix("timm/")
    cfg = timm.models.get_pretrained_cfg(model)
    assert cfg is not None
    assert cfg.hf_hub_id == repository
    assert cfg.num_classes == row.classes
    assert cfg.input_size == (3, row.size, row.size)


def test_google_files_that_timm_also_uses_agree_with_it() -> None:
    known = timm_configurations()
    shared = [row for row in WEB if row.source in known]
    assert shared
    for row in shared:
        assert known[row.source].num_classes == row.classes
        assert known[row.source].input_size == (3, row.size, row.size)


def test_an_augreg_or_sam_figure_taken_from_timm_is_for_the_file_timm_uses() -> None:
    cited = [row for row in WEB if row.cited == "timm results-imagenet.csv"]
    rows = [row for row in cited if re.search("/(augreg|sam)/", row.source)]
    assert len(rows) == 7
    assert all(row.source in timm_configurations() for row in rows)


def test_an_augreg_figure_of_the_readme_is_not_for_a_file_that_timm_replaced() -> None:
    known = timm_configurations()
    for name in ("B/16", "L/16", "B/32", "S/32", "R50+L/32", "R26+S/32"):
        row = NAMES.get(f"{name}-augreg-in21k-in1k-384")
        assert row is not None
        assert row.source not in known


def test_a_fine_tuned_augreg_file_continues_its_pretrained_one() -> None:
    for row in PUBLISHED:
        if "/augreg/" in row.source and "--" in row.source:
            start = NAMES.get(f"{row.variant}-augreg-in21k")
            assert start is not None
            assert row.source.startswith(start.source.removesuffix(".npz") + "--imagenet2012")
            assert row.source.endswith(f"-res_{row.size}.npz")


def test_torchvision_rows_equal_its_weight_enums() -> None:
    published = {row.source: (row.variant, row.size, row.top1, row.classes) for row in TORCH}
    declared = {}
    for variant in ("B/16", "B/32", "L/16", "L/32", "H/14"):
        enum = getattr(vision_transformer, f"ViT_{variant.replace('/', '_')}_Weights")
        for weights in enum:
            top1 = weights.meta["_metrics"]["ImageNet-1K"]["acc@1"]
            size = weights.meta["min_size"][0]
            declared[weights.url] = (variant, size, top1, len(weights.meta["categories"]))
    assert published == declared


@pytest.mark.parametrize("row", BIT, ids=name_of)
def test_bit_sizes_are_those_timm_evaluates_at(row: Published) -> None:
    tag = "goog_in21k_ft_in1k" if row.classes == 1000 else "goog_in21k"
    cfg = timm.models.get_pretrained_cfg(f"resnetv2_{row.variant[1:]}_bit.{tag}")
    assert cfg is not None
    assert cfg.input_size == (3, row.size, row.size)
    assert cfg.num_classes == row.classes


def test_everything_that_exists_is_listed():
    assert list(SAVED) == list(LISTED)
    assert {row["name"] for row in listing()} >= {row.name for row in PUBLISHED}


@pytest.mark.parametrize("name", COUNTED)
def test_saved_figures_are_those_of_the_model(name):
    cost = model_cost(LISTED[name])
    assert (cost.parameters, cost.gmacs, cost.tokens) == tuple(SAVED[name].values())


def test_vit_costs_follow_the_formula():
    """Eq. 1 to 8 in multiply-accumulates: patches, then 12 D² + 2 n D for each token and layer."""
    for name, n, d, layers, patch in (("B/16", 197, 768, 12, 16), ("L/32", 50, 1024, 24, 32)):
        embedding = (n - 1) * 3 * patch**2 * d
        blocks = layers * n * (12 * d * d + 2 * n * d)
        assert SAVED[name]["gmacs"] == pytest.approx(
            (embedding + blocks + 1000 * d) / 1e9, abs=1e-4
        )


def test_published_files_have_the_parameters_their_sizes_prove():
    # 400.0 MiB of float32 for the original B/32 with its hidden layer; 391 for AugReg's B/16.
    assert SAVED["B/32-in21k"]["parameters"] == 104_843_091
    assert SAVED["B/16-augreg-in21k"]["parameters"] == 102_595_923


def test_a_pattern_keeps_what_contains_it():
    assert {row["variant"] for row in listing("deit")} == {"Ti/16", "S/16", "B/16", "L/16", "H/14"}
    assert [row["name"] for row in listing("r?+ti")] == []
    assert listing("R+Ti/16*384")[0]["top1"] == 75.40
    assert listing("nothing like it") == []
