"""Every setting of a run, with its default and its help text.

A run is described by one `Config`. A recipe is a TOML file that holds only what differs from the
defaults. A setting on the command line is one more line of that recipe (`optim.lr=3e-4`). The
result is written to `config.toml` in the run folder, and that file is itself a recipe.
"""

import ast
import inspect
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from vitrail import aliases
from vitrail.errors import VitrailError, did_you_mean, one_line


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to train."""

    variant: str = ""
    """The model to build: B/16, R50+B/16, R50x1, Ti/4, …; empty uses the variant of model.init."""
    init: str = ""
    """Any MODEL to start from: it gets a new zero head, and its positions are interpolated to
    data.size; empty trains from scratch."""
    keep_head: bool = False
    """Keep the head of model.init to continue training; its classes must match the data. false
    starts from a zero linear head, as the paper does for fine-tuning."""
    width: int = 0
    """Embedding dimension; 0 uses the variant's."""
    depth: int = 0
    """Number of blocks; 0 uses the variant's."""
    heads: int = 0
    """Number of attention heads; 0 uses the variant's."""
    mlp: int = 0
    """Hidden dimension of the MLPs; 0 uses the variant's."""
    root: Literal["", "imagenet", "small"] = ""
    """First layers of a ResNet or hybrid: a 7x7 convolution of stride 2 and a pool (imagenet), or,
    for images of about 32 pixels, one 3x3 convolution of stride 1 (small); empty uses the variant's
    (imagenet)."""
    pool: Literal["", "class", "mean", "attention"] = ""
    """Input of the head: the class token, the mean of the patch tokens, or attention pooling; empty
    uses the variant's."""
    positions: Literal["", "learned", "factorized", "relative", "sincos", "none"] = ""
    """Position embeddings; empty uses the variant's (learned)."""
    injection: Literal["", "stem", "every", "shared"] = ""
    """Where position embeddings are added: at the stem, at every layer with a table per layer, or
    at every layer with one shared table; empty uses the variant's (stem)."""
    hidden: bool = False
    """Add a tanh layer before the logits, as in the paper's pre-training."""
    head_bias: float = 0.0
    """Initial bias of the logits; -10 (ImageNet-21k) or -6.9 (ImageNet) suits a sigmoid loss."""
    layer_scale: float = 0.0
    """Initial value of LayerScale; 0 disables it."""
    dropout: float = 0.0
    """Dropout rate after every dense layer except the query, key and value projections."""
    drop_path: float = 0.0
    """Stochastic depth: drop rate of the last block; it grows linearly from zero at the first."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """The dataset and its splits."""

    source: str = ""
    """DATA: a folder with one sub-folder per class, tar shards, a packed store or a catalog
    name."""
    size: int | tuple[int, int] = 224
    """Input size of the model in pixels: one side, or [rows, columns]."""
    crop: float = -1.0
    """Center crop for evaluation, as a fraction of the resized short side (0.875 resizes to 256 and
    crops 224); 0 resizes the whole image without cropping; -1 uses the preprocessing of model.init,
    or 0.875 from scratch."""
    val: float = 0.1
    """Fraction of train to hold out for validation, if the data has no val split."""
    test: float = 0.1
    """Fraction of train to hold out for the final test, if the data has no test split."""
    split: Literal["hash", "stratified"] = "hash"
    """How val and test are held out. hash: by a hash of each file name, stable when files are
    added, with every class of three or more images in each split; stratified: the same fraction of
    every class."""
    train_on: Literal["train", "train+val"] = "train"
    """Images to train on; train+val trains on everything except test, once all choices are made."""
    subset: int = 0
    """Train on this many images, drawn at random by the seed; smaller subsets are contained in
    larger ones. 0 uses all images."""
    only: str = ""
    """A file with the names of the images to train on, one per line, as written by `vitrail data
    --against … --filtered`; empty uses all images."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """How training images are drawn; balanced draws every class equally often, regardless of its
    size."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Data augmentation for training."""

    crop: Literal["inception", "resize", "pad", "none"] = "inception"
    """inception: a random crop of random area and aspect ratio; resize: BiT's random crop of the
    resized image; pad: a random shift by up to an eighth of the side; none: the evaluation crop."""
    area: float = 0.05
    """Smallest fraction of the image area that an inception crop keeps."""
    flip: bool = True
    """Flip images horizontally with probability 0.5."""
    randaugment_layers: int = 0
    """RandAugment: operations per image; 0 disables it."""
    randaugment_magnitude: float = 10.0
    """RandAugment: strength of the operations on the scale of the papers, where 10 is the original
    maximum; AugReg goes up to 20."""
    autoaugment: Literal["", "imagenet", "cifar10", "svhn"] = ""
    """AutoAugment with the policy learned on this dataset; empty disables it."""
    three_augment: bool = False
    """DeiT III's 3-Augment: grayscale, solarization or blur for each image."""
    color_jitter: float = 0.0
    """Strength of random brightness, contrast and saturation; 0 disables it."""
    erasing: float = 0.0
    """Probability of erasing a random rectangle of an image."""
    mixup: float = 0.0
    """Mixup alpha; 0 disables it."""
    cutmix: float = 0.0
    """CutMix alpha; 0 disables it. With both Mixup and CutMix, each batch uses one of them."""
    mixed: float = 1.0
    """Fraction of the batches to which Mixup or CutMix is applied."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """The objective, the length of the run, the batch size and which weights to keep."""

    objective: Literal["softmax", "sigmoid", "masked"] = "softmax"
    """The loss: softmax cross-entropy, sigmoid cross-entropy over all classes, or masked patch
    prediction, which needs no labels."""
    masked: Literal["mean", "grid", "pixels"] = "mean"
    """Target of masked patch prediction: the 3-bit mean color of the patch (mean), the mean colors
    of its 4 x 4 cells (grid), or its pixels."""
    masked_share: float = 0.5
    """Fraction of the patches to mask."""
    steps: int = 0
    """Length of the run in updates. Only one of steps, epochs and minutes applies: setting one
    unsets the others."""
    epochs: float = 0.0
    """Length of the run in passes over the training images."""
    minutes: float = 0.0
    """Length of the run as a time budget; the learning rate schedule follows the clock. Computing
    the features of a frozen backbone counts, but at least a tenth of the time is left for the head.
    Such a run can be resumed, but not reproduced bit-exactly."""
    batch: int = 512
    """Images per update, summed over all processes and accumulation steps."""
    freeze: bool = False
    """Train only the head, on features computed once without augmentation (a linear probe)."""
    label_smoothing: float = 0.0
    """Label smoothing: fraction of the target spread evenly over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced weights the loss of each class by the inverse of its frequency."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, the paper's Polyak averaging (0.9999);
    0 disables it. The averaged weights are evaluated and saved."""
    ema_ramp: bool = True
    """Ramp up the decay as (1 + step) / (10 + step) until it reaches train.ema, so that the initial
    weights are forgotten quickly; false uses train.ema from the first step, as in the paper."""
    evaluations: int = 20
    """Number of evaluations on val, evenly spaced over the run; 0 disables them."""
    patience: int = 0
    """Stop after this many evaluations without improvement on val; 0 disables early stopping."""
    keep: Literal["best", "last"] = "best"
    """Which weights to save as the model: those with the best val accuracy (balanced accuracy with
    class weights; ties are broken by val loss), or the last."""
    keep_all: bool = False
    """Also keep the weights of every evaluation, as weights/step-N.safetensors in the run
    folder."""
    fewshot: int = 0
    """At every evaluation on val, also measure few-shot accuracy, as `vitrail fewshot` does, with
    this many images per class of train; 0 disables it. Masked pre-training needs labels only for
    this."""
    fewshot_data: str = ""
    """DATA to measure few-shot accuracy on: the images are drawn from its train split and accuracy
    is measured on its test split; empty uses train and val of the training data."""
    hyperrule: bool = False
    """BiT's HyperRule: choose steps, warm-up, image size and Mixup by the number and size of the
    images, unless they are set."""

    @property
    def uses_labels(self) -> bool:
        return self.objective != "masked"


@dataclass(frozen=True, kw_only=True)
class Optim:
    """The optimizer and its learning rate schedule."""

    name: Literal["adam", "adamw", "sgd", "lamb", "muon"] = "sgd"
    """The optimizer. adamw is the paper's Adam: weight decay is decoupled from the gradient and
    multiplied by the learning rate; adam adds the decay to the gradient. muon applies Muon to the
    matrices of the blocks and adamw to the rest."""
    lr: float = 0.01
    """Peak learning rate, at the batch size of the recipe."""
    weight_decay: float = 0.0
    """Weight decay, applied only to weight matrices and convolution kernels, not to biases, norms,
    tokens or position embeddings."""
    momentum: float = 0.9
    """Momentum of sgd and muon."""
    beta1: float = 0.9
    """First beta of adam, adamw, lamb and the adamw part of muon."""
    beta2: float = 0.999
    """Second beta of the same optimizers."""
    clip: float = 1.0
    """Clip the gradient to this global norm; 0 disables clipping."""
    warmup: int = 0
    """Number of updates over which the learning rate rises linearly from zero."""
    decay: Literal["cosine", "linear", "staircase", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    floor: float = 0.0
    """Final learning rate of a cosine or linear decay."""
    milestones: tuple[float, ...] = (0.3, 0.6, 0.9)
    """Fractions of the run at which a staircase decay divides the learning rate by ten."""
    layer_decay: float = 1.0
    """Layer-wise learning rate decay: factor from each layer to the layer below it; 1 disables
    it."""


@dataclass(frozen=True, kw_only=True)
class System:
    """Hardware, precision, checkpoints and logging; these settings are not meant to change what is
    learned."""

    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward and backward passes; auto is bfloat16 on GPUs that support it,
    otherwise float32."""
    kernels: Literal["auto", "fused", "plain"] = "auto"
    """In half precision on an NVIDIA data-center GPU (A100 or later): compute the encoder of a ViT
    and the norms of a ResNet with fused Triton kernels, or with PyTorch's kernels (plain); auto
    uses the fused kernels if they cover the model."""
    compile: Literal["auto"] | bool = "auto"
    """Compile the model with torch.compile, which takes about a minute; auto does so on a GPU if
    the planned run is long enough to gain more than that, except for ViTs with fused kernels."""
    graphs: Literal["auto"] | bool = "auto"
    """On a CUDA device: record the forward and backward pass as CUDA graphs and replay them, which
    avoids the overhead of launching kernels; auto does so in a single process without compilation,
    recomputation, a frozen backbone or a smaller system.microbatch."""
    recompute: bool = False
    """Recompute activations in the backward pass (gradient checkpointing): less memory, about a
    third more compute."""
    microbatch: int = 0
    """Images per process and forward pass; gradients are accumulated over the rest of the batch. 0
    starts with all images of the process and halves their number after each out-of-memory error; on
    a CPU, before training, until the activations fit into a third of the memory."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: replicate the model (ddp) or shard it (fsdp, FSDP2)."""
    workers: int = -1
    """Number of processes that load images; -1 uses all cores with a GPU and none on a CPU; 0 loads
    in the main process."""
    augment: Literal["auto", "cpu", "device"] = "auto"
    """Where images are augmented: one by one in the processes that load them (cpu), or in batches
    on the device; auto is device on a GPU. The two draw different random numbers."""
    cache: Literal["auto", "device", "memory", "disk", "none"] = "auto"
    """With augmentation on the device: where decoded training images are kept. auto uses the first
    of device memory, main memory and the cache folder on disk in which they fit; none decodes them
    in every epoch."""
    deterministic: bool = False
    """Use only deterministic kernels, which can be slower."""
    checkpoint_steps: int = 0
    """Number of updates between checkpoints; 0 uses checkpoint_minutes."""
    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; every evaluation also writes one. The last two are kept."""
    log_steps: int = 10
    """Number of updates between entries of the training loss in metrics.jsonl."""
    tracker: Literal["none", "tensorboard", "wandb", "trackio"] = "none"
    """Experiment tracker to which metrics are also logged."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    seed: int = 0
    """Seed for weights, augmentation, data order and subsets."""
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    augment: Augment = field(default_factory=Augment)
    train: Train = field(default_factory=Train)
    optim: Optim = field(default_factory=Optim)
    system: System = field(default_factory=System)
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings that `vitrail sweep` tries, each with a list of values."""

    def __post_init__(self) -> None:
        _check(self)


# Checks

_ABOVE_ZERO = ("train.batch", "train.masked_share", "optim.lr", "data.size", "system.log_steps")
_RATES = (
    *("model.dropout", "model.drop_path", "data.val", "data.test", "augment.area"),
    *("augment.erasing", "augment.mixed", "train.masked_share", "train.label_smoothing"),
    *("train.ema", "optim.momentum", "optim.beta1", "optim.beta2", "optim.layer_decay"),
)
_MAY_BE_NEGATIVE = ("model.head_bias", "data.crop", "system.workers")
_LENGTHS = ("train.steps", "train.epochs", "train.minutes")
"""Only one of these can be set: one in a recipe or on the command line unsets the others."""


def _check(config: Config) -> None:
    """Raise an error about the first setting that makes no sense."""
    for section in ("model", "data", "augment", "train", "optim", "system"):
        for name, value in vars(getattr(config, section)).items():
            if expected := _out_of_range(f"{section}.{name}", value):
                raise VitrailError(f"{section}.{name} = {toml_value(value)}: expected {expected}")
    for wrong, message in _contradictions(config):
        if wrong:
            raise VitrailError(message)


def _out_of_range(name: str, value: Any) -> str:
    """What was expected of a number that is out of range; empty if it is not."""
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, (bool, str)):
            continue
        if not abs(number) < float("inf"):
            return "a finite number"
        if name in _ABOVE_ZERO and number <= 0:
            return "a number above zero"
        if name in _RATES and not 0 <= number <= 1:
            return "a number from 0 to 1"
        if name not in _MAY_BE_NEGATIVE and number < 0:
            return "zero or more"
    return ""


def _contradictions(config: Config) -> list[tuple[bool, str]]:
    """Combinations of settings that are errors: whether each is present, and its message."""
    model, data, train = config.model, config.data, config.train
    fixed = [name for name in ("hidden", "layer_scale") if getattr(model, name)]
    held_out = data.val + data.test
    lengths = [name for name in _LENGTHS if getattr(train, name.removeprefix("train."))]
    return [
        (
            bool(model.init and fixed),
            f"model.{fixed[0] if fixed else ''} cannot be changed in trained weights; remove it "
            "or model.init",
        ),
        (held_out >= 1, f"data.val + data.test = {held_out:g} leaves nothing to train on"),
        (len(lengths) > 1, f"{' and '.join(lengths)} cannot both be set"),
        (
            train.freeze and not model.init,
            "train.freeze requires pre-trained weights; set model.init",
        ),
        (
            model.keep_head and not model.init,
            "model.keep_head requires weights with a head; set model.init",
        ),
        (
            train.objective == "masked" and bool(_label_settings(config)),
            f"train.objective=masked uses no labels; "
            f"remove {' and '.join(_label_settings(config))}",
        ),
        (
            data.crop not in (-1, 0) and not 0 < data.crop <= 1,
            f"data.crop = {data.crop:g}: expected a fraction in (0, 1], or 0, or -1",
        ),
        (
            train.label_smoothing == 1,
            "train.label_smoothing = 1 leaves no label to learn",
        ),
        (
            config.optim.name == "muon" and config.system.parallel == "fsdp",
            "optim.name=muon needs whole matrices; use system.parallel=ddp",
        ),
        (
            max(config.optim.beta1, config.optim.beta2) == 1,
            "optim.beta1 and optim.beta2 must be below 1",
        ),
        (not 0 <= config.seed < 2**63, f"seed = {config.seed}: expected zero or more"),
    ]


def without_effect(config: Config) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Reasons why settings have no effect: whether each holds, its message, and the settings.

    A name that ends in a dot stands for its section. Recipes and defaults may hold such settings,
    but a user who gives one expects an effect, hence `refuse_without_effect`.
    """
    model, data, augment, train = config.model, config.data, config.augment, config.train
    optim, system = config.optim, config.system
    best = ("train.keep",) if train.keep == "best" else ()
    at_evaluations = ("train.keep_all", "train.fewshot", "train.fewshot_data")
    mixes = augment.mixup or augment.cutmix or train.hyperrule
    return [
        (
            train.freeze,
            "train.freeze=true trains the head alone, on features without augmentation",
            (
                *("augment.", "model.dropout", "model.drop_path", "optim.layer_decay"),
                *("system.compile", "system.graphs", "system.recompute"),
                *("system.augment", "system.cache", "train.fewshot", "train.fewshot_data"),
            ),
        ),
        (system.augment == "cpu", "system.augment=cpu", ("system.cache",)),
        (model.keep_head, "model.keep_head=true keeps the old bias", ("model.head_bias",)),
        (train.objective == "masked", "train.objective=masked has no head", ("model.head_bias",)),
        (
            train.objective != "masked",
            f"train.objective={train.objective} masks nothing",
            ("train.masked", "train.masked_share"),
        ),
        (not train.ema, "train.ema=0", ("train.ema_ramp",)),
        (
            not train.evaluations,
            "train.evaluations=0 never evaluates",
            ("train.patience", *best, *at_evaluations),
        ),
        (not train.fewshot, "train.fewshot=0", ("train.fewshot_data",)),
        (
            data.train_on == "train+val",
            "data.train_on=train+val leaves no val split",
            ("data.val", "train.evaluations", "train.patience", *best, *at_evaluations),
        ),
        (augment.crop != "inception", f"augment.crop={augment.crop}", ("augment.area",)),
        (
            not augment.randaugment_layers,
            "augment.randaugment_layers=0",
            ("augment.randaugment_magnitude",),
        ),
        (not mixes, "augment.mixup=0 augment.cutmix=0", ("augment.mixed",)),
        (optim.name not in ("sgd", "muon"), f"optim.name={optim.name}", ("optim.momentum",)),
        (optim.name == "sgd", "optim.name=sgd", ("optim.beta1", "optim.beta2")),
        (optim.decay not in ("cosine", "linear"), f"optim.decay={optim.decay}", ("optim.floor",)),
        (optim.decay != "staircase", f"optim.decay={optim.decay}", ("optim.milestones",)),
        (
            system.checkpoint_steps > 0,
            f"system.checkpoint_steps={system.checkpoint_steps}",
            ("system.checkpoint_minutes",),
        ),
    ]


