"""The pages of a study: one for each experiment, and the scoreboard of all claims."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from urllib.parse import quote

from vitrail.console import NONE, mean_std, plural
from vitrail.evaluation.show import Table
from vitrail.files import write_text
from vitrail.reporting.charts import (
    RUN_COLORS,
    PointSeries,
    Scatter,
    draw_distances,
    draw_scatter,
)
from vitrail.reporting.rendering import (
    duration,
    operations,
    operations_unit,
    significant,
    write_page,
)
from vitrail.reproduction.claims import Decision, Part, Results, decide
from vitrail.reproduction.experiment import (
    Arm,
    Cell,
    Claim,
    Experiment,
    Point,
    experiment_names,
    known_measures,
    shared_scales,
)
from vitrail.reproduction.significance import ALPHA

_TEMPLATES = "vitrail.reproduction"
_FRACTIONS = ("top1", "fewshot", "val_top1", "real")
_COMPUTE = ("exaflops", "compute")
_UNITS = dict.fromkeys(
    ("distance_growth", "head_spread_fall", "most_local_head"), " of uniform attention"
)
_TITLES = {
    "top1": "test top-1",
    "fewshot": "5-shot",
    "val_top1": "val top-1",
    "real": "ImageNet ReaL",
    "layers": "layers",
    "width": "hidden size",
    "mlp": "MLP size",
    "heads": "heads",
    "parameters": "parameters",
    "gmacs": "GMACs",
    "images_per_second": "images/s",
    "largest_batch": "largest batch",
    "distance_growth": "growth of attention distance",
    "head_spread_fall": "fall of its spread over heads",
    "row_column_similarity": "similarity in rows and columns",
    "pretraining_device_days": "pre-training, device time",
}
_IMAGES = {
    "filters": "Filters of the patch embedding, principal components",
    "positions": "Similarity of each position embedding with all others",
    "picture": "Image, attention rollout, rollout for the class, patch features",
}
NOT_MEASURED = "not measured"


def write_experiment(folder: Path, results: Results) -> Path:
    """The page of an experiment: the paper's table or figure, ours, claims and every run."""
    design, experiment = results.design, results.design.experiment
    published = experiment.published
    runs = [
        (cell, seed, result) for cell in design.cells for seed, result in results.of(cell).items()
    ]
    ours, details = _table(results), _details(results)
    return write_page(
        folder / f"{experiment.name}.html",
        "experiment.html",
        package=_TEMPLATES,
        experiment=experiment,
        given_as=experiment.name + ("" if experiment.name in experiment_names() else ".toml"),
        scale=design.scale,
        scale_name=design.name,
        decisions=[_decision_row(one) for one in decisions(results)],
        paper_table=Table(title="", columns=published.columns, rows=published.rows, note="")
        if published.rows
        else None,
        paper_chart=_published_chart(results),
        table_ours=ours,
        charts_ours=_charts(results),
        details=None if details == ours else details,
        inside=_inside(results),
        measure=_TITLES.get(experiment.measure, experiment.measure),
        chart_measure=_y_name(results),
        conditions=_conditions([result for _, _, result in runs]),
        runs=[_run_row(results, *run) for run in runs],
    )


def _inside(results: Results) -> list[dict[str, Any]]:
    """The drawings of each cell's first run that has some: captions and data URIs."""
    rows: list[dict[str, Any]] = []
    if "inspection" not in results.design.experiment.measures:
        return rows  # another experiment has some of the same runs
    for number, cell in enumerate(results.design.cells):
        drawn = (one for one in results.of(cell).values() if one.get("images"))
        if result := next(drawn, None):
            layers = (result.get("distances") or {}).get("layers", ())
            images = result["images"].items()
            rows.append(
                {
                    "cell": cell.name,
                    "distances": draw_distances(layers, f"distance-{number}"),
                    "images": [(_IMAGES.get(n.partition("-")[0], n), uri) for n, uri in images],
                }
            )
    return rows


def decisions(results: Results) -> list[Decision]:
    return [decide(claim, results) for claim in results.design.claims]


