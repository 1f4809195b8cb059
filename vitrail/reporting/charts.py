"""Drawings as inline SVG whose colours and letters are the page's own.

matplotlib draws with stand-in colours, which become CSS variables here: one drawing serves light
and dark. Words from files never enter a drawing; the page writes them beside it.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from vitrail.reporting.curves import Line, time_unit
from vitrail.reporting.inside import Distances
from vitrail.reporting.results import Bin

RUN_COLOURS = tuple(f"run{index}" for index in range(10))
NAMES = ("muted", "rule", "train", "val", "second", "bad", *RUN_COLOURS)
STAND_INS = {name: f"#fe{index:02x}01" for index, name in enumerate(NAMES)}

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",
    "path.simplify": True,
    "font.size": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "axes.edgecolor": STAND_INS["rule"],
    "axes.labelcolor": STAND_INS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": STAND_INS["rule"],
    "grid.linewidth": 0.6,
    "xtick.color": STAND_INS["rule"],
    "ytick.color": STAND_INS["rule"],
    "xtick.labelcolor": STAND_INS["muted"],
    "ytick.labelcolor": STAND_INS["muted"],
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
WIDE, NARROW = (400, 220), (280, 170)
STEPS = [1, 2, 2.5, 5, 10]
FEW_POINTS = 40
LOG_RATIO = 100.0


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What surrounds the curves of a drawing."""

    title: str
    against: str
    """`step` or `seconds`."""
    per_epoch: float = 0.0
    """Steps per epoch, for a second label; zero for none."""
    unit: str = ""
    mark: float = float("nan")
    """A place to point out, such as the best step."""
    from_zero: bool = False
    """A plain axis that begins at zero: how large is the question, not by how many times."""
    size: tuple[int, int] = WIDE


def curves(key: str, frame: Frame, lines: Sequence[Line]) -> Markup:
    """Curves in one frame, or nothing where no point can be drawn."""
    drawn = [line for line in lines if np.isfinite(line.y).any()]
    if not drawn:
        return Markup()
    with rc_context(STYLE):
        figure, axes = blank(frame.size, top=24 if frame.per_epoch else 10)
        unit, scale = ("step", 1.0)
        if frame.against == "seconds":
            unit, scale = time_unit(max(float(line.x.max()) for line in drawn))
        for line in drawn:
            draw(axes, line, scale)
        if np.isfinite(frame.mark):
            axes.axvline(frame.mark / scale, color=STAND_INS["muted"], lw=0.8, ls=(0, (2, 3)))
        label_axes(axes, frame, unit, drawn)
        words = f"{frame.title} against {'steps' if unit == 'step' else 'time'}"
        return inline(figure, key, words)


def blank(size: tuple[int, int], top: int) -> tuple[Figure, Axes]:
    """An empty figure of so many points, with room for the labels."""
    width, height = size
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes(
        (46 / width, 22 / height, (width - 60) / width, (height - 22 - top) / height)
    )
    return figure, axes


def draw(axes: Axes, line: Line, scale: float) -> None:
    """One curve, with the range behind it where it is thinned."""
    colour = STAND_INS[line.colour]
    few = np.isfinite(line.y).sum() <= FEW_POINTS
    if line.thinned:
        axes.fill_between(line.x / scale, line.low, line.high, color=colour, alpha=0.18, lw=0)
    marker = "o" if few else None
    axes.plot(line.x / scale, line.y, color=colour, lw=1.6, ls=line.dashes, marker=marker, ms=2.6)


def label_axes(axes: Axes, frame: Frame, unit: str, lines: Sequence[Line]) -> None:
    """Numbers and names along the sides."""
    axes.margins(x=0.01)
    values = np.concatenate([np.concatenate([line.low, line.high]) for line in lines])
    values = values[np.isfinite(values)]
    if values.min() > 0 and values.max() > LOG_RATIO * values.min() and not frame.from_zero:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    if frame.from_zero and values.min() >= 0:
        axes.set_ylim(0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: plain(y) + frame.unit))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS, integer=unit == "step"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plain(x)))
    name_side(axes, unit, -1)
    if frame.per_epoch:
        above = axes.secondary_xaxis(
            "top",
            functions=(
                lambda step: np.asarray(step, float) / frame.per_epoch,
                lambda epoch: np.asarray(epoch, float) * frame.per_epoch,
            ),
        )
        above.xaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
        above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: plain(x)))
        above.tick_params(length=0, pad=3)
        above.spines["top"].set_visible(False)
        name_side(axes, "epoch", 1)


