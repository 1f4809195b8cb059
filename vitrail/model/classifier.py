"""What all models share: the interface, the head, and the validation of an architecture."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import fields, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import VitrailError, did_you_mean

Activation = Literal["softmax", "sigmoid"]
"""How logits become probabilities: of one class out of all, or of each class by itself."""
NO_PREPROCESSING = "this model has no preprocessing; load it with vitrail.load(...)"


class Classifier(nn.Module):
    """An image classifier: `model(images)` returns logits, other methods what comes before them.

    Axes, in every shape of the project: b batch · n tokens · d width · h heads · k width of one
    head · c color · y x rows, columns · p patch side.
    """

    architecture: Any
    """The description this model was built from; `build` makes the same model again."""
    feature_width: int
    """Length of the vector that a fine-tuned head reads."""
    head: nn.Module | None
    origin: str = ""
    """The format that the weights were read from; empty for a new model."""
    file: Path | None = None
    """The file or folder that the weights were read from."""
    labels: tuple[str, ...] = ()
    """Names of the classes, if known."""
    preprocess: Callable[[Any], Float[Tensor, "c y x"]] | None = None
    """From an image to an input tensor; `vitrail.load` sets it."""
    activation: Activation = "softmax"
    """The activation it was trained with."""
    training_data: Mapping[str, Any] = MappingProxyType({})
    """The data it was trained on, and how much of it was held out; empty if unknown."""
    training_cost: Mapping[str, float] | None = None
    """`exaflops` and `device_days` of its training, all pre-training included; None if unknown."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass instead of keeping their activations."""
    fused: bool = False
    """Use the kernels of `vitrail.model.kernels`; those of ViTs do not call the blocks one by
    one."""

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d"]:
        """What the head reads: one vector per image."""
        return self.pool_tokens(self.tokens(images))

    def tokens(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n d"]:
        """The final sequence; a convolutional network's last map counts as one, row by row."""
        raise NotImplementedError

    def pool_tokens(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b e"]:
        """The vector that the head reads, from the final sequence."""
        return tokens.mean(1)

    def attention_layers(self) -> list[nn.Module]:
        """Modules whose `weights(x)` are the attention weights, from input to output.

        `weights(x, rows)` builds only some of the rows.
        """
        return []

    def run(self, stage: nn.Module, x: Tensor) -> Tensor:
        """Apply a block, or a stage of blocks, with or without activation checkpointing."""
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return stage(x)
        for block in stage if isinstance(stage, nn.Sequential) else [stage]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def fuse(self, device: torch.device, precision: torch.dtype) -> bool:
        """Use fused kernels, if there are any for this model on that device and in that precision;
        returns whether it does."""
        return False

    def unfused(self) -> "Classifier":
        """The same weights and modules, each of which is called: hooks need that."""
        model = copy(self)
        model.fused = False
        return model

    def intermediates(
        self, images: Float[Tensor, "b c y x"], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """The outputs of the named submodules (`embedding`, `blocks.3`, `blocks.3.mlp`, …)."""
        modules = dict(self.named_modules())
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda _module, _inputs, output: outputs.__setitem__(name, output)

        with ExitStack() as hooks:
            for name in names:
                if name not in modules:
                    raise VitrailError(f"no module named '{name}'{did_you_mean(name, modules)}")
                hooks.enter_context(modules[name].register_forward_hook(keep(name)))
            self.unfused()(images)
        for name in names:
            if name not in outputs:
                raise VitrailError(f"'{name}' has no output of its own; name one of its parts")
        return {name: outputs[name] for name in names}

    def attention(
        self, images: Float[Tensor, "b c y x"], layers: Iterable[int] | None = None
    ) -> dict[int, Float[Tensor, "b h n n"]]:
        """Attention weights of the chosen layers (all of them by default; -1 is the last).

        `forward` never builds these matrices: each is computed from its layer's recorded input,
        so the fused kernels stay on and only what is requested takes memory.
        """
        modules = self.attention_layers()
        if not modules:
            raise VitrailError(f"{type(self).__name__} has no attention layers")
        chosen = range(len(modules)) if layers is None else layers
        weights: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[..., None]:
            return lambda module, inputs: weights.__setitem__(layer, module.weights(*inputs))

        with ExitStack() as hooks:
            for layer in chosen:
                if not -len(modules) <= layer < len(modules):
                    raise VitrailError(f"no attention layer {layer}: there are {len(modules)}")
                hooks.enter_context(modules[layer].register_forward_pre_hook(keep(layer)))
            self.unfused().features(images)
        return weights

    def replace_head(self, classes: int, bias: float = 0.0) -> None:
        """A zero-initialized linear head in place of the old one, as the paper fine-tunes."""
        self.architecture = replace(self.architecture, classes=classes, head_bias=bias)
        head = zero_head(self.feature_width, classes, bias)
        self.head = None if head is None else head.to(next(self.parameters()))
        self.labels, self.training_data, self.activation = (), {}, "softmax"

    def probabilities(self, logits: Float[Tensor, "*b classes"]) -> Float[Tensor, "*b classes"]:
        """Probabilities of the classes; those of a sigmoid do not add up to one."""
        return logits.softmax(-1) if self.activation == "softmax" else logits.sigmoid()

    @torch.inference_mode()
    def predict(self, image: Any, top: int = 5) -> list[tuple[str, float]]:
        """The most likely classes of one image with their probabilities, best first."""
        if self.preprocess is None:
            raise VitrailError(NO_PREPROCESSING)
        if self.head is None:
            raise VitrailError("this model has no classes; load it with classes=… and train a head")
        if not isinstance(top, int) or top < 1:
            raise VitrailError(f"top = {top!r}: expected a whole number from 1 up")
        training = self.training
        pixels = self.preprocess(image)[None].to(next(self.parameters()))
        probabilities = self.probabilities(self.eval()(pixels).float())[0]
        self.train(training)
        best = probabilities.topk(min(top, len(probabilities)))
        names = self.labels or tuple(f"class {i}" for i in range(len(probabilities)))
        return [(names[i], p) for p, i in zip(*(t.tolist() for t in best), strict=True)]


def log_probabilities(
    logits: Float[Tensor, "b classes"], activation: Activation
) -> Float[Tensor, "b classes"]:
    """The logarithms of the probabilities."""
    return logits.log_softmax(-1) if activation == "softmax" else F.logsigmoid(logits)


def losses(
    logits: Float[Tensor, "b classes"], targets: Int[Tensor, " b"], activation: Activation
) -> Float[Tensor, " b"]:
    """The cross-entropy of each image, that of a sigmoid summed over the classes."""
    truth = targets[:, None]
    if activation == "softmax":
        return -logits.log_softmax(-1).gather(1, truth)[:, 0]
    return F.softplus(logits).sum(-1) - logits.gather(1, truth)[:, 0]


_HALF = (torch.bfloat16, torch.float16)


def runs_kernels(device: torch.device, precision: torch.dtype) -> bool:
    """Whether `vitrail.model.kernels` runs there."""
    if device.type != "cuda" or precision not in _HALF or find_spec("triton") is None:
        return False
    from vitrail.model.kernels import CAPABILITIES

    return torch.cuda.get_device_capability(device) in CAPABILITIES


def takes_kernels(x: Tensor) -> bool:
    """A model that was fused may have moved, or its input may be of another precision."""
    autocast = torch.is_autocast_enabled("cuda")
    kind = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    return x.is_cuda and kind in _HALF


def zero_head(features: int, classes: int, bias: float = 0.0) -> nn.Linear | None:
    """The paper's fine-tuning head: logits are exactly `bias` before the first step.

    A bias of −10 (ImageNet-21k, JFT) or −6.9 (ImageNet-1k) starts a sigmoid loss at low
    probabilities.
    """
    if not classes:
        return None
    head = nn.Linear(features, classes)
    nn.init.zeros_(head.weight)
    nn.init.constant_(head.bias, bias)
    return head


# A unit normal cut at ±2σ has this standard deviation: JAX divides by it, so that the draw has the
# requested variance. torch's trunc_normal_ does not, and cuts at absolute values ±2.
_TRUNCATED_STD = 0.87962566103423978


def lecun_normal(weight: Tensor) -> None:
    """Truncated normal of variance 1 / fan-in: flax's default for dense layers and convolutions."""
    std = (1 / weight[0].numel()) ** 0.5 / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


_MAY_BE_ZERO = {"classes", "registers", "hidden", "head_width"}
_RATES = {"dropout", "embedding_dropout", "drop_path"}
# Far above every existing model: a file's header may hold any number, and a model is built from it.
_MAX = {"depth": 1000, "units": 1000, "classes": 10_000_000}
_MAX_COUNT = 1_000_000
_MAX_SIDE = 16_384
_MAX_STAGES = 16


def check_fields(architecture: Any) -> None:
    """Raise an error that names the first field whose value does not fit its type and name."""
    for name, hint in _hints(type(architecture)).items():
        value = getattr(architecture, name)
        if value is None and type(None) in get_args(hint):
            continue
        if expected := _mismatch(name, hint, value):
            raise VitrailError(f"{name} = {value!r}: expected {expected}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    types = get_type_hints(kind)
    return {field.name: types[field.name] for field in fields(kind)}


def _mismatch(name: str, hint: Any, value: Any) -> str:
    """What was expected of a value; empty where it fits."""
    if get_origin(hint) is Literal:
        return "" if value in get_args(hint) else f"one of {', '.join(map(str, get_args(hint)))}"
    if hint is int:
        least, most = 0 if name in _MAY_BE_ZERO else 1, _MAX.get(name, _MAX_COUNT)
        fits = is_count(value) and least <= value <= most
        return "" if fits else f"a whole number from {least} to {most}"
    if name in ("size", "patch"):
        sides = (value, value) if name == "patch" and is_count(value) else value
        fits = _are_counts(sides) and len(sides) == 2 and max(sides) <= _MAX_SIDE
        return "" if fits else f"pixels, as 224 or (224, 320), up to {_MAX_SIDE}"
    if name in ("units", "backbone"):
        few = _are_counts(value) and len(value) <= _MAX_STAGES
        few = few and max(value, default=0) <= _MAX["units"]
        return "" if few and (value or name == "backbone") else "the units of each stage"
    return _number_mismatch(name, hint, value)


def _number_mismatch(name: str, hint: Any, value: Any) -> str:
    if hint is bool:
        return "" if isinstance(value, bool) else "True or False"
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        return "a number"
    if name in _RATES:
        return "" if 0 <= value <= 1 else "a rate between 0 and 1"
    if name in ("eps", "width", "backbone_width"):
        return "" if 0 < value <= _MAX_COUNT else "a number above zero"
    return ""


def is_count(value: Any) -> bool:
    """Whether a value is a whole number; Python's True is an int, too."""
    return isinstance(value, int) and not isinstance(value, bool)


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(is_count(value) and value > 0 for value in values)


def as_size(size: Any) -> tuple[int, int]:
    """Rows and columns, from a side in pixels or from both."""
    sides = (size, size) if is_count(size) else tuple(size) if isinstance(size, list) else size
    if expected := _mismatch("size", tuple[int, int], sides):
        raise VitrailError(f"size = {size!r}: expected {expected}")
    return sides


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout; afterwards each module is in the mode it was in.

    Use it with `no_grad` and not with `inference_mode` where training goes on afterwards: what a
    sharded model allocates in the latter cannot be trained.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
