"""Every setting of a run, with its default and its help text.

A run is described by one `Config`. A recipe is a TOML file that holds only what differs from the
defaults. A setting on the command line is one more line of that recipe (`optim.lr=3e-4`). The
result is written to `config.toml` in the run folder, and that file is itself a recipe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vitrail.errors import VitrailError


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
    """The data set and its splits."""

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
    """AutoAugment with the policy learned on this data set; empty disables it."""
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
    """Stop after this many evaluations without a better val top-1; 0 disables early stopping."""
    keep: Literal["best", "last"] = "best"
    """Which weights to save as the model: those with the best val accuracy (balanced accuracy with
    class weights; ties are broken by val loss), or the last."""
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
    """Weight decay, applied to kernels only: not to biases, norms, tokens or positions."""
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
    """Hardware, precision, checkpoints and logging; none of it is meant to change what is
    learned."""

    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the forward and backward passes; auto is bfloat16 on GPUs that support it,
    otherwise float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    graphs: bool = False
    """With system.compile on a CUDA device: record the model as CUDA graphs and replay them, which
    avoids kernel launch overhead for small models."""
    recompute: bool = False
    """Recompute activations in the backward pass (gradient checkpointing): less memory, about a
    third more compute."""
    microbatch: int = 0
    """Images per process and forward pass; gradients are accumulated over the rest of the batch. 0
    starts with the whole share and halves it after each out-of-memory error."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Under torchrun: replicate the model (ddp) or shard it (fsdp, FSDP2)."""
    workers: int = -1
    """Number of processes that load images; -1 uses all cores with a GPU and none on a CPU; 0 loads
    in the main process."""
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
        check(self)


ABOVE_ZERO = ("train.batch", "train.masked_share", "optim.lr", "data.size", "system.log_steps")
RATES = (
    *("model.dropout", "model.drop_path", "data.val", "data.test", "augment.area"),
    *(
        "augment.erasing",
        "augment.mixed",
        "train.masked_share",
        "train.label_smoothing",
        "train.ema",
        "optim.momentum",
    ),
    *("optim.beta1", "optim.beta2", "optim.layer_decay"),
)
MAY_BE_NEGATIVE = ("model.head_bias", "data.crop", "system.workers")


def check(config: Config) -> None:
    """Nothing, or the first setting that cannot be meant, and what was expected."""
    for section in ("model", "data", "augment", "train", "optim", "system"):
        for name, value in vars(getattr(config, section)).items():
            if promise := promised(f"{section}.{name}", value):
                raise VitrailError(f"{section}.{name} = {shown(value)}: expected {promise}")
    for wrong, message in contradictions(config):
        if wrong:
            raise VitrailError(message)


def promised(name: str, value: Any) -> str:
    """What a number should have been; empty where it is that."""
    numbers = value if isinstance(value, tuple) else (value,)
    for number in numbers:
        if isinstance(number, (bool, str)):
            continue
        if not abs(number) < float("inf"):
            return "a finite number"
        if name in ABOVE_ZERO and number <= 0:
            return "a number above zero"
        if name in RATES and not 0 <= number <= 1:
            return "a number from 0 to 1"
        if name not in MAY_BE_NEGATIVE and number < 0:
            return "zero or more"
    return ""