def refuse_without_effect(given: Mapping[str, Any], configs: Sequence[Config]) -> None:
    """Stop at a given setting that changes none of the runs.

    A setting that turns off what is off anyway is accepted: `augment.flip=false` with a frozen
    backbone.
    """
    for name, value in given.items():
        if (not value and name != "train.ema_ramp") or value in ("none", "uniform"):
            continue
        reasons = [
            [why for holds, why, names in without_effect(config) if holds and _matches(name, names)]
            for config in configs
        ]
        if all(reasons):
            raise VitrailError(f"{name} has no effect with {reasons[0][0]}; remove one of them")
    lengths = [name for name in _LENGTHS if given.get(name)]
    if len(lengths) > 1:
        raise VitrailError(f"{' and '.join(lengths)} cannot both be set; remove one of them")


def has_effect(config: Config, name: str) -> bool:
    """Whether a setting can change a run with this config."""
    return not any(holds and _matches(name, names) for holds, _, names in without_effect(config))


def _matches(name: str, names: Sequence[str]) -> bool:
    """Whether a setting is among the names, or in a section among them."""
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in names)


def _label_settings(config: Config) -> list[str]:
    """The settings in use that only make sense with labels."""
    train, augment = config.train, config.augment
    values = {
        "model.hidden": config.model.hidden,
        "model.keep_head": config.model.keep_head,
        "data.sampling": config.data.sampling != "uniform",
        "train.freeze": train.freeze,
        "train.label_smoothing": train.label_smoothing,
        "train.class_weights": train.class_weights != "none",
        "augment.mixup": augment.mixup,
        "augment.cutmix": augment.cutmix,
    }
    return [name for name, value in values.items() if value]


