"""What each section of the page of one run says."""

from dataclasses import dataclass

import numpy as np

from vitrail.reporting.fields import Fields
from vitrail.reporting.folder import Run
from vitrail.reporting.results import ClassScore, Evaluation
from vitrail.reporting.words import (
    between,
    count,
    days,
    duration,
    joules,
    operations,
    percent,
    plural,
    size_of,
)

FEW_CLASSES = 60
WORST_CLASSES = 25
MOST_CLASSES = 1500


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The one number, and what it is worth."""

    score: str
    of: str
    detail: str
    caution: str = ""


def headline(run: Run) -> Headline:
    """Test, else validation with a caution, else the best so far."""
    if (result := run.result) is not None:
        interval = between(result.intervals["top1"], result.n)
        caution = "" if result.split == "test" else chosen_on(run, result.split)
        return Headline(
            score=percent(result.scores["top1"], result.n),
            of=f"top-1 on {result.split}",
            detail=f"n = {result.n:,}" + (f" · 95 % interval {interval}" if interval else ""),
            caution=caution,
        )
    best = run.info.fields("best")
    n = run.val.n if run.val else run.info.fields("data").count("val")
    if not np.isfinite(best.number("top1")):
        return Headline(score="–", of="no result yet", detail="Nothing has been measured so far.")
    return Headline(
        score=percent(best.number("top1"), n),
        of="best top-1 on val",
        detail=f"n = {n:,} · step {best.count('step'):,}",
        caution=chosen_on(run, "val"),
    )


def chosen_on(run: Run, split: str) -> str:
    """Why a number may flatter."""
    if split == "val" and run.info.fields("best"):
        return "The best step was chosen on these images; a test on others says what to expect."
    return "Not a test split: expect less of images that played no part in training."


def status(run: Run) -> tuple[str, str]:
    """One word of how it ended, and a sentence."""
    info = run.info
    word = info.text("status") or "unknown"
    step, steps, said = info.count("step"), info.count("steps"), info.text("message")
    reached = f"step {step:,}" + (f" of {steps:,}" if steps else "")
    because = f": {said.rstrip('.')}." if said else "."
    sentences = {
        "finished": f"Finished at {reached} in {duration(total_seconds(info))}{because}",
        "stopped": f"Stopped at {reached}{because} --resume continues it.",
        "failed": f"Failed at {reached}{because}",
        "running": f"Was at {reached} when this page was written{because} "
        "If it no longer runs, it was killed; --resume continues it.",
    }
    unknown = "run.json does not say how the run went."
    return word, sentences.get(word, unknown)


def total_seconds(info: Fields) -> float:
    """From the first step to the end of the final test; runs from before kept that of training."""
    total = info.number("total_seconds")
    return total if np.isfinite(total) else info.number("seconds")


def facts(run: Run) -> list[tuple[str, str]]:
    """Model, data, time, hardware, commit: a name and what to say of it."""
    info, data, model = run.info, run.info.fields("data"), run.info.fields("model")
    rows, columns = model.span("size")
    parts = [
        f"{data.count(split):,} {split}" for split in ("train", "val", "test") if data.count(split)
    ]
    found = {
        "Model": [
            model.text("name"),
            number(model.number("parameters"), "parameters"),
            f"{model.number('gmacs'):.3g} GMACs" if np.isfinite(model.number("gmacs")) else "",
            f"{rows:.0f} × {columns:.0f} px" if np.isfinite(rows + columns) else "",
            f"from {model.text('init')}" if model.text("init") else "",
        ],
        "Data": [data.text("name"), classes(data.count("classes")), *parts],
        "Time": [duration(info.number("seconds")).replace("–", ""), started(info.text("started"))],
        "Hardware": [
            info.text("hardware"),
            info.text("precision"),
            processes(info.count("processes")),
        ],
        "Commit": [commit(run)],
    }
    return [(name, " · ".join(filter(None, said))) for name, said in found.items() if any(said)]


def number(value: float, thing: str) -> str:
    """`5,717,416 parameters`, or nothing."""
    return f"{count(value)} {thing}" if np.isfinite(value) else ""


def classes(n: int) -> str:
    """`5 classes`, or nothing."""
    return plural(n, "class") if n else ""


def processes(n: int) -> str:
    """Several processes are worth a word."""
    return plural(n, "process") if n > 1 else ""


def started(moment: str) -> str:
    """The date and the minute of an ISO time."""
    return "started " + moment[:16].replace("T", " ") if moment else ""


def commit(run: Run) -> str:
    """The commit, and whether it is the whole truth."""
    text = run.info.text("commit")[:12]
    dirty = run.info.values.get("dirty") is True
    return text + (" with uncommitted changes" if text and dirty else "")


def heat(result: Evaluation) -> list[tuple[ClassScore, list[tuple[int, float]]]]:
    """Each true class with its counts and how strongly to colour them, where there are counts."""
    if result.confusion is None:
        return []
    totals = np.maximum(result.confusion.sum(1, keepdims=True), 1)
    # The square root lets a handful of mistakes be seen beside hundreds of right answers.
    strength = np.sqrt(result.confusion / totals).round(2)
    return [
        (score, [(int(n), float(s)) for n, s in zip(counts, strengths, strict=True)])
        for score, counts, strengths in zip(
            result.per_class, result.confusion, strength, strict=True
        )
    ]


def class_tables(result: Evaluation) -> tuple[list[ClassScore], list[ClassScore]]:
    """The classes to show at once and those to show on demand."""
    scores = list(result.per_class)
    if len(scores) <= FEW_CLASSES:
        return scores, []
    known = sorted((s for s in scores if np.isfinite(s.f1)), key=lambda s: (s.f1, s.name))
    worst = known if len(known) <= FEW_CLASSES else known[:WORST_CLASSES]
    return worst, scores[:MOST_CLASSES]


def confidence(result: Evaluation) -> str:
    """In words, whether the model promises too much."""
    bins = [one for one in result.calibration if one.n and np.isfinite(one.confidence)]
    n = sum(one.n for one in bins)
    if not n:
        return ""
    sure = sum(one.n * one.confidence for one in bins) / n
    right = sum(one.n * one.accuracy for one in bins) / n
    gap = sure - right
    verdict = (
        "over-confident" if gap > 0.02 else "under-confident" if gap < -0.02 else "well matched"
    )
    return (
        f"On average the model is {percent(sure, n)} sure and {percent(right, n)} right "
        f"(n = {n:,}): {verdict}."
    )


def changed(run: Run) -> dict[str, str]:
    """Settings that differ from the defaults."""
    entries = [entry for entry in run.info.items("changed") if isinstance(entry, str)]
    split = (entry.partition("=") for entry in entries)
    return {key.strip(): run.settings.get(key.strip(), value.strip()) for key, _, value in split}


def setting_groups(run: Run) -> dict[str, list[tuple[str, str, str]]]:
    """Sections of the settings: key, value, full name."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for name, value in run.settings.items():
        section, _, key = name.rpartition(".")
        groups.setdefault(section, []).append((key, value, name))
    return groups