def write_scoreboard(folder: Path, scale: str, all_results: Sequence[Results]) -> Path:
    """The claims of all experiments, as a page and as Markdown; those without results are named."""
    rows, without = [], []
    counts = dict.fromkeys(("held", "not held", "undecided", NOT_MEASURED), 0)
    for results in all_results:
        experiment, decided = results.design.experiment, decisions(results)
        for decision in decided:
            counts[decision.verdict or NOT_MEASURED] += 1
        has_page = (folder / f"{experiment.name}.html").exists()
        # Without a page, it may share a few runs with another experiment.
        if has_page or any(decision.verdict for decision in decided):
            shared = {"experiment": experiment, "has_page": has_page}
            rows += [shared | _decision_row(decision) for decision in decided]
        else:
            without.append(experiment)
    write_text(folder / "README.md", _markdown(scale, rows, without, counts))
    return write_page(
        folder / "index.html",
        "scoreboard.html",
        package=_TEMPLATES,
        scale_name=scale,
        about=shared_scales()[scale].about,
        rows=rows,
        without=without,
        counts=counts,
    )


def _markdown(
    scale: str,
    rows: Sequence[dict[str, Any]],
    without: Sequence[Experiment],
    counts: dict[str, int],
) -> str:
    summary = ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)
    lines = [
        f"# Claims of the paper at the {scale} scale",
        "",
        f"{plural(sum(counts.values()), 'claim')}: {summary}. Written by "
        f"`vitrail paper --scale {scale}`; differences are paired by seed, intervals cover 95%.",
    ]
    if rows:
        lines += ["", "| experiment | claim | verdict | evidence |", "|---|---|---|---|"]
    for row in rows:
        name = row["experiment"].name
        link = _literal(name)
        if row["has_page"]:
            link = f"[{link}]({quote(name)}.html)"
        evidence = "<br>".join(map(_literal, row["evidence"]))
        lines.append(f"| {link} | {_literal(row['text'])} | {row['verdict']} | {evidence} |")
    if without:
        lines += ["", f"Not run: {', '.join(_literal(one.name) for one in without)}."]
    return "\n".join(lines) + "\n"


def _literal(text: str) -> str:
    """Text in a cell of a Markdown table, where nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


# Claims


def _decision_row(decision: Decision) -> dict[str, Any]:
    claim = decision.claim
    verdict = decision.verdict or NOT_MEASURED
    return {
        "text": claim.text,
        "paper": claim.paper,
        "verdict": verdict,
        "css": verdict.replace(" ", "-"),
        "evidence": [evidence(part, claim) for part in decision.parts],
    }


def evidence(part: Part, claim: Claim) -> str:
    """`class − mean: +0.31 points (−0.10 to +0.72), n = 5`."""
    found = part.estimate
    if found is None:
        return f"{part.name}: {'no common range' if part.apart else NOT_MEASURED}"
    scale, unit = _unit(claim)
    text = f"{part.name}: {_signed(scale * found.mean, unit)}{unit}"
    if found.low is not None and found.high is not None:
        coverage = "90%: " if found.coverage < 1 - ALPHA else ""
        low, high = (_signed(scale * end, unit) for end in (found.low, found.high))
        text += f" ({coverage}{low} to {high})"
        text += f", n = {found.n}"
        text += f", {part.diverged} diverged" if part.diverged else ""
    elif found.n == 1 and found.verdict == "undecided":
        text += ", one seed"
    elif claim.test == "positive":
        text += ", one model"
    if not part.complete:
        text += "; some runs are missing"
    elif found.needed:
        text += f"; about {plural(found.needed, 'seed')} would decide it"
    return text


def _unit(claim: Claim) -> tuple[float, str]:
    """What the figures of a claim are multiplied by, and their unit."""
    if claim.test == "near":
        return 100.0, "%"
    if claim.test == "less x":
        return 1.0, " doublings"
    if claim.measure in _FRACTIONS:
        return 100.0, " points"
    return 1.0, _UNITS.get(claim.measure, "")


def _signed(value: float, unit: str = "") -> str:
    small = 2 if unit or not value else 4
    places = small if abs(value) < 0.1 else 2 if abs(value) < 1000 else 0
    return f"{value:+,.{places}f}".replace("-", "−")


# The table and the chart


def _table(results: Results) -> Table | None:
    """The experiment's measure by row and column; of models that are only measured, all figures."""
    design = results.design
    if not design.experiment.train and len(design.columns) == 1:
        return _details(results)
    columns = [column for column in design.columns if any(c.column == column for c in design.cells)]
    cells = {(cell.row.name, cell.column.name): cell for cell in design.cells}
    measure = design.experiment.measure
    named = [column.name or _TITLES.get(measure, measure) for column in columns]
    means = _means(results)
    rows = []
    for row in design.rows:
        found = (cells.get((row.name, column.name)) for column in columns)
        shown = ("n/a" if cell is None else figure(results, cell) for cell in found)
        rows.append((row.name, *shown, *(_mean(results, row, of) for of in means.values())))
    n = design.seeds
    note = f"Mean ± standard deviation over {plural(n, 'seed')}." if n > 1 else ""
    columns_shown = ("", *named, *(f"mean of {name}" for name in means))
    return Table(title=design.experiment.title, columns=columns_shown, rows=rows, note=note)


