"""The web page, one HTML file that loads nothing from elsewhere, and images to try it with."""

import base64
import hashlib
import math
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from vitrail import __version__
from vitrail.serving.limits import RequestError

_PHOTOGRAPHS = {
    "china": "danielbuechele, CC BY 2.0",
    "flower": "vultilion, CC BY 2.0",
}
"""Photographs in scikit-learn's package and their authors."""
_SIDE = 448


async def page(_request: Request) -> Response:
    """The page; its policy allows the browser to run, load and send nothing else."""
    html, policy = _build_page()
    return HTMLResponse(html, headers={"Content-Security-Policy": policy})


async def list_samples(_request: Request) -> Response:
    rows = [{"name": name, "by": author} for name, (_, author) in _samples().items()]
    return JSONResponse({"samples": rows})


async def sample(request: Request) -> Response:
    name, samples = request.path_params["name"], _samples()
    if name not in samples:
        message = f"there is no sample '{name[:40]}'; there is {', '.join(samples)}"
        raise RequestError(404, "not_found", message)
    read, _ = samples[name]
    return Response(read(), media_type="image/jpeg", headers={"Cache-Control": "max-age=3600"})


@cache
def _build_page() -> tuple[str, str]:
    """The page and its content security policy."""
    folder = files("vitrail.serving")
    html, css, js = ((folder / f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    window = (files("vitrail") / "window.svg").read_text("utf-8")
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
def _samples() -> dict[str, tuple[Callable[[], bytes], str]]:
    """How to read each sample, and its author."""
    samples: dict[str, tuple[Callable[[], bytes], str]] = {}
    # Only the files are needed: importing scikit-learn would take a second.
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for name, author in _PHOTOGRAPHS.items():
            if (path := Path(folder) / "datasets" / "images" / f"{name}.jpg").exists():
                samples[name] = (path.read_bytes, author)
    return samples | {"daisy": (_draw_daisy, "drawn by Vitrail")}


@cache
def _draw_daisy() -> bytes:
    """A daisy in a meadow, as a JPEG file: a sample without any other package."""
    dark, light = (Image.new("RGB", (_SIDE, _SIDE), color) for color in ("#2f5d2a", "#8fbf6a"))
    mask = Image.linear_gradient("L").resize((_SIDE, _SIDE))
    meadow = Image.composite(dark, light, mask)
    pen = ImageDraw.Draw(meadow)
    for number in range(260):  # blades of grass, scattered the same way every time
        x, y = (number * 139) % _SIDE, _SIDE // 3 + (number * 83) % (_SIDE * 2 // 3)
        shade = ("#3f7a33", "#5c9a45", "#2c5526")[number % 3]
        pen.line((x, y, x + 9 - number % 19, y - 46 - number % 31), shade, 3)
    meadow = meadow.filter(ImageFilter.GaussianBlur(5))
    pen = ImageDraw.Draw(meadow)
    center = _SIDE * 0.5
    pen.line((center, center, center + 26, _SIDE), "#3d6b2c", 13)
    for ring, count in ((1.0, 21), (0.86, 17)):
        for number in range(count):
            _draw_petal(pen, center, 2 * math.pi * (number + ring) / count, ring)
    for number in range(150):  # florets in Vogel's spiral
        radius, angle = 3.6 * math.sqrt(number), number * 2.39996
        x, y = center + radius * math.cos(angle), center + radius * math.sin(angle)
        shade = ("#f2b90f", "#e39a06", "#f9d23c")[number % 3]
        pen.ellipse((x - 4, y - 4, x + 4, y + 4), shade)
    file = BytesIO()
    meadow.filter(ImageFilter.GaussianBlur(0.8)).save(file, "JPEG", quality=88)
    return file.getvalue()


def _draw_petal(pen: ImageDraw.ImageDraw, center: float, angle: float, ring: float) -> None:
    length, width = 168 * ring, 17
    cos, sin = math.cos(angle), math.sin(angle)
    half = [(step / 20, math.sin(math.pi * (step / 20) ** 0.62)) for step in range(21)]
    outline = half + [(along, -across) for along, across in reversed(half)]
    points = [
        (
            center + length * along * cos - width * across * sin,
            center + length * along * sin + width * across * cos,
        )
        for along, across in outline
    ]
    pen.polygon(points, "#fbfaf4" if ring == 1.0 else "#ffffff", "#cfd0c8")
