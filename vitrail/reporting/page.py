"""The page of one run, which run.html lays out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from vitrail.console import NONE, known
from vitrail.errors import DamagedError, VitrailError, one_line
from vitrail.files import read_json
from vitrail.reporting.charts import MOST_POINTS, draw_calibration, draw_distances, draw_run
from vitrail.reporting.comparison import compare
from vitrail.reporting.loading import Rows, RunData, column, embed, load_run
from vitrail.reporting.rendering import (
    between,
    count,
    duration,
    image_uri,
    joules,
    memory,
    operations,
    percent,
    plural,
    significant,
    write_page,
)
from vitrail.weights.hub import fetch
from vitrail.weights.published import BUILTIN

Facts = list[tuple[str, str]]

_FEW_CLASSES = 60
_WORST_CLASSES = 25
_MOST_CLASSES = 1500
_MOST_HEAT_CLASSES = 50
_MOST_INSPECTED = 6
# A page of five megabytes can still be mailed; the sheet of training images is most of it.
_MOST_SHEET_BYTES = 1_500_000
_MOST_IMAGE_BYTES = 400_000
_UNEXPECTED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError)
"""Errors that values of another type than ours lead to."""


def report(folders: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """The page of one run, or one comparison of several.

    The page of one run goes to its folder, any other to report.html here, unless `out` is given.
    """
    shipped = fetch(BUILTIN.source)
    paths = [shipped if folder == BUILTIN.name else Path(folder) for folder in folders]
    try:
        if len(paths) > 1:
            return compare(paths, Path(out or "report.html"))
        own = out is None and paths[0] != shipped
        return write(paths[0], None if own else Path(out or "report.html"))
    except VitrailError:
        raise
    except _UNEXPECTED as error:
        raise DamagedError(
            f"{', '.join(map(str, paths))}: run.json, metrics.jsonl, evaluation/*.json or "
            f"inspection/inspection.json has unexpected values ({one_line(error)})"
        ) from error


def write(folder: Path, target: Path | None = None) -> Path:
    """Writes the page of a run to report.html in its folder, or elsewhere."""
    run = load_run(folder)
    return write_page(
        target or folder / "report.html",
        "run.html",
        run=run,
        info=run.info,
        result=run.result,
        sheet=embed(folder / "augmented.jpg", _MOST_SHEET_BYTES),
        inspection=read_json(folder / "inspection" / "inspection.json"),
        headline=_headline(run),
        status=_status(run),
        facts=_facts(run),
        charts={against: draw_run(run, against) for against in ("step", "seconds")},
        curve_caption=_curve_caption(run),
        curve_cautions=curve_cautions(run),
        class_tables=_class_tables,
        heat=_heat,
        confused=_confused,
        calibration_chart=draw_calibration,
        confidence=_confidence,
        inspected_images=_inspected_images,
        distance_chart=draw_distances,
        embed=lambda name: embed(folder / "inspection" / name, _MOST_IMAGE_BYTES),
        cost=_cost(run),
        changed=_changed(run),
        setting_groups=_setting_groups(run),
        environment=_environment(run),
        broken=_broken(run),
    )


def _headline(run: RunData) -> dict[str, str]:
    """Test, else validation with a caution, else the best so far."""
    if result := run.result:
        interval = between(result["intervals"]["top1"], result["n"])
        return {
            "score": percent(result["top1"], result["n"]),
            "of": f"top-1 on {result['split']}",
            "detail": f"n = {result['n']:,}" + (f" · 95% interval {interval}" if interval else ""),
            "caution": "" if result["split"] == "test" else _caution(run, result["split"]),
        }
    best = run.info["best"]
    if not known(best.get("top1")):
        return {"score": NONE, "of": "no results yet", "detail": "", "caution": ""}
    n = (run.val[-1] if run.val else {}).get("n") or run.info["data"].get("val") or 0
    return {
        "score": percent(best["top1"], n),
        "of": "best top-1 on val",
        "detail": f"n = {n:,} · step {best['step']:,}",
        "caution": _caution(run, "val"),
    }


def _caution(run: RunData, split: str) -> str:
    if split == "val" and run.info["best"]:
        return "The best step was selected on these images; only a test split is unbiased."
    return "Not a test split: accuracy on unseen images may be lower."


def _status(run: RunData) -> tuple[str, str]:
    """The status in one word, and in a sentence."""
    info = run.info
    word = info.get("status") or "unknown"
    steps = f" of {info['steps']:,}" if info.get("steps") else ""
    reached = f"step {info.get('step') or 0:,}{steps}"
    reason = f": {str(info['message']).rstrip('.')}." if info.get("message") else "."
    # To the end of the final test; old runs have the time of training alone.
    seconds = info.get("total_seconds") or info.get("seconds")
    sentences = {
        "finished": f"Finished at {reached} in {duration(seconds)}{reason}",
        "stopped": f"Stopped at {reached}{reason} Continue it with --resume.",
        "failed": f"Failed at {reached}{reason}",
        "running": f"At {reached} when this page was written{reason} "
        "If it is no longer running, it was killed; continue it with --resume.",
    }
    return word, sentences.get(word, "run.json does not record how the run ended.")


def _facts(run: RunData) -> Facts:
    """Model, data, time, hardware and commit."""
    info, data, model = run.info, run.info["data"], run.info["model"]
    parts = [f"{data[name]:,} {name}" for name in ("train", "val", "test") if data.get(name)]
    rows = {
        "Model": [
            model.get("name"),
            f"{count(model['parameters'])} parameters" if model.get("parameters") else "",
            f"{model['gmacs']:.3g} GMACs" if model.get("gmacs") else "",
            "{:.0f} × {:.0f} px".format(*model["size"]) if model.get("size") else "",
            f"from {model['init']}" if model.get("init") else "",
        ],
        "Data": [
            data.get("name"),
            plural(data["classes"], "class") if data.get("classes") else "",
            *parts,
        ],
        "Time": [
            duration(info["seconds"]) if info.get("seconds") is not None else "",
            f"started {info['started'][:16].replace('T', ' ')}" if info.get("started") else "",
        ],
        "Hardware": [
            info.get("hardware"),
            info.get("precision"),
            plural(info["processes"], "process") if info.get("processes", 1) > 1 else "",
        ],
        "Commit": [_commit(run)],
    }
    joined = {name: " · ".join(filter(None, parts)) for name, parts in rows.items()}
    return [(name, text) for name, text in joined.items() if text]


def _commit(run: RunData) -> str:
    commit = (run.info.get("commit") or "")[:12]
    return f"{commit} with uncommitted changes" if commit and run.info.get("dirty") else commit


def _curve_caption(run: RunData) -> str:
    """What the points of the curves stand for."""
    parts = [f"Training metrics as logged ({len(run.train):,} lines)."] if run.train else []
    if len(run.train) > MOST_POINTS:
        parts.append("Each point is the mean of several lines; the band shows their range.")
    if run.val:
        parts.append(f"Validation on n = {run.val[-1].get('n') or 0:,} images.")
    if run.info["best"].get("step") is not None:
        parts.append("The dotted line marks the best step on val.")
    return " ".join(parts)


def curve_cautions(run: RunData) -> list[str]:
    """Gaps in the curves."""
    sentences = (
        _not_finite(run.train, "loss"),
        _not_finite(run.train, "grad_norm"),
        _not_finite(run.val, "loss"),
    )
    return [sentence for sentence in sentences if sentence]


def _not_finite(rows: Rows, name: str) -> str:
    """A sentence where some values, but not all, are not finite."""
    odd = ~np.isfinite(column(rows, name))
    if not odd.any() or odd.all():
        return ""
    return (
        f"{odd.sum():,} of {len(rows):,} lines have no finite {name.replace('_', ' ')} "
        f"(first at step {column(rows, 'step')[odd][0]:,.0f})."
    )


def _class_tables(result: dict[str, Any]) -> tuple[Rows, Rows]:
    """The classes to show, and those behind a click."""
    rows = result["per_class"]
    if len(rows) <= _FEW_CLASSES:
        return rows, []
    scored = [row for row in rows if known(row["f1"])]
    scored.sort(key=lambda row: (row["f1"], row["name"]))
    worst = scored if len(scored) <= _FEW_CLASSES else scored[:_WORST_CLASSES]
    return worst, rows[:_MOST_CLASSES]


def _heat(result: dict[str, Any]) -> list[tuple[dict[str, Any], list[tuple[int, float]]]]:
    """Each true class with its row of the confusion matrix: counts and strengths of color."""
    classes, counts = result["per_class"], result.get("confusion")
    if not counts or not 0 < len(classes) <= _MOST_HEAT_CLASSES:
        return []
    counts = np.array(counts, dtype=np.int64).reshape(len(classes), len(classes))
    # The square root makes a few mistakes visible beside hundreds of correct predictions.
    strength = np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1)).round(2)
    rows = zip(classes, counts.tolist(), strength.tolist(), strict=True)
    return [(row, list(zip(*cells, strict=True))) for row, *cells in rows]


def _confused(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The most frequent pairs with examples, which older files only have among the mistakes."""
    sizes = {row["name"]: row["n"] for row in result["per_class"]}
    pairs = []
    for pair in result["confused"][:10]:
        examples = pair.get("examples") or [
            one
            for one in result["mistakes"]
            if (one["truth"], one["guess"]) == (pair["truth"], pair["guess"])
        ]
        uris = [uri for one in examples if (uri := image_uri(one.get("thumbnail")))]
        pairs.append({**pair, "of": sizes.get(pair["truth"], 0), "thumbnails": uris[:2]})
    return pairs


