"""What a server takes on, and how it says no."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from vitrail.errors import VitrailError

FIELDS = 32
"""Parts of a form that are no pictures; none of them is used."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is accepted: at once, of one request, and in which time."""

    batch: int = 32
    """Pictures that go through a model together."""
    wait: float = 5.0
    """Milliseconds that a picture waits for others, where others are on their way."""
    queue: int = 256
    """Pictures of one model that are read, waiting or computed; more are answered with 503."""
    images: int = 32
    """Pictures in one request."""
    megabytes: float = 16.0
    """Size of one request's body (MiB)."""
    megapixels: float = 50.0
    """Width times height of one picture, in millions."""
    seconds: float = 30.0
    """For an upload to arrive, and then for its answer."""
    connections: int = 512
    """Open at once: more than `queue`, so that some are left for those that only ask how it is."""
    idle: float = 10.0
    """Seconds for the headers of a request to arrive, from the connection or the last answer on;
    the rest of a body that was refused is read no longer either."""

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
    def parts(self) -> int:
        """Parts of a form."""
        return self.images + FIELDS

    @property
    def held(self) -> int:
        """Bytes of all bodies together: many at once may be large, not all of many."""
        return 16 * self.body

    @property
    def pixels(self) -> int:
        """Width times height of one picture."""
        return round(self.megapixels * 1e6)


class RequestError(Exception):
    """A request that is not fulfilled: the status, a code for programs, a line for people."""

    def __init__(
        self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers = dict(headers or {})


def busy(what: str) -> RequestError:
    """Too much at once: the same request may be repeated a little later."""
    return RequestError(503, "busy", f"{what}; try again", {"Retry-After": "1"})
