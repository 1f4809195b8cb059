"""The page of one run: what each of its sections says. run.html calls these functions inside
`section`, so that a malformed file costs no more than its sections."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail import runs
from vitrail.errors import VitrailError
from vitrail.files import read_json
from vitrail.reporting import curves
from vitrail.reporting.charts import draw_calibration, draw_distances
from vitrail.reporting.comparison import compare
from vitrail.reporting.loading import RunData, embed, load_run, state_of
from vitrail.reporting.rendering import (
    between,
    count,
    days,
    duration,
    image_uri,
    joules,
    known,
    operations,
    percent,
    plural,
    size_of,
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


def write(folder: Path, target: Path | None = None) -> Path:
    """Write the page of a run: report.html in its folder, or elsewhere."""
    run = load_run(folder)
    return write_page(
        target or folder / "report.html",
        "run.html",
        run=run,
        info=run.info,
        notes=run.notes,
        result=run.result,
        sheet=embed(folder / "augmented.jpg", _MOST_SHEET_BYTES, shrink=True),
        sheet_note=state_of(folder / "augmented.jpg"),
        inspection=read_json(folder / "inspection" / "inspection.json"),
        headline=_headline,
        status=_status,
        facts=_facts,
        charts=curves.charts,
        curve_caption=curves.caption,
        curve_cautions=curves.cautions,
        class_tables=_class_tables,
        heat=_heat,
        confused=_confused,
        calibration_chart=draw_calibration,
        confidence=_confidence,
        inspected_images=_inspected_images,
        distance_chart=draw_distances,
        embed=lambda name: embed(folder / "inspection" / name, _MOST_IMAGE_BYTES),
        cost=_cost,
        changed=_changed,
        setting_groups=_setting_groups,
        environment=_environment,
        broken=_broken(run),
    )


def _headline(run: RunData) -> dict[str, str]:
    """Test, else validation with a caution, else the best so far."""
    if result := run.result:
        interval = between(result["intervals"]["top1"], result["n"])
        return {
            "score": percent(result["top1"], result["n"]),
            "of": f"top-1 on {result['split']}",
            "detail": f"n = {result['n']:,}" + (f" · 95 % interval {interval}" if interval else ""),
            "caution": "" if result["split"] == "test" else _caution(run, result["split"]),
        }
    best = run.info["best"]
    if not known(best.get("top1")):
        detail = "Nothing has been measured so far."
        return {"score": "–", "of": "no result yet", "detail": detail, "caution": ""}
    n = (run.val[-1] if run.val else {}).get("n") or run.info["data"].get("val") or 0
    return {
        "score": percent(best["top1"], n),
        "of": "best top-1 on val",
        "detail": f"n = {n:,} · step {best['step']:,}",
        "caution": _caution(run, "val"),
    }


def _caution(run: RunData, split: str) -> str:
    if split == "val" and run.info["best"]:
        return "The best step was chosen on these images; a test on others says what to expect."
    return "Not a test split: expect less of images that played no part in training."


def _status(run: RunData) -> tuple[str, str]:
    """One word of how it ended, and a sentence."""
    info = run.info
    word = info.get("status") or "unknown"
    steps = f" of {info['steps']:,}" if info.get("steps") else ""
    reached = f"step {info.get('step') or 0:,}{steps}"
    reason = f": {str(info['message']).rstrip('.')}." if info.get("message") else "."
    # To the end of the final test; old runs have the time of training alone.
    seconds = info.get("total_seconds") or info.get("seconds")
    sentences = {
        "finished": f"Finished at {reached} in {duration(seconds)}{reason}",
        "stopped": f"Stopped at {reached}{reason} --resume continues it.",
        "failed": f"Failed at {reached}{reason}",
        "running": f"Was at {reached} when this page was written{reason} "
        "If it no longer runs, it was killed; --resume continues it.",
    }
    return word, sentences.get(word, "run.json does not say how the run went.")


def _facts(run: RunData) -> Facts:
    """Model, data, time, hardware, commit: a name and what to say of it."""
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


Classes = list[dict[str, Any]]


def _class_tables(result: dict[str, Any]) -> tuple[Classes, Classes]:
    """The classes to show at once and those to show on demand."""
    rows = result["per_class"]
    if len(rows) <= _FEW_CLASSES:
        return rows, []
    scored = [row for row in rows if known(row["f1"])]
    scored.sort(key=lambda row: (row["f1"], row["name"]))
    worst = scored if len(scored) <= _FEW_CLASSES else scored[:_WORST_CLASSES]
    return worst, rows[:_MOST_CLASSES]


def _heat(result: dict[str, Any]) -> list[tuple[dict[str, Any], list[tuple[int, float]]]]:
    """Each true class with its counts and how strongly to color them, where there are counts."""
    classes, counts = result["per_class"], result.get("confusion")
    if not counts or not 0 < len(classes) <= _MOST_HEAT_CLASSES:
        return []
    counts = np.array(counts, dtype=np.int64).reshape(len(classes), len(classes))
    # The square root lets a handful of mistakes be seen beside hundreds of right answers.
    strength = np.sqrt(counts / np.maximum(counts.sum(1, keepdims=True), 1)).round(2)
    rows = zip(classes, counts.tolist(), strength.tolist(), strict=True)
    return [(row, list(zip(*cells, strict=True))) for row, *cells in rows]


def _confused(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The most frequent pairs, each with examples; older files have those among the mistakes."""
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
    """Whether the model promises too much."""
    bins = [one for one in result["calibration"] if one["n"]]
    n = sum(one["n"] for one in bins)
    sure = sum(one["n"] * one["confidence"] for one in bins) / n
    right = sum(one["n"] * one["accuracy"] for one in bins) / n
    gap = sure - right
    verdict = (
        "over-confident" if gap > 0.02 else "under-confident" if gap < -0.02 else "well matched"
    )
    return (
        f"On average the model is {percent(sure, n)} sure and {percent(right, n)} right "
        f"(n = {n:,}): {verdict}."
    )