def _confidence(result: dict[str, Any]) -> str:
    """Whether the model is overconfident, underconfident or well calibrated."""
    bins = [one for one in result["calibration"] if one["n"]]
    n = sum(one["n"] for one in bins)
    confidence, accuracy = (
        sum(one["n"] * one[key] for one in bins) / n for key in ("confidence", "accuracy")
    )
    gap = confidence - accuracy
    verdict = (
        "overconfident" if gap > 0.02 else "underconfident" if gap < -0.02 else "well calibrated"
    )
    return (
        f"Mean confidence is {percent(confidence, n)}, accuracy {percent(accuracy, n)} "
        f"(n = {n:,}): the model is {verdict}."
    )


def _inspected_images(run: RunData, inspection: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """The panels of each image of an inspection, and the images."""
    rows = (inspection.get("images") or [])[:_MOST_INSPECTED]
    panels = ["the model's input"]
    if rows and rows[0].get("rollout"):
        panels.append("attention rollout")
    if rows and rows[0].get("gradient_rollout"):
        panels.append("rollout for the predicted class")
    panels.append("the first three principal components of the patch features")
    images = []
    for number, row in enumerate(rows, 1):
        if uri := embed(run.folder / "inspection" / f"picture-{number}.jpg", _MOST_IMAGE_BYTES):
            images.append({"truth": None, "guess": None, "probability": None, **row, "uri": uri})
    return panels, images


def _cost(run: RunData) -> Facts:
    cost, energy = run.info["cost"], run.info["cost"].get("energy_joules")
    rows = [
        ("compute", operations(cost.get("exaflops"))),
        ("images seen", count(cost.get("images_seen"))),
        ("forward pass", f"{significant(cost.get('gmacs'))} GMACs per image"),
        ("device-days", significant(cost.get("device_days"))),
        ("energy", joules(energy) if known(energy) else "not reported by the driver"),
        ("peak memory", memory(cost.get("peak_memory_bytes"))),
    ]
    if known(waited := run.info.get("input_wait")):
        rows.append(("waiting for images", percent(waited)))
    if run.info["model"].get("init"):
        rows.append(("pre-training", _pretraining(cost.get("pretraining"))))
    sessions = cost.get("sessions") or 1
    return [*rows, ("sessions", str(sessions))] if sessions > 1 else rows


def _pretraining(cost: dict[str, Any] | None) -> str:
    """What the initial weights cost."""
    if not cost:
        return "not known"
    return f"{operations(cost['exaflops'])}, {significant(cost['device_days'])} device-days"


def _changed(run: RunData) -> dict[str, str]:
    """Settings that differ from the recipe."""
    pairs = (entry.partition("=") for entry in run.info.get("changed") or [])
    return {key.strip(): run.settings.get(key.strip(), value.strip()) for key, _, value in pairs}


def _setting_groups(run: RunData) -> dict[str, list[tuple[str, str, str]]]:
    """Sections of the settings: key, value, full name."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for name, value in run.settings.items():
        section, _, key = name.rpartition(".")
        groups.setdefault(section, []).append((key, value, name))
    return groups


def _environment(run: RunData) -> Facts:
    names = ("hardware", "device", "precision", "processes", "seed")
    machine = {name: run.info.get(name, "") for name in names}
    rows = {**run.info["versions"], **machine, "commit": _commit(run)}
    rows["recipe"] = run.info.get("recipe")
    return [(name, str(value)) for name, value in rows.items() if value not in (None, "")]


def _broken(run: RunData) -> list[tuple[str, Any]]:
    """Files that could not be read, by where they are."""
    lists = {"the data": run.info["data"].get("broken")}
    lists |= {f"evaluation on {name}": e["broken"] for name, e in run.evaluations.items()}
    return [(where, files) for where, files in lists.items() if files]
