"""`--fast`: the fastest form of a model on this machine that decides as the model itself does.

Every form of the table below that the machine offers is built, compared with the model and timed on
a few images. A form that changes more than one decision in a hundred is not used.
"""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitrail.console import say
from vitrail.devices import graph_inference
from vitrail.evaluation.predictor import Predictor
from vitrail.model import Classifier
from vitrail.model.vit import MLP, Attention, ViT

MAX_IMAGES = 256
"""Images to compare decisions on, at most."""
_MIN_KEPT = 0.99
"""The least share of decisions that a form must keep."""
_MIN_GAIN = 1.05
"""The least speed relative to the model itself that is worth different rounding."""
_ROUNDS = 3
_MOST_RECORDED = 32
"""The largest batch with a graph, in images; each graph keeps the memory of its batch."""


@dataclass(frozen=True)
class Form:
    """A way to compute the same model."""

    name: str
    available: Callable[[Any], bool]
    """Whether the form exists for a model on its device."""
    build: Callable[[Classifier], Classifier]
    """Builds the form from a copy of the model."""
    compiled: bool = False
    """Whether it takes a minute to be ready, and again for another batch size."""


def choose_form(
    predictor: Predictor, pixels: Float[Tensor, "b c y x"], batch: int, what: str, *, compiled: bool
) -> Predictor:
    """The predictor of the fastest form that keeps the decisions, or the one given; a line says so.

    `what` describes the images in `pixels`; they are computed `batch` at a time.
    """
    parts = pixels.split(batch)
    forms = [
        form
        for form in FORMS
        if form.available(predictor.model) and (compiled or not form.compiled)
    ]
    candidates = [predictor] + [_build(predictor, form) for form in forms]
    decisions = [_decide(one, parts) for one in candidates]
    seconds = _time(candidates, parts[: max(1, 32 // batch)])
    usual = str(predictor.precision or predictor.dtype).removeprefix("torch.")
    best, line = predictor, f"{usual}: no other form on this machine is faster and as accurate"
    gain = _MIN_GAIN
    for form, one, decided, took in zip(
        forms, candidates[1:], decisions[1:], seconds[1:], strict=True
    ):
        kept = (decided == decisions[0]).double().mean().item()
        if kept >= _MIN_KEPT and seconds[0] / took > gain:
            best, gain = one, seconds[0] / took
            line = f"{form.name}: {gain:.1f} times {usual}; {kept:.1%} of decisions kept"
    say(f"fast     {line} ({len(pixels)} {what})")
    return best


def _build(predictor: Predictor, form: Form) -> Predictor:
    model: Any = copy.deepcopy(predictor.model).eval().requires_grad_(False)
    model = form.build(model)
    return Predictor(model, transform=predictor.transform)


@torch.inference_mode()
def _decide(predictor: Predictor, parts: Sequence[Tensor]) -> Tensor:
    """The most likely class of each image; without classes, the largest feature."""
    compute = predictor.logits if predictor.labels else predictor.features
    return torch.cat([compute(part).argmax(-1).cpu() for part in parts])


def _time(candidates: Sequence[Predictor], parts: Sequence[Tensor]) -> list[float]:
    """The median seconds of each candidate, one after the other in each round."""
    took: list[list[float]] = [[] for _ in candidates]
    for _ in range(_ROUNDS):
        for one, times in zip(candidates, took, strict=True):
            start = time.perf_counter()
            _decide(one, parts)
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in took]


class _PackedLinear(nn.Module):
    """A dense layer with its weights in oneDNN's own layout, optionally with the GELU that follows.

    torch multiplies float32 matrices by MKL, which leaves half the width of an AMD processor
    unused; and neither library repacks weights for a single product.
    """

    def __init__(self, layer: nn.Linear, gelu: nn.GELU | None = None) -> None:
        super().__init__()
        self.bias = layer.bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())
        self.then = ("none", "") if gelu is None else ("gelu", gelu.approximate)

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b e"]:
        then, algorithm = self.then
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, then, [], algorithm)


def _packed(model: Classifier) -> Classifier:
    """The same model by oneDNN."""
    half = next(model.parameters()).dtype == torch.bfloat16
    for module in list(model.modules()):
        if isinstance(module, MLP):
            module.add_module("fc1", _PackedLinear(module.fc1, module.activation))
            module.add_module("activation", nn.Identity())
        if isinstance(module, Attention) and half:
            module.kernel = _attend
        for name, layer in module.named_children():
            if isinstance(layer, nn.Linear):
                setattr(module, name, _PackedLinear(layer))
    return model


def _attend(
    q: Float[Tensor, "b h n k"],
    k: Float[Tensor, "b h n k"],
    v: Float[Tensor, "b h n k"],
    attn_mask: Tensor | None = None,
) -> Float[Tensor, "b h n k"]:
    """Attention as two products: in bfloat16 on a CPU, torch's fused kernel takes twice as long."""
    weights = (q * q.shape[-1] ** -0.5) @ k.mT
    return (weights if attn_mask is None else weights + attn_mask).softmax(-1) @ v


def _compiled(model: Classifier) -> Classifier:
    model.features = torch.compile(model.features)
    return model


def _half(model: Classifier) -> Classifier:
    model.bfloat16().fuse(_device(model), torch.bfloat16)
    return model


def _float8(model: Any) -> Classifier:
    from vitrail.model.kernels.encoder import quantize

    quantize(_half(model).blocks)  # type: ignore[arg-type]
    return model


def _recorded(model: Any) -> Classifier:
    """With few images, launching the kernels takes longer than running them."""
    model.features = graph_inference(model.features, _MOST_RECORDED)
    return model


def _on_cpu(model: Classifier) -> bool:
    return _device(model).type == "cpu" and torch.backends.mkldnn.is_available()


def _on_cpu_with_bfloat16(model: Classifier) -> bool:
    return _on_cpu(model) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _on_gpu(model: Classifier) -> bool:
    on_gpu = _device(model).type == "cuda"
    return on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)


def _on_gpu_with_float8(model: Classifier) -> bool:
    device = _device(model)
    capable = _on_gpu(model) and torch.cuda.get_device_capability(device) >= (9, 0)
    if not (isinstance(model, ViT) and capable and model.unfused().fuse(device, torch.bfloat16)):
        return False
    # What the product of 8-bit matrices takes.
    a = model.architecture
    return all(width % 16 == 0 for width in (a.width, a.inner, a.mlp))


def _device(model: Classifier) -> torch.device:
    return next(model.parameters()).device


FORMS = (
    Form("float32, packed", _on_cpu, lambda model: _packed(model.float())),
    Form("bfloat16, packed", _on_cpu_with_bfloat16, lambda model: _packed(model.bfloat16())),
    Form("bfloat16", _on_gpu, lambda model: _recorded(_half(model))),
    Form("float8", _on_gpu_with_float8, lambda model: _recorded(_float8(model))),
    Form("bfloat16, compiled", _on_gpu, lambda model: _compiled(_half(model)), compiled=True),
)
