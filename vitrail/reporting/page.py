"""The page of one run."""

from pathlib import Path

from vitrail.reporting import progress, sections
from vitrail.reporting.charts import attention_distances, calibration
from vitrail.reporting.comparison import compare as compare
from vitrail.reporting.folder import Run, read_run
from vitrail.reporting.rendering import put, render


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
