"""Drawings with axes: position similarity as a grid of grids, attention distance by depth."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from PIL import Image

from vitrail.inspection.structure import Similarity

INK, MUTED, RULE, DOT = "#1c1c1e", "#696970", "#d9d9de", "#2a6f97"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
}
SHARPNESS = 110
FEW_LAYERS = 16


def position_chart(found: Similarity) -> Image.Image:
    """One small map for each patch, where that patch lies: how alike its embedding is to all."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.4, 4.5))
        axes = figure.add_subplot()
        mosaic, centers = tiled(found)
        shown = axes.imshow(mosaic, cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
        axes.set_xticks(centers[1], [str(int(place)) for place in found.columns])
        axes.set_yticks(centers[0], [str(int(place)) for place in found.rows])
        axes.tick_params(length=0, labelsize=8 if max(map(len, centers)) > 8 else 10)
        axes.set_xlabel("column of the patch")
        axes.set_ylabel("row of the patch")
        axes.spines[:].set_visible(False)
        bar: Any = figure.colorbar(shown, ax=axes, fraction=0.045, pad=0.03, ticks=[-1, 0, 1])
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=0)
        bar.set_label("cosine similarity", labelpad=2)
        return rendered(figure)


def tiled(found: Similarity) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """All maps in one array with empty lines between them, and the centers of rows and columns."""
    _, height, width = found.maps.shape
    rows, columns = len(found.rows), len(found.columns)
    gap = max(1, round(max(height, width) / 8))
    down, across = height + gap, width + gap
    mosaic = np.full((rows * down - gap, columns * across - gap), np.nan, dtype=np.float32)
    for number, one in enumerate(found.maps.numpy()):
        y, x = number // columns * down, number % columns * across
        mosaic[y : y + height, x : x + width] = one
    centers = (
        np.arange(rows) * down + (height - 1) / 2,
        np.arange(columns) * across + (width - 1) / 2,
    )
    return mosaic, centers


def distance_chart(
    distances: Mapping[int, Sequence[float]], uniform: Mapping[int, float], words: str
) -> Image.Image:
    """A dot for each head, by layer; the line is where a head that looks at all alike would be."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 4.2))
        axes = figure.add_subplot()
        layers = sorted(distances)
        for layer in layers:
            heads = distances[layer]
            axes.plot([layer] * len(heads), heads, "o", color=DOT, alpha=0.75, ms=6, mew=0)
        even = [uniform[layer] for layer in layers]
        axes.step(layers, even, where="mid", color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.annotate(
            f"looking everywhere alike: {even[0]:.1f} px",
            (layers[0], even[0]),
            (0, 5),
            textcoords="offset points",
            color=MUTED,
            fontsize=9,
        )
        axes.set_ylim(0, 1.12 * max([*even, *(max(distances[layer]) for layer in layers)]))
        axes.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)
        few = len(layers) <= FEW_LAYERS
        axes.xaxis.set_major_locator(FixedLocator(layers) if few else MaxNLocator(12, integer=True))
        axes.grid(axis="y", color=RULE, lw=0.6)
        axes.tick_params(length=0)
        axes.set_xlabel("layer")
        axes.set_ylabel("mean attention distance (pixels)")
        axes.set_title(words, loc="left", fontsize=9, color=MUTED, pad=8)
        return rendered(figure)


def rendered(figure: Figure) -> Image.Image:
    """The figure as a picture, cut to what is drawn."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=SHARPNESS, bbox_inches="tight", pad_inches=0.06)
    file.seek(0)
    return Image.open(file, formats=["PNG"]).convert("RGB")
