"""Charts as inline SVG whose colors and fonts are the page's own.

matplotlib draws with placeholder colors, which become CSS variables here: one chart serves light
and dark. Text from files never enters a chart; the page writes it beside it.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Affine2D

from vitrail.reporting.loading import Rows, RunData, column

Points = Float[np.ndarray, " points"]

MOST_POINTS = 500
"""Points of one curve; more are averaged."""
RUN_COLORS = tuple(f"run{index}" for index in range(10))
_NAMES = ("muted", "rule", "train", "val", "second", "bad", *RUN_COLORS)
_PLACEHOLDERS = {name: f"#fe{index:02x}01" for index, name in enumerate(_NAMES)}

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vitrail",
    "path.simplify": True,
    "font.size": 9.5,
    "xtick.labelsize": 9.5,
    "ytick.labelsize": 9.5,
    "axes.edgecolor": _PLACEHOLDERS["rule"],
    "axes.labelcolor": _PLACEHOLDERS["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _PLACEHOLDERS["rule"],
    "grid.linewidth": 0.6,
    "xtick.color": _PLACEHOLDERS["rule"],
    "ytick.color": _PLACEHOLDERS["rule"],
    "xtick.labelcolor": _PLACEHOLDERS["muted"],
    "ytick.labelcolor": _PLACEHOLDERS["muted"],
    "ytick.major.size": 0,
    "xtick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
}
WIDE, _NARROW = (400, 220), (280, 170)
_STEPS = [1, 2, 2.5, 5, 10]
_FEW_POINTS = 40
_LOG_RATIO = 100.0
_X_LOG_RATIO = 10.0
_SIDES = np.array([(8, 7), (-8, 7), (8, -7), (-8, -7), (11, 0), (-11, 0), (0, 11), (0, -11)])
"""Where a letter can stand beside its point, in points of the page; the first is preferred."""
_ROOM = 10.0
"""How far from everything else a letter is far enough."""
_TIME_UNITS = (("h", 3600.0, 3 * 3600.0), ("min", 60.0, 180.0), ("s", 1.0, 0.0))


@dataclass(frozen=True)
class Series:
    """A value of the `train` or `val` events, and the color that stands for it."""

    event: str
    name: str
    color: str = "train"
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves in one frame."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    """`%` where the values are fractions."""
    from_zero: bool = False
    """A linear axis that begins at zero."""
    size: tuple[int, int] = _NARROW
    svg: str = ""

    @property
    def wide(self) -> bool:
        """Two of these fit side by side, of the others three."""
        return self.size == WIDE


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: where several measurements fall on a point, their mean and range."""

    x: Points
    y: Points
    low: Points
    high: Points
    color: str
    """A color of the page, by name."""
    dashes: str = "-"


@dataclass(frozen=True, kw_only=True)
class PointSeries:
    """Measurements of one color in a scatter chart."""

    x: Sequence[int | float]
    y: Sequence[int | float]
    color: str
    """A color of the page, by name."""
    label: str = ""
    """For the page's legend; it is not drawn."""
    error: Sequence[int | float] = ()
    """Of each `y`, up and down; zero draws no bar."""
    letters: Sequence[str] = ()
    """Drawn beside the points: letters of the page's own, never text from files."""
    joined: bool = False
    """A line through the points, from the left to the right."""
    marker: str = "o"
    """Of matplotlib."""


@dataclass(frozen=True, kw_only=True)
class Scatter:
    """Points in one frame."""

    title: str
    x_name: str
    series: Sequence[PointSeries]
    unit: str = ""
    """Of `y`: `%` where the values are percentages."""
    log: bool | None = None
    """A logarithmic x axis; None: if the values span more than a factor of ten."""
    log_y: bool = False
    front: bool = False
    """Draws the Pareto front of all points: small `x` and large `y`."""
    size: tuple[int, int] = (400, 240)
    svg: str = ""
    wide = True


_CHARTS = (
    Chart(
        title="Loss",
        series=(
            Series("train", "loss", label="train"),
            Series("val", "loss", color="val", label="val"),
        ),
        size=WIDE,
    ),
    Chart(
        title="Validation accuracy",
        series=(
            Series("val", "top1", color="val", label="top-1"),
            Series("val", "top5", color="second", label="top-5"),
            Series("val", "fewshot", color="train", label="few-shot"),
        ),
        unit="%",
        size=WIDE,
    ),
    Chart(title="Learning rate", series=(Series("train", "lr"),), from_zero=True),
    Chart(title="Gradient norm", series=(Series("train", "grad_norm"),)),
    Chart(
        title="Images per second", series=(Series("train", "images_per_second"),), from_zero=True
    ),
    Chart(title="FLOP utilization", series=(Series("train", "mfu"),), unit="%", from_zero=True),
)


