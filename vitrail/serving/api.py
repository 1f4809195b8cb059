"""The questions that a server answers, one function each."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitrail.errors import did_you_mean
from vitrail.serving import parameters
from vitrail.serving.batching import RESTARTING, Batcher
from vitrail.serving.limits import Limits, RequestError, busy
from vitrail.serving.maps import Wanted, drawn
from vitrail.serving.metrics import Metrics
from vitrail.serving.pictures import Prepared, prepare
from vitrail.serving.served import Answer, Question, Served
from vitrail.serving.uploads import Bodies, Upload, split


@dataclass(frozen=True)
class Answered:
    """Pictures of one request with their answers and times."""

    uploads: Sequence[Upload]
    prepared: Sequence[Prepared]
    answers: Sequence[Answer]
    decoding: float
    """Seconds."""
    thinking: float
    """Seconds, those in the queue included."""

    def report(self, model: str, **more: Any) -> dict[str, Any]:
        """What every answer begins with."""
        times = {"decode": 1000 * self.decoding, "model": 1000 * self.thinking}
        return {
            "model": model,
            "milliseconds": {name: round(value, 2) for name, value in times.items()},
            **more,
        }


@dataclass
class Service:
    """Models, their queues, and all that requests share."""

    models: dict[str, Served]
    limits: Limits
    metrics: Metrics = field(default_factory=Metrics)
    batchers: dict[str, Batcher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bodies = Bodies(self.limits)
        # Each may hold the largest picture that is accepted: not more of them than can run at once.
        self.decoders = ThreadPoolExecutor(max(2, os.cpu_count() or 1))
        for name, one in self.models.items():
            done = partial(self.metrics.observe_batch, name)
            batcher = self.batchers[name] = Batcher(one.answer, self.limits, done)
            self.metrics.watch_queue(name, partial(getattr, batcher, "reserved"))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Queues are emptied as long as the block lasts; requests must have ended before it."""
        tasks = [asyncio.create_task(batcher.run()) for batcher in self.batchers.values()]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for batcher in self.batchers.values():
            batcher.close()
        self.decoders.shutdown()

    def model(self, request: Request) -> Served:
        """The model that a request names, or the first."""
        name = request.query_params.get("model", next(iter(self.models)))
        if name not in self.models:
            hint = did_you_mean(name, self.models) or f"; there is {', '.join(self.models)}"
            raise RequestError(404, "unknown_model", f"no model '{name[:80]}'{hint}")
        return self.models[name]

    async def ask(
        self, request: Request, one: Served, wanted: Wanted | None = None, most: int = 0
    ) -> Answered:
        """All pictures of a request, decoded beside the model and answered by it."""
        batcher = self.batchers[one.name]
        kind = request.headers.get("content-type", "")
        async with self.bodies.body(request) as body:
            try:
                async with asyncio.timeout(self.limits.seconds):
                    uploads = await self.aside(split, kind, body, self.limits)
                    if most and len(uploads) > most:
                        told = f"the request has {len(uploads)} pictures; expected {most}"
                        raise RequestError(400, "too_many_images", told)
                    with batcher.room(len(uploads)):
                        return await self.answers(batcher, one, uploads, wanted)
            except TimeoutError:
                told = f"no answer within {self.limits.seconds:g} s"
                raise RequestError(504, "timeout", told) from None

    async def answers(
        self, batcher: Batcher, one: Served, uploads: Sequence[Upload], wanted: Wanted | None
    ) -> Answered:
        """Decoding, then the model; how long each took."""
        start = time.perf_counter()
        prepared = await asyncio.gather(
            *(self.aside(prepare, up, one.preprocess, self.limits.pixels) for up in uploads)
        )
        between = time.perf_counter()
        answers = await asyncio.gather(
            *(batcher.answer(Question(image.pixels, wanted)) for image in prepared)
        )
        end = time.perf_counter()
        return Answered(uploads, prepared, answers, between - start, end - between)

    def aside(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        """Work that would hold up other requests, in a thread."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self.decoders, function, *arguments)

    async def predict(self, request: Request) -> Response:
        """The most likely classes of each picture."""
        parameters.refuse_unknown(request, ("model", "top"))
        top = parameters.number(request, "top", 5, least=1)
        one = self.model(request)
        if one.model.head is None:
            raise RequestError(404, "no_classes", f"{one.name} has no classes; use /embed")
        asked = await self.ask(request, one)
        results = [
            {"name": upload.name, "top": one.top(answer, top)}
            for upload, answer in zip(asked.uploads, asked.answers, strict=True)
        ]
        return JSONResponse(asked.report(one.name, results=results))

    async def embed(self, request: Request) -> Response:
        """The vector of each picture that the head reads."""
        parameters.refuse_unknown(request, ("model",))
        one = self.model(request)
        asked = await self.ask(request, one)
        results = [
            {"name": upload.name, "embedding": [float(f"{x:.7g}") for x in answer.features]}
            for upload, answer in zip(asked.uploads, asked.answers, strict=True)
            if answer.features is not None
        ]
        return JSONResponse(asked.report(one.name, results=results))

    async def attention(self, request: Request) -> Response:
        """Maps of one picture, as numbers."""
        parameters.refuse_unknown(request, ("model", "layer", "head", "patch"))
        wanted = Wanted(
            parameters.number(request, "layer", "rollout", words=("rollout", "all")),
            parameters.number(request, "head", None, words=("mean",)),
            parameters.number(request, "patch", None, words=("all",)),
        )
        one = self.model(request)
        wanted.check(one.shape)
        asked = await self.ask(request, one, wanted, most=1)

        def write() -> bytes:
            told = {"name": asked.uploads[0].name, "crop": seen(one, asked.prepared[0])}
            maps = [each.to_dict() for each in asked.answers[0].maps]
            return json.dumps(asked.report(one.name, **told, maps=maps)).encode()

        return Response(await self.aside(write), media_type="application/json")

    async def attention_picture(self, request: Request) -> Response:
        """One map of one picture, laid over it."""
        parameters.refuse_unknown(request, ("model", "layer", "head", "patch"))
        wanted = Wanted(
            parameters.number(request, "layer", "rollout", words=("rollout",)),
            parameters.number(request, "head", "mean", words=("mean",)),
            parameters.number(request, "patch", None),
        )
        one = self.model(request)
        wanted.check(one.shape)
        asked = await self.ask(request, one, wanted, most=1)
        image, maps = asked.prepared[0], asked.answers[0].maps
        png = await self.aside(drawn, maps[0], image.pixels, one.preprocess, one.shape)
        return Response(png, media_type="image/png")

    async def describe(self, request: Request) -> Response:
        """One model with the names of its classes."""
        parameters.refuse_unknown(request, ("model",))
        return JSONResponse(self.model(request).describe())

    async def listing(self, request: Request) -> Response:
        """All models."""
        parameters.refuse_unknown(request, ())
        found = [one.describe(labels=False) for one in self.models.values()]
        return JSONResponse({"models": found})

    async def health(self, request: Request) -> Response:
        """That the server is there and computes, and how much it has to do."""
        parameters.refuse_unknown(request, ())
        if not all(batcher.healthy for batcher in self.batchers.values()):
            raise busy(RESTARTING)
        waiting = {name: batcher.reserved for name, batcher in self.batchers.items()}
        return JSONResponse({"status": "ok", "waiting": waiting})

    async def figures(self, request: Request) -> Response:
        """Counters for Prometheus."""
        parameters.refuse_unknown(request, ())
        media_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self.metrics.text(), media_type=media_type)


def seen(one: Served, image: Prepared) -> list[float]:
    """The part of a picture that lies in patches: pixels beyond the last whole one are not seen."""
    left, top, right, bottom = image.crop
    rows, columns = (side * one.shape.pixels for side in one.shape.grids[0])
    return [
        left,
        top,
        left + (right - left) * columns / one.preprocess.size[1],
        top + (bottom - top) * rows / one.preprocess.size[0],
    ]
