import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vitrail
from vitrail import VitrailError
from vitrail.model.variants import NAMED, SIZES, from_dict, parse_variant, to_dict, variant_name

# 1,000 classes at 224 pixels, as the reference implementations count them.
PARAMETERS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "S/32": 22_878_952,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "B/8": 86_576_872,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "R+Ti/16": 6_337_704,
    "R26+S/32": 36_431_912,
    "R26+B/32": 101_383_976,
    "R50+B/32": 110_945_832,
    "R50+B/16": 98_659_112,
    "R50+L/32": 328_994_856,
    "R50+L/16": 316_483_624,
    "R50x1": 25_549_352,
    "R50x2": 97_988_712,
    "R50x3": 217_319_080,
    "R101x1": 44_541_480,
    "R101x3": 387_934_888,
    "R152x1": 60_185_128,
    "R152x2": 236_335_208,
    "R152x4": 936_533_224,
    "R200x3": 568_633_000,
    "ResNet50": 25_557_032,
}


def parameters(variant: str, **options: object) -> int:
    with torch.device("meta"):
        model = vitrail.create(variant, **options)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("variant", PARAMETERS)
def test_parameter_counts_are_those_of_the_reference(variant):
    assert parameters(variant) == PARAMETERS[variant]


def test_counts_of_other_heads_are_those_of_the_reference():
    assert parameters("S/16", pool="mean") == 22_049_896
    assert parameters("B/32", classes=21843, hidden=768) == 104_843_091
    assert parameters("L/16", classes=0) == 303_301_632
    assert parameters("R50x1", classes=21843) == 68_256_659