def draw_run(run: RunData, against: str) -> list[Chart]:
    """The charts that a run has values for, against `step` or `seconds`."""
    charts = [(chart, lines) for chart in _CHARTS if (lines := _lines(run, chart, against))]
    # Four narrow charts would leave a row with one.
    all_wide = sum(not chart.wide for chart, _ in charts) == 4
    per_epoch = steps_per_epoch(run.train or run.val) if against == "step" else 0.0
    best = _best_position(run, against)
    return [
        draw_curves(
            replace(chart, series=tuple(lines), size=WIDE if all_wide else chart.size),
            list(lines.values()),
            against=against,
            key=f"{against}{number}",
            per_epoch=per_epoch,
            mark=best if any(one.event == "val" for one in lines) else None,
        )
        for number, (chart, lines) in enumerate(charts)
    ]


def _lines(run: RunData, chart: Chart, against: str) -> dict[Series, Line]:
    """The series of a chart that have values."""
    few_classes = 0 < (run.info["data"].get("classes") or 0) <= 5
    scale = 100.0 if chart.unit else 1.0
    lines = {
        one: line(run.rows(one.event), one.name, against=against, color=one.color, scale=scale)
        for one in chart.series
        if not (few_classes and one.name == "top5")
    }
    return {one: curve for one, curve in lines.items() if np.isfinite(curve.y).any()}


def _best_position(run: RunData, against: str) -> int | float | None:
    """Where on the axis val was best."""
    step = run.info["best"].get("step")
    if against == "step":
        return step
    return next((row.get(against) for row in reversed(run.val) if row.get("step") == step), None)


def line(
    rows: Rows,
    name: str,
    *,
    against: str,
    color: str,
    scale: float = 1.0,
    dashes: str = "-",
    most: int = MOST_POINTS,
) -> Line:
    """The values called `name`, times `scale`, against `step` or `seconds`."""
    x, y = column(rows, against), column(rows, name) * scale
    placed = np.isfinite(x)
    x, y, low, high = thin(x[placed], y[placed], most)
    return Line(x=x, y=y, low=low, high=high, color=color, dashes=dashes)


def thin(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], most: int
) -> tuple[Points, Points, Points, Points]:
    """At most so many points: the middle of each bucket, its mean, lowest and highest."""
    if len(x) <= most:
        return x, y, y, y
    starts = np.linspace(0, len(x), most, endpoint=False).astype(int)
    finite = np.isfinite(y)
    counts = np.add.reduceat(finite.astype(float), starts)
    known = counts > 0  # else a gap
    sums = np.add.reduceat(np.where(finite, y, 0.0), starts)
    middles = np.add.reduceat(x, starts) / np.diff([*starts, len(x)])
    means = np.where(known, sums / np.maximum(counts, 1), np.nan)
    low = np.where(known, np.minimum.reduceat(np.where(finite, y, np.inf), starts), np.nan)
    high = np.where(known, np.maximum.reduceat(np.where(finite, y, -np.inf), starts), np.nan)
    return middles, means, low, high


def steps_per_epoch(rows: Rows) -> float:
    """How many updates see every image once; zero where the rows do not say."""
    steps, epochs = column(rows, "step"), column(rows, "epoch")
    known = np.isfinite(epochs) & (epochs > 0) & (steps > 0)
    return float(steps[known][-1] / epochs[known][-1]) if known.any() else 0.0


def draw_curves(
    chart: Chart,
    lines: Sequence[Line],
    *,
    against: str,
    key: str,
    per_epoch: float = 0.0,
    mark: int | float | None = None,
) -> Chart:
    """The chart with its SVG, which is empty where no point can be drawn.

    `key` makes its ids unique, `per_epoch` (steps) adds an axis of epochs, and `mark` is a
    position to point out.
    """
    drawn = [one for one in lines if np.isfinite(one.y).any()]
    if not drawn:
        return chart
    with rc_context(_STYLE):
        figure, axes = _blank(chart.size, top=24 if per_epoch else 10)
        unit, scale = "step", 1.0
        if against == "seconds":
            unit, scale = time_unit(max(float(one.x.max()) for one in drawn))
        for one in drawn:
            _plot(axes, one, scale)
        if mark is not None:
            axes.axvline(mark / scale, color=_PLACEHOLDERS["muted"], lw=0.8, ls=(0, (2, 3)))
        _label_axes(axes, chart, unit, drawn)
        if per_epoch:
            _add_epochs(axes, per_epoch)
        words = f"{chart.title} by {'step' if against == 'step' else 'time'}"
        return replace(chart, svg=_inline(figure, key, words))


def time_unit(longest: float) -> tuple[str, float]:
    """Seconds, minutes or hours, and how many seconds that is."""
    return next((unit, size) for unit, size, least in _TIME_UNITS if longest >= least)


