"""The files in a form, from memory to memory: pictures are never written to a disk."""

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitrail.errors import one_line
from vitrail.serving.limits import RequestError


@dataclass
class Part:
    """One part of a form."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)

    @property
    def filename(self) -> str:
        """What its sender calls the file, or nothing."""
        _, options = parse_options_header(self.headers.get(b"content-disposition"))
        return options.get(b"filename", b"").decode("utf-8", "replace")

    @property
    def is_file(self) -> bool:
        """Whether this is a file, rather than a word in a field; not every client names files."""
        return bool(self.filename) or b"content-type" in self.headers


class Reader:
    """Collects parts as the parser finds them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.parts: list[Part] = []
        self.name = self.value = b""
        self.ended = False

    def on_part_begin(self) -> None:
        if len(self.parts) == self.most:
            raise RequestError(400, "too_many_parts", f"the form has more than {self.most} parts")
        self.parts.append(Part())

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self.name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def on_header_end(self) -> None:
        self.parts[-1].headers[self.name.lower()] = self.value
        self.name = self.value = b""

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].data += data[start:end]

    def on_end(self) -> None:
        self.ended = True


def form_files(content_type: str, body: bytes, most: int) -> list[tuple[str, bytes]]:
    """Name and bytes of each file; other fields are left out. At most so many parts are read."""
    _, options = parse_options_header(content_type)
    reader = Reader(most)
    parser = MultipartParser(
        options.get(b"boundary", b""),
        {
            "on_part_begin": reader.on_part_begin,
            "on_header_field": reader.on_header_field,
            "on_header_value": reader.on_header_value,
            "on_header_end": reader.on_header_end,
            "on_part_data": reader.on_part_data,
            "on_end": reader.on_end,
        },
    )
    try:
        parser.write(body)
    except FormParserError as error:
        raise bad_form(one_line(error)) from None
    if not reader.ended:
        raise bad_form("it does not end with its boundary")
    return [(part.filename, bytes(part.data)) for part in reader.parts if part.is_file]


def bad_form(reason: str) -> RequestError:
    """A form that breaks its own rules."""
    return RequestError(400, "bad_form", f"the form cannot be read: {reason}")