def environment(run: Run) -> list[tuple[str, str]]:
    """Versions and machine."""
    info = run.info
    versions = [
        (name, info.fields("versions").text(name)) for name in info.fields("versions").values
    ]
    machine = [(name, info.text(name)) for name in ("hardware", "device", "precision", "processes")]
    rest = [("seed", info.text("seed")), ("commit", commit(run)), ("recipe", info.text("recipe"))]
    return [(name, value) for name, value in (*versions, *machine, *rest) if value]


def cost(run: Run) -> list[tuple[str, str]]:
    """Compute, device time, energy and memory, as far as they are known."""
    found = run.info.fields("cost")
    if not found:
        return []
    energy = found.number("energy_joules")
    sittings = found.count("sittings")
    told = [
        ("compute", operations(found.number("exaflops"))),
        ("images seen", count(found.number("images_seen"))),
        ("forward pass", f"{days(found.number('gmacs'))} GMACs an image"),
        ("device-days", days(found.number("device_days"))),
        ("energy", joules(energy) if np.isfinite(energy) else "not told by the driver"),
        ("peak memory", size_of(found.number("peak_memory_bytes"))),
    ]
    return [*told, ("sittings", str(sittings))] if sittings > 1 else told


def broken(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Files that could not be read, by where they were met."""
    lists = [("the data", run.info.fields("data").pairs("broken"))]
    lists += [(f"evaluation on {e.split}", e.broken) for e in run.evaluations.values()]
    return [(where, files) for where, files in lists if files]
