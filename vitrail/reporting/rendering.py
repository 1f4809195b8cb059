"""Templates to one self-contained page, and the formats of its numbers."""

import re
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from vitrail import __version__, console
from vitrail.console import NONE, Number, known
from vitrail.files import atomic_write

SPACE = "\N{NO-BREAK SPACE}"

# What would break a page; a tab or a new line in a command is meant.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_MOST_URI_BYTES = 60_000
_Unit = tuple[int | float, str]
_OPERATIONS = ((1, "exaFLOPs"), (1e-3, "petaFLOPs"), (1e-6, "teraFLOPs"), (1e-9, "gigaFLOPs"))


def write_page(
    target: Path, template: str, *, package: str = "vitrail.reporting", **values: Any
) -> Path:
    """Renders a template and writes it atomically; text from files is escaped.

    The template of another package can extend those of the reports.
    """
    window = resources.files("vitrail").joinpath("window.svg").read_text("utf-8")
    environment = _environment(package)
    page = environment.get_template(template).render(
        version=__version__,
        icon="data:image/svg+xml;base64," + b64encode(window.encode()).decode(),
        window=Markup(window.replace(' xmlns="http://www.w3.org/2000/svg"', "")),
        **values,
    )
    atomic_write(target, lambda part: part.write_text(page, "utf-8"))
    return target


@cache
def _environment(package: str) -> Environment:
    """Compiles each template once."""
    environment = Environment(
        loader=FunctionLoader(lambda name: _source(name, package)),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (percent, between, fixed, count, duration, plural, short, image_uri)
    filters += (operations, joules, memory, significant)
    environment.filters.update({function.__name__: function for function in filters})
    return environment


def _source(name: str, package: str) -> str:
    places = (resources.files(one).joinpath(name) for one in (package, "vitrail.reporting"))
    return next(place for place in places if place.is_file()).read_text("utf-8")


def _printable(value: Any) -> Any:
    """A text from a file without control characters."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value) if type(value) is str else value


def image_uri(value: Any, most: int = _MOST_URI_BYTES) -> str:
    """A data URI of a small image, or nothing: the page loads nothing from elsewhere."""
    text = str(value)
    return text if text.startswith("data:image/") and len(text) <= most else ""


def short(text: Any, most: int = 60) -> str:
    """The beginning and the end of a long text: both tell file names apart."""
    text = str(text)
    if len(text) <= most:
        return text
    tail = most // 3
    return f"{text[: most - tail - 1]}…{text[-tail:]}"


def plural(number: int, thing: str) -> str:
    """`1 class`, `2 classes`."""
    return console.plural(number, thing).replace(" ", SPACE)


def percent(fraction: Number, n: int = 0) -> str:
    """`97.3%`; with two digits where there are images enough to tell them apart."""
    return console.percent(fraction, digits(n))


def between(interval: Sequence[Number] | None, n: int = 0) -> str:
    """`95.1 to 98.6%`, or nothing if the ends are not known."""
    return console.between(interval, digits(n))


def digits(n: int) -> int:
    """How many decimals of a percentage n images can tell apart."""
    return 1 if n < 1000 else 2


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
    text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return text.replace("-", "−", 1) if value < 0 else text


def duration(seconds: Number) -> str:
    """`38 s`, `46 min`, `2.1 h`, as on the console."""
    return console.duration(float(seconds)).replace(" ", SPACE) if known(seconds) else NONE


def operations(exaflops: Number) -> str:
    """`224 exaFLOPs`, `3.1 petaFLOPs`."""
    return _scaled(exaflops, *_OPERATIONS)


def operations_unit(exaflops: float) -> _Unit:
    """The unit that `operations` writes them in, and its size."""
    return _unit(exaflops, _OPERATIONS)


def joules(value: Number) -> str:
    """`1.24 kWh`, `310 Wh`, `820 J`."""
    return _scaled(value, (3.6e6, "kWh"), (3600, "Wh"), (1, "J"))


def memory(n_bytes: Number) -> str:
    """`1.5 GiB`, `310 MiB`."""
    return _scaled(n_bytes, (2**30, "GiB"), (2**20, "MiB"))


def _scaled(value: Number, *units: _Unit) -> str:
    """In the largest unit of which there is at least one, or else in the smallest."""
    if not known(value):
        return NONE
    size, unit = _unit(value, units)
    return f"{significant(value / size)}{SPACE}{unit}"


def _unit(value: int | float, units: Sequence[_Unit]) -> _Unit:
    return next((pair for pair in units if abs(value) >= pair[0]), units[-1])
