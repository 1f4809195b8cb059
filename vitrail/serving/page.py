"""The web page, one HTML file that loads nothing from elsewhere, and images to try it with."""

import base64
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from vitrail import __version__
from vitrail.serving.limits import RequestError

_PHOTOGRAPHS = {
    "china": "danielbuechele, CC BY 2.0",
    "flower": "vultilion, CC BY 2.0",
}
"""Photographs in scikit-learn's package and their authors."""
_FOLDER = Path(__file__).parent


async def page(_request: Request) -> Response:
    """The page; its content security policy allows nothing from or to elsewhere."""
    html, policy = _build_page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


async def list_samples(_request: Request) -> Response:
    rows = [{"name": name, "by": author} for name, (_, author) in samples().items()]
    return JSONResponse({"samples": rows})


async def sample(request: Request) -> Response:
    name, known = request.path_params["name"], samples()
    if name not in known:
        message = f"no sample '{name[:40]}'; expected {' or '.join(known)}"
        raise RequestError(404, "not_found", message)
    data = known[name][0].read_bytes()
    return Response(data, media_type="image/jpeg", headers={"Cache-Control": "max-age=3600"})


@cache
def _build_page() -> tuple[str, str]:
    """The page and its content security policy."""
    html, css, js = (
        (_FOLDER / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js")
    )
    window = (_FOLDER.parent / "window.svg").read_text("utf-8")
    icon = base64.b64encode(window.encode()).decode()
    values = {"style": css, "script": js, "window": window, "version": __version__}
    values["icon"] = f"data:image/svg+xml;base64,{icon}"
    for name, value in values.items():
        html = html.replace(f"{{{{ {name} }}}}", value)
    script = base64.b64encode(hashlib.sha256(f"\n{js}\n".encode()).digest()).decode()
    policy = (
        "default-src 'none'; connect-src 'self'; img-src 'self' data: blob:; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{script}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


@cache
def samples() -> dict[str, tuple[Path, str]]:
    """The file of each sample, and its author."""
    found = {}
    # Only the files are needed: importing scikit-learn would take a second.
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for name, author in _PHOTOGRAPHS.items():
            if (path := Path(folder) / "datasets" / "images" / f"{name}.jpg").exists():
                found[name] = (path, author)
    return found | {"daisy": (_FOLDER / "daisy.jpg", "drawn by Vitrail")}