def _means(results: Results) -> dict[str, list[Arm]]:
    """The columns that have a mean: those of each group, and all."""
    if not results.design.experiment.average or len(results.columns) < 2:
        return {}
    groups = dict.fromkeys(column.group for column in results.columns if column.group)
    of_group = {
        f"{group} ({len(columns)})": columns
        for group in groups
        if (columns := [column for column in results.columns if column.group == group])
    }
    return of_group | {f"all ({len(results.columns)})": results.columns}


def _mean(results: Results, row: Arm, columns: Sequence[Arm]) -> str:
    """Over some columns: the mean of each seed, then mean and standard deviation over seeds."""
    values = list(results.values(Point(tuple(Cell(row, column) for column in columns))).values())
    if not values:
        return NONE
    return f"{mean_std(fmean(values), stdev(values) if len(values) > 1 else None)}%"


def figure(results: Results, cell: Cell, measure: str = "") -> str:
    """`84.21 ± 0.32%`, with the number of seeds if some are missing."""
    experiment = results.design.experiment
    measure = measure or experiment.measure
    values = list(results.values(Point((cell,)), measure).values())
    diverged = sum(result["status"] == "diverged" for result in results.of(cell).values())
    if not values:
        return "diverged" if diverged else NONE
    std = stdev(values) if len(values) > 1 else None
    if measure in _FRACTIONS:
        text = f"{mean_std(fmean(values), std)}%"
    elif measure == "pretraining_device_days":
        text = duration(86_400 * fmean(values))
    else:
        text = significant(fmean(values)) + (f" ± {significant(std)}" if std else "")
    if len(values) < results.design.seeds:
        text += f" (n = {len(values)}{f', {diverged} diverged' if diverged else ''})"
    return text


def _charts(results: Results) -> list[Scatter]:
    """One for each axis."""
    experiment = results.design.experiment
    axes = experiment.x or ("",)
    return [_chart(results, axis) for axis in axes] if experiment.form != "table" else []


def _chart(results: Results, axis: str) -> Scatter:
    """A line for each model, through the means of its points or along its training."""
    design, experiment = results.design, results.design.experiment
    percent = 100.0 if experiment.measure in _FRACTIONS else 1.0
    unit, x_name = _axis(results, axis)
    series = []
    if experiment.form == "curve":
        lines = {point.name: _curve(results, point) for point in design.points}
    else:
        lines = {
            name: [place for point in points if (place := _place(results, point, axis))]
            for name, points in design.lines().items()
        }
    for number, (name, places) in enumerate(lines.items()):
        series.append(
            PointSeries(
                x=[x / unit for x, _, _ in places],
                y=[percent * y for _, y, _ in places],
                error=[percent * std for _, _, std in places],
                color=RUN_COLORS[number % len(RUN_COLORS)],
                label=name,
                joined=True,
            )
        )
    scatter = Scatter(
        title=experiment.title,
        x_name=x_name,
        series=series,
        unit="%" if percent > 1 else "",
        log_y=percent == 1,
    )
    return draw_scatter(scatter, f"ours-{experiment.name}-{axis}")


def _axis(results: Results, axis: str) -> tuple[float, str]:
    """The unit of an x axis, and its name."""
    if axis not in _COMPUTE:
        return 1.0, _TITLES.get(axis, results.design.experiment.x_label)
    largest = max((results.x(point, axis) or 0.0 for point in results.design.points), default=0.0)
    return operations_unit(largest)


def _y_name(results: Results) -> str:
    """What a chart of the results shows."""
    measure = results.design.experiment.measure
    if results.design.experiment.form != "curve":
        return _TITLES.get(measure, measure)
    found = [result for cell in results.design.cells for result in results.of(cell).values()]
    fewshot = any("fewshot" in event for result in found for event in result.get("curve", ()))
    return "5-shot" if fewshot else "val top-1"


