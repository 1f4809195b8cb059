"""The endpoints of the JSON API, with their query parameters as arguments."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitrail.data.decode import quiet
from vitrail.errors import did_you_mean
from vitrail.serving.batching import RESTARTING, Batcher
from vitrail.serving.limits import Limits, RequestError, busy
from vitrail.serving.maps import MapQuery
from vitrail.serving.metrics import Metrics
from vitrail.serving.models import Prediction, PredictionRequest, ServedModel
from vitrail.serving.requests import BodyReader, PreparedImage, Upload, prepare, split_body


@dataclass(frozen=True)
class _BatchResult:
    """The images of one request with their predictions."""

    model: ServedModel
    images: Sequence[PreparedImage]
    predictions: Sequence[Prediction]
    seconds: dict[str, float]
    """Of decoding, and of the model including its queue."""

    def report(self, **more: Any) -> dict[str, Any]:
        """The JSON of a response: model, times, and the results of the endpoint."""
        times = {name: round(1000 * seconds, 2) for name, seconds in self.seconds.items()}
        return {"model": self.model.name, "milliseconds": times, **more}


class Service:
    """The models, their queues, and what requests share."""

    def __init__(self, models: Sequence[ServedModel], limits: Limits) -> None:
        self.models = {model.name: model for model in models}
        self.metrics = Metrics()
        self._limits = limits
        self._bodies = BodyReader(limits)
        # Each thread may hold the largest accepted image, so there are only as many as can run.
        self._threads = ThreadPoolExecutor(max(2, os.cpu_count() or 1))
        self._batchers = {
            name: Batcher(model.predict, limits, partial(self.metrics.observe_batch, name))
            for name, model in self.models.items()
        }
        for name, batcher in self._batchers.items():
            self.metrics.watch_queue(name, partial(getattr, batcher, "reserved"))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Batches are computed inside the block; all requests must have ended before it does."""
        tasks = [asyncio.create_task(batcher.run()) for batcher in self._batchers.values()]
        # Decoding silences Pillow's warnings for all threads at once, hence here as well.
        with quiet():
            yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for batcher in self._batchers.values():
            batcher.close()
        self._threads.shutdown()

    async def predict(self, request: Request, model: str | None = None, top: int = 5) -> Response:
        served = self._model(model)
        if served.model.head is None:
            raise RequestError(404, "no_classes", f"{served.name} has no classes; use /embed")
        result = await self._process(request, served)
        rows = [
            {"name": image.name, "top": served.top(one, top)}
            for image, one in zip(result.images, result.predictions, strict=True)
        ]
        return JSONResponse(result.report(results=rows))

    async def embed(self, request: Request, model: str | None = None) -> Response:
        served = self._model(model)
        if not served.embeds:
            message = f"{served.name} is an exported file, which gives no features; use /predict"
            raise RequestError(404, "no_features", message)
        result = await self._process(request, served)
        rows = [
            {"name": image.name, "embedding": [float(f"{x:.7g}") for x in one.features]}
            for image, one in zip(result.images, result.predictions, strict=True)
            if one.features is not None
        ]
        return JSONResponse(result.report(results=rows))

    async def attention(self, request: Request, model: str | None = None, **query: Any) -> Response:
        served = self._model(model)
        result = await self._process(request, served, MapQuery(**query))

        def write() -> bytes:
            image, (height, width) = result.images[0], served.attention.visible
            left, top, right, bottom = image.crop
            right = left + (right - left) * width / served.preprocess.size[1]
            bottom = top + (bottom - top) * height / served.preprocess.size[0]
            crop = [left, top, right, bottom]
            maps = [one.to_dict() for one in result.predictions[0].maps]
            return json.dumps(result.report(name=image.name, crop=crop, maps=maps)).encode()

        return Response(await self._in_thread(write), media_type="application/json")

    async def attention_png(
        self, request: Request, model: str | None = None, head: Any = "mean", **query: Any
    ) -> Response:
        served = self._model(model)
        result = await self._process(request, served, MapQuery(head=head, **query))
        draw, pixels = result.predictions[0].maps[0].overlay_png, result.images[0].pixels
        png = await self._in_thread(draw, pixels, served.preprocess, served.attention)
        return Response(png, media_type="image/png")

    async def describe_model(self, _request: Request, model: str | None = None) -> Response:
        return JSONResponse(self._model(model).describe())

    async def list_models(self, _request: Request) -> Response:
        models = [model.describe(labels=False) for model in self.models.values()]
        return JSONResponse({"models": models})

    async def health(self, _request: Request) -> Response:
        if not all(batcher.healthy for batcher in self._batchers.values()):
            raise busy(RESTARTING)
        waiting = {name: batcher.reserved for name, batcher in self._batchers.items()}
        return JSONResponse({"status": "ok", "waiting": waiting})

    async def prometheus(self, _request: Request) -> Response:
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(), media_type=media_type)

    def _model(self, name: str | None) -> ServedModel:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            hint = did_you_mean(name, self.models) or f"; expected {' or '.join(self.models)}"
            raise RequestError(404, "unknown_model", f"no model '{name[:80]}'{hint}")
        return self.models[name]

    async def _process(
        self, request: Request, model: ServedModel, query: MapQuery | None = None
    ) -> _BatchResult:
        """Reads, decodes and predicts all images of a request; for maps, only one is accepted."""
        if query is not None:
            query.check(model.attention)
        content_type = request.headers.get("content-type", "")
        batcher, limits = self._batchers[model.name], self._limits
        async with self._bodies.body(request) as body:
            try:
                async with asyncio.timeout(limits.seconds):
                    uploads = await self._in_thread(split_body, content_type, body, limits)
                    if query is not None and len(uploads) > 1:
                        message = f"the request has {len(uploads)} images; expected 1"
                        raise RequestError(400, "too_many_images", message)
                    with batcher.reserve(len(uploads)):
                        return await self._predict_uploads(model, uploads, query)
            except TimeoutError:
                message = f"the request took longer than {limits.seconds:g} s"
                raise RequestError(504, "timeout", message) from None

    async def _predict_uploads(
        self, model: ServedModel, uploads: Sequence[Upload], query: MapQuery | None
    ) -> _BatchResult:
        batcher, pixels = self._batchers[model.name], self._limits.pixels
        start = time.perf_counter()
        images = await asyncio.gather(
            *(self._in_thread(prepare, upload, model.preprocess, pixels) for upload in uploads)
        )
        decoded = time.perf_counter()
        predictions = await asyncio.gather(
            *(batcher.submit(PredictionRequest(image.pixels, query)) for image in images)
        )
        seconds = {"decode": decoded - start, "model": time.perf_counter() - decoded}
        return _BatchResult(model, images, predictions, seconds)

    def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Runs what would block other requests in the event loop."""
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)
