"""The published checkpoints that can be asked for by name, and the accuracy claimed for each.

A name is `variant-family`, followed by the size in pixels where that is not the family's usual one.
A figure belongs to the very file it stands beside: for the same model, Google's README and timm
chose files from different training runs, so neither number may be moved to the other's file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Published:
    """One checkpoint somebody published."""

    name: str
    """What a user types."""
    variant: str
    """A row of the table of variants."""
    size: int
    """Side, in pixels, of the images it was trained or last fine-tuned on."""
    classes: int
    """Zero: features only."""
    source: str
    """`https://…`, a file; `hub:owner/repository`, a folder on the Hugging Face Hub; or
    `package:folder`, a folder of this package."""
    options: Mapping[str, Any]
    """How its architecture differs from the variant's defaults."""
    data: str
    """What it learnt from, in order."""
    crop: float
    """Share of the short side that its evaluation kept; zero where the file or its family says."""
    interpolation: Literal["bilinear", "bicubic"]
    """How that evaluation resized, where `crop` is given."""
    top1: float | None
    """Published ImageNet-1k top-1, per cent."""
    cited: str
    """Where that figure stands; empty without one."""


@dataclass(frozen=True, kw_only=True)
class _Family:
    """Checkpoints that differ in variant and size only, and whose figures stand in one place."""

    name: str
    data: str
    source: str
    """The address; the words of a row's third column fill its braces."""
    cited: str = ""
    classes: int = 1000
    options: Mapping[str, Any] = field(default_factory=dict)
    crop: float = 0.0
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    usual: int = 224
    """The size that names leave out; zero where every name does."""
    rows: tuple[tuple[str, int, str, float | None], ...]
    """Variant, size, what completes the address, top-1."""


VIT = "https://storage.googleapis.com/vit_models"
AUGREG = VIT + "/augreg/{}-i21k-300ep-lr_0.001-aug_{}-wd_{}-do_{}-sd_{}"
TUNED = "--imagenet2012-steps_20k-lr_{}-res_{}.npz"
BIT = "https://storage.googleapis.com/bit_models"
PYTORCH = "https://download.pytorch.org/models"

IN1K, IN21K, IN22K = "ImageNet-1k", "ImageNet-21k", "ImageNet-22k"
IN21K_IN1K, IN22K_IN1K = f"{IN21K} → {IN1K}", f"{IN22K} → {IN1K}"
DEIT3 = {"layer_scale": 1e-6, "class_slot": False}
SWAG = f"Instagram-3.6B → {IN1K}"

PAPER = "ViT paper, Table 5"
README = "vision_transformer README"
TIMM = "timm results-imagenet.csv"
TORCHVISION = "torchvision.models.vision_transformer"

