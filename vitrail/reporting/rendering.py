"""Templates → one self-contained page, written whole or not at all."""

from base64 import b64encode
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from vitrail import __version__
from vitrail.reporting import words
from vitrail.weights.files import replace_with

FILTERS = (
    *("percent", "between", "fixed", "count", "duration", "plural", "short"),
    *("operations", "joules", "size_of", "days"),
)


def source(name: str) -> str:
    """A template or style sheet of this package."""
    return resources.files("vitrail.reporting").joinpath(name).read_text("utf-8")


def render(template: str, **values: Any) -> str:
    """The page; whatever comes from files is escaped."""
    environment = Environment(
        loader=FunctionLoader(source),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({name: getattr(words, name) for name in FILTERS})
    window = source("window.svg")
    values["icon"] = "data:image/svg+xml;base64," + b64encode(window.encode()).decode()
    values["window"] = Markup(window.replace(' xmlns="http://www.w3.org/2000/svg"', ""))
    return environment.get_template(template).render(version=__version__, **values)


def put(page: str, target: Path) -> Path:
    """The page in its place."""
    data = page.encode("utf-8", "backslashreplace")
    replace_with(target, lambda part: part.write_bytes(data))
    return target
