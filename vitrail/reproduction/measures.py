"""What is measured on a trained run, or on a model as it is built: plain values for a result."""

from base64 import b64encode
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from vitrail.benchmarking.benchmark import benchmark
from vitrail.config import Config, load_config
from vitrail.data.opening import open_run_data
from vitrail.data.sheets import sample_evenly
from vitrail.devices import choose_device, setup_devices
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.fewshot import fewshot
from vitrail.inspection.inspect_model import summarize
from vitrail.inspection.tracer import Tracer, mean_distances
from vitrail.model import Classifier, parse_variant
from vitrail.model.vit import ViTArchitecture
from vitrail.runs import Run
from vitrail.training.build import chosen_options
from vitrail.training.sweep import best_val
from vitrail.weights.load import load
from vitrail.weights.published import model_cost

_SHOTS = 5
"""Images per class, as in the paper's few-shot figures."""
_INSPECTED = 128
"""Images that attention distances are averaged over (appendix D.7)."""


def measure_run(run: Run, measures: tuple[str, ...], device: str, seconds: float) -> dict[str, Any]:
    """Accuracy, cost and conditions of a finished run, and some `measures`."""
    info, test, val = run.info(), run.evaluation("test"), best_val(run)
    cost = info.get("cost", {})
    pretraining = cost.get("pretraining") or {}
    result = {
        "status": info["status"],
        "message": info.get("message", ""),
        "top1": test.get("top1"),
        "n": test.get("n"),
        "val_top1": val.get("top1"),
        "val_loss": val.get("loss"),
        "curve": _curve(run),
        "parameters": info["model"]["parameters"],
        "gmacs": info["model"]["gmacs"],
        "exaflops": cost.get("exaflops"),
        # As in Table 6, fine-tuning is not counted.
        "compute": pretraining.get("exaflops", cost.get("exaflops")),
        "device_days": cost.get("device_days"),
        "pretraining_device_days": pretraining.get("device_days"),
        "energy_joules": cost.get("energy_joules"),
        "peak_memory_bytes": cost.get("peak_memory_bytes"),
        "seconds": info.get("seconds"),
        **{key: info[key] for key in ("hardware", "precision", "versions", "commit", "started")},
    }
    config = load_config(run.folder / "config.toml")
    if "fewshot" in measures:
        result["fewshot"] = _fewshot(run, config, device)
    if "real" in measures and config.data.source == "imagenet":
        found = evaluate(run.folder, "imagenet", labels="real", device=device)
        result["real"] = found["top1"]
    if "inspection" in measures:
        folder = run.folder / "inspection"
        result |= _inspect(load(run.folder), config, folder, choose_device(device))
    if "speed" in measures:
        speed = _speed(run.folder, (), seconds, device)
        result |= {key: speed[key] for key in ("images_per_second", "largest_batch")}
    return result


def _curve(run: Run) -> list[dict[str, Any]]:
    """Accuracy on val over the epochs of training."""
    names = ("epoch", "top1", "fewshot")
    return [
        {name: event[name] for name in names if name in event}
        for event in run.events()
        if event["event"] == "val"
    ]


def _fewshot(run: Run, config: Config, device: str) -> float:
    """Linear accuracy of the frozen features with five images per class (section 4.1)."""
    source = config.train.fewshot_data or config.data.source
    found = fewshot(run.folder, source, shots=(_SHOTS,), split="test", device=device)
    return fmean(row["accuracy"] for row in found["results"])


def _speed(
    model: str | Path, sizes: tuple[int, ...], seconds: float, device: str
) -> dict[str, Any]:
    found = benchmark([model], sizes=sizes, seconds=seconds, device=device)
    return {key: value for key, value in found.items() if key != "results"}


def _inspect(
    model: Classifier, config: Config, folder: Path, device: torch.device
) -> dict[str, Any]:
    """Attention distances by layer and head, structure of the positions, and drawings."""
    data = open_run_data(config).part("test")
    tracer = Tracer(model.to(device))
    chosen = sample_evenly(data, _INSPECTED, seed=0)
    traces = (tracer.trace(tracer.preprocess(data.image(i)), data.names[i]) for i in chosen)
    distances = mean_distances([trace.distances() for trace in traces])
    found: dict[str, Any] = {"distances": distances}
    if distances is not None:
        found |= _distance_trends(distances["layers"])
    if tracer.positions is not None:
        found["row_column_similarity"] = row_column_similarity(tracer.positions.maps)
    if config.seed == 0:  # drawings of one seed are enough for a page
        summarize(model, data, "test", folder)
        found["images"] = _drawings(folder)
    return found