_GOOGLE = (
    _Family(
        name="in21k",
        data=IN21K,
        source=VIT + "/imagenet21k/{}.npz",
        classes=21843,
        options={"hidden": True},
        rows=(
            ("B/16", 224, "ViT-B_16", None),
            ("B/32", 224, "ViT-B_32", None),
            ("L/16", 224, "ViT-L_16", None),
            ("L/32", 224, "ViT-L_32", None),
            ("H/14", 224, "ViT-H_14", None),
            ("R50+B/16", 224, "R50%2BViT-B_16", None),
        ),
    ),
    _Family(
        name="in21k-in1k",
        data=IN21K_IN1K,
        source=VIT + "/imagenet21k%2Bimagenet2012/{}.npz",
        cited=PAPER,
        rows=(
            ("B/16", 384, "ViT-B_16", 83.97),
            ("B/32", 384, "ViT-B_32", 81.28),
            ("L/16", 384, "ViT-L_16", 85.15),
            ("L/32", 384, "ViT-L_32", 80.99),
        ),
    ),
    _Family(
        name="in21k-in1k",
        data=IN21K_IN1K,
        source=VIT + "/imagenet21k%2Bimagenet2012/{}.npz",
        cited=TIMM,
        rows=(("R50+B/16", 384, "R50%2BViT-B_16", 84.99),),
    ),
    _Family(
        name="in21k-in1k",
        data=IN21K_IN1K,
        source=VIT + "/imagenet21k%2Bimagenet2012/{}.npz",
        cited=README,
        rows=(
            ("B/16", 224, "ViT-B_16-224", 81.2),
            ("L/16", 224, "ViT-L_16-224", 82.7),
        ),
    ),
    _Family(
        # Steiner et al. 2021; the README's recommendations. Their file names spell the training
        # out: augmentation, weight decay, dropout, stochastic depth, then the fine-tuning.
        name="augreg-in21k",
        data=IN21K,
        source=AUGREG + ".npz",
        classes=21843,
        rows=(
            ("L/16", 224, "L_16 strong1 0.1 0.0 0.0", None),
            ("B/16", 224, "B_16 medium1 0.1 0.0 0.0", None),
            ("S/16", 224, "S_16 light1 0.03 0.0 0.0", None),
            ("R50+L/32", 224, "R50_L_32 medium1 0.1 0.1 0.1", None),
            ("R26+S/32", 224, "R26_S_32 light1 0.1 0.0 0.0", None),
            ("Ti/16", 224, "Ti_16 none 0.03 0.0 0.0", None),
            ("B/32", 224, "B_32 light1 0.1 0.0 0.0", None),
            ("S/32", 224, "S_32 none 0.1 0.0 0.0", None),
            ("R+Ti/16", 224, "R_Ti_16 none 0.03 0.0 0.0", None),
            ("B/8", 224, "B_8 medium2 0.1 0.0 0.0", None),
        ),
    ),
    _Family(
        name="augreg-in21k-in1k",
        data=IN21K_IN1K,
        source=AUGREG + TUNED,
        cited=README,
        rows=(
            ("L/16", 384, "L_16 strong1 0.1 0.0 0.0 0.01 384", 85.59),
            ("B/16", 384, "B_16 medium1 0.1 0.0 0.0 0.03 384", 85.49),
            ("S/16", 384, "S_16 light1 0.03 0.0 0.0 0.03 384", 83.73),
            ("R50+L/32", 384, "R50_L_32 medium1 0.1 0.1 0.1 0.01 384", 85.99),
            ("R26+S/32", 384, "R26_S_32 light1 0.1 0.0 0.0 0.01 384", 83.85),
            ("Ti/16", 384, "Ti_16 none 0.03 0.0 0.0 0.03 384", 78.22),
            ("B/32", 384, "B_32 light1 0.1 0.0 0.0 0.01 384", 83.59),
            ("S/32", 384, "S_32 none 0.1 0.0 0.0 0.01 384", 79.58),
            ("R+Ti/16", 384, "R_Ti_16 none 0.03 0.0 0.0 0.03 384", 75.40),
        ),
    ),
    _Family(
        name="augreg-in21k-in1k",
        data=IN21K_IN1K,
        source=AUGREG + TUNED,
        cited=TIMM,
        rows=(
            ("B/16", 224, "B_16 medium1 0.1 0.0 0.0 0.01 224", 84.53),
            ("S/16", 224, "S_16 light1 0.03 0.0 0.0 0.03 224", 81.40),
            ("R50+L/32", 224, "R50_L_32 medium1 0.1 0.1 0.1 0.01 224", 84.43),
            ("Ti/16", 224, "Ti_16 none 0.03 0.0 0.0 0.03 224", 75.45),
            ("R+Ti/16", 224, "R_Ti_16 none 0.03 0.0 0.0 0.03 224", 71.80),
        ),
    ),
    _Family(
        name="sam-in1k",
        data=IN1K,
        source=VIT + "/sam/{}.npz",
        cited=TIMM,
        rows=(
            ("B/16", 224, "ViT-B_16", 80.25),
            ("B/32", 224, "ViT-B_32", 73.71),
        ),
    ),
)

