"""Templates to one self-contained page, and the formats of its numbers."""

import math
import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import Environment, FunctionLoader, StrictUndefined, TemplateRuntimeError
from markupsafe import Markup, escape

from vitrail import __version__, console
from vitrail.errors import one_line
from vitrail.files import atomic_write

MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    TemplateRuntimeError,
)
"""Errors that values of an unexpected type lead to."""

NONE = "–"
SPACE = "\N{NO-BREAK SPACE}"
Number = int | float | None

# What would break a page; a tab or a new line in a command is meant.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
# Only an image may enter the page, whatever a file calls one.
_IMAGE_URI = re.compile(r"data:image/(jpeg|png|webp);base64,[A-Za-z0-9+/]+={0,2}")
_MOST_URI_BYTES = 60_000


def write_page(target: Path, template: str, **values: Any) -> Path:
    """Renders a template and writes it atomically; text from files is escaped."""
    environment = Environment(
        loader=FunctionLoader(_source),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (percent, between, fixed, count, duration, plural, short, image_uri)
    filters += (operations, joules, memory, significant)
    environment.filters.update({function.__name__: function for function in filters})
    window = resources.files("vitrail").joinpath("window.svg").read_text("utf-8")
    page = environment.get_template(template).render(
        version=__version__,
        icon="data:image/svg+xml;base64," + b64encode(window.encode()).decode(),
        window=Markup(window.replace(' xmlns="http://www.w3.org/2000/svg"', "")),
        section=_section,
        **values,
    )
    atomic_write(target, lambda part: part.write_text(page, "utf-8"))
    return target


def _source(name: str) -> str:
    return resources.files("vitrail.reporting").joinpath(name).read_text("utf-8")


def _printable(value: Any) -> Any:
    """A text from a file without control characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


def _section(name: str, title: str, file: str, caller: Callable[[], str], css: str = "") -> Markup:
    """`{% call section(...) %}`: a section of a page, or one line if its file is malformed."""
    try:
        body = caller()
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        text = _printable(f"{file} is malformed ({short(reason, 160)}): nothing to show.")
        body = Markup(f'<p class="missing">{escape(text)}</p>\n')
    if not body.strip():
        return Markup()
    opening = Markup('<section id="{}"{}>\n').format(name, Markup(css and f' class="{css}"'))
    heading = Markup("<h2>{}</h2>\n").format(title) if title else ""
    return opening + heading + body + Markup("</section>\n")


def image_uri(value: Any) -> str:
    """A data URI of a small image, or nothing."""
    text = str(value)
    return text if len(text) <= _MOST_URI_BYTES and _IMAGE_URI.fullmatch(text) else ""


def short(text: Any, most: int = 60) -> str:
    """The beginning and the end of a long text: both tell file names apart."""
    text = str(text)
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def plural(number: int, thing: str) -> str:
    """`1 class`, `2 classes`."""
    ending = "" if number == 1 else "es" if thing.endswith("s") else "s"
    return f"{number:,}{SPACE}{thing}{ending}"


def known(value: Number) -> TypeGuard[int | float]:
    """Whether there is a finite number."""
    return value is not None and math.isfinite(value)


def percent(fraction: Number, n: int = 0) -> str:
    """`97.3 %`; with two digits where there are images enough to tell them apart."""
    return f"{100 * fraction:.{1 if n < 1000 else 2}f}{SPACE}%" if known(fraction) else NONE


def between(span: Sequence[Number] | None, n: int = 0) -> str:
    """`95.1 to 98.6 %`, or nothing where the ends are not known."""
    if span is None or not all(map(known, span)):
        return ""
    low, high = (percent(end, n) for end in span)
    return f"{low.removesuffix(SPACE + '%')} to {high}"


def fixed(value: Number, digits: int = 3) -> str:
    """`0.973`."""
    return f"{value:.{digits}f}" if known(value) else NONE


def count(value: Number) -> str:
    """`5,717,416`."""
    return f"{value:,.0f}" if known(value) else NONE


def significant(value: Number) -> str:
    """`12,300`, `680`, `0.0123`: at least three digits, however small."""
    if not known(value):
        return NONE
    # Format `g` would write 1.23e+03 for what is more than three digits.
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def duration(seconds: Number) -> str:
    """`38 s`, `46 min`, `2.1 h`, as on the console."""
    return console.duration(float(seconds)).replace(" ", SPACE) if known(seconds) else NONE


def operations(exaflops: Number) -> str:
    """`224 exaFLOPs`, `3.1 petaFLOPs`."""
    return _scaled(
        exaflops, (1, "exaFLOPs"), (1e-3, "petaFLOPs"), (1e-6, "teraFLOPs"), (1e-9, "gigaFLOPs")
    )


def joules(value: Number) -> str:
    """`1.24 kWh`, `310 Wh`, `820 J`."""
    return _scaled(value, (3.6e6, "kWh"), (3600, "Wh"), (1, "J"))


def memory(n_bytes: Number) -> str:
    """`1.5 GiB`, `310 MiB`."""
    return _scaled(n_bytes, (2**30, "GiB"), (2**20, "MiB"))


def _scaled(value: Number, *units: tuple[int | float, str]) -> str:
    """In the largest unit of which there is at least one, or else in the smallest."""
    if not known(value):
        return NONE
    size, unit = next((pair for pair in units if abs(value) >= pair[0]), units[-1])
    return f"{significant(value / size)}{SPACE}{unit}"
