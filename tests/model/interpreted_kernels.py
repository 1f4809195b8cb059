"""Fused kernels in Triton's interpreter, and the plain code in float64; run by test_kernels.py."""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

import vitrail
from vitrail.model import resnet, vit

# The interpreter works on the CPU, and in any precision.
vit.takes_kernels = resnet.takes_kernels = lambda x: True
vit.runs_kernels = resnet.runs_kernels = lambda device, precision: precision is not None

SMALL = {"size": (16, 24), "patch": 8, "width": 32, "depth": 2, "heads": 2, "mlp": 40}
MODELS = {
    "erf": {"gelu": "erf"},
    "drop path": {"gelu": "tanh", "drop_path": 0.5},
    "dropped": {"drop_path": 1.0},
    "no class token": {"pool": "mean", "class_token": False},
    "normalized after pooling": {"pool": "mean", "norm_after_pool": True},
    "heads of 24": {"width": 48, "heads": 2},
    "positions at every layer": {"injection": "every"},
    "shared positions": {"injection": "shared", "drop_path": 0.5},
    "relative positions": {"positions": "relative", "class_slot": False},
    "relative positions, heads of 24": {"positions": "relative", "class_slot": False, "width": 48},
    "axial": {"axial": True, "size": (24, 40), "class_token": False, "pool": "mean"},
    "hybrid": {"size": 32, "backbone": (1,), "patch": 2, "depth": 1},
    "ResNet": {"variant": "R14x0.25", "size": 32, "root": "small"},
    "wide ResNet": {"variant": "R14x0.375", "size": 21},
}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative."""
    return ((a - b).norm() / (b.norm() + 1e-9)).item()


def compare(options: dict) -> tuple[float, float, float]:
    """The largest differences of logits in training, logits in evaluation, and gradients."""
    torch.manual_seed(0)
    options = {"variant": "B/16", **SMALL, **options} if "variant" not in options else options
    model = vitrail.create(**options, classes=5)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    images = torch.randn(2, 3, *model.architecture.size)
    weights = torch.randn(2, 5)
    results = []
    for fused in (False, True):
        model.fuse(images.device, torch.bfloat16 if fused else None)
        kind = torch.float32 if fused else torch.float64
        model.to(kind)
        images, weights = images.to(kind), weights.to(kind)
        model.train().zero_grad()
        torch.manual_seed(1)
        logits = model(images)
        (logits * weights).sum().backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            results.append((logits.detach(), model.eval()(images), gradients))
    (a, b, plain), (c, d, found) = results
    assert model.fused
    # Attention does not depend on the bias of the keys: its gradient is rounding error.
    names = [name for name in plain if not name.endswith("qkv.bias")]
    biases = [name for name in plain if name.endswith("qkv.bias")]
    worst = [difference(found[name], plain[name]) for name in names]
    for name in biases:
        worst += [difference(found[name].chunk(3)[i], plain[name].chunk(3)[i]) for i in (0, 2)]
    return difference(c, a), difference(d, b), max(worst)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write("\t".join([name, *map(str, compare(MODELS[name]))]) + "\n")
