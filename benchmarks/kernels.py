"""Speed of fused kernels on a GPU beside timm's compiled models, as ratios of interleaved runs.

    python benchmarks/kernels.py [--models B/16 S/16] [--only train inference attention launches]

Training: forward, backward, clipping and AdamW under bfloat16 autocast, batch 256; Vitrail with
fused kernels and CUDA graphs, timm compiled. Inference: bfloat16 weights, batch 512; Vitrail in
bfloat16 and with 8-bit matrix products, timm compiled; then the latency of a single image.
Attention: forward and backward at several lengths, beside PyTorch's flash kernel; `launches` tries
other ways of starting its backward kernel and that of the norms.
Each round times every model once; figures are medians, ratios are the first one's time over
each other's.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import timm
import torch
import torch.nn.functional as F
import triton
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitrail
from vitrail.devices import graph_forward, peak_memory, reset_peak
from vitrail.model.kernels import attention as attention_kernels
from vitrail.model.kernels import encoder
from vitrail.model.kernels import sum_norm as norm_kernels

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
TRAIN, INFERENCE = 256, 512
PEERS = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/16": "vit_base_patch16_224",
    "L/16": "vit_large_patch16_224",
}


def training_step(model: nn.Module, batch: int) -> tuple[Callable[[], object], float]:
    """An update of a model, and the memory it takes in GiB."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    images = torch.randn(batch, 3, 224, 224, device=DEVICE)
    targets = torch.randint(0, 1000, (batch,), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", HALF):
            loss = F.cross_entropy(model(images).float(), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    reset_peak(DEVICE)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    return step, (peak_memory(DEVICE) - before) / 2**30


def milliseconds(calls: Mapping[str, Callable[[], object]], rounds: int = 12) -> dict[str, float]:
    """The median time of each call, which alternate."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(row) for name, row in times.items()}


def report(title: str, times: dict[str, float], note: dict[str, str]) -> None:
    """One line per model."""
    print(title, flush=True)
    for name, took in times.items():
        ratio = next(iter(times.values())) / took
        print(f"  {name:24s} {took:8.2f} ms  {ratio:5.3f}  {note.get(name, '')}", flush=True)


def train(variant: str) -> None:
    """Compares updates."""
    model = vitrail.create(variant, classes=1000).to(DEVICE).train()
    assert model.fuse(DEVICE, HALF)
    graph_forward(model, TRAIN)
    ours, memory = training_step(model, TRAIN)
    theirs = timm.create_model(PEERS[variant], num_classes=1000).to(DEVICE).train()
    compiled, their_memory = training_step(torch.compile(theirs), TRAIN)  # type: ignore[arg-type]
    times = milliseconds({"timm compiled": compiled, "Vitrail fused": ours})
    note = {"timm compiled": f"{their_memory:.2f} GiB", "Vitrail fused": f"{memory:.2f} GiB"}
    report(f"{variant} training, batch {TRAIN}", times, note)


@torch.inference_mode()
def infer(variant: str) -> None:
    """Compares forward passes."""
    torch.manual_seed(0)
    state = vitrail.create(variant, classes=1000).state_dict()

    def ours() -> "vitrail.model.Classifier":
        model = vitrail.create(variant, classes=1000)
        model.load_state_dict(state)
        model.to(DEVICE, HALF).eval().fuse(DEVICE, HALF)
        return model

    plain, fused, float8 = ours().unfused(), ours(), ours()
    encoder.quantize(float8.blocks)  # type: ignore[arg-type]
    theirs = timm.create_model(PEERS[variant], num_classes=1000).to(DEVICE, HALF).eval()
    images = torch.randn(INFERENCE, 3, 224, 224, device=DEVICE, dtype=HALF)
    models: dict[str, Callable[[Tensor], Tensor]] = {
        "timm compiled": torch.compile(theirs),  # type: ignore[dict-item]
        "Vitrail fused": fused,
        "Vitrail float8": float8,
    }
    calls = {name: partial(model, images) for name, model in models.items()}
    report(f"{variant} inference, batch {INFERENCE}", milliseconds(calls), {})
    one = images[:1].clone()
    latency = {
        "timm": partial(theirs, one),
        "Vitrail plain": partial(plain, one),
        "Vitrail fused, recorded": recorded(fused, one),
    }
    report(f"{variant} inference, one image", milliseconds(latency, 60), {})


SHAPES = {
    "S/4 at 32 px": (1024, 64, 12, 32),
    "Ti/4 at 32 px, class token": (512, 65, 3, 64),
    "B/16 at 224 px": (256, 197, 12, 64),
}
"""Images, tokens, heads, width of a head."""


def attention_call(attend: Callable[..., Tensor], shape: Sequence[int]) -> Callable[[], object]:
    """Forward and backward from query, key and value side by side, recorded."""
    images, tokens, heads, width = shape
    qkv = torch.randn(images, tokens, 3 * heads * width, device=DEVICE, dtype=HALF)
    bias = torch.zeros(3 * heads * width, device=DEVICE)
    qkv.requires_grad_(True), bias.requires_grad_(True)
    grad = torch.randn(images, tokens, heads * width, device=DEVICE, dtype=HALF)
    return record(lambda: torch.autograd.grad(attend(qkv, bias, heads), (qkv, bias), grad))


def fused_attention(qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
    """The gradient of the bias is part of it."""
    return attention_kernels.attend(qkv, bias, None, heads, False)[0]


def flash_attention(qkv: Tensor, bias: Tensor, heads: int) -> Tensor:
    """With the sum for the bias that comes after it."""
    q, k, v = rearrange(qkv + bias.to(qkv), "b n (c h k) -> c b h n k", c=3, h=heads).unbind(0)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def attention() -> None:
    """Compares attention."""
    for name, shape in SHAPES.items():
        calls = {
            "flash": attention_call(flash_attention, shape),
            "fused": attention_call(fused_attention, shape),
        }
        report(f"attention of {name}", milliseconds(calls), {})


LAUNCHES = [
    (rows, {"num_warps": warps, "num_stages": 2, **registers})
    for rows, warps, registers in (
        (16, 2, {}),
        (16, 4, {}),
        (32, 4, {}),
        (32, 4, {"maxnreg": 128}),
        (32, 8, {"maxnreg": 80}),
        (64, 4, {}),
        (64, 4, {"maxnreg": 168}),
        (64, 8, {}),
    )
]
"""Queries at a time, and options of Triton; each takes about two seconds to compile."""


NORMS = {"S/4 at 32 px": (1024, 64, 384), "Ti/4 at 32 px": (512, 65, 192), "B/16": (256, 197, 768)}
"""Images, tokens and width."""
NORM_LAUNCHES = [(16, 2, 1), (32, 1, 1), (32, 2, 1), (16, 4, 2), (24, 1, 1)]
"""Programs on a multiprocessor, rows at a time and warps."""


def norm_call(shape: Sequence[int]) -> Callable[[], object]:
    """The backward pass of a residual sum and its normalization, recorded."""
    x, grad_total, grad_h = (torch.randn(*shape, device=DEVICE, dtype=HALF) for _ in range(3))
    norm = nn.LayerNorm(shape[-1], device=DEVICE)
    total, _, stats = norm_kernels.sum_norm(
        x, x, None, norm.bias, norm.weight, norm.bias, norm.eps, False
    )
    return record(
        lambda: norm_kernels.sum_norm_gradient(total, stats, norm.weight, None, grad_total, grad_h)
    )


@torch.no_grad()
def norm_launches() -> None:
    """Compares ways of starting the backward kernel of the norms."""
    chosen = norm_kernels.gradient_launch
    for name, shape in NORMS.items():
        calls = {"in use": norm_call(shape)}
        for launch in NORM_LAUNCHES:
            norm_kernels.gradient_launch = lambda block, launch=launch: launch
            calls[str(launch)] = norm_call(shape)
        norm_kernels.gradient_launch = chosen
        report(f"norm of {name}", milliseconds(calls), {})


def launches() -> None:
    """Compares ways of starting the backward kernel of attention; the first is the one in use."""
    chosen = attention_kernels.gradient_launch
    for name, shape in SHAPES.items():
        calls = {"in use": attention_call(fused_attention, shape)}
        for launch in LAUNCHES:
            attention_kernels.gradient_launch = lambda keys, launch=launch: launch
            with suppress(triton.runtime.errors.OutOfResources):
                calls[str(launch)] = attention_call(fused_attention, shape)
        attention_kernels.gradient_launch = chosen
        report(f"attention of {name}", milliseconds(calls), {})


def recorded(model: nn.Module, images: Tensor) -> Callable[[], object]:
    """The forward pass as a CUDA graph."""
    return record(lambda: model(images))


def record(call: Callable[[], object]) -> Callable[[], object]:
    """A call as a CUDA graph."""
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["B/16"])
    parser.add_argument("--only", nargs="+", default=["train", "inference"])
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, timm {timm.__version__}")
    for variant in arguments.models:
        if "train" in arguments.only:
            train(variant)
        if "inference" in arguments.only:
            infer(variant)
    if "attention" in arguments.only:
        attention()
    if "launches" in arguments.only:
        launches()
        norm_launches()


if __name__ == "__main__":
    main()