def _blank(size: tuple[int, int], top: int, bottom: int = 22) -> tuple[Figure, Axes]:
    width, height = size
    figure = Figure(figsize=(width / 72, height / 72))
    axes = figure.add_axes(
        (46 / width, bottom / height, (width - 60) / width, (height - bottom - top) / height)
    )
    return figure, axes


def _plot(axes: Axes, curve: Line, scale: float) -> None:
    """One curve, with the range of its averaged points behind it."""
    x, color = curve.x / scale, _PLACEHOLDERS[curve.color]
    if not np.array_equal(curve.low, curve.high, equal_nan=True):
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.18, lw=0)
    marker = "o" if np.isfinite(curve.y).sum() <= _FEW_POINTS else None
    axes.plot(x, curve.y, color=color, lw=1.6, ls=curve.dashes, marker=marker, ms=2.6)


def _label_axes(axes: Axes, chart: Chart, unit: str, lines: Sequence[Line]) -> None:
    axes.margins(x=0.01)
    values = np.concatenate([np.concatenate([one.low, one.high]) for one in lines])
    values = values[np.isfinite(values)]
    if values.min() > 0 and values.max() > _LOG_RATIO * values.min() and not chart.from_zero:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    if chart.from_zero and values.min() >= 0:
        axes.set_ylim(0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _plain(y) + chart.unit))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS, integer=unit == "step"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _plain(x)))
    _name_side(axes, unit, -1)


def _add_epochs(axes: Axes, per_epoch: float) -> None:
    """A second axis above the chart."""
    above = axes.secondary_xaxis(
        "top",
        functions=(
            lambda step: np.asarray(step, float) / per_epoch,
            lambda epoch: np.asarray(epoch, float) * per_epoch,
        ),
    )
    above.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    above.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _plain(x)))
    above.tick_params(length=0, pad=3)
    above.spines["top"].set_visible(False)
    _name_side(axes, "epoch", 1)


def _name_side(axes: Axes, name: str, side: int) -> None:
    """The name of the axis below or above, at the left end of its numbers."""
    axes.annotate(
        name,
        (0, 0 if side < 0 else 1),
        (-6, -7 if side < 0 else 6),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top" if side < 0 else "bottom",
        color=_PLACEHOLDERS["muted"],
    )