_TIMM = (
    _Family(
        # timm's own choice among the AugReg files.
        name="augreg-timm-in21k-in1k",
        data=IN21K_IN1K,
        source="hub:timm/vit_{}.augreg_in21k_ft_in1k",
        cited=TIMM,
        rows=(
            ("Ti/16", 224, "tiny_patch16_224", 75.45),
            ("Ti/16", 384, "tiny_patch16_384", 78.44),
            ("S/32", 224, "small_patch32_224", 76.00),
            ("S/32", 384, "small_patch32_384", 80.48),
            ("S/16", 224, "small_patch16_224", 81.40),
            ("S/16", 384, "small_patch16_384", 83.81),
            ("B/32", 224, "base_patch32_224", 80.73),
            ("B/32", 384, "base_patch32_384", 83.36),
            ("B/16", 224, "base_patch16_224", 84.53),
            ("B/16", 384, "base_patch16_384", 86.01),
            ("L/16", 224, "large_patch16_224", 85.86),
            ("L/16", 384, "large_patch16_384", 87.10),
        ),
    ),
    _Family(
        name="deit-in1k",
        data=IN1K,
        source="hub:timm/deit_{}.fb_in1k",
        cited=TIMM,
        rows=(
            ("Ti/16", 224, "tiny_patch16_224", 72.20),
            ("S/16", 224, "small_patch16_224", 79.86),
            ("B/16", 224, "base_patch16_224", 81.98),
            ("B/16", 384, "base_patch16_384", 83.12),
        ),
    ),
    _Family(
        name="deit3-in1k",
        data=IN1K,
        source="hub:timm/deit3_{}.fb_in1k",
        options=DEIT3,
        cited=TIMM,
        rows=(
            ("S/16", 224, "small_patch16_224", 81.38),
            ("S/16", 384, "small_patch16_384", 83.43),
            ("B/16", 224, "base_patch16_224", 83.80),
            ("B/16", 384, "base_patch16_384", 85.09),
            ("L/16", 224, "large_patch16_224", 84.78),
            ("L/16", 384, "large_patch16_384", 85.82),
            ("H/14", 224, "huge_patch14_224", 85.22),
        ),
    ),
    _Family(
        name="deit3-in22k-in1k",
        data=IN22K_IN1K,
        source="hub:timm/deit3_{}.fb_in22k_ft_in1k",
        options=DEIT3,
        cited=TIMM,
        rows=(
            ("S/16", 224, "small_patch16_224", 83.08),
            ("S/16", 384, "small_patch16_384", 84.85),
            ("B/16", 224, "base_patch16_224", 85.73),
            ("B/16", 384, "base_patch16_384", 86.74),
            ("L/16", 224, "large_patch16_224", 86.99),
            ("L/16", 384, "large_patch16_384", 87.73),
            ("H/14", 224, "huge_patch14_224", 87.18),
        ),
    ),
    _Family(
        name="dinov2",
        data="LVD-142M",
        source="hub:timm/vit_{}_patch14_dinov2.lvd142m",
        classes=0,
        options={"layer_scale": 1e-5},
        usual=518,
        rows=(
            ("S/14", 518, "small", None),
            ("B/14", 518, "base", None),
            ("L/14", 518, "large", None),
        ),
    ),
    _Family(
        name="dinov2-reg4",
        data="LVD-142M",
        source="hub:timm/vit_{}_patch14_reg4_dinov2.lvd142m",
        classes=0,
        options={"layer_scale": 1e-5, "registers": 4, "class_slot": False},
        usual=518,
        rows=(
            ("S/14", 518, "small", None),
            ("B/14", 518, "base", None),
            ("L/14", 518, "large", None),
        ),
    ),
    _Family(
        # SigLIP's image towers: no class token, attention pooling.
        name="siglip",
        data="WebLI",
        source="hub:timm/vit_{}.webli",
        classes=0,
        options={"pool": "attention"},
        rows=(
            ("B/16", 224, "base_patch16_siglip_224", None),
            ("L/16", 256, "large_patch16_siglip_256", None),
            ("So400m/14", 224, "so400m_patch14_siglip_224", None),
            ("So400m/14", 378, "so400m_patch14_siglip_378", None),
        ),
    ),
    _Family(
        name="siglip2",
        data="WebLI",
        source="hub:timm/vit_{}.v2_webli",
        classes=0,
        options={"pool": "attention"},
        rows=(
            ("B/16", 224, "base_patch16_siglip_224", None),
            ("L/16", 256, "large_patch16_siglip_256", None),
            ("So400m/14", 224, "so400m_patch14_siglip_224", None),
            ("So400m/14", 378, "so400m_patch14_siglip_378", None),
        ),
    ),
)

