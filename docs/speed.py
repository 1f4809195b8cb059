"""Draws the curves of docs/speed.md from the JSON of `vitrail benchmark`.

python docs/speed.py [docs/speed]

The folder has the files that `python benchmarks/growth.py --out docs/speed` writes, or any output
of `vitrail benchmark --json` under the same names. The drawings go to docs/images, and the part of
docs/speed.md below "## Curves" is written anew.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

DOCS = Path(__file__).parent
COLORS = ("#2549a8", "#c2452f", "#1c7a55", "#c9850f", "#6a3fa0", "#1a8a9c", "#b0347f", "#6f7d16")
"""Of the runs in a report; the other colors are its ink and rules, on white for dark pages."""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",
    "font.size": 9.5,
    "axes.edgecolor": "#e3dfd5",
    "axes.labelcolor": "#646b7a",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3dfd5",
    "grid.linewidth": 0.6,
    "xtick.color": "#646b7a",
    "ytick.color": "#646b7a",
    "legend.frameon": False,
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Plot:
    """One drawing: what is on its axes."""

    curve: str
    title: str
    x_label: str
    x: Callable[[Row], float | None]
    y_label: str
    y: Callable[[Row], float | None]


def _side(row: Row) -> float:
    return row["size"][0]


def _milliseconds(row: Row) -> float:
    return 1000 / row["images_per_second"]


def _both(curve: str, *rest: Any) -> list[Plot]:
    return [Plot(curve, *rest), Plot(f"{curve}-train", *rest)]


PLOTS = (
    *_both("size", "image size", "image side in pixels", _side, "ms per image", _milliseconds),
    *_both(
        *("batch", "batch", "images in a batch", lambda row: row["batch"]),
        *("images per second", lambda row: row["images_per_second"]),
    ),
    *_both("depth", "depth", "blocks", lambda row: row["depth"], "ms per image", _milliseconds),
    Plot(
        *("figure12", "peak speed (Figure 12, left)", "image side in pixels", _side),
        *("images per second", lambda row: row["images_per_second"]),
    ),
    Plot(
        *("figure12", "largest batch (Figure 12, right)", "image side in pixels", _side),
        *("images", lambda row: row["largest_batch"]),
    ),
    Plot(
        *("processes", "number of processes", "processes", lambda row: row["processes"]),
        *("images per second", lambda row: row["images_per_second"]),
    ),
)


def points(plot: Plot, rows: list[Row]) -> dict[str, list[tuple[float, float]]]:
    """Of each model, without rows that failed."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if "error" in row:
            continue
        parts = row["batches"] if plot.curve.startswith("batch") else [row]
        for part in parts:
            x, y = plot.x(row | part), plot.y(row | part)
            if x is not None and y is not None:
                found.setdefault(row["model"], []).append((x, y))
    return found


def draw(plot: Plot, rows: list[Row], target: Path) -> None:
    """Both axes are logarithmic, so that a power law is a straight line."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6, 3.0), layout="constrained", facecolor="white")
        axes = figure.add_subplot()
        lines = points(plot, rows)
        for color, (model, line) in zip(COLORS, lines.items(), strict=False):
            axes.plot(*zip(*line, strict=True), "o-", color=color, label=model, markersize=3)
        axes.set(xscale="log", yscale="log", xlabel=plot.x_label, ylabel=plot.y_label)
        places = sorted({x for line in lines.values() for x, _ in line})
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()
        heights = [y for line in lines.values() for _, y in line]
        axes.set_ylim(min(heights) / 1.5, max(heights) * 1.5)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.legend()
        figure.savefig(target, metadata={"Date": None})


def section(plot: Plot, found: dict[str, Any], image: str) -> list[str]:
    """Heading, drawing, conditions and what did not fit."""
    mode = found.get("mode", "inference")
    conditions = (found["hardware"], found["precision"], f"torch {found['torch']}", mode)
    errors = [
        f"- {row['model']} at {row.get('size', '')} pixels: {row['error']}"
        for row in found["results"]
        if "error" in row
    ]
    title = plot.title + (", training" if mode == "training" else "")
    lines = ["", f"### {title[0].upper()}{title[1:]}", "", f"![{title}](images/{image})", ""]
    command = [f"`{found['command']}`"] if "command" in found else []
    lines += [" · ".join(conditions) + (":" if command else ""), *command]
    return [*lines, *(["", *errors] if errors else [])]


def main(folder: Path) -> None:
    """Draw every curve that has a file."""
    (DOCS / "images").mkdir(exist_ok=True)
    page = DOCS / "speed.md"
    lines = [page.read_text(encoding="utf-8").partition("## Curves")[0] + "## Curves"]
    for number, plot in enumerate(PLOTS):
        file = folder / f"{plot.curve}.json"
        if not file.exists():
            continue
        found = json.loads(file.read_text(encoding="utf-8"))
        if not points(plot, found["results"]):
            continue
        image = f"speed-{number}-{plot.curve}.svg"
        draw(plot, found["results"], DOCS / "images" / image)
        lines += section(plot, found, image)
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else DOCS / "speed")
