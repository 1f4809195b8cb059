"""From a request's body to the files in it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request

from vitrail.errors import one_line
from vitrail.serving.forms import form_files
from vitrail.serving.limits import Limits, RequestError, busy


@dataclass(frozen=True)
class Upload:
    """The bytes of one picture, and what its sender calls it."""

    name: str
    data: bytes


@dataclass
class Bodies:
    """Reads bodies into memory: each is limited, and so is their sum."""

    limits: Limits
    held: int = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request; its bytes count until the block ends."""
        data = bytearray()
        try:
            try:
                async with asyncio.timeout(self.limits.seconds):
                    await self.read(request, data)
            except TimeoutError:
                told = f"the upload took longer than {self.limits.seconds:g} s"
                raise RequestError(408, "slow_upload", told) from None
            yield bytes(data)
        finally:
            self.held -= len(data)

    async def read(self, request: Request, data: bytearray) -> None:
        """The whole body, or the reason why it is refused.

        What is refused is read all the same, as far as that is reasonable: a client that is still
        sending when its connection closes never learns why.
        """
        came, refused = 0, self.objection(int(request.headers.get("content-length") or 0), 0)
        async for chunk in request.stream():
            came += len(chunk)
            refused = refused or self.objection(came, len(chunk))
            if refused is None:
                data += chunk
                self.held += len(chunk)
            elif came > 2 * self.limits.body:
                break
        if refused is not None:
            raise refused

    def objection(self, size: int, more: int) -> RequestError | None:
        """What speaks against a body of this size, of which so many bytes are to be kept now."""
        if size > self.limits.body:
            told = f"the upload is larger than {self.limits.megabytes:g} MiB"
            return RequestError(413, "too_large", told)
        if self.held + more > self.limits.held:
            return busy("many large uploads are being read already")
        return None


def split(content_type: str, body: bytes, limits: Limits) -> list[Upload]:
    """A form's files, or a body that is one picture."""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        files = enumerate(form_files(content_type, body, limits.parts), 1)
        found = [
            Upload(one_line(name) if name else f"picture {n}", data) for n, (name, data) in files
        ]
    else:
        found = [Upload("the upload", body)] if body else []
    if not found:
        raise RequestError(
            400, "no_picture", "the request has no picture: send its bytes, or a form with files"
        )
    if len(found) > limits.images:
        told = f"the request has {len(found)} pictures, more than {limits.images}"
        raise RequestError(400, "too_many_images", told)
    return found