# Reading: recipes and settings on the command line

RECIPES = Path(str(files("vitrail"))) / "recipes"
_NO_FLIP: dict[str, Any] = {"augment.flip": False}
_NO_CROP: dict[str, Any] = {"augment.crop": "none"}
DATASET_SETTINGS: dict[str, dict[str, Any]] = {
    "vtab/clevr_count": _NO_CROP,
    "vtab/clevr_dist": _NO_CROP,
    "vtab/dmlab": _NO_CROP,
    "vtab/dsprites_loc": _NO_FLIP | _NO_CROP,
    "vtab/dsprites_ori": _NO_FLIP,
    "vtab/kitti_dist": _NO_CROP,
    "vtab/smallnorb_azim": _NO_FLIP,
}
"""Settings that a dataset implies: BiT (arXiv 1912.11370, section 3.3) neither mirrors nor crops
VTAB's images where that changes the label."""


def load_config(recipe: str | Path | None = None, settings: Sequence[str] = ()) -> Config:
    """The `Config` of a recipe (a name, a path, or None for the defaults) with settings applied."""
    given = [parse_setting(setting) for setting in settings]
    written = {} if recipe is None else read_recipe(find_recipe(recipe))
    values = with_dataset_settings(written, dict(given))
    for name, value in given:
        override_value(values, name, value)
    return build_config(values)


