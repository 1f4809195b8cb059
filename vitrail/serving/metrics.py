"""What a server has done so far, in the text format that Prometheus reads."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
Labels = tuple[tuple[str, str], ...]


class Histogram:
    """How often a value was at most so large."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.total = bounds, 0.0
        self.counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        """One more value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        """Buckets that each contain the smaller ones, sum and count."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            shown = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f"{name}_bucket{written((*labels, ('le', shown)))} {below}"
        yield f"{name}_sum{written(labels)} {self.total:.6f}"
        yield f"{name}_count{written(labels)} {below}"


class Metrics:
    """Counters and histograms; changed in the event loop alone."""

    def __init__(self) -> None:
        self.requests: dict[Labels, int] = defaultdict(int)
        self.latency: dict[Labels, Histogram] = defaultdict(lambda: Histogram(SECONDS))
        self.batches: dict[Labels, Histogram] = defaultdict(lambda: Histogram(SIZES))
        self.computing: dict[Labels, Histogram] = defaultdict(lambda: Histogram(SECONDS))

    def request(self, path: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self.requests[(("path", path), ("status", str(status)))] += 1
        self.latency[(("path", path),)].add(seconds)

    def batch(self, model: str, size: int, seconds: float) -> None:
        """A batch went through a model."""
        self.batches[(("model", model),)].add(float(size))
        self.computing[(("model", model),)].add(seconds)

    def text(self, waiting: dict[str, int]) -> str:
        """Everything; `waiting` are the pictures of each model that have no answer yet."""
        return "\n".join(self.lines(waiting)) + "\n"

    def lines(self, waiting: dict[str, int]) -> Iterator[str]:
        """Line by line."""
        yield from head("vitrail_requests_total", "counter", "Requests by path and status.")
        for labels, count in self.requests.items():
            yield f"vitrail_requests_total{written(labels)} {count}"
        yield from head("vitrail_pictures_waiting", "gauge", "Pictures without an answer yet.")
        for model, count in waiting.items():
            yield f"vitrail_pictures_waiting{written((('model', model),))} {count}"
        for name, told, rows in (
            ("vitrail_request_seconds", "From the request to its answer.", self.latency),
            ("vitrail_batch_pictures", "Pictures in one batch.", self.batches),
            ("vitrail_batch_seconds", "Time of one batch in the model.", self.computing),
        ):
            yield from head(name, "histogram", told)
            for labels, histogram in rows.items():
                yield from histogram.lines(name, labels)


def head(name: str, kind: str, told: str) -> tuple[str, str]:
    """The two lines above the values of a metric."""
    return f"# HELP {name} {told}", f"# TYPE {name} {kind}"


def written(labels: Labels) -> str:
    """Labels in braces, quoted."""
    if not labels:
        return ""
    escaped = (
        (key, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for key, value in labels
    )
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}"
