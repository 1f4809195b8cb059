"""Drawings as inline SVG whose colors and letters are the page's own.

matplotlib draws with stand-in colors, which become CSS variables here: one drawing serves light
and dark. Words from files never enter a drawing; the page writes them beside it.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

Points = Float[np.ndarray, " points"]

RUN_COLORS = tuple(f"run{index}" for index in range(10))
_NAMES = ("muted", "rule", "train", "val", "second", "bad", *RUN_COLORS)
_STAND_INS = {name: f"#fe{index:02x}01" for index, name in enumerate(_NAMES)}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",
    "path.simplify": True,
    "font.size": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "axes.edgecolor": _STAND_INS["rule"],
    "axes.labelcolor": _STAND_INS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _STAND_INS["rule"],
    "grid.linewidth": 0.6,
    "xtick.color": _STAND_INS["rule"],
    "ytick.color": _STAND_INS["rule"],
    "xtick.labelcolor": _STAND_INS["muted"],
    "ytick.labelcolor": _STAND_INS["muted"],
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
WIDE, NARROW = (400, 220), (280, 170)
_STEPS = [1, 2, 2.5, 5, 10]
_FEW_POINTS = 40
_LOG_RATIO = 100.0
_TIME_UNITS = (("h", 3600.0, 3 * 3600.0), ("min", 60.0, 180.0), ("s", 1.0, 0.0))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: where many measurements fall on a point, their mean and their range."""

    x: Points
    y: Points
    low: Points
    high: Points
    color: str
    """A color of the page, by name."""
    dashes: str = "-"

    @property
    def thinned(self) -> bool:
        return not np.array_equal(self.low, self.high, equal_nan=True)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """What surrounds the curves of a drawing."""

    title: str
    against: str
    """`step` or `seconds`."""
    per_epoch: float = 0.0
    """Steps per epoch, for a second label; zero for none."""
    unit: str = ""
    mark: int | float | None = None
    """A place to point out, such as the best step."""
    from_zero: bool = False
    """A plain axis that begins at zero: how large is the question, not by how many times."""
    size: tuple[int, int] = WIDE


def draw_curves(key: str, frame: Frame, lines: Sequence[Line]) -> Markup:
    """Curves in one frame, or nothing where no point can be drawn."""
    drawn = [line for line in lines if np.isfinite(line.y).any()]
    if not drawn:
        return Markup()
    with rc_context(_STYLE):
        figure, axes = _blank(frame.size, top=24 if frame.per_epoch else 10)
        unit, scale = ("step", 1.0)
        if frame.against == "seconds":
            unit, scale = time_unit(max(float(line.x.max()) for line in drawn))
        for line in drawn:
            _draw(axes, line, scale)
        if frame.mark is not None:
            axes.axvline(frame.mark / scale, color=_STAND_INS["muted"], lw=0.8, ls=(0, (2, 3)))
        _label_axes(axes, frame, unit, drawn)
        words = f"{frame.title} against {'steps' if unit == 'step' else 'time'}"
        return _inline(figure, key, words)


def time_unit(longest: float) -> tuple[str, float]:
    """Seconds, minutes or hours, and how many seconds that is."""
    return next((unit, size) for unit, size, least in _TIME_UNITS if longest >= least)


def _blank(size: tuple[int, int], top: int) -> tuple[Figure, Axes]:
    width, height = size
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes(
        (46 / width, 22 / height, (width - 60) / width, (height - 22 - top) / height)
    )
    return figure, axes


def _draw(axes: Axes, line: Line, scale: float) -> None:
    """One curve, with the range behind it where it is thinned."""
    color = _STAND_INS[line.color]
    few = np.isfinite(line.y).sum() <= _FEW_POINTS
    if line.thinned:
        axes.fill_between(line.x / scale, line.low, line.high, color=color, alpha=0.18, lw=0)
    marker = "o" if few else None
    axes.plot(line.x / scale, line.y, color=color, lw=1.6, ls=line.dashes, marker=marker, ms=2.6)