def _plain(value: float) -> str:
    """`12,000`, `0.5` or `3e-05`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def pareto_front(pairs: Sequence[tuple[int | float, int | float]]) -> list[int]:
    """Where the pairs (cost, accuracy) are that no other beats, by cost.

    Another beats a pair if it costs no more and is no less accurate, unless both are equal.
    """
    front: list[int] = []
    for index in sorted(range(len(pairs)), key=lambda i: (pairs[i][0], -pairs[i][1])):
        last = pairs[front[-1]] if front else (0.0, -np.inf)
        if pairs[index][1] > last[1] or pairs[index] == last:
            front.append(index)
    return front


def draw_scatter(scatter: Scatter, key: str) -> Scatter:
    """The chart with its SVG, which is empty if there are no points; `key` makes its ids unique."""
    x = np.array([value for one in scatter.series for value in one.x], dtype=float)
    y = np.array([value for one in scatter.series for value in one.y], dtype=float)
    if not len(x):
        return scatter
    with rc_context(_STYLE):
        figure, axes = _blank(scatter.size, top=10, bottom=38)
        axes.margins(0.06, 0.12)
        for one in scatter.series:
            _plot_points(axes, one)
        _label_scatter(axes, scatter, x)
        if scatter.front:
            _plot_front(axes, x, y)
        _letter(axes, scatter.series)
        words = f"{scatter.title} by {scatter.x_name}"
        return replace(scatter, svg=_inline(figure, key, words))


def _plot_points(axes: Axes, series: PointSeries) -> None:
    color = _PLACEHOLDERS[series.color]
    if series.joined:
        order = np.argsort(series.x, kind="stable")
        axes.plot(np.take(series.x, order), np.take(series.y, order), color=color, lw=1.4)
    for x, y, error in zip(series.x, series.y, series.error, strict=False):
        if error:
            axes.errorbar(x, y, error, color=color, elinewidth=1.2, capsize=2.5)
    axes.plot(series.x, series.y, series.marker, color=color, ms=5.5, mew=0)


def _label_scatter(axes: Axes, scatter: Scatter, x: Points) -> None:
    log = scatter.log
    if log is None:
        log = x.min() > 0 and x.max() > _X_LOG_RATIO * x.min()
    if log:
        axes.set_xscale("log")
        few = x.max() < 100 * x.min()  # labels of more would overlap
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _plain(x)))
    axes.set_xlabel(scatter.x_name, loc="right", labelpad=2)
    if scatter.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _plain(y) + scatter.unit))
    # What is drawn from here on does not move the axes.
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())


def _plot_front(axes: Axes, x: Points, y: Points) -> None:
    """A step line to the right end of the chart, and a ring around each point on it."""
    front = pareto_front(list(zip(x.tolist(), y.tolist(), strict=True)))
    color = _PLACEHOLDERS["muted"]
    ends = [*x[front], axes.get_xlim()[1]], [*y[front], y[front[-1]]]
    axes.step(*ends, where="post", color=color, lw=1, ls=(0, (4, 3)), zorder=1.5)
    axes.plot(x[front], y[front], "o", ms=10, mfc="none", mec=color, mew=1.1)


def _letter(axes: Axes, series: Sequence[PointSeries]) -> None:
    """The letters beside their points, each on the side with the most room."""
    to_page = axes.transData + Affine2D().scale(72 / axes.figure.dpi)
    places = [to_page.transform(np.column_stack([one.x, one.y])) for one in series]
    taken = np.concatenate(places)
    for one, points in zip(series, places, strict=True):
        for letters, place in zip(one.letters, points, strict=False):
            distances = np.linalg.norm((place + _SIDES)[:, None] - taken, axis=2).min(1)
            side = _SIDES[np.minimum(distances, _ROOM).argmax()]
            taken = np.concatenate([taken, [place + side]])
            axes.annotate(
                letters,
                place,
                side,
                xycoords="figure points",
                textcoords="offset points",
                ha="center",
                va="center",
                weight="bold",
                color=_PLACEHOLDERS[one.color],
                parse_math=False,
            )


def draw_calibration(key: str, bins: Sequence[dict[str, Any]]) -> Markup:
    """Accuracy in each bin of confidence, above the number of images in it."""
    used = [one for one in bins if one["n"]]
    low, high, confidence, accuracy, n = (
        np.array([one[name] for one in used], dtype=float)
        for name in ("low", "high", "confidence", "accuracy", "n")
    )
    middle, width = (low + high) / 2, (high - low) * 0.86
    with rc_context(_STYLE):
        figure = Figure(figsize=(320 / 72, 330 / 72))
        axes = figure.add_axes((46 / 320, 112 / 330, 260 / 320, 196 / 330))
        axes.bar(middle, accuracy, width, color=_PLACEHOLDERS["val"], alpha=0.85)
        axes.hlines(confidence, low, high, color=_PLACEHOLDERS["bad"], lw=1.8)
        axes.plot([0, 1], [0, 1], color=_PLACEHOLDERS["muted"], lw=1, ls=(0, (2, 3)))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}%"))
        axes.tick_params(labelbottom=False)
        counts = figure.add_axes((46 / 320, 34 / 330, 260 / 320, 50 / 330))
        counts.bar(middle, n, width, color=_PLACEHOLDERS["muted"], alpha=0.6)
        counts.yaxis.set_major_locator(MaxNLocator(2, steps=_STEPS, integer=True))
        counts.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _plain(y)))
        counts.set_xlabel("confidence", loc="right", labelpad=1)
        for part, title in ((axes, "accuracy"), (counts, "images")):
            part.set_title(title, loc="left", fontsize=9.5, color=_PLACEHOLDERS["muted"], pad=6)
            part.set_xlim(0, 1)
            part.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{100 * x:.0f}%"))
        return _inline(figure, key, "Accuracy by confidence")


def draw_distances(layers: Sequence[dict[str, Any]], key: str = "distance") -> Markup:
    """A dot for each head by layer, and a line for uniform attention."""
    if not layers:
        return Markup()
    with rc_context(_STYLE):
        figure, axes = _blank(WIDE, top=10)
        for row in layers:
            dots = {"color": _PLACEHOLDERS["train"], "alpha": 0.8, "mew": 0}
            axes.plot([row["layer"]] * len(row["heads"]), row["heads"], "o", ms=4.2, **dots)
        places = [row["layer"] for row in layers]
        even = [row["uniform"] for row in layers]
        axes.step(places, even, where="mid", color=_PLACEHOLDERS["muted"], lw=1, ls=(0, (4, 3)))
        axes.set_ylim(0)
        axes.set_xlim(places[0] - 0.6, places[-1] + 0.6)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
        axes.xaxis.set_major_locator(MaxNLocator(12, steps=[1, 2, 5, 10], integer=True))
        _name_side(axes, "layer", -1)
        return _inline(figure, key, "Mean attention distance in pixels by layer")


def _inline(figure: Figure, key: str, words: str) -> Markup:
    """The figure as part of a page: no prologue, its own ids, the page's colors and fonts."""
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
    svg = re.sub(r"(font: [\d.]+px|font-family:) [^;\"]*", r"\1 var(--sans)", svg)
    svg = re.sub(r"#fe(..)01", lambda m: f"var(--{_NAMES[int(m[1], 16)]})", svg)
    return Markup(re.sub(r"\n\s*", "\n", svg).replace("<g>\n</g>\n", ""))
