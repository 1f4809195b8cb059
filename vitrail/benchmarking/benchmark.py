"""`vitrail benchmark`: speed, latency, memory and largest batch of any list of models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.benchmarking.measure import (
    MAX_BATCH,
    Workload,
    extrapolated_batch,
    largest_batch,
    latency,
    time_batches,
)
from vitrail.benchmarking.peers import compare_with_timm
from vitrail.console import count_progress, echo, print_table
from vitrail.devices import (
    Devices,
    available_memory,
    peak_memory,
    release_memory,
    reset_peak,
    setup_devices,
)
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.model import Classifier, create
from vitrail.model.variants import parse_variant, variant_name
from vitrail.weights.load import load
from vitrail.weights.published import model_cost

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """The options of `vitrail benchmark`."""

    sizes: tuple[int, ...] = ()
    """Image sides in pixels; empty uses each model's own."""
    batches: tuple[int, ...] = ()
    """Batch sizes over all processes; empty measures from 1 up until larger batches are no
    faster."""
    depths: tuple[int, ...] = ()
    """Numbers of blocks of ViT variants; empty uses the variant's own."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    train: bool = False
    """Forward and backward, without an optimizer, instead of forward only."""
    peers: bool = False
    """Time timm's model of the same name alternately with ours."""
    seconds: float = 20.0
    """Time for the batch sizes of one model at one image size; the other measurements take about as
    long again."""
    memory: float = 0.0
    """Memory in GiB that a batch may use on a CPU; 0 uses half of the free memory."""

    def __post_init__(self) -> None:
        for what in ("sizes", "batches", "depths"):
            if min(getattr(self, what), default=1) < 1:
                least = min(getattr(self, what))
                raise VitrailError(f"--{what} {least}: expected whole numbers from 1 up")
        if max(self.batches, default=1) > MAX_BATCH:
            raise VitrailError(f"--batches {max(self.batches)}: expected at most {MAX_BATCH}")
        if self.seconds <= 0 or self.memory < 0:
            raise VitrailError("--seconds and --memory: expected numbers above 0")


