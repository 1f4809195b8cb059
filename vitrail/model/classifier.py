"""The small interface that every model of the family answers to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.errors import VitrailError, did_you_mean

Activation = Literal["softmax", "sigmoid"]
"""How logits become probabilities: of one class out of all, or of each class by itself."""


class Classifier(nn.Module):
    """An image classifier: `model(images)` gives logits, the other methods what lies before them.

    Axes, in every shape of the project: b batch · n tokens · d width · h heads · k width of one
    head · c colour · y x rows, columns · p patch side.
    """

    architecture: Any
    """The frozen description this model was built from; `build` makes the same model again."""
    feature_width: int
    """Length of the vector that a fine-tuning head reads."""
    head: nn.Module | None
    origin: str = ""
    """The format that the weights were read from; empty for a new model."""
    file: Path | None = None
    """The file or folder that the weights were read from."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where they are known."""
    preprocess: Callable[[Any], Float[Tensor, "c y x"]] | None = None
    """From a picture to the tensor this model was trained on; `vitrail.load` sets it."""
    activation: Activation = "softmax"
    """What it was trained with."""
    learnt_from: Mapping[str, Any] = MappingProxyType({})
    """The data it was trained on here, and how much of it was held out; empty where unknown."""
    activation_checkpointing: bool = False
    """Recompute blocks in the backward pass instead of keeping their activations."""

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b classes"]:
        features = self.features(images)
        return features if self.head is None else self.head(features)

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b d"]:
        """What the head reads: one vector per image."""
        return self.summary(self.tokens(images))

    def tokens(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b n d"]:
        """The final sequence; a convolutional network's last map counts as one, row by row."""
        raise NotImplementedError

    def summary(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b e"]:
        """The vector that the head reads, made of the final sequence."""
        return tokens.mean(1)

    def attention_layers(self) -> list[nn.Module]:
        """Modules whose `weights(x)` says who looks at whom, from input to output.

        `weights(x, rows)` builds some of the rows alone.
        """
        return []

    def run(self, stage: nn.Module, x: Tensor) -> Tensor:
        """Through a block, or a stage of blocks, their activations kept or recomputed."""
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return stage(x)
        for block in stage if isinstance(stage, nn.Sequential) else [stage]:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def intermediates(
        self, images: Float[Tensor, "b c y x"], names: Sequence[str]
    ) -> dict[str, Tensor]:
        """The outputs of the named submodules (`embedding`, `blocks.3`, `blocks.3.mlp`, …)."""
        modules = dict(self.named_modules())
        for name in names:
            if name not in modules:
                raise VitrailError(f"no module named '{name}'{did_you_mean(name, modules)}")
        found: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[..., None]:
            return lambda _module, _inputs, output: found.__setitem__(name, output)

        hooks = [modules[name].register_forward_hook(keep(name)) for name in names]
        try:
            self(images)
        finally:
            for hook in hooks:
                hook.remove()
        for name in names:
            if name not in found:
                raise VitrailError(f"'{name}' has no output of its own; name one of its parts")
        return {name: found[name] for name in names}

    def attention(
        self, images: Float[Tensor, "b c y x"], layers: Iterable[int] | None = None
    ) -> dict[int, Float[Tensor, "b h n n"]]:
        """Attention weights of the chosen layers (all of them by default; -1 is the last).

        `forward` never builds these matrices: each is computed from its layer's recorded input,
        so the fused kernels stay on and only what is asked for takes memory.
        """
        modules = self.attention_layers()
        if not modules:
            raise VitrailError(f"{type(self).__name__} has no attention layers")
        chosen = range(len(modules)) if layers is None else layers
        found: dict[int, Tensor] = {}

        def keep(layer: int) -> Callable[..., None]:
            return lambda module, inputs: found.__setitem__(layer, module.weights(*inputs))

        hooks = []
        try:
            for layer in chosen:
                if not -len(modules) <= layer < len(modules):
                    raise VitrailError(f"no attention layer {layer}: there are {len(modules)}")
                hooks.append(modules[layer].register_forward_pre_hook(keep(layer)))
            self.features(images)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def replace_head(self, classes: int, bias: float = 0.0) -> None:
        """A zero-initialised linear head in place of the old one, as the paper fine-tunes."""
        self.architecture = replace(self.architecture, classes=classes, head_bias=bias)
        head = zero_head(self.feature_width, classes, bias)
        self.head = None if head is None else head.to(next(self.parameters()))
        self.labels, self.learnt_from, self.activation = (), {}, "softmax"

    def probabilities(self, logits: Float[Tensor, "*b classes"]) -> Float[Tensor, "*b classes"]:
        """Of the classes; those of a sigmoid do not add up to one."""
        return logits.softmax(-1) if self.activation == "softmax" else logits.sigmoid()

    @torch.inference_mode()
    def predict(self, image: Any, top: int = 5) -> list[tuple[str, float]]:
        """The most likely classes of one picture with their probabilities, best first."""
        if self.preprocess is None:
            raise VitrailError("this model has no preprocessing; load it with vitrail.load(...)")
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
