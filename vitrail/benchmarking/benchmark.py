"""`vitrail benchmark`: speed, latency, memory and largest batch of any list of models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from vitrail.benchmarking.measuring import (
    LIMIT,
    Timing,
    Work,
    extrapolated_batch,
    largest_batch,
    latency,
    release,
    timings,
)
from vitrail.benchmarking.peers import beside_peer
from vitrail.console import count_progress, echo, print_table
from vitrail.devices import Devices, devices, peak_memory, reset_peak
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.model import Classifier, create
from vitrail.model.variants import describe, name
from vitrail.weights.load import load
from vitrail.weights.published import count

GIB = 1 << 30
FALLBACK = 8.0
"""GiB taken for free where the system does not say."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How models are measured."""

    sizes: tuple[int, ...] = ()
    """Sides of the images in pixels; none: each model's own."""
    batches: tuple[int, ...] = ()
    """Batch sizes; none: 1, 2, 4 … until larger ones are no faster."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "auto"
    train: bool = False
    """Forward and backward, without an optimizer, in place of the forward pass alone."""
    peers: bool = False
    """Time timm's model of the same name by turns with ours."""
    seconds: float = 20.0
    """For the batch sizes of one model at one size; about as much again for the rest."""
    memory: float = 0.0
    """GiB that a processor may use for a batch; 0: half of what is free."""

    def __post_init__(self) -> None:
        for what, values in (("--sizes", self.sizes), ("--batches", self.batches)):
            if any(value < 1 for value in values):
                raise VitrailError(f"{what} {min(values)}: expected whole numbers from 1 up")
        if max(self.batches, default=1) > LIMIT:
            raise VitrailError(f"--batches {max(self.batches)}: expected at most {LIMIT}")
        if self.seconds <= 0 or self.memory < 0:
            raise VitrailError("--seconds and --memory: expected numbers above 0")


def benchmark(models: Sequence[str | Path], **options: Any) -> dict[str, Any]:
    """Peak images per second over batch sizes, latency, memory, the largest batch and GMACs.

    `options` are those of `Options`. Of one model at one size, the figures stand at the top as
    well; `results` has a row for every model and size, with an `error` in place of figures where
    there are none. It raises only where no row has any.
    """
    wanted = Options(**options)
    if not models:
        raise VitrailError("no model to measure; name a variant such as B/16, or any MODEL")
    wanted = replace(wanted, memory=wanted.memory or free_gib() / 2)
    with devices(wanted.device, wanted.precision) as where:
        if where.world > 1:
            raise VitrailError("a benchmark measures one device; run it without torchrun")
        about = {
            "device": str(where.device),
            "precision": str(where.precision).removeprefix("torch."),
            "hardware": where.hardware(),
            "torch": str(torch.__version__),
            "threads": torch.get_num_threads(),
            "mode": "training" if wanted.train else "inference",
            "memory_budget_bytes": int(wanted.memory * GIB) if where.device.type == "cpu" else None,
        }
        rows: list[dict[str, Any]] = []
        errors: list[VitrailError] = []
        cases = [(model, size) for model in models for size in wanted.sizes or (None,)]
        with count_progress("measuring") as advance:
            advance(0, total=len(cases))
            for model, size in cases:
                try:
                    rows.append(measure(model, size, where, wanted))
                except (VitrailError, RuntimeError) as error:
                    errors.append(told(error))
                    rows.append({"model": str(model), "size": size, "error": str(errors[-1])})
                advance(1)
    if len(errors) == len(rows):
        raise errors[0]
    return (rows[0] if len(rows) == 1 else {}) | about | {"results": rows}


def told(error: VitrailError | RuntimeError) -> VitrailError:
    """What went wrong with a model, in one line and without the way it came, which would keep the
    model's memory."""
    if isinstance(error, VitrailError):
        return type(error)(str(error))
    return FailureError(one_line(error))


