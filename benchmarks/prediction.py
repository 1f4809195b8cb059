"""Throughput of `vitrail predict` on a folder beside that of the bare model, in one run.

    python benchmarks/prediction.py MODEL FOLDER [--pictures 240] [--rounds 5] [--workers 0 1 2]

The bare model gets tensors that are ready, in the batch that suits it best of those tried, with all
of torch's threads; or, where that is faster, from as many threads as there are cores, each with one
of torch's. Prediction reads, decodes and resizes files as well. Rounds take turns, so that whatever
else the machine does falls on both; the first round of each is left out. Wall-clock time decides on
an idle machine; on a shared one the ratio of processor time is the steadier figure.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

import vitrail
from vitrail.devices import cores, limited_threads, processor
from vitrail.evaluation.predict import find_images, predict
from vitrail.model import Classifier

BATCH = 8


def bare(model: Classifier, pixels: torch.Tensor, lanes: int) -> None:
    """The model alone on as many batches as prediction has."""

    def one(part: torch.Tensor) -> None:
        with torch.inference_mode():
            model(part)

    limits = limited_threads(torch.get_num_threads() // lanes)
    with limits, ThreadPoolExecutor(lanes) as pool:
        list(pool.map(one, pixels.split(BATCH)))


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall and of all processors."""
    wall, busy = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - busy


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("--pictures", type=int, default=240, help="0: all of them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0])
    arguments = parser.parse_args()
    model = vitrail.load(arguments.model)
    every = find_images(arguments.folder).names
    step = max(1, len(every) // arguments.pictures) if arguments.pictures else 1
    files = find_images(every[::step][: arguments.pictures or None])
    assert model.preprocess is not None
    some = torch.stack([model.preprocess(path) for path in files.names[:64]])
    pixels = some.repeat(-(-len(files.names) // len(some)), 1, 1, 1)[: len(files.names)]
    works: dict[str, Callable[[], object]] = {
        "bare, one batch at a time": lambda: bare(model, pixels, 1),
        "bare, a batch per core": lambda: bare(model, pixels, cores()),
    }
    for workers in arguments.workers:
        works[f"predict --workers {workers}"] = lambda workers=workers: list(
            predict(model, files, workers=workers, batch=BATCH)
        )
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(arguments.rounds + 1):
        for name, work in works.items():
            times[name].append(timed(work))
    print(f"torch {torch.__version__} · Python {platform.python_version()} · {processor()}")
    print(f"{cores()} cores · {len(files.names)} pictures · {arguments.rounds} rounds")
    best = best_of_bare(times)
    print(f"{'':28}{'images/s':>10}{'of bare':>9}{'ms of CPU':>11}{'of bare':>9}")
    for name, rounds in times.items():
        ratios = [
            [theirs[i] / mine[i] for mine, theirs in zip(rounds[1:], best[1:], strict=True)]
            for i in (0, 1)
        ]
        wall, busy = (statistics.median(one[i] for one in rounds[1:]) for i in (0, 1))
        count = len(files.names)
        told = f"{count / wall:10.1f}{statistics.median(ratios[0]):9.3f}"
        print(f"{name:28}{told}{1e3 * busy / count:11.1f}{statistics.median(ratios[1]):9.3f}")


def best_of_bare(times: dict[str, list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The faster way to use the bare model."""
    ways = [rounds for name, rounds in times.items() if name.startswith("bare")]
    return min(ways, key=lambda rounds: statistics.median(wall for wall, _ in rounds[1:]))


if __name__ == "__main__":
    main()