def override_value(values: dict[str, Any], name: str, value: Any) -> None:
    """Set one value, which also takes it out of a sweep."""
    set_value(values, name, value)
    values.pop(f"sweep.{name}", None)


def with_dataset_settings(recipe: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's settings with those that its dataset implies.

    The recipe overrides what its own dataset implies, but not what a given dataset implies.
    """
    if "data.source" in given:
        return {**recipe, **DATASET_SETTINGS.get(str(given["data.source"]), {})}
    return {**DATASET_SETTINGS.get(recipe.get("data.source", ""), {}), **recipe}


@cache
def recipe_names() -> tuple[str, ...]:
    """Names of the recipes inside the package."""
    paths = (path.relative_to(RECIPES) for path in RECIPES.rglob("*.toml"))
    return tuple(sorted(path.with_suffix("").as_posix() for path in paths))


def find_recipe(recipe: str | Path) -> Path:
    """The path of a recipe: a file, or the name of one inside the package."""
    if (path := Path(recipe)).is_file():
        return path
    name = str(recipe).removesuffix(".toml")
    if name in recipe_names():
        return RECIPES / f"{name}.toml"
    hint = did_you_mean(name, recipe_names()) or "; `vitrail config` lists them"
    raise VitrailError(f"no recipe named '{recipe}'{hint}")


def read_recipe(path: Path) -> dict[str, Any]:
    """The settings of a recipe as a flat dictionary, each value checked."""
    try:
        return dict(_recipe_values(path, path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise VitrailError(f"cannot read {path}: {one_line(error)}") from None


@cache
def _recipe_values(path: Path, text: str) -> dict[str, Any]:
    """A study reads the same recipe for each of its runs."""
    try:
        pairs = flatten(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise VitrailError(f"cannot read {path}: {one_line(error)}") from None
    except RecursionError:
        raise VitrailError(f"cannot read {path}: it is nested too deeply") from None
    values: dict[str, Any] = {}
    try:
        for name, value in pairs:
            set_value(values, name, value)
    except VitrailError as error:
        raise VitrailError(f"{path}: {error}") from None
    return values


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and values, in the order of the file."""
    pairs = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += flatten(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value))
    return pairs