def _distance_trends(layers: list[dict[str, Any]]) -> dict[str, float]:
    """How attention distance changes with depth, in shares of the distance of uniform attention."""
    heads = [[x / row["uniform"] for x in row["heads"]] for row in layers]
    third = max(1, len(heads) // 3)
    low, high = (fmean(map(_spread, rows)) for rows in (heads[:third], heads[-third:]))
    return {
        "distance_growth": _slope([fmean(row) for row in heads]),
        "head_spread_fall": low - high,
        "most_local_head": min(heads[0]),
    }


def _slope(values: list[float]) -> float:
    """Of the least-squares line, from the first value to the last."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    moment = sum((i - middle) * (y - mean) for i, y in enumerate(values))
    return 2 * middle * moment / max(sum((i - middle) ** 2 for i in range(len(values))), 1e-12)


def _spread(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0


def row_column_similarity(maps: Float[Tensor, "n y x"]) -> float | None:
    """How much more similar a position is to those of its row and column than to others that are
    at least as near.

    Similarity falls with distance in any direction; only a grid of rows and columns makes a
    distant position of the same row more similar than a nearer one beside it.
    """
    side = maps.shape[1]
    if len(maps) != side * maps.shape[2] or side != maps.shape[2]:
        return None
    place = torch.arange(side)
    rows = (place[:, None] - place[None]).abs()
    dy = rows[:, None, :, None].expand(side, side, side, side)
    dx = rows[None, :, None, :].expand(side, side, side, side)
    distance = (dy**2 + dx**2).float().sqrt()
    on_axis = ((dy == 0) | (dx == 0)) & (distance > 0)
    similarity = maps.reshape(side, side, side, side)
    differences = []
    for k in range(2, side):
        nearer = ~on_axis & (distance > k - 1) & (distance <= k)
        if nearer.any():
            along = on_axis & (distance == k)
            differences.append(float(similarity[along].mean() - similarity[nearer].mean()))
    return fmean(differences) if differences else None


def _drawings(folder: Path) -> dict[str, str]:
    """Filters, positions and attention maps as data URIs."""
    kinds = {".png": "image/png", ".jpg": "image/jpeg"}
    return {
        path.stem: f"data:{kinds[path.suffix]};base64,{b64encode(path.read_bytes()).decode()}"
        for path in sorted(folder.iterdir())
        if path.suffix in kinds
    }


def measure_model(
    config: Config, measures: tuple[str, ...], device: str, seconds: float
) -> dict[str, Any]:
    """Parameters and MACs of a model that is not trained, its speed in some `seconds`, and what its
    published weights look like inside."""
    model, size = config.model, config.data.size
    loaded = load(model.init, size=size) if model.init else None
    architecture = (
        parse_variant(model.variant, size=size, **chosen_options(model))
        if loaded is None
        else loaded.architecture
    )
    cost = model_cost(architecture)
    found: dict[str, Any] = {
        "status": "finished",
        "parameters": cost.parameters,
        "gmacs": cost.gmacs,
        "tokens": cost.tokens,
    }
    if "shape" in measures and isinstance(architecture, ViTArchitecture):
        a = architecture
        found |= {"layers": a.depth, "width": a.width, "mlp": a.mlp, "heads": a.heads}
    if "speed" in measures:
        size = max(architecture.size)
        speed = benchmark(
            [model.init or model.variant], sizes=(size,), seconds=seconds, device=device
        )
        found |= {key: value for key, value in speed.items() if key != "results"}
    if "inspection" in measures and loaded is not None:
        with setup_devices(device, "float32") as where, TemporaryDirectory() as folder:
            found |= {"hardware": where.hardware(), "precision": "float32"}
            found |= _inspect(loaded, config, Path(folder), where.device)
    return found
