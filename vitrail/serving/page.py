"""The page: one HTML file with its style and script inside, and leave to fetch from here alone."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from vitrail import __version__
from vitrail.serving.parameters import refuse_unknown


async def show(request: Request) -> Response:
    """The page; the browser is told to run, load and send nothing else."""
    refuse_unknown(request, ())
    html, rules = built()
    return HTMLResponse(html, headers={"Content-Security-Policy": rules})


@cache
def built() -> tuple[str, str]:
    """The page and its content security policy."""
    folder = files("vitrail.serving")
    parts = {name: (folder / f"page.{name}").read_text("utf-8") for name in ("html", "css", "js")}
    window = (files("vitrail.reporting") / "window.svg").read_text("utf-8")
    icon = base64.b64encode(window.encode()).decode()
    html = (
        parts["html"]
        .replace("{{ style }}", parts["css"])
        .replace("{{ script }}", parts["js"])
        .replace("{{ window }}", window)
        .replace("{{ icon }}", f"data:image/svg+xml;base64,{icon}")
        .replace("{{ version }}", __version__)
    )
    between = f"\n{parts['js']}\n"
    script = base64.b64encode(hashlib.sha256(between.encode()).digest()).decode()
    rules = (
        "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{script}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, rules
