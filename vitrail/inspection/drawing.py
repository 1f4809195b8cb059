"""What was found → picture files: the model's own, and a page and its parts for each picture."""

from pathlib import Path

from PIL import Image

from vitrail.files import atomic_write, make_folder
from vitrail.inspection.charts import distance_chart, position_chart
from vitrail.inspection.looking import Distances, Inspector, Look
from vitrail.inspection.pictures import (
    Panel,
    beside,
    blocks,
    clipped,
    filter_sheet,
    flow,
    heat,
    overlay,
    page,
    photograph,
    strip,
)
from vitrail.inspection.structure import colored, filters

GAP, BETWEEN = 4, 30
"""Pixels between two heads, and between two layers."""
PANEL = 264
"""Height of the panels on a page."""
TILES = (84, 150)
"""Height of the map of one head, at least and at most."""


def parts(one: Look) -> dict[str, Panel]:
    """The pictures of one picture, by the names of their files."""
    picture = photograph(one.visible, one.preprocess)
    found = {"picture": Panel(picture, "what the model sees")}
    for name, seen, said in (
        ("rollout", one.rollout, "attention rollout"),
        ("gradient", one.gradient, f"rollout for “{one.target}”"),
    ):
        if seen is not None:
            drawn = seen if name == "rollout" else clipped(seen)
            patch = one.recording.layers[0].pixels * picture.width / one.visible.shape[-1]
            found[name] = Panel(overlay(picture, drawn, patch), said)
    if one.rollout is not None:
        found["rollout-map"] = Panel(heat(one.rollout, picture.size), "rollout, by patch")
    colors = colored(one.recording.tokens[one.recording.prefix :], one.recording.grid)
    found["features"] = Panel(blocks(colors, picture.size), "patch features, PCA as RGB")
    return found


def heads(one: Look, shown: tuple[int, ...], width: int) -> list[Image.Image]:
    """For each layer the maps of its heads side by side."""
    assert one.seen is not None
    found = []
    rows, columns = one.visible.shape[-2:]
    for layer in shown:
        maps = one.seen.heads[layer]
        height = tile_height(len(maps), len(shown), columns / rows, width)
        size = (max(1, round(height * columns / rows)), height)
        panels = [
            Panel(heat(each, size), f"layer {layer}" if number == 0 else "")
            for number, each in enumerate(maps)
        ]
        found.append(strip(panels, height=height, gap=GAP, text=15))
    return found


def tile_height(heads: int, layers: int, aspect: float, width: int) -> int:
    """So many pixels that as many layers as possible stand side by side and fill the width."""
    least, most = TILES
    for across in range(layers, 0, -1):
        room = (width - (across - 1) * BETWEEN) / across - (heads - 1) * GAP
        if (height := int(room / heads / aspect)) >= least or across == 1:
            return max(1, min(height, most))
    return least


def draw(one: Look, asked: Inspector, out: Path) -> dict[str, str]:
    """The page of one picture and its parts; the names of the files."""
    panels = parts(one)
    wide = strip(list(panels.values()), height=PANEL)
    rows = [wide]
    if one.seen is not None:
        tiles = heads(one, asked.shown, wide.width)
        rows += flow(tiles, width=wide.width, gap=BETWEEN)
        panels["heads"] = Panel(stacked(tiles), "")
    said = f" · {one.guess} {100 * one.probability:.0f} %" if one.guess else ""
    files = {"page": keep(page(one.name, asked.about() + said, rows), out, f"{one.name}.png")}
    for name, panel in panels.items():
        files[name] = keep(panel.picture, out, f"{one.name}/{name}.png")
    return files


def stacked(tiles: list[Image.Image]) -> Image.Image:
    """One layer below the other."""
    paper = Image.new(
        "RGB",
        (max(tile.width for tile in tiles), sum(tile.height + 8 for tile in tiles) - 8),
        "white",
    )
    y = 0
    for tile in tiles:
        paper.paste(tile, (0, y))
        y += tile.height + 8
    return paper


def draw_parts(asked: Inspector) -> dict[str, Panel]:
    """What the weights alone show: filters, and positions where there are any."""
    found = filters(asked.model)
    many = f"{len(found.components)} strongest components of {found.count} filters"
    rows, columns = found.components.shape[-2:]
    panels = {"filters": Panel(filter_sheet(found), f"{found.of}: {many}, {rows} × {columns} px")}
    if not isinstance(positions := asked.positions(), str):
        panels["positions"] = Panel(
            position_chart(positions), f"{positions.kind} positions: how alike are places"
        )
    return panels


def draw_model(asked: Inspector, distances: Distances, out: Path) -> dict[str, str]:
    """Filters, positions and attention distance, each alone and all on one page."""
    panels = draw_parts(asked)
    if distances.n:
        n = f"{distances.n:,} picture{'s' * (distances.n > 1)}"
        panels["attention-distance"] = Panel(
            distance_chart(distances.means, distances.uniform, f"one dot per head, mean of {n}"),
            "how far each head looks",
        )
    files = {name: keep(panel.picture, out, f"{name}.png") for name, panel in panels.items()}
    row = beside([strip([one], height=one.picture.height) for one in panels.values()], 36)
    words = ", ".join(panels).replace("-", " ")
    files["page"] = keep(page(asked.about(), words, [row]), out, "model.png")
    return files


def keep(picture: Image.Image, out: Path, name: str) -> str:
    """A picture in its file, whole or not at all."""
    make_folder((out / name).parent)
    atomic_write(out / name, lambda part: picture.save(part, "PNG", optimize=True))
    return str(out / name)
