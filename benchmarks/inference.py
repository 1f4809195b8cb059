"""Inference time of Vitrail beside timm, as a ratio in one interleaved run.

    python benchmarks/inference.py [--models B/16 Ti/16] [--batches 1 16] [--rounds 40]
    python benchmarks/inference.py --device cuda --bf16 --compile --batches 1 256
    OMP_NUM_THREADS=1 python benchmarks/inference.py --forms --cpu-time --models Ti/16 --batches 1 8

Both models have the same weights and the erf GELU, in float32 unless --bf16 is given. Each round
times one call of each, in an order that alternates, so that whatever else the machine does falls on
both. The figure is the median of the rounds' ratios; below 1, Vitrail is faster.

--forms also times the forms of `vitrail predict --fast` beside timm's float32. With --cpu-time, on
one thread, the clock counts the work of this process alone, which is the steadier figure on a
machine that others use too.
"""

import argparse
import copy
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import save_file

import vitrail
from vitrail.evaluation.fast import FORMS

PEERS = {
    "Ti/16": "vit_tiny_patch16_224",
    "S/16": "vit_small_patch16_224",
    "B/32": "vit_base_patch32_224",
    "B/16": "vit_base_patch16_224",
    "R50x1": "resnetv2_50x1_bit",
}


def pair(variant: str) -> tuple[vitrail.Classifier, torch.nn.Module]:
    """Ours and timm's with the same weights."""
    theirs = timm.create_model(PEERS[variant], num_classes=1000).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        save_file(theirs.state_dict(), path)
        ours = vitrail.load(path)
        # Out of the file's mapping, into memory of its own, like timm's.
        ours.load_state_dict({key: x.clone() for key, x in ours.state_dict().items()}, assign=True)
    return ours.eval(), theirs


def seconds(model: Callable, images: torch.Tensor, clock: Callable[[], float]) -> float:
    """One call, to its end."""
    start = clock()
    model(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return clock() - start


def models_of(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """timm's model, ours, and with --forms what `--fast` chooses from, ready to be called."""
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    ours, theirs = pair(variant)
    ours, theirs = ours.to(arguments.device, dtype), theirs.to(arguments.device, dtype)
    models: dict[str, Any] = {"timm": theirs, "vitrail": ours}
    for form in FORMS if arguments.forms else ():
        if form.available(torch.device(arguments.device)):
            models[form.name] = form.build(copy.deepcopy(ours))
    if arguments.compile:
        models = {name: torch.compile(model, fullgraph=True) for name, model in models.items()}
    return models


@torch.inference_mode()
def compare(
    models: dict[str, Any], batch: int, arguments: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each model in every round."""
    device, clock = arguments.device, time.process_time if arguments.cpu_time else time.perf_counter
    images = torch.randn(batch, 3, 224, 224, device=device)
    inputs = {
        name: images.to(next(model.parameters()).dtype).contiguous()
        for name, model in models.items()
    }
    expected = models["timm"](inputs["timm"]).float()
    for name, model in models.items():
        difference = (model(inputs[name]).float() - expected).abs().max().item()
        most = 1e-3 if inputs[name].dtype == torch.float32 else 0.1
        assert difference < most, f"logits of {name} differ by {difference}"
        for _ in range(2):
            model(inputs[name])
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(arguments.rounds):
        for name in list(models) if turn % 2 else list(models)[::-1]:
            times[name].append(seconds(models[name], inputs[name], clock))
    return times


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
    parser.add_argument("--forms", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    versions = (f"torch {torch.__version__}", f"timm {timm.__version__}")
    on_gpu = arguments.device.startswith("cuda")
    where = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    python = f"Python {platform.python_version()}"
    print(*versions, python, where, f"{arguments.rounds} rounds", sep=" · ")
    print(f"{'model':8}{'batch':>6}  {'form':20}{'ms per image':>14}{'of timm':>10}")
    for variant in arguments.models:
        models = models_of(variant, arguments)
        for batch in arguments.batches:
            times = compare(models, batch, arguments)
            for name, took in times.items():
                ratio = statistics.median(a / b for a, b in zip(took, times["timm"], strict=True))
                each = 1e3 * statistics.median(took) / batch
                print(f"{variant:8}{batch:6}  {name:20}{each:14.2f}{ratio:10.3f}", flush=True)


if __name__ == "__main__":
    main()