def measure(model: str | Path, size: int | None, where: Devices, wanted: Options) -> dict[str, Any]:
    """All figures of one model at one size."""
    release()
    built = build_model(model, size, where.device)
    a = built.architecture
    work = Work(built, where, (a.channels, *a.size), wanted.train).prepared()
    on_cpu = where.device.type == "cpu"
    reset_peak(where.device)
    most = peak_memory(where.device) + int(wanted.memory * GIB) if on_cpu else 0
    found, ended = timings(work, wanted.batches, wanted.seconds, most)
    asked = [one for one in found if not wanted.batches or one.batch in wanted.batches]
    best = max(asked, key=lambda one: one.speed)
    largest, by = None, "unknown"
    if on_cpu:
        largest, by = extrapolated_batch(found, most)
    elif where.device.type == "cuda":
        largest, by = largest_batch(work, found[-1].batch, wanted.seconds)
    cost = count(a)
    row: dict[str, Any] = {
        "model": str(model),
        "variant": name(a),
        "size": list(a.size),
        "parameters": cost.parameters,
        "gmacs": cost.gmacs,
        "images_per_second": round(best.speed, 2),
        "peak_by": "batches" if wanted.batches else ended,
        "batch": best.batch,
        "peak_memory_bytes": best.peak,
        "latency_ms": None
        if work.least > 1
        else round(1000 * latency(work, wanted.seconds / 10), 3),
        "largest_batch": largest,
        "largest_batch_by": by,
        "batches": [each(one) for one in asked],
    }
    if wanted.peers:
        row["peer"] = beside_peer(work, a, best.batch, wanted.seconds / 4)
    return row


def each(one: Timing) -> dict[str, Any]:
    """A line of the figures by batch size."""
    return {
        "batch": one.batch,
        "images_per_second": round(one.speed, 2),
        "peak_memory_bytes": one.peak,
    }


def build_model(model: str | Path, size: int | None, device: torch.device) -> Classifier:
    """A variant's name is built fresh, any other MODEL is loaded."""
    if not Path(model).exists() and is_variant(str(model)):
        with torch.device(device):
            return create(str(model), size=size or 224)
    return load(model, size=size)


def is_variant(model: str) -> bool:
    """Whether the table of variants has such a name."""
    try:
        describe(model)
    except VitrailError:
        return False
    return True


def free_gib() -> float:
    """Memory that a processor could use now."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    free = next((line for line in lines if line.startswith("MemAvailable:")), "")
    return int(free.split()[1]) / 2**20 if free else FALLBACK


def show(result: dict[str, Any]) -> None:
    """The figures as a table, with what they were measured on."""
    about = (result["hardware"], result["precision"], f"torch {result['torch']}", result["mode"])
    echo(" · ".join(about))
    rows = [row for row in result["results"] if "error" not in row]
    peers = any("peer" in row for row in rows)
    columns = ["model", "pixels", "GMACs", "images/s", "at batch", "ms at batch 1", "peak memory"]
    columns += [*(["by turns", "timm by turns", "ratio"] if peers else []), "largest batch"]
    print_table(columns, [list(cells(row, peers)) for row in rows])
    for row in rows:
        if missing := row.get("peer", {}).get("missing"):
            echo(f"{row['model']}: not beside timm: {missing}")
    for row in result["results"]:
        if "error" in row:
            size = f" at {row['size']} pixels" if row["size"] else ""
            echo(f"{row['model']}{size}: {row['error']}")
    if result["memory_budget_bytes"]:
        echo(
            f"largest batch: extrapolated to {result['memory_budget_bytes'] / GIB:.1f} GiB, "
            "not tried out"
        )


def cells(row: dict[str, Any], peers: bool) -> Iterator[str]:
    """A line of the table."""
    yield row["model"]
    yield "×".join(map(str, dict.fromkeys(row["size"])))
    yield f"{row['gmacs']:,.2f}"
    yield f"{row['images_per_second']:,.1f}" + (" or more" if row["peak_by"] == "time" else "")
    yield str(row["batch"])
    yield "–" if row["latency_ms"] is None else f"{row['latency_ms']:,.2f}"
    yield f"{row['peak_memory_bytes'] / GIB:.2f} GiB"
    if peers:
        peer = row["peer"]
        for key, form in (
            ("ours_images_per_second", ",.1f"), ("images_per_second", ",.1f"), ("ratio", ".3f"),
        ):  # fmt: skip
            yield format(peer[key], form) if key in peer else "–"
    largest = "–" if row["largest_batch"] is None else f"{row['largest_batch']:,}"
    more = row["largest_batch_by"] in ("limit", "time")
    yield largest + (" or more" if more else "")
