"""`vitrail evaluate`: how good a model is on images that it did not learn from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail import runs
from vitrail.config import load_config
from vitrail.console import count_progress, say
from vitrail.data.dataset import listed
from vitrail.data.opening import same_data
from vitrail.devices import devices
from vitrail.errors import FailureError
from vitrail.evaluation import classify, variants
from vitrail.evaluation.features import cached
from vitrail.evaluation.matching import among_classes
from vitrail.evaluation.parts import part_of
from vitrail.files import cache_folder
from vitrail.model import Classifier
from vitrail.weights.load import load
from vitrail.weights.published import BUILTIN


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
        run = None if apart else runs.find_run(Path(model))
        if run is not None and where.main:
            # Another data set's figures stand beside the run's own, not in their place.
            learned = load_config(run.folder / "config.toml").data.source
            own = same_data(learned, data) and not labels
            other = f"{Path(str(data)).name}-{labels or split}"
            try:
                run.write_evaluation(split if own else runs.run_name(other, ()), result)
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
        cached(model, options["precision"], cache_folder()) as asked,
    ):
        result = classify.evaluate(
            asked, source, data=str(data), split=part.split, progress=advance, **options
        )
    return result | {"left_out": part.left_out, "absent": list(absent)}