def parse_setting(setting: str) -> tuple[str, Any]:
    """`section.key=value`; the value is a TOML value, and a bare word is a string."""
    name, equals, text = setting.partition("=")
    name, text = aliases.setting(name.strip()), text.strip()
    if not equals or not name:
        raise VitrailError(f"'{setting}' is not a setting; expected section.key=value")
    if _type_of(name) is str and not text.startswith(('"', "'", "[")):
        return name, text
    try:
        return name, tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return name, text


def set_value(values: dict[str, Any], name: str, value: Any) -> None:
    """Check one setting and add it to `values`."""
    name = aliases.setting(name)
    if name.startswith("sweep."):
        setting = name.removeprefix("sweep.")
        if not isinstance(value, list) or not value:
            raise VitrailError(f"{name} = {toml_value(value)}: expected a list of values to try")
        values[name] = tuple(check_value(setting, item) for item in value)
        return
    values[name] = check_value(name, value)
    if name in _LENGTHS and values[name]:
        for other in _LENGTHS:
            if other != name:
                values.pop(other, None)


def _type_of(name: str) -> Any:
    known = schema()
    if name.startswith("sweep."):
        return tuple
    if name not in known:
        raise VitrailError(f"unknown setting '{name}'{_suggestion(name, list(known))}")
    return known[name]