def test_halving_every_hidden_width_of_b_gives_the_small_b():
    halved = (width // 2 if i in (0, 3) else width for i, width in enumerate(SIZES["B"]))
    assert tuple(halved) == SIZES["b"]
    assert parameters("b/32") == 22_878_952


def test_the_small_axial_resnet_has_the_published_size():
    assert round(parameters("Axial-R26") / 1e6, 1) == 5.9  # Axial-DeepLab's Axial-ResNet-26-S


def test_axial_vit_has_twice_the_blocks():
    with torch.device("meta"):
        plain, axial = vitrail.create("B/16"), vitrail.create("Axial-B/16")
    assert len(axial.blocks) == 2 * len(plain.blocks)


@pytest.mark.parametrize("variant", NAMED)
def test_every_row_of_the_table_builds_and_answers(variant):
    with torch.device("meta"):
        model = vitrail.create(variant, classes=10)
        assert model(torch.zeros(2, 3, 224, 224)).shape == (2, 10)


@pytest.mark.parametrize("variant", NAMED)
def test_an_architecture_knows_its_name_and_survives_a_file(variant):
    architecture = parse_variant(variant)
    assert variant_name(architecture) == variant
    assert from_dict(to_dict(architecture)) == architecture


@pytest.mark.parametrize(
    ("variant", "options", "name"),
    [
        ("R26x0.5", {}, "R26x0.5"),
        ("R50x2.0", {}, "R50x2"),
        ("R14x0.25", {"root": "small"}, "R14x0.25 (small root)"),
        ("R26+S/32", {"root": "small"}, "R26+S/8 (small root)"),
        ("R50+B/16", {"root": "small"}, "R50+B/4 (small root)"),
        ("R+Ti/16", {"root": "small"}, "R+Ti/8 (small root)"),
        ("R14x0.25+Ti/32", {}, "R14x0.25+Ti/32"),
        ("R14+Ti/16", {"root": "small", "depth": 4}, "R14+ViT 4x192/4 (small root)"),
        ("Axial-R26x0.25", {}, "Axial-R26x0.25"),
        ("Axial-R26x0.5", {"root": "small"}, "Axial-R26 (small root)"),
        ("Axial-R50x1", {}, "Axial-R50"),
    ],
)
def test_other_roots_and_widths_are_in_the_name_and_survive_a_file(variant, options, name):
    architecture = parse_variant(variant, size=32, **options)
    assert variant_name(architecture) == name
    stored = json.loads(json.dumps(to_dict(architecture)))
    assert from_dict(stored) == architecture


def test_files_without_root_or_with_a_whole_width_are_read():
    for variant in ("R50x1", "R50+B/16", "Axial-R26"):
        stored = to_dict(parse_variant(variant))
        older = {k: v for k, v in stored.items() if k not in ("root", "backbone_width")}
        assert from_dict(older) == parse_variant(variant)
    stored = to_dict(parse_variant("R50x1"))
    assert json.dumps(stored["width"]) == "1"
    assert from_dict(stored | {"width": 1.0}) == parse_variant("R50x1")


def test_figure_8s_pivot_is_a_matter_of_options():
    pivot = parse_variant("L/32", depth=8, mlp=2048)
    assert (pivot.depth, pivot.width, pivot.mlp, pivot.patch) == (8, 1024, 2048, 32)


def test_tokens_are_those_of_the_paper():
    def tokens(variant: str) -> int:
        rows, columns = parse_variant(variant).grid
        return rows * columns

    assert [tokens(v) for v in ("B/16", "B/32", "H/14")] == [196, 49, 256]
    assert [tokens(v) for v in ("R50+B/32", "R50+B/16", "R+Ti/16")] == [49, 196, 49]


@pytest.mark.parametrize(
    ("variant", "size", "stride", "grid"),
    [
        ("R26+S/32", 32, 8, (4, 4)),
        ("R50+B/16", 32, 4, (8, 8)),
        ("R+Ti/16", 32, 8, (4, 4)),
        ("R26+S/32", (33, 40), 8, (5, 5)),
    ],
)
def test_a_small_root_has_a_quarter_of_the_pixels_per_token(variant, size, stride, grid):
    architecture = parse_variant(variant, size=size, root="small")
    assert (architecture.stride, architecture.grid) == (stride, grid)
    assert parse_variant(variant, size=size).stride == 4 * stride


@pytest.mark.parametrize(
    ("variant", "complaint"),
    [
        ("B16", "did you mean 'B/16'"),
        ("X/16", "unknown variant"),
        ("B/0", "unknown variant"),
        ("R34+B/16", "unknown variant"),
        ("R51x1", "did you mean"),
        ("R26x.5", "did you mean"),
        ("Axial-R26x0.3", "channels divide by 8 heads only at multiples of 0.125"),
        ("R26x0.3", "width = 0.3: 64 times that is not a whole number"),
        ("R26x0.3+S/32", "backbone_width = 0.3: 64 times"),
    ],
)
def test_a_wrong_name_is_one_line(variant, complaint):
    with pytest.raises(VitrailError, match=complaint):
        vitrail.create(variant)


def test_a_wrong_option_is_one_line():
    with pytest.raises(VitrailError, match=r"no option 'droput'; did you mean 'dropout'\?"):
        vitrail.create("B/16", droput=0.1)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 5},
        {"positions": "none", "injection": "every"},
        {"positions": "sincos", "width": 6, "heads": 3},
        {"class_token": False},
        {"class_token": False, "pool": "mean", "class_slot": True},
        {"size": (8, 300)},
        {"axial": True, "pool": "class"},
        {"axial": True, "positions": "relative"},
        {"root": "small"},
        {"backbone_width": 0.5},
        {"backbone": (1, 1), "backbone_width": 0},
    ],
)
def test_a_contradiction_is_one_line(options):
    with pytest.raises(VitrailError) as error:
        vitrail.create("Ti/16", **options)
    assert "\n" not in str(error.value)


@settings(deadline=None, max_examples=25)
@given(
    depth=st.integers(1, 64), heads=st.integers(1, 8), k=st.integers(1, 32), mlp=st.integers(1, 99)
)
def test_any_shape_has_the_parameters_of_the_formula(depth, heads, k, mlp):
    width = heads * k
    block = 4 * width * width + 4 * width + 2 * width * mlp + mlp + width + 4 * width
    stem = 16 * 16 * 3 * width + width + 197 * width + width
    head = 2 * width + 1000 * width + 1000
    count = parameters("B/16", depth=depth, heads=heads, width=width, mlp=mlp)
    assert count == stem + depth * block + head