def _label_axes(axes: Axes, frame: Frame, unit: str, lines: Sequence[Line]) -> None:
    axes.margins(x=0.01)
    values = np.concatenate([np.concatenate([line.low, line.high]) for line in lines])
    values = values[np.isfinite(values)]
    if values.min() > 0 and values.max() > _LOG_RATIO * values.min() and not frame.from_zero:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    if frame.from_zero and values.min() >= 0:
        axes.set_ylim(0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _plain(y) + frame.unit))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS, integer=unit == "step"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _plain(x)))
    _name_side(axes, unit, -1)
    if frame.per_epoch:
        above = axes.secondary_xaxis(
            "top",
            functions=(
                lambda step: np.asarray(step, float) / frame.per_epoch,
                lambda epoch: np.asarray(epoch, float) * frame.per_epoch,
            ),
        )
        above.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
        above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _plain(x)))
        above.tick_params(length=0, pad=3)
        above.spines["top"].set_visible(False)
        _name_side(axes, "epoch", 1)


def _name_side(axes: Axes, name: str, side: int) -> None:
    """What is counted below or above, at the left end of its numbers."""
    axes.annotate(
        name,
        (0, 0 if side < 0 else 1),
        (-6, -7 if side < 0 else 6),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top" if side < 0 else "bottom",
        color=_STAND_INS["muted"],
    )


def _plain(value: float) -> str:
    """`12,000`, `0.5` or `3e-05`."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def draw_calibration(key: str, bins: Sequence[dict[str, Any]]) -> Markup:
    """How often answers of each confidence are right, above how many there are."""
    used = [one for one in bins if one["n"]]
    if not used:
        return Markup()
    low, high, confidence, accuracy, n = (
        np.array([one[name] for one in used], dtype=float)
        for name in ("low", "high", "confidence", "accuracy", "n")
    )
    middle, width = (low + high) / 2, (high - low) * 0.86
    with rc_context(_STYLE):
        figure = Figure(figsize=(320 / 72, 330 / 72))
        axes = figure.add_axes((46 / 320, 112 / 330, 260 / 320, 196 / 330))
        axes.bar(middle, accuracy, width, color=_STAND_INS["val"], alpha=0.85)
        axes.hlines(confidence, low, high, color=_STAND_INS["bad"], lw=1.8)
        axes.plot([0, 1], [0, 1], color=_STAND_INS["muted"], lw=1, ls=(0, (2, 3)))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
        axes.tick_params(labelbottom=False)
        counts = figure.add_axes((46 / 320, 34 / 330, 260 / 320, 50 / 330))
        counts.bar(middle, n, width, color=_STAND_INS["muted"], alpha=0.6)
        counts.yaxis.set_major_locator(MaxNLocator(2, steps=_STEPS, integer=True))
        counts.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _plain(y)))
        counts.set_xlabel("confidence", loc="right", labelpad=1)
        for part, title in ((axes, "share right"), (counts, "images")):
            part.set_title(title, loc="left", fontsize=9.5, color=_STAND_INS["muted"], pad=6)
            part.set_xlim(0, 1)
            part.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f} %"))
        return _inline(figure, key, "Share of right answers against confidence")


def draw_distances(layers: Sequence[dict[str, Any]]) -> Markup:
    """A dot for each head, by layer, under the line of heads that attend uniformly."""
    if not layers:
        return Markup()
    with rc_context(_STYLE):
        figure, axes = _blank(WIDE, top=10)
        for row in layers:
            dots = {"color": _STAND_INS["train"], "alpha": 0.8, "mew": 0}
            axes.plot([row["layer"]] * len(row["heads"]), row["heads"], "o", ms=4.2, **dots)
        places = [row["layer"] for row in layers]
        even = [row["uniform"] for row in layers]
        axes.step(places, even, where="mid", color=_STAND_INS["muted"], lw=1, ls=(0, (4, 3)))
        axes.set_ylim(0)
        axes.set_xlim(places[0] - 0.6, places[-1] + 0.6)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
        axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10], integer=True))
        _name_side(axes, "layer", -1)
        return _inline(figure, "distance", "Mean attention distance in pixels against layers")


def _inline(figure: Figure, key: str, words: str) -> Markup:
    """The figure as part of a page: no prologue, its own ids, the page's colors and letters."""
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
    svg = re.sub(r"#fe(..)01", lambda m: f"var(--{_NAMES[int(m[1], 16)]})", svg)
    return Markup(re.sub(r"\n\s*", "\n", svg).replace("<g>\n</g>\n", ""))
