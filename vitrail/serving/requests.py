"""From a request to the input of a model: parameters, body, form, decoded image.

Nothing here trusts the client, and uploads are never written to disk.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from jaxtyping import Float
from PIL import UnidentifiedImageError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from torch import Tensor

from vitrail.data.decode import load_bounded, opened
from vitrail.data.preprocessing import Preprocessing, readable, upright
from vitrail.errors import VitrailError, did_you_mean, one_line
from vitrail.serving.limits import EXTRA_FIELDS, Limits, RequestError, busy

_BODIES_AT_ONCE = 16
"""Bodies of the largest size that fit into memory together; smaller ones may be more."""


def parse_parameters(request: Request, described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The query parameters of a request, parsed as their OpenAPI descriptions say.

    Unknown and repeated ones are refused: ignoring a typo would change the result.
    """
    schemas = {one["name"]: one["schema"] for one in described if one["in"] == "query"}
    given = request.query_params
    for name in given:
        if name not in schemas:
            hint = did_you_mean(name, schemas) or f"; expected {', '.join(schemas) or 'none'}"
            raise RequestError(400, "bad_parameter", f"unknown parameter '{name[:40]}'{hint}")
        if len(given.getlist(name)) > 1:
            raise RequestError(400, "bad_parameter", f"`{name}` is given more than once")
    return {name: _parse(name, given[name], schemas[name]) for name in schemas if name in given}


def _parse(name: str, text: str, schema: dict[str, Any]) -> int | str:
    """A string, an integer, or (`oneOf`) an integer or one of some words."""
    kind, *others = schema.get("oneOf", [schema])
    words = [word for other in others for word in other["enum"]]
    if kind["type"] == "string" or text in words:
        return text
    if re.fullmatch(r"[0-9]{1,9}", text) and int(text) >= kind["minimum"]:
        return int(text)
    expected = " or ".join([f"an integer of at least {kind['minimum']}", *words])
    raise RequestError(400, "bad_parameter", f"{name}={text[:40]}: expected {expected}")


