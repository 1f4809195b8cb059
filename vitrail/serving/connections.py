"""What one connection may take: time, bytes and a place among the others."""

import asyncio
from typing import Any, ClassVar

import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitrail.errors import VitrailError
from vitrail.serving.app import answer
from vitrail.serving.limits import Limits, busy

BACKLOG = 256
"""Connections that wait to be accepted; asyncio accepts as many before any of them is closed."""
SPARE_FILES = BACKLOG + 128
"""Open files besides connections: the backlog, models, devices, libraries."""
SLICE = 1 << 14
"""Bytes that are read at once. HTTP is parsed in the event loop, and 16 KiB of chunks of one byte
take 22 ms; asyncio would read 256 KiB."""


class Connection(H11Protocol):
    """uvicorn's connection, closed where its client makes it wait or sends too much."""

    limits = Limits()
    waiting: ClassVar[dict["Connection", None]] = {}
    """Those whose next step is the client's, to send headers or more of a body; longest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.limits.connections:
            self.make_room()
        super().connection_made(transport)
        vars(transport)["max_size"] = SLICE
        self.timer = self.loop.call_later(self.limits.idle, self.expire)
        self.start(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        self.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.watch()
        self.came += len(data)
        # What is refused before it is read is read nevertheless, so that the client, which is
        # still sending, learns why; but not without end.
        if self.came > 3 * self.limits.body + 2**16:
            self.expire()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.watch()

    def watch(self) -> None:
        """Notices when a request begins or ends; more bytes of the same give no more time."""
        unanswered = self.cycle is not None and not self.cycle.response_complete
        current = self.cycle if unanswered else None
        if current is not self.current:
            self.start(current)
        if current and not current.more_body:
            self.waiting.pop(self, None)

    def start(self, current: Any) -> None:
        """The time for a request, or for the headers of the next one, begins."""
        self.current, self.came = current, 0
        self.waiting.pop(self, None)
        self.waiting[self] = None
        self.timer.cancel()
        # The application limits uploading and computing; the third time is for sending.
        seconds = 3 * self.limits.seconds if current else self.limits.idle
        self.timer = self.loop.call_later(seconds, self.expire)

    def expire(self) -> None:
        """Closes the connection, once its client has read what was sent or the time is up."""
        self.timer.cancel()
        self.transport.close()
        self.timer = self.loop.call_later(self.limits.seconds, self.transport.abort)

    def make_room(self) -> None:
        """Closes the connection that has been waiting longest.

        To refuse new ones instead would let anybody who opens many keep all others out.
        """
        oldest = next(iter(self.waiting), None)
        if oldest is None:
            self.app = overloaded
        else:
            oldest.transport.abort()
            # The event loop would do this only after it has accepted others.
            del self.waiting[oldest]
            self.connections.discard(oldest)


async def overloaded(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in the application's stead where every connection is computing."""
    error = busy("all connections are in use")
    error.headers["Connection"] = "close"
    await answer(error)(scope, receive, send)


def configuration(app: Starlette, limits: Limits) -> uvicorn.Config:
    """How uvicorn runs the application."""
    own = type("OwnConnection", (Connection,), {"limits": limits, "waiting": {}})
    # uvloop's transports know no SLICE; nothing here answers to WebSockets.
    return uvicorn.Config(
        app,
        http=own,
        loop="asyncio",
        ws="none",
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
    )


def allow_files(connections: int) -> None:
    """Raises the process's limit on open files where so many connections would exceed it."""
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows, which has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        told = f"--connections {connections} needs {needed} open files, and {hard} are allowed"
        raise VitrailError(f"{told}; lower it, or raise the limit (ulimit -n)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
