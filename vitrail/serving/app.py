"""The web application: routes, who may use them, and what errors look like."""

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.data.preprocessing import quiet
from vitrail.serving import page, samples
from vitrail.serving.api import Service
from vitrail.serving.limits import Limits, RequestError
from vitrail.serving.metrics import Metrics
from vitrail.serving.openapi import description
from vitrail.serving.parameters import refuse_unknown
from vitrail.serving.served import Served

OPEN = ("/", "/health", "/openapi.json")
"""What needs no token: nothing of it tells about a model or a picture."""


def application(
    models: Sequence[Served],
    limits: Limits | None = None,
    *,
    token: str = "",
    hosts: Sequence[str] = (),
) -> Starlette:
    """All routes for some models, to be run by any ASGI server.

    With a token, requests must carry it. With `hosts`, they must be addressed to one of these
    names: a foreign site whose name leads here is refused.
    """
    limits = limits or Limits()
    service = Service({one.name: one for one in models}, limits)
    described = description(limits, tuple(service.models), secured=bool(token))

    async def openapi(request: Request) -> Response:
        refuse_unknown(request, ())
        return JSONResponse(described)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        # Decoding sets Pillow's warnings aside for all threads at once, hence here as well.
        with quiet():
            async with service.running():
                yield

    return Starlette(
        routes=[*routes(service), Route("/openapi.json", openapi)],
        middleware=[Middleware(Gate, service.metrics, token=token, hosts=tuple(hosts))],
        exception_handlers={
            RequestError: refused,
            HTTPException: unknown,
            ClientDisconnect: gone,
            Exception: failed,
        },
        lifespan=lifespan,
    )


def routes(service: Service) -> list[Route]:
    """Every path but the description of them."""
    return [
        Route("/predict", service.predict, methods=["POST"]),
        Route("/attention", service.attention, methods=["POST"]),
        Route("/attention.png", service.attention_picture, methods=["POST"]),
        Route("/embed", service.embed, methods=["POST"]),
        Route("/model", service.describe),
        Route("/models", service.listing),
        Route("/health", service.health),
        Route("/metrics", service.figures),
        Route("/samples", samples.listing),
        Route("/samples/{name}", samples.picture),
        Route("/", page.show),
    ]


class Gate:
    """Lets in who may come in, and counts everybody."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, *, token: str = "", hosts: Sequence[str] = ()
    ) -> None:
        self.app, self.metrics = app, metrics
        self.token, self.hosts = token.encode(), hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            objection = self.objection(Request(scope))
            if objection is None:
                await self.app(scope, receive, counted)
            else:
                await answer(objection)(scope, receive, counted)
        finally:
            # Paths that do not exist are counted as one: there are too many of them.
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else "other"
            self.metrics.request(path, status, time.perf_counter() - start)

    def objection(self, request: Request) -> RequestError | None:
        """Why a request may not come in; None if it may."""
        if self.hosts and (request.url.hostname or "") not in self.hosts:
            told = f"this server answers to {', '.join(self.hosts)} alone"
            return RequestError(403, "wrong_host", told)
        if not self.token or request.url.path in OPEN:
            return None
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self.token):
            return None
        told = "this server needs its token, as `Authorization: Bearer TOKEN`"
        return RequestError(401, "unauthorized", told, {"WWW-Authenticate": "Bearer"})


def answer(error: RequestError) -> Response:
    """An error as every client gets it."""
    told: dict[str, Any] = {"error": {"code": error.code, "message": error.message}}
    return JSONResponse(told, status_code=error.status, headers=error.headers)


async def refused(_request: Request, error: Exception) -> Response:
    """A request that asks for what cannot be."""
    assert isinstance(error, RequestError)
    return answer(error)


async def unknown(request: Request, error: Exception) -> Response:
    """A path or method that does not exist."""
    assert isinstance(error, HTTPException)
    codes = {404: "not_found", 405: "wrong_method"}
    told = {
        404: f"there is no {request.url.path[:80]}; /openapi.json lists what there is",
        405: f"{request.url.path[:80]} takes {(error.headers or {}).get('Allow', 'no such')}",
    }
    code = codes.get(error.status_code, "bad_request")
    message = told.get(error.status_code, error.detail)
    return answer(RequestError(error.status_code, code, message, error.headers))


async def gone(_request: Request, _error: Exception) -> Response:
    """A client that closed its connection half-way; nobody reads this."""
    return answer(RequestError(400, "gone", "the connection was closed"))


async def failed(_request: Request, _error: Exception) -> Response:
    """A fault of ours: the log has the details, the client has no use for them."""
    return answer(RequestError(500, "internal", "the server failed; its log says why"))