_TORCHVISION = (
    _Family(
        name="torchvision-in1k",
        data=IN1K,
        source=PYTORCH + "/{}.pth",
        cited=TORCHVISION,
        rows=(
            ("B/16", 224, "vit_b_16-c867db91", 81.072),
            ("B/32", 224, "vit_b_32-d86f8d99", 75.912),
            ("L/32", 224, "vit_l_32-c7638314", 76.972),
        ),
    ),
    _Family(
        name="torchvision-in1k",
        data=IN1K,
        source=PYTORCH + "/{}.pth",
        cited=TORCHVISION,
        crop=224 / 242,
        rows=(("L/16", 224, "vit_l_16-852ce7e3", 79.662),),
    ),
    _Family(
        # Singh et al. 2022, fine-tuned end to end; licensed for non-commercial use only.
        name="torchvision-swag-in1k",
        data=SWAG,
        crop=1.0,
        interpolation="bicubic",
        source=PYTORCH + "/{}.pth",
        cited=TORCHVISION,
        rows=(
            ("B/16", 384, "vit_b_16_swag-9ac1b537", 85.304),
            ("L/16", 512, "vit_l_16_swag-4f3808c9", 88.064),
            ("H/14", 518, "vit_h_14_swag-80465313", 88.552),
        ),
    ),
    _Family(
        # The same trunks, frozen, under a linear classifier.
        name="torchvision-swag-linear-in1k",
        data=SWAG,
        crop=1.0,
        interpolation="bicubic",
        source=PYTORCH + "/{}.pth",
        cited=TORCHVISION,
        rows=(
            ("B/16", 224, "vit_b_16_lc_swag-4e70ced5", 81.886),
            ("L/16", 224, "vit_l_16_lc_swag-4d563306", 85.146),
            ("H/14", 224, "vit_h_14_lc_swag-c1eb923e", 85.708),
        ),
    ),
)

_BIT = (
    _Family(
        name="bit-in1k",
        data=IN1K,
        source=BIT + "/BiT-S-{}.npz",
        rows=(
            ("R50x1", 224, "R50x1", None),
            ("R50x3", 224, "R50x3", None),
            ("R101x1", 224, "R101x1", None),
            ("R101x3", 224, "R101x3", None),
            ("R152x2", 224, "R152x2", None),
            ("R152x4", 224, "R152x4", None),
        ),
    ),
    _Family(
        name="bit-in21k",
        data=IN21K,
        source=BIT + "/BiT-M-{}.npz",
        classes=21843,
        rows=(
            ("R50x1", 224, "R50x1", None),
            ("R50x3", 224, "R50x3", None),
            ("R101x1", 224, "R101x1", None),
            ("R101x3", 224, "R101x3", None),
            ("R152x2", 224, "R152x2", None),
            ("R152x4", 224, "R152x4", None),
        ),
    ),
    _Family(
        # The README's own runs are other files than these, so the figures are timm's.
        name="bit-in21k-in1k",
        data=IN21K_IN1K,
        source=BIT + "/BiT-M-{}-ILSVRC2012.npz",
        cited=TIMM,
        usual=0,
        rows=(
            ("R50x1", 448, "R50x1", 80.39),
            ("R50x3", 448, "R50x3", 83.98),
            ("R101x1", 448, "R101x1", 82.33),
            ("R101x3", 448, "R101x3", 84.43),
            ("R152x2", 448, "R152x2", 84.47),
            ("R152x4", 480, "R152x4", 84.94),
        ),
    ),
    _Family(
        # Beyer et al. 2021, distilled from R152x2.
        name="bit-distilled-in1k",
        data=IN1K,
        source=BIT + "/distill/{}.npz",
        cited="BiT README",
        rows=(("R50x1", 224, "R50x1_224", 82.8),),
    ),
)

PUBLISHED: tuple[Published, ...] = tuple(
    Published(
        name=f"{variant}-{family.name}" + (f"-{size}" if size != (family.usual or size) else ""),
        variant=variant,
        size=size,
        classes=family.classes,
        options=family.options,
        crop=family.crop,
        interpolation=family.interpolation,
        source=family.source.format(*words.split()),
        data=family.data,
        top1=top1,
        cited=family.cited,
    )
    for family in (*_GOOGLE, *_TIMM, *_TORCHVISION, *_BIT)
    for variant, size, words, top1 in family.rows
)

BUILTIN = Published(
    name="builtin",
    variant="Ti/4",
    size=32,
    classes=10,
    options={"depth": 6, "mlp": 384, "pool": "mean", "positions": "sincos"},
    crop=0.0,
    interpolation="bilinear",
    source="package:builtin",
    data="CIFAR-10",
    top1=None,
    cited="",
)
"""The model that comes with Vitrail, so that everything works before anything was downloaded."""

NAMES = {row.name: row for row in (BUILTIN, *PUBLISHED)}
"""Every name that a MODEL may be."""


def find(name: str) -> Published | None:
    """The checkpoint of exactly that name."""
    return NAMES.get(name)
