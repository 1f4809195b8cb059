"""From a request's body to the files in it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitrail.errors import one_line
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
    async def uploads(self, request: Request) -> AsyncIterator[list[Upload]]:
        """The pictures of a request; their bytes count until the block ends."""
        data = bytearray()
        try:
            try:
                async with asyncio.timeout(self.limits.seconds):
                    await self.read(request, data)
            except TimeoutError:
                told = f"the upload took longer than {self.limits.seconds:g} s"
                raise RequestError(408, "slow_upload", told) from None
            yield await split(request, bytes(data), self.limits)
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


async def split(request: Request, body: bytes, limits: Limits) -> list[Upload]:
    """A form's files, or a body that is one picture."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        found = await form_files(request, body, limits)
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


async def form_files(request: Request, body: bytes, limits: Limits) -> list[Upload]:
    """The files of a form; its other fields are left out."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    parser = MultiPartParser(request.headers, stream(), max_part_size=limits.body)
    parser.spool_max_size = limits.body  # pictures are never written to a disk
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError, ValueError) as error:
        told = f"the form cannot be read: {one_line(getattr(error, 'message', error))}"
        raise RequestError(400, "bad_form", told) from None
    files = [value for _, value in form.multi_items() if isinstance(value, UploadFile)]
    found = [Upload(named(file, n), await file.read()) for n, file in enumerate(files, 1)]
    await form.close()
    return found


def named(file: UploadFile, number: int) -> str:
    """A file's name, fit for a message."""
    return one_line(file.filename) if file.filename else f"picture {number}"