def _suggestion(name: str, known: Sequence[str]) -> str:
    """The nearest setting; the same key in another section counts as near."""
    last = name.rpartition(".")[2]
    same = [other for other in known if other.rpartition(".")[2] == last]
    if len(same) == 1:
        return f"; did you mean '{same[0]}'?"
    return did_you_mean(name, known) or "; `vitrail config RECIPE` lists them"


@cache
def schema() -> dict[str, Any]:
    """The dotted name and the type of every setting, in the order of `Config`."""
    types = get_type_hints(Config)
    settings: dict[str, Any] = {}
    for name, kind in types.items():
        if is_dataclass(kind):
            inner = get_type_hints(kind)
            settings |= {f"{name}.{field.name}": inner[field.name] for field in fields(kind)}
        elif name != "sweep":
            settings[name] = kind
    return settings


def check_value(name: str, value: Any) -> Any:
    """The value converted to the setting's type; an error says what was expected."""
    kind = _type_of(name)
    fitted = _coerce(kind, value)
    if fitted is None:
        hint = "; a list is for `vitrail sweep`" if isinstance(value, list) else ""
        raise VitrailError(f"{name} = {toml_value(value)}: expected {_expected(kind)}{hint}")
    return fitted


_UNIONS = (Union, UnionType)
"""`int | str` is one or the other, depending on its parts."""


