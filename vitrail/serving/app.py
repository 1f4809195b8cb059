"""The web application: routes, access control, and error responses."""

import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitrail.errors import one_line
from vitrail.serving import page
from vitrail.serving.api import Service
from vitrail.serving.limits import Limits, RequestError
from vitrail.serving.metrics import Metrics
from vitrail.serving.models import ServedModel
from vitrail.serving.openapi import OPEN_PATHS, describe_api
from vitrail.serving.requests import parse_parameters

_HOST = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([0-9a-z._-]+))(?::[0-9]{1,5})?", re.IGNORECASE | re.ASCII
)
"""A Host header: an IPv6 address in brackets, or another address or name; perhaps a port."""


def application(
    models: Sequence[ServedModel],
    limits: Limits | None = None,
    *,
    token: str = "",
    hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
) -> Starlette:
    """An ASGI application that serves some models.

    With a token, requests must carry it. With `hosts`, they must be addressed to one of these
    names, so that another site's name that resolves to this server is refused. Only pages of this
    server and of `origins` (such as "https://example.org") may use the models.
    """
    limits = limits or Limits()
    service = Service(models, limits)
    description = describe_api(limits, tuple(service.models), secured=bool(token))
    middleware = [Middleware(_Gate, service.metrics, token, tuple(hosts), tuple(origins))]
    if origins:
        # First, since a browser asks without the token whether it may send one.
        allowed: dict[str, Any] = {
            "allow_origins": origins,
            "allow_methods": ["GET", "POST"],
            "allow_headers": ["Authorization", "Content-Type"],
        }
        middleware.insert(0, Middleware(CORSMiddleware, **allowed))
    errors = (RequestError, HTTPException, ClientDisconnect, Exception)
    return Starlette(
        routes=_routes(service, description),
        middleware=middleware,
        exception_handlers=dict.fromkeys(errors, _handle_error),
        lifespan=lambda _app: service.running(),
    )


def _routes(service: Service, description: dict[str, Any]) -> list[Route]:
    """The endpoints, with the methods and query parameters of the OpenAPI description."""

    async def openapi(_request: Request) -> Response:
        return JSONResponse(description)

    endpoints = {
        "/predict": service.predict,
        "/attention": service.attention,
        "/attention.png": service.attention_png,
        "/embed": service.embed,
        "/model": service.describe_model,
        "/models": service.list_models,
        "/health": service.health,
        "/metrics": service.prometheus,
        "/samples": page.list_samples,
        "/samples/{name}": page.sample,
        "/": page.page,
        "/openapi.json": openapi,
    }
    return [_route(path, call, description["paths"][path]) for path, call in endpoints.items()]


def _route(
    path: str, endpoint: Callable[..., Awaitable[Response]], description: dict[str, Any]
) -> Route:
    ((method, operation),) = description.items()
    parameters = operation.get("parameters", ())

    async def call(request: Request) -> Response:
        return await endpoint(request, **parse_parameters(request, parameters))

    return Route(path, call, methods=[method.upper()])


@dataclass
class _Gate:
    """Refuses requests that are not allowed, and counts all of them."""

    app: ASGIApp
    metrics: Metrics
    token: str
    hosts: Sequence[str]
    origins: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def send_counted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            error = self._refusal(scope)
            app = self.app if error is None else error_response(error)
            await app(scope, receive, send_counted)
        finally:
            # Unknown paths share a label: there could be any number of them.
            route = scope.get("route")
            path = route.path if isinstance(route, Route) else "other"
            self.metrics.observe_request(path, status, time.perf_counter() - start)

    def _refusal(self, scope: Scope) -> RequestError | None:
        """Why a request is refused; None if it is allowed.

        This uses the headers and path as sent: Starlette builds its URL from both, and falls back
        to another name if it cannot parse Host.
        """
        headers = Headers(scope=scope)
        host = _HOST.fullmatch(_only(headers, "host"))
        if host is None:
            return RequestError(403, "wrong_host", "expected one Host header like localhost:8000")
        if self.hosts and (host[1] or host[2]).lower() not in self.hosts:
            message = f"wrong Host; expected {' or '.join(self.hosts)}"
            return RequestError(403, "wrong_host", message)
        if scope["method"] not in ("GET", "HEAD") and self._is_foreign(headers):
            message = "request from a page of another site; allow it with --origin https://SITE"
            return RequestError(403, "foreign_origin", message)
        if not self.token or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, given = _only(headers, "authorization").partition(" ")
        # Bytes, since strings are compared in constant time only if they are ASCII.
        sent, token = given.encode("latin-1").strip(), self.token.encode()
        if scheme.lower() == "bearer" and secrets.compare_digest(sent, token):
            return None
        message = "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`"
        return RequestError(401, "unauthorized", message, {"WWW-Authenticate": "Bearer"})

    def _is_foreign(self, headers: Headers) -> bool:
        """Whether a page of another site sent a request; GET is allowed, as it computes nothing.

        Follows Go's `CrossOriginProtection`: Sec-Fetch-Site where present, since a proxy may
        change Host.
        """
        origin = _only(headers, "origin")
        if origin in self.origins:
            return False
        if "sec-fetch-site" in headers:
            return _only(headers, "sec-fetch-site") not in ("same-origin", "none")
        host = headers["host"].lower()
        return "origin" in headers and origin.lower().partition("://")[2] != host


def _only(headers: Headers, name: str) -> str:
    """The value of a header; empty if it is absent or repeated."""
    values = headers.getlist(name)
    return values[0] if len(values) == 1 else ""


def error_response(error: RequestError) -> Response:
    """The JSON that every error is sent as."""
    content = {"error": {"code": error.code, "message": error.message}}
    return JSONResponse(content, status_code=error.status, headers=error.headers)


async def _handle_error(request: Request, error: Exception) -> Response:
    return error_response(_to_request_error(request, error))


def _to_request_error(request: Request, error: Exception) -> RequestError:
    match error:
        case RequestError():
            return error
        case ClientDisconnect():  # nobody reads this
            return RequestError(400, "gone", "the connection was closed")
        case HTTPException():  # Starlette's own: unknown paths and methods
            path, headers = one_line(request.scope["path"])[:80], error.headers or {}
            code, message = {
                404: ("not_found", f"no such path: {path}; /openapi.json lists all of them"),
                405: ("wrong_method", f"{path} accepts {headers.get('Allow', 'no such method')}"),
            }.get(error.status_code, ("bad_request", error.detail))
            return RequestError(error.status_code, code, message, headers)
    # The log has the details, and the client has no use for them.
    return RequestError(500, "internal", "internal error; see the server's log")
