"""Limits on connections: their time, their bytes and their number."""

import asyncio
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.errors import VitrailError
from vitrail.serving.app import error_response
from vitrail.serving.limits import Limits, busy

_BACKLOG = 256
"""Connections that wait to be accepted; asyncio accepts as many before any of them is closed."""
_SPARE_FILES = _BACKLOG + 128
"""Open files besides connections: the backlog, models, devices, libraries."""
READ_SIZE = 1 << 14
"""Bytes that are read at once. HTTP is parsed in the event loop, and 16 KiB of one-byte chunks
take 22 ms; asyncio would read 256 KiB."""


class Connection(H11Protocol):
    """uvicorn's connection, closed if its client makes it wait or sends too much."""

    limits = Limits()
    waiting: ClassVar[dict["Connection", None]] = {}
    """Connections that wait for headers or more of a body, longest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.connections:
            self._make_room()
        super().connection_made(transport)
        vars(transport)["max_size"] = READ_SIZE
        self._timer = self.loop.call_later(self.limits.idle, self._expire)
        self._start(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()
        self._received += len(data)
        # A body that is refused before it is read is read nevertheless, so that the client, which
        # is still sending, learns why; but only up to a limit.
        if self._received > 3 * self.limits.body + 2**16:
            self._expire()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Notices when a request begins or ends; more bytes of the same one give no more time."""
        unanswered = self.cycle is not None and not self.cycle.response_complete
        current = self.cycle if unanswered else None
        if current is not self._current:
            self._start(current)
        if current and not current.more_body:
            self.waiting.pop(self, None)

    def _start(self, current: Any) -> None:
        """Starts the clock for a request, or for the headers of the next one."""
        self._current, self._received = current, 0
        self.waiting.pop(self, None)
        self.waiting[self] = None
        self._timer.cancel()
        # The application limits upload and computation; the third share is for sending.
        seconds = 3 * self.limits.seconds if current else self.limits.idle
        self._timer = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Closes the connection once its client has read what was sent, or aborts it."""
        self._timer.cancel()
        self.transport.close()
        self._timer = self.loop.call_later(self.limits.seconds, self.transport.abort)

    def _make_room(self) -> None:
        """Closes the connection that has been waiting longest.

        If new ones were refused instead, anybody who opens many could keep all others out.
        """
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            self.app = _overloaded
        else:
            oldest.transport.abort()
            # The event loop would do this only after it has accepted others.
            del self.waiting[oldest]
            self.connections.discard(oldest)


async def _overloaded(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes the application's place while every connection is computing."""
    error = busy("all connections are in use")
    error.headers["Connection"] = "close"
    await error_response(error)(scope, receive, send)


def configuration(app: Starlette, limits: Limits) -> uvicorn.Config:
    """How uvicorn runs the application."""
    protocol = type("LimitedConnection", (Connection,), {"limits": limits, "waiting": {}})
    # uvloop's transports have no `max_size`, and there are no WebSockets here.
    return uvicorn.Config(
        app,
        http=protocol,
        loop="asyncio",
        ws="none",
        backlog=_BACKLOG,
        log_level="warning",
        access_log=False,
    )


def allow_files(connections: int) -> None:
    """Raises the process's limit on open files if `connections` need it."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = f"--connections {connections} needs {needed} open files, but the limit is {hard}"
        raise VitrailError(f"{message}; lower it, or raise the limit (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