def name_side(axes: Axes, name: str, side: int) -> None:
    """What is counted below or above, at the left end of its numbers."""
    axes.annotate(
        name,
        (0, 0 if side < 0 else 1),
        (-6, -7 if side < 0 else 6),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top" if side < 0 else "bottom",
        color=STAND_INS["muted"],
    )


def plain(value: float) -> str:
    """`12,000`, `0.5` or `3e-05`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def calibration(key: str, bins: Sequence[Bin]) -> Markup:
    """How often answers of each confidence are right, above how many there are."""
    used = [
        one
        for one in bins
        if one.n and np.isfinite([one.low, one.high, one.accuracy, one.confidence]).all()
    ]
    if not used:
        return Markup()
    low, high, confidence, accuracy, n = (
        np.array([getattr(one, name) for one in used], dtype=float)
        for name in ("low", "high", "confidence", "accuracy", "n")
    )
    middle, width = (low + high) / 2, (high - low) * 0.86
    with rc_context(STYLE):
        figure = Figure(figsize=(320 / 72, 330 / 72))
        axes = figure.add_axes((46 / 320, 112 / 330, 260 / 320, 196 / 330))
        axes.bar(middle, accuracy, width, color=STAND_INS["val"], alpha=0.85)
        axes.hlines(confidence, low, high, color=STAND_INS["bad"], lw=1.8)
        axes.plot([0, 1], [0, 1], color=STAND_INS["muted"], lw=1, ls=(0, (2, 3)))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
        axes.tick_params(labelbottom=False)
        counts = figure.add_axes((46 / 320, 34 / 330, 260 / 320, 50 / 330))
        counts.bar(middle, n, width, color=STAND_INS["muted"], alpha=0.6)
        counts.yaxis.set_major_locator(MaxNLocator(2, steps=STEPS, integer=True))
        counts.yaxis.set_major_formatter(FuncFormatter(lambda y, _: plain(y)))
        counts.set_xlabel("confidence", loc="right", labelpad=1)
        for part, title in ((axes, "share right"), (counts, "images")):
            part.set_title(title, loc="left", fontsize=9.5, color=STAND_INS["muted"], pad=6)
            part.set_xlim(0, 1)
            part.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f} %"))
        return inline(figure, key, "Share of right answers against confidence")


def attention_distances(distances: Sequence[Distances]) -> Markup:
    """A dot for each head, by layer, under the line of heads that look everywhere alike."""
    if not distances:
        return Markup()
    with rc_context(STYLE):
        figure, axes = blank(WIDE, top=10)
        for one in distances:
            dots = {"color": STAND_INS["train"], "alpha": 0.8, "mew": 0}
            axes.plot([one.layer] * len(one.heads), one.heads, "o", ms=4.2, **dots)
        layers = [one.layer for one in distances]
        even = [one.uniform for one in distances]
        axes.step(layers, even, where="mid", color=STAND_INS["muted"], lw=1, ls=(0, (4, 3)))
        axes.set_ylim(0)
        axes.set_xlim(layers[0] - 0.6, layers[-1] + 0.6)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10], integer=True))
        name_side(axes, "layer", -1)
        return inline(figure, "distance", "Mean attention distance in pixels against layers")


def inline(figure: Figure, key: str, words: str) -> Markup:
    """The figure as part of a page: no prologue, its own ids, the page's colours and letters."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.S)
    svg = svg[svg.index("<svg") :]
    width, height = figure.get_size_inches() * 72
    opening = f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{words}">'
    svg = opening + svg[svg.index(">") + 1 :]
    used = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", svg)
    svg = re.sub(r' id="', f' id="{key}-', svg)
    svg = re.sub(r'xlink:href="#', f'href="#{key}-', svg)
    svg = re.sub(r"url\(#", f"url(#{key}-", svg)
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--sans)", svg)
    svg = re.sub(r"#fe(..)01", lambda m: f"var(--{NAMES[int(m[1], 16)]})", svg)
    return Markup(re.sub(r"\n\s*", "\n", svg).replace("<g>\n</g>\n", ""))