def _coerce(kind: Any, value: Any) -> Any:
    """The value as that type, or None; a whole number may stand for a float, and 1e3 for 1000."""
    if get_origin(kind) in _UNIONS:
        return next(
            (fitted for k in get_args(kind) if (fitted := _coerce(k, value)) is not None), None
        )
    if get_origin(kind) is Literal:
        value = aliases.VALUES.get(value, value) if isinstance(value, str) else None
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        return _coerce_tuple(get_args(kind), value)
    if kind in (bool, str):
        return value if isinstance(value, kind) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if kind is float:
        return float(value)
    return int(value) if value == value // 1 else None


def _coerce_tuple(kinds: tuple[Any, ...], value: Any) -> Any:
    """A list as a tuple of the right length and types, or None."""
    if not isinstance(value, (list, tuple)):
        return None
    if kinds[-1] is not ... and len(value) != len(kinds):
        return None
    items = tuple(_coerce(kinds[0], item) for item in value)
    return None if None in items else items


def _expected(kind: Any) -> str:
    if get_origin(kind) in _UNIONS:
        return " or ".join(_expected(k) for k in get_args(kind))
    if get_origin(kind) is Literal:
        words = [word or '""' for word in get_args(kind)]
        return words[0] if len(words) == 1 else "one of " + ", ".join(words)
    if get_origin(kind) is tuple:
        return "[rows, columns]" if get_args(kind)[-1] is int else "a list of numbers"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names[kind]


