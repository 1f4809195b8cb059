"""The page of one run."""

from collections.abc import Sequence
from pathlib import Path

from vitrail import runs
from vitrail.errors import VitrailError
from vitrail.report import progress, sections
from vitrail.report.charts import attention_distances, calibration
from vitrail.report.comparison import compare as compare
from vitrail.report.folder import Run, read_run
from vitrail.report.rendering import put, render
from vitrail.weights.download import fetch
from vitrail.weights.published import BUILTIN


def report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """The page of one run, or one comparison of several.

    A run's own page lies in its folder; all others go to `out`, or to report.html here.
    """
    shipped = fetch(BUILTIN.source)
    paths = [shipped if folder == BUILTIN.name else Path(folder) for folder in folders]
    for path in paths:
        if not runs.is_run(path):
            raise VitrailError(f"{path} is no run folder: it has no run.json and config.toml")
    if len(paths) > 1:
        return compare(paths, Path(out or "report.html"))
    own = out is None and paths[0] != shipped
    return write(paths[0], None if own else Path(out or "report.html"))


def write(run: Path, target: Path | None = None) -> Path:
    """The page of a run, from the files it holds: report.html in its folder, or elsewhere."""
    return put(page(read_run(run)), target or run / "report.html")


def page(run: Run) -> str:
    """The page as text."""
    result = run.result
    word, sentence = sections.status(run)
    return render(
        "run.html",
        run=run,
        info=run.info,
        notes=run.notes,
        headline=sections.headline(run),
        status=word,
        sentence=sentence,
        facts=sections.facts(run),
        charts={against: progress.charts(run, against) for against in ("step", "seconds")},
        curve_notes=progress.curve_notes(run),
        curve_caption=progress.curve_caption(run),
        result=result,
        heat=sections.heat(result) if result else [],
        class_tables=sections.class_tables(result) if result else ([], []),
        n_there=sum(score.n > 0 for score in result.per_class) if result else 0,
        with_top5=any(one.has_top5 for one in run.evaluations.values()),
        confidence=sections.confidence(result) if result else "",
        calibration=calibration("calibration", result.calibration) if result else "",
        inside=run.inside,
        distance_chart=attention_distances(run.inside.distances),
        changed=sections.changed(run),
        setting_groups=sections.setting_groups(run),
        cost=sections.cost(run),
        environment=sections.environment(run),
        broken=sections.broken(run),
    )
