"""What the verbs do, callable from Python: `vitrail.train(...)`, `vitrail.evaluate(...)`."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.console import count_progress, duration, is_main, say
from vitrail.data.opening import same_data
from vitrail.data.source import listed
from vitrail.errors import FailureError, VitrailError, one_line
from vitrail.evaluation import classify, variants
from vitrail.evaluation import fewshot as few
from vitrail.evaluation.features import cached, extract, kept_features
from vitrail.evaluation.matching import among_classes
from vitrail.evaluation.parts import part_of
from vitrail.inspection import inspecting
from vitrail.inspection.looking import Picture, inspector
from vitrail.inspection.summary import SECONDS, summarise
from vitrail.model import Classifier
from vitrail.model.classifier import as_size
from vitrail.orders import Settings, comparison_place, understand
from vitrail.report import comparison, page, sweeps
from vitrail.runs import Run
from vitrail.settings import load as load_settings
from vitrail.training import sweep as sweeping
from vitrail.training import training
from vitrail.training.devices import choose, cores, devices
from vitrail.training.oversight import NAMED_BROKEN
from vitrail.web import cache
from vitrail.weights.hub import fetch
from vitrail.weights.load import load
from vitrail.weights.published import BUILTIN


def train(
    what: str | Path,
    settings: Settings = (),
    *,
    out: str | Path | None = None,
    resume: bool = False,
    device: str = "auto",
) -> Run:
    """Pre-train or fine-tune as a recipe says, or on a FOLDER; the run folder holds the result."""
    order = understand(what, settings)
    folder, numbered = order.place(out, resume)
    run = Run(folder)
    if resume and run.info().get("status") == "finished":
        if not order.config.train.hyperrule:  # whose settings depend on the data
            runs.refuse_other(folder, order.config)
        say(f"{folder} holds {runs.described(run)}")
        if not (run.inspected() and (folder / "report.html").exists()):
            finish(run, device)  # a kill after training left it without
        return run
    options: dict[str, Any] = {"resume": resume, "device": device, "facts": order.facts()}
    run = training.train(order.config, folder, numbered=numbered, **options)
    if run.writes:
        finish(run, device)
    return run


def finish(run: Run, device: str) -> None:
    """The report, and the last lines."""
    info = run.info()
    if info["status"] == "finished" and not run.inspected():
        look_inside(run, device)
    target = page.write(run.folder)
    top1, split, n = runs.score(run)
    told = [f"done in {duration(info.get('total_seconds', info['seconds']))}"]
    if info["status"] != "finished":
        return
    if top1 is not None:
        told.append(f"{split} {100 * top1:.2f} % (n = {n:,})")
    run.say(" · ".join(told))
    say_skipped(run, target)
    run.say(f"report   {target}")
    folder = shlex.quote(str(run.folder))
    if load_settings(run.folder / "config.toml").train.objective == "masked":
        run.say(f"next     vitrail train DATA model.init={folder}")
    else:
        run.say(f"next     vitrail predict {folder} photo.jpg   or vitrail serve {folder}")


def say_skipped(run: Run, target: Path) -> None:
    """How many images could not be decoded, and where all are named; training named the first few
    that it met, so those of test are named here."""
    tested = run.evaluation("test").get("broken", [])
    for _, reason in tested[:NAMED_BROKEN]:
        run.say(f"skipped  {reason}")
    if n := len(run.info()["data"]["broken"]) + len(tested):
        run.say(f"skipped  {n:,} in all, which {target} lists")


def look_inside(run: Run, device: str) -> None:
    """What the model of a run looks at, for its report; nothing is lost where that fails."""
    try:
        data = training.open_parts(load_settings(run.folder / "config.toml"))
        split = next(name for name in ("test", "val", "train") if name in data.parts)
        model = load(run.folder).to(choose(device))
        # No longer than training took: a run of seconds is not worth many of them.
        seconds = min(SECONDS, float(run.info().get("seconds", 0.0)))
        summarise(model, data.part(split), split, run.folder / "inspection", seconds)
    except (VitrailError, RuntimeError, OSError) as error:
        run.say(f"inside   not looked at: {one_line(error)}")


def sweep(
    what: str | Path,
    settings: Settings = (),
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Grid on a held-out part of train, retrain on all of train, test once; mean and std."""
    order = understand(what, settings, lists=True)
    if order.folder is not None and out is None:
        raise VitrailError(f"{what} is a run folder; name a folder for the sweep with --out")
    folder, numbered = order.sweep_place(out)
    options: dict[str, Any] = {"seeds": seeds, "device": device, "facts": order.facts()}
    result = sweeping.sweep(order.config, folder, numbered=numbered, **options)
    folder = Path(result["out"])
    if is_main():
        for path in final_runs(result):
            if not Run(path).inspected():
                look_inside(Run(path), device)
            page.write(path)
        comparison.compare(final_runs(result), folder / "report.html", sweeps.tables(result))
    return {"name": order.title, **result, "report": str(folder / "report.html")}