def build_config(values: Mapping[str, Any]) -> Config:
    """The `Config` of checked settings with dotted names."""
    sections: dict[str, Any] = {"sweep": {}}
    for name, value in values.items():
        section, dot, key = name.partition(".")
        if dot:
            sections.setdefault(section, {})[key] = value
        else:
            sections[section] = value
    for name, kind in _sections().items():
        if name in sections:
            sections[name] = kind(**sections[name])
    return Config(**sections)


@cache
def _sections() -> dict[str, Any]:
    """The name and the type of every section."""
    return {name: kind for name, kind in get_type_hints(Config).items() if is_dataclass(kind)}


def with_settings(config: Config, changes: Mapping[str, Any]) -> Config:
    """One run with other values, `{"optim.lr": 0.1}`, and without the grid of a sweep."""
    values = {k: v for k, v in to_flat(config).items() if not k.startswith("sweep.")}
    for name, value in changes.items():
        set_value(values, name, list(value) if isinstance(value, tuple) else value)
    return build_config(values)


def grid_points(sweep: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of the values of a sweep."""
    return [dict(zip(sweep, values, strict=True)) for values in product(*sweep.values())]


# Writing


def to_flat(config: Config) -> dict[str, Any]:
    """The dotted name and the value of every setting, with those of the sweep."""
    values: dict[str, Any] = {}
    for name in schema():
        section, dot, key = name.partition(".")
        values[name] = getattr(getattr(config, section), key) if dot else getattr(config, section)
    return values | {f"sweep.{name}": tried for name, tried in config.sweep.items()}


def changed_settings(config: Config, base: Config | None = None) -> list[str]:
    """The settings that differ from the defaults, or from `base`, as `section.key=value`."""
    before = to_flat(base or Config())
    return [
        f"{name}={value if _is_bare(value) else toml_value(value)}"
        for name, value in to_flat(config).items()
        if before.get(name) != value
    ]


def _is_bare(value: Any) -> bool:
    """Whether a value is text that needs no quotes on a command line."""
    if not isinstance(value, str) or not value.isprintable():
        return False
    return value == value.strip() and not value.startswith(('"', "'", "["))


def to_toml(config: Config) -> str:
    """A recipe of every setting, each with its explanation as a comment."""
    lines: list[str] = []
    section = ""
    for name, value in to_flat(config).items():
        here, dot, key = name.partition(".")
        if dot and here != section:
            lines += ["", f"[{here}]"]
            section = here
        explained = " ".join(filter(None, (_choices(name), explanations().get(name, ""))))
        comment = f"  # {explained}" if explained else ""
        # Names under [sweep] are dotted settings, and would make tables of their own.
        shown_key = f'"{key}"' if here == "sweep" else key if dot else here
        lines.append(f"{shown_key} = {toml_value(value)}{comment}")
    return "\n".join(lines) + "\n"


def _choices(name: str) -> str:
    kind = schema().get(name)
    return f"{' | '.join(map(toml_value, get_args(kind)))}." if get_origin(kind) is Literal else ""


@cache
def explanations() -> dict[str, str]:
    """The docstring below each setting, in one line."""
    texts = _docstrings(Config)
    for name, kind in _sections().items():
        texts |= {f"{name}.{key}": text for key, text in _docstrings(kind).items()}
    return texts


def _docstrings(kind: type) -> dict[str, str]:
    """Attribute → the string literal that follows it, which Python itself does not keep."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for line, after in zip(body.body, body.body[1:], strict=False):
        match line, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=text)):
                texts[name] = " ".join(str(text).split())
    return texts


def toml_value(value: Any) -> str:
    """A value in TOML; `vitrail config` and every error use this."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)
