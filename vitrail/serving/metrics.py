"""Request and batch metrics in Prometheus's text format."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


class _Registry(CollectorRegistry):
    """Leaves out the `_created` series: they double the output, and prometheus_client can only
    disable them for the whole process, which may have metrics of its own."""

    def collect(self) -> Iterator[Metric]:
        for metric in super().collect():
            metric.samples = [one for one in metric.samples if not one.name.endswith("_created")]
            yield metric


class Metrics:
    """The metrics of one application, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = _Registry()
        path, model = ("path",), ("model",)
        common: dict[str, Any] = {"namespace": "vitrail", "registry": self._registry}
        seconds, sizes = common | {"buckets": _SECONDS}, common | {"buckets": _SIZES}
        self._requests = Counter(
            "requests", "Requests by path and status.", ("path", "status"), **common
        )
        self._waiting = Gauge("images_waiting", "Images without a prediction yet.", model, **common)
        self._request_seconds = Histogram(
            "request_seconds", "From the request to its response.", path, **seconds
        )
        self._batch_size = Histogram("batch_images", "Images in one batch.", model, **sizes)
        self._batch_seconds = Histogram(
            "batch_seconds", "Time of one batch in the model.", model, **seconds
        )

    def observe_request(self, path: str, status: int, seconds: float) -> None:
        self._requests.labels(path, str(status)).inc()
        self._request_seconds.labels(path).observe(seconds)

    def observe_batch(self, model: str, size: int, seconds: float) -> None:
        self._batch_size.labels(model).observe(size)
        self._batch_seconds.labels(model).observe(seconds)

    def watch_queue(self, model: str, waiting: Callable[[], float]) -> None:
        """`waiting` is called for each scrape."""
        self._waiting.labels(model).set_function(waiting)

    def text(self) -> bytes:
        return generate_latest(self._registry)
