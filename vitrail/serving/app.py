"""The web application: routes, who may use them, and what errors look like."""

import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.data.decode import quiet
from vitrail.errors import one_line
from vitrail.serving import page, samples
from vitrail.serving.api import Service
from vitrail.serving.limits import Limits, RequestError
from vitrail.serving.metrics import Metrics
from vitrail.serving.openapi import description
from vitrail.serving.parameters import refuse_unknown
from vitrail.serving.served import Served

OPEN = ("/", "/health", "/openapi.json")
"""What needs no token: nothing of it tells about a model or a picture."""
HOST = re.compile(rb"(?:\[([0-9a-f:.]+)\]|([0-9a-z._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
"""A Host header: an IPv6 address in brackets, or another address or name; perhaps a port."""


def application(
    models: Sequence[Served],
    limits: Limits | None = None,
    *,
    token: str = "",
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> Starlette:
    """All routes for some models, to be run by any ASGI server.

    With a token, requests must carry it. With `hosts`, they must be addressed to one of these
    names: a foreign site whose name leads here is refused. Only pages of this server, and of
    `origins` (as "https://example.org"), may use the models.
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

    gate = Middleware(
        Gate, service.metrics, token=token, hosts=tuple(hosts), origins=tuple(origins)
    )
    # First, since a browser asks without the token whether it may send one.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type"],
    )
    return Starlette(
        routes=[*routes(service), Route("/openapi.json", openapi)],
        middleware=[cors, gate] if origins else [gate],
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
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        token: str = "",
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        self.app, self.metrics = app, metrics
        self.token, self.hosts = token.encode(), hosts
        self.origins = [origin.encode() for origin in origins]

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
            objection = self.objection(scope)
            if objection is None:
                await self.app(scope, receive, counted)
            else:
                await answer(objection)(scope, receive, counted)
        finally:
            # Paths that do not exist are counted as one: there are too many of them.
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else "other"
            self.metrics.request(path, status, time.perf_counter() - start)

    def objection(self, scope: Scope) -> RequestError | None:
        """Why a request may not come in; None if it may.

        Only what was sent decides: the framework's URL is built from Host and path, and has another
        name where it cannot parse Host.
        """
        name = host_name(scope)
        if name is None:
            return RequestError(403, "wrong_host", "expected one Host header, as localhost:8000")
        if self.hosts and name not in self.hosts:
            message = f"this server answers to {', '.join(self.hosts)} alone"
            return RequestError(403, "wrong_host", message)
        if self.is_foreign(scope):
            message = "a page of another site sent this; allow it with --origin https://SITE"
            return RequestError(403, "foreign_origin", message)
        if not self.token or scope["path"] in OPEN:
            return None
        kind, _, given = (only(values(scope, b"authorization")) or b"").partition(b" ")
        if kind.lower() == b"bearer" and secrets.compare_digest(given.strip(), self.token):
            return None
        message = "this server needs its token, as `Authorization: Bearer TOKEN`"
        return RequestError(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})

    def is_foreign(self, scope: Scope) -> bool:
        """Whether a page of another site would make the server compute; other clients never do.

        GET computes nothing, and browsers show its answer to nobody else. The rest follows Go's
        `CrossOriginProtection`: Sec-Fetch-Site where there is one, since a proxy may change Host.
        """
        origin = values(scope, b"origin")
        if scope["method"] in ("GET", "HEAD") or only(origin) in self.origins:
            return False
        if site := values(scope, b"sec-fetch-site"):
            return only(site) not in (b"same-origin", b"none")
        host = b"".join(values(scope, b"host"))
        return bool(origin) and (only(origin) or b"").lower().partition(b"://")[2] != host.lower()


def values(scope: Scope, name: bytes) -> list[bytes]:
    """Every value of a header, as it was sent."""
    return [value for key, value in scope["headers"] if key == name]


def only(given: list[bytes]) -> bytes | None:
    """The value of a header that was sent exactly once."""
    return given[0] if len(given) == 1 else None


def host_name(scope: Scope) -> str | None:
    """The host that a request is addressed to; None if Host is absent, malformed or repeated."""
    match = HOST.fullmatch(only(values(scope, b"host")) or b"")
    return (match[1] or match[2]).decode().lower() if match else None


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
    path = one_line(request.scope["path"])[:80]
    told = {
        404: f"there is no {path}; /openapi.json lists what there is",
        405: f"{path} takes {(error.headers or {}).get('Allow', 'no such')}",
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