def contradictions(config: Config) -> list[tuple[bool, str]]:
    """Settings that do not go together, and what to say about them."""
    model, data, train = config.model, config.data, config.train
    fixed = [name for name in ("hidden", "layer_scale") if getattr(model, name)]
    held_out = data.val + data.test
    lengths = [name for name in ("steps", "epochs", "minutes") if getattr(train, name)]
    return [
        (
            bool(model.init and fixed),
            f"model.{fixed[0] if fixed else ''} cannot be changed in trained weights; leave it out "
            "or leave model.init out",
        ),
        (held_out >= 1, f"data.val + data.test = {held_out:g} leaves nothing to learn from"),
        (len(lengths) > 1, f"train.{' and train.'.join(lengths)} cannot both be set"),
        (
            train.freeze and not model.init,
            "train.freeze needs weights to keep; name them with model.init",
        ),
        (
            model.keep_head and not model.init,
            "model.keep_head needs weights with a head; name them with model.init",
        ),
        (
            train.objective == "masked" and bool(label_settings(config)),
            f"train.objective=masked has no labels; leave {' and '.join(label_settings(config))} "
            "out",
        ),
        (
            data.crop not in (-1, 0) and not 0 < data.crop <= 1,
            f"data.crop = {data.crop:g}: expected a share up to 1, 0 or -1",
        ),
        (
            not 0 < train.label_smoothing + 1 < 2,
            "train.label_smoothing = 1 leaves no label to learn",
        ),
        (
            config.optim.name == "muon" and config.system.parallel == "fsdp",
            "optim.name=muon needs whole matrices; use system.parallel=ddp",
        ),
        (max(config.optim.beta1, config.optim.beta2) == 1, "optim.beta1 and beta2 are below 1"),
        (not 0 <= config.seed < 2**63, f"seed = {config.seed}: expected zero or more"),
    ]


def without_effect(config: Config) -> list[tuple[bool, str, tuple[str, ...]]]:
    """Settings that change nothing in a run, and the reason: whether it holds, and its words.

    A name that ends in a dot stands for its section. Recipes and defaults may hold such settings;
    who gives one explicitly expects an effect, hence `refuse_without_effect`.
    """
    model, data, augment, train = config.model, config.data, config.augment, config.train
    optim, system = config.optim, config.system
    best = ("train.keep",) if train.keep == "best" else ()
    mixes = augment.mixup or augment.cutmix or train.hyperrule
    return [
        (
            train.freeze,
            "train.freeze=true trains the head alone, on features without augmentation",
            (
                *("augment.", "model.dropout", "model.drop_path", "optim.layer_decay"),
                *("system.compile", "system.graphs", "system.recompute"),
            ),
        ),
        (model.keep_head, "model.keep_head=true keeps the old bias", ("model.head_bias",)),
        (train.objective == "masked", "train.objective=masked has no head", ("model.head_bias",)),
        (
            train.objective != "masked",
            f"train.objective={train.objective} masks nothing",
            ("train.masked", "train.masked_share"),
        ),
        (not train.ema, "train.ema=0", ("train.ema_ramp",)),
        (not train.evaluations, "train.evaluations=0 never evaluates", ("train.patience", *best)),
        (
            data.train_on == "train+val",
            "data.train_on=train+val leaves no val part",
            ("data.val", "train.evaluations", "train.patience", *best),
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
        (not system.compile, "system.compile=false", ("system.graphs",)),
        (
            system.checkpoint_steps > 0,
            f"system.checkpoint_steps={system.checkpoint_steps}",
            ("system.checkpoint_minutes",),
        ),
    ]


def refuse_without_effect(given: Mapping[str, Any], configs: Sequence[Config]) -> None:
    """Stops at a given setting that changes none of the runs.

    One that switches off what does not take place anyway is obeyed: `augment.flip=false` with a
    frozen backbone.
    """
    for name, value in given.items():
        if (not value and name != "train.ema_ramp") or value in ("none", "uniform"):
            continue
        reasons = [
            [why for holds, why, names in without_effect(config) if holds and named(name, names)]
            for config in configs
        ]
        if all(reasons):
            raise VitrailError(f"{name} has no effect with {reasons[0][0]}; leave one of them out")
    lengths = [name for name in ("train.steps", "train.epochs", "train.minutes") if given.get(name)]
    if len(lengths) > 1:
        raise VitrailError(f"{' and '.join(lengths)} cannot both be set; leave one of them out")


def named(name: str, names: Sequence[str]) -> bool:
    """Whether a setting is one of some, or in one of some sections."""
    return any(name == one or (one.endswith(".") and name.startswith(one)) for one in names)


def label_settings(config: Config) -> list[str]:
    """Settings that only make sense with labels, of those that are set."""
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


def shown(value: Any) -> str:
    """A value as TOML writes it; `vitrail config` and every error use this."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value)
