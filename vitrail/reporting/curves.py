"""How training went: the charts of a run, as lines with few enough points."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from vitrail.reporting.charts import NARROW, WIDE, Frame, Line, draw_curves
from vitrail.reporting.loading import Rows, RunData, column
from vitrail.reporting.rendering import Number

Numbers = Float[np.ndarray, " n"]
Points = Float[np.ndarray, " points"]

MOST_POINTS = 500


@dataclass(frozen=True, kw_only=True)
class Key:
    """A color of a chart and what it stands for."""

    color: str
    event: str
    name: str
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing with its title and the meaning of its colors."""

    title: str
    keys: tuple[Key, ...] = ()
    unit: str = ""
    from_zero: bool = False
    size: tuple[int, int] = NARROW
    svg: str = ""

    @property
    def wide(self) -> bool:
        """Two fit beside each other, of the others three."""
        return self.size == WIDE


def _of_training(title: str, name: str, *, unit: str = "", from_zero: bool = True) -> Chart:
    keys = (Key(color="train", event="train", name=name),)
    return Chart(title=title, keys=keys, unit=unit, from_zero=from_zero)


_CHARTS = (
    Chart(
        title="Loss",
        keys=(
            Key(color="train", label="train", event="train", name="loss"),
            Key(color="val", label="val", event="val", name="loss"),
        ),
        size=WIDE,
    ),
    Chart(
        title="Accuracy on val",
        keys=(
            Key(color="val", label="top-1", event="val", name="top1"),
            Key(color="second", label="top-5", event="val", name="top5"),
        ),
        unit=" %",
        size=WIDE,
    ),
    _of_training("Learning rate", "lr"),
    _of_training("Gradient norm", "grad_norm", from_zero=False),
    _of_training("Images per second", "images_per_second"),
    _of_training("FLOP utilization", "mfu", unit=" %"),
)


def charts(run: RunData, against: str) -> list[Chart]:
    """The curves that the metrics allow, against `step` or `seconds`."""
    found = _with_lines(run, against)
    if sum(not chart.wide for chart, _ in found) == 4:  # better two by two
        found = [(replace(chart, size=WIDE), lines) for chart, lines in found]
    per_epoch = steps_per_epoch(run.train or run.val) if against == "step" else 0.0
    drawn = []
    for number, (chart, lines) in enumerate(found):
        has_val = any(key.event == "val" for key in chart.keys)
        frame = Frame(
            title=chart.title,
            against=against,
            per_epoch=per_epoch,
            unit=chart.unit,
            mark=_best_place(run, against) if has_val else None,
            from_zero=chart.from_zero,
            size=chart.size,
        )
        drawn.append(replace(chart, svg=draw_curves(f"{against}{number}", frame, lines)))
    return drawn


def _with_lines(run: RunData, against: str) -> list[tuple[Chart, list[Line]]]:
    """Charts with something to show, and its lines."""
    few_classes = 0 < (run.info["data"].get("classes") or 0) <= 5
    found = []
    for chart in _CHARTS:
        lines = {
            key: line(
                run.train if key.event == "train" else run.val,
                key.name,
                against=against,
                color=key.color,
                scale=100.0 if chart.unit else 1.0,
            )
            for key in chart.keys
            if not (few_classes and key.name == "top5")
        }
        known = {key: one for key, one in lines.items() if np.isfinite(one.y).any()}
        if known:
            found.append((replace(chart, keys=tuple(known)), list(known.values())))
    return found


def _best_place(run: RunData, against: str) -> Number:
    """Where on the axis val was best."""
    step = run.info["best"].get("step")
    places = [row.get(against) for row in run.val if row.get("step") == step]
    return step if against == "step" else places[-1] if places else None


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


def thin(x: Numbers, y: Numbers, most: int) -> tuple[Points, Points, Points, Points]:
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


def caption(run: RunData) -> str:
    """What a point of a curve stands for."""
    parts = [f"Training as logged, {len(run.train):,} lines."] if run.train else []
    if len(run.train) > MOST_POINTS:
        parts.append(
            "Several lines fall on one point: the line is their mean, the band their range."
        )
    if run.val:
        parts.append(f"Every validation on n = {run.val[-1].get('n') or 0:,} images.")
    if run.info["best"].get("step") is not None:
        parts.append("The dotted line marks the best step on val.")
    return " ".join(parts)


def cautions(run: RunData) -> list[str]:
    """What the reader of the curves should know."""
    sentences = [
        _not_finite(run.train, "loss"),
        _not_finite(run.train, "grad_norm"),
        _not_finite(run.val, "loss"),
    ]
    if damage := run.notes.get("metrics.jsonl"):
        sentences.append(f"metrics.jsonl {damage}.")
    return [sentence for sentence in sentences if sentence]


def _not_finite(rows: Rows, name: str) -> str:
    """A sentence where some values, but not all, are not finite."""
    odd = ~np.isfinite(column(rows, name))
    if not odd.any() or odd.all():
        return ""
    return (
        f"{odd.sum():,} of {len(rows):,} lines have no finite {name.replace('_', ' ')}, "
        f"the first at step {column(rows, 'step')[odd][0]:,.0f}."
    )
