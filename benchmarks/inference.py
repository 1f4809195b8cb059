"""Inference time of Vitrail beside timm, as a ratio in one interleaved run.

    python benchmarks/inference.py [--models B/16 Ti/16] [--batches 1 16] [--rounds 40]
    python benchmarks/inference.py --device cuda --bf16 --compile --batches 1 256

Both models have the same weights and the erf GELU, in float32 unless --bf16 is given. Each round
times one call of each, in an order that alternates, so that whatever else the machine does falls on
both. The figure is the median of the rounds' ratios; below 1, Vitrail is faster.
"""

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

import vitrail

PEERS = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/32": "vit_base_patch32_224",
    "B/16": "vit_base_patch16_224",
    "R50x1": "resnetv2_50x1_bit",
}


def pair(variant: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Ours and timm's with the same weights."""
    theirs = timm.create_model(PEERS[variant], num_classes=1000).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file(theirs.state_dict(), path)
        ours = vitrail.load(path)
        # Out of the file's mapping, into memory of its own, like timm's.
        ours.load_state_dict({key: x.clone() for key, x in ours.state_dict().items()}, assign=True)
    return ours.eval(), theirs


def seconds(model: Callable, images: torch.Tensor) -> float:
    """One call, to its end."""
    start = time.perf_counter()
    model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@torch.inference_mode()
def compare(variant: str, batch: int, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Median milliseconds of ours and of theirs, and the median ratio."""
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    models: list[Callable] = [model.to(arguments.device, dtype) for model in pair(variant)]
    images = torch.randn(batch, 3, 224, 224, device=arguments.device, dtype=dtype)
    difference = (models[0](images) - models[1](images)).abs().max().item()
    assert difference < (0.1 if arguments.bf16 else 1e-3), f"logits differ by {difference}"
    if arguments.compile:
        models = [torch.compile(model, fullgraph=True) for model in models]
    for model in models * 3:
        model(images)
    times: list[tuple[float, float]] = []
    for turn in range(arguments.rounds):
        order = (0, 1) if turn % 2 else (1, 0)
        took = {i: seconds(models[i], images) for i in order}
        times.append((took[0], took[1]))
    ours, theirs = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return ours, theirs, statistics.median(a / b for a, b in times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["Ti/16", "B/16"], choices=PEERS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    arguments = parser.parse_args()
    versions = (f"torch {torch.__version__}", f"timm {timm.__version__}")
    on_gpu = arguments.device.startswith("cuda")
    where = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    python = f"Python {platform.python_version()}"
    print(*versions, python, where, f"{arguments.rounds} rounds", sep=" · ")
    print(f"{'model':8}{'batch':>6}{'vitrail ms':>12}{'timm ms':>10}{'ratio':>8}")
    for variant in arguments.models:
        for batch in arguments.batches:
            ours, theirs, ratio = compare(variant, batch, arguments)
            print(f"{variant:8}{batch:6}{ours:12.2f}{theirs:10.2f}{ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
