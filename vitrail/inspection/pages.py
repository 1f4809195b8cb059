"""The images that `vitrail inspect` writes: for the model, and for each image."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from PIL import Image

from vitrail.files import atomic_write, make_folder
from vitrail.inspection.embeddings import PositionSimilarity, feature_colors
from vitrail.inspection.images import (
    Panel,
    captioned,
    clip_outliers,
    column,
    denormalize,
    filter_grid,
    heatmap,
    overlay,
    page,
    patch_colors,
    row,
    wrapped_rows,
)
from vitrail.inspection.tracer import ImageTrace, Tracer

_HEAD_GAP, _LAYER_GAP = 4, 30
_PANEL_HEIGHT = 264
_TILE_HEIGHTS = (84, 150)
"""Height of the map of one head, at least and at most."""

_MUTED, _RULE = "#696970", "#d9d9de"
_STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": "#1c1c1e",
    "axes.edgecolor": _RULE,
    "axes.labelcolor": "#1c1c1e",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
}


def write_image_page(trace: ImageTrace, tracer: Tracer, out: Path) -> dict[str, str]:
    """The page of one image and each of its panels; returns the paths by name."""
    panels = image_panels(trace)
    strip = row([captioned(panel, height=_PANEL_HEIGHT) for panel in panels.values()], 14)
    rows = [strip]
    if trace.attention is not None:
        layers = _head_maps(trace, tracer.shown_layers, strip.width)
        rows += wrapped_rows(layers, width=strip.width, gap=_LAYER_GAP)
        panels["heads"] = Panel(column(layers, 8), "")
    prediction = f" · {trace.prediction} {100 * trace.probability:.0f}%" if trace.prediction else ""
    whole = page(trace.name, tracer.title + prediction, rows)
    files = {"page": write_png(whole, out / f"{trace.name}.png")}
    for name, panel in panels.items():
        files[name] = write_png(panel.image, out / trace.name / f"{name}.png")
    return files


def image_panels(trace: ImageTrace) -> dict[str, Panel]:
    """The panels of one image by file name."""
    image = denormalize(trace.visible, trace.preprocess)
    panels = {"picture": Panel(image, "model input")}
    rollout, gradient, recording = trace.rollout, trace.gradient, trace.recording
    if rollout is not None:
        patch = recording.layers[0].pixels * image.width / trace.visible.shape[-1]
        panels["rollout"] = Panel(overlay(image, rollout, patch), "attention rollout")
        if gradient is not None:
            lit = overlay(image, clip_outliers(gradient), patch)
            panels["gradient"] = Panel(lit, f"rollout for “{trace.target}”")
        panels["rollout-map"] = Panel(heatmap(rollout, image.size), "rollout, by patch")
    colors = feature_colors(recording.tokens[recording.prefix :], recording.grid)
    panels["features"] = Panel(patch_colors(colors, image.size), "patch features, PCA as RGB")
    return panels


def _head_maps(trace: ImageTrace, layers: Sequence[int], width: int) -> list[Image.Image]:
    """For each layer, the maps of its heads side by side."""
    assert trace.attention is not None
    aspect = trace.visible.shape[-1] / trace.visible.shape[-2]
    rows = []
    for layer in layers:
        maps = trace.attention.heads[layer]
        height = tile_height(len(maps), len(layers), aspect, width)
        size = (max(1, round(height * aspect)), height)
        tiles = [
            captioned(
                Panel(heatmap(values, size), "" if head else f"layer {layer}"),
                height=height,
                font_size=15,
            )
            for head, values in enumerate(maps)
        ]
        rows.append(row(tiles, _HEAD_GAP))
    return rows


def tile_height(heads: int, layers: int, aspect: float, width: int) -> int:
    """The height at which as many layers as possible fit side by side and fill the width."""
    least, most = _TILE_HEIGHTS
    for across in range(layers, 0, -1):
        room = (width - (across - 1) * _LAYER_GAP) / across - (heads - 1) * _HEAD_GAP
        if (height := int(room / heads / aspect)) >= least or across == 1:
            return max(1, min(height, most))
    return least


def write_model_page(tracer: Tracer, distances: dict[str, Any] | None, out: Path) -> dict[str, str]:
    """Filters, position embeddings and attention distance, each in a file and all on one page."""
    panels = model_panels(tracer)
    if distances is not None:
        n = f"{distances['n']:,} image{'s' * (distances['n'] > 1)}"
        chart = distance_chart(distances["layers"], f"one dot per head, mean over {n}")
        panels["attention-distance"] = Panel(chart, "mean attention distance")
    files = {name: write_png(panel.image, out / f"{name}.png") for name, panel in panels.items()}
    strip = row([captioned(panel, height=panel.image.height) for panel in panels.values()], 36)
    subtitle = ", ".join(panels).replace("-", " ")
    files["page"] = write_png(page(tracer.title, subtitle, [strip]), out / "model.png")
    return files


def model_panels(tracer: Tracer) -> dict[str, Panel]:
    """What the weights alone show: filters, and position embeddings if there are any."""
    filters, positions = tracer.filters, tracer.positions
    shown = f"{len(filters.components)} strongest components of {filters.count} filters"
    rows, columns = filters.components.shape[-2:]
    caption = f"{filters.of}: {shown}, {rows} × {columns} px"
    panels = {"filters": Panel(filter_grid(filters), caption)}
    if positions is not None:
        caption = f"{positions.kind} position embeddings: cosine similarity"
        panels["positions"] = Panel(_position_chart(positions), caption)
    return panels


def write_png(image: Image.Image, path: Path) -> str:
    make_folder(path.parent)
    atomic_write(path, lambda part: image.save(part, "PNG", optimize=True))
    return str(path)


def _position_chart(positions: PositionSimilarity) -> Image.Image:
    """One small map per patch, at the place of the patch: its similarity to all patches."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(5.4, 4.5))
        axes = figure.add_subplot()
        mosaic, centers = tiled_maps(positions)
        shown = axes.imshow(mosaic, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        axes.set_xticks(centers[1], [str(int(number)) for number in positions.columns])
        axes.set_yticks(centers[0], [str(int(number)) for number in positions.rows])
        axes.tick_params(length=0, labelsize=8 if max(map(len, centers)) > 8 else 10)
        axes.set_xlabel("column of the patch")
        axes.set_ylabel("row of the patch")
        axes.spines[:].set_visible(False)
        bar: Any = figure.colorbar(shown, ax=axes, fraction=0.045, pad=0.03, ticks=[-1, 0, 1])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("cosine similarity", labelpad=2)
        return _rendered(figure)


def tiled_maps(
    positions: PositionSimilarity,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """All maps in one array with gaps between them, and the centers of its rows and columns."""
    maps = positions.maps.numpy()
    _, height, width = maps.shape
    rows, columns = len(positions.rows), len(positions.columns)
    gap = max(1, round(max(height, width) / 8))
    padded = np.pad(maps, ((0, 0), (0, gap), (0, gap)), constant_values=np.nan)
    mosaic = rearrange(padded, "(r c) y x -> (r y) (c x)", r=rows)[:-gap, :-gap]
    centers = (
        np.arange(rows) * (height + gap) + (height - 1) / 2,
        np.arange(columns) * (width + gap) + (width - 1) / 2,
    )
    return mosaic, centers


def distance_chart(layers: Sequence[dict[str, Any]], title: str) -> Image.Image:
    """A dot per head, by layer; the dashed line is the distance of uniform attention."""
    numbers = [layer["layer"] for layer in layers]
    uniform = [layer["uniform"] for layer in layers]
    with rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 4.2))
        axes = figure.add_subplot()
        for number, layer in zip(numbers, layers, strict=True):
            x = [number] * len(layer["heads"])
            axes.plot(x, layer["heads"], "o", color="#2a6f97", alpha=0.75, ms=6, mew=0)
        axes.step(numbers, uniform, where="mid", color=_MUTED, lw=1, ls=(0, (4, 3)))
        axes.annotate(
            f"uniform attention: {uniform[0]:.1f} px",
            (numbers[0], uniform[0]),
            (0, 5),
            textcoords="offset points",
            color=_MUTED,
            fontsize=9,
        )
        axes.set_ylim(0, 1.12 * max([*uniform, *(max(layer["heads"]) for layer in layers)]))
        axes.set_xlim(numbers[0] - 0.6, numbers[-1] + 0.6)
        few = len(numbers) <= 16
        locator = FixedLocator(numbers) if few else MaxNLocator(12, integer=True)
        axes.xaxis.set_major_locator(locator)
        axes.grid(axis="y", color=_RULE, lw=0.6)
        axes.tick_params(length=0)
        axes.set_xlabel("layer")
        axes.set_ylabel("mean attention distance (pixels)")
        axes.set_title(title, loc="left", fontsize=9, color=_MUTED, pad=8)
        return _rendered(figure)


def _rendered(figure: Figure) -> Image.Image:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, bbox_inches="tight", pad_inches=0.06)
    return Image.open(file, formats=["PNG"]).convert("RGB")