def final_runs(result: Mapping[str, Any]) -> list[Path]:
    """The runs that a sweep tested: every seed, on every data set."""
    rows = result.get("tasks", [result])
    return [Path(seed["run"]) for row in rows for seed in row["seeds"]]


def compare(
    recipes: Sequence[str | Path],
    settings: Settings = (),
    *,
    seeds: int = 3,
    out: str | Path | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """The same sweep for several recipes, and one page with all of them side by side.

    Without `out`, runs/comparison, or the next number; the same comparison is continued.
    """
    names = {str(recipe): runs.name_of(str(recipe).removesuffix(".toml"), ()) for recipe in recipes}
    orders = {names[recipe]: understand(recipe, settings, lists=True) for recipe in names}
    place = Path(out) if out else comparison_place(orders)
    results = [
        sweep(recipe, settings, seeds=seeds, out=place / names[str(recipe)], device=device)
        for recipe in recipes
    ]
    finals = [run for result in results for run in final_runs(result)]
    target = place / "report.html"
    if is_main():
        shown = [table for one in results for table in sweeps.tables(one, one["name"])]
        comparison.compare(finals, target, shown)
    return {"sweeps": results, "report": str(target)}


def evaluate(
    model: str | Path | Classifier,
    data: str | Path,
    *,
    split: str = "",
    labels: str = "",
    batch: int = 64,
    workers: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Top-1, top-5, per-class figures, confusion and calibration on every image of a split that the
    model did not learn from.

    `split` is train, val, test or all; by default test of the data that the model was trained on,
    all of a folder that it never saw. `labels` (imagenet, real, objectnet, objectnet-unmasked) asks
    a model of ImageNet's classes about other labels or pictures. The result of a run is also kept
    in its folder.
    """
    with devices(device, "auto") as where:
        loaded = (model if isinstance(model, Classifier) else load(model)).to(where.device)
        options: dict[str, Any] = {
            "model_name": str(model) if isinstance(model, (str, Path)) else type(model).__name__,
            "batch": batch,
            "precision": where.precision,
            "workers": workers,
        }
        if labels:
            options["split"] = split or "test"
            with count_progress("evaluating", where.main) as advance:
                result = variants.evaluate(loaded, data, labels, progress=advance, **options)
        else:
            result = evaluate_part(loaded, data, split, where.main, options)
        split = result["split"]
        # What came with the package says how good it is, and is not written to.
        apart = isinstance(model, Classifier) or model == BUILTIN.name
        run = None if apart else runs.run_of(Path(model))
        if run is not None and where.main:
            # Another data set's figures stand beside the run's own, not in their place.
            learnt = load_settings(run.folder / "config.toml").data.source
            own = same_data(learnt, data) and not labels
            other = f"{Path(str(data)).name}-{labels or split}"
            try:
                run.write_evaluation(split if own else runs.name_of(other, ()), result)
            except FailureError as error:
                say(f"the result is not kept: {error}")
    return result


def evaluate_part(
    model: Classifier, data: str | Path, split: str, main: bool, options: Mapping[str, Any]
) -> dict[str, Any]:
    """A model on its own classes; the first lines say which images are measured."""
    part = part_of(model, data, split)
    source, absent = among_classes(part.source, model.labels)
    if main:
        say(f"images   {part.note}")
    if absent and main:
        classes = len(source.labels)
        say(f"classes  {classes - len(absent)} of {classes}: {data} has no {listed(absent)}")
    with (
        count_progress(f"evaluating {part.split}", main) as advance,
        cached(model, options["precision"], cache()) as asked,
    ):
        result = classify.evaluate(
            asked, source, data=str(data), split=part.split, progress=advance, **options
        )
    return result | {"left_out": part.left_out, "absent": list(absent)}


def inspect(
    model: str | Path | Classifier,
    images: Picture | Sequence[Picture] = (),
    *,
    out: str | Path,
    layers: Sequence[int] | None = None,
    size: int | tuple[int, int] | None = None,
    target: str | int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Filters, positions, attention distance, rollout and features as pictures in a folder.

    `layers`, counted from 0 or back from -1, are those whose heads are shown; `target` is the class
    of gradient-weighted rollout, the model's own answer by default.
    """
    pictures = [images] if isinstance(images, Picture) else list(images)
    loaded = model if isinstance(model, Classifier) else load(model, size=size)
    asked = inspector(
        loaded, layers=layers, size=None if size is None else as_size(size), target=target
    )
    with devices(device, "float32") as where, count_progress("inspecting", where.main) as advance:
        loaded.to(where.device)
        return inspecting.inspect(asked, pictures, Path(out), advance)


def fewshot(
    model: str | Path | Classifier,
    data: str | Path,
    *,
    shots: Sequence[int] = (1, 5, 10, 25),
    seeds: int = 3,
    ridges: Sequence[float] = (few.RIDGE,),
    split: str = "",
    device: str = "auto",
) -> dict[str, Any]:
    """Closed-form linear accuracy on frozen features, after a few pictures of each class of train.

    The split is chosen as in `evaluate`. On train itself, and on all of a folder, it is asked about
    the pictures that were not shown.
    """
    few.check(shots, seeds, ridges)
    with devices(device, "auto") as where:
        loaded = (model if isinstance(model, Classifier) else load(model)).to(where.device)
        part = part_of(loaded, data, split)
        split, alone = part.split, part.split in ("train", "all")
        if where.main:
            say(f"images   {part.note}")
        parts = {split: part.source}
        if not alone:
            parts["train"] = part_of(loaded, data, "train").source
        options: dict[str, Any] = {
            "precision": where.precision,
            "workers": cores() if where.device.type == "cuda" else 0,
            "kept": kept_features(loaded, where.precision, cache()),
        }
        found = {}
        for name, source in parts.items():
            with count_progress(f"features of {name}", where.main) as advance:
                found[name] = extract(loaded, source, **options, progress=advance)
    results = few.fewshot(
        found[split if alone else "train"],
        None if alone else found[split],
        classes=len(part.source.labels),
        shots=shots,
        seeds=seeds,
        ridges=ridges,
    )
    broken = [list(pair) for features in found.values() for pair in features.broken]
    return {"results": results, "split": split, "data": str(data), "broken": broken}


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
        return comparison.compare(paths, Path(out or "report.html"))
    own = out is None and paths[0] != shipped
    return page.write(paths[0], None if own else Path(out or "report.html"))


def demo(out: str | Path = "runs/demo") -> Run:
    """The whole story on embedded data: a ViT learns handwritten digits on a CPU."""
    import shutil

    folder = Path(out)
    before = Run(folder).info()
    if before.get("recipe") == "digits/vit" and " demo" in before.get("command", ""):
        shutil.rmtree(folder)  # the last demo's
    say("A small ViT learns 8 × 8 handwritten digits (scikit-learn's), on this machine's CPU.")
    return train("digits/vit", out=folder, device="cpu")