@dataclass
class BodyReader:
    """Reads bodies into memory, with a limit on each and on their sum."""

    limits: Limits
    bytes_held: int = 0

    @asynccontextmanager
    async def body(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a request; its bytes count towards the sum until the block ends."""
        data = bytearray()
        try:
            try:
                async with asyncio.timeout(self.limits.seconds):
                    await self._read(request, data)
            except TimeoutError:
                message = f"the upload took longer than {self.limits.seconds:g} s"
                raise RequestError(408, "slow_upload", message) from None
            yield bytes(data)
        finally:
            self.bytes_held -= len(data)

    async def _read(self, request: Request, data: bytearray) -> None:
        # A refused body is read all the same, within reason: a client that is still sending when
        # its connection closes never learns why.
        received = 0
        error = self._refusal(int(request.headers.get("content-length") or 0), 0)
        async for chunk in request.stream():
            received += len(chunk)
            error = error or self._refusal(received, len(chunk))
            if error is None:
                data += chunk
                self.bytes_held += len(chunk)
            elif received > 2 * self.limits.body:
                break
        if error is not None:
            raise error

    def _refusal(self, size: int, more: int) -> RequestError | None:
        """Why a body of `size` bytes is refused, `more` of which are to be held now."""
        if size > self.limits.body:
            message = f"the upload is larger than {self.limits.megabytes:g} MiB"
            return RequestError(413, "too_large", message)
        if self.bytes_held + more > _BODIES_AT_ONCE * self.limits.body:
            return busy("too many large uploads at once")
        return None


@dataclass(frozen=True)
class Upload:
    """An image file and its name."""

    name: str
    data: bytes


def split_body(content_type: str, body: bytes, limits: Limits) -> list[Upload]:
    """The files of a form, or a body that is itself one image."""
    if content_type.partition(";")[0].strip().lower() == "multipart/form-data":
        files = enumerate(_form_files(content_type, body, limits.images + EXTRA_FIELDS), 1)
        uploads = [
            Upload(one_line(name) if name else f"image {n}", data) for n, (name, data) in files
        ]
    else:
        uploads = [Upload("the upload", body)] if body else []
    if not uploads:
        message = "the request has no image; send its bytes, or a form with files"
        raise RequestError(400, "no_image", message)
    if len(uploads) > limits.images:
        message = f"the request has {len(uploads)} images, more than {limits.images}"
        raise RequestError(400, "too_many_images", message)
    return uploads


class _FormReader:
    """Collects the parts of a form; the parser calls the methods by their names."""

    def __init__(self, max_parts: int) -> None:
        self.max_parts = max_parts
        self.parts: list[tuple[dict[bytes, bytes], bytearray]] = []
        """Headers and content."""
        self.name = self.value = b""
        self.ended = False

    def on_part_begin(self) -> None:
        if len(self.parts) == self.max_parts:
            message = f"the form has more than {self.max_parts} parts"
            raise RequestError(400, "too_many_parts", message)
        self.parts.append(({}, bytearray()))

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self.name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def on_header_end(self) -> None:
        self.parts[-1][0][self.name.lower()] = self.value
        self.name = self.value = b""

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1][1].extend(data[start:end])

    def on_end(self) -> None:
        self.ended = True


def _form_files(content_type: str, body: bytes, max_parts: int) -> list[tuple[str, bytes]]:
    """Name and bytes of each file of a form. Starlette's own parser writes large files to disk."""
    reader = _FormReader(max_parts)
    callbacks: Any = {name: getattr(reader, name) for name in dir(reader) if name.startswith("on_")}
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    try:
        MultipartParser(boundary, callbacks).write(body)
    except FormParserError as error:
        message = f"cannot parse the form: {one_line(error)}"
        raise RequestError(400, "bad_form", message) from None
    if not reader.ended:
        message = "cannot parse the form: it does not end with its boundary"
        raise RequestError(400, "bad_form", message)
    files = []
    for headers, content in reader.parts:
        _, options = parse_options_header(headers.get(b"content-disposition"))
        name = options.get(b"filename", b"").decode("utf-8", "replace")
        # Not every client names its files, but fields that are not files have no content type.
        if name or b"content-type" in headers:
            files.append((name, bytes(content)))
    return files


@dataclass(frozen=True)
class PreparedImage:
    """An image ready for a model."""

    name: str
    pixels: Float[Tensor, "c y x"]
    crop: tuple[float, float, float, float]
    """Left, top, right and bottom of the model's input, as fractions of the image."""


def prepare(upload: Upload, preprocess: Preprocessing, max_pixels: int) -> PreparedImage:
    """An upload decoded, resized and cropped; only its header is read before its size is known."""
    try:
        with readable(upload.name), opened(BytesIO(upload.data)) as file:
            if file.format == "JPEG2000":  # no browser shows it, and its decoder is slow
                raise UnidentifiedImageError
            _refuse_bombs(upload.name, file.size, preprocess, max_pixels)
            load_bounded(file)
            image = upright(file)
        rows, columns = preprocess.resized(image.height, image.width)
        top = (rows - preprocess.size[0]) / 2 / rows
        left = (columns - preprocess.size[1]) / 2 / columns
        return PreparedImage(upload.name, preprocess(image), (left, top, 1 - left, 1 - top))
    except VitrailError as error:
        raise RequestError(422, "not_an_image", str(error)) from None
    except MemoryError:
        message = f"cannot decode {upload.name}: it needs too much memory"
        raise RequestError(422, "not_an_image", message) from None


def _refuse_bombs(
    name: str, size: tuple[int, int], preprocess: Preprocessing, max_pixels: int
) -> None:
    """A few bytes can describe many pixels, and so can a thin line resized to 224 rows."""
    width, height = size
    if width * height > max_pixels:
        message = f"{name} has {width} x {height} pixels, more than {max_pixels / 1e6:g} million"
        raise RequestError(413, "too_many_pixels", message)
    rows, columns = preprocess.resized(max(height, 1), max(width, 1))
    if rows * columns > max(max_pixels, 4 * preprocess.size[0] * preprocess.size[1]):
        message = f"{name} is too narrow for the model: {width} x {height} pixels"
        raise RequestError(413, "too_many_pixels", message)
