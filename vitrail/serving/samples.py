"""Pictures to try the page with: one drawn here, and scikit-learn's photographs where it is."""

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitrail.serving.limits import RequestError
from vitrail.serving.parameters import refuse_unknown

SIDE = 448
PHOTOGRAPHS = {
    "china": "danielbuechele, CC BY 2.0",
    "flower": "vultilion, CC BY 2.0",
}
"""Inside scikit-learn's package, and whose they are."""


async def listing(request: Request) -> Response:
    """The names of all samples, and who made them."""
    refuse_unknown(request, ())
    return JSONResponse(
        {"samples": [{"name": name, "by": by} for name, (_, by) in all_of().items()]}
    )


async def picture(request: Request) -> Response:
    """One sample."""
    refuse_unknown(request, ())
    name = request.path_params["name"]
    if name not in all_of():
        told = f"there is no sample '{name[:40]}'; there is {', '.join(all_of())}"
        raise RequestError(404, "not_found", told)
    data = all_of()[name][0]()
    return Response(data, media_type="image/jpeg", headers={"Cache-Control": "max-age=3600"})


@cache
def all_of() -> dict[str, tuple[Callable[[], bytes], str]]:
    """How to get at each sample, and its author."""
    found: dict[str, tuple[Callable[[], bytes], str]] = {}
    # The files alone are wanted: importing scikit-learn would take a second.
    spec = find_spec("sklearn")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for name, by in PHOTOGRAPHS.items():
            if (path := Path(folder) / "datasets" / "images" / f"{name}.jpg").exists():
                found[name] = (path.read_bytes, by)
    return found | {"daisy": (daisy, "drawn by Vitrail")}


@cache
def daisy() -> bytes:
    """A daisy before a meadow, as a JPEG file."""
    paper = Image.linear_gradient("L").resize((SIDE, SIDE))
    meadow = Image.composite(
        Image.new("RGB", (SIDE, SIDE), "#2f5d2a"), Image.new("RGB", (SIDE, SIDE), "#8fbf6a"), paper
    )
    pen = ImageDraw.Draw(meadow)
    for number in range(260):  # blades of grass, scattered without chance
        x, y = (number * 139) % SIDE, SIDE // 3 + (number * 83) % (SIDE * 2 // 3)
        shade = ("#3f7a33", "#5c9a45", "#2c5526")[number % 3]
        pen.line((x, y, x + 9 - number % 19, y - 46 - number % 31), shade, 3)
    meadow = meadow.filter(ImageFilter.GaussianBlur(5))
    pen = ImageDraw.Draw(meadow)
    centre = SIDE * 0.5
    pen.line((centre, centre, centre + 26, SIDE), "#3d6b2c", 13)
    for ring, count in ((1.0, 21), (0.86, 17)):
        for number in range(count):
            petal(pen, centre, 2 * math.pi * (number + ring) / count, ring)
    for number in range(150):  # florets in Vogel's spiral
        radius, angle = 3.6 * math.sqrt(number), number * 2.39996
        x, y = centre + radius * math.cos(angle), centre + radius * math.sin(angle)
        shade = ("#f2b90f", "#e39a06", "#f9d23c")[number % 3]
        pen.ellipse((x - 4, y - 4, x + 4, y + 4), shade)
    file = BytesIO()
    meadow.filter(ImageFilter.GaussianBlur(0.8)).save(file, "JPEG", quality=88)
    return file.getvalue()


def petal(pen: ImageDraw.ImageDraw, centre: float, angle: float, ring: float) -> None:
    """One white petal, as a polygon around its axis."""
    length, width = 168 * ring, 17
    outline = []
    for step in range(21):
        along = step / 20
        outline.append((along, math.sin(math.pi * along**0.62)))
    outline += [(along, -across) for along, across in reversed(outline)]
    points = [
        (
            centre + length * along * math.cos(angle) - width * across * math.sin(angle),
            centre + length * along * math.sin(angle) + width * across * math.cos(angle),
        )
        for along, across in outline
    ]
    pen.polygon(points, "#fbfaf4" if ring == 1.0 else "#ffffff", "#cfd0c8")