def _inspected_images(run: RunData, inspection: dict[str, Any]) -> tuple[list[str], list[Any]]:
    """What stands side by side in each image of an inspection, and the images."""
    rows = (inspection.get("images") or [])[:_MOST_INSPECTED]
    shown = ["what the model sees"]
    if rows and rows[0].get("rollout"):
        shown.append("attention rollout")
    if rows and rows[0].get("gradient_rollout"):
        shown.append("rollout for its answer")
    shown.append("the first three principal components of its patch features")
    files = (run.folder / "inspection" / f"picture-{i}.jpg" for i in range(1, len(rows) + 1))
    images = [
        {"truth": None, "guess": None, "probability": None, **row, "uri": uri}
        for row, file in zip(rows, files, strict=True)
        if (uri := embed(file, _MOST_IMAGE_BYTES))
    ]
    return shown, images


def _cost(run: RunData) -> Facts:
    cost, energy = run.info["cost"], run.info["cost"].get("energy_joules")
    rows = [
        ("compute", operations(cost.get("exaflops"))),
        ("images seen", count(cost.get("images_seen"))),
        ("forward pass", f"{days(cost.get('gmacs'))} GMACs an image"),
        ("device-days", days(cost.get("device_days"))),
        ("energy", joules(energy) if known(energy) else "not reported by the driver"),
        ("peak memory", size_of(cost.get("peak_memory_bytes"))),
    ]
    sessions = cost.get("sessions") or 1
    return [*rows, ("sessions", str(sessions))] if sessions > 1 else rows


def _changed(run: RunData) -> dict[str, str]:
    """Settings that differ from the defaults."""
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
    """Files that could not be read, by where they were met."""
    lists = {"the data": run.info["data"].get("broken")}
    lists |= {f"evaluation on {name}": e["broken"] for name, e in run.evaluations.items()}
    return [(where, files) for where, files in lists.items() if files]
