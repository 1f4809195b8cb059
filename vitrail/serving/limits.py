"""The limits of a server, and its error responses."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from vitrail.errors import VitrailError

EXTRA_FIELDS = 32
"""Parts of a form besides images; they are ignored."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The options of `vitrail serve` that limit how much it accepts, and for how long."""

    batch: int = 32
    """Images in one batch."""
    wait: float = 5.0
    """Milliseconds that an image waits for others that are being read."""
    queue: int = 256
    """Images per model that are being read, waiting or computed; beyond that, 503."""
    images: int = 32
    """Images in one request."""
    megabytes: float = 16.0
    """Size of one request's body (MiB)."""
    megapixels: float = 50.0
    """Width times height of one image, in millions."""
    seconds: float = 30.0
    """Time for an upload to arrive, and again for its response."""
    connections: int = 512
    """Open at once; more than `queue`, so that /health is reachable when the queue is full."""
    idle: float = 10.0
    """Seconds for the headers of a request to arrive, counted from connecting or from the last
    response; the rest of a refused body is read no longer than this either."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < (0 if field.name == "wait" else 1e-3):
                raise VitrailError(f"--{field.name} {value}: expected a positive number")
        if self.images > self.queue:
            raise VitrailError(
                f"--images {self.images} is more than --queue {self.queue}; such a request could "
                "never be answered"
            )

    @property
    def body(self) -> int:
        """Bytes of one request's body."""
        return round(self.megabytes * 2**20)

    @property
    def pixels(self) -> int:
        """Width times height of one image."""
        return round(self.megapixels * 1e6)


class RequestError(Exception):
    """An error response: its status, a code for programs, a line for people."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers = dict(headers or {})


def busy(reason: str) -> RequestError:
    """Overloaded; the client may retry a little later."""
    return RequestError(503, "busy", f"{reason}; try again", {"Retry-After": "1"})
