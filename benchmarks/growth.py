"""Cost curves: speed and memory against image size, batch, depth and number of processes.

    python benchmarks/growth.py --out docs/speed --minutes 15
    python benchmarks/growth.py --out out --device cpu --models Ti/16 --sizes 64 128 --seconds 0.5

Every row is one `vitrail benchmark`, all in this process; only rows of several processes start
torchrun. The most important rows come first. Each curve has a JSON file in the format of `vitrail
benchmark --json`, written again after every row, so that nothing is lost when the time is up. A
model that does not fit has a row with the error. `python docs/speed.py` draws the files.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import vitrail
from vitrail.devices import cores
from vitrail.errors import one_line
from vitrail.files import write_json

FIGURE_12 = ("B/32", "B/16", "L/32", "L/16", "H/14", "R50x1", "R50x2", "R152x4")
"""Models of the paper's figure, measured at the first five sizes."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
DEPTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48)

CONDITIONS = ("device", "precision", "hardware", "torch", "threads", "mode")

Row = tuple[str, str, dict[str, Any]]
"""The curve, the model and the options of one measurement."""


def rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """All measurements, the most important first."""
    models, sizes = arguments.models, arguments.sizes
    side = 224 if 224 in sizes else sizes[-1]
    shared = {"device": arguments.device, "seconds": arguments.seconds}
    batches = [batch for batch in BATCHES if batch <= arguments.batch]
    for train in (False, True):
        suffix = "-train" if train else ""
        for model in models:
            for size in sizes:
                yield f"size{suffix}", model, shared | {"sizes": (size,), "train": train}
        for model in models:
            options = {"sizes": (side,), "batches": tuple(batches), "train": train}
            yield f"batch{suffix}", model, shared | options
        for depth in DEPTHS:
            options = {"sizes": (side,), "depths": (depth,), "batches": (batches[-1] // 4 or 1,)}
            yield f"depth{suffix}", models[0], shared | options | {"train": train}
    for model in arguments.figure:
        for size in sizes[:5]:
            yield "figure12", model, shared | {"sizes": (size,)}


def measured(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """What `vitrail benchmark` finds; what fails is a result, too."""
    try:
        return vitrail.benchmark([model], **options)
    except (vitrail.VitrailError, RuntimeError) as error:
        row = {"model": model, "size": options["sizes"][0], "error": one_line(error)}
        return {"results": [row | {"depths": list(options.get("depths", ()))}]}


def on_processes(model: str, processes: int, batch: int, arguments: argparse.Namespace) -> Any:
    """A training step on so many devices, or on a CPU on so many cores."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words += ["-m", "vitrail", "benchmark", model, "--json", "--train", "--device"]
    words += [arguments.device, "--batches", str(batch * processes)]
    words += ["--sizes", str(arguments.sizes[0]), "--seconds", str(arguments.seconds)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
        return {"results": [{"model": model, "processes": processes, "error": lines[:1]}]}
    found = json.loads(done.stdout.splitlines()[-1])
    return found | {"results": [row | {"processes": processes} for row in found["results"]]}


class Curves:
    """The curves so far, each also in its file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, dict[str, Any]] = {}

    def add(self, curve: str, found: dict[str, Any]) -> None:
        """Append rows to a curve, and write it."""
        before = self.results.get(curve, {"command": shlex.join(["python", *sys.argv])})
        known = {key: found[key] for key in CONDITIONS if key in found}
        results = [*before.get("results", ()), *found["results"]]
        self.results[curve] = before | known | {"results": results}
        write_json(self.folder / f"{curve}.json", self.results[curve])


def run(arguments: argparse.Namespace) -> None:
    """Measure until the time is up."""
    start, curves = time.monotonic(), Curves(arguments.out)

    def passed() -> float:
        return time.monotonic() - start

    for curve, model, options in rows(arguments):
        if passed() > 60 * arguments.minutes:
            return
        found = measured(model, options)
        curves.add(curve, found)
        row = found["results"][0]
        note = row.get("error") or f"{row['images_per_second']:,.0f} images/s"
        print(
            f"{passed():6.0f} s  {curve:12} {model:8} {options['sizes'][0]:5}  {note}", flush=True
        )
    devices = torch.cuda.device_count() if arguments.device != "cpu" else 0
    counts = [n for n in (1, 2, 4, 8, 16) if n <= (devices or cores())]
    for processes in counts if len(counts) > 1 else ():
        if passed() < 60 * arguments.minutes:
            curves.add("processes", on_processes(arguments.models[0], processes, 32, arguments))


def main() -> None:
    """Read the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON files")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each row")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--models", nargs="+", default=["B/16", "Ti/16", "L/16"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128, 224, 384, 512, 768, 1024])
    parser.add_argument("--figure", nargs="*", default=FIGURE_12, help="models of Figure 12")
    parser.add_argument("--batch", type=int, default=1024, help="the largest of the batch curves")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
