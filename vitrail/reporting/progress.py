"""How training went: the curves of one run and what to know when reading them."""

from dataclasses import dataclass, replace

import numpy as np

from vitrail.reporting.charts import NARROW, WIDE, Frame, curves
from vitrail.reporting.curves import MOST_POINTS, Line, line, not_a_number, steps_per_epoch
from vitrail.reporting.folder import Run


@dataclass(frozen=True, kw_only=True)
class Key:
    """A colour of a chart and what it stands for."""

    colour: str
    label: str
    event: str
    name: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A drawing with its title and the meaning of its colours."""

    title: str
    keys: tuple[Key, ...]
    unit: str = ""
    scale: float = 1.0
    from_zero: bool = False
    size: tuple[int, int] = NARROW
    svg: str = ""

    @property
    def wide(self) -> bool:
        """Two fit beside each other, of the others three."""
        return self.size == WIDE


CHARTS = (
    Chart(
        title="Loss",
        keys=(
            Key(colour="train", label="train", event="train", name="loss"),
            Key(colour="val", label="val", event="val", name="loss"),
        ),
        size=WIDE,
    ),
    Chart(
        title="Accuracy on val",
        keys=(
            Key(colour="val", label="top-1", event="val", name="top1"),
            Key(colour="second", label="top-5", event="val", name="top5"),
        ),
        unit=" %",
        scale=100.0,
        size=WIDE,
    ),
    Chart(
        title="Learning rate",
        keys=(Key(colour="train", label="", event="train", name="lr"),),
        from_zero=True,
    ),
    Chart(
        title="Gradient norm",
        keys=(Key(colour="train", label="", event="train", name="grad_norm"),),
    ),
    Chart(
        title="Images per second",
        keys=(Key(colour="train", label="", event="train", name="images_per_second"),),
        from_zero=True,
    ),
    Chart(
        title="FLOP utilisation",
        keys=(Key(colour="train", label="", event="train", name="mfu"),),
        unit=" %",
        scale=100.0,
        from_zero=True,
    ),
)


def charts(run: Run, against: str) -> list[Chart]:
    """The curves that the metrics allow, against `step` or `seconds`."""
    per_epoch = steps_per_epoch(run.train if run.train else run.val)
    drawn = []
    for number, (chart, lines) in enumerate(drawable(run, against)):
        judged = any(key.event == "val" for key in chart.keys)
        frame = Frame(
            title=chart.title,
            against=against,
            per_epoch=per_epoch if against == "step" else 0.0,
            unit=chart.unit,
            mark=best_place(run, against) if judged else float("nan"),
            from_zero=chart.from_zero,
            size=chart.size,
        )
        drawn.append(replace(chart, svg=curves(f"{against}{number}", frame, lines)))
    return drawn


def drawable(run: Run, against: str) -> list[tuple[Chart, list[Line]]]:
    """Charts with something to show, and its lines; four small ones are better two by two."""
    events = {"train": run.train, "val": run.val}
    few_classes = 0 < run.info.fields("data").count("classes") <= 5
    found: list[tuple[Chart, list[Line]]] = []
    for chart in CHARTS:
        lines = {
            key: line(
                events[key.event], key.name, against=against, colour=key.colour, scale=chart.scale
            )
            for key in chart.keys
            if not (few_classes and key.name == "top5")
        }
        known = {key: one for key, one in lines.items() if np.isfinite(one.y).any()}
        if known:
            found.append((replace(chart, keys=tuple(known)), list(known.values())))
    if sum(not chart.wide for chart, _ in found) == 4:
        found = [(replace(chart, size=WIDE), lines) for chart, lines in found]
    return found


def best_place(run: Run, against: str) -> float:
    """Where on the axis val was best."""
    step = run.info.fields("best").number("step")
    if against == "step":
        return step
    places = run.val.column(against)[run.val.column("step") == step]
    return float(places[-1]) if len(places) else float("nan")


def curve_notes(run: Run) -> list[str]:
    """What the reader of the curves should know."""
    notes = [not_a_number(run.train, name) for name in ("loss", "grad_norm")]
    notes.append(not_a_number(run.val, "loss"))
    if run.notes["metrics.jsonl"]:
        notes.append(f"metrics.jsonl {run.notes['metrics.jsonl']}.")
    return list(filter(None, notes))


def curve_caption(run: Run) -> str:
    """What a point of a curve stands for."""
    said = [f"Training as logged, {len(run.train):,} lines."] if run.train else []
    if len(run.train) > MOST_POINTS:
        said.append(
            "Several lines fall on one point: the line is their mean, the band their range."
        )
    if run.val:
        said.append(f"Every validation on n = {run.val.n:,} images.")
    if np.isfinite(run.info.fields("best").number("step")):
        said.append("The dotted line marks the best step on val.")
    return " ".join(said)