def _place(results: Results, point: Point, axis: str) -> tuple[float, float, float] | None:
    """x, mean and standard deviation."""
    x, values = results.x(point, axis), list(results.values(point).values())
    if x is None or not values:
        return None
    return x, fmean(values), stdev(values) if len(values) > 1 else 0.0


def _curve(results: Results, point: Point) -> list[tuple[float, float, float]]:
    """Mean accuracy on val by epoch."""
    by_epoch: dict[float, list[float]] = {}
    for result in results.of(point.cells[0]).values():
        for event in result.get("curve", ()):
            value = event.get("fewshot", event.get("top1"))
            if value is not None:
                by_epoch.setdefault(round(event["epoch"], 2), []).append(value)
    return [(epoch, fmean(values), 0.0) for epoch, values in sorted(by_epoch.items())]


def _published_chart(results: Results) -> Scatter | None:
    experiment = results.design.experiment
    points = experiment.published.points
    if not points:
        return None
    names = dict.fromkeys(line for line, _, _ in points)
    series = [
        PointSeries(
            x=[x for line, x, _ in points if line == name],
            y=[y for line, _, y in points if line == name],
            color=RUN_COLORS[number % len(RUN_COLORS)],
            label=name,
            joined=True,
        )
        for number, name in enumerate(names)
    ]
    x_name = "exaFLOPs" if set(experiment.x) & set(_COMPUTE) else experiment.x_label
    scatter = Scatter(title=experiment.published.caption, x_name=x_name, series=series, unit="%")
    return draw_scatter(scatter, f"paper-{experiment.name}")


# What the figures rest on


def _details(results: Results) -> Table:
    """Every cell with its other measures and its cost."""
    trained = results.design.experiment.train
    staged = any(len(results.design.stages(cell)) > 1 for cell in results.design.cells)
    costs = {"compute": "pre-training"} if staged else {}
    costs |= {"exaflops": "compute"}
    shown = {
        name: title
        for name, title in _TITLES.items()
        if name in known_measures(results.design.experiment)
        and any(results.values(Point((cell,)), name) for cell in results.design.cells)
    }
    rows = []
    for cell in results.design.cells:
        computed = [operations(results.mean(Point((cell,)), name)) for name in costs]
        if staged and len(results.design.stages(cell)) == 1:
            computed[0] = NONE  # here `compute` is that of the only stage
        seconds = results.mean(Point((cell,)), "seconds")
        rows.append(
            (
                cell.name,
                *((str(len(results.of(cell))),) if trained else ()),
                *(figure(results, cell, name) for name in shown),
                *((*computed, duration(seconds)) if trained else ()),
            )
        )
    columns, note = ("model", *shown.values()), ""
    if trained:
        columns = ("cell", "runs", *shown.values(), *costs.values(), "time")
        note = "Compute and time are per run" + (", those of the last stage." if staged else ".")
    return Table(title="Every cell", columns=columns, rows=rows, note=note)


def _conditions(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Hardware and versions, each combination once."""
    found: dict[str, int] = {}
    for result in results:
        versions = result.get("versions", {})
        parts = [result.get("hardware", ""), result.get("precision", "")]
        parts += [f"{name} {versions[name]}" for name in ("vitrail", "torch") if name in versions]
        if commit := result.get("commit", ""):
            parts.append(f"commit {commit[:10]}")
        if result.get("jobs", 1) > 1:
            parts.append(f"{result['jobs']} runs at a time, each of which takes longer than alone")
        text = " · ".join(filter(None, parts))
        found[text] = found.get(text, 0) + 1
    return [f"{text} ({plural(n, 'run')})" for text, n in found.items()]


def _run_row(results: Results, cell: Cell, seed: int, result: Mapping[str, Any]) -> dict[str, Any]:
    value = result.get(results.design.experiment.measure)
    fraction = results.design.experiment.measure in _FRACTIONS
    # Attention distances are those of fewer images than accuracy.
    n = result.get("n") if fraction else (result.get("distances") or {}).get("n")
    return {
        "cell": cell.name,
        "seed": seed,
        "figure": result.get("message", "") or NONE
        if value is None
        else f"{100 * value:.2f}%"
        if fraction
        else significant(value),
        "n": n,
        "exaflops": result.get("exaflops"),
        "seconds": result.get("seconds"),
        "commands": result.get("commands", ()),
    }