def benchmark(models: Sequence[str | Path], **options: Any) -> dict[str, Any]:
    """Peak images per second over batch sizes, latency, memory, the largest batch and GMACs.

    `options` are those of `BenchmarkOptions`. `results` has a row for every model and size, with an
    `error` instead of figures if it failed; the figures of a single row are at the top level as
    well. If every row failed, the first error is raised.
    """
    settings = BenchmarkOptions(**options)
    if not models:
        raise VitrailError("no model to measure; name a variant such as B/16, or any MODEL")
    settings = replace(settings, memory=settings.memory or available_memory() / GIB / 2)
    with setup_devices(settings.device, settings.precision) as where:
        if where.world > 1 and not settings.batches:
            raise VitrailError("several processes need --batches, e.g. --batches 256")
        on_cpu = where.device.type == "cpu"
        conditions = {
            "device": str(where.device),
            "precision": str(where.precision).removeprefix("torch."),
            "hardware": where.hardware(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "processes": where.world,
            "mode": "training" if settings.train else "inference",
            "memory_budget_bytes": int(settings.memory * GIB) if on_cpu else None,
        }
        rows: list[dict[str, Any]] = []
        errors: list[VitrailError] = []
        cases = list(product(models, settings.sizes or (None,), settings.depths or (None,)))
        with count_progress("measuring", where.main) as advance:
            advance(0, total=len(cases))
            for model, size, depth in cases:
                try:
                    rows.append(_measure(model, size, depth, where, settings))
                except (VitrailError, RuntimeError) as error:
                    errors.append(_without_traceback(error))
                    rows.append({"model": str(model), "size": size, "error": str(errors[-1])})
                advance(1)
    if len(errors) == len(rows):
        raise errors[0]
    return (rows[0] if len(rows) == 1 else {}) | conditions | {"results": rows}


def _without_traceback(error: VitrailError | RuntimeError) -> VitrailError:
    """The error in one line; its traceback would keep the model's memory."""
    if isinstance(error, VitrailError):
        return type(error)(str(error))
    return FailureError(one_line(error))


def _measure(
    model: str | Path,
    size: int | None,
    depth: int | None,
    where: Devices,
    settings: BenchmarkOptions,
) -> dict[str, Any]:
    """All figures of one model at one size."""
    release_memory()
    built = _build_model(model, size, depth, where.device)
    a = built.architecture
    work = Workload(built, where, (a.channels, *a.size), settings.train).prepared()
    on_cpu = where.device.type == "cpu"
    reset_peak(where.device)
    max_bytes = peak_memory(where.device) + int(settings.memory * GIB) if on_cpu else 0
    timings, ended_by = time_batches(work, settings.batches, settings.seconds, max_bytes)
    requested = [t for t in timings if not settings.batches or t.batch in settings.batches]
    best = max(requested, key=lambda timing: timing.speed)
    largest, largest_by = None, "unknown"
    if on_cpu and where.world == 1:
        largest, largest_by = extrapolated_batch(timings, max_bytes)
    elif where.device.type == "cuda" and where.world == 1:
        largest, largest_by = largest_batch(work, timings, settings.seconds)
    single = None if work.min_batch > 1 else latency(work, settings.seconds / 10)
    cost = model_cost(a)
    row: dict[str, Any] = {
        "model": str(model),
        "variant": variant_name(a),
        "depth": getattr(a, "depth", None),
        "size": list(a.size),
        "parameters": cost.parameters,
        "gmacs": cost.gmacs,
        "images_per_second": round(best.speed, 2),
        "peak_by": "batches" if settings.batches else ended_by,
        "batch": best.batch,
        "peak_memory_bytes": best.peak,
        "latency_ms": None if single is None else round(1000 * single, 3),
        "largest_batch": largest,
        "largest_batch_by": largest_by,
        "batches": [timing.to_dict() for timing in requested],
    }
    if settings.peers:
        row["peer"] = compare_with_timm(work, a, best.batch, settings.seconds / 4)
    return row


def _build_model(
    model: str | Path, size: int | None, depth: int | None, device: torch.device
) -> Classifier:
    """The name of a variant is built with random weights; any other MODEL is loaded."""
    if not Path(model).exists() and _is_variant(str(model)):
        options = {} if depth is None else {"depth": depth}
        with torch.device(device):
            return create(str(model), size=size or 224, **options)
    if depth is not None:
        raise VitrailError(f"--depths builds models with random weights; {model} is not a variant")
    return load(model, size=size)


def _is_variant(model: str) -> bool:
    try:
        parse_variant(model)
    except VitrailError:
        return False
    return True


def show(result: dict[str, Any]) -> None:
    """The figures as a table, with the conditions of the measurement."""
    torch_version = f"torch {result['torch']}"
    echo(" · ".join((result["hardware"], result["precision"], torch_version, result["mode"])))
    rows = [row for row in result["results"] if "error" not in row]
    peers = any("peer" in row for row in rows)
    columns = ["model", "pixels", "GMACs", "images/s", "at batch", "ms at batch 1", "peak memory"]
    columns += ["ours alternating", "timm alternating", "ratio"] if peers else []
    print_table([*columns, "largest batch"], [list(_cells(row)) for row in rows])
    for row in rows:
        if missing := row.get("peer", {}).get("missing"):
            echo(f"{row['model']}: no comparison with timm: {missing}")
    for row in result["results"]:
        if "error" in row:
            size = f" at {row['size']} pixels" if row["size"] else ""
            echo(f"{row['model']}{size}: {row['error']}")
    if budget := result["memory_budget_bytes"]:
        echo(f"largest batch: extrapolated to {budget / GIB:.1f} GiB, not tried")


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield row["model"]
    yield "×".join(map(str, dict.fromkeys(row["size"])))
    yield f"{row['gmacs']:,.2f}"
    yield f"{row['images_per_second']:,.1f}" + (" or more" if row["peak_by"] == "time" else "")
    yield str(row["batch"])
    yield _cell(row["latency_ms"], ",.2f")
    yield f"{row['peak_memory_bytes'] / GIB:.2f} GiB"
    if "peer" in row:
        yield _cell(row["peer"].get("ours_images_per_second"), ",.1f")
        yield _cell(row["peer"].get("images_per_second"), ",.1f")
        yield _cell(row["peer"].get("ratio"), ".3f")
    more = " or more" if row["largest_batch_by"] in ("limit", "time") else ""
    yield _cell(row["largest_batch"], ",") + more


def _cell(value: float | int | None, form: str) -> str:
    return "–" if value is None else format(value, form)
